"""The chat templates of popular models, and the texts that transformers renders with each.

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
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather \"now\" in a city.", "parameters": {
        "type": "object", "properties": {
            "city": {"type": "string", "description": "As in München"},
            "days": {"type": "integer", "minimum": 1}, "unit": {"type": "string", "enum": ["°C", "°F"]},
        }, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tells the time.",
                                          "parameters": {"type": "object", "properties": {}}}}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


QUESTION = {"role": "user", "content": "Is it warm in Paris & Rome?"}
CALLS = [call("a23456789", "get_weather", {"city": "Paris", "days": 1}),
         call("b23456789", "get_weather", {"city": "Rome <it>", "unit": "°C"})]
ANSWERS = [{"role": "tool", "name": "get_weather", "tool_call_id": "a23456789", "content": "{\"degrees\": 21.5}"},
           {"role": "tool", "name": "get_weather", "tool_call_id": "b23456789", "content": "warm"}]
# Chats with tools, and with other features.
MORE = {
    "tools": {"messages": [QUESTION], "tools": [WEATHER, CLOCK]},
    "tools and system": {"messages": [CHATS["system"][0], QUESTION], "tools": [WEATHER]},
    "one call": {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}, ANSWERS[0]],
                 "tools": [WEATHER]},
    "two calls": {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": CALLS}, *ANSWERS],
                  "tools": [WEATHER, CLOCK]},
    "calls and text": {"messages": [QUESTION, {"role": "assistant", "content": "I look.", "tool_calls": CALLS[:1]},
                                    ANSWERS[0], {"role": "assistant", "content": "Yes."},
                                    {"role": "user", "content": "And Rome?"}], "tools": [WEATHER]},
    "thought and call": {"messages": [QUESTION, {"role": "assistant", "content": "", "reasoning_content": "Look it up.",
                                              "tool_calls": CALLS[:1]}, ANSWERS[0]], "tools": [WEATHER]},
    "no thinking": {"messages": [QUESTION], "variables": {"enable_thinking": False}},
    "thinking": {"messages": [QUESTION], "variables": {"enable_thinking": True}},
    "continued": {"messages": [*CHATS["one"], {"role": "assistant", "content": "Well, "}], "continue": True},
    "continued thought": {"messages": [*CHATS["one"], {"role": "assistant", "content": " <think>\nso"}],
                          "continue": True},
}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
CASES = [{"name": name, "messages": messages, "prompt": prompt} for name, messages in CHATS.items()
         for prompt in [True, False]]
CASES += [{"name": name, **case, "prompt": "continue" not in case} for name, case in MORE.items()]
expected = {}
for path in sorted(pathlib.Path("templates").glob("*.jinja")):
    # `methods.jinja` reverses each content, and fails in the engine for messages without content.
    for case in CASES[:len(CHATS) * 2] if path.stem == "methods" else CASES:
        try:
            text = tokenizer.apply_chat_template(
                case["messages"], tools=case.get("tools"), chat_template=path.read_text(), tokenize=False,
                add_generation_prompt=case["prompt"], continue_final_message=case.get("continue", False),
                **case.get("variables", {}))
        except (TemplateError, ValueError, TypeError) as error:
            text = {"error": str(error)}
        expected.setdefault(path.stem, []).append({**case, "text": text})
pathlib.Path("templates/expected.json").write_text(json.dumps(expected, indent=1))
