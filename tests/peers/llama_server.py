#!/usr/bin/env python3
"""Runs where llama.cpp's tests start `llama-server`: becomes a Lockstep server with flags of the same meaning."""

import json
import os
import sys

from server import command

# The flags of llama-server that take no value; all other flags take one.
WITHOUT_VALUE = {
    "--offline", "--cont-batching", "--embedding", "--reranking", "--metrics", "--kv-unified", "--swa-full", "--slots",
    "--no-slots", "--verbose", "--context-shift", "--no-ui", "--no-models-autoload", "--jinja", "--no-jinja",
    "--no-mmproj", "--no-cache-idle-slots", "--ui-mcp-proxy", "--backend_sampling",
}


# The flags with a meaning here.
TRANSLATED = {
    "--host", "--port", "--alias", "--metrics", "--slots", "--no-slots", "--no-ui", "--tags", "--batch-size",
    "--parallel", "--ctx-size", "--kv-unified", "--api-key", "--chat-template-file", "--reasoning", "--seed",
    "--cors-origins",
}
# The flags that change nothing here, and why. A test with any other flag fails.
WITHOUT_EFFECT = {
    "--temp": "`llama_words.py` sends it in each request",
    "--n-predict": "`llama_words.py` sends it in each request",
    "--verbose": "`llama_words.py` sends it in each request",
    "--model": "the served model is in its place",
    "--model-url": "the served model is in its place",
    "--hf-repo": "the served model is in its place",
    "--hf-file": "the served model is in its place",
    "--offline": "the served model is a local file",
    "--cont-batching": "it is always on",
    "--jinja": "it is always on",
    "--no-jinja": "the served model's template is Jinja; a test that needs another one fails by itself",
    "--embedding": "a server has all pages that its model can answer",
    "--ubatch-size": "how a batch is cut for kernels changes no answer",
    "--threads": "it changes the speed only",
    "--n-gpu-layers": "the model runs on a CPU",
    "-fa": "which kernels compute changes no page",
    "--swa-full": "the served model has no sliding window",
    "--backend_sampling": "where a token is drawn changes no answer",
}
# Flags that change nothing with this one value, and why.
WITHOUT_EFFECT_AT = {
    "--chat-template": ("chatml", "it is the template of the served model"),
    "--pooling": ("mean", "it is the way of a chat model"),
}


def read(command_line):
    values, rest = {}, list(command_line)
    while rest:
        name = rest.pop(0)
        values[name] = True if name in WITHOUT_VALUE else rest.pop(0)
    same = {name for name, (value, _) in WITHOUT_EFFECT_AT.items() if values.get(name) == value}
    unknown = values.keys() - TRANSLATED - WITHOUT_EFFECT.keys() - same
    if unknown:
        sys.exit(f"llama-server's {', '.join(sorted(unknown))} is not served")
    return values


# The template variable that `--reasoning` sets.
ENABLE_THINKING = {"on": True, "auto": True, "off": False}


def flags(values):
    """Returns Lockstep's flags for llama-server's."""
    # llama-server has one model and ignores the name in requests. Its names are a sorted set; the first is the model's.
    names = sorted(set((values.get("--alias") or "default").split(",")))
    own = ["--served-model-name", ",".join([*names, "*"])]
    # In llama-server the first two pages are off by default, and the page for browsers is on.
    off = {"--no-metrics": "--metrics" not in values, "--no-slots": "--slots" not in values,
           "--no-ui": "--no-ui" in values}
    own += [flag for flag, is_off in off.items() if is_off]
    if "--tags" in values:
        own += ["--tags", values["--tags"]]
    if "--batch-size" in values:
        own += ["--max-chunk-tokens", values["--batch-size"]]
    n_slots = int(values.get("--parallel") or 1)
    if "--ctx-size" in values:
        # In llama-server the slots share the context; with one cache for all, each may use all of it.
        share = 1 if "--kv-unified" in values else n_slots
        own += ["--context", str(int(values["--ctx-size"]) // share)]
    own += ["--max-running", str(max(n_slots, 2))]
    if "--api-key" in values:
        own += ["--api-key", values["--api-key"]]
    if "--chat-template-file" in values:
        own += ["--chat-template", values["--chat-template-file"]]
    if "--reasoning" in values:
        variables = {"enable_thinking": ENABLE_THINKING[values["--reasoning"]]}
        own += ["--default-chat-template-kwargs", json.dumps(variables)]
    if "--seed" in values:
        own += ["--seed", values["--seed"]]
    if "--cors-origins" in values:
        own += ["--allowed-origins", values["--cors-origins"]]
    return own


if __name__ == "__main__":
    arguments = read(sys.argv[1:])
    line = command(arguments["--host"].split(",")[0], arguments["--port"], flags(arguments))
    os.execv(line[0], line)
