//! Reads a rope, whose values have stood in several places over the years.

use super::keys::JsonKeys;
use crate::config::{QueryTemperature, RopeScaling, RopeSpec};
use crate::error::ParseError;
use crate::families::{FamilyDefinition, LocalTheta};
use serde_json::Value;

/// Newer files keep all of a rope in one object, or in one per type of layer. `theta` is the base without a key.
pub(super) fn rope(
    keys: &JsonKeys<'_>,
    of: &FamilyDefinition,
    theta: f32,
    layers: &str,
    [head_dim, context]: [u32; 2],
) -> Result<RopeSpec, ParseError> {
    let names = of.config.keys;
    let object = keys.object("rope_parameters").or_else(|| keys.object("rope_scaling"));
    let object = object.map(|object| JsonKeys(object).object(layers).unwrap_or(object));
    let own = JsonKeys(object.unwrap_or(&Value::Null));
    let theta = match own.float("rope_theta")? {
        Some(theta) => theta,
        None => keys.float(names.theta)?.unwrap_or(theta),
    };
    let turned = match own.float("partial_rotary_factor")? {
        Some(part) => part,
        None => keys.float(names.turned)?.unwrap_or(of.config.turned),
    };
    if !of.rules.positions.has_rope() {
        return Ok(RopeSpec { theta, dim: 2, pairs: false, scaling: RopeScaling::None });
    }
    let dim = (f64::from(head_dim) * f64::from(turned)) as u32;
    if own.text("rope_type") == Some("proportional") {
        let scaling = RopeScaling::of_first_pairs(dim / 2, head_dim / 2);
        return Ok(RopeSpec { theta, dim: head_dim, pairs: of.config.pairs, scaling });
    }
    let scaling = scaling(keys, &own, of.config.yarn_is_long, context)?;
    Ok(RopeSpec { theta, dim, pairs: of.config.pairs, scaling })
}

/// The rope of layers with a window, in a family where it differs.
pub(super) fn local_rope(
    keys: &JsonKeys<'_>,
    of: &FamilyDefinition,
    [head_dim, context]: [u32; 2],
) -> Result<Option<RopeSpec>, ParseError> {
    let (key, theta) = match of.rules.local_theta {
        Some(LocalTheta::Own(key, theta)) => (key, theta),
        Some(LocalTheta::Same) => (of.config.keys.theta, of.config.theta),
        None => return Ok(None),
    };
    let by_layers = keys.object("rope_parameters").and_then(|object| JsonKeys(object).object("sliding_attention"));
    if by_layers.is_some() {
        return rope(keys, of, theta, "sliding_attention", [head_dim, context]).map(Some);
    }
    let theta = keys.float(key)?.unwrap_or(theta);
    Ok(Some(RopeSpec { theta, dim: head_dim, pairs: false, scaling: RopeScaling::None }))
}

fn scaling(
    keys: &JsonKeys<'_>,
    own: &JsonKeys<'_>,
    yarn_is_long: bool,
    context: u32,
) -> Result<RopeScaling, ParseError> {
    let need = |key: &str| match own.float(key)? {
        Some(number) => Ok(number),
        None => ParseError::malformed(format!("{key} is missing in the rope scaling of config.json")),
    };
    let original_context = || match own.optional("original_max_position_embeddings")? {
        Some(length) => Ok(length),
        None => Ok(keys.optional("original_max_position_embeddings")?.unwrap_or(context)),
    };
    match own.text("rope_type").or(own.text("type")) {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: need("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_context: own.length("original_max_position_embeddings")?,
        }),
        // Some first files used other names for it.
        Some("longrope" | "su") => long_rope(own, original_context()?, context),
        Some("yarn") if yarn_is_long => long_rope(own, original_context()?, context),
        Some("yarn") => yarn(own, original_context()?, context),
        Some(other) => ParseError::unsupported(format!("rope scaling of the type {other}")),
    }
}

fn long_rope(own: &JsonKeys<'_>, original_context: u32, context: u32) -> Result<RopeScaling, ParseError> {
    let factor = own.float("factor")?.unwrap_or(context as f32 / original_context.max(1) as f32);
    let grown = || libm::sqrt(1.0 + libm::log(f64::from(factor)) / libm::log(f64::from(original_context))) as f32;
    let magnitude = own.float("attention_factor")?.unwrap_or_else(|| if factor <= 1.0 { 1.0 } else { grown() });
    let set = |key: &str| match own.floats(key)? {
        Some(set) => Ok(set),
        None => ParseError::malformed(format!("{key} is missing in the rope scaling of config.json")),
    };
    Ok(RopeScaling::Long { short: set("short_factor")?, long: set("long_factor")?, original_context, magnitude })
}

fn yarn(own: &JsonKeys<'_>, original_context: u32, context: u32) -> Result<RopeScaling, ParseError> {
    let factor = own.float("factor")?.unwrap_or(context as f32 / original_context.max(1) as f32);
    let one = |scale: f32| crate::config::yarn_magnitude(factor, scale);
    let non_zero = |key| Ok(own.float(key)?.filter(|number| *number != 0.0));
    let magnitude = match (own.float("attention_factor")?, non_zero("mscale")?, non_zero("mscale_all_dim")?) {
        (Some(given), _, _) => given,
        (None, Some(scale), Some(scale_all)) => one(scale) / one(scale_all),
        _ => one(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: non_zero("beta_fast")?.unwrap_or(32.0),
        beta_slow: non_zero("beta_slow")?.unwrap_or(1.0),
        original_context,
        magnitude,
        truncate: own.bool("truncate")?.unwrap_or(true),
    })
}

/// How queries grow with their positions.
pub(super) fn temperature(keys: &JsonKeys<'_>, context: u32) -> Result<Option<QueryTemperature>, ParseError> {
    let own = JsonKeys(keys.object("rope_parameters").or(keys.object("rope_scaling")).unwrap_or(&Value::Null));
    let Some(beta) = own.float("llama_4_scaling_beta")? else { return Ok(None) };
    let every = own.optional("original_max_position_embeddings")?.unwrap_or(context);
    Ok(Some(QueryTemperature { beta, every }))
}
