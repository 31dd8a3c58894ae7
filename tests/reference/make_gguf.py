"""Writes a tiny GGUF of each family with llama.cpp's own converter, and beside each the results of transformers in f32
from the same weights.

The weights are first rounded to what a Q8_0 can hold, so the file and the model that transformers runs are the same
numbers. So the tests cover the converter's changes: permuted Q and K, norms plus one, fused and stacked tensors.

    python make_gguf.py LLAMA_CPP [NAME ..]          LLAMA_CPP: a folder with `conversion/` and `gguf-py/`
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers import (
    Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Phi3Config, Qwen2Config,
    Qwen3Config, Qwen3MoeConfig, SmolLM3Config,
)

import make_families
import make_llama
import reference

SMALL = dict(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=64, vocab_size=264, max_position_embeddings=512, pad_token_id=0, tie_word_embeddings=True,
)
BY_HIDDEN = {key: value for key, value in SMALL.items() if key != "head_dim"} | dict(
    hidden_size=128, intermediate_size=128)
rope = make_families.rope

CHECKPOINTS = {
    "gguf-llama3": (41, lambda: LlamaConfig(**SMALL, rope_parameters=rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192)), [1, 40]),
    "gguf-mistral": (42, lambda: MistralConfig(**SMALL, sliding_window=None), [1, 40]),
    "gguf-mixtral": (43, lambda: MixtralConfig(
        **SMALL | dict(intermediate_size=32, num_hidden_layers=1), num_local_experts=4, num_experts_per_tok=2),
        [1, 40]),
    "gguf-smollm3": (44, lambda: SmolLM3Config(
        **BY_HIDDEN | dict(num_hidden_layers=4, intermediate_size=64)), [1, 40]),
    "gguf-qwen2": (45, lambda: Qwen2Config(**BY_HIDDEN), [1, 40]),
    "gguf-qwen3-yarn": (46, lambda: Qwen3Config(**SMALL, rope_parameters=rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=128)), [1, 40]),
    "gguf-qwen3-moe": (47, lambda: Qwen3MoeConfig(
        **SMALL | dict(num_hidden_layers=1), num_experts=5, num_experts_per_tok=3, moe_intermediate_size=32,
        norm_topk_prob=True), [1, 40]),
    "gguf-phi3": (48, lambda: Phi3Config(
        **BY_HIDDEN, original_max_position_embeddings=32, rope_parameters=rope(
            rope_type="longrope", original_max_position_embeddings=32,
            short_factor=[1.0 + i / 8 for i in range(16)], long_factor=[1.5 + i / 2 for i in range(16)])), [40]),
    "gguf-gemma2": (49, lambda: Gemma2Config(
        **SMALL, sliding_window=18, query_pre_attn_scalar=32, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        [1, 40]),
    "gguf-gemma3": (50, lambda: Gemma3TextConfig(
        **SMALL | dict(num_hidden_layers=6, num_attention_heads=1, num_key_value_heads=1, intermediate_size=32),
        sliding_window=18, query_pre_attn_scalar=32), [1, 40]),
    "gguf-gpt2": (51, lambda: GPT2Config(
        n_embd=96, n_layer=2, n_head=3, n_positions=128, n_ctx=128, vocab_size=264), [1, 40]),
}


def main():
    llama_cpp = Path(sys.argv[1])
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    reference.configure_torch()
    for name in sys.argv[2:] or CHECKPOINTS:
        folder = reference.HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with tempfile.TemporaryDirectory() as scratch:
            make(name, folder, Path(scratch), *CHECKPOINTS[name])


def make(name, folder, scratch, seed, config, lengths):
    config = config()
    config.bos_token_id, config.eos_token_id = make_llama.BEGIN, make_llama.END
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    make_families.randomize(model, torch.Generator().manual_seed(seed))
    round_weights(model)
    model.save_pretrained(scratch)
    make_llama.write_tokenizer(scratch, config.vocab_size)
    convert(scratch, folder / "model.gguf")
    stored = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(100 + seed)
    cases = [make_families.case(stored, length, generator) for length in lengths]
    reference.write(folder / "expected.json", {"model": name, "versions": reference.versions()}, cases)
    n_bytes = (folder / "model.gguf").stat().st_size
    print(f"{name}: {n_bytes // 1024} KiB")
    assert n_bytes < 500 * 1024, f"{name}: {n_bytes} bytes of weights are too many for a repository"


def round_weights(model):
    """Rounds to the nearest number of a Q8_0, along the dimension that a product sums over."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        is_transposed = model.config.model_type == "gpt2" and "wte" not in name and "wpe" not in name
        rows = (weight.T if is_transposed else weight).contiguous().numpy()
        rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind))
        weight.copy_(rounded.T if is_transposed else rounded)


def convert(folder, out, kind="MOSTLY_Q8_0"):
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, TextModel, get_model_architecture

    # The converter identifies pre-tokenizers by their result for one text, and lacks ours. Some families expect a
    # SentencePiece model, which these tests do not need.
    AutoTokenizer.from_pretrained = PreTrainedTokenizerFast.from_pretrained
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    hparams = ModelBase.load_hparams(folder, False)
    family = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    family.set_vocab = TextModel._set_vocab_gpt2
    with torch.inference_mode():
        family(folder, gguf.LlamaFileType[kind], out, eager=True).write()


if __name__ == "__main__":
    main()
