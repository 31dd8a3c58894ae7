"""Writes a tiny random checkpoint of each family beyond Llama, and beside each the results of transformers in f32.

Each has the features of its family, small enough that a prompt of 40 or 300 tokens uses them: windows shorter than the
prompt, caps that matter, contexts beyond the original one of a rope.

    python make_families.py [NAME ..]
"""

import json

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM
from transformers import (
    BambaConfig,
    Cohere2Config, FalconH1Config, Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, Glm4Config, Glm4MoeConfig,
    GPT2Config, GPTNeoXConfig, GptOssConfig, GraniteConfig, GraniteMoeConfig, GraniteMoeHybridConfig, Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig, Ministral3Config,
    MinistralConfig, MistralConfig, MixtralConfig, NemotronHConfig,
    Olmo2Config, Olmo3Config, OlmoHybridConfig, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig,
    SmolLM3Config,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

import make_llama
import reference

SMALL = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    vocab_size=264, max_position_embeddings=512, pad_token_id=0,
)


# Later models are smaller, and stored as bf16.
TINY = SMALL | dict(hidden_size=32, intermediate_size=64, head_dim=16)
WIDE_FILES = (
    "mixtral", "qwen2", "qwen3-moe", "qwen3-yarn", "llama", "smollm3", "mistral", "phi3", "gemma2", "gemma3", "gpt2")


DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_conv_kernel_dim=4)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_expand=2, mamba_d_state=16, mamba_d_conv=4)
FALCON_H1 = TINY | MAMBA | dict(
    mamba_d_ssm=64, mamba_norm_before_gate=False, tie_word_embeddings=True, embedding_multiplier=2.5,
    lm_head_multiplier=0.4, key_multiplier=1.7, attention_in_multiplier=1.5, attention_out_multiplier=3.0,
    ssm_in_multiplier=1.25, ssm_out_multiplier=0.02, ssm_multipliers=[0.7, 0.9, 1.4, 0.8, 1.3],
    mlp_multipliers=[1.6, 0.5])
OLMO_HYBRID = {k: v for k, v in TINY.items() if k != "head_dim"} | dict(
    hidden_size=64, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16)
NEMOTRON = {k: v for k, v in TINY.items() if k != "num_hidden_layers"} | dict(
    mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, expand=2, conv_kernel=4)


def rope(**more):
    return dict(rope_theta=10000.0, **more)


# Name, seed, config, lengths of the prompts.
CHECKPOINTS = {
    # Four experts, two for each token: w1, w2, w3 in its files.
    "mixtral": (11, lambda: MixtralConfig(
        **SMALL | dict(intermediate_size=32), num_local_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=True), [1, 40, 270]),
    # Five experts, three for each token, with weights that do not sum to one; one layer has a dense MLP.
    "qwen3-moe": (12, lambda: Qwen3MoeConfig(
        **SMALL | dict(num_hidden_layers=3, hidden_size=32), head_dim=16, num_experts=5, num_experts_per_tok=3,
        moe_intermediate_size=32, norm_topk_prob=False, mlp_only_layers=[1]), [1, 40]),
    "qwen3-moe-normed": (13, lambda: Qwen3MoeConfig(
        **SMALL | dict(hidden_size=32), head_dim=16, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, norm_topk_prob=True), [1, 40]),
    # Q, K and V with a bias; the last layer looks back over 24 positions only.
    "qwen2": (14, lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=24, max_window_layers=1), [1, 40, 270]),
    # Normed heads that are wider than hidden / n_heads; a context stretched by YaRN.
    "qwen3-yarn": (15, lambda: Qwen3Config(
        **SMALL | dict(hidden_size=32), head_dim=32, rope_parameters=rope(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=64)), [1, 40, 270]),
    "llama-linear": (16, lambda: LlamaConfig(
        **SMALL, rope_parameters=rope(rope_type="linear", factor=4.0)), [1, 40]),
    # Every fourth layer has no positions.
    "smollm3": (17, lambda: SmolLM3Config(
        **SMALL | dict(num_hidden_layers=4, hidden_size=32, intermediate_size=64)), [1, 40]),
    # All layers look back over 20 positions.
    "mistral": (18, lambda: MistralConfig(**SMALL, sliding_window=20), [1, 40, 270]),
    # Fused projections, a rope on half of the head with a set of factors for prompts beyond 32.
    "phi3-long": (19, lambda: Phi3Config(
        **SMALL, original_max_position_embeddings=32, rope_parameters=rope(
            rope_type="longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.1, 1.3, 1.7],
            long_factor=[1.2, 2.0, 3.5, 8.0])), [40, 270]),
    # The same with only its original context, which uses the other set.
    "phi3-short": (20, lambda: Phi3Config(
        **SMALL | dict(max_position_embeddings=64), sliding_window=17, tie_word_embeddings=True,
        original_max_position_embeddings=64, rope_parameters=rope(
            rope_type="longrope", short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0],
            long_factor=[1.2, 2.0, 3.5, 8.0, 9.0, 9.0, 9.0, 9.0])), [1, 40]),
    # Capped scores and logits, a window on every other layer, norms on both sides of each sublayer.
    "gemma2": (21, lambda: Gemma2Config(
        **SMALL | dict(hidden_size=32), head_dim=32, sliding_window=18, query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0), [1, 40, 270]),
    # Five local layers with their own rope for each global layer, which has a scaled rope; normed heads.
    "gemma3": (22, lambda: Gemma3TextConfig(
        **SMALL | dict(num_hidden_layers=6, hidden_size=32, intermediate_size=64), head_dim=16, sliding_window=18,
        query_pre_attn_scalar=16, rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0))), [1, 40, 270]),
    # Longer heads in global layers, inputs of their own for all layers, two layers that read the keys of others.
    "gemma4": (51, lambda: Gemma4TextConfig(
        **TINY | dict(num_hidden_layers=8, intermediate_size=32), global_head_dim=32, sliding_window=18,
        layer_types=[*["sliding_attention"] * 2, "full_attention"] * 2 + ["sliding_attention", "full_attention"],
        num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=264, final_logit_softcapping=3.0), [1, 40, 270]),
    # Values that are keys, and fewer heads of them, in the global layer.
    "gemma4-global": (52, lambda: Gemma4TextConfig(
        **TINY | dict(num_hidden_layers=3), global_head_dim=48, sliding_window=18, attention_k_eq_v=True,
        num_global_key_value_heads=1, hidden_size_per_layer_input=0, final_logit_softcapping=3.0,
        layer_types=["sliding_attention"] * 2 + ["full_attention"]), [1, 40, 270]),
    # Experts beside the MLP, each part between norms of its own, and factors of experts.
    "gemma4-moe": (82, lambda: Gemma4TextConfig(
        **TINY | dict(num_hidden_layers=3, intermediate_size=32), global_head_dim=32, sliding_window=18,
        attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        final_logit_softcapping=3.0, layer_types=["sliding_attention"] * 2 + ["full_attention"],
        enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32), [1, 40, 270]),
    # Learned positions, LayerNorm, transposed matrices.
    "gpt2": (23, lambda: GPT2Config(
        n_embd=48, n_layer=2, n_head=3, n_positions=512, vocab_size=264), [1, 40, 270]),
    # Norms after each sublayer and none before; Q and K normed over all heads together, six on two KV heads.
    "olmo2": (24, lambda: Olmo2Config(
        **TINY | dict(num_attention_heads=6)), [1, 40, 270]),
    # The same with a window on three layers of four; only the fourth has the stretched rope.
    "olmo3": (25, lambda: Olmo3Config(
        **TINY | dict(num_hidden_layers=4, intermediate_size=32), sliding_window=18,
        rope_parameters=dict(
            full_attention=rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=64,
                                attention_factor=1.2, beta_fast=32.0, beta_slow=1.0),
            sliding_attention=rope(rope_type="default"))), [1, 40, 270]),
    # Four multipliers, none of them one.
    "granite": (26, lambda: GraniteConfig(
        **TINY, embedding_multiplier=3.0, attention_multiplier=0.125, residual_multiplier=0.6, logits_scaling=2.5,
        tie_word_embeddings=True), [1, 40, 270]),
    "granite-moe": (27, lambda: GraniteMoeConfig(
        **TINY | dict(intermediate_size=32), num_local_experts=5, num_experts_per_tok=2,
        embedding_multiplier=2.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=1.5), [1, 40]),
    # Norms around each sublayer, RoPE on neighbours in half of a head, a bias on Q, K and V.
    "glm4": (28, lambda: Glm4Config(
        **TINY, rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40, 270]),
    # Sigmoid scores, three groups of which two count, a correction, a shared expert, a dense first layer.
    "glm4-moe": (29, lambda: Glm4MoeConfig(
        **TINY | dict(num_hidden_layers=3), n_routed_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=32, n_group=3, topk_group=2, first_k_dense_replace=1, n_shared_experts=2,
        routed_scaling_factor=1.7, norm_topk_prob=True, use_qk_norm=True, attention_bias=True, num_mtp_layers=0,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40, 270]),
    # The same with one group, without norms of heads and with unscaled weights.
    "glm4-moe-plain": (30, lambda: Glm4MoeConfig(
        **TINY, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, first_k_dense_replace=0, n_shared_experts=1, norm_topk_prob=False, num_mtp_layers=0,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40]),
    # As Phi-4-mini's: RoPE on three quarters of a head, the embedding as head.
    "phi4-mini": (31, lambda: Phi3Config(
        **TINY | dict(hidden_size=64), tie_word_embeddings=True, partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
        rope_parameters=rope(
            rope_type="longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
            long_factor=[1.2, 2.0, 3.5, 8.0, 9.0, 10.0])), [40, 270]),
    "ministral": (32, lambda: MinistralConfig(
        **TINY, sliding_window=20, layer_types=["sliding_attention", "full_attention"]), [1, 40, 270]),
    # Queries grow with their position, in steps of 64.
    "ministral3": (33, lambda: Ministral3Config(
        **TINY, rope_parameters=rope(
            rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)), [1, 40, 270]),
    # Attention and MLP in parallel after one LayerNorm without a bias; windows with a rope, and every fourth layer
    # without either.
    "cohere2": (34, lambda: Cohere2Config(
        **TINY | dict(num_hidden_layers=4, hidden_size=64, intermediate_size=32), sliding_window=18,
        logit_scale=0.25), [1, 40, 270]),
    # In parallel, each after its own LayerNorm; Q, K and V of a head together; RoPE on a quarter of a head.
    "gpt-neox": (35, lambda: GPTNeoXConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, vocab_size=264,
        max_position_embeddings=512), [1, 40, 270]),
    "gpt-neox-in-turn": (36, lambda: GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=264,
        max_position_embeddings=512, use_parallel_residual=False, tie_word_embeddings=True), [1, 40]),
    # Three layers of the gated delta rule to one of attention. Attention has an output gate, and RoPE on half of each
    # head. Two value heads to a key head, of another width; experts, and a shared one with a gate.
    "qwen3-next": (37, lambda: Qwen3NextConfig(
        **TINY | dict(num_hidden_layers=4), **DELTA, linear_value_head_dim=32, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=2,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40, 270]),
    # The same with separate projections, and a dense MLP.
    "qwen3.5": (38, lambda: Qwen3_5TextConfig(
        **TINY | dict(num_hidden_layers=4), **DELTA, linear_value_head_dim=16,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40, 270]),
    "qwen3.5-moe": (39, lambda: Qwen3_5MoeTextConfig(
        **{k: v for k, v in TINY.items() if k != "intermediate_size"} | dict(num_hidden_layers=2), **DELTA,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40]),
    # Mamba-2 with attention without positions, four multipliers, experts beside a shared MLP.
    "granite4": (40, lambda: GraniteMoeHybridConfig(
        **TINY | dict(num_hidden_layers=3, intermediate_size=32, shared_intermediate_size=64), **MAMBA,
        mamba_n_groups=1, layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2,
        embedding_multiplier=2.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=1.5,
        position_embedding_type="nope", tie_word_embeddings=True), [1, 40, 270]),
    # The same without experts, with two groups.
    "granite4-dense": (41, lambda: GraniteMoeHybridConfig(
        **TINY | dict(num_hidden_layers=2, intermediate_size=32, shared_intermediate_size=64), **MAMBA,
        mamba_n_groups=2, layer_types=["mamba", "attention"], num_local_experts=0, num_experts_per_tok=0,
        embedding_multiplier=2.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=1.5,
        position_embedding_type="rope"), [1, 40]),
    # The same with the experts of a layer in one tensor.
    "qwen3.5-moe-fused": (44, lambda: Qwen3_5MoeTextConfig(
        **{k: v for k, v in TINY.items() if k != "intermediate_size"} | dict(num_hidden_layers=2), **DELTA,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        rope_parameters=rope(rope_type="default", partial_rotary_factor=0.5)), [1, 40]),
    # Mamba-2 with two groups, attention with RoPE on half of a head, and other names for most tensors.
    "bamba": (45, lambda: BambaConfig(
        **TINY | dict(num_hidden_layers=3), **MAMBA, mamba_n_groups=2, attn_layer_indices=[1],
        tie_word_embeddings=True), [1, 40, 270]),
    # The delta rule with steps up to two and norms before each sublayer; attention without a rope and norms behind.
    "olmo-hybrid": (83, lambda: OlmoHybridConfig(
        **OLMO_HYBRID | dict(num_hidden_layers=3), linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=dict(rope_type=None, rope_theta=None)), [1, 40, 270]),
    # The same with a rope and with steps up to one.
    "olmo-hybrid-rope": (84, lambda: OlmoHybridConfig(
        **OLMO_HYBRID | dict(num_hidden_layers=2), linear_value_head_dim=16, linear_allow_neg_eigval=False,
        layer_types=["linear_attention", "full_attention"],
        rope_parameters=rope(rope_type="default")), [1, 40]),
    # Layers of one sublayer each: Mamba-2, attention without positions, or an MLP of squares without a gate.
    "nemotron-h": (46, lambda: NemotronHConfig(
        **NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]),
        [1, 40, 270]),
    # The same with experts beside one that all rows use; the choice uses corrected scores.
    "nemotron-h-moe": (47, lambda: NemotronHConfig(
        **NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1, topk_group=1), [1, 40]),
    # Mamba-2 and attention side by side in each layer, with a multiplier behind almost every product.
    "falcon-h1": (85, lambda: FalconH1Config(**FALCON_H1, mamba_n_groups=2), [1, 40, 270]),
    # The same with one group, whose outputs are normed behind the gate.
    "falcon-h1-normed": (86, lambda: FalconH1Config(
        **FALCON_H1 | dict(num_hidden_layers=1, ssm_out_multiplier=0.6, mamba_n_groups=1, mamba_rms_norm=True)),
        [1, 40]),
    # Short convolutions, a dense layer, and experts that are chosen with a correction.
    "lfm2-moe": (48, lambda: Lfm2MoeConfig(
        **TINY | dict(num_hidden_layers=3, hidden_size=64, intermediate_size=32), conv_L_cache=3,
        layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, routed_scaling_factor=1.5, rope_parameters=rope(rope_type="default")), [1, 40, 270]),
    # Short convolutions between gates, and attention with normed heads; the config gives the MLP's width.
    "lfm2": (43, lambda: Lfm2Config(
        **TINY | dict(num_hidden_layers=3, hidden_size=64), conv_L_cache=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False, rope_parameters=rope(rope_type="default")), [1, 40, 270]),
}


def main():
    reference.configure_torch()
    for name, folder in reference.folders(CHECKPOINTS):
        make(name, folder, *CHECKPOINTS[name])


def make(name, folder, seed, config, lengths):
    config = config()
    config.bos_token_id, config.eos_token_id = make_llama.BEGIN, make_llama.END
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, torch.Generator().manual_seed(seed))
    if not name.startswith(WIDE_FILES):
        model.to(torch.bfloat16)
    model.save_pretrained(folder, save_original_format=not name.endswith("fused"))
    if config.model_type == "olmo_hybrid":
        use_names_of_makers(folder, config)
    make_llama.write_tokenizer(folder, config.vocab_size)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(100 + seed)
    cases = [case(stored, length, generator) for length in lengths]
    reference.write(folder / "expected.json", {"model": name, "versions": reference.versions()}, cases)
    n_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    print(f"{name}: {n_bytes // 1024} KiB")
    assert n_bytes < 400 * 1024, f"{name}: {n_bytes} bytes of weights are too many for a repository"


def use_names_of_makers(folder, config):
    """transformers writes OLMo hybrid's convolutions as equal thirds, and one norm of attention under another name."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for i, kind in enumerate(config.layer_types):
        at = f"model.layers.{i}"
        if kind == "full_attention":
            norm = tensors.pop(f"{at}.feedforward_layer_norm.weight")
            tensors[f"{at}.post_attention_layernorm.weight"] = norm
            continue
        names = [f"{at}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        convolutions = torch.cat([tensors[name] for name in names])
        for name, part in zip(names, torch.split(convolutions, [keys, keys, len(convolutions) - 2 * keys])):
            tensors[name] = part.contiguous()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def randomize(model, generator):
    """As in make_llama; also norms that are stored minus one, biases and routers."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        is_gemma = "gemma" in model.config.model_type
        kind = model.config.model_type
        is_less_one = (is_gemma and kind != "gemma4_text") or "qwen3_next" in kind or "qwen3_5" in kind
        if name.endswith("bias"):
            weight.copy_(0.3 * noise)
        elif name.endswith("A_log"):
            # A decay so slow that a state lasts for many blocks.
            weight.copy_(-2.5 + 0.7 * noise)
        elif weight.dim() == 1:
            weight.copy_((0.0 if is_less_one and "linear_attn.norm" not in name else 1.0) + 0.25 * noise)
            # The scores of Gemma 4 have no other scale.
            if kind == "gemma4_text" and name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.mul_(weight.shape[0] ** -0.25)
            # Its router divides by the root of the width.
            if name.endswith("router.scale"):
                weight.mul_(weight.shape[0] ** 0.5)
        elif any(part in name for part in ("embed", "lm_head", "embed_out", "wte", "wpe")):
            weight.copy_((0.1 if is_gemma else 0.35) * noise)
        else:
            fan_in = weight.shape[-2] if model.config.model_type == "gpt2" else weight.shape[-1]
            weight.copy_(1.4 * noise / fan_in ** 0.5)
    for name, correction in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            correction.copy_(0.2 * torch.randn(correction.shape, generator=generator))
        if name.endswith("layer_scalar"):
            correction.copy_(1.0 + 0.25 * torch.randn(correction.shape, generator=generator))


def case(model, length, generator):
    vocab = model.config.vocab_size
    prompt = torch.randint(0, vocab, (length,), generator=generator).tolist()
    tokens, top, rows = reference.greedy(model, prompt, make_llama.N_GREEDY, make_llama.TOP_N)
    whole = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    drift = float((whole - rows).abs().max() / rows.abs().max())
    assert drift < 2e-5, f"prefill and decode of the reference differ by {drift}"
    spots = {at for at in make_llama.LOGITS_AT if at < len(rows)} | {length - 1, length, len(rows) - 1}
    return {
        "name": f"prompt of {length}",
        "prompt": prompt,
        "greedy": tokens,
        "top": top,
        "logits": [{"position": at, "values": [reference.float_of(v) for v in rows[at]]} for at in sorted(spots)],
    }


if __name__ == "__main__":
    main()
