//! OLMo hybrid: three layers of four are a gated delta rule whose steps go up to two, with norms before each sublayer.
//! The others are OLMo's attention, with norms behind.

use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition, TensorTables};
use super::llama::{KEYS, LLAMA, UNREAD};
use super::olmo::{NORMS_BEHIND, OLMO2};
use crate::config::json::keys::JsonKeys;
use crate::config::{DecoderForm, MixerSpec, PositionEncoding, RecurrenceRule, RecurrenceSpec, RecurrenceStorage};
use crate::error::ParseError;
use crate::names::rows::Dim::{Hidden, Keys, One, OneValue, StateHeads, Taps, Values};
use crate::names::rows::{ATTENTION, TensorMapping, same, tensor, whole};
use serde_json::Value;

pub const OLMO_HYBRID: FamilyDefinition = FamilyDefinition {
    name: "OLMo hybrid",
    architecture: "olmo_hybrid",
    config: ConfigRules { class: "OlmoHybridForCausalLM", model_type: "olmo_hybrid", eps: 1e-6, ..OLMO2.config },
    readers: ConfigReaders { mixer, positions, ..OLMO2.readers },
    gguf: UNREAD,
    tensors: TensorTables {
        norms: &[],
        attention: &[NORMS_BEHIND, ATTENTION],
        recurrence: &[NORMS_BEFORE, DELTA],
        ..OLMO2.tensors
    },
    form: DecoderForm { recurrent_norms: Some(LLAMA.form.norms), ..OLMO2.form },
    ..OLMO2
};

fn mixer(keys: &JsonKeys<'_>, layer: u32, listed: Option<&str>) -> Result<MixerSpec, ParseError> {
    let n_layers = keys.length(KEYS.n_layers)?;
    let is_attention = match listed {
        Some(name) => name != "linear_attention",
        // Of fewer than four layers, the last.
        None => (layer + 1).is_multiple_of(4) || (n_layers < 4 && layer + 1 == n_layers),
    };
    Ok(if is_attention { MixerSpec::Attention } else { MixerSpec::Recurrence(recurrence(keys)?) })
}

fn recurrence(keys: &JsonKeys<'_>) -> Result<RecurrenceSpec, ParseError> {
    let n_heads = keys.length(KEYS.n_heads)?;
    let n_key_heads = keys.optional("linear_num_key_heads")?.unwrap_or(n_heads);
    let three_quarters = keys.length(KEYS.hidden)?.saturating_mul(3) / 4 / n_key_heads.max(1);
    let key_dim = keys.optional("linear_key_head_dim")?.unwrap_or(three_quarters);
    let has_wide_steps = keys.bool("linear_allow_neg_eigval")?.unwrap_or(true);
    Ok(RecurrenceSpec {
        n_heads: keys.optional("linear_num_value_heads")?.unwrap_or(n_heads),
        n_key_heads,
        key_dim,
        value_dim: keys.optional("linear_value_head_dim")?.unwrap_or(key_dim.saturating_mul(2)),
        taps: keys.optional("linear_conv_kernel_dim")?.unwrap_or(4),
        rule: RecurrenceRule::Delta { step_max: if has_wide_steps { 2.0 } else { 1.0 }, eps: Some(NORM_EPS) },
        storage: RecurrenceStorage::Folder,
    })
}

/// The epsilon of the norms behind recurrences, which no config has.
const NORM_EPS: f32 = 1e-5;

/// The released models have no rope. Their configs have null for the rope, its type or its base.
fn positions(keys: &JsonKeys<'_>, _: u32, rope: PositionEncoding) -> Result<PositionEncoding, ParseError> {
    let is_null = |value: Option<&Value>| value.is_some_and(Value::is_null);
    let object = keys.0.get("rope_parameters");
    let part = |key: &str| object.and_then(|object| object.get(key));
    let has_none = is_null(object) || is_null(part("rope_type")) || is_null(part("rope_theta"));
    Ok(if has_none { PositionEncoding::None } else { rope })
}

const NORMS_BEFORE: &[TensorMapping] = &[
    tensor("input_layernorm.weight", [One, Hidden], whole("attention_layer_norm.weight")),
    tensor("post_attention_layernorm.weight", [One, Hidden], whole("feedforward_layer_norm.weight")),
];
const DELTA: &[TensorMapping] = &[
    same("linear_attn.q_proj.weight", [Keys, Hidden]),
    same("linear_attn.k_proj.weight", [Keys, Hidden]),
    same("linear_attn.v_proj.weight", [Values, Hidden]),
    tensor("linear_attn.z_proj.weight", [Values, Hidden], whole("linear_attn.g_proj.weight")),
    same("linear_attn.b_proj.weight", [StateHeads, Hidden]),
    same("linear_attn.a_proj.weight", [StateHeads, Hidden]),
    tensor("linear_attn.conv_q.weight", [Keys, Taps], whole("linear_attn.q_conv1d.weight")),
    tensor("linear_attn.conv_k.weight", [Keys, Taps], whole("linear_attn.k_conv1d.weight")),
    tensor("linear_attn.conv_v.weight", [Values, Taps], whole("linear_attn.v_conv1d.weight")),
    same("linear_attn.A_log", [One, StateHeads]),
    same("linear_attn.dt_bias", [One, StateHeads]),
    tensor("linear_attn.norm.weight", [One, OneValue], whole("linear_attn.o_norm.weight")),
    tensor("linear_attn.out_proj.weight", [Hidden, Values], whole("linear_attn.o_proj.weight")),
];
