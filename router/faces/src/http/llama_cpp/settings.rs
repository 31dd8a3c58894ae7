//! The sampling parameters in llama.cpp's format: `generation_settings`. Has no knowledge of requests.

use proto::v1;
use router::front::parameters::{NUMBERS, NumberParameter};
use router::front::sampling_defaults::{default_sampling, last_n};
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use types::Token;

/// The seed value that requests a random seed.
pub const RANDOM_SEED: u64 = u32::MAX as u64;

/// The parameters that `generation_settings` does not have here.
const UNREPORTED: [&str; 2] = ["dry_base", "dry_allowed_length"];

fn reported_numbers() -> impl Iterator<Item = &'static NumberParameter> {
    NUMBERS.iter().filter(|parameter| !UNREPORTED.contains(&parameter.name))
}

/// Returns the parameters of a request, with null for the default.
pub fn requested_settings(sampling: &v1::Sampling) -> Value {
    let mut settings = json!({
        "n_predict": sampling.max_tokens.map_or(-1, i64::from),
        "repeat_last_n": sampling.penalty_window.map(last_n),
        "mirostat": 0,
        "adaptive_target": -1,
        "adaptive_decay": 0.9,
        "logit_bias": sampling.logit_bias.iter().map(|(id, bias)| bias_pair(*id, Some(*bias))).collect::<Vec<_>>(),
        "stop": sampling.stop,
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs.unwrap_or(0),
    });
    for parameter in reported_numbers() {
        settings[parameter.name_in_llama_cpp()] = (parameter.requested)(sampling).into();
    }
    settings
}

fn bias_pair(token: Token, bias: Option<f32>) -> Value {
    json!({ "token": token, "bias": bias })
}

/// Adds the defaults, its end tokens if they are never sampled, its context and the seed.
pub fn resolved_settings(requested: &Value, of: &ModelText, n_ctx: u32, seed: u64) -> Value {
    let vendor = v1::sampling::Defaults::LlamaCpp.into();
    let (mut settings, defaults) = (requested.clone(), default_sampling(vendor, &of.defaults, &of.card));
    if let (Some(true), Some(biases)) = (requested["ignore_eos"].as_bool(), settings["logit_bias"].as_array_mut()) {
        biases.extend(of.spec.eos.iter().map(|end| bias_pair(*end, None)));
    }
    let numbers = reported_numbers().map(|of| (of.name_in_llama_cpp(), (of.get)(&defaults).into()));
    let window = ("repeat_last_n", last_n(defaults.penalties.window).into());
    for (name, value) in numbers.chain([window]) {
        if settings[name].is_null() {
            settings[name] = value;
        }
    }
    (settings["n_ctx"], settings["seed"]) = (n_ctx.into(), seed.into());
    settings
}
