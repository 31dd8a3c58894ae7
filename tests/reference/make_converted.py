"""Writes into some folders of `make_families.py` and `make_gpt_oss.py` the GGUF that llama.cpp's converter makes of
them: its names, its keys, its permuted and stacked tensors, and the same numbers, so that `expected.json` holds for
both. The file has no tokenizer.

    python make_converted.py [NAME ..]
"""

import json
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import load_file

import reference

MODEL = "model.layers.{i}."
ATTENTION = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
OTHER_NORMS = NORMS | {"post_attention_layernorm": "post_attention_norm"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main():
    for name in sys.argv[1:] or FAMILIES:
        folder = reference.HERE / name
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        architecture, convert = FAMILIES[name]
        writer = gguf.GGUFWriter(folder / "converted.gguf", architecture)
        common(writer, config)
        for to, tensor in convert(writer, config, tensors):
            add(writer, to, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        print(f"{name}: {(folder / 'converted.gguf').stat().st_size // 1024} KiB")


def common(writer, config):
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config["layer_norm_eps"])


def add(writer, name, tensor):
    """Stores a matrix as bf16, and a vector as f32, as the converter does."""
    if isinstance(tensor, tuple):
        writer.add_tensor(name, tensor[0].numpy(), raw_dtype=T.MXFP4)
    elif tensor.dim() == 1 or name.endswith(".bias"):
        writer.add_tensor(name, tensor.float().numpy())
    else:
        writer.add_tensor(name, tensor.contiguous().view(torch.int16).numpy().view(np.uint8), raw_dtype=T.BF16)


def renamed(tensors, layers, names, outer=OUTER, prefix=MODEL):
    """Yields tensors of which only the names change."""
    for ours, theirs in outer.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in tensors:
                yield f"{theirs}.{kind}", tensors[f"{ours}.{kind}"]
    for i in range(layers):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                if (name := prefix.format(i=i) + f"{ours}.{kind}") in tensors:
                    yield f"blk.{i}.{theirs}.{kind}", tensors[name]


def permuted(config, pairs):
    """Yields rows of Q and K in the order in which RoPE rotates neighbours."""
    for name, tensor in pairs:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        n = heads.get(name.split(".")[2] if name.startswith("blk") else "")
        if n:
            tensor = tensor.reshape(n, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        yield name, tensor


def stacked(tensors, config, n, prefix="mlp.experts"):
    for i in range(config["num_hidden_layers"]):
        for ours, theirs in MLP.items():
            ours = ours.removeprefix("mlp.")
            names = [MODEL.format(i=i) + f"{prefix}.{e}.{ours}.weight" for e in range(n)]
            if names[0] in tensors:
                yield f"blk.{i}.{theirs}_exps.weight", torch.stack([tensors[name] for name in names])


def olmo2(writer, config, tensors):
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        # The converter writes the factor of YaRN's numbers only where the config has one.
        own = config["rope_parameters"]["full_attention"]
        writer.add_rope_scaling_attn_factors(own["attention_factor"] / (0.1 * np.log(own["factor"]) + 1.0))
    return renamed(tensors, config["num_hidden_layers"], ATTENTION | MLP | HEAD_NORMS | POST_NORMS)


def granite(writer, config, tensors):
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    layers = config["num_hidden_layers"]
    yield from permuted(config, renamed(tensors, layers, ATTENTION | MLP | NORMS))
    if "num_local_experts" not in config:
        return
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    for i in range(layers):
        of = lambda name: tensors[MODEL.format(i=i) + f"block_sparse_moe.{name}.weight"]
        gate, up = of("input_linear").chunk(2, dim=1)
        yield f"blk.{i}.ffn_gate_inp.weight", of("router.layer")
        yield f"blk.{i}.ffn_gate_exps.weight", gate
        yield f"blk.{i}.ffn_up_exps.weight", up
        yield f"blk.{i}.ffn_down_exps.weight", of("output_linear")


def glm4(writer, config, tensors):
    norms = {
        "input_layernorm": "attn_norm", "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm",
    }
    mlp = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    return renamed(tensors, config["num_hidden_layers"], ATTENTION | mlp | norms)


def glm4_moe(writer, config, tensors):
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    shared = {f"mlp.shared_experts.{ours.removeprefix('mlp.')}": f"{theirs}_shexp" for ours, theirs in MLP.items()}
    names = ATTENTION | MLP | OTHER_NORMS | HEAD_NORMS | shared | {"mlp.gate": "ffn_gate_inp"}
    yield from renamed(tensors, config["num_hidden_layers"], names)
    yield from stacked(tensors, config, config["n_routed_experts"])
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor


def ministral3(writer, config, tensors):
    rope = config["rope_parameters"]
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    return permuted(config, renamed(tensors, config["num_hidden_layers"], ATTENTION | MLP | NORMS))


def cohere2(writer, config, tensors):
    writer.add_logit_scale(config["logit_scale"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    return renamed(tensors, config["num_hidden_layers"], ATTENTION | MLP | NORMS)


def gpt_neox(writer, config, tensors):
    writer.add_parallel_residual(config["use_parallel_residual"])
    outer = {"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output"}
    names = NORMS | {
        "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    }
    for name, tensor in renamed(tensors, config["num_hidden_layers"], names, outer, "gpt_neox.layers.{i}."):
        if "attn_qkv" in name:
            by_head = tensor.reshape(config["num_attention_heads"], 3, -1, *tensor.shape[1:])
            tensor = by_head.transpose(0, 1).reshape(tensor.shape)
        yield name, tensor


def gpt_oss(writer, config, tensors):
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    yield from renamed(tensors, config["num_hidden_layers"], ATTENTION | OTHER_NORMS | {"mlp.router": "ffn_gate_inp"})
    for i in range(config["num_hidden_layers"]):
        at = MODEL.format(i=i)
        yield f"blk.{i}.attn_sinks.weight", tensors[at + "self_attn.sinks"]
        of = lambda name: tensors[f"{at}mlp.experts.{name}"]
        for name, part in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
            blocks, scales = of("gate_up_proj_blocks")[:, part], of("gate_up_proj_scales")[:, part]
            yield f"blk.{i}.ffn_{name}_exps.weight", joined(blocks, scales)
            yield f"blk.{i}.ffn_{name}_exps.bias", of("gate_up_proj_bias")[:, part]
        yield f"blk.{i}.ffn_down_exps.weight", joined(of("down_proj_blocks"), of("down_proj_scales"))
        yield f"blk.{i}.ffn_down_exps.bias", of("down_proj_bias")


def joined(blocks, scales):
    """Puts numbers i and i + 16 in one byte, instead of neighbours, after the exponent."""
    numbers = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    low, high = numbers.chunk(2, dim=-1)
    return (torch.cat([scales[..., None], low | high << 4], dim=-1).flatten(-2).contiguous(),)


FAMILIES = {
    "olmo2": ("olmo2", olmo2), "olmo3": ("olmo2", olmo2), "granite": ("granite", granite),
    "granite-moe": ("granitemoe", granite), "glm4": ("glm4", glm4), "glm4-moe": ("glm4moe", glm4_moe),
    "ministral3": ("mistral3", ministral3), "cohere2": ("cohere2", cohere2), "gpt-neox": ("gptneox", gpt_neox),
    "gpt-oss": ("gpt-oss", gpt_oss),
}


if __name__ == "__main__":
    main()
