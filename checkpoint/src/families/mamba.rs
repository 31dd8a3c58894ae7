//! Mamba-2, which several families have under their own names.

use super::llama::KEYS;
use crate::config::json::keys::JsonKeys;
use crate::config::{MixerSpec, RecurrenceRule, RecurrenceSpec};
use crate::error::ParseError;
use crate::names::rows::Dim;
use crate::names::rows::Dim::{Keys, StateHeads, Values};
use serde_json::Value;

/// Reads the keys of transformers for it.
pub fn mixer(keys: &JsonKeys<'_>) -> Result<MixerSpec, ParseError> {
    if keys.bool("mamba_conv_bias")? == Some(false) {
        return ParseError::unsupported("a model without mamba_conv_bias");
    }
    if keys.bool("mamba_proj_bias")?.unwrap_or(false) {
        return ParseError::unsupported("a model with mamba_proj_bias");
    }
    let inner = keys.optional("mamba_expand")?.unwrap_or(2).saturating_mul(keys.length(KEYS.hidden)?);
    let n_heads = keys.length("mamba_n_heads")?;
    let given = match keys.text("mamba_d_head") {
        Some("auto") => None,
        _ => keys.optional("mamba_d_head")?,
    };
    let value_dim = given.unwrap_or(inner / n_heads.max(1));
    if u64::from(n_heads) * u64::from(value_dim) != u64::from(inner) {
        return ParseError::malformed(format!(
            "{n_heads} recurrent heads of {value_dim} do not add up to mamba_expand's {inner}"
        ));
    }
    let [step_min, step_max] = step_limits(keys)?;
    Ok(MixerSpec::Recurrence(RecurrenceSpec {
        n_heads,
        n_key_heads: keys.optional("mamba_n_groups")?.unwrap_or(1),
        key_dim: keys.optional("mamba_d_state")?.unwrap_or(256),
        value_dim,
        taps: keys.optional("mamba_d_conv")?.unwrap_or(4),
        rule: RecurrenceRule::StateSpace { step_min, step_max },
    }))
}

/// JSON has no infinity: transformers writes an object for it.
pub fn step_limits(keys: &JsonKeys<'_>) -> Result<[f32; 2], ParseError> {
    let one = |value: &Value| match value.get("__float__").and_then(Value::as_str) {
        Some("Infinity") => Some(f32::INFINITY),
        Some(_) => None,
        None => value.as_f64().map(|number| number as f32),
    };
    match keys.list("time_step_limit", "numbers", one)? {
        None => Ok([0.0, f32::INFINITY]),
        Some(limits) => match limits[..] {
            [min, max] => Ok([min, max]),
            _ => ParseError::malformed(format!("time_step_limit has {} numbers instead of 2", limits.len())),
        },
    }
}

/// Returns the mixer of a layer that a config lists under this name.
pub fn listed_mixer(keys: &JsonKeys<'_>, name: &str) -> Result<MixerSpec, ParseError> {
    if matches!(name, "linear_attention" | "mamba") { mixer(keys) } else { Ok(MixerSpec::Attention) }
}

/// The rows under a family's path. C is Q, B is K, x is V and dt is a; a file has them in another order.
macro_rules! rows {
    ($at:literal) => {{
        use $crate::families::mamba::{MAMBA_ALL, XBC};
        use $crate::names::rows::Dim::{Hidden, Keys, One, StateHeads, Taps, Values};
        use $crate::names::rows::{part, tensor, whole};
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
    }};
}
pub(super) use rows;

pub const MAMBA_ALL: &[Dim] = &[Values, Values, Keys, Keys, StateHeads];
pub const XBC: &[Dim] = &[Values, Keys, Keys];
