//! LFM2 and its mixture of experts: most layers are short convolutions.

use super::definition::{
    ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, TensorTables,
};
use super::experts::{sigmoid_gguf_experts, softmax_experts};
use super::llama::{HALVES, KEYS, LLAMA};
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{ConvolutionSpec, ExpertScores, ExpertsSpec, LayerSpec, MixerSpec, QueryKeyNorms, length};
use crate::error::ParseError;
use crate::names::rows::Dim::{
    Convolved, ExpertInner, Experts, Heads, Hidden, Inner, KvHeads, One, OneHead, Taps, Vocab,
};
use crate::names::rows::{Dim, EMBEDDING, HEAD, NORM, TensorMapping, expert, part, renamed, row, stored};

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
    gguf: GgufRules { layer: gguf_layer, ..HALVES },
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
    gguf: GgufRules { experts: |keys, inner| sigmoid_gguf_experts(keys, inner).map(Some), ..LFM2.gguf },
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
    Ok(convolution_of(keys.length(KEYS.hidden)?, keys.optional("conv_L_cache")?.unwrap_or(3)))
}

fn convolution_of(hidden: u32, taps: u32) -> ConvolutionSpec {
    // Each run is a leaf of a sum: they end on multiples of 32, and there are at most 64.
    let width = [32, 64, 128].into_iter().find(|width| hidden.is_multiple_of(*width) && hidden / width <= 64);
    let width = width.unwrap_or(hidden);
    ConvolutionSpec { n: hidden / width.max(1), width, taps }
}

/// A layer without heads of K is a convolution.
fn gguf_layer(keys: &GgufKeys<'_>, layer: u32, usual: LayerSpec) -> Result<LayerSpec, ParseError> {
    let of = convolution_of(keys.length("embedding_length")?, keys.length("shortconv.l_cache")?);
    Ok(match keys.of_layer("attention.head_count_kv", layer)? {
        Some(0) => LayerSpec { mixer: MixerSpec::Convolution(of), window: None, ..usual },
        _ => usual,
    })
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
    renamed("input_layernorm.weight", [One, Hidden], "operator_norm.weight", "attn_norm.weight"),
    renamed("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight", "ffn_norm.weight"),
];
const LFM2_MLP: &[TensorMapping] = &[
    renamed("mlp.gate_proj.weight", [Inner, Hidden], "feed_forward.w1.weight", "ffn_gate.weight"),
    renamed("mlp.up_proj.weight", [Inner, Hidden], "feed_forward.w3.weight", "ffn_up.weight"),
    renamed("mlp.down_proj.weight", [Hidden, Inner], "feed_forward.w2.weight", "ffn_down.weight"),
];
const LFM2_EXPERTS: &[TensorMapping] = &[
    renamed("mlp.gate.weight", [Experts, Hidden], "feed_forward.gate.weight", "ffn_gate_inp.weight"),
    renamed("mlp.gate.e_score_correction_bias", [One, Experts], "feed_forward.expert_bias", "exp_probs_b.bias"),
    expert(
        "mlp.experts.{e}.gate_proj.weight",
        [ExpertInner, Hidden],
        "feed_forward.experts.{e}.w1.weight",
        "ffn_gate_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.up_proj.weight",
        [ExpertInner, Hidden],
        "feed_forward.experts.{e}.w3.weight",
        "ffn_up_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "feed_forward.experts.{e}.w2.weight",
        "ffn_down_exps.weight",
    ),
];
const LFM2_ATTENTION: &[TensorMapping] = &[
    row("self_attn.q_proj.weight", [Heads, Hidden], "attn_q.weight"),
    row("self_attn.k_proj.weight", [KvHeads, Hidden], "attn_k.weight"),
    row("self_attn.v_proj.weight", [KvHeads, Hidden], "attn_v.weight"),
    renamed("self_attn.o_proj.weight", [Hidden, Heads], "self_attn.out_proj.weight", "attn_output.weight"),
    renamed("self_attn.q_norm.weight", [One, OneHead], "self_attn.q_layernorm.weight", "attn_q_norm.weight"),
    renamed("self_attn.k_norm.weight", [One, OneHead], "self_attn.k_layernorm.weight", "attn_k_norm.weight"),
];
const fn gate(name: &'static str, before: &'static [Dim]) -> TensorMapping {
    stored(name, [Convolved, Hidden], part("conv.in_proj.weight", before, CONVOLVED), "shortconv.in_proj.weight")
}
const LFM2_CONVOLUTION: &[TensorMapping] = &[
    gate("conv.b_proj.weight", &[]),
    gate("conv.c_proj.weight", &[Convolved]),
    gate("conv.x_proj.weight", &[Convolved, Convolved]),
    row("conv.conv.weight", [Convolved, Taps], "shortconv.conv.weight"),
    row("conv.out_proj.weight", [Hidden, Convolved], "shortconv.out_proj.weight"),
];
const CONVOLVED: &[Dim] = &[Convolved, Convolved, Convolved];
/// In a GGUF the last norm has the name of one behind the embedding.
const LFM2_OUTER: &[TensorMapping] = &[
    row(EMBEDDING, [Vocab, Hidden], "token_embd.weight"),
    renamed(NORM, [One, Hidden], "model.embedding_norm.weight", "token_embd_norm.weight"),
    row(HEAD, [Vocab, Hidden], "output.weight"),
];
