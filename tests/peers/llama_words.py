"""A pytest plugin for llama.cpp's tests: what they know of their model's words and tokens becomes what this one has,
and what is a flag there and a field here is said in each request.

Their model, of 260,000 parameters, writes stories of a girl and her toys. A test that looks for those words looks here
for any; a number of tokens of a prompt in a test's table is counted anew, by the tokenizer of the model that is served.
"""

import re

from requests.structures import CaseInsensitiveDict
from smollm2 import tokenizer

# A pattern that begins so is of words, whatever else may come.
WORDS = re.compile(r"\([A-Za-z|]+\)\+")


def pytest_configure():
    import utils

    exact = utils.match_regex

    def match_words(regex, text):
        # Structures and templates are the server's own work: their patterns hold as they stand.
        is_words = WORDS.match(regex) or not set(regex) & set('"\\{}[]<')
        return bool(text) if is_words else exact(regex, text)

    utils.match_regex = match_words
    utils.ServerProcess.make_request = asking(utils.ServerProcess.make_request)
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def asking(make_request):
    def asked(self, method, path, data=None, *args, **kwargs):
        # A server's `--verbose` is here each request's `verbose`.
        if self.debug and isinstance(data, dict):
            data = {"verbose": True, **data}
        answer = make_request(self, method, path, data, *args, **kwargs)
        # Names of headers are the same in any case, as in what the tests keep of them they are not.
        answer.headers = CaseInsensitiveDict(answer.headers)
        return answer

    return asked


def pytest_collection_modifyitems(items):
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "n_prompt" in params:
            recount(params)
        if "batch_count" in params and not params["reuse_cache"]:
            params["batch_count"] = n_reports(params["n_batch"])


# What the test of a prompt's progress asks.
WATCHED = [{"role": "user", "content": "This is a test" * 10}]


def n_reports(n_batch):
    """How often its progress is told: before all, and after each batch."""
    n_prompt = len(tokenizer().apply_chat_template(WATCHED, add_generation_prompt=True)["input_ids"])
    return 1 + -(-n_prompt // n_batch)


def recount(params):
    if "prompt" in params and isinstance(params["prompt"], str):
        params["n_prompt"] = len(tokenizer().encode(params["prompt"]))
    elif "user_prompt" in params:
        content = params["user_prompt"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        chat = [("system", params["system_prompt"]), ("user", content)]
        messages = [{"role": role, "content": text} for role, text in chat]
        params["n_prompt"] = len(tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
