"""A pytest plugin for vLLM's tests: `tests.utils` with a Lockstep server, and stand-ins for modules that exist only in
vLLM's own process.

A stand-in is an empty module or class: enough to import a test file. A test that starts a server is a server test.
"""

import copy
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from unittest.mock import MagicMock

import anthropic
import openai
import outcomes
import pytest
import transformers
from server import MODEL, STOP_SECONDS, Server
from smollm2 import tokenizer

ROOTS = {"vllm", "torch", "torchvision", "lm_eval", "fastapi", "starlette", "model_hosting_container_standards", "PIL"}
ROOTS |= {"openai_harmony", "mistral_common", "msgspec", "soundfile", "librosa", "uvicorn"}

# vLLM's flags that Lockstep has, by their number of values.
FLAGS = {
    "--max-model-len": 1, "--max-num-seqs": 1, "--served-model-name": 1, "--chat-template": 1, "--api-key": 1,
    "--tool-call-parser": 1, "--reasoning-parser": 1, "--enable-auto-tool-choice": 0,
    "--trust-request-chat-template": 0, "--max-num-batched-tokens": 1, "--seed": 1, "--default-chat-template-kwargs": 1,
    "--drain-seconds": 1, "--enable-per-request-metrics": 0, "--root-path": 1,
}
# Flags with another name here.
RENAMED = {"--shutdown-timeout": "--drain-seconds"}
# vLLM's flags that are fields of a request here, and those fields.
FIELDS = {
    "--return-tokens-as-token-ids": {"return_tokens_as_token_ids": True},
    "--enable-force-include-usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
# vLLM's flags that change nothing here: their number of values, and why. A test with any other flag fails.
WITHOUT_EFFECT = {
    "--dtype": (1, "the served model has its own types"),
    "--load-format": (1, "the served model has its own weights"),
    "--model": (1, "the served model is in its place"),
    "--trust-remote-code": (0, "a model here has no code"),
    "--hf-overrides": (1, "`stand_ins.py` writes them into the stand-in's config"),
    "--runner": (1, "a server has all pages that its model can answer"),
    "--port": (1, "the server gets a free one"),
    "--enforce-eager": (0, "how kernels are started changes no answer"),
    "--attention-backend": (1, "which kernels compute changes no page"),
    "--gpu-memory-utilization": (1, "the model runs on a CPU"),
    "--enable-chunked-prefill": (0, "prompts are always cut into chunks"),
    "--enable-prefix-caching": (0, "it is always on"),
    "--no-enable-prefix-caching": (0, "an answer has the same bits with a cache and without"),
    "--api-server-count": (1, "one process answers all connections; no page shows it"),
    "--enable-prompt-tokens-details": (0, "it is always on"),
    "--enable-request-id-headers": (0, "it is always on"),
    "--enable-server-load-tracking": (0, "it is always on"),
    "--enable-scale-out": (0, "its pages are always served"),
    "--enable-tokenizer-info-endpoint": (0, "its page is always served"),
    "--skip-tokenizer-init": (0, "the page returns tokens all the same, and their text beside them"),
    "--show-hidden-metrics-for-version": (1, "no metric is hidden"),
    "--structured-outputs-config.backend": (1, "there is one way to compile grammars"),
    "--max-logprobs": (1, "the limit stays at 20: a test that needs more fails by itself"),
    "--enable-lora": (0, "tests that name an adapter are left out, and the others use the model alone"),
    "--lora-modules": (None, "as --enable-lora"),
    "--max-lora-rank": (1, "as --enable-lora"),
    "--max-loras": (1, "as --enable-lora"),
    "--max-cpu-loras": (1, "as --enable-lora"),
}
# Flags that change nothing with this one value.
WITHOUT_EFFECT_AT = {"--data-parallel-size": "1"}
# vLLM's variables of the environment: ours in place of it, or None with the reason why it changes nothing.
VARIABLES = {
    "VLLM_API_KEY": ("LOCKSTEP_API_KEY", ""),
    "VLLM_ENABLE_RESPONSES_API_STORE": (None, "responses are always stored"),
    "VLLM_SYSTEM_START_DATE": (None, "only the messages of gpt-oss have the date"),
    "VLLM_SERVER_DEV_MODE": (None, "a test of a page for developers fails by itself"),
}
# Tests that need the served model's own template where its name would give them another one: behind the template of
# Qwen3 its tokenizer has no single token for a label.
WITH_OWN_TEMPLATE = ["test_decisions_e2e.py", "test_structured_decisions_e2e.py"]
# The served model's template has no tools and no reasoning. llama.cpp's folder has the template of the tests' model.
TEMPLATES = {
    "Qwen/Qwen3": "Qwen-Qwen3-0.6B.jinja",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
}
# Requests without a seed get the same answer in every run.
SEED = "1"
# vLLM has no limit; this is the largest value here.
BODY_MAX = "64MiB"
# The longest context that the model supports.
CONTEXT_MAX = 8192


class Nothing(type):
    """A class with attributes that are functions that return False, like those of a missing platform."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False

    def __radd__(cls, others):
        """A missing platform adds no flags to the others."""
        return others


class StandIn(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = Nothing(name, (MagicMock,), {})
        setattr(self, name, made)
        return made


class ModelConfig:
    """The interface of the model that a test uses in its own process."""

    def __init__(self, **_):
        pass

    def get_vocab_size(self):
        return len(tokenizer())


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ROOTS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ == "vllm.tokenizers":
            module.get_tokenizer = tokenizer_of
        if module.__name__ == "vllm":
            module.version = importlib.import_module("vllm.version")
        if module.__name__ == "vllm.version":
            module.__version__ = "0.33.0"
            module._prev_minor_version = lambda: "0.32"
        if module.__name__ == "vllm.envs":
            # A stand-in is true, and would skip the tests that another front end of vLLM does not support.
            module.VLLM_USE_RUST_FRONTEND = False
        if module.__name__ == "vllm.config":
            module.ModelConfig = ModelConfig
        if module.__name__.endswith(".weight_utils"):
            module.download_weights_from_hf = lambda name, *args, **kwargs: name


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"
    # This server listens on no Unix socket, and hides no metrics.
    uds = None
    show_hidden_metrics = False

    def __init__(self, model, vllm_serve_args, *, env_dict=None, **_):
        flags = {"--seed": [SEED], "--served-model-name": [model], "--max-body-bytes": [BODY_MAX], **template(model)}
        flags.update(translated(vllm_serve_args))
        line = [part for name, values in flags.items() for part in [name, *values]]
        self.server = Server(line, variables(env_dict or {}), model=served(model))
        self.host, self.port, self.proc = self.server.host, self.server.port, self.server.process
        self.fields = {name: value for flag in vllm_serve_args for name, value in FIELDS.get(flag, {}).items()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop()

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _options(self, options, path=""):
        options.setdefault("timeout", 600)
        return {"base_url": self.url_for(path), "api_key": self.DUMMY_API_KEY, "max_retries": 0, **options}

    def get_client(self, **options):
        return self._with_fields(openai.OpenAI(**self._options(options, "v1")))

    def get_async_client(self, **options):
        return self._with_fields(openai.AsyncOpenAI(**self._options(options, "v1")))

    def _with_fields(self, client):
        """Returns a client that sends the fields that are flags of vLLM's server."""
        build = client._build_request

        def built(options, **kwargs):
            body = options.json_data
            if isinstance(body, dict):
                fields = {n: v for n, v in self.fields.items() if n != "stream_options" or body.get("stream")}
                options.json_data = {**fields, **body}
            return build(options, **kwargs)

        client._build_request = built
        return client

    def _get_process_termination_timeout(self):
        return STOP_SECONDS

    def get_client_anthropic(self, **options):
        return anthropic.Anthropic(**self._options(options))

    def get_async_client_anthropic(self, **options):
        return anthropic.AsyncAnthropic(**self._options(options))


def served(_model):
    """Returns what the server serves where a test names this model."""
    return MODEL


def template(model):
    if any(file in os.environ.get("PYTEST_CURRENT_TEST", "") for file in WITH_OWN_TEMPLATE):
        return {}
    files = [file for name, file in TEMPLATES.items() if model.startswith(name)]
    return {"--chat-template": [os.path.join(os.environ["PEER_TEMPLATES"], files[0])]} if files else {}


def tokenizer_of(model=None, *_, tokenizer_name=None, **__):
    """Returns the tokenizer of the served model, with the template that it is served with."""
    own = copy.copy(tokenizer())
    for path in template(model or tokenizer_name).get("--chat-template", []):
        with open(path, encoding="utf-8") as file:
            own.chat_template = file.read()
    return own


def translated(arguments):
    """Returns Lockstep's flags for those of `vllm serve`; of a repeated flag the last one counts.

    Raises an error at a flag that has no meaning here.
    """
    rest, flags = [part for one in map(str, arguments) for part in split(one)], {}
    while rest:
        name = rest.pop(0)
        name = name.replace("_", "-") if name.startswith("--") else name
        name = RENAMED.get(name, name)
        if name in FLAGS:
            flags[name], rest = rest[:FLAGS[name]], rest[FLAGS[name]:]
        elif rest[:1] == [WITHOUT_EFFECT_AT.get(name)]:
            del rest[0]
        elif name in WITHOUT_EFFECT:
            n, _ = WITHOUT_EFFECT[name]
            # A list of values ends at the next flag.
            n = next((i for i, one in enumerate(rest) if one.startswith("--")), len(rest)) if n is None else n
            del rest[:n]
        elif name not in FIELDS:
            raise ValueError(f"vLLM's flag {name} is not served")
    if "{" in flags.get("--chat-template", [""])[0]:
        flags["--chat-template"] = [template_file(flags["--chat-template"][0])]
    if "--max-model-len" in flags:
        flags["--max-model-len"] = [str(min(int(flags["--max-model-len"][0]), CONTEXT_MAX))]
    return flags


def variables(environment):
    """Returns the environment with Lockstep's variables for vLLM's. Raises an error at one without a meaning here."""
    own = {name: value for name, value in environment.items() if not name.startswith("VLLM_")}
    for name in environment.keys() - own.keys():
        if name not in VARIABLES:
            raise ValueError(f"vLLM's variable {name} is not served")
        if VARIABLES[name][0]:
            own[VARIABLES[name][0]] = environment[name]
    return own


def template_file(source):
    path = os.path.join(os.environ["PEER_LOGS"], "template.jinja")
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    return path


def split(argument):
    return argument.split("=", 1) if argument.startswith("--") and "=" in argument else [argument]


@pytest.fixture
def local_asset_server():
    """Tests of images need it, which do not count; other tests name it too."""


def pytest_collection_modifyitems(items):
    """Keeps the tests that call a server, and counts the others."""
    callers = [item for item in items if calls_server(item)]
    for item in items:
        if item not in callers:
            outcomes.write({"test": item.nodeid, "when": "collect", "outcome": "no server", "why": ""})
    items[:] = callers


def calls_server(item):
    has_fixture = any("server" in name or "client" in name for name in item.fixturenames if name != "request")
    # A function that a stand-in has decorated is a stand-in too, and no server test.
    code = getattr(item.function, "__code__", None)
    names = code.co_names if type(code) is types.CodeType else ()
    return has_fixture or any(name.startswith("Remote") for name in names)


def stand_in():
    """Installs the stand-ins before any conftest is read, because conftests import them."""
    sys.meta_path.insert(0, Finder())
    utils = StandIn("tests.utils")
    utils.RemoteOpenAIServer = utils.RemoteLaunchRenderServer = utils.RemoteVLLMServer = RemoteOpenAIServer
    utils.multi_gpu_only = lambda **_: pytest.mark.skip("needs two GPUs")
    sys.modules["tests.utils"] = utils
    sys.modules["tests.conftest"] = StandIn("tests.conftest")
    transformers.AutoTokenizer.from_pretrained = staticmethod(tokenizer_of)


stand_in()
