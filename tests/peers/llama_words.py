"""A pytest plugin for llama.cpp's tests. It replaces the words and token counts that depend on their model by those of
the served model. It also sends, in each request, flags that are request fields here.

Their model, of 260,000 parameters, writes stories of a girl and her toys. A pattern for those words matches any words
here. The number of prompt tokens in a test's table is recomputed with the tokenizer of the served model.
"""

import re

from requests.structures import CaseInsensitiveDict
from smollm2 import tokenizer

# A pattern with this beginning matches words, whatever follows.
WORDS = re.compile(r"\([A-Za-z|]+\)\+")


def pytest_configure():
    import utils

    exact = utils.match_regex

    def match_words(regex, text):
        # Structures and templates do not depend on the model: their patterns stay unchanged.
        is_words = WORDS.match(regex) or not set(regex) & set('"\\{}[]<')
        return bool(text) if is_words else exact(regex, text)

    utils.match_regex = match_words
    utils.ServerProcess.make_request = with_fields(utils.ServerProcess.make_request)
    utils.ServerProcess.make_stream_request = with_stream_fields(utils.ServerProcess.make_stream_request)
    utils.ServerPreset.load_all = staticmethod(lambda: None)


# The fields of an answer's length, by which a request overrides `--n-predict`.
LENGTHS = {"n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"}
# The pages that write an answer, by the end of their paths.
WRITING = ("/completion", "/completions", "/infill", "/messages", "/responses")


def with_flags(self, path, data):
    """Returns the body of a request with the flags of their server that are fields of a request here."""
    if not isinstance(data, dict):
        return data
    fields = {"verbose": True} if self.debug else {}
    if path.endswith(WRITING):
        fields["temperature"] = self.temperature
        if self.n_predict and self.n_predict > 0 and not LENGTHS & data.keys():
            fields["max_output_tokens" if path.endswith("/responses") else "max_tokens"] = self.n_predict
    return {**fields, **data}


def with_fields(make_request):
    def request(self, method, path, data=None, *args, **kwargs):
        answer = make_request(self, method, path, with_flags(self, path, data), *args, **kwargs)
        # Header names are case-insensitive, but the tests' own dictionary of them is not.
        answer.headers = CaseInsensitiveDict(answer.headers)
        return answer

    return request


def with_stream_fields(make_stream_request):
    def request(self, method, path, data=None, *args, **kwargs):
        return make_stream_request(self, method, path, with_flags(self, path, data), *args, **kwargs)

    return request


def pytest_collection_modifyitems(items):
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "n_prompt" in params:
            recount(params)
        if "batch_count" in params and not params["reuse_cache"]:
            params["batch_count"] = n_reports(params["n_batch"])


# The messages in the test of a prompt's progress.
PROGRESS_MESSAGES = [{"role": "user", "content": "This is a test" * 10}]


def n_reports(n_batch):
    """Returns the number of progress reports: one before all batches, and one after each."""
    n_prompt = len(tokenizer().apply_chat_template(PROGRESS_MESSAGES, add_generation_prompt=True)["input_ids"])
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
