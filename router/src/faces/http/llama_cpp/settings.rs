//! The sampling parameters in llama.cpp's format: `generation_settings`. Has no knowledge of requests.

use crate::front::sampling_defaults::{ResolvedDefaults, last_n};
use crate::replicas::models::text::ModelText;
use proto::v1;
use serde_json::{Value, json};
use types::Token;

/// The seed value that requests a random seed.
pub const RANDOM_SEED: u64 = u32::MAX as u64;

/// Returns the parameters of a request, with null for the model's own default.
pub fn requested_settings(sampling: &v1::Sampling) -> Value {
    let xtc = sampling.xtc.unwrap_or_default();
    let dry_multiplier = sampling.dry.as_ref().map_or(0.0, |dry| dry.multiplier);
    json!({
        "n_predict": sampling.max_tokens.map_or(-1, i64::from),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p.unwrap_or(1.0),
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": xtc.probability,
        "xtc_threshold": xtc.threshold.unwrap_or(0.1),
        "repeat_last_n": sampling.penalty_window.map(last_n),
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": dry_multiplier,
        "mirostat": 0,
        "adaptive_target": -1,
        "adaptive_decay": 0.9,
        "logit_bias": sampling.logit_bias.iter().map(|(id, bias)| bias_pair(*id, Some(*bias))).collect::<Vec<_>>(),
        "stop": sampling.stop,
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs.unwrap_or(0),
    })
}

fn bias_pair(token: Token, bias: Option<f32>) -> Value {
    json!({ "token": token, "bias": bias })
}

/// Adds the model's defaults, its end tokens if they are never sampled, its context and the seed.
pub fn resolved_settings(requested: &Value, of: &ModelText, n_ctx: u32, seed: u64) -> Value {
    let vendor = v1::sampling::Defaults::LlamaCpp.into();
    let (mut settings, defaults) = (requested.clone(), ResolvedDefaults::of(vendor, &of.defaults, &of.card));
    if let (Some(true), Some(biases)) = (requested["ignore_eos"].as_bool(), settings["logit_bias"].as_array_mut()) {
        biases.extend(of.spec.eos.iter().map(|end| bias_pair(*end, None)));
    }
    let own: [(&str, Value); 6] = [
        ("temperature", defaults.temperature.into()),
        ("top_k", defaults.top_k.into()),
        ("top_p", defaults.top_p.into()),
        ("min_p", defaults.min_p.into()),
        ("repeat_penalty", defaults.repetition_penalty.into()),
        ("repeat_last_n", last_n(defaults.penalty_window).into()),
    ];
    for (name, value) in own {
        if settings[name].is_null() {
            settings[name] = value;
        }
    }
    (settings["n_ctx"], settings["seed"]) = (n_ctx.into(), seed.into());
    settings
}
