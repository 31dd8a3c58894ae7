"""Writes tiny random Llama checkpoints, and beside each the results of transformers in f32.

Run it anywhere: `python make_llama.py`. The seeds are fixed, so a second run changes nothing but the last digits, which
another version of torch may round differently.
"""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import reference

N_GREEDY = 16
TOP_N = 8
# The prompt of 250 crosses the 256 positions of an attention tile while it decodes, the one of 300 in its prefill.
PROMPT_LENGTHS = [1, 250, 300]
LOGITS_AT = [0, 1, 15, 16, 63, 255, 256]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
BEGIN, END = 256, 257

# Each shape has a feature that the others lack.
CHECKPOINTS = {
    # The plain one: grouped queries, a head of half a leaf, tied embeddings.
    "llama-f32-tied": dict(
        seed=1, dtype="float32", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=128, vocab_size=320, tie_word_embeddings=True,
    ),
    # Odd counts everywhere: three heads on one KV head, five leaves, a vocabulary that is prime; stored as bf16.
    "llama-bf16-odd": dict(
        seed=2, dtype="bfloat16", hidden_size=96, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=32, intermediate_size=160, vocab_size=307, tie_word_embeddings=True, rms_norm_eps=1e-6,
    ),
    # RoPE as Llama 3.1 scales it (each of its three bands is reached by some of the 16 frequencies), untied. Its config
    # names RoPE as published folders do: `rope_theta` and `rope_scaling`; the others as newer ones: `rope_parameters`.
    "llama-f32-rope3": dict(
        seed=3, dtype="float32", hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        older_config=True, head_dim=32, intermediate_size=96, vocab_size=288, tie_word_embeddings=False,
        max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
    ),
    # Heads wider than hidden / n_heads, no grouping, another theta; stored as f16 in two files with an index.
    "llama-f16-sharded": dict(
        seed=4, dtype="float16", hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=64, intermediate_size=192, vocab_size=293, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0), max_shard_size="200KB",
    ),
}


def main():
    reference.configure_torch()
    for name, folder in reference.folders(CHECKPOINTS):
        make(name, folder, dict(CHECKPOINTS[name]))


def make(name, folder, shape):
    seed, dtype = shape.pop("seed"), getattr(torch, shape.pop("dtype"))
    shard, older = shape.pop("max_shard_size", "50GB"), shape.pop("older_config", False)
    shape.setdefault("max_position_embeddings", 512)
    config = LlamaConfig(bos_token_id=BEGIN, eos_token_id=END, **shape)
    model = LlamaForCausalLM(config).eval()
    randomize(model, torch.Generator().manual_seed(seed))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    if older:
        use_older_rope_names(folder / "config.json")
    write_tokenizer(folder, config.vocab_size)

    # The reference runs on the stored weights: stored narrow, computed in f32.
    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(100 + seed)
    cases = [case(stored, length, generator) for length in PROMPT_LENGTHS]
    reference.write(folder / "expected.json", {"model": name, "versions": reference.versions()}, cases)
    n_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert n_bytes < 400 * 1024, f"{name}: {n_bytes} bytes of weights are too many for a repository"


def randomize(model, generator):
    """Weights with which every part of the forward pass matters: scores of a few units, norms that are not one."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.copy_(1.0 + 0.25 * noise)
        elif "embed" in name or "lm_head" in name:
            weight.copy_(0.35 * noise)
        else:
            weight.copy_(1.4 * noise / weight.shape[1] ** 0.5)


def use_older_rope_names(path):
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    path.write_text(json.dumps(config, indent=2) + "\n")


def case(model, length, generator):
    vocab = model.config.vocab_size
    prompt = torch.randint(0, vocab, (length,), generator=generator).tolist()
    tokens, top, rows = reference.greedy(model, prompt, N_GREEDY, TOP_N)
    whole = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    drift = float((whole - rows).abs().max() / rows.abs().max())
    assert drift < 1e-5, f"prefill and decode of the reference differ by {drift}"
    kept = sorted({at for at in LOGITS_AT if at < len(rows)} | {length - 1, length, len(rows) - 1})
    return {
        "name": f"prompt of {length}",
        "prompt": prompt,
        "greedy": tokens,
        "top": top,
        "logits": [{"position": at, "values": [reference.float_of(v) for v in rows[at]]} for at in kept],
    }


def write_tokenizer(folder, vocab_size):
    """Byte-level BPE: 256 bytes, the special tokens, then merges of two letters until the vocabulary is full."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet + SPECIAL)}
    letters = [(a, b) for a in "etaonirsh" for b in "etaonirsh"]
    merges = letters[: vocab_size - len(vocab)]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    assert len(vocab) == vocab_size and vocab[SPECIAL[0]] == BEGIN and vocab[SPECIAL[1]] == END

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
