//! Qwen3-Next and Qwen3.5: three layers of four are a recurrence, and attention has a gate behind it.

use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, TensorTables};
use super::experts::{gguf_experts, n_experts, no_experts, no_gguf_experts, softmax_experts};
use super::llama::{HALVES, LLAMA};
use super::mamba;
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{
    ExpertsSpec, LayerSpec, MixerSpec, QueryKeyNorms, RecurrenceRule, RecurrenceSpec, RecurrenceStorage,
};
use crate::error::ParseError;
use crate::names::rows::Dim::{
    Heads, HeadsOfKey, Hidden, Keys, One, OneHead, OneKey, OneValue, SharedInner, StateHeads, Taps, Values, ValuesOfKey,
};
use crate::names::rows::{
    ATTENTION, Dim, MTP, OTHER_NORMS, TensorMapping, TensorSource, interleaved, part, renamed, row, stored, whole,
};

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
    gguf: GgufRules {
        experts: gguf_experts_and_shared,
        layer: |keys, i, usual| gguf_layer(keys, i, usual, RecurrenceStorage::Gguf),
        ..HALVES
    },
    tensors: TensorTables {
        norms: &[OTHER_NORMS],
        // The first of attention's rows is the query's, which stands with the gate.
        attention: &[GATED_QUERY, ATTENTION.split_at(1).1],
        recurrence: &[WOVEN_PROJECTIONS, DELTA],
        shared_expert: &[GATED_SHARED_EXPERT],
        mtp: Some(&MTP),
        ..LLAMA.tensors
    },
    ..LLAMA
};

pub const QWEN35: FamilyDefinition = FamilyDefinition {
    name: "Qwen3.5",
    architecture: "qwen35",
    config: ConfigRules { class: "Qwen3_5ForCausalLM", model_type: "qwen3_5_text", ..QWEN3_NEXT.config },
    readers: ConfigReaders { experts: no_experts, ..QWEN3_NEXT.readers },
    gguf: GgufRules {
        experts: no_gguf_experts,
        layer: |keys, i, usual| gguf_layer(keys, i, usual, RecurrenceStorage::GgufTiled),
        ..QWEN3_NEXT.gguf
    },
    tensors: TensorTables { recurrence: &[PROJECTIONS, DELTA], ..QWEN3_NEXT.tensors },
    ..QWEN3_NEXT
};

pub const QWEN35_MOE: FamilyDefinition = FamilyDefinition {
    name: "Qwen3.5 MoE",
    architecture: "qwen35moe",
    config: ConfigRules { class: "Qwen3_5MoeForCausalLM", model_type: "qwen3_5_moe_text", ..QWEN35.config },
    readers: ConfigReaders {
        experts,
        // Without a dense layer, the config contains no width for one.
        inner: |keys, _, _| keys.length("moe_intermediate_size"),
        ..QWEN35.readers
    },
    gguf: GgufRules { experts: gguf_experts_and_shared, ..QWEN35.gguf },
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
        rule: RecurrenceRule::DELTA,
        storage: RecurrenceStorage::Folder,
    })
}

fn gguf_experts_and_shared(keys: &GgufKeys<'_>, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    let shared = keys.optional("expert_shared_feed_forward_length")?.unwrap_or(0);
    Ok(Some(ExpertsSpec { shared, has_shared_gate: shared > 0, ..gguf_experts(keys, inner)? }))
}

/// A layer of a GGUF, which lists the recurrent ones or has attention in each layer of a period.
fn gguf_layer(
    keys: &GgufKeys<'_>,
    layer: u32,
    usual: LayerSpec,
    storage: RecurrenceStorage,
) -> Result<LayerSpec, ParseError> {
    let is_recurrent = match keys.bool_of_layer("attention.recurrent_layers", layer)? {
        Some(is_listed) => is_listed,
        None => !(layer + 1).is_multiple_of(keys.optional("full_attention_interval")?.unwrap_or(4).max(1)),
    };
    if !is_recurrent {
        return Ok(usual);
    }
    let of = RecurrenceSpec { storage, ..mamba::gguf_recurrence(keys, RecurrenceRule::DELTA)? };
    Ok(LayerSpec { mixer: MixerSpec::Recurrence(of), ..usual })
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
    taps("linear_attn.conv_q.weight", Keys, &[]),
    taps("linear_attn.conv_k.weight", Keys, &[Keys]),
    taps("linear_attn.conv_v.weight", Values, &[Keys, Keys]),
    row("linear_attn.A_log", [One, StateHeads], "ssm_a"),
    row("linear_attn.dt_bias", [One, StateHeads], "ssm_dt.bias"),
    row("linear_attn.norm.weight", [One, OneValue], "ssm_norm.weight"),
    row("linear_attn.out_proj.weight", [Hidden, Values], "ssm_out.weight"),
];
const CHANNELS: &[Dim] = &[Keys, Keys, Values];

const fn taps(name: &'static str, rows: Dim, before: &'static [Dim]) -> TensorMapping {
    stored(name, [rows, Taps], part("linear_attn.conv1d.weight", before, CHANNELS), "ssm_conv1d.weight")
}

/// Each projection apart, but for Q, K and V.
const PROJECTIONS: &[TensorMapping] = &[
    projection("linear_attn.q_proj.weight", Keys, &[]),
    projection("linear_attn.k_proj.weight", Keys, &[Keys]),
    projection("linear_attn.v_proj.weight", Values, &[Keys, Keys]),
    renamed("linear_attn.z_proj.weight", [Values, Hidden], "linear_attn.in_proj_z.weight", "attn_gate.weight"),
    renamed("linear_attn.b_proj.weight", [StateHeads, Hidden], "linear_attn.in_proj_b.weight", "ssm_beta.weight"),
    renamed("linear_attn.a_proj.weight", [StateHeads, Hidden], "linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
];

const fn projection(name: &'static str, rows: Dim, before: &'static [Dim]) -> TensorMapping {
    stored(name, [rows, Hidden], part("linear_attn.in_proj_qkv.weight", before, CHANNELS), "attn_qkv.weight")
}

/// In a folder those of one key head stand together: its Q and K, and V and z of the heads that read it. A GGUF has
/// them apart.
const fn key_head_part(
    name: &'static str,
    dims: [Dim; 2],
    (run, before): (Dim, &'static [Dim]),
    gguf: TensorSource,
) -> TensorMapping {
    let whole = part("linear_attn.in_proj_qkvz.weight", &[], &[Keys, Keys, Values, Values]);
    let folder = interleaved(whole, run, before, &[OneKey, OneKey, ValuesOfKey, ValuesOfKey]);
    TensorMapping { name, dims, folder, gguf }
}

const fn key_head_gate(name: &'static str, before: &'static [Dim]) -> TensorMapping {
    let whole = part("linear_attn.in_proj_ba.weight", &[], &[StateHeads, StateHeads]);
    let folder = interleaved(whole, HeadsOfKey, before, &[HeadsOfKey, HeadsOfKey]);
    stored(name, [StateHeads, Hidden], folder, "ssm_ba.weight")
}

const QKV: &str = "attn_qkv.weight";
const WOVEN_PROJECTIONS: &[TensorMapping] = &[
    key_head_part("linear_attn.q_proj.weight", [Keys, Hidden], (OneKey, &[]), part(QKV, &[], CHANNELS)),
    key_head_part("linear_attn.k_proj.weight", [Keys, Hidden], (OneKey, &[OneKey]), part(QKV, &[Keys], CHANNELS)),
    key_head_part(
        "linear_attn.v_proj.weight",
        [Values, Hidden],
        (ValuesOfKey, &[OneKey, OneKey]),
        part(QKV, &[Keys, Keys], CHANNELS),
    ),
    key_head_part(
        "linear_attn.z_proj.weight",
        [Values, Hidden],
        (ValuesOfKey, &[OneKey, OneKey, ValuesOfKey]),
        whole("attn_gate.weight"),
    ),
    key_head_gate("linear_attn.b_proj.weight", &[]),
    key_head_gate("linear_attn.a_proj.weight", &[HeadsOfKey]),
];

/// Q and the gate of a head stand together.
const GATED_QUERY: &[TensorMapping] = &[
    stored("self_attn.q_proj.weight", [Heads, Hidden], query_head_part(&[]), "attn_q.weight"),
    stored("self_attn.g_proj.weight", [Heads, Hidden], query_head_part(&[OneHead]), "attn_q.weight"),
];

const fn query_head_part(before: &'static [Dim]) -> TensorSource {
    interleaved(part("self_attn.q_proj.weight", &[], &[Heads, Heads]), OneHead, before, &[OneHead, OneHead])
}

const GATED_SHARED_EXPERT: &[TensorMapping] = &[
    renamed(
        "mlp.shared_experts.gate_proj.weight",
        [SharedInner, Hidden],
        "mlp.shared_expert.gate_proj.weight",
        "ffn_gate_shexp.weight",
    ),
    renamed(
        "mlp.shared_experts.up_proj.weight",
        [SharedInner, Hidden],
        "mlp.shared_expert.up_proj.weight",
        "ffn_up_shexp.weight",
    ),
    renamed(
        "mlp.shared_experts.down_proj.weight",
        [Hidden, SharedInner],
        "mlp.shared_expert.down_proj.weight",
        "ffn_down_shexp.weight",
    ),
    row("mlp.shared_expert_gate.weight", [One, Hidden], "ffn_gate_inp_shexp.weight"),
];
