"""Writes a tiny GGUF of each family in the K-quants, as users have them: by llama.cpp's own converter, then its own
quantizer. Beside each are the results of transformers in f32 from the exact numbers in the file, and those of llama.cpp
from the same numbers, at every position.

    python make_kquants.py LLAMA_CPP [NAME ..]          LLAMA_CPP: a folder with `conversion/` and `gguf-py/`

The converter moves weights (permuted Q and K, fused, stacked, exchanged), so the dequantized numbers must be mapped
back to their places. A second model, in which every weight is a unique number, goes through the converter
first and shows the mapping.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers import (
    Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Phi3Config, Qwen2Config,
    Qwen3Config, Qwen3MoeConfig, SmolLM3Config,
)

import make_families
import make_gguf
import make_llama
import make_llama_cpp
import peer
import reference

# Rows of 256 everywhere, so that no tensor falls back to another type.
SMALL = dict(
    hidden_size=256, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
    intermediate_size=256, vocab_size=264, max_position_embeddings=512, pad_token_id=0, tie_word_embeddings=True,
)
# For models without head_dim in the config: eight heads of 32 all the same.
BY_HIDDEN = {key: value for key, value in SMALL.items() if key != "head_dim"}
rope = make_gguf.rope

# Name, seed, config, target format, lengths of the prompts.
CHECKPOINTS = {
    "gguf-k-llama3": (61, lambda: LlamaConfig(**SMALL, rope_parameters=rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192)), "Q4_K_M", [1, 40]),
    "gguf-k-mistral": (62, lambda: MistralConfig(**SMALL, sliding_window=None), "Q5_K_M", [1, 40]),
    "gguf-k-mixtral": (63, lambda: MixtralConfig(
        **SMALL | dict(intermediate_size=64), num_local_experts=4, num_experts_per_tok=2), "Q3_K_M", [1, 40]),
    "gguf-k-smollm3": (64, lambda: SmolLM3Config(
        **BY_HIDDEN | dict(num_hidden_layers=4, num_key_value_heads=1)), "Q2_K", [1, 40]),
    "gguf-k-qwen2": (65, lambda: Qwen2Config(**BY_HIDDEN), "Q6_K", [1, 40]),
    "gguf-k-qwen3-yarn": (66, lambda: Qwen3Config(**SMALL, rope_parameters=rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=128)), "Q3_K_L", [1, 40]),
    "gguf-k-qwen3-moe": (67, lambda: Qwen3MoeConfig(
        **SMALL, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=True),
        "Q4_K_S", [1, 40]),
    "gguf-k-phi3": (68, lambda: Phi3Config(
        **BY_HIDDEN, original_max_position_embeddings=32, rope_parameters=rope(
            rope_type="longrope", original_max_position_embeddings=32,
            short_factor=[1.0 + i / 8 for i in range(16)], long_factor=[1.5 + i / 2 for i in range(16)])),
        "Q5_K_S", [40]),
    "gguf-k-gemma2": (69, lambda: Gemma2Config(
        **SMALL | dict(num_hidden_layers=2), sliding_window=18, query_pre_attn_scalar=32, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0), "Q4_K_M", [1, 40]),
    "gguf-k-gemma3": (70, lambda: Gemma3TextConfig(
        **SMALL | dict(num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64),
        sliding_window=18, query_pre_attn_scalar=32), "Q3_K_S", [1, 40]),
    "gguf-k-gpt2": (71, lambda: GPT2Config(
        n_embd=256, n_layer=1, n_head=8, n_positions=128, n_ctx=128, vocab_size=264), "Q3_K_S", [1, 40]),
}


def main():
    llama_cpp_folder = Path(sys.argv[1])
    sys.path[:0] = [str(llama_cpp_folder / "gguf-py"), str(llama_cpp_folder)]
    reference.configure_torch()
    peer.start_llama_cpp()
    for name in sys.argv[2:] or CHECKPOINTS:
        folder = reference.HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with tempfile.TemporaryDirectory() as scratch:
            make(name, folder, Path(scratch), *CHECKPOINTS[name])
        make_llama_cpp.make(folder)


def make(name, folder, scratch, seed, config, kind, lengths):
    config = config()
    config.bos_token_id, config.eos_token_id = make_llama.BEGIN, make_llama.END
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    number(model)
    converted(model, scratch / "numbers", config)
    make_families.randomize(model, torch.Generator().manual_seed(seed))
    plain = converted(model, scratch / "weights", config)
    peer.quantize(plain, folder / "model.gguf", getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"))
    kinds = take_back(model, scratch / "numbers" / "model.gguf", folder / "model.gguf")
    generator = torch.Generator().manual_seed(100 + seed)
    cases = [make_families.case(model, length, generator) for length in lengths]
    head = {"model": name, "types": kinds, "versions": reference.versions() | peer.version()}
    reference.write(folder / "expected.json", head, cases)
    n_bytes = (folder / "model.gguf").stat().st_size
    print(f"{name}: {n_bytes // 1024} KiB of {kinds}")
    assert n_bytes < 700 * 1024, f"{name}: {n_bytes} bytes of weights are too many for a repository"


def converted(model, folder, config):
    """Returns the F32 GGUF that llama.cpp's converter makes of a model."""
    folder.mkdir()
    model.save_pretrained(folder)
    make_llama.write_tokenizer(folder, config.vocab_size)
    make_gguf.convert(folder, folder / "model.gguf", "ALL_F32")
    return folder / "model.gguf"


def matrices(model):
    return [weight for weight in model.parameters() if weight.dim() > 1]


def number(model):
    """Sets every weight of a matrix to a unique number, which an f32 holds exactly."""
    n = 0
    for weight in matrices(model):
        weight.copy_(torch.arange(n, n + weight.numel(), dtype=torch.float32).reshape(weight.shape))
        n += weight.numel()
    assert n < 2**24


def take_back(model, numbers, quantized):
    """Sets every weight of a matrix to its value in the quantized file. Returns the number of tensors of each type."""
    import gguf

    whole = torch.full((sum(weight.numel() for weight in matrices(model)),), torch.nan)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(quantized).tensors}
    kinds = {}
    for tensor in gguf.GGUFReader(numbers).tensors:
        if len(tensor.shape) < 2:
            continue
        of = stored[tensor.name]
        values = gguf.quants.dequantize(of.data, of.tensor_type).astype(np.float32).reshape(-1)
        whole[torch.from_numpy(tensor.data.reshape(-1).astype(np.int64))] = torch.from_numpy(values)
        kinds[of.tensor_type.name] = kinds.get(of.tensor_type.name, 0) + 1
    assert not whole.isnan().any(), "the converter left weights out"
    n = 0
    for weight in matrices(model):
        weight.copy_(whole[n:n + weight.numel()].reshape(weight.shape))
        n += weight.numel()
    return dict(sorted(kinds.items()))


if __name__ == "__main__":
    main()
