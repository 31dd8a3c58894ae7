"""The chat templates of popular models, and what transformers renders with each.

    python make_templates.py     reads templates/*.jinja, writes templates/expected.json
"""
import json
import pathlib

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models

CHATS = {
    "one": [{"role": "user", "content": "Hi there"}],
    "system": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "What is 1 < 2 & 3?"}],
    "turns": [{"role": "user", "content": "  Hello  "}, {"role": "assistant", "content": "Hi! \"quoted\"\n"},
              {"role": "user", "content": "naïve 漢字 😀 <b>{{ x }}</b>"}],
    "thought": [{"role": "user", "content": "2+2?"}, {"role": "assistant",
    "content": "<think>\nsum\n</think>\n\nIt is 4."},
                {"role": "user", "content": "And 3+3?"}],
    "wrong": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
expected = {}
for path in sorted(pathlib.Path("templates").glob("*.jinja")):
    for name, messages in CHATS.items():
        for prompt in [True, False]:
            try:
                text = tokenizer.apply_chat_template(messages, chat_template=path.read_text(), tokenize=False,
                                                     add_generation_prompt=prompt)
            except TemplateError as error:
                text = {"error": str(error)}
            expected.setdefault(path.stem, []).append({"messages": messages, "prompt": prompt, "text": text})
pathlib.Path("templates/expected.json").write_text(json.dumps(expected, indent=1))
