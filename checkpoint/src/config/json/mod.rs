//! Reads a spec from `config.json`, and from `generation_config.json` and `tokenizer_config.json` if they exist.

mod keys;
mod nemotron;
mod recurrence;
mod rope;
mod tables;

use super::{
    AttentionSpec, ClampedSilu, ExpertScores, ExpertsSpec, Family, LayerSpec, MixerKind, ModelMultipliers, ModelSpec,
    PositionEncoding, QueryKeyNorms, SamplingDefaults, dedup_eos,
};
use crate::error::ParseError;
use crate::scaling::QuantConfig;
use keys::JsonKeys;
use serde_json::Value;
use tables::{FamilyTable, table_of};
use types::Token;

impl ModelSpec {
    pub(crate) fn from_config(
        config: &Value,
        generation: &Value,
        tokenizer: &Value,
        folder_name: &str,
    ) -> Result<ModelSpec, ParseError> {
        let text = tables::text_config(config);
        let config = text.as_ref();
        let keys = JsonKeys(config);
        let table = table_of(&keys)?;
        let (family, names) = (table.family, table.names);
        refuse_unserved(&keys, table)?;
        let (hidden, n_heads) = (keys.length(names.hidden)?, keys.length(names.n_heads)?);
        let n_layers = match family {
            Family::NemotronH => nemotron::n_layers(&keys)?,
            _ => keys.length(names.n_layers)?,
        };
        let head_dim = match family {
            Family::NemotronH => nemotron::head_dim(&keys)?,
            _ => keys.optional("head_dim")?.unwrap_or(hidden / n_heads.max(1)),
        };
        let context = keys.optional(names.context)?.unwrap_or(2048);
        let experts = experts(&keys, family)?;
        let spec = ModelSpec {
            family,
            name: folder_name.to_owned(),
            hidden,
            n_layers,
            n_heads,
            n_kv_heads: keys.optional("num_key_value_heads")?.unwrap_or(n_heads),
            head_dim,
            inner: inner(&keys, table, hidden)?,
            vocab: keys.length("vocab_size")?,
            context,
            norm_eps: keys.float(names.eps)?.unwrap_or(table.eps),
            norm_offset: if is_gemma(family) || has_output_gate(family) { 1.0 } else { 0.0 },
            attention: attention(&keys, family, head_dim, context)?,
            recurrence: recurrence::recurrence(&keys, family, hidden)?,
            convolution: recurrence::convolution(&keys, family, hidden)?,
            layers: layers(&keys, family, n_layers, experts.is_some())?,
            experts,
            rope: rope::rope(&keys, table, "full_attention", head_dim, context)?,
            local_rope: rope::local_rope(&keys, table, head_dim, context)?,
            logits_cap: keys.float("final_logit_softcapping")?.filter(|_| is_gemma(family)),
            factors: multipliers(&keys, family, hidden)?,
            is_parallel: is_parallel(&keys, family)?,
            tied_embeddings: tied_embeddings(&keys, family)?,
            bos: first_token(config, "bos_token_id").or_else(|| first_token(generation, "bos_token_id")),
            eos: config_eos(config, generation, tokenizer)?,
        };
        spec.checked()
    }
}

fn tied_embeddings(keys: &JsonKeys<'_>, family: Family) -> Result<bool, ParseError> {
    match keys.bool("tie_word_embeddings")? {
        Some(is_tied) => Ok(is_tied),
        // LFM2's first files used another name for it.
        None => Ok(keys.bool("tie_embedding")?.unwrap_or(is_tied(family))),
    }
}

fn is_tied(family: Family) -> bool {
    is_gemma(family) || matches!(family, Family::Gpt2 | Family::Cohere2 | Family::Lfm2 | Family::Lfm2Moe)
}

fn is_gemma(family: Family) -> bool {
    matches!(family, Family::Gemma2 | Family::Gemma3)
}

/// Families whose attention has a gate behind it.
fn has_output_gate(family: Family) -> bool {
    matches!(family, Family::Qwen3Next | Family::Qwen35 | Family::Qwen35Moe)
}

/// Whether Q, K and V may have a bias, if the config has one.
fn has_attention_bias(keys: &JsonKeys<'_>, family: Family) -> Result<bool, ParseError> {
    match family {
        Family::Qwen2 | Family::Gpt2 => Ok(true),
        Family::Glm4 | Family::GptNeox | Family::GptOss => Ok(keys.bool("attention_bias")?.unwrap_or(true)),
        Family::Glm4Moe => Ok(keys.bool("attention_bias")?.unwrap_or(false)),
        _ => Ok(false),
    }
}

/// Refuses config values that no code here implements.
fn refuse_unserved(keys: &JsonKeys<'_>, table: &FamilyTable) -> Result<(), ParseError> {
    const SWITCHES: [&str; 4] =
        ["mlp_bias", "use_bidirectional_attention", "scale_attn_by_inverse_layer_idx", "add_cross_attention"];
    let has_bias = has_attention_bias(keys, table.family)?;
    if keys.bool("attention_bias")?.unwrap_or(false) && !has_bias {
        return ParseError::unsupported("a model with attention_bias in this architecture");
    }
    if matches!(table.family, Family::GptNeox | Family::GptOss) && !has_bias {
        return ParseError::unsupported("a model without attention_bias in this architecture");
    }
    for switch in SWITCHES {
        if keys.bool(switch)?.unwrap_or(false) {
            return ParseError::unsupported(format!("a model with {switch}"));
        }
    }
    if keys.bool("scale_attn_weights")? == Some(false) {
        return ParseError::unsupported("a model without scale_attn_weights");
    }
    QuantConfig::from_config(keys.0)?;
    match keys.text(table.names.activation) {
        Some(other) if !table.activations.contains(&other) => {
            ParseError::unsupported(format!("the activation {other}"))
        }
        _ => Ok(()),
    }
}

fn inner(keys: &JsonKeys<'_>, table: &FamilyTable, hidden: u32) -> Result<u32, ParseError> {
    match table.family {
        Family::Gpt2 => Ok(keys.optional(table.names.inner)?.unwrap_or(4 * hidden)),
        // Without a dense layer, the config contains no width for one.
        Family::Qwen35Moe => keys.length("moe_intermediate_size"),
        Family::Lfm2 => recurrence::lfm2_inner(keys),
        _ => keys.length(table.names.inner),
    }
}

fn attention(keys: &JsonKeys<'_>, family: Family, head_dim: u32, context: u32) -> Result<AttentionSpec, ParseError> {
    let by_root = |dim: f32| 1.0 / dim.sqrt();
    let scale = match family {
        Family::Gemma2 | Family::Gemma3 => by_root(keys.float("query_pre_attn_scalar")?.unwrap_or(256.0)),
        Family::Granite | Family::GraniteMoe | Family::GraniteHybrid => {
            keys.float("attention_multiplier")?.unwrap_or(1.0)
        }
        _ => by_root(head_dim as f32),
    };
    let query_key_norms = match family {
        Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3 => QueryKeyNorms::Heads,
        Family::Qwen3Next | Family::Qwen35 | Family::Qwen35Moe => QueryKeyNorms::Heads,
        Family::Lfm2 | Family::Lfm2Moe => QueryKeyNorms::Heads,
        Family::Glm4Moe if keys.bool("use_qk_norm")?.unwrap_or(false) => QueryKeyNorms::Heads,
        Family::Olmo2 | Family::Olmo3 => QueryKeyNorms::Projection,
        _ => QueryKeyNorms::None,
    };
    Ok(AttentionSpec {
        scale,
        cap: keys.float("attn_logit_softcapping")?.filter(|_| is_gemma(family)),
        has_bias: has_attention_bias(keys, family)?,
        query_key_norms,
        temperature: if family == Family::Ministral3 { rope::temperature(keys, context)? } else { None },
        has_sinks: family == Family::GptOss,
        has_gate: has_output_gate(family),
    })
}

fn multipliers(keys: &JsonKeys<'_>, family: Family, hidden: u32) -> Result<ModelMultipliers, ParseError> {
    let given = |key: &str| Ok(keys.float(key)?.filter(|factor| *factor != 1.0));
    match family {
        Family::Gemma2 | Family::Gemma3 => {
            Ok(ModelMultipliers { embedding: Some((hidden as f32).sqrt()), ..ModelMultipliers::default() })
        }
        Family::Granite | Family::GraniteMoe | Family::GraniteHybrid => Ok(ModelMultipliers {
            embedding: given("embedding_multiplier")?,
            residual: given("residual_multiplier")?,
            logits: given("logits_scaling")?.map(|divisor| 1.0 / divisor),
        }),
        Family::Cohere2 => Ok(ModelMultipliers {
            logits: Some(keys.float("logit_scale")?.unwrap_or(0.0625)),
            ..ModelMultipliers::default()
        }),
        _ => Ok(ModelMultipliers::default()),
    }
}

fn is_parallel(keys: &JsonKeys<'_>, family: Family) -> Result<bool, ParseError> {
    match family {
        Family::Cohere2 => Ok(true),
        Family::GptNeox => Ok(keys.bool("use_parallel_residual")?.unwrap_or(true)),
        _ => Ok(false),
    }
}

fn experts(keys: &JsonKeys<'_>, family: Family) -> Result<Option<ExpertsSpec>, ParseError> {
    let n_used = || keys.length("num_experts_per_tok");
    let plain = |n: u32, inner: u32, normalized: bool| -> Result<ExpertsSpec, ParseError> {
        let (scores, n_used) = (ExpertScores::Softmax, n_used()?);
        Ok(ExpertsSpec {
            n,
            n_used,
            inner,
            normalized,
            scores,
            factor: 1.0,
            shared: 0,
            has_shared_gate: false,
            clamp: None,
            has_bias: false,
        })
    };
    let inner = || keys.length("intermediate_size");
    match family {
        Family::Mixtral | Family::GraniteMoe => plain(keys.length("num_local_experts")?, inner()?, true).map(Some),
        Family::Qwen3Moe => {
            // Newer files use Mixtral's name for it.
            let n = keys.optional("num_experts")?.map_or_else(|| keys.length("num_local_experts"), Ok)?;
            let normalized = keys.bool("norm_topk_prob")?.unwrap_or(false);
            plain(n, keys.length("moe_intermediate_size")?, normalized).map(Some)
        }
        Family::Qwen3Next | Family::Qwen35Moe => {
            let n = keys.optional("num_experts")?.map_or_else(|| keys.length("num_local_experts"), Ok)?;
            // The newer one has no switch for it.
            let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
            let shared = keys.length("shared_expert_intermediate_size")?;
            let of = plain(n, keys.length("moe_intermediate_size")?, normalized)?;
            Ok(Some(ExpertsSpec { shared, has_shared_gate: shared > 0, ..of }))
        }
        Family::GraniteHybrid => match keys.optional("num_local_experts")?.unwrap_or(0) {
            0 => Ok(None),
            n => {
                let shared = keys.length("shared_intermediate_size")?;
                Ok(Some(ExpertsSpec { shared, ..plain(n, inner()?, true)? }))
            }
        },
        Family::GptOss => {
            let (alpha, limit) = (keys.float("swiglu_alpha")?, keys.float("swiglu_limit")?);
            let clamp = ClampedSilu { alpha: alpha.unwrap_or(1.702), limit: limit.unwrap_or(7.0) };
            let of = plain(keys.length("num_local_experts")?, inner()?, true)?;
            Ok(Some(ExpertsSpec { clamp: Some(clamp), has_bias: true, ..of }))
        }
        Family::Glm4Moe => {
            let inner = keys.length("moe_intermediate_size")?;
            let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
            let groups = [keys.optional("n_group")?, keys.optional("topk_group")?].map(|n| n.unwrap_or(1));
            let n = keys.optional("n_routed_experts")?.map_or_else(|| keys.length("num_local_experts"), Ok)?;
            Ok(Some(ExpertsSpec {
                scores: ExpertScores::Sigmoid { n: groups[0], n_used: groups[1] },
                factor: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
                shared: inner.saturating_mul(keys.optional("n_shared_experts")?.unwrap_or(1)),
                ..plain(n, inner, normalized)?
            }))
        }
        Family::Lfm2Moe => lfm2_experts(keys, plain).map(Some),
        Family::NemotronH => nemotron::experts(keys, plain),
        _ => Ok(None),
    }
}

fn lfm2_experts(
    keys: &JsonKeys<'_>,
    plain: impl Fn(u32, u32, bool) -> Result<ExpertsSpec, ParseError>,
) -> Result<ExpertsSpec, ParseError> {
    if keys.bool("use_expert_bias")? == Some(false) {
        return ParseError::unsupported("a model without use_expert_bias");
    }
    let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
    Ok(ExpertsSpec {
        scores: ExpertScores::Sigmoid { n: 1, n_used: 1 },
        factor: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
        ..plain(keys.length("num_experts")?, keys.length("moe_intermediate_size")?, normalized)?
    })
}

fn layers(keys: &JsonKeys<'_>, family: Family, n_layers: u32, has_experts: bool) -> Result<Vec<LayerSpec>, ParseError> {
    if family == Family::NemotronH {
        return nemotron::layers(keys);
    }
    let n_layers = n_layers.min(super::LAYERS_MAX as u32);
    let window = window(keys, family)?;
    let listed = match keys.texts("layer_types")? {
        None => keys.texts("layers_block_type")?,
        listed => listed,
    };
    if let Some(listed) = listed.as_ref().filter(|listed| listed.len() != n_layers as usize) {
        return ParseError::malformed(format!("layer_types names {} layers of {n_layers}", listed.len()));
    }
    let mlp_only = keys.lengths("mlp_only_layers")?.unwrap_or_default();
    let sparse_step = keys.optional("decoder_sparse_step")?.unwrap_or(1).max(1);
    let n_dense = match family {
        Family::Lfm2Moe => keys.optional("num_dense_layers")?.unwrap_or(2),
        _ => keys.optional("first_k_dense_replace")?.unwrap_or(u32::from(family == Family::Glm4Moe)),
    };
    let dense = |i: u32| i < n_dense || mlp_only.contains(&i) || !(i + 1).is_multiple_of(sparse_step);
    let layer = |i: u32| {
        let name = listed.as_ref().map(|listed| listed[i as usize]);
        let mixer = recurrence::mixer(keys, family, i, name)?;
        let is_local = match name {
            _ if mixer != MixerKind::Attention => false,
            Some("full_attention") => false,
            Some("attention") if family == Family::GraniteHybrid => false,
            Some("sliding_attention") => true,
            Some(other) => return ParseError::unsupported(format!("a layer of the type {other}")),
            None => is_local(keys, family, i)?,
        };
        Ok(LayerSpec {
            mixer,
            window: window.filter(|_| is_local),
            positions: positions(keys, family, i, is_local)?,
            has_mlp: true,
            has_experts: has_experts && !dense(i),
        })
    };
    (0..n_layers).map(layer).collect()
}

/// The window of layers that do not attend to all positions.
fn window(keys: &JsonKeys<'_>, family: Family) -> Result<Option<u32>, ParseError> {
    let is_used = match family {
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe | Family::SmolLm3 => {
            keys.bool("use_sliding_window")?.unwrap_or(false)
        }
        Family::Mistral | Family::Mixtral | Family::Phi3 | Family::Gemma2 | Family::Gemma3 => true,
        Family::Olmo3 | Family::GptOss | Family::Ministral | Family::Ministral3 | Family::Cohere2 => true,
        _ => false,
    };
    let is_left_out = keys.0.get("sliding_window").is_none();
    match family {
        Family::Mistral | Family::Ministral | Family::Gemma2 | Family::Gemma3 | Family::Olmo3 | Family::Cohere2
            if is_left_out =>
        {
            Ok(Some(4096))
        }
        Family::GptOss if is_left_out => Ok(Some(128)),
        _ => Ok(keys.optional("sliding_window")?.filter(|_| is_used)),
    }
}

/// Whether a layer has a window, if no list decides it.
fn is_local(keys: &JsonKeys<'_>, family: Family, layer: u32) -> Result<bool, ParseError> {
    let every = |period: u32| Ok(period == 0 || !(layer + 1).is_multiple_of(period));
    match family {
        Family::Mistral | Family::Ministral | Family::Ministral3 => Ok(true),
        Family::Mixtral | Family::Phi3 | Family::Qwen3Moe => Ok(true),
        Family::Qwen2 | Family::Qwen3 => Ok(layer >= keys.optional("max_window_layers")?.unwrap_or(28)),
        Family::Gemma2 | Family::GptOss => every(2),
        Family::Olmo3 => every(4),
        Family::Cohere2 => every(keys.optional("sliding_window_pattern")?.unwrap_or(4)),
        Family::Gemma3 => every(keys.optional("sliding_window_pattern")?.unwrap_or(6)),
        Family::SmolLm3 => Ok(positions(keys, family, layer, false)? == PositionEncoding::None),
        _ => Ok(false),
    }
}

fn positions(keys: &JsonKeys<'_>, family: Family, layer: u32, is_local: bool) -> Result<PositionEncoding, ParseError> {
    match family {
        Family::Gpt2 => Ok(PositionEncoding::None),
        Family::GraniteHybrid if keys.text("position_embedding_type") != Some("rope") => Ok(PositionEncoding::None),
        Family::Gemma3 | Family::Olmo3 if is_local => Ok(PositionEncoding::LocalRope),
        Family::Cohere2 if !is_local => Ok(PositionEncoding::None),
        Family::SmolLm3 => {
            // In this list, one means that a layer has a rope, despite the list's name.
            let has_rope = match keys.lengths("no_rope_layers")? {
                Some(list) => list.get(layer as usize).is_none_or(|flag| *flag != 0),
                None => !(layer + 1).is_multiple_of(keys.optional("no_rope_layer_interval")?.unwrap_or(4).max(1)),
            };
            Ok(if has_rope { PositionEncoding::Rope } else { PositionEncoding::None })
        }
        _ => Ok(PositionEncoding::Rope),
    }
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

impl SamplingDefaults {
    pub(crate) fn from_generation_config(generation: &Value) -> SamplingDefaults {
        let number = |key: &str| generation.get(key).and_then(Value::as_f64).map(|number| number as f32);
        // Without `do_sample` the other fields have no effect.
        if generation.get("do_sample").and_then(Value::as_bool) != Some(true) {
            return SamplingDefaults::default();
        }
        SamplingDefaults {
            temperature: number("temperature"),
            top_p: number("top_p"),
            top_k: generation.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok()),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
            penalty_window: None,
        }
    }
}
