//! Mixtures of experts whose scores are a softmax, and the number of experts under its names in a file.

use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{ExpertScores, ExpertsSpec};
use crate::error::ParseError;

pub fn no_experts(_: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    Ok(None)
}

/// Returns a mixture from its number of experts, their width and whether weights sum to one.
pub fn softmax_experts(keys: &JsonKeys<'_>, n: u32, inner: u32, normalized: bool) -> Result<ExpertsSpec, ParseError> {
    Ok(ExpertsSpec { n, n_used: keys.length("num_experts_per_tok")?, inner, normalized, ..SOFTMAX })
}

pub const SOFTMAX: ExpertsSpec = ExpertsSpec {
    n: 0,
    n_used: 0,
    inner: 0,
    normalized: true,
    scores: ExpertScores::Softmax,
    factor: 1.0,
    shared: 0,
    has_shared_gate: false,
    clamp: None,
    has_bias: false,
    is_beside_mlp: false,
};

/// Newer files use Mixtral's name for it.
pub fn n_experts(keys: &JsonKeys<'_>, key: &str) -> Result<u32, ParseError> {
    keys.optional(key)?.map_or_else(|| keys.length("num_local_experts"), Ok)
}

/// The groups of a router that chooses within the best of them.
pub fn grouped_scores(keys: &JsonKeys<'_>) -> Result<ExpertScores, ParseError> {
    let [n, n_used] = [keys.optional("n_group")?, keys.optional("topk_group")?].map(|n| n.unwrap_or(1));
    Ok(ExpertScores::Sigmoid { n, n_used })
}

pub fn gguf_experts(keys: &GgufKeys<'_>, inner: u32) -> Result<ExpertsSpec, ParseError> {
    Ok(ExpertsSpec {
        n: n_gguf_experts(keys)?,
        n_used: keys.length("expert_used_count")?,
        inner: keys.optional("expert_feed_forward_length")?.unwrap_or(inner),
        ..SOFTMAX
    })
}

/// The same, with scores of sigmoids.
pub fn sigmoid_gguf_experts(keys: &GgufKeys<'_>, inner: u32) -> Result<ExpertsSpec, ParseError> {
    let groups = [keys.optional("expert_group_count")?, keys.optional("expert_group_used_count")?];
    let [n, n_used] = groups.map(|n| n.filter(|n| *n > 0).unwrap_or(1));
    Ok(ExpertsSpec {
        normalized: keys.bool("expert_weights_norm")?.unwrap_or(true),
        scores: ExpertScores::Sigmoid { n, n_used },
        factor: keys.float("expert_weights_scale")?.filter(|factor| *factor != 0.0).unwrap_or(1.0),
        ..gguf_experts(keys, inner)?
    })
}

/// Returns experts of a family that has no shared expert.
pub fn unshared_gguf_experts(keys: &GgufKeys<'_>, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    let of = gguf_experts(keys, inner)?;
    match keys.optional("expert_shared_feed_forward_length")?.unwrap_or(0) {
        0 => Ok(Some(of)),
        _ => ParseError::unsupported(format!("{}.expert_shared_feed_forward_length", keys.prefix)),
    }
}

pub fn no_gguf_experts(keys: &GgufKeys<'_>, _: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    match n_gguf_experts(keys)? {
        0 => Ok(None),
        n => ParseError::unsupported(format!("a mixture of {n} experts in this architecture")),
    }
}

pub fn n_gguf_experts(keys: &GgufKeys<'_>) -> Result<u32, ParseError> {
    Ok(keys.optional("expert_count")?.unwrap_or(0))
}
