//! Mamba-2, which several families have under their own names.

use super::llama::KEYS;
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{LayerSpec, MixerSpec, RecurrenceRule, RecurrenceSpec, RecurrenceStorage, StateSpaceRule};
use crate::error::ParseError;
use crate::names::rows::Dim;
use crate::names::rows::Dim::{Keys, StateHeads, Values};
use serde_json::Value;

/// Reads the keys of transformers for it.
pub fn mixer(keys: &JsonKeys<'_>) -> Result<MixerSpec, ParseError> {
    let inner = keys.optional("mamba_expand")?.unwrap_or(2).saturating_mul(keys.length(KEYS.hidden)?);
    let rule = RecurrenceRule::StateSpace(StateSpaceRule::normed(step_limits(keys)?));
    recurrence(keys, inner, rule).map(MixerSpec::Recurrence)
}

/// The same where heads have `inner` columns together, by another rule.
pub fn recurrence(keys: &JsonKeys<'_>, inner: u32, rule: RecurrenceRule) -> Result<RecurrenceSpec, ParseError> {
    if keys.bool("mamba_conv_bias")? == Some(false) {
        return ParseError::unsupported("a model without mamba_conv_bias");
    }
    if keys.bool("mamba_proj_bias")?.unwrap_or(false) {
        return ParseError::unsupported("a model with mamba_proj_bias");
    }
    let n_heads = keys.length("mamba_n_heads")?;
    let given = match keys.text("mamba_d_head") {
        Some("auto") => None,
        _ => keys.optional("mamba_d_head")?,
    };
    let value_dim = given.unwrap_or(inner / n_heads.max(1));
    if u64::from(n_heads) * u64::from(value_dim) != u64::from(inner) {
        return ParseError::malformed(format!(
            "{n_heads} recurrent heads of {value_dim} do not add up to the {inner} of mamba_d_ssm or mamba_expand"
        ));
    }
    Ok(RecurrenceSpec {
        n_heads,
        n_key_heads: keys.optional("mamba_n_groups")?.unwrap_or(1),
        key_dim: keys.optional("mamba_d_state")?.unwrap_or(256),
        value_dim,
        taps: keys.optional("mamba_d_conv")?.unwrap_or(4),
        rule,
        storage: RecurrenceStorage::Folder,
    })
}

/// Returns the recurrence that a GGUF describes, of any rule.
pub fn gguf_recurrence(keys: &GgufKeys<'_>, rule: RecurrenceRule) -> Result<RecurrenceSpec, ParseError> {
    let (n_heads, inner) = (keys.length("ssm.time_step_rank")?, keys.length("ssm.inner_size")?);
    if n_heads == 0 || !inner.is_multiple_of(n_heads) {
        return ParseError::malformed(format!("{n_heads} recurrent heads cannot share {inner} columns evenly"));
    }
    Ok(RecurrenceSpec {
        n_heads,
        n_key_heads: keys.length("ssm.group_count")?,
        key_dim: keys.length("ssm.state_size")?,
        value_dim: inner / n_heads,
        taps: keys.length("ssm.conv_kernel")?,
        rule,
        storage: RecurrenceStorage::Gguf,
    })
}

/// A GGUF has no limits of steps.
pub const UNLIMITED: RecurrenceRule = RecurrenceRule::StateSpace(StateSpaceRule::normed([0.0, f32::INFINITY]));

/// Returns a layer of a GGUF: a recurrence where it has no heads of K.
pub fn gguf_layer(keys: &GgufKeys<'_>, layer: u32, usual: LayerSpec) -> Result<LayerSpec, ParseError> {
    Ok(match keys.of_layer("attention.head_count_kv", layer)? {
        Some(0) => LayerSpec { mixer: MixerSpec::Recurrence(gguf_recurrence(keys, UNLIMITED)?), ..usual },
        _ => usual,
    })
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
        use $crate::names::rows::{Dim, TensorMapping, part, stored, whole};

        const fn projection(name: &'static str, rows: Dim, before: &'static [Dim]) -> TensorMapping {
            stored(name, [rows, Hidden], part(concat!($at, ".in_proj.weight"), before, MAMBA_ALL), "ssm_in.weight")
        }
        const fn taps(name: &'static str, rows: Dim, before: &'static [Dim]) -> TensorMapping {
            stored(name, [rows, Taps], part(concat!($at, ".conv1d.weight"), before, XBC), "ssm_conv1d.weight")
        }
        const fn taps_bias(name: &'static str, n: Dim, before: &'static [Dim]) -> TensorMapping {
            stored(name, [One, n], part(concat!($at, ".conv1d.bias"), before, XBC), "ssm_conv1d.bias")
        }
        &[
            projection("linear_attn.z_proj.weight", Values, &[]),
            projection("linear_attn.v_proj.weight", Values, &[Values]),
            projection("linear_attn.k_proj.weight", Keys, &[Values, Values]),
            projection("linear_attn.q_proj.weight", Keys, &[Values, Values, Keys]),
            projection("linear_attn.a_proj.weight", StateHeads, &[Values, Values, Keys, Keys]),
            taps("linear_attn.conv_v.weight", Values, &[]),
            taps("linear_attn.conv_k.weight", Keys, &[Values]),
            taps("linear_attn.conv_q.weight", Keys, &[Values, Keys]),
            taps_bias("linear_attn.conv_v.bias", Values, &[]),
            taps_bias("linear_attn.conv_k.bias", Keys, &[Values]),
            taps_bias("linear_attn.conv_q.bias", Keys, &[Values, Keys]),
            stored("linear_attn.A_log", [One, StateHeads], whole(concat!($at, ".A_log")), "ssm_a"),
            stored("linear_attn.D", [One, StateHeads], whole(concat!($at, ".D")), "ssm_d"),
            stored("linear_attn.dt_bias", [One, StateHeads], whole(concat!($at, ".dt_bias")), "ssm_dt.bias"),
            stored("linear_attn.norm.weight", [One, Values], whole(concat!($at, ".norm.weight")), "ssm_norm.weight"),
            stored(
                "linear_attn.out_proj.weight",
                [Hidden, Values],
                whole(concat!($at, ".out_proj.weight")),
                "ssm_out.weight",
            ),
        ]
    }};
}
pub(super) use rows;

pub const MAMBA_ALL: &[Dim] = &[Values, Values, Keys, Keys, StateHeads];
pub const XBC: &[Dim] = &[Values, Keys, Keys];
