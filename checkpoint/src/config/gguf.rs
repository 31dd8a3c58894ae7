//! Reads a spec from a GGUF's metadata, as llama.cpp's converter writes it.

use super::{
    AttentionSpec, ClampedSilu, ExpertScores, ExpertsSpec, Family, LayerSpec, MixerKind, ModelMultipliers, ModelSpec,
    PositionEncoding, QueryKeyNorms, QueryTemperature, RopeScaling, RopeSpec, SamplingDefaults, dedup_eos, length,
};
use crate::error::ParseError;
use crate::gguf::Gguf;
use types::Token;

/// Texts of control tokens that end an answer in some chat template, whatever the file's own end token is.
const END_TEXTS: [&str; 12] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|return|>",
    "<EOT>",
    "< EOT >",
    "_<EOT>",
];

/// The same of gpt-oss, whose answers have several messages: `<|end|>` ends one of them.
const HARMONY_ENDS: [&str; 3] = ["<|return|>", "<|call|>", "<|endoftext|>"];

fn is_end(family: Family, text: &str) -> bool {
    if family == Family::GptOss { HARMONY_ENDS.contains(&text) } else { END_TEXTS.contains(&text) }
}

/// The architecture's name, its family, and whether its rope rotates pairs: then the converter has permuted Q and K.
const TABLES: [(&str, Family, bool); 18] = [
    ("llama", Family::Llama, true),
    ("smollm3", Family::SmolLm3, true),
    ("qwen2", Family::Qwen2, false),
    ("qwen3", Family::Qwen3, false),
    ("qwen3moe", Family::Qwen3Moe, false),
    ("phi3", Family::Phi3, false),
    ("gemma2", Family::Gemma2, false),
    ("gemma3", Family::Gemma3, false),
    ("gpt2", Family::Gpt2, false),
    ("olmo2", Family::Olmo2, false),
    ("granite", Family::Granite, true),
    ("granitemoe", Family::GraniteMoe, true),
    ("gpt-oss", Family::GptOss, false),
    ("glm4", Family::Glm4, true),
    ("glm4moe", Family::Glm4Moe, false),
    ("mistral3", Family::Ministral3, true),
    ("cohere2", Family::Cohere2, true),
    ("gptneox", Family::GptNeox, false),
];

impl ModelSpec {
    pub(crate) fn from_gguf(gguf: &Gguf, bytes: &[u8], file_name: &str) -> Result<ModelSpec, ParseError> {
        let (prefix, family, pairs) = find_architecture(gguf, bytes)?;
        let keys = GgufKeys { gguf, bytes, prefix };
        let (hidden, n_heads) = (keys.length("embedding_length")?, keys.length("attention.head_count")?);
        let head_dim = keys.optional("attention.key_length")?.unwrap_or(hidden / n_heads.max(1));
        if keys.optional("attention.value_length")?.is_some_and(|dim| dim != head_dim) {
            return ParseError::unsupported("attention whose values are not as long as its keys");
        }
        let inner = keys.length("feed_forward_length")?;
        let experts = experts(&keys, family, inner)?;
        let family = refine_family(&keys, family, experts.is_some())?;
        // Layers that guess further tokens come last, and are not used.
        let n_layers = keys.length("block_count")?.saturating_sub(keys.optional("nextn_predict_layers")?.unwrap_or(0));
        let tokens = gguf.texts(bytes, "tokenizer.ggml.tokens")?.unwrap_or_default();
        let rope = rope(&keys, family, pairs, head_dim)?;
        let spec = ModelSpec {
            family,
            name: gguf.text(bytes, "general.name")?.unwrap_or(file_name).to_owned(),
            hidden,
            n_layers,
            n_heads,
            n_kv_heads: keys.optional("attention.head_count_kv")?.unwrap_or(n_heads),
            head_dim,
            inner,
            vocab: gguf_vocab(gguf)?,
            context: keys.length("context_length")?,
            norm_eps: keys.float(eps_key(family))?.unwrap_or(1e-5),
            // The converter has already added one to Gemma's norms.
            norm_offset: 0.0,
            attention: attention(&keys, family, (hidden, n_layers), (n_heads, head_dim))?,
            recurrence: None,
            convolution: None,
            layers: layers(&keys, family, n_layers, experts.is_some())?,
            experts,
            local_rope: local_rope(&keys, family, &rope)?,
            rope,
            logits_cap: keys.float("final_logit_softcapping")?.filter(|_| is_gemma(family)),
            factors: multipliers(&keys, family, hidden)?,
            is_parallel: is_parallel(&keys, family)?,
            tied_embeddings: gguf.tensor("output.weight").is_none(),
            bos: token(gguf, "bos")?,
            eos: gguf_eos(gguf, bytes, family, &tokens)?,
        };
        spec.checked()
    }
}

impl SamplingDefaults {
    /// The sampling that a file recommends: llama.cpp's keys `general.sampling.*`.
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<SamplingDefaults, ParseError> {
        let number = |name: &str| Ok(gguf.float(&sampling_key(name))?.map(|number| number as f32));
        // Zero and less are llama.cpp's words for no filter, and for the whole log.
        let whole = |name: &str| {
            let n = gguf.signed(&sampling_key(name))?;
            Ok(n.map(|n| u32::try_from(n.max(0)).unwrap_or(u32::MAX)))
        };
        Ok(SamplingDefaults {
            temperature: number("temp")?,
            top_p: number("top_p")?,
            top_k: whole("top_k")?,
            min_p: number("min_p")?,
            repetition_penalty: number("penalty_repeat")?,
            penalty_window: whole("penalty_last_n")?,
        })
    }
}

fn sampling_key(name: &str) -> String {
    format!("general.sampling.{name}")
}

impl ModelSpec {
    /// Refuses an architecture that is not served. A file that names none is a later part of a split model.
    pub(crate) fn check_architecture(gguf: &Gguf, bytes: &[u8]) -> Result<(), ParseError> {
        match gguf.text(bytes, "general.architecture")? {
            Some(_) => find_architecture(gguf, bytes).map(drop),
            None => Ok(()),
        }
    }
}

fn find_architecture(gguf: &Gguf, bytes: &[u8]) -> Result<(&'static str, Family, bool), ParseError> {
    match gguf.text(bytes, "general.architecture")? {
        Some(name) => match TABLES.iter().find(|table| table.0 == name) {
            Some(table) => Ok(*table),
            None => ParseError::unsupported(format!("the architecture {name}")),
        },
        None => ParseError::malformed("the metadata does not name an architecture"),
    }
}

/// Some families have the architecture of another.
fn refine_family(keys: &GgufKeys<'_>, family: Family, has_experts: bool) -> Result<Family, ParseError> {
    match family {
        Family::Llama if has_experts => Ok(Family::Mixtral),
        Family::Olmo2 if keys.optional("attention.sliding_window")?.is_some() => Ok(Family::Olmo3),
        _ => Ok(family),
    }
}

fn is_gemma(family: Family) -> bool {
    matches!(family, Family::Gemma2 | Family::Gemma3)
}

fn multipliers(keys: &GgufKeys<'_>, family: Family, hidden: u32) -> Result<ModelMultipliers, ParseError> {
    let given = |key: &str| Ok(keys.float(key)?.filter(|factor| *factor != 1.0 && *factor != 0.0));
    match family {
        Family::Gemma2 | Family::Gemma3 => {
            Ok(ModelMultipliers { embedding: Some((hidden as f32).sqrt()), ..ModelMultipliers::default() })
        }
        Family::Granite | Family::GraniteMoe => Ok(ModelMultipliers {
            embedding: given("embedding_scale")?,
            residual: given("residual_scale")?,
            logits: given("logit_scale")?.map(|divisor| 1.0 / divisor),
        }),
        Family::Cohere2 => Ok(ModelMultipliers { logits: given("logit_scale")?, ..ModelMultipliers::default() }),
        _ => Ok(ModelMultipliers::default()),
    }
}

fn is_parallel(keys: &GgufKeys<'_>, family: Family) -> Result<bool, ParseError> {
    match family {
        Family::Cohere2 => Ok(true),
        Family::GptNeox => Ok(keys.gguf.bool(&keys.key("use_parallel_residual"))?.unwrap_or(true)),
        _ => Ok(false),
    }
}

/// How queries grow with their positions.
fn temperature(keys: &GgufKeys<'_>, family: Family) -> Result<Option<QueryTemperature>, ParseError> {
    if family != Family::Ministral3 {
        return Ok(None);
    }
    let Some(beta) = keys.float("attention.temperature_scale")?.filter(|beta| *beta != 0.0) else { return Ok(None) };
    let every = match keys.optional("attention.temperature_length")? {
        Some(length) => length,
        None => keys.length("rope.scaling.original_context_length")?,
    };
    Ok(Some(QueryTemperature { beta, every }))
}

fn eps_key(family: Family) -> &'static str {
    match family {
        Family::Gpt2 | Family::GptNeox | Family::Cohere2 => "attention.layer_norm_epsilon",
        _ => "attention.layer_norm_rms_epsilon",
    }
}

fn experts(keys: &GgufKeys<'_>, family: Family, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    let n = keys.optional("expert_count")?.unwrap_or(0);
    let plain = || -> Result<ExpertsSpec, ParseError> {
        Ok(ExpertsSpec {
            n,
            n_used: keys.length("expert_used_count")?,
            inner: keys.optional("expert_feed_forward_length")?.unwrap_or(inner),
            normalized: true,
            scores: ExpertScores::Softmax,
            factor: 1.0,
            shared: 0,
            has_shared_gate: false,
            clamp: None,
            has_bias: false,
        })
    };
    match (family, n) {
        (Family::Qwen3Moe | Family::GraniteMoe, _) | (Family::Llama, 1..) => refuse_shared(keys, plain()?).map(Some),
        (Family::GptOss, _) => {
            let clamp = Some(ClampedSilu { alpha: 1.702, limit: 7.0 });
            Ok(Some(ExpertsSpec { clamp, has_bias: true, ..plain()? }))
        }
        (Family::Glm4Moe, _) => {
            let of = plain()?;
            let groups = [keys.optional("expert_group_count")?, keys.optional("expert_group_used_count")?];
            let [n, n_used] = groups.map(|n| n.filter(|n| *n > 0).unwrap_or(1));
            Ok(Some(ExpertsSpec {
                normalized: keys.gguf.bool(&keys.key("expert_weights_norm"))?.unwrap_or(true),
                scores: ExpertScores::Sigmoid { n, n_used },
                factor: keys.float("expert_weights_scale")?.filter(|factor| *factor != 0.0).unwrap_or(1.0),
                shared: of.inner.saturating_mul(keys.optional("expert_shared_count")?.unwrap_or(0)),
                ..of
            }))
        }
        (_, 0) => Ok(None),
        (_, n) => ParseError::unsupported(format!("a mixture of {n} experts in this architecture")),
    }
}

fn refuse_shared(keys: &GgufKeys<'_>, of: ExpertsSpec) -> Result<ExpertsSpec, ParseError> {
    match keys.optional("expert_shared_feed_forward_length")?.unwrap_or(0) {
        0 => Ok(of),
        _ => ParseError::unsupported(format!("{}.expert_shared_feed_forward_length", keys.prefix)),
    }
}

fn attention(
    keys: &GgufKeys<'_>,
    family: Family,
    (hidden, n_layers): (u32, u32),
    (n_heads, head_dim): (u32, u32),
) -> Result<AttentionSpec, ParseError> {
    // The metadata does not have the divisor of queries: the largest model of each family is known by its layers.
    let is_largest_gemma = matches!((family, n_layers), (Family::Gemma2, 46) | (Family::Gemma3, 62));
    let scaled_by = if is_largest_gemma { hidden / n_heads.max(1) } else { head_dim };
    let given = keys.float("attention.scale")?.filter(|scale| *scale != 0.0);
    let given = given.filter(|_| matches!(family, Family::Granite | Family::GraniteMoe));
    Ok(AttentionSpec {
        scale: given.unwrap_or(1.0 / (scaled_by as f32).sqrt()),
        cap: keys.float("attn_logit_softcapping")?,
        has_bias: match family {
            Family::Qwen2 | Family::Gpt2 | Family::GptNeox | Family::GptOss => true,
            Family::Glm4 | Family::Glm4Moe => keys.gguf.tensor("blk.0.attn_q.bias").is_some(),
            _ => false,
        },
        query_key_norms: match family {
            Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3 => QueryKeyNorms::Heads,
            Family::Glm4Moe if keys.gguf.tensor("blk.0.attn_q_norm.weight").is_some() => QueryKeyNorms::Heads,
            Family::Olmo2 | Family::Olmo3 => QueryKeyNorms::Projection,
            _ => QueryKeyNorms::None,
        },
        temperature: temperature(keys, family)?,
        has_sinks: family == Family::GptOss,
        has_gate: false,
    })
}

fn layers(keys: &GgufKeys<'_>, family: Family, n_layers: u32, has_experts: bool) -> Result<Vec<LayerSpec>, ParseError> {
    let window = keys.optional("attention.sliding_window")?.filter(|window| *window > 0);
    let period = match family {
        Family::Gemma2 | Family::GptOss => 2,
        Family::Olmo3 | Family::Cohere2 => 4,
        Family::Gemma3 => keys.optional("attention.sliding_window_pattern")?.unwrap_or(6).max(1),
        // All layers are alike.
        _ => u32::MAX,
    };
    let listed = match family {
        Family::Olmo3 => keys.gguf.bools(keys.bytes, &keys.key("attention.sliding_window_pattern"))?,
        _ => None,
    };
    let n_dense = keys.optional("leading_dense_block_count")?.unwrap_or(0);
    let layer = |i: u32| {
        let in_turn = listed.as_ref().and_then(|listed| listed.get(i as usize)).copied();
        let is_local = window.is_some() && in_turn.unwrap_or(!(i + 1).is_multiple_of(period));
        let positions = match family {
            Family::Gpt2 => PositionEncoding::None,
            Family::SmolLm3 if (i + 1).is_multiple_of(4) => PositionEncoding::None,
            Family::Cohere2 if !is_local => PositionEncoding::None,
            Family::Gemma3 | Family::Olmo3 if is_local => PositionEncoding::LocalRope,
            _ => PositionEncoding::Rope,
        };
        let has_experts = has_experts && i >= n_dense;
        LayerSpec {
            mixer: MixerKind::Attention,
            window: window.filter(|_| is_local),
            positions,
            has_mlp: true,
            has_experts,
        }
    };
    Ok((0..n_layers.min(super::LAYERS_MAX as u32)).map(layer).collect())
}

fn rope(keys: &GgufKeys<'_>, family: Family, pairs: bool, head_dim: u32) -> Result<RopeSpec, ParseError> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    if family == Family::Gpt2 {
        return Ok(RopeSpec { theta, dim: 2, pairs, scaling: RopeScaling::None });
    }
    let dim = keys.optional("rope.dimension_count")?.unwrap_or(head_dim);
    Ok(RopeSpec { theta, dim, pairs, scaling: scaling(keys, family, dim)? })
}

fn local_rope(keys: &GgufKeys<'_>, family: Family, rope: &RopeSpec) -> Result<Option<RopeSpec>, ParseError> {
    let theta = match family {
        Family::Gemma3 => 10_000.0,
        Family::Olmo3 => rope.theta,
        _ => return Ok(None),
    };
    let theta = keys.float("rope.freq_base_swa")?.unwrap_or(theta);
    Ok(Some(RopeSpec { theta, scaling: RopeScaling::None, ..rope.clone() }))
}

fn scaling(keys: &GgufKeys<'_>, family: Family, dim: u32) -> Result<RopeScaling, ParseError> {
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
            magnitude: yarn_magnitude(keys, family, factor)? * magnitude.unwrap_or(1.0),
            truncate: family != Family::GptOss,
        }),
        (Some(other), _) => ParseError::unsupported(format!("rope scaling of the type {other}")),
    }
}

/// The factor for rotated numbers, of which Ministral's files take back a part.
fn yarn_magnitude(keys: &GgufKeys<'_>, family: Family, factor: f32) -> Result<f32, ParseError> {
    let less = keys.float("rope.scaling.yarn_log_multiplier")?.filter(|_| family == Family::Ministral3);
    Ok(super::yarn_magnitude(factor, 1.0) / less.map_or(1.0, |less| super::yarn_magnitude(factor, less)))
}

/// Reads keys `<prefix>.<key>`.
struct GgufKeys<'a> {
    gguf: &'a Gguf,
    bytes: &'a [u8],
    prefix: &'static str,
}

impl GgufKeys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn optional(&self, key: &str) -> Result<Option<u32>, ParseError> {
        let key = self.key(key);
        self.gguf.unsigned(&key)?.map(|number| length(&key, number)).transpose()
    }

    fn length(&self, key: &str) -> Result<u32, ParseError> {
        match self.optional(key)? {
            Some(length) => Ok(length),
            None => ParseError::malformed(format!("the metadata key {} is missing", self.key(key))),
        }
    }

    /// A tensor with one number for each pair that a rope rotates.
    fn rope_factors(&self, name: &str, dim: u32) -> Result<Option<Vec<f32>>, ParseError> {
        let Some(entry) = self.gguf.tensor(name) else { return Ok(None) };
        let n = u64::from(dim / 2);
        if entry.dtype != types::Dtype::F32 || entry.dims.as_slice() != [n] || entry.file != 0 {
            return ParseError::malformed(format!("{name} is not {n} numbers of type F32 in the first part"));
        }
        let Some(bytes) = self.gguf.factors(name) else {
            return ParseError::malformed(format!("{name} has too many numbers for a rope"));
        };
        Ok(Some(bytes.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect()))
    }

    fn float(&self, key: &str) -> Result<Option<f32>, ParseError> {
        Ok(self.gguf.float(&self.key(key))?.map(|number| number as f32))
    }
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

fn gguf_eos(gguf: &Gguf, bytes: &[u8], family: Family, tokens: &[&str]) -> Result<Vec<Token>, ParseError> {
    let mut eos = Vec::new();
    for which in ["eos", "eot", "eom"] {
        eos.extend(token(gguf, which)?);
    }
    let kinds = gguf.integers(bytes, "tokenizer.ggml.token_type")?.unwrap_or_default();
    let control = |id: usize| kinds.get(id).is_some_and(|kind| *kind == crate::tokenizer::KIND_CONTROL);
    let by_text = tokens.iter().enumerate().filter(|(id, text)| control(*id) && is_end(family, text));
    eos.extend(by_text.map(|(id, _)| id as Token));
    dedup_eos(eos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_gpt_oss_ends_no_answer() {
        assert!(is_end(Family::Llama, "<|end|>") && !is_end(Family::Llama, "<|call|>"));
        assert!(!is_end(Family::GptOss, "<|end|>") && is_end(Family::GptOss, "<|call|>"));
    }
}
