//! Reads the fields for recurrent layers in a `config.json`.

use super::keys::JsonKeys;
use crate::config::length;
use crate::config::{ConvolutionSpec, Family, MixerKind, RecurrenceRule, RecurrenceSpec};
use crate::error::ParseError;
use serde_json::Value;

/// Returns the recurrent layers of a family that has some.
pub(super) fn recurrence(
    keys: &JsonKeys<'_>,
    family: Family,
    hidden: u32,
) -> Result<Option<RecurrenceSpec>, ParseError> {
    match family {
        Family::Qwen3Next | Family::Qwen35 | Family::Qwen35Moe => delta(keys).map(Some),
        Family::GraniteHybrid | Family::Bamba => state_space(keys, hidden).map(Some),
        Family::NemotronH => super::nemotron::state_space(keys).map(Some),
        _ => Ok(None),
    }
}

fn delta(keys: &JsonKeys<'_>) -> Result<RecurrenceSpec, ParseError> {
    Ok(RecurrenceSpec {
        n_heads: keys.length("linear_num_value_heads")?,
        n_key_heads: keys.length("linear_num_key_heads")?,
        key_dim: keys.length("linear_key_head_dim")?,
        value_dim: keys.length("linear_value_head_dim")?,
        taps: keys.optional("linear_conv_kernel_dim")?.unwrap_or(4),
        rule: RecurrenceRule::Delta,
    })
}

fn state_space(keys: &JsonKeys<'_>, hidden: u32) -> Result<RecurrenceSpec, ParseError> {
    if keys.bool("mamba_conv_bias")? == Some(false) {
        return ParseError::unsupported("a model without mamba_conv_bias");
    }
    if keys.bool("mamba_proj_bias")?.unwrap_or(false) {
        return ParseError::unsupported("a model with mamba_proj_bias");
    }
    let inner = keys.optional("mamba_expand")?.unwrap_or(2).saturating_mul(hidden);
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
    Ok(RecurrenceSpec {
        n_heads,
        n_key_heads: keys.optional("mamba_n_groups")?.unwrap_or(1),
        key_dim: keys.optional("mamba_d_state")?.unwrap_or(256),
        value_dim,
        taps: keys.optional("mamba_d_conv")?.unwrap_or(4),
        rule: RecurrenceRule::StateSpace { step_min, step_max },
    })
}

/// JSON has no infinity: transformers writes an object for it.
pub(super) fn step_limits(keys: &JsonKeys<'_>) -> Result<[f32; 2], ParseError> {
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

/// Returns the short convolutions of a family that has some, over all channels of the stream.
pub(super) fn convolution(
    keys: &JsonKeys<'_>,
    family: Family,
    hidden: u32,
) -> Result<Option<ConvolutionSpec>, ParseError> {
    if !matches!(family, Family::Lfm2 | Family::Lfm2Moe) {
        return Ok(None);
    }
    if keys.bool("conv_bias")?.unwrap_or(false) {
        return ParseError::unsupported("a model with conv_bias");
    }
    // Each run is a leaf of a sum: they end on multiples of 32, and there are at most 64.
    let width = [32, 64, 128].into_iter().find(|width| hidden.is_multiple_of(*width) && hidden / width <= 64);
    let width = width.unwrap_or(hidden);
    let taps = keys.optional("conv_L_cache")?.unwrap_or(3);
    Ok(Some(ConvolutionSpec { n: hidden / width.max(1), width, taps }))
}

/// Returns the width of an LFM2's MLP, which its config may only imply.
pub(super) fn lfm2_inner(keys: &JsonKeys<'_>) -> Result<u32, ParseError> {
    let given = keys.optional("block_ff_dim")?.map_or_else(|| keys.length("intermediate_size"), Ok)?;
    if keys.bool("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(given);
    }
    let multiplier = keys.float("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let scaled = (f64::from(multiplier) * f64::from(2 * given / 3)) as u32;
    let unit = keys.optional("block_multiple_of")?.unwrap_or(256).max(1);
    length("the MLP's width", u64::from(scaled.div_ceil(unit)) * u64::from(unit))
}

/// Returns the mixer of a layer that is listed under this name, or of one that is not listed.
pub(super) fn mixer(
    keys: &JsonKeys<'_>,
    family: Family,
    layer: u32,
    listed: Option<&str>,
) -> Result<MixerKind, ParseError> {
    let is_delta = matches!(family, Family::Qwen3Next | Family::Qwen35 | Family::Qwen35Moe);
    let is_hybrid = is_delta || matches!(family, Family::GraniteHybrid | Family::Bamba);
    if matches!(family, Family::Lfm2 | Family::Lfm2Moe) {
        let is_attention = match (listed, keys.lengths("full_attn_idxs")?) {
            (Some(name), _) => name != "conv",
            (None, indices) => indices.is_none_or(|indices| indices.contains(&layer)),
        };
        return Ok(if is_attention { MixerKind::Attention } else { MixerKind::Convolution });
    }
    match (is_hybrid, listed) {
        (true, Some("linear_attention" | "mamba")) => Ok(MixerKind::Recurrence),
        (true, None) if family == Family::GraniteHybrid => {
            ParseError::malformed("layer_types is missing in config.json")
        }
        (true, None) if family == Family::Bamba => {
            let is_attention = keys.lengths("attn_layer_indices")?.is_some_and(|indices| indices.contains(&layer));
            Ok(if is_attention { MixerKind::Attention } else { MixerKind::Recurrence })
        }
        (true, None) => {
            let every = keys.optional("full_attention_interval")?.unwrap_or(4).max(1);
            Ok(if (layer + 1).is_multiple_of(every) { MixerKind::Attention } else { MixerKind::Recurrence })
        }
        _ => Ok(MixerKind::Attention),
    }
}
