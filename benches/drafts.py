#!/usr/bin/env python3
"""Compares speculation with its absence, and shows that both give the same text.

    python3 benches/drafts.py target/release/lockstep [--model smollm2] [--rounds 5] [--threads 1] [-- --tp 2]

Two servers run on the same cores, one with `--speculation auto` and one with `off`, and each prompt goes to both in
turns. A third server with `off` is the control. The flags behind `--` go to all of them. The output is a table of the
quotients of tokens per second: median and range over rounds.
"""

import argparse
import contextlib
import json
import sys
import time
import urllib.request

import quiet

TOKENS = 160
REQUEST_S = 600

STORY = ("The mill stood at the edge of the village, where the river bends around three old willows. Every morning the "
         "miller opened the sluice, listened to the wheel, and wrote the height of the water into a small green book. "
         "On market days the farmers came with their carts, and the road was white with flour until the evening rain.")
RECORDS = json.dumps([{"id": n, "name": name, "city": city, "active": n % 2 == 0} for n, (name, city) in enumerate(
    [("Ada", "London"), ("Kurt", "Brno"), ("Emmy", "Erlangen"), ("Alan", "Wilmslow"), ("Grace", "Arlington")], 1)])
CODE = '''def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    middle = mean(values)
    total = 0
    for value in values:
        total += (value - middle) ** 2
    return total / len(values)
'''
# For each kind of text, prompts whose answers are of that kind.
PROMPTS = {
    "repeats": [f"{STORY}\n\n{STORY}\n\nWrite this text once more.",
                f"{CODE}\nWrite this file again."],
    "JSON": [f"Write this JSON again with a field \"country\" in each object. Only JSON:\n\n{RECORDS}",
             f"Return this JSON, sorted by name. Only JSON:\n\n{RECORDS}"],
    "code": [f"Add a docstring to each function and return the whole file:\n\n```python\n{CODE}```",
             f"Rename `values` to `numbers` and return the whole file:\n\n```python\n{CODE}```"],
    "prose": ["Write a short story about a lighthouse keeper who finds a letter.",
              "Explain to a ten-year-old why the sky is blue and sunsets are red."],
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lockstep")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--clients", type=int, default=32, help="0 leaves out the load of many clients")
    parser.add_argument("--foreign-max", type=float, default=0.2)
    parser.add_argument("flags", nargs="*")
    return parser.parse_args()


def server(options, speculation):
    port = quiet.free_port()
    return quiet.Server([[
        options.lockstep, "serve", options.model, "--http", f"{quiet.LOOPBACK}:{port}", "--grpc",
        f"{quiet.LOOPBACK}:{quiet.free_port()}", "--threads", options.threads, "--context", "4096",
        "--speculation", speculation, *options.flags,
    ]], port, "/ready")


def answer(server, prompt):
    """Returns the text of an answer and its tokens per second."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
        reply = json.load(response)
    seconds = time.perf_counter() - began
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"] / seconds


def quotients(servers, kind, round_number):
    """Returns auto / off and control / off of one round, over all prompts of a kind."""
    totals = {name: 0.0 for name in servers}
    for number, prompt in enumerate(PROMPTS[kind]):
        # No server is always the first.
        first = (number + round_number) % len(servers)
        order = [*servers.items()][first:] + [*servers.items()][:first]
        answers = {name: answer(server, prompt) for name, server in order}
        if len({text for text, _ in answers.values()}) != 1:
            sys.exit(f"{kind}: the texts differ: {answers}")
        for name, (_, speed) in answers.items():
            totals[name] += 1 / speed
    return totals["off"] / totals["auto"], totals["off"] / totals["control"]


def loads(servers, options, seed):
    def speed(server):
        figures = quiet.load(options.lockstep, server.url, options.clients, 2 * options.clients, "128", "64", seed)
        return figures["output_tokens_per_s"]

    speeds = {name: speed(server) for name, server in servers.items()}
    return speeds["auto"] / speeds["off"], speeds["control"] / speeds["off"]


def main():
    options = arguments()
    print(quiet.machine())
    choices = {"off": "off", "auto": "auto", "control": "off"}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(options, choice)) for name, choice in choices.items()}
        for kind in PROMPTS:
            quotients(servers, kind, 0)
        for kind in PROMPTS:
            report(kind, [quiet.quietly(lambda: quotients(servers, kind, n), options.foreign_max)[0]
                          for n in range(options.rounds)])
        if options.clients:
            report(f"{options.clients} clients",
                   [quiet.quietly(lambda: loads(servers, options, 17 + n), options.foreign_max)[0]
                    for n in range(options.rounds)])


def report(kind, rounds):
    rounds = [pair for pair in rounds if pair]
    columns = zip(*rounds) if rounds else [[], []]
    auto, control = (quiet.spread(list(column), 3) for column in columns)
    print(f"{kind:<12} auto/off {auto}   control/off {control}", flush=True)


if __name__ == "__main__":
    main()
