//! The rows of families with recurrent layers. Their GGUFs are not read yet: the names there are those of folders.

use super::Dim::{
    Convolved, ExpertInner, Experts, Heads, HeadsOfKey, Hidden, Inner, Keys, KvHeads, One, OneHead, OneKey, OneValue,
    SharedInner, StateHeads, Taps, Values, ValuesOfKey, Vocab,
};
use super::{
    ATTENTION, Dim, EMBEDDING, EXPERTS, GRANITE_EXPERTS, HEAD, HEAD_NORMS, MLP, NORM, NORMS, TensorMapping,
    TensorSource, interleaved, part, whole,
};
use crate::config::{Family, LayerSpec, MixerKind, ModelSpec};

const fn tensor(name: &'static str, dims: [Dim; 2], place: TensorSource) -> TensorMapping {
    TensorMapping { name, dims, folder: place, gguf: place }
}

/// A tensor with the same name in the folder.
const fn same(name: &'static str, dims: [Dim; 2]) -> TensorMapping {
    tensor(name, dims, whole(name))
}

/// What the delta rule has besides its projections.
const DELTA: &[TensorMapping] = &[
    tensor("linear_attn.conv_q.weight", [Keys, Taps], part(CONV, &[], CHANNELS)),
    tensor("linear_attn.conv_k.weight", [Keys, Taps], part(CONV, &[Keys], CHANNELS)),
    tensor("linear_attn.conv_v.weight", [Values, Taps], part(CONV, &[Keys, Keys], CHANNELS)),
    same("linear_attn.A_log", [One, StateHeads]),
    same("linear_attn.dt_bias", [One, StateHeads]),
    same("linear_attn.norm.weight", [One, OneValue]),
    same("linear_attn.out_proj.weight", [Hidden, Values]),
];
const CONV: &str = "linear_attn.conv1d.weight";
const CHANNELS: &[Dim] = &[Keys, Keys, Values];

/// Each projection apart, but for Q, K and V.
const QWEN35: &[TensorMapping] = &[
    tensor("linear_attn.q_proj.weight", [Keys, Hidden], part(QKV, &[], CHANNELS)),
    tensor("linear_attn.k_proj.weight", [Keys, Hidden], part(QKV, &[Keys], CHANNELS)),
    tensor("linear_attn.v_proj.weight", [Values, Hidden], part(QKV, &[Keys, Keys], CHANNELS)),
    tensor("linear_attn.z_proj.weight", [Values, Hidden], whole("linear_attn.in_proj_z.weight")),
    tensor("linear_attn.b_proj.weight", [StateHeads, Hidden], whole("linear_attn.in_proj_b.weight")),
    tensor("linear_attn.a_proj.weight", [StateHeads, Hidden], whole("linear_attn.in_proj_a.weight")),
];
const QKV: &str = "linear_attn.in_proj_qkv.weight";

/// Those of one key head stand together: its Q and K, and V and z of the heads that read it.
const fn key_head_part(name: &'static str, dims: [Dim; 2], run: Dim, before: &'static [Dim]) -> TensorMapping {
    let whole = part("linear_attn.in_proj_qkvz.weight", &[], &[Keys, Keys, Values, Values]);
    tensor(name, dims, interleaved(whole, run, before, &[OneKey, OneKey, ValuesOfKey, ValuesOfKey]))
}

const fn key_head_gate(name: &'static str, before: &'static [Dim]) -> TensorMapping {
    let whole = part("linear_attn.in_proj_ba.weight", &[], &[StateHeads, StateHeads]);
    tensor(name, [StateHeads, Hidden], interleaved(whole, HeadsOfKey, before, &[HeadsOfKey, HeadsOfKey]))
}

const QWEN3_NEXT: &[TensorMapping] = &[
    key_head_part("linear_attn.q_proj.weight", [Keys, Hidden], OneKey, &[]),
    key_head_part("linear_attn.k_proj.weight", [Keys, Hidden], OneKey, &[OneKey]),
    key_head_part("linear_attn.v_proj.weight", [Values, Hidden], ValuesOfKey, &[OneKey, OneKey]),
    key_head_part("linear_attn.z_proj.weight", [Values, Hidden], ValuesOfKey, &[OneKey, OneKey, ValuesOfKey]),
    key_head_gate("linear_attn.b_proj.weight", &[]),
    key_head_gate("linear_attn.a_proj.weight", &[HeadsOfKey]),
];

/// Mamba-2, under a family's name for it. C is Q, B is K, x is V and dt is a; a file has them in another order.
macro_rules! mamba {
    ($at:literal) => {
        &[
            tensor(
                "linear_attn.z_proj.weight",
                [Values, Hidden],
                part(concat!($at, ".in_proj.weight"), &[], MAMBA_ALL),
            ),
            tensor(
                "linear_attn.v_proj.weight",
                [Values, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values], MAMBA_ALL),
            ),
            tensor(
                "linear_attn.k_proj.weight",
                [Keys, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values, Values], MAMBA_ALL),
            ),
            tensor(
                "linear_attn.q_proj.weight",
                [Keys, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values, Values, Keys], MAMBA_ALL),
            ),
            tensor(
                "linear_attn.a_proj.weight",
                [StateHeads, Hidden],
                part(concat!($at, ".in_proj.weight"), &[Values, Values, Keys, Keys], MAMBA_ALL),
            ),
            tensor("linear_attn.conv_v.weight", [Values, Taps], part(concat!($at, ".conv1d.weight"), &[], XBC)),
            tensor("linear_attn.conv_k.weight", [Keys, Taps], part(concat!($at, ".conv1d.weight"), &[Values], XBC)),
            tensor(
                "linear_attn.conv_q.weight",
                [Keys, Taps],
                part(concat!($at, ".conv1d.weight"), &[Values, Keys], XBC),
            ),
            tensor("linear_attn.conv_v.bias", [One, Values], part(concat!($at, ".conv1d.bias"), &[], XBC)),
            tensor("linear_attn.conv_k.bias", [One, Keys], part(concat!($at, ".conv1d.bias"), &[Values], XBC)),
            tensor("linear_attn.conv_q.bias", [One, Keys], part(concat!($at, ".conv1d.bias"), &[Values, Keys], XBC)),
            tensor("linear_attn.A_log", [One, StateHeads], whole(concat!($at, ".A_log"))),
            tensor("linear_attn.D", [One, StateHeads], whole(concat!($at, ".D"))),
            tensor("linear_attn.dt_bias", [One, StateHeads], whole(concat!($at, ".dt_bias"))),
            tensor("linear_attn.norm.weight", [One, Values], whole(concat!($at, ".norm.weight"))),
            tensor("linear_attn.out_proj.weight", [Hidden, Values], whole(concat!($at, ".out_proj.weight"))),
        ]
    };
}
const MAMBA: &[TensorMapping] = mamba!("mamba");
const MAMBA_ALL: &[Dim] = &[Values, Values, Keys, Keys, StateHeads];
const XBC: &[Dim] = &[Values, Keys, Keys];

/// Q and the gate of a head stand together.
const GATED_QUERY: &[TensorMapping] = &[
    tensor("self_attn.q_proj.weight", [Heads, Hidden], query_head_part(&[])),
    tensor("self_attn.g_proj.weight", [Heads, Hidden], query_head_part(&[OneHead])),
];

const fn query_head_part(before: &'static [Dim]) -> TensorSource {
    interleaved(part("self_attn.q_proj.weight", &[], &[Heads, Heads]), OneHead, before, &[OneHead, OneHead])
}

const GATED_SHARED_EXPERT: &[TensorMapping] = &[
    tensor("mlp.shared_experts.gate_proj.weight", [SharedInner, Hidden], whole("mlp.shared_expert.gate_proj.weight")),
    tensor("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], whole("mlp.shared_expert.up_proj.weight")),
    tensor("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], whole("mlp.shared_expert.down_proj.weight")),
    same("mlp.shared_expert_gate.weight", [One, Hidden]),
];

const GRANITE_SHARED: &[TensorMapping] = &[
    tensor("mlp.shared_experts.gate_proj.weight", [SharedInner, Hidden], part(GRANITE_IN, &[], SHARED)),
    tensor("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], part(GRANITE_IN, &[SharedInner], SHARED)),
    tensor("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], whole("shared_mlp.output_linear.weight")),
];
/// Without experts, what they would share is the MLP.
const GRANITE_MLP: &[TensorMapping] = &[
    tensor("mlp.gate_proj.weight", [Inner, Hidden], part(GRANITE_IN, &[], &[Inner, Inner])),
    tensor("mlp.up_proj.weight", [Inner, Hidden], part(GRANITE_IN, &[Inner], &[Inner, Inner])),
    tensor("mlp.down_proj.weight", [Hidden, Inner], whole("shared_mlp.output_linear.weight")),
];
const GRANITE_IN: &str = "shared_mlp.input_linear.weight";
const SHARED: &[Dim] = &[SharedInner, SharedInner];

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
pub(super) const LFM2_OUTER: &[TensorMapping] = &[
    same(EMBEDDING, [Vocab, Hidden]),
    tensor(NORM, [One, Hidden], whole("model.embedding_norm.weight")),
    same(HEAD, [Vocab, Hidden]),
];

/// Granite 4's form by other names.
const BAMBA: &[TensorMapping] = &[
    same("input_layernorm.weight", [One, Hidden]),
    tensor("post_attention_layernorm.weight", [One, Hidden], whole("pre_ff_layernorm.weight")),
    tensor("mlp.gate_proj.weight", [Inner, Hidden], whole("feed_forward.gate_proj.weight")),
    tensor("mlp.up_proj.weight", [Inner, Hidden], whole("feed_forward.up_proj.weight")),
    tensor("mlp.down_proj.weight", [Hidden, Inner], whole("feed_forward.down_proj.weight")),
];
pub(super) const BAMBA_OUTER: &[TensorMapping] = &[
    same(EMBEDDING, [Vocab, Hidden]),
    tensor(NORM, [One, Hidden], whole("model.final_layernorm.weight")),
    same(HEAD, [Vocab, Hidden]),
];

/// Whatever a layer is, it is called a mixer.
const NEMOTRON_NORM: &[TensorMapping] = &[same("norm.weight", [One, Hidden])];
const NEMOTRON_MAMBA: &[TensorMapping] = mamba!("mixer");
const NEMOTRON_ATTENTION: &[TensorMapping] = &[
    tensor("self_attn.q_proj.weight", [Heads, Hidden], whole("mixer.q_proj.weight")),
    tensor("self_attn.k_proj.weight", [KvHeads, Hidden], whole("mixer.k_proj.weight")),
    tensor("self_attn.v_proj.weight", [KvHeads, Hidden], whole("mixer.v_proj.weight")),
    tensor("self_attn.o_proj.weight", [Hidden, Heads], whole("mixer.o_proj.weight")),
];
const NEMOTRON_MLP: &[TensorMapping] = &[
    tensor("mlp.up_proj.weight", [Inner, Hidden], whole("mixer.up_proj.weight")),
    tensor("mlp.down_proj.weight", [Hidden, Inner], whole("mixer.down_proj.weight")),
];
const NEMOTRON_EXPERTS: &[TensorMapping] = &[
    tensor("mlp.gate.weight", [Experts, Hidden], whole("mixer.gate.weight")),
    tensor("mlp.gate.e_score_correction_bias", [One, Experts], whole("mixer.gate.e_score_correction_bias")),
    tensor("mlp.experts.{e}.up_proj.weight", [ExpertInner, Hidden], whole("mixer.experts.{e}.up_proj.weight")),
    tensor("mlp.experts.{e}.down_proj.weight", [Hidden, ExpertInner], whole("mixer.experts.{e}.down_proj.weight")),
    tensor("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], whole("mixer.shared_experts.up_proj.weight")),
    tensor(
        "mlp.shared_experts.down_proj.weight",
        [Hidden, SharedInner],
        whole("mixer.shared_experts.down_proj.weight"),
    ),
];
pub(super) const NEMOTRON_OUTER: &[TensorMapping] = &[
    tensor(EMBEDDING, [Vocab, Hidden], whole("backbone.embeddings.weight")),
    tensor(NORM, [One, Hidden], whole("backbone.norm_f.weight")),
    same(HEAD, [Vocab, Hidden]),
];

/// The rows of a layer.
pub(super) fn layer_rows(spec: &ModelSpec, layer: &LayerSpec) -> Vec<&'static [TensorMapping]> {
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

fn lfm2_rows(layer: &LayerSpec) -> Vec<&'static [TensorMapping]> {
    let mixer = if layer.mixer == MixerKind::Convolution { LFM2_CONVOLUTION } else { LFM2_ATTENTION };
    vec![LFM2_NORMS, mixer, if layer.has_experts { LFM2_EXPERTS } else { LFM2_MLP }]
}

fn nemotron_rows(layer: &LayerSpec) -> Vec<&'static [TensorMapping]> {
    let sublayer = match layer.mixer {
        MixerKind::Recurrence => NEMOTRON_MAMBA,
        MixerKind::Attention | MixerKind::Convolution => NEMOTRON_ATTENTION,
        MixerKind::None if layer.has_experts => NEMOTRON_EXPERTS,
        MixerKind::None => NEMOTRON_MLP,
    };
    vec![NEMOTRON_NORM, sublayer]
}
