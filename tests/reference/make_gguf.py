"""Writes a tiny GGUF of each family with llama.cpp's own converter, and beside each the results of transformers in f32
from the same weights.

The weights are first rounded to what a Q8_0 can hold, so the file and the model that transformers runs are the same
numbers. So the tests cover the converter's changes: permuted Q and K, norms plus one, fused and stacked tensors.

    python make_gguf.py LLAMA_CPP [NAME ..]          LLAMA_CPP: a folder with `conversion/` and `gguf-py/`
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers import (
    Cohere2Config, Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, Glm4Config, Glm4MoeConfig, GPT2Config,
    GPTNeoXConfig, GraniteConfig, GraniteMoeConfig, GraniteMoeHybridConfig, Lfm2Config, Lfm2MoeConfig, LlamaConfig,
    Ministral3Config, MistralConfig, MixtralConfig, NemotronHConfig, Olmo2Config, Olmo3Config, Phi3Config, Qwen2Config,
    Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig, SmolLM3Config,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

import make_families
import make_llama
import reference

SMALL = dict(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=64, vocab_size=264, max_position_embeddings=512, pad_token_id=0, tie_word_embeddings=True,
)
BY_HIDDEN = {key: value for key, value in SMALL.items() if key != "head_dim"} | dict(
    hidden_size=128, intermediate_size=128)
THIN = BY_HIDDEN | dict(hidden_size=64, intermediate_size=64)
UNTIED = dict(tie_word_embeddings=False)
FACTORS = dict(embedding_multiplier=3.0, attention_multiplier=0.125, residual_multiplier=0.6, logits_scaling=2.5)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_expand=2, mamba_d_state=16, mamba_d_conv=4)
NEMOTRON = {key: value for key, value in THIN.items() if key != "num_hidden_layers"} | dict(
    head_dim=16, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=2, expand=2, conv_kernel=4)
DELTA = dict(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
    linear_conv_kernel_dim=4)
rope = make_families.rope
# Of text all sections have the same positions. llama.cpp needs as many as there are pairs.
MROPE = rope(rope_type="default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])

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
    # Layers whose heads are longer, that read the keys of others, and that have inputs of their own.
    "gguf-gemma4": (81, lambda: Gemma4TextConfig(
        **THIN | dict(num_hidden_layers=4, intermediate_size=32, head_dim=16), global_head_dim=32, sliding_window=18,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True,
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=264, final_logit_softcapping=3.0), [1, 40]),
    # Experts beside the MLP, gate and up in one tensor.
    "gguf-gemma4-moe": (87, lambda: Gemma4TextConfig(
        **THIN | dict(intermediate_size=32, head_dim=16), global_head_dim=32, sliding_window=18,
        layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
        final_logit_softcapping=3.0, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32),
        [1, 40]),
    # Hybrids and families whose file the converter gives another form than a folder.
    "gguf-olmo2": (52, lambda: Olmo2Config(**THIN | UNTIED), [1, 40]),
    "gguf-olmo3": (53, lambda: Olmo3Config(
        **THIN | UNTIED | dict(num_hidden_layers=4, intermediate_size=32), sliding_window=18, rope_parameters=dict(
            full_attention=rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=64,
                                beta_fast=32.0, beta_slow=1.0),
            sliding_attention=rope(rope_type="default"))), [1, 40]),
    "gguf-granite": (54, lambda: GraniteConfig(**THIN, **FACTORS), [1, 40]),
    "gguf-granite-moe": (55, lambda: GraniteMoeConfig(
        **THIN | dict(intermediate_size=32), **FACTORS, num_local_experts=5, num_experts_per_tok=2), [1, 40]),
    "gguf-granite4": (56, lambda: GraniteMoeHybridConfig(
        **THIN | MAMBA | FACTORS | dict(intermediate_size=32), shared_intermediate_size=64, mamba_n_groups=1,
        num_local_experts=4, num_experts_per_tok=2, layer_types=["mamba", "attention"],
        position_embedding_type="nope"), [1, 40]),
    "gguf-granite4-dense": (57, lambda: GraniteMoeHybridConfig(
        **THIN | MAMBA | FACTORS | dict(num_hidden_layers=3), shared_intermediate_size=64, mamba_n_groups=2,
        num_local_experts=0, num_experts_per_tok=0, layer_types=["mamba", "attention", "mamba"],
        position_embedding_type="nope"), [1, 40]),
    "gguf-nemotron-h": (59, lambda: NemotronHConfig(**NEMOTRON, layers_block_type=[
        "linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]), [1, 40]),
    "gguf-nemotron-h-moe": (60, lambda: NemotronHConfig(
        **NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1, topk_group=1), [1, 40]),
    "gguf-lfm2": (61, lambda: Lfm2Config(
        **THIN | dict(num_hidden_layers=3), conv_L_cache=3, layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False, rope_parameters=rope(rope_type="default")), [1, 40]),
    "gguf-lfm2-moe": (62, lambda: Lfm2MoeConfig(
        **THIN | dict(num_hidden_layers=3, intermediate_size=32), conv_L_cache=3,
        layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, routed_scaling_factor=1.0, rope_parameters=rope(rope_type="default")), [1, 40]),
    "gguf-qwen3-next": (73, lambda: Qwen3NextConfig(
        **THIN | DELTA | dict(num_hidden_layers=4), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40]),
    # Two value heads to a key head, which the converter moves apart.
    "gguf-qwen3.5": (64, lambda: Qwen3_5TextConfig(
        **THIN | DELTA | dict(num_hidden_layers=4),
        rope_parameters=MROPE), [1, 40]),
    "gguf-qwen3.5-moe": (65, lambda: Qwen3_5MoeTextConfig(
        **{k: v for k, v in THIN.items() if k != "intermediate_size"} | DELTA, num_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"], moe_intermediate_size=32,
        shared_expert_intermediate_size=32, rope_parameters=MROPE), [1, 40]),
    "gguf-glm4": (66, lambda: Glm4Config(
        **THIN, rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40]),
    "gguf-glm4-moe": (67, lambda: Glm4MoeConfig(
        **THIN | dict(num_hidden_layers=3), n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=32,
        n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=2, routed_scaling_factor=1.7,
        norm_topk_prob=True, use_qk_norm=True, attention_bias=True, num_mtp_layers=0,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40]),
    "gguf-ministral3": (68, lambda: Ministral3Config(**THIN, rope_parameters=rope(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)), [1, 40]),
    "gguf-cohere2": (69, lambda: Cohere2Config(
        **THIN | dict(num_hidden_layers=4, intermediate_size=32), sliding_window=18, logit_scale=0.25), [1, 40]),
    "gguf-gpt-neox": (70, lambda: GPTNeoXConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, vocab_size=264,
        max_position_embeddings=512), [1, 40]),
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
    if not sys.argv[2:]:
        # Its experts are MXFP4 in both files.
        folder = reference.HERE / "gpt-oss"
        convert(folder, folder / "converted.gguf", "MOSTLY_BF16")


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
        # A convolution's taps stay f32 in the file.
        if weight.dim() < 2 or "conv1d" in name or "conv.conv" in name:
            continue
        is_transposed = model.config.model_type == "gpt2" and "wte" not in name and "wpe" not in name
        rows = (weight.T if is_transposed else weight).contiguous().numpy()
        rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind))
        weight.copy_(rounded.T if is_transposed else rounded)


def config_of_hubs(folder):
    """Returns the config with keys and values of hubs that transformers no longer writes, and the converter reads."""
    config = json.loads((folder / "config.json").read_text())
    kind, turned = config["model_type"], config.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    if kind in ("gpt_neox", "cohere2"):
        config["rotary_pct"] = turned
    if kind == "gemma4_text":
        config["global_head_dim"] = next(iter(config.pop("per_layer_config").values()))["head_dim"]
        config["num_global_key_value_heads"] = None
    if kind == "granitemoehybrid":
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [older.get(name, name) for name in config["layer_types"]]
    if kind == "nemotron_h" and "moe" not in config["layers_block_type"]:
        letters = {"linear_attention": "M", "mamba": "M", "mlp": "-", "full_attention": "*", "attention": "*"}
        config["hybrid_override_pattern"] = "".join(letters[name] for name in config.pop("layers_block_type"))
        config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
        for key in [key for key in config if "expert" in key or "moe" in key or key in ("n_group", "topk_group")]:
            del config[key]
    return config


def convert(folder, out, kind="MOSTLY_Q8_0"):
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase, ModelType, TextModel, get_model_architecture
    from conversion.llama import LlamaModel

    # The converter identifies pre-tokenizers by their result for one text, and lacks ours. Some families expect a
    # SentencePiece model, which these tests do not need.
    config = config_of_hubs(folder)
    # The converter reads a config by transformers, or as a file.
    ModelBase.load_hparams = staticmethod(lambda *_, **__: dict(config))
    path, written = folder / "config.json", (folder / "config.json").read_text()
    path.write_text(json.dumps(config))
    AutoTokenizer.from_pretrained = PreTrainedTokenizerFast.from_pretrained
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    hparams = ModelBase.load_hparams(folder, False)
    family = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    family.set_vocab = LlamaModel.set_vocab = TextModel._set_vocab_gpt2
    # The checkpoints have no layers that guess further tokens.
    family.no_mtp = True
    with torch.inference_mode():
        family(folder, gguf.LlamaFileType[kind], out, eager=True).write()
    path.write_text(written)


if __name__ == "__main__":
    main()
