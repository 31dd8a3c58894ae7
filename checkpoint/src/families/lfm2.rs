//! LFM2 and its mixture of experts: most layers are short convolutions. Their GGUFs are not read.

use super::definition::{ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, TensorTables};
use super::experts::softmax_experts;
use super::llama::{KEYS, LLAMA, UNREAD};
use crate::config::json::keys::JsonKeys;
use crate::config::{ConvolutionSpec, ExpertScores, ExpertsSpec, MixerSpec, QueryKeyNorms, length};
use crate::error::ParseError;
use crate::names::rows::Dim::{
    Convolved, ExpertInner, Experts, Heads, Hidden, Inner, KvHeads, One, OneHead, Taps, Vocab,
};
use crate::names::rows::{Dim, EMBEDDING, HEAD, NORM, TensorMapping, part, same, tensor, whole};

pub const LFM2: FamilyDefinition = FamilyDefinition {
    name: "LFM2",
    architecture: "lfm2",
    rules: FamilyRules { query_key_norms: QueryKeyNorms::Heads, ..LLAMA.rules },
    config: ConfigRules {
        class: "Lfm2ForCausalLM",
        model_type: "lfm2",
        keys: &ConfigKeys { eps: "norm_eps", ..KEYS },
        eps: 1e-5,
        theta: 1_000_000.0,
        is_tied: true,
        ..LLAMA.config
    },
    readers: ConfigReaders { inner: |keys, _, _| adjusted_inner(keys), mixer, ..LLAMA.readers },
    gguf: UNREAD,
    tensors: TensorTables {
        outer: LFM2_OUTER,
        norms: &[LFM2_NORMS],
        attention: &[LFM2_ATTENTION],
        query_key_norms: &[],
        convolution: &[LFM2_CONVOLUTION],
        mlp: &[LFM2_MLP],
        experts: &[LFM2_EXPERTS],
        ..LLAMA.tensors
    },
    ..LLAMA
};

pub const LFM2_MOE: FamilyDefinition = FamilyDefinition {
    name: "LFM2 MoE",
    architecture: "lfm2moe",
    config: ConfigRules {
        class: "Lfm2MoeForCausalLM",
        model_type: "lfm2_moe",
        dense_layers: ("num_dense_layers", 2),
        ..LFM2.config
    },
    readers: ConfigReaders { inner: LLAMA.readers.inner, experts: |keys| experts(keys).map(Some), ..LFM2.readers },
    ..LFM2
};

fn experts(keys: &JsonKeys<'_>) -> Result<ExpertsSpec, ParseError> {
    if keys.bool("use_expert_bias")? == Some(false) {
        return ParseError::unsupported("a model without use_expert_bias");
    }
    let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
    Ok(ExpertsSpec {
        scores: ExpertScores::Sigmoid { n: 1, n_used: 1 },
        factor: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
        ..softmax_experts(keys, keys.length("num_experts")?, keys.length("moe_intermediate_size")?, normalized)?
    })
}

/// Returns the short convolution over all channels of the stream.
fn convolution(keys: &JsonKeys<'_>) -> Result<ConvolutionSpec, ParseError> {
    if keys.bool("conv_bias")?.unwrap_or(false) {
        return ParseError::unsupported("a model with conv_bias");
    }
    let hidden = keys.length(KEYS.hidden)?;
    // Each run is a leaf of a sum: they end on multiples of 32, and there are at most 64.
    let width = [32, 64, 128].into_iter().find(|width| hidden.is_multiple_of(*width) && hidden / width <= 64);
    let width = width.unwrap_or(hidden);
    let taps = keys.optional("conv_L_cache")?.unwrap_or(3);
    Ok(ConvolutionSpec { n: hidden / width.max(1), width, taps })
}

/// Returns the width of the MLP, which a config may only imply.
fn adjusted_inner(keys: &JsonKeys<'_>) -> Result<u32, ParseError> {
    let given = keys.optional("block_ff_dim")?.map_or_else(|| keys.length("intermediate_size"), Ok)?;
    if keys.bool("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(given);
    }
    let multiplier = keys.float("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let scaled = (f64::from(multiplier) * f64::from(2 * given / 3)) as u32;
    let unit = keys.optional("block_multiple_of")?.unwrap_or(256).max(1);
    length("the MLP's width", u64::from(scaled.div_ceil(unit)) * u64::from(unit))
}

fn mixer(keys: &JsonKeys<'_>, layer: u32, listed: Option<&str>) -> Result<MixerSpec, ParseError> {
    let is_attention = match (listed, keys.lengths("full_attn_idxs")?) {
        (Some(name), _) => name != "conv",
        (None, indices) => indices.is_none_or(|indices| indices.contains(&layer)),
    };
    Ok(if is_attention { MixerSpec::Attention } else { MixerSpec::Convolution(convolution(keys)?) })
}

const LFM2_NORMS: &[TensorMapping] = &[
    tensor("input_layernorm.weight", [One, Hidden], whole("operator_norm.weight")),
    tensor("post_attention_layernorm.weight", [One, Hidden], whole("ffn_norm.weight")),
];
const LFM2_MLP: &[TensorMapping] = &[
    tensor("mlp.gate_proj.weight", [Inner, Hidden], whole("feed_forward.w1.weight")),
    tensor("mlp.up_proj.weight", [Inner, Hidden], whole("feed_forward.w3.weight")),
    tensor("mlp.down_proj.weight", [Hidden, Inner], whole("feed_forward.w2.weight")),
];
const LFM2_EXPERTS: &[TensorMapping] = &[
    tensor("mlp.gate.weight", [Experts, Hidden], whole("feed_forward.gate.weight")),
    tensor("mlp.gate.e_score_correction_bias", [One, Experts], whole("feed_forward.expert_bias")),
    tensor("mlp.experts.{e}.gate_proj.weight", [ExpertInner, Hidden], whole("feed_forward.experts.{e}.w1.weight")),
    tensor("mlp.experts.{e}.up_proj.weight", [ExpertInner, Hidden], whole("feed_forward.experts.{e}.w3.weight")),
    tensor("mlp.experts.{e}.down_proj.weight", [Hidden, ExpertInner], whole("feed_forward.experts.{e}.w2.weight")),
];
const LFM2_ATTENTION: &[TensorMapping] = &[
    same("self_attn.q_proj.weight", [Heads, Hidden]),
    same("self_attn.k_proj.weight", [KvHeads, Hidden]),
    same("self_attn.v_proj.weight", [KvHeads, Hidden]),
    tensor("self_attn.o_proj.weight", [Hidden, Heads], whole("self_attn.out_proj.weight")),
    tensor("self_attn.q_norm.weight", [One, OneHead], whole("self_attn.q_layernorm.weight")),
    tensor("self_attn.k_norm.weight", [One, OneHead], whole("self_attn.k_layernorm.weight")),
];
const LFM2_CONVOLUTION: &[TensorMapping] = &[
    tensor("conv.b_proj.weight", [Convolved, Hidden], part("conv.in_proj.weight", &[], CONVOLVED)),
    tensor("conv.c_proj.weight", [Convolved, Hidden], part("conv.in_proj.weight", &[Convolved], CONVOLVED)),
    tensor("conv.x_proj.weight", [Convolved, Hidden], part("conv.in_proj.weight", &[Convolved, Convolved], CONVOLVED)),
    tensor("conv.conv.weight", [Convolved, Taps], whole("conv.conv.weight")),
    same("conv.out_proj.weight", [Hidden, Convolved]),
];
const CONVOLVED: &[Dim] = &[Convolved, Convolved, Convolved];
const LFM2_OUTER: &[TensorMapping] = &[
    same(EMBEDDING, [Vocab, Hidden]),
    tensor(NORM, [One, Hidden], whole("model.embedding_norm.weight")),
    same(HEAD, [Vocab, Hidden]),
];
