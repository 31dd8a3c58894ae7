"""Writes beams.json: the beams of transformers after 20 prompts, of the default model's dequantized weights and of tiny
checkpoints, in f32.

`python make_beams.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf`. Random weights hardly ever end an answer, so two tokens
that beams often hold end those of tiny checkpoints.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import reference

FAMILIES = ["llama-f32-tied", "qwen3-moe", "gemma2", "lfm2"]
N_PROMPTS = 20
WIDTHS = [2, 4, 8]
# For a search: the number of tokens, transformers' `early_stopping`, and the length penalty.
RULES = [(12, False, 1.0), (12, True, 1.0), (16, "never", 0.5), (12, False, -1.0), (10, False, 2.0)]
DEFAULT_MODEL_TOKENS = 12


def search(model, prompt, width, rules, stop):
    tokens_max, early_stopping, length_penalty = rules
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=tokens_max,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        do_sample=False,
        eos_token_id=stop or None,
        pad_token_id=0,
        repetition_penalty=1.0,
        use_cache=True,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist()):
        tokens = sequence[len(prompt):]
        ends = [i for i, token in enumerate(tokens) if token in stop]
        answers.append({"tokens": tokens[: ends[0] + 1] if ends else tokens, "score": score})
    return answers


def frequent(model, prompts):
    """Returns two tokens that beams often have after their first."""
    seen = Counter()
    for prompt in prompts:
        for answer in search(model, prompt, 4, (8, False, 1.0), []):
            seen.update(answer["tokens"][2:])
    return [token for token, _ in seen.most_common(2)]


def search_all(model, name, prompts, rules_of, stop):
    cases = []
    for i, prompt in enumerate(prompts):
        for width in WIDTHS:
            rules = rules_of(i)
            answers = search(model, prompt, width, rules, stop)
            tokens_max, early_stopping, length_penalty = rules
            cases.append({
                "model": name, "prompt": prompt, "width": width, "tokens_max": tokens_max, "stop": stop,
                "early_stopping": early_stopping, "length_penalty": length_penalty, "answers": answers,
            })
    n_ended = sum(answer["tokens"][-1] in stop for case in cases for answer in case["answers"])
    print(f"{name}: {len(cases)} searches, {n_ended} answers end at {stop}")
    return cases


def main(path):
    reference.configure_torch()
    cases = []
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(
            reference.HERE / family, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        dice = random.Random(7)
        prompts = [[dice.randrange(model.config.vocab_size) for _ in range(3 + i)] for i in range(N_PROMPTS)]
        stop = frequent(model, prompts[:4])
        cases += search_all(model, family, prompts, lambda i: RULES[i % len(RULES)], stop)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    known = json.loads((reference.HERE / "smollm2.json").read_text())["cases"]
    rules = [(DEFAULT_MODEL_TOKENS, *rest) for _, *rest in RULES]
    stop = model.config.eos_token_id
    cases += search_all(model, "smollm2", [case["prompt"] for case in known], lambda i: rules[i % len(rules)], [stop])
    reference.write(reference.HERE / "beams.json", {"versions": reference.versions()}, cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
