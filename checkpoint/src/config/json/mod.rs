//! Reads a spec from `config.json`, and from `generation_config.json` and `tokenizer_config.json` if they exist.

mod architecture;
pub mod keys;
mod rope;

use super::parts::rope_head_dim;
use super::{
    AttentionSpec, EmbeddingPrefixes, LayerSpec, MixerSpec, ModelMultipliers, ModelSpec, PoolingSpec, QueryKeyNorms,
    ScoreActivation, dedup_eos,
};
use crate::error::ParseError;
use crate::families::{AttentionBias, FamilyDefinition, WindowUse};
use crate::scaling::QuantConfig;
use keys::JsonKeys;
use serde_json::Value;
use types::Token;

impl ModelSpec {
    pub(crate) fn from_config(
        config: &Value,
        generation: &Value,
        tokenizer: &Value,
        folder_name: &str,
    ) -> Result<ModelSpec, ParseError> {
        let text = architecture::text_config(config);
        let config = text.as_ref();
        let keys = JsonKeys(config);
        let family = architecture::find_family(&keys)?;
        let of = family.definition();
        let (names, readers) = (of.config.keys, &of.readers);
        refuse_unserved(&keys, of)?;
        let (hidden, n_heads) = (keys.length(names.hidden)?, keys.length(names.n_heads)?);
        let n_layers = (readers.n_layers)(&keys, names)?;
        let head_dim = (readers.head_dim)(&keys, hidden / n_heads.max(1))?;
        let encoder = (of.encoder.config)(&keys)?;
        let n_before_first = encoder.map_or(0, |of| of.n_rows_before_first);
        let context = keys.optional(names.context)?.unwrap_or(2048).saturating_sub(n_before_first);
        let experts = (readers.experts)(&keys)?;
        let layers = layers(&keys, of, n_layers, experts.is_some())?;
        let rope_dim = rope_head_dim(&layers, head_dim);
        let spec = ModelSpec {
            family,
            name: folder_name.to_owned(),
            hidden,
            n_layers,
            n_heads,
            n_kv_heads: keys.optional("num_key_value_heads")?.unwrap_or(n_heads),
            head_dim,
            inner: (readers.inner)(&keys, names, hidden)?,
            layer_input: (readers.layer_input)(&keys)?,
            vocab: keys.length("vocab_size")?,
            context,
            norm_eps: keys.float(names.eps)?.unwrap_or(of.config.eps),
            norm_offset: of.config.norm_offset,
            attention: attention(&keys, of, head_dim, context)?,
            layers,
            experts,
            rope: rope::rope(&keys, of, of.config.theta, "full_attention", [rope_dim, context])?,
            local_rope: rope::local_rope(&keys, of, [head_dim, context])?,
            logits_cap: keys.float("final_logit_softcapping")?.filter(|_| of.rules.has_caps),
            factors: multipliers(&keys, of, hidden)?,
            is_parallel: (readers.is_parallel)(&keys)?,
            tied_embeddings: tied_embeddings(&keys, of)?,
            encoder,
            pooling: pooling(&keys, of, hidden)?,
            bos: first_token(config, "bos_token_id").or_else(|| first_token(generation, "bos_token_id")),
            eos: config_eos(config, generation, tokenizer)?,
        };
        spec.checked()
    }
}

fn tied_embeddings(keys: &JsonKeys<'_>, of: &FamilyDefinition) -> Result<bool, ParseError> {
    if architecture::lacks_head(keys) {
        return Ok(true);
    }
    match keys.bool("tie_word_embeddings")? {
        Some(is_tied) => Ok(is_tied),
        // Some first files used another name for it.
        None => Ok(keys.bool("tie_embedding")?.unwrap_or(of.config.is_tied)),
    }
}

/// Whether Q, K and V have a bias.
fn has_bias(keys: &JsonKeys<'_>, bias: AttentionBias) -> Result<bool, ParseError> {
    let given_or = |absent| Ok(keys.bool("attention_bias")?.unwrap_or(absent));
    match bias {
        AttentionBias::Never => Ok(false),
        AttentionBias::Always => Ok(true),
        AttentionBias::Optional { absent } => given_or(absent),
        AttentionBias::Required => given_or(true),
    }
}

/// A position attends to those behind it.
const BIDIRECTIONAL: &str = "use_bidirectional_attention";

/// How hidden states are pooled without a file that says so: their mean. A classifier's family has another rule.
fn pooling(keys: &JsonKeys<'_>, of: &FamilyDefinition, hidden: u32) -> Result<PoolingSpec, ParseError> {
    let class = keys.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    if !class.is_some_and(|class| class.ends_with(architecture::CLASSIFIER)) {
        return Ok(PoolingSpec { prefixes: prefixes(keys)?, ..PoolingSpec::default() });
    }
    let labels = labels(keys)?;
    let n = super::length("the number of labels", labels.len() as u64)?;
    let (kind, layers) = (of.encoder.classifier)(keys, hidden, n)?;
    let scores = score_activation(keys, labels.len())?;
    Ok(PoolingSpec { kind, layers, labels, scores, ..PoolingSpec::default() })
}

/// The names are those of the files of models that were trained for it, and of vLLM's overrides.
fn prefixes(keys: &JsonKeys<'_>) -> Result<EmbeddingPrefixes, ParseError> {
    const LENGTHS: &str = "matryoshka_dimensions";
    if let Some(all) = keys.get(LENGTHS).filter(|value| !value.is_null()) {
        let lengths = all.as_array().and_then(|all| all.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>());
        let lengths = lengths.and_then(|all| all.into_iter().map(|n| u32::try_from(n).ok()).collect());
        return match lengths {
            Some(lengths) => Ok(EmbeddingPrefixes::OfLengths(lengths)),
            None => ParseError::malformed(format!("{LENGTHS} is no list of lengths")),
        };
    }
    Ok(match keys.bool("is_matryoshka")? {
        Some(true) => EmbeddingPrefixes::OfAnyLength,
        _ => EmbeddingPrefixes::None,
    })
}

/// How a classifier's outputs become scores. Sentence-transformers names a class of torch, in one of two places.
fn score_activation(keys: &JsonKeys<'_>, n_labels: usize) -> Result<ScoreActivation, ParseError> {
    let own = JsonKeys(keys.object("sentence_transformers").unwrap_or(&Value::Null));
    let named = own.text("activation_fn").or(keys.text("sbert_ce_default_activation_function"));
    match named.and_then(|name| name.rsplit('.').next()) {
        None if keys.text("problem_type") == Some("multi_label_classification") => Ok(ScoreActivation::Sigmoid),
        None => Ok(ScoreActivation::of_labels(n_labels)),
        Some("Identity") => Ok(ScoreActivation::None),
        Some("Sigmoid") => Ok(ScoreActivation::Sigmoid),
        Some("Softmax") => Ok(ScoreActivation::Softmax),
        Some(other) => ParseError::unsupported(format!("the activation {other} of a classifier")),
    }
}

/// The names of a classifier's outputs, in their order.
fn labels(keys: &JsonKeys<'_>) -> Result<Vec<String>, ParseError> {
    let Some(named) = keys.object("id2label").and_then(Value::as_object) else {
        let n = keys.optional("num_labels")?.unwrap_or(2);
        return Ok((0..n.min(LABELS_MAX)).map(|i| format!("LABEL_{i}")).collect());
    };
    let name = |i: usize| named.get(&i.to_string()).and_then(Value::as_str).map(str::to_owned);
    match (0..named.len()).map(name).collect::<Option<Vec<_>>>() {
        Some(names) if !names.is_empty() && names.len() <= LABELS_MAX as usize => Ok(names),
        _ => ParseError::malformed("id2label does not name the outputs 0, 1, 2 and so on"),
    }
}

const LABELS_MAX: u32 = 1 << 16;

/// Refuses config values that no code here implements.
fn refuse_unserved(keys: &JsonKeys<'_>, of: &FamilyDefinition) -> Result<(), ParseError> {
    const SWITCHES: [&str; 4] = ["mlp_bias", BIDIRECTIONAL, "scale_attn_by_inverse_layer_idx", "add_cross_attention"];
    let has_bias = has_bias(keys, of.rules.bias)?;
    if keys.bool("attention_bias")?.unwrap_or(false) && !has_bias {
        return ParseError::unsupported("a model with attention_bias in this architecture");
    }
    if of.rules.bias == AttentionBias::Required && !has_bias {
        return ParseError::unsupported("a model without attention_bias in this architecture");
    }
    // Images may attend to all of themselves; text does not. An encoder does.
    let is_encoder = (of.encoder.config)(keys)?.is_some();
    let is_served = |switch: &str| keys.text(switch) == Some("vision") || (switch == BIDIRECTIONAL && is_encoder);
    for switch in SWITCHES.into_iter().filter(|switch| !is_served(switch)) {
        if keys.bool(switch)?.unwrap_or(false) {
            return ParseError::unsupported(format!("a model with {switch}"));
        }
    }
    if keys.bool("scale_attn_weights")? == Some(false) {
        return ParseError::unsupported("a model without scale_attn_weights");
    }
    QuantConfig::from_config(keys.0)?;
    match keys.text(of.config.keys.activation) {
        Some(other) if !of.config.activations.contains(&other) => {
            ParseError::unsupported(format!("the activation {other}"))
        }
        _ => Ok(()),
    }
}

fn attention(
    keys: &JsonKeys<'_>,
    of: &FamilyDefinition,
    head_dim: u32,
    context: u32,
) -> Result<AttentionSpec, ParseError> {
    let rules = &of.rules;
    Ok(AttentionSpec {
        scale: (of.readers.scale)(keys, head_dim)?,
        query_key_norms: match rules.norms_are_optional && !keys.bool("use_qk_norm")?.unwrap_or(false) {
            true => QueryKeyNorms::None,
            false => rules.query_key_norms,
        },
        norms_values: rules.norms_values,
        cap: keys.float("attn_logit_softcapping")?.filter(|_| rules.has_caps),
        has_bias: has_bias(keys, rules.bias)?,
        temperature: if rules.has_temperature { rope::temperature(keys, context)? } else { None },
        has_sinks: rules.has_sinks,
        has_gate: rules.has_gate,
    })
}

fn multipliers(keys: &JsonKeys<'_>, of: &FamilyDefinition, hidden: u32) -> Result<ModelMultipliers, ParseError> {
    let factors = (of.readers.multipliers)(keys)?;
    match of.rules.scales_embedding {
        true => Ok(ModelMultipliers { embedding: Some((hidden as f32).sqrt()), ..factors }),
        false => Ok(factors),
    }
}

fn layers(
    keys: &JsonKeys<'_>,
    of: &FamilyDefinition,
    n_layers: u32,
    has_experts: bool,
) -> Result<Vec<LayerSpec>, ParseError> {
    if let Some(layers) = of.readers.layers {
        return layers(keys);
    }
    let n_layers = n_layers.min(super::LAYERS_MAX as u32);
    let window = window(keys, of.config.window)?;
    let listed = match keys.texts("layer_types")? {
        None => keys.texts("layers_block_type")?,
        listed => listed,
    };
    if let Some(listed) = listed.as_ref().filter(|listed| listed.len() != n_layers as usize) {
        return ParseError::malformed(format!("layer_types names {} layers of {n_layers}", listed.len()));
    }
    let mlp_only = keys.lengths("mlp_only_layers")?.unwrap_or_default();
    let sparse_step = keys.optional("decoder_sparse_step")?.unwrap_or(1).max(1);
    let (dense_key, n_dense) = of.config.dense_layers;
    let n_dense = keys.optional(dense_key)?.unwrap_or(n_dense);
    let dense = |i: u32| i < n_dense || mlp_only.contains(&i) || !(i + 1).is_multiple_of(sparse_step);
    let layer = |i: u32| {
        let name = listed.as_ref().map(|listed| listed[i as usize]);
        let mixer = (of.readers.mixer)(keys, i, name)?;
        let is_local = match name {
            _ if mixer != MixerSpec::Attention => false,
            Some(name) if of.config.attention_names.contains(&name) => false,
            Some("sliding_attention") => true,
            Some(other) => return ParseError::unsupported(format!("a layer of the type {other}")),
            None => (of.readers.is_local)(keys, i, of.rules.window_period)?,
        };
        Ok(LayerSpec {
            mixer,
            window: window.filter(|_| is_local),
            positions: (of.readers.positions)(keys, i, of.rules.positions.of_layer(is_local))?,
            has_mlp: true,
            has_experts: has_experts && !dense(i),
            ..LayerSpec::EMPTY
        })
    };
    (of.readers.adjust_layers)(keys, (0..n_layers).map(layer).collect::<Result<_, _>>()?)
}

/// The window of layers that do not attend to all positions.
fn window(keys: &JsonKeys<'_>, window: WindowUse) -> Result<Option<u32>, ParseError> {
    let is_used = match window {
        WindowUse::Never => false,
        WindowUse::Switched => keys.bool("use_sliding_window")?.unwrap_or(false),
        WindowUse::Always { absent } if keys.0.get("sliding_window").is_none() => return Ok(absent),
        WindowUse::Always { .. } => true,
    };
    Ok(keys.optional("sliding_window")?.filter(|_| is_used))
}

fn first_token(object: &Value, key: &str) -> Option<Token> {
    token_list(object, key).first().copied()
}

/// One token id, or a list of them.
fn token_list(object: &Value, key: &str) -> Vec<Token> {
    let one = |value: &Value| value.as_u64().and_then(|id| Token::try_from(id).ok());
    match object.get(key) {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => Vec::new(),
    }
}

/// The stop tokens for generation come first, then those of the model and the tokenizer.
fn config_eos(config: &Value, generation: &Value, tokenizer: &Value) -> Result<Vec<Token>, ParseError> {
    let mut eos = token_list(generation, "eos_token_id");
    eos.extend(token_list(config, "eos_token_id"));
    let text = crate::template::token_text(&tokenizer["eos_token"]);
    for (id, added) in tokenizer["added_tokens_decoder"].as_object().into_iter().flatten() {
        if added["content"].as_str().is_some_and(|content| Some(content) == text.as_deref()) {
            eos.extend(id.parse::<Token>());
        }
    }
    dedup_eos(eos)
}
