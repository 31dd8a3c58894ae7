//! The rows of families with recurrent layers. Their GGUFs are not read yet: the names there are those of folders.

use super::Dim::{
    Convolved, ExpertInner, Experts, Heads, HeadsOfKey, Hidden, Inner, Keys, KvHeads, One, OneHead, OneKey, OneValue,
    SharedInner, StateHeads, Taps, Values, ValuesOfKey, Vocab,
};
use super::{
    ATTENTION, Dim, EMBEDDING, EXPERTS, GRANITE_EXPERTS, HEAD, HEAD_NORMS, MLP, NORM, NORMS, TensorRow, TensorSource,
    at, part, woven,
};
use crate::config::{Family, LayerSpec, MixerKind, ModelSpec};

const fn of(name: &'static str, dims: [Dim; 2], place: TensorSource) -> TensorRow {
    TensorRow { name, dims, folder: place, gguf: place }
}

/// A tensor with the same name in the folder.
const fn same(name: &'static str, dims: [Dim; 2]) -> TensorRow {
    of(name, dims, at(name))
}

/// What the delta rule has besides its projections.
const DELTA: &[TensorRow] = &[
    of("linear_attn.conv_q.weight", [Keys, Taps], part(CONV, &[], CHANNELS)),
    of("linear_attn.conv_k.weight", [Keys, Taps], part(CONV, &[Keys], CHANNELS)),
    of("linear_attn.conv_v.weight", [Values, Taps], part(CONV, &[Keys, Keys], CHANNELS)),
    same("linear_attn.A_log", [One, StateHeads]),
    same("linear_attn.dt_bias", [One, StateHeads]),
    same("linear_attn.norm.weight", [One, OneValue]),
    same("linear_attn.out_proj.weight", [Hidden, Values]),
];
const CONV: &str = "linear_attn.conv1d.weight";
const CHANNELS: &[Dim] = &[Keys, Keys, Values];

/// Each projection apart, but for Q, K and V.
const QWEN35: &[TensorRow] = &[
    of("linear_attn.q_proj.weight", [Keys, Hidden], part(QKV, &[], CHANNELS)),
    of("linear_attn.k_proj.weight", [Keys, Hidden], part(QKV, &[Keys], CHANNELS)),
    of("linear_attn.v_proj.weight", [Values, Hidden], part(QKV, &[Keys, Keys], CHANNELS)),
    of("linear_attn.z_proj.weight", [Values, Hidden], at("linear_attn.in_proj_z.weight")),
    of("linear_attn.b_proj.weight", [StateHeads, Hidden], at("linear_attn.in_proj_b.weight")),
    of("linear_attn.a_proj.weight", [StateHeads, Hidden], at("linear_attn.in_proj_a.weight")),
];
const QKV: &str = "linear_attn.in_proj_qkv.weight";

/// Those of one key head stand together: its Q and K, and V and z of the heads that read it.
const fn of_key(name: &'static str, dims: [Dim; 2], run: Dim, before: &'static [Dim]) -> TensorRow {
    let whole = part("linear_attn.in_proj_qkvz.weight", &[], &[Keys, Keys, Values, Values]);
    of(name, dims, woven(whole, run, before, &[OneKey, OneKey, ValuesOfKey, ValuesOfKey]))
}

const fn gate_of_key(name: &'static str, before: &'static [Dim]) -> TensorRow {
    let whole = part("linear_attn.in_proj_ba.weight", &[], &[StateHeads, StateHeads]);
    of(name, [StateHeads, Hidden], woven(whole, HeadsOfKey, before, &[HeadsOfKey, HeadsOfKey]))
}

const QWEN3_NEXT: &[TensorRow] = &[
    of_key("linear_attn.q_proj.weight", [Keys, Hidden], OneKey, &[]),
    of_key("linear_attn.k_proj.weight", [Keys, Hidden], OneKey, &[OneKey]),
    of_key("linear_attn.v_proj.weight", [Values, Hidden], ValuesOfKey, &[OneKey, OneKey]),
    of_key("linear_attn.z_proj.weight", [Values, Hidden], ValuesOfKey, &[OneKey, OneKey, ValuesOfKey]),
    gate_of_key("linear_attn.b_proj.weight", &[]),
    gate_of_key("linear_attn.a_proj.weight", &[HeadsOfKey]),
];

/// Mamba-2, under a family's name for it. C is Q, B is K, x is V and dt is a; a file has them in another order.
macro_rules! mamba {
    ($at:literal) => {
        &[
            of("linear_attn.z_proj.weight", [Values, Hidden], part(concat!($at, ".in_proj.weight"), &[], MAMBA_ALL)),
            of(
                "linear_attn.v_proj.weight",
                [Values, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values], MAMBA_ALL),
            ),
            of(
                "linear_attn.k_proj.weight",
                [Keys, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values, Values], MAMBA_ALL),
            ),
            of(
                "linear_attn.q_proj.weight",
                [Keys, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values, Values, Keys], MAMBA_ALL),
            ),
            of(
                "linear_attn.a_proj.weight",
                [StateHeads, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values, Values, Keys, Keys], MAMBA_ALL),
            ),
            of("linear_attn.conv_v.weight", [Values, Taps], part(concat!($at, ".conv1d.weight"), &[], XBC)),
            of("linear_attn.conv_k.weight", [Keys, Taps], part(concat!($at, ".conv1d.weight"), &[Values], XBC)),
            of("linear_attn.conv_q.weight", [Keys, Taps], part(concat!($at, ".conv1d.weight"), &[Values, Keys], XBC)),
            of("linear_attn.conv_v.bias", [One, Values], part(concat!($at, ".conv1d.bias"), &[], XBC)),
            of("linear_attn.conv_k.bias", [One, Keys], part(concat!($at, ".conv1d.bias"), &[Values], XBC)),
            of("linear_attn.conv_q.bias", [One, Keys], part(concat!($at, ".conv1d.bias"), &[Values, Keys], XBC)),
            of("linear_attn.A_log", [One, StateHeads], at(concat!($at, ".A_log"))),
            of("linear_attn.D", [One, StateHeads], at(concat!($at, ".D"))),
            of("linear_attn.dt_bias", [One, StateHeads], at(concat!($at, ".dt_bias"))),
            of("linear_attn.norm.weight", [One, Values], at(concat!($at, ".norm.weight"))),
            of("linear_attn.out_proj.weight", [Hidden, Values], at(concat!($at, ".out_proj.weight"))),
        ]
    };
}
const MAMBA: &[TensorRow] = mamba!("mamba");
const MAMBA_ALL: &[Dim] = &[Values, Values, Keys, Keys, StateHeads];
const XBC: &[Dim] = &[Values, Keys, Keys];

/// Q and the gate of a head stand together.
const GATED_QUERY: &[TensorRow] = &[
    of("self_attn.q_proj.weight", [Heads, Hidden], of_query(&[])),
    of("self_attn.g_proj.weight", [Heads, Hidden], of_query(&[OneHead])),
];

const fn of_query(before: &'static [Dim]) -> TensorSource {
    woven(part("self_attn.q_proj.weight", &[], &[Heads, Heads]), OneHead, before, &[OneHead, OneHead])
}

const GATED_SHARED_EXPERT: &[TensorRow] = &[
    of("mlp.shared_experts.gate_proj.weight", [SharedInner, Hidden], at("mlp.shared_expert.gate_proj.weight")),
    of("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], at("mlp.shared_expert.up_proj.weight")),
    of("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], at("mlp.shared_expert.down_proj.weight")),
    same("mlp.shared_expert_gate.weight", [One, Hidden]),
];

const GRANITE_SHARED: &[TensorRow] = &[
    of("mlp.shared_experts.gate_proj.weight", [SharedInner, Hidden], part(GRANITE_IN, &[], SHARED)),
    of("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], part(GRANITE_IN, &[SharedInner], SHARED)),
    of("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], at("shared_mlp.output_linear.weight")),
];
/// Without experts, what they would share is the MLP.
const GRANITE_MLP: &[TensorRow] = &[
    of("mlp.gate_proj.weight", [Inner, Hidden], part(GRANITE_IN, &[], &[Inner, Inner])),
    of("mlp.up_proj.weight", [Inner, Hidden], part(GRANITE_IN, &[Inner], &[Inner, Inner])),
    of("mlp.down_proj.weight", [Hidden, Inner], at("shared_mlp.output_linear.weight")),
];
const GRANITE_IN: &str = "shared_mlp.input_linear.weight";
const SHARED: &[Dim] = &[SharedInner, SharedInner];

const LFM2_NORMS: &[TensorRow] = &[
    of("input_layernorm.weight", [One, Hidden], at("operator_norm.weight")),
    of("post_attention_layernorm.weight", [One, Hidden], at("ffn_norm.weight")),
];
const LFM2_MLP: &[TensorRow] = &[
    of("mlp.gate_proj.weight", [Inner, Hidden], at("feed_forward.w1.weight")),
    of("mlp.up_proj.weight", [Inner, Hidden], at("feed_forward.w3.weight")),
    of("mlp.down_proj.weight", [Hidden, Inner], at("feed_forward.w2.weight")),
];
const LFM2_EXPERTS: &[TensorRow] = &[
    of("mlp.gate.weight", [Experts, Hidden], at("feed_forward.gate.weight")),
    of("mlp.gate.e_score_correction_bias", [One, Experts], at("feed_forward.expert_bias")),
    of("mlp.experts.{e}.gate_proj.weight", [ExpertInner, Hidden], at("feed_forward.experts.{e}.w1.weight")),
    of("mlp.experts.{e}.up_proj.weight", [ExpertInner, Hidden], at("feed_forward.experts.{e}.w3.weight")),
    of("mlp.experts.{e}.down_proj.weight", [Hidden, ExpertInner], at("feed_forward.experts.{e}.w2.weight")),
];
const LFM2_ATTENTION: &[TensorRow] = &[
    same("self_attn.q_proj.weight", [Heads, Hidden]),
    same("self_attn.k_proj.weight", [KvHeads, Hidden]),
    same("self_attn.v_proj.weight", [KvHeads, Hidden]),
    of("self_attn.o_proj.weight", [Hidden, Heads], at("self_attn.out_proj.weight")),
    of("self_attn.q_norm.weight", [One, OneHead], at("self_attn.q_layernorm.weight")),
    of("self_attn.k_norm.weight", [One, OneHead], at("self_attn.k_layernorm.weight")),
];
const LFM2_CONVOLUTION: &[TensorRow] = &[
    of("conv.b_proj.weight", [Convolved, Hidden], part("conv.in_proj.weight", &[], CONVOLVED)),
    of("conv.c_proj.weight", [Convolved, Hidden], part("conv.in_proj.weight", &[Convolved], CONVOLVED)),
    of("conv.x_proj.weight", [Convolved, Hidden], part("conv.in_proj.weight", &[Convolved, Convolved], CONVOLVED)),
    of("conv.conv.weight", [Convolved, Taps], at("conv.conv.weight")),
    same("conv.out_proj.weight", [Hidden, Convolved]),
];
const CONVOLVED: &[Dim] = &[Convolved, Convolved, Convolved];
pub(super) const LFM2_OUTER: &[TensorRow] = &[
    same(EMBEDDING, [Vocab, Hidden]),
    of(NORM, [One, Hidden], at("model.embedding_norm.weight")),
    same(HEAD, [Vocab, Hidden]),
];

/// Granite 4's form by other names.
const BAMBA: &[TensorRow] = &[
    same("input_layernorm.weight", [One, Hidden]),
    of("post_attention_layernorm.weight", [One, Hidden], at("pre_ff_layernorm.weight")),
    of("mlp.gate_proj.weight", [Inner, Hidden], at("feed_forward.gate_proj.weight")),
    of("mlp.up_proj.weight", [Inner, Hidden], at("feed_forward.up_proj.weight")),
    of("mlp.down_proj.weight", [Hidden, Inner], at("feed_forward.down_proj.weight")),
];
pub(super) const BAMBA_OUTER: &[TensorRow] = &[
    same(EMBEDDING, [Vocab, Hidden]),
    of(NORM, [One, Hidden], at("model.final_layernorm.weight")),
    same(HEAD, [Vocab, Hidden]),
];

/// Whatever a layer is, it is called a mixer.
const NEMOTRON_NORM: &[TensorRow] = &[same("norm.weight", [One, Hidden])];
const NEMOTRON_MAMBA: &[TensorRow] = mamba!("mixer");
const NEMOTRON_ATTENTION: &[TensorRow] = &[
    of("self_attn.q_proj.weight", [Heads, Hidden], at("mixer.q_proj.weight")),
    of("self_attn.k_proj.weight", [KvHeads, Hidden], at("mixer.k_proj.weight")),
    of("self_attn.v_proj.weight", [KvHeads, Hidden], at("mixer.v_proj.weight")),
    of("self_attn.o_proj.weight", [Hidden, Heads], at("mixer.o_proj.weight")),
];
const NEMOTRON_MLP: &[TensorRow] = &[
    of("mlp.up_proj.weight", [Inner, Hidden], at("mixer.up_proj.weight")),
    of("mlp.down_proj.weight", [Hidden, Inner], at("mixer.down_proj.weight")),
];
const NEMOTRON_EXPERTS: &[TensorRow] = &[
    of("mlp.gate.weight", [Experts, Hidden], at("mixer.gate.weight")),
    of("mlp.gate.e_score_correction_bias", [One, Experts], at("mixer.gate.e_score_correction_bias")),
    of("mlp.experts.{e}.up_proj.weight", [ExpertInner, Hidden], at("mixer.experts.{e}.up_proj.weight")),
    of("mlp.experts.{e}.down_proj.weight", [Hidden, ExpertInner], at("mixer.experts.{e}.down_proj.weight")),
    of("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], at("mixer.shared_experts.up_proj.weight")),
    of("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], at("mixer.shared_experts.down_proj.weight")),
];
pub(super) const NEMOTRON_OUTER: &[TensorRow] = &[
    of(EMBEDDING, [Vocab, Hidden], at("backbone.embeddings.weight")),
    of(NORM, [One, Hidden], at("backbone.norm_f.weight")),
    same(HEAD, [Vocab, Hidden]),
];

/// The rows of a layer.
pub(super) fn layer_rows(spec: &ModelSpec, layer: &LayerSpec) -> Vec<&'static [TensorRow]> {
    match spec.family {
        Family::Lfm2 | Family::Lfm2Moe => return lfm2_rows(layer),
        Family::NemotronH => return nemotron_rows(layer),
        Family::Bamba if layer.mixer == MixerKind::Recurrence => return vec![BAMBA, MAMBA],
        Family::Bamba => return vec![BAMBA, ATTENTION],
        _ => {}
    }
    let mut rows = vec![NORMS];
    match (layer.mixer, spec.family) {
        (MixerKind::Recurrence, Family::GraniteHybrid) => rows.push(MAMBA),
        (MixerKind::Recurrence, Family::Qwen3Next) => rows.extend([QWEN3_NEXT, DELTA]),
        (MixerKind::Recurrence, _) => rows.extend([QWEN35, DELTA]),
        (MixerKind::Attention, Family::GraniteHybrid) => rows.push(ATTENTION),
        // The first of these rows is the query's, which stands with the gate.
        (_, _) => rows.extend([GATED_QUERY, ATTENTION.split_at(1).1, HEAD_NORMS]),
    }
    match (spec.family, layer.has_experts) {
        (Family::GraniteHybrid, true) => rows.extend([GRANITE_EXPERTS, GRANITE_SHARED]),
        (Family::GraniteHybrid, false) => rows.push(GRANITE_MLP),
        (_, true) if spec.experts.is_some_and(|of| of.shared > 0) => rows.extend([EXPERTS, GATED_SHARED_EXPERT]),
        (_, true) => rows.push(EXPERTS),
        (_, false) => rows.push(MLP),
    }
    rows
}

fn lfm2_rows(layer: &LayerSpec) -> Vec<&'static [TensorRow]> {
    let mixer = if layer.mixer == MixerKind::Convolution { LFM2_CONVOLUTION } else { LFM2_ATTENTION };
    vec![LFM2_NORMS, mixer, if layer.has_experts { LFM2_EXPERTS } else { LFM2_MLP }]
}

fn nemotron_rows(layer: &LayerSpec) -> Vec<&'static [TensorRow]> {
    let sublayer = match layer.mixer {
        MixerKind::Recurrence => NEMOTRON_MAMBA,
        MixerKind::Attention | MixerKind::Convolution => NEMOTRON_ATTENTION,
        MixerKind::None if layer.has_experts => NEMOTRON_EXPERTS,
        MixerKind::None => NEMOTRON_MLP,
    };
    vec![NEMOTRON_NORM, sublayer]
}
