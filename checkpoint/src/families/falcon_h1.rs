//! Falcon-H1: each layer has Mamba-2 and attention side by side, and a multiplier follows almost every product. Those
//! of attention's input, keys and output become one factor of scores and one of outputs. Tensors have Bamba's names.

use super::bamba::BAMBA;
use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition};
use super::llama::{KEYS, LLAMA};
use super::mamba;
use crate::config::json::keys::JsonKeys;
use crate::config::{MixerSpec, ModelMultipliers, ProjectionFactors, RecurrenceRule, StateSpaceRule};
use crate::error::ParseError;
use serde_json::Value;

pub const FALCON_H1: FamilyDefinition = FamilyDefinition {
    name: "Falcon-H1",
    architecture: "falcon-h1",
    config: ConfigRules { class: "FalconH1ForCausalLM", model_type: "falcon_h1", turned: 1.0, ..BAMBA.config },
    readers: ConfigReaders { mixer, scale, multipliers, ..LLAMA.readers },
    ..BAMBA
};

fn factor(keys: &JsonKeys<'_>, key: &str) -> Result<f32, ParseError> {
    Ok(keys.float(key)?.unwrap_or(1.0))
}

/// The factors in a list of this length.
fn factors<const N: usize>(keys: &JsonKeys<'_>, key: &str) -> Result<[f32; N], ParseError> {
    match keys.floats(key)? {
        None => Ok([1.0; N]),
        Some(listed) => match <[f32; N]>::try_from(listed) {
            Ok(all) => Ok(all),
            Err(listed) => ParseError::malformed(format!("{key} has {} numbers instead of {N}", listed.len())),
        },
    }
}

/// Queries and keys are products of the same multiplied input.
fn scale(keys: &JsonKeys<'_>, head_dim: u32) -> Result<f32, ParseError> {
    let input = factor(keys, "attention_in_multiplier")?;
    Ok(input * input * factor(keys, "key_multiplier")? / (head_dim as f32).sqrt())
}

fn multipliers(keys: &JsonKeys<'_>) -> Result<ModelMultipliers, ParseError> {
    let given = |factor: f32| Some(factor).filter(|factor| *factor != 1.0);
    let [mlp_gate, mlp] = factors(keys, "mlp_multipliers")?;
    // Values are products of the multiplied input, and outputs are sums of them.
    let attention = factor(keys, "attention_in_multiplier")? * factor(keys, "attention_out_multiplier")?;
    Ok(ModelMultipliers {
        embedding: given(factor(keys, "embedding_multiplier")?),
        residual: None,
        logits: given(factor(keys, "lm_head_multiplier")?),
        attention: given(attention),
        recurrence: given(factor(keys, "ssm_out_multiplier")?),
        mlp_gate: given(mlp_gate),
        mlp: given(mlp),
    })
}

fn mixer(keys: &JsonKeys<'_>, _: u32, _: Option<&str>) -> Result<MixerSpec, ParseError> {
    let has_norm = keys.bool("mamba_rms_norm")?.unwrap_or(false);
    if has_norm && keys.bool("mamba_norm_before_gate")?.unwrap_or(true) {
        return ParseError::unsupported("a model with mamba_rms_norm and mamba_norm_before_gate");
    }
    if keys.bool("projectors_bias")?.unwrap_or(false) {
        return ParseError::unsupported("a model with projectors_bias");
    }
    let input = factor(keys, "ssm_in_multiplier")?;
    let [z, v, k, q, a] = factors(keys, "ssm_multipliers")?.map(|factor: f32| input * factor);
    let [step_min, step_max] = mamba::step_limits(keys)?;
    let factors = ProjectionFactors { z, v, k, q, a };
    let rule = RecurrenceRule::StateSpace(StateSpaceRule { step_min, step_max, has_norm, factors });
    mamba::recurrence(keys, inner(keys)?, rule).map(MixerSpec::Both)
}

/// The columns of all recurrent heads.
fn inner(keys: &JsonKeys<'_>) -> Result<u32, ParseError> {
    let has_head_dim = keys.get("mamba_d_head").is_some_and(Value::is_number);
    Ok(match keys.optional("mamba_d_ssm")? {
        Some(inner) => inner,
        None if has_head_dim => keys.length("mamba_n_heads")?.saturating_mul(keys.length("mamba_d_head")?),
        None => keys.optional("mamba_expand")?.unwrap_or(2).saturating_mul(keys.length(KEYS.hidden)?),
    })
}
