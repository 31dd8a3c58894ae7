"""Writes smollm2.json: the answers of transformers to 20 prompts with the default model's dequantized weights, in f32.

`python make_smollm2.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf`. The prompts' ids are made here too, by a tokenizer and a
chat template that are built from the GGUF's own fields, so the file also checks a tokenizer and a template.
"""

import hashlib
import sys
import time
from pathlib import Path

import gguf
import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
import torch

import reference

N_GREEDY = 64
TOP_N = 2
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LONG = (
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the sea, the ships that "
    "passed, and how much oil the lamp had burned. "
)


def chat(*turns, system=None):
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


PROMPTS = [
    {"text": "The capital of France is"},
    {"text": "Once upon a time"},
    {"text": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n"},
    {"text": "Q: What is 17 + 25?\nA:"},
    {"text": "1, 2, 3, 4, 5, 6,"},
    {"text": "A"},
    {"text": "Die Katze sitzt auf dem Tisch und"},
    {"text": "  \n\tindented, with   many  spaces\r\n\r\n"},
    {"text": "naïve café — “quotes”, 東京, Привет, 🙂🏳️‍🌈 and 12345.678e-9"},
    {"text": "<html>\n<head><title>Home</title></head>\n<body>\n"},
    {"text": LONG * 12},
    chat("What is the capital of France?"),
    chat("Write a haiku about the sea."),
    chat("Explain in one sentence why the sky is blue."),
    chat("List three fruits, one on each line.", system="You answer in as few words as you can."),
    chat("My name is Ada.", "Hello Ada, how can I help you?", "What is my name?"),
    chat("Translate to Spanish: Good morning, my friend."),
    chat("Write a Python function that reverses a string."),
    chat("Summarize this: " + LONG * 20),
    chat("Count from 1 to 20.", system="You are a patient teacher."),
]


def main(path):
    reference.configure_torch()
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert sha256 == SHA256, f"{path} is another file: {sha256}"
    encode, template = from_gguf(path)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_config(model.config)
    began = time.monotonic()
    cases = []
    for number, prompt in enumerate(PROMPTS):
        text = prompt.get("text") or template.render(messages=prompt["messages"], add_generation_prompt=True)
        ids = encode(text)
        tokens, top, _ = reference.greedy(model, ids, N_GREEDY, TOP_N)
        rendered = {} if "text" in prompt else {"rendered": text}
        cases.append({"name": f"{number:02}"} | prompt | rendered | {"prompt": ids, "greedy": tokens, "top": top})
        gap = min(step[0][1] - step[1][1] for step in top)
        print(f"{number:02}: {len(ids)} tokens, closest two logits {gap:.4f} apart, {time.monotonic() - began:.0f} s")
    head = {"model": path.name, "sha256": sha256, "versions": reference.versions()}
    reference.write(reference.HERE / "smollm2.json", head, cases)


def check_config(config):
    """Checks that transformers read the GGUF correctly: a wrong theta would make a wrong reference, silently."""
    theta = config.rope_parameters["rope_theta"]
    seen = (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, config.intermediate_size, theta)
    assert seen == (576, 30, 3, 1536, 100000.0), seen
    assert config.tie_word_embeddings and abs(config.rms_norm_eps - 1e-5) < 1e-9


def from_gguf(path):
    fields = gguf.GGUFReader(path).fields
    read = lambda name: fields[name].contents()  # noqa: E731
    tokens, kinds = read("tokenizer.ggml.tokens"), read("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # pre = smollm: every digit on its own, then GPT-2's words.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind == control])
    assert tokenizer.get_vocab_size() == len(tokens)

    def encode(text):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        return ids

    # The same environment as transformers uses for templates.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return encode, environment.from_string(read("tokenizer.chat_template"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
