//! Reads a spec from a GGUF's metadata, as llama.cpp's converter writes it.

pub mod keys;

use super::parts::rope_head_dim;
use super::{
    AttentionSpec, LayerSpec, MixerSpec, ModelMultipliers, ModelSpec, NormKind, PooledActivation, PooledLayer, Pooling,
    PoolingSpec, QueryKeyNorms, QueryTemperature, RopeScaling, RopeSpec, ScoreActivation, dedup_eos, length,
};
use crate::error::ParseError;
use crate::families::{AttentionBias, Family, FamilyDefinition, GgufVariant, LocalTheta, WindowPattern};
use crate::gguf::Gguf;
use keys::GgufKeys;
use types::Token;

impl ModelSpec {
    pub(crate) fn from_gguf(gguf: &Gguf, bytes: &[u8], file_name: &str) -> Result<ModelSpec, ParseError> {
        let (named, prefix) = find_architecture(gguf, bytes)?;
        let keys = GgufKeys { gguf, bytes, prefix };
        let (hidden, n_heads) = (keys.length("embedding_length")?, keys.length("attention.head_count")?);
        let family = find_variant(&keys).unwrap_or(named);
        let of = family.definition();
        let head_dim = head_dim(&keys, of, hidden / n_heads.max(1))?;
        let inner = inner(&keys, of)?;
        let experts = (of.gguf.experts)(&keys, inner)?;
        // Layers that guess further tokens come last, and are not used.
        let n_layers = keys.length("block_count")?.saturating_sub(keys.optional("nextn_predict_layers")?.unwrap_or(0));
        let tokens = gguf.texts(bytes, "tokenizer.ggml.tokens")?.unwrap_or_default();
        let layers = layers(&keys, of, n_layers, experts.is_some())?;
        let rope = rope(&keys, of, rope_head_dim(&layers, head_dim))?;
        let spec = ModelSpec {
            family,
            name: gguf.text(bytes, "general.name")?.unwrap_or(file_name).to_owned(),
            hidden,
            n_layers,
            n_heads,
            n_kv_heads: usual_length(&keys, of, "attention.head_count_kv")?.unwrap_or(n_heads),
            head_dim,
            inner,
            layer_input: of.gguf.layer_input.map_or(Ok(None), |key| keys.optional(key))?.unwrap_or(0),
            vocab: gguf_vocab(gguf)?,
            context: keys.length("context_length")?,
            norm_eps: norm_eps(&keys, of)?,
            // The converter has already added what a norm's weights lack.
            norm_offset: 0.0,
            attention: attention(&keys, of, (hidden, n_layers), (n_heads, head_dim))?,
            layers,
            experts,
            local_rope: local_rope(&keys, of, &rope, head_dim)?,
            rope,
            logits_cap: keys.float("final_logit_softcapping")?.filter(|_| of.rules.has_caps),
            factors: multipliers(&keys, of, hidden)?,
            is_parallel: (of.gguf.is_parallel)(&keys)?,
            tied_embeddings: gguf.tensor("output.weight").is_none(),
            encoder: (of.encoder.gguf)(&keys)?,
            pooling: pooling(&keys, hidden)?,
            bos: token(gguf, "bos")?,
            eos: gguf_eos(gguf, bytes, of.gguf.ends, &tokens)?,
        };
        spec.checked()
    }

    /// Refuses an architecture that is not served. A file that names none is a later part of a split model.
    pub(crate) fn check_architecture(gguf: &Gguf, bytes: &[u8]) -> Result<(), ParseError> {
        match gguf.text(bytes, "general.architecture")? {
            Some(_) => find_architecture(gguf, bytes).map(drop),
            None => Ok(()),
        }
    }
}

/// Returns the family, and the file's name for it.
fn find_architecture(gguf: &Gguf, bytes: &[u8]) -> Result<(Family, &'static str), ParseError> {
    let Some(name) = gguf.text(bytes, "general.architecture")? else {
        return ParseError::malformed("the metadata does not name an architecture");
    };
    let named =
        |of: &FamilyDefinition| [Some(of.architecture), of.gguf.also].into_iter().flatten().find(|n| *n == name);
    let is_it = |of: &FamilyDefinition| of.gguf.is_read && of.gguf.variant.is_none() && named(of).is_some();
    match Family::find(is_it).and_then(|family| Some((family, named(family.definition())?))) {
        Some(found) => Ok(found),
        None => ParseError::unsupported(format!("the architecture {name}")),
    }
}

/// How hidden states are pooled, and the classifier of a model that ranks.
fn pooling(keys: &GgufKeys<'_>, hidden: u32) -> Result<PoolingSpec, ParseError> {
    const RANK: u32 = 4;
    let kind = match keys.optional("pooling_type")? {
        None | Some(0 | 1) => Pooling::Mean,
        Some(2) => Pooling::First,
        Some(3) => Pooling::Last,
        Some(RANK) => return classifier(keys, hidden),
        Some(other) => return ParseError::unsupported(format!("pooling of the type {other}")),
    };
    Ok(PoolingSpec { kind, ..PoolingSpec::default() })
}

fn classifier(keys: &GgufKeys<'_>, hidden: u32) -> Result<PoolingSpec, ParseError> {
    let labels = keys.gguf.texts(keys.bytes, &keys.key("classifier.output_labels"))?;
    let labels: Vec<String> = match labels {
        Some(labels) => labels.into_iter().map(str::to_owned).collect(),
        None => vec!["LABEL_0".to_owned()],
    };
    let n = length("the number of labels", labels.len() as u64)?;
    let has = |tensor: &str| keys.gguf.tensor(tensor).is_some();
    let norm = has("cls.norm.weight").then(|| "cls.norm".to_owned());
    let dense = PooledLayer::product("cls", hidden, hidden);
    let layers = match (has("cls.output.weight"), norm) {
        (false, _) if has("cls.weight") => vec![PooledLayer::product("cls", hidden, n)],
        (true, None) if has("cls.weight") => {
            vec![dense.with(PooledActivation::Tanh), PooledLayer::product("cls.output", hidden, n)]
        }
        (true, norm @ Some(_)) if has("cls.weight") => {
            let dense = PooledLayer { norm, ..dense.with(PooledActivation::GeluErf) };
            vec![dense, PooledLayer::product("cls.output", hidden, n)]
        }
        _ => vec![PooledLayer::product("cls.output", hidden, n)],
    };
    // A model that is no encoder sees all of its text only at the end.
    let kind = match has("position_embd.weight") || has("token_embd_norm.weight") {
        true => Pooling::First,
        false => Pooling::Last,
    };
    // As llama.cpp has it: ranks are the outputs themselves.
    let scores = if labels.len() == 1 { ScoreActivation::None } else { ScoreActivation::Softmax };
    Ok(PoolingSpec { kind, layers, labels, scores, ..PoolingSpec::default() })
}

/// Some families have the architecture of another.
fn find_variant(keys: &GgufKeys<'_>) -> Option<Family> {
    let has = |variant: GgufVariant| variant.architecture == keys.prefix && (variant.is_in)(keys);
    Family::find(|of| of.gguf.variant.is_some_and(has))
}

fn multipliers(keys: &GgufKeys<'_>, of: &FamilyDefinition, hidden: u32) -> Result<ModelMultipliers, ParseError> {
    let factors = (of.gguf.multipliers)(keys)?;
    match of.rules.scales_embedding {
        true => Ok(ModelMultipliers { embedding: Some((hidden as f32).sqrt()), ..factors }),
        false => Ok(factors),
    }
}

/// How queries grow with their positions.
fn temperature(keys: &GgufKeys<'_>) -> Result<Option<QueryTemperature>, ParseError> {
    let Some(beta) = keys.float("attention.temperature_scale")?.filter(|beta| *beta != 0.0) else { return Ok(None) };
    let every = match keys.optional("attention.temperature_length")? {
        Some(length) => length,
        None => keys.length("rope.scaling.original_context_length")?,
    };
    Ok(Some(QueryTemperature { beta, every }))
}

/// The length of heads: of layers with a window, where others have longer ones.
fn head_dim(keys: &GgufKeys<'_>, of: &FamilyDefinition, usual: u32) -> Result<u32, ParseError> {
    let both = |keys_of: &str, values_of: &str| {
        let (key_dim, value_dim) = (keys.optional(keys_of)?, keys.optional(values_of)?);
        match value_dim.is_some_and(|dim| dim != key_dim.unwrap_or(usual)) {
            true => ParseError::unsupported("attention whose values are not as long as its keys"),
            false => Ok(key_dim),
        }
    };
    let whole = both("attention.key_length", "attention.value_length")?.unwrap_or(usual);
    let local = both("attention.key_length_swa", "attention.value_length_swa")?.filter(|_| of.gguf.layers_differ);
    Ok(local.unwrap_or(whole))
}

/// A length that is the same in all layers, or that of the first in families where layers differ.
fn usual_length(keys: &GgufKeys<'_>, of: &FamilyDefinition, key: &str) -> Result<Option<u32>, ParseError> {
    if of.gguf.layers_differ { keys.of_layer(key, 0) } else { keys.of_all_layers(key) }
}

/// The width of the MLP. A model whose MLPs are all experts may have only theirs.
fn inner(keys: &GgufKeys<'_>, of: &FamilyDefinition) -> Result<u32, ParseError> {
    match usual_length(keys, of, "feed_forward_length")? {
        Some(inner) => Ok(inner),
        None => keys.optional("expert_feed_forward_length")?.map_or_else(|| keys.length("feed_forward_length"), Ok),
    }
}

/// Some files have an RMS norm's epsilon under the other name.
fn norm_eps(keys: &GgufKeys<'_>, of: &FamilyDefinition) -> Result<f32, ParseError> {
    let (layer, rms) = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon");
    let given = match of.form.norm_kind {
        NormKind::Layer => keys.float(layer)?,
        NormKind::Rms => keys.float(rms)?.map_or_else(|| keys.float(layer), |eps| Ok(Some(eps)))?,
    };
    Ok(given.unwrap_or(1e-5))
}

fn attention(
    keys: &GgufKeys<'_>,
    of: &FamilyDefinition,
    (hidden, n_layers): (u32, u32),
    (n_heads, head_dim): (u32, u32),
) -> Result<AttentionSpec, ParseError> {
    let rules = &of.rules;
    // The metadata does not have the divisor of queries: the largest model of a family is known by its layers.
    let is_largest = of.gguf.n_layers_of_largest == Some(n_layers);
    let scaled_by = if is_largest { hidden / n_heads.max(1) } else { head_dim };
    let given = keys.float("attention.scale")?.filter(|scale| *scale != 0.0 && of.gguf.has_scale);
    let has = |tensor: &str| keys.gguf.tensor(tensor).is_some();
    Ok(AttentionSpec {
        scale: given.or(of.gguf.scale).unwrap_or(1.0 / (scaled_by as f32).sqrt()),
        cap: keys.float("attn_logit_softcapping")?,
        has_bias: match rules.bias {
            AttentionBias::Never => false,
            AttentionBias::Always | AttentionBias::Required => true,
            AttentionBias::Optional { .. } => has("blk.0.attn_q.bias"),
        },
        query_key_norms: match rules.norms_are_optional && !has("blk.0.attn_q_norm.weight") {
            true => QueryKeyNorms::None,
            false => rules.query_key_norms,
        },
        norms_values: rules.norms_values,
        temperature: if rules.has_temperature { temperature(keys)? } else { None },
        has_sinks: rules.has_sinks,
        has_gate: rules.has_gate,
    })
}

fn layers(
    keys: &GgufKeys<'_>,
    of: &FamilyDefinition,
    n_layers: u32,
    has_experts: bool,
) -> Result<Vec<LayerSpec>, ParseError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let window = keys.optional("attention.sliding_window")?.filter(|window| *window > 0);
    let period = match of.gguf.window_pattern {
        WindowPattern::Period => keys.optional(PATTERN)?.unwrap_or(of.rules.window_period).max(1),
        _ => of.rules.window_period,
    };
    let listed = match of.gguf.window_pattern {
        WindowPattern::List => keys.gguf.bools(keys.bytes, &keys.key(PATTERN))?,
        _ => None,
    };
    let n_dense = keys.optional("leading_dense_block_count")?.unwrap_or(0);
    let layer = |i: u32| {
        let in_turn = listed.as_ref().and_then(|listed| listed.get(i as usize)).copied();
        let is_local = window.is_some() && in_turn.unwrap_or(!(i + 1).is_multiple_of(period));
        let usual = LayerSpec {
            mixer: MixerSpec::Attention,
            window: window.filter(|_| is_local),
            positions: of.rules.positions.of_layer(is_local),
            has_mlp: true,
            has_experts: has_experts && i >= n_dense,
            ..LayerSpec::EMPTY
        };
        (of.gguf.layer)(keys, i, usual)
    };
    let all = (0..n_layers.min(super::LAYERS_MAX as u32)).map(layer).collect::<Result<_, _>>()?;
    (of.gguf.adjust_layers)(keys, all)
}

fn rope(keys: &GgufKeys<'_>, of: &FamilyDefinition, head_dim: u32) -> Result<RopeSpec, ParseError> {
    let (theta, pairs) = (keys.float("rope.freq_base")?.unwrap_or(10_000.0), of.gguf.pairs);
    if !of.rules.positions.has_rope() {
        return Ok(RopeSpec { theta, dim: 2, pairs, scaling: RopeScaling::None });
    }
    let dim = keys.optional("rope.dimension_count")?.unwrap_or(head_dim);
    Ok(RopeSpec { theta, dim, pairs, scaling: scaling(keys, of, dim)? })
}

fn local_rope(
    keys: &GgufKeys<'_>,
    of: &FamilyDefinition,
    rope: &RopeSpec,
    head_dim: u32,
) -> Result<Option<RopeSpec>, ParseError> {
    let theta = match of.rules.local_theta {
        Some(LocalTheta::Own(_, theta)) => theta,
        Some(LocalTheta::Same) => rope.theta,
        None => return Ok(None),
    };
    let theta = keys.float("rope.freq_base_swa")?.unwrap_or(theta);
    let dim = match of.gguf.layers_differ {
        true => keys.optional("rope.dimension_count_swa")?.unwrap_or(head_dim),
        false => rope.dim,
    };
    Ok(Some(RopeSpec { theta, dim, scaling: RopeScaling::None, ..rope.clone() }))
}

fn scaling(keys: &GgufKeys<'_>, of: &FamilyDefinition, dim: u32) -> Result<RopeScaling, ParseError> {
    if let Some(divisors) = keys.rope_factors("rope_freqs.weight", dim)? {
        return Ok(RopeScaling::Divisors(divisors));
    }
    let original_context = || keys.length("rope.scaling.original_context_length");
    let magnitude = keys.float("rope.scaling.attn_factor")?;
    let sets =
        (keys.rope_factors("rope_factors_short.weight", dim)?, keys.rope_factors("rope_factors_long.weight", dim)?);
    if let (Some(short), Some(long)) = sets {
        let (original_context, magnitude) = (original_context()?, magnitude.unwrap_or(1.0));
        return Ok(RopeScaling::Long { short, long, original_context, magnitude });
    }
    let factor = keys.float("rope.scaling.factor")?.or(keys.float("rope.scale_linear")?);
    match (keys.gguf.text(keys.bytes, &keys.key("rope.scaling.type"))?, factor) {
        (None | Some("linear"), Some(factor)) if factor != 1.0 && factor != 0.0 => Ok(RopeScaling::Linear { factor }),
        (None | Some("none" | "linear"), _) => Ok(RopeScaling::None),
        (Some("yarn"), Some(factor)) => Ok(RopeScaling::Yarn {
            factor,
            beta_fast: keys.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: keys.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            original_context: original_context()?,
            magnitude: yarn_magnitude(keys, of, factor)? * magnitude.unwrap_or(1.0),
            truncate: of.gguf.truncates_yarn,
        }),
        (Some(other), _) => ParseError::unsupported(format!("rope scaling of the type {other}")),
    }
}

/// The factor for rotated numbers, of which some files take back a part.
fn yarn_magnitude(keys: &GgufKeys<'_>, of: &FamilyDefinition, factor: f32) -> Result<f32, ParseError> {
    let less = keys.float("rope.scaling.yarn_log_multiplier")?.filter(|_| of.gguf.divides_yarn);
    Ok(super::yarn_magnitude(factor, 1.0) / less.map_or(1.0, |less| super::yarn_magnitude(factor, less)))
}

fn gguf_vocab(gguf: &Gguf) -> Result<u32, ParseError> {
    match gguf.tensor("token_embd.weight") {
        Some(embedding) if embedding.dims.len() == 2 => {
            length("the number of rows of token_embd.weight", embedding.dims[0])
        }
        Some(_) => ParseError::malformed("the tensor token_embd.weight is not a matrix"),
        None => ParseError::malformed("the tensor token_embd.weight is missing"),
    }
}

fn token(gguf: &Gguf, which: &str) -> Result<Option<Token>, ParseError> {
    let key = format!("tokenizer.ggml.{which}_token_id");
    // Some files write "none" as all bits set.
    let number = gguf.unsigned(&key)?.filter(|number| *number != u64::from(u32::MAX));
    number.map(|number| length(&key, number)).transpose()
}

fn gguf_eos(gguf: &Gguf, bytes: &[u8], ends: &[&str], tokens: &[&str]) -> Result<Vec<Token>, ParseError> {
    let mut eos = Vec::new();
    for which in ["eos", "eot", "eom"] {
        eos.extend(token(gguf, which)?);
    }
    let kinds = gguf.integers(bytes, "tokenizer.ggml.token_type")?.unwrap_or_default();
    let control = |id: usize| kinds.get(id).is_some_and(|kind| *kind == crate::tokenizer::KIND_CONTROL);
    let by_text = tokens.iter().enumerate().filter(|(id, text)| control(*id) && ends.contains(*text));
    eos.extend(by_text.map(|(id, _)| id as Token));
    dedup_eos(eos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_gpt_oss_ends_no_answer() {
        let is_end = |family: Family, text: &str| family.definition().gguf.ends.contains(&text);
        assert!(is_end(Family::Llama, "<|end|>") && !is_end(Family::Llama, "<|call|>"));
        assert!(!is_end(Family::GptOss, "<|end|>") && is_end(Family::GptOss, "<|call|>"));
    }
}
