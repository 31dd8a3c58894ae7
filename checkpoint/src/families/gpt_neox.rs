//! GPT-NeoX, which Pythia is: attention and MLP each behind a LayerNorm of its own, side by side or in turn.

use super::definition::{
    AttentionBias, ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, TensorTables,
};
use super::llama::{HALVES, KEYS, LLAMA};
use crate::config::{Activation, BlockNorms, DecoderForm, NormKind};
use crate::names::rows::Dim::{Heads, Hidden, Inner, KvHeads, One, OneHead, Vocab};
use crate::names::rows::{Dim, EMBEDDING, HEAD, NORM, NORM_BIAS, QKV, TensorMapping, interleaved, part, renamed, row};

pub const GPT_NEOX: FamilyDefinition = FamilyDefinition {
    name: "GPT-NeoX",
    architecture: "gptneox",
    rules: FamilyRules { bias: AttentionBias::Required, ..LLAMA.rules },
    config: ConfigRules {
        class: "GPTNeoXForCausalLM",
        model_type: "gpt_neox",
        keys: &ConfigKeys { eps: "layer_norm_eps", theta: "rotary_emb_base", turned: "rotary_pct", ..KEYS },
        activations: &["gelu"],
        eps: 1e-5,
        turned: 0.25,
        ..LLAMA.config
    },
    readers: ConfigReaders {
        is_parallel: |keys| Ok(keys.bool("use_parallel_residual")?.unwrap_or(true)),
        ..LLAMA.readers
    },
    gguf: GgufRules { is_parallel: |keys| Ok(keys.bool("use_parallel_residual")?.unwrap_or(true)), ..HALVES },
    tensors: TensorTables {
        outer: NEOX_OUTER,
        layers: "gpt_neox.layers",
        norms: &[LAYER_NORMS],
        attention: &[NEOX_ATTENTION],
        bias: &[],
        mlp: &[NEOX_MLP],
        ..LLAMA.tensors
    },
    form: DecoderForm { activation: Activation::PlainGeluErf, norm_kind: NormKind::Layer, ..LLAMA.form },
    parallel_norms: Some(BlockNorms::SideBySide {
        attention: "input_layernorm",
        mlp: Some("post_attention_layernorm"),
    }),
    ..LLAMA
};

/// Q, K and V of a head stand together in a folder, and in a GGUF those of all heads.
const fn neox_qkv(name: &'static str, dims: [Dim; 2], files: [&'static str; 2], nth: usize) -> TensorMapping {
    const HEAD: &[Dim] = &[OneHead, OneHead, OneHead];
    let (before, of_head): (&[Dim], &[Dim]) = match nth {
        0 => (&[], &[]),
        1 => (&[Heads], &[OneHead]),
        _ => (&[Heads, KvHeads], &[OneHead, OneHead]),
    };
    TensorMapping {
        name,
        dims,
        folder: interleaved(part(files[0], &[], QKV), OneHead, of_head, HEAD),
        gguf: part(files[1], before, QKV),
    }
}

const NEOX_WEIGHT: [&str; 2] = ["attention.query_key_value.weight", "attn_qkv.weight"];
const NEOX_BIAS: [&str; 2] = ["attention.query_key_value.bias", "attn_qkv.bias"];
const LAYER_NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("input_layernorm.bias", [One, Hidden], "attn_norm.bias"),
    row("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
    row("post_attention_layernorm.bias", [One, Hidden], "ffn_norm.bias"),
];
const NEOX_ATTENTION: &[TensorMapping] = &[
    neox_qkv("self_attn.q_proj.weight", [Heads, Hidden], NEOX_WEIGHT, 0),
    neox_qkv("self_attn.k_proj.weight", [KvHeads, Hidden], NEOX_WEIGHT, 1),
    neox_qkv("self_attn.v_proj.weight", [KvHeads, Hidden], NEOX_WEIGHT, 2),
    neox_qkv("self_attn.q_proj.bias", [One, Heads], NEOX_BIAS, 0),
    neox_qkv("self_attn.k_proj.bias", [One, KvHeads], NEOX_BIAS, 1),
    neox_qkv("self_attn.v_proj.bias", [One, KvHeads], NEOX_BIAS, 2),
    renamed("self_attn.o_proj.weight", [Hidden, Heads], "attention.dense.weight", "attn_output.weight"),
    renamed("self_attn.o_proj.bias", [One, Hidden], "attention.dense.bias", "attn_output.bias"),
];
const NEOX_MLP: &[TensorMapping] = &[
    renamed("mlp.up_proj.weight", [Inner, Hidden], "mlp.dense_h_to_4h.weight", "ffn_up.weight"),
    renamed("mlp.up_proj.bias", [One, Inner], "mlp.dense_h_to_4h.bias", "ffn_up.bias"),
    renamed("mlp.down_proj.weight", [Hidden, Inner], "mlp.dense_4h_to_h.weight", "ffn_down.weight"),
    renamed("mlp.down_proj.bias", [One, Hidden], "mlp.dense_4h_to_h.bias", "ffn_down.bias"),
];
const NEOX_OUTER: &[TensorMapping] = &[
    renamed(EMBEDDING, [Vocab, Hidden], "gpt_neox.embed_in.weight", "token_embd.weight"),
    renamed(NORM, [One, Hidden], "gpt_neox.final_layer_norm.weight", "output_norm.weight"),
    renamed(NORM_BIAS, [One, Hidden], "gpt_neox.final_layer_norm.bias", "output_norm.bias"),
    renamed(HEAD, [Vocab, Hidden], "embed_out.weight", "output.weight"),
];
