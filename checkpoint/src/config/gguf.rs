//! Reads a spec from a GGUF's metadata, as llama.cpp's converter writes it.

use super::{
    AttentionSpec, ExpertsSpec, Family, LayerSpec, ModelSpec, Positions, RopeScaling, RopeSpec, distinct, length,
};
use crate::error::Fault;
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

/// The architecture's name, its family, and whether its rope rotates pairs: then the converter has permuted Q and K.
const TABLES: [(&str, Family, bool); 9] = [
    ("llama", Family::Llama, true),
    ("smollm3", Family::SmolLm3, true),
    ("qwen2", Family::Qwen2, false),
    ("qwen3", Family::Qwen3, false),
    ("qwen3moe", Family::Qwen3Moe, false),
    ("phi3", Family::Phi3, false),
    ("gemma2", Family::Gemma2, false),
    ("gemma3", Family::Gemma3, false),
    ("gpt2", Family::Gpt2, false),
];

impl ModelSpec {
    pub(crate) fn from_gguf(gguf: &Gguf, bytes: &[u8], file_name: &str) -> Result<ModelSpec, Fault> {
        let (prefix, family, pairs) = table_of(gguf, bytes)?;
        let keys = GgufKeys { gguf, bytes, prefix };
        let (hidden, n_heads) = (keys.length("embedding_length")?, keys.length("attention.head_count")?);
        let head_dim = keys.optional("attention.key_length")?.unwrap_or(hidden / n_heads.max(1));
        if keys.optional("attention.value_length")?.is_some_and(|dim| dim != head_dim) {
            return Fault::unsupported("attention whose values are not as long as its keys");
        }
        let inner = keys.length("feed_forward_length")?;
        let experts = experts(&keys, family, inner)?;
        let family = if experts.is_some() && family == Family::Llama { Family::Mixtral } else { family };
        let n_layers = keys.length("block_count")?;
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
            layers: layers(&keys, family, n_layers, experts.is_some())?,
            experts,
            local_rope: local_rope(&keys, family, &rope)?,
            rope,
            logits_cap: keys.float("final_logit_softcapping")?,
            tied_embeddings: gguf.tensor("output.weight").is_none(),
            bos: token(gguf, "bos")?,
            eos: gguf_eos(gguf, bytes, &tokens)?,
        };
        spec.checked()
    }
}

fn table_of(gguf: &Gguf, bytes: &[u8]) -> Result<(&'static str, Family, bool), Fault> {
    match gguf.text(bytes, "general.architecture")? {
        Some(name) => match TABLES.iter().find(|table| table.0 == name) {
            Some(table) => Ok(*table),
            None => Fault::unsupported(format!("the architecture {name}")),
        },
        None => Fault::malformed("the metadata does not name an architecture"),
    }
}

fn eps_key(family: Family) -> &'static str {
    match family {
        Family::Gpt2 => "attention.layer_norm_epsilon",
        _ => "attention.layer_norm_rms_epsilon",
    }
}

fn experts(keys: &GgufKeys<'_>, family: Family, inner: u32) -> Result<Option<ExpertsSpec>, Fault> {
    let n = keys.optional("expert_count")?.unwrap_or(0);
    match (family, n) {
        (Family::Qwen3Moe, _) | (Family::Llama, 1..) => Ok(Some(ExpertsSpec {
            n,
            n_used: keys.length("expert_used_count")?,
            inner: keys.optional("expert_feed_forward_length")?.unwrap_or(inner),
            normalized: true,
        })),
        (_, 0) => Ok(None),
        (_, n) => Fault::unsupported(format!("a mixture of {n} experts in this architecture")),
    }
}

fn attention(
    keys: &GgufKeys<'_>,
    family: Family,
    (hidden, n_layers): (u32, u32),
    (n_heads, head_dim): (u32, u32),
) -> Result<AttentionSpec, Fault> {
    // The metadata does not have the divisor of queries: the largest model of each family is known by its layers.
    let is_largest_gemma = matches!((family, n_layers), (Family::Gemma2, 46) | (Family::Gemma3, 62));
    let scaled_by = if is_largest_gemma { hidden / n_heads.max(1) } else { head_dim };
    Ok(AttentionSpec {
        scale: 1.0 / (scaled_by as f32).sqrt(),
        cap: keys.float("attn_logit_softcapping")?,
        has_bias: matches!(family, Family::Qwen2 | Family::Gpt2),
        has_head_norms: matches!(family, Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3),
    })
}

fn layers(keys: &GgufKeys<'_>, family: Family, n_layers: u32, has_experts: bool) -> Result<Vec<LayerSpec>, Fault> {
    let window = keys.optional("attention.sliding_window")?.filter(|window| *window > 0);
    let period = match family {
        Family::Gemma2 => 2,
        Family::Gemma3 => keys.optional("attention.sliding_window_pattern")?.unwrap_or(6).max(1),
        // All layers are alike.
        _ => u32::MAX,
    };
    let layer = |i: u32| {
        let is_local = window.is_some() && !(i + 1).is_multiple_of(period);
        let positions = match family {
            Family::Gpt2 => Positions::None,
            Family::SmolLm3 if (i + 1).is_multiple_of(4) => Positions::None,
            Family::Gemma3 if is_local => Positions::LocalRope,
            _ => Positions::Rope,
        };
        LayerSpec { window: window.filter(|_| is_local), positions, has_experts }
    };
    Ok((0..n_layers.min(super::LAYERS_MAX as u32)).map(layer).collect())
}

fn rope(keys: &GgufKeys<'_>, family: Family, pairs: bool, head_dim: u32) -> Result<RopeSpec, Fault> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    if family == Family::Gpt2 {
        return Ok(RopeSpec { theta, dim: 2, pairs, scaling: RopeScaling::None });
    }
    let dim = keys.optional("rope.dimension_count")?.unwrap_or(head_dim);
    Ok(RopeSpec { theta, dim, pairs, scaling: scaling(keys, dim)? })
}

fn local_rope(keys: &GgufKeys<'_>, family: Family, rope: &RopeSpec) -> Result<Option<RopeSpec>, Fault> {
    let theta = keys.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let local = RopeSpec { theta, scaling: RopeScaling::None, ..rope.clone() };
    Ok(Some(local).filter(|_| family == Family::Gemma3))
}

fn scaling(keys: &GgufKeys<'_>, dim: u32) -> Result<RopeScaling, Fault> {
    if let Some(divisors) = keys.factors("rope_freqs.weight", dim)? {
        return Ok(RopeScaling::Divisors(divisors));
    }
    let original_context = || keys.length("rope.scaling.original_context_length");
    let magnitude = keys.float("rope.scaling.attn_factor")?;
    let sets = (keys.factors("rope_factors_short.weight", dim)?, keys.factors("rope_factors_long.weight", dim)?);
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
            magnitude: super::yarn_magnitude(factor, 1.0) * magnitude.unwrap_or(1.0),
            truncate: true,
        }),
        (Some(other), _) => Fault::unsupported(format!("rope scaling of the type {other}")),
    }
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

    fn optional(&self, key: &str) -> Result<Option<u32>, Fault> {
        let key = self.key(key);
        self.gguf.unsigned(&key)?.map(|number| length(&key, number)).transpose()
    }

    fn length(&self, key: &str) -> Result<u32, Fault> {
        match self.optional(key)? {
            Some(length) => Ok(length),
            None => Fault::malformed(format!("the metadata key {} is missing", self.key(key))),
        }
    }

    /// A tensor with one number for each pair that a rope rotates.
    fn factors(&self, name: &str, dim: u32) -> Result<Option<Vec<f32>>, Fault> {
        let Some(entry) = self.gguf.tensor(name) else { return Ok(None) };
        let n = u64::from(dim / 2);
        if entry.dtype != types::Dtype::F32 || entry.dims.as_slice() != [n] || entry.file != 0 {
            return Fault::malformed(format!("{name} is not {n} numbers of type F32 in the first part"));
        }
        let Some(bytes) = self.gguf.factors(name) else {
            return Fault::malformed(format!("{name} has more numbers than any rope"));
        };
        Ok(Some(bytes.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect()))
    }

    fn float(&self, key: &str) -> Result<Option<f32>, Fault> {
        Ok(self.gguf.float(&self.key(key))?.map(|number| number as f32))
    }
}

fn gguf_vocab(gguf: &Gguf) -> Result<u32, Fault> {
    match gguf.tensor("token_embd.weight") {
        Some(embedding) if embedding.dims.len() == 2 => {
            length("the number of rows of token_embd.weight", embedding.dims[0])
        }
        Some(_) => Fault::malformed("the tensor token_embd.weight is not a matrix"),
        None => Fault::malformed("the tensor token_embd.weight is missing"),
    }
}

fn token(gguf: &Gguf, which: &str) -> Result<Option<Token>, Fault> {
    let key = format!("tokenizer.ggml.{which}_token_id");
    // Some files write "none" as all bits set.
    let number = gguf.unsigned(&key)?.filter(|number| *number != u64::from(u32::MAX));
    number.map(|number| length(&key, number)).transpose()
}

fn gguf_eos(gguf: &Gguf, bytes: &[u8], tokens: &[&str]) -> Result<Vec<Token>, Fault> {
    let mut eos = Vec::new();
    for which in ["eos", "eot", "eom"] {
        eos.extend(token(gguf, which)?);
    }
    let kinds = gguf.integers(bytes, "tokenizer.ggml.token_type")?.unwrap_or_default();
    let control = |id: usize| kinds.get(id).is_some_and(|kind| *kind == crate::tokenizer::KIND_CONTROL);
    let by_text = tokens.iter().enumerate().filter(|(id, text)| control(*id) && END_TEXTS.contains(*text));
    eos.extend(by_text.map(|(id, _)| id as Token));
    distinct(eos)
}
