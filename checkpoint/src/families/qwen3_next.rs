//! Qwen3-Next and Qwen3.5: three layers of four are a recurrence, and attention has a gate behind it.
//! Their GGUFs are not read.

use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, TensorTables};
use super::experts::{n_experts, no_experts, softmax_experts};
use super::llama::{LLAMA, UNREAD};
use crate::config::json::keys::JsonKeys;
use crate::config::{ExpertsSpec, MixerSpec, QueryKeyNorms, RecurrenceRule, RecurrenceSpec};
use crate::error::ParseError;
use crate::names::rows::Dim::{
    Heads, HeadsOfKey, Hidden, Keys, One, OneHead, OneKey, OneValue, SharedInner, StateHeads, Taps, Values, ValuesOfKey,
};
use crate::names::rows::{ATTENTION, Dim, TensorMapping, TensorSource, interleaved, part, same, tensor, whole};

pub const QWEN3_NEXT: FamilyDefinition = FamilyDefinition {
    name: "Qwen3-Next",
    architecture: "qwen3next",
    rules: FamilyRules { query_key_norms: QueryKeyNorms::Heads, has_gate: true, ..LLAMA.rules },
    config: ConfigRules {
        class: "Qwen3NextForCausalLM",
        model_type: "qwen3_next",
        turned: 0.25,
        norm_offset: 1.0,
        ..LLAMA.config
    },
    readers: ConfigReaders { experts, mixer, ..LLAMA.readers },
    gguf: UNREAD,
    tensors: TensorTables {
        // The first of attention's rows is the query's, which stands with the gate.
        attention: &[GATED_QUERY, ATTENTION.split_at(1).1],
        recurrence: &[WOVEN_PROJECTIONS, DELTA],
        shared_expert: &[GATED_SHARED_EXPERT],
        ..LLAMA.tensors
    },
    ..LLAMA
};

pub const QWEN35: FamilyDefinition = FamilyDefinition {
    name: "Qwen3.5",
    architecture: "qwen35",
    config: ConfigRules {
        class: "Qwen3_5ForCausalLM",
        model_type: "qwen3_5_text",
        image_class: Some("Qwen3_5ForConditionalGeneration"),
        ..QWEN3_NEXT.config
    },
    readers: ConfigReaders { experts: no_experts, ..QWEN3_NEXT.readers },
    tensors: TensorTables { recurrence: &[PROJECTIONS, DELTA], ..QWEN3_NEXT.tensors },
    ..QWEN3_NEXT
};

pub const QWEN35_MOE: FamilyDefinition = FamilyDefinition {
    name: "Qwen3.5 MoE",
    architecture: "qwen35moe",
    config: ConfigRules {
        class: "Qwen3_5MoeForCausalLM",
        model_type: "qwen3_5_moe_text",
        image_class: Some("Qwen3_5MoeForConditionalGeneration"),
        ..QWEN35.config
    },
    readers: ConfigReaders {
        experts,
        // Without a dense layer, the config contains no width for one.
        inner: |keys, _, _| keys.length("moe_intermediate_size"),
        ..QWEN35.readers
    },
    ..QWEN35
};

fn experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    let n = n_experts(keys, "num_experts")?;
    // The newer one has no switch for it.
    let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
    let shared = keys.length("shared_expert_intermediate_size")?;
    let of = softmax_experts(keys, n, keys.length("moe_intermediate_size")?, normalized)?;
    Ok(Some(ExpertsSpec { shared, has_shared_gate: shared > 0, ..of }))
}

fn recurrence(keys: &JsonKeys<'_>) -> Result<RecurrenceSpec, ParseError> {
    Ok(RecurrenceSpec {
        n_heads: keys.length("linear_num_value_heads")?,
        n_key_heads: keys.length("linear_num_key_heads")?,
        key_dim: keys.length("linear_key_head_dim")?,
        value_dim: keys.length("linear_value_head_dim")?,
        taps: keys.optional("linear_conv_kernel_dim")?.unwrap_or(4),
        rule: RecurrenceRule::Delta,
    })
}

fn mixer(keys: &JsonKeys<'_>, layer: u32, listed: Option<&str>) -> Result<MixerSpec, ParseError> {
    let is_attention = match listed {
        Some(name) => !matches!(name, "linear_attention" | "mamba"),
        None => (layer + 1).is_multiple_of(keys.optional("full_attention_interval")?.unwrap_or(4).max(1)),
    };
    Ok(if is_attention { MixerSpec::Attention } else { MixerSpec::Recurrence(recurrence(keys)?) })
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
const PROJECTIONS: &[TensorMapping] = &[
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

const WOVEN_PROJECTIONS: &[TensorMapping] = &[
    key_head_part("linear_attn.q_proj.weight", [Keys, Hidden], OneKey, &[]),
    key_head_part("linear_attn.k_proj.weight", [Keys, Hidden], OneKey, &[OneKey]),
    key_head_part("linear_attn.v_proj.weight", [Values, Hidden], ValuesOfKey, &[OneKey, OneKey]),
    key_head_part("linear_attn.z_proj.weight", [Values, Hidden], ValuesOfKey, &[OneKey, OneKey, ValuesOfKey]),
    key_head_gate("linear_attn.b_proj.weight", &[]),
    key_head_gate("linear_attn.a_proj.weight", &[HeadsOfKey]),
];

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
