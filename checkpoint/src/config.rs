//! What a model is, in numbers: from a GGUF's metadata or a folder's `config.json`. Knows no tensor's bytes.
//!
//! Each family has one table per format that says where each number stands. What the numbers must satisfy is checked in
//! one place for both.

use crate::error::Fault;
use crate::gguf::Gguf;
use serde_json::Value;
use types::Token;

/// Which file of the model crate computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    Llama,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub family: Family,
    /// What the file calls itself, or the file's name. For people: nothing depends on it.
    pub name: String,
    pub hidden: u32,
    pub n_layers: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    /// The width of the MLP.
    pub inner: u32,
    /// Rows of the embedding. The tokenizer may know fewer.
    pub vocab: u32,
    /// The positions that the model was made for.
    pub context: u32,
    pub norm_eps: f32,
    pub rope: RopeSpec,
    /// The head is the embedding; there is no `lm_head.weight`.
    pub tied_embeddings: bool,
    pub bos: Option<Token>,
    /// Tokens that end an answer, the main one first.
    pub eos: Vec<Token>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub theta: f32,
    /// The first so many numbers of a head are turned.
    pub dim: u32,
    /// Number `2i` is turned with `2i + 1` (a GGUF's Llama, whose Q and K rows are permuted for it); otherwise `i` with
    /// `i + dim / 2`.
    pub pairs: bool,
    pub scaling: RopeScaling,
}

/// What is done to the frequencies `theta^(-2i / dim)`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All are divided by the factor.
    Linear {
        factor: f32,
    },
    /// Long wavelengths are divided by the factor, short ones kept, and those between interpolated.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context: u32,
    },
    /// Each is divided by its own number: a GGUF's `rope_freqs.weight`, `dim / 2` of them.
    Divisors(Vec<f32>),
}

/// How the model's makers would sample, where they say so.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Defaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// More than any model has, and little enough that no product of two overflows.
const LENGTH_MAX: u64 = 1 << 24;
const LAYERS_MAX: u64 = 4096;
const EOS_MAX: usize = 64;

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

impl ModelSpec {
    /// From a GGUF's metadata. `vocab` is the embedding's row count: the one length that no key is sure to hold.
    pub(crate) fn from_gguf(gguf: &Gguf, bytes: &[u8], file_name: &str) -> Result<ModelSpec, Fault> {
        let family = match gguf.text(bytes, "general.architecture")? {
            Some("llama") => Family::Llama,
            Some(other) => return Fault::unsupported(format!("the architecture {other}")),
            None => return Fault::malformed("the metadata does not name an architecture"),
        };
        let keys = GgufKeys { gguf, prefix: "llama" };
        refuse_experts(keys.optional("expert_count")?)?;
        let (hidden, n_heads) = (keys.length("embedding_length")?, keys.length("attention.head_count")?);
        let head_dim = match keys.optional("attention.key_length")? {
            Some(dim) => dim,
            None => hidden / n_heads.max(1),
        };
        if keys.optional("attention.value_length")?.is_some_and(|dim| dim != head_dim) {
            return Fault::unsupported("attention whose values are not as long as its keys");
        }
        let rope_dim = keys.optional("rope.dimension_count")?.unwrap_or(head_dim);
        let tokens = gguf.texts(bytes, "tokenizer.ggml.tokens")?.unwrap_or_default();
        let spec = ModelSpec {
            family,
            name: gguf.text(bytes, "general.name")?.unwrap_or(file_name).to_owned(),
            hidden,
            n_layers: keys.length("block_count")?,
            n_heads,
            n_kv_heads: keys.optional("attention.head_count_kv")?.unwrap_or(n_heads),
            head_dim,
            inner: keys.length("feed_forward_length")?,
            vocab: gguf_vocab(gguf)?,
            context: keys.length("context_length")?,
            norm_eps: keys.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5),
            rope: RopeSpec {
                theta: keys.float("rope.freq_base")?.unwrap_or(10_000.0),
                dim: rope_dim,
                pairs: true,
                scaling: gguf_scaling(&keys, bytes, rope_dim)?,
            },
            tied_embeddings: gguf.tensor("output.weight").is_none(),
            bos: token(gguf, "bos")?,
            eos: gguf_eos(gguf, bytes, &tokens)?,
        };
        spec.checked()
    }

    /// From `config.json`, and from `generation_config.json` and `tokenizer_config.json` where they are.
    pub(crate) fn from_config(
        config: &Value,
        generation: &Value,
        tokenizer: &Value,
        folder_name: &str,
    ) -> Result<ModelSpec, Fault> {
        let keys = JsonKeys(config);
        let family = config_family(config)?;
        refuse_unserved(&keys)?;
        let (hidden, n_heads) = (keys.length("hidden_size")?, keys.length("num_attention_heads")?);
        let head_dim = keys.optional("head_dim")?.unwrap_or(hidden / n_heads.max(1));
        // Newer files keep both in one object.
        let rope = keys.object("rope_parameters").or_else(|| keys.object("rope_scaling"));
        let theta = match JsonKeys(rope.unwrap_or(&Value::Null)).float("rope_theta")? {
            Some(theta) => theta,
            None => keys.float("rope_theta")?.unwrap_or(10_000.0),
        };
        let spec = ModelSpec {
            family,
            name: folder_name.to_owned(),
            hidden,
            n_layers: keys.length("num_hidden_layers")?,
            n_heads,
            n_kv_heads: keys.optional("num_key_value_heads")?.unwrap_or(n_heads),
            head_dim,
            inner: keys.length("intermediate_size")?,
            vocab: keys.length("vocab_size")?,
            context: keys.optional("max_position_embeddings")?.unwrap_or(2048),
            norm_eps: keys.float("rms_norm_eps")?.unwrap_or(1e-6),
            rope: RopeSpec { theta, dim: head_dim, pairs: false, scaling: config_scaling(rope)? },
            tied_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(false),
            bos: first_token(config, "bos_token_id").or_else(|| first_token(generation, "bos_token_id")),
            eos: config_eos(config, generation, tokenizer)?,
        };
        spec.checked()
    }

    /// Numbers that agree with each other, or a refusal that names those which do not.
    fn checked(self) -> Result<ModelSpec, Fault> {
        let lengths = [
            ("hidden size", self.hidden),
            ("number of layers", self.n_layers),
            ("number of heads", self.n_heads),
            ("number of KV heads", self.n_kv_heads),
            ("head dimension", self.head_dim),
            ("MLP width", self.inner),
            ("vocabulary", self.vocab),
            ("context length", self.context),
            ("rope dimension", self.rope.dim),
        ];
        if let Some((name, _)) = lengths.iter().find(|(_, length)| *length == 0) {
            return Fault::malformed(format!("the {name} is zero"));
        }
        if u64::from(self.n_layers) > LAYERS_MAX {
            return Fault::malformed(format!(
                "{} layers are more than the {LAYERS_MAX} that are believed",
                self.n_layers
            ));
        }
        let (heads, kv_heads) = (self.n_heads, self.n_kv_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Fault::malformed(format!("{heads} heads cannot share {kv_heads} KV heads evenly"));
        }
        if u64::from(heads) * u64::from(self.head_dim) > LENGTH_MAX {
            return Fault::malformed(format!("{heads} heads of {} are wider than any model", self.head_dim));
        }
        if self.rope.dim > self.head_dim || !self.rope.dim.is_multiple_of(2) {
            return Fault::malformed(format!("a rope of {} in heads of {}", self.rope.dim, self.head_dim));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return Fault::malformed(format!("the norm's epsilon is {}", self.norm_eps));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta >= 1.0) {
            return Fault::malformed(format!("the rope's base is {}", self.rope.theta));
        }
        self.rope.scaling.check()?;
        if let Some(token) = self.bos.iter().chain(&self.eos).find(|token| **token >= self.vocab) {
            return Fault::malformed(format!("the special token {token} is outside the vocabulary of {}", self.vocab));
        }
        Ok(self)
    }
}

impl RopeScaling {
    fn check(&self) -> Result<(), Fault> {
        let positive = |number: &f32| number.is_finite() && *number > 0.0;
        let sound = match self {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => positive(factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                [factor, low_freq_factor, high_freq_factor].into_iter().all(positive)
                    && high_freq_factor > low_freq_factor
                    && *original_context > 0
            }
            RopeScaling::Divisors(divisors) => divisors.iter().all(positive),
        };
        if sound { Ok(()) } else { Fault::malformed(format!("the rope scaling {self:?} is not possible")) }
    }
}

fn length(name: &str, number: u64) -> Result<u32, Fault> {
    match u32::try_from(number) {
        Ok(small) if number <= LENGTH_MAX => Ok(small),
        _ => Fault::malformed(format!("{name} is {number}, more than the {LENGTH_MAX} that are believed")),
    }
}

fn refuse_experts(n_experts: Option<u32>) -> Result<(), Fault> {
    match n_experts {
        None | Some(0) => Ok(()),
        Some(n) => Fault::unsupported(format!("a mixture of {n} experts")),
    }
}

/// Keys `<prefix>.<key>`.
struct GgufKeys<'a> {
    gguf: &'a Gguf,
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

fn gguf_scaling(keys: &GgufKeys<'_>, bytes: &[u8], rope_dim: u32) -> Result<RopeScaling, Fault> {
    if let Some(entry) = keys.gguf.tensor("rope_freqs.weight") {
        let n = u64::from(rope_dim / 2);
        if entry.dtype != crate::tensor::Dtype::F32 || entry.dims.as_slice() != [n] || entry.file != 0 {
            return Fault::malformed(format!("rope_freqs.weight is not {n} numbers of type F32 in the first part"));
        }
        let numbers = bytes[entry.bytes.clone()].chunks_exact(4);
        let divisors = numbers.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        return Ok(RopeScaling::Divisors(divisors));
    }
    let factor = keys.float("rope.scaling.factor")?.or(keys.float("rope.scale_linear")?);
    match (keys.gguf.text(bytes, &keys.key("rope.scaling.type"))?, factor) {
        (None | Some("linear"), Some(factor)) if factor != 1.0 && factor != 0.0 => Ok(RopeScaling::Linear { factor }),
        (None | Some("none" | "linear"), _) => Ok(RopeScaling::None),
        (Some(other), _) => Fault::unsupported(format!("rope scaling of the type {other}")),
    }
}

fn token(gguf: &Gguf, which: &str) -> Result<Option<Token>, Fault> {
    let key = format!("tokenizer.ggml.{which}_token_id");
    // Some files say "none" with all bits set.
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

fn distinct(tokens: Vec<Token>) -> Result<Vec<Token>, Fault> {
    let mut seen = Vec::new();
    for token in tokens {
        if !seen.contains(&token) {
            seen.push(token);
        }
        if seen.len() > EOS_MAX {
            return Fault::malformed(format!("more than {EOS_MAX} end tokens"));
        }
    }
    Ok(seen)
}

/// Keys of a JSON object; null is absence.
struct JsonKeys<'a>(&'a Value);

impl<'a> JsonKeys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn object(&self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|value| value.is_object())
    }

    fn optional(&self, key: &str) -> Result<Option<u32>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(number) => length(key, number).map(Some),
            None => Fault::malformed(format!("{key} is {value}, not a whole number")),
        }
    }

    fn length(&self, key: &str) -> Result<u32, Fault> {
        match self.optional(key)? {
            Some(length) => Ok(length),
            None => Fault::malformed(format!("{key} is missing in config.json")),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f32>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) => Ok(Some(number as f32)),
            None => Fault::malformed(format!("{key} is {value}, not a number")),
        }
    }

    fn bool(&self, key: &str) -> Result<Option<bool>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_bool() {
            Some(truth) => Ok(Some(truth)),
            None => Fault::malformed(format!("{key} is {value}, not true or false")),
        }
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }
}

fn config_family(config: &Value) -> Result<Family, Fault> {
    let keys = JsonKeys(config);
    let architecture = keys.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    match (architecture, keys.text("model_type")) {
        (Some("LlamaForCausalLM"), _) | (None, Some("llama")) => Ok(Family::Llama),
        (Some(other), _) | (None, Some(other)) => Fault::unsupported(format!("the architecture {other}")),
        (None, None) => Fault::malformed("config.json does not name an architecture"),
    }
}

/// What a Llama's config can ask for and nothing computes yet.
fn refuse_unserved(keys: &JsonKeys<'_>) -> Result<(), Fault> {
    for bias in ["attention_bias", "mlp_bias"] {
        if keys.bool(bias)?.unwrap_or(false) {
            return Fault::unsupported(format!("a model with {bias}"));
        }
    }
    if keys.get("quantization_config").is_some() {
        return Fault::unsupported("a folder whose weights are quantized (quantization_config)");
    }
    match keys.text("hidden_act") {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Fault::unsupported(format!("the activation {other}")),
    }
}

fn config_scaling(rope: Option<&Value>) -> Result<RopeScaling, Fault> {
    let keys = JsonKeys(rope.unwrap_or(&Value::Null));
    let need = |key: &str| match keys.float(key)? {
        Some(number) => Ok(number),
        None => Fault::malformed(format!("{key} is missing in the rope scaling of config.json")),
    };
    match keys.text("rope_type").or(keys.text("type")) {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: need("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_context: keys.length("original_max_position_embeddings")?,
        }),
        Some(other) => Fault::unsupported(format!("rope scaling of the type {other}")),
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

/// What generation is told to stop at comes first, then what the model and the tokenizer are told.
fn config_eos(config: &Value, generation: &Value, tokenizer: &Value) -> Result<Vec<Token>, Fault> {
    let mut eos = token_list(generation, "eos_token_id");
    eos.extend(token_list(config, "eos_token_id"));
    let text = crate::template::token_text(&tokenizer["eos_token"]);
    for (id, added) in tokenizer["added_tokens_decoder"].as_object().into_iter().flatten() {
        if added["content"].as_str().is_some_and(|content| Some(content) == text.as_deref()) {
            eos.extend(id.parse::<Token>());
        }
    }
    distinct(eos)
}

impl Defaults {
    pub(crate) fn from_generation_config(generation: &Value) -> Defaults {
        let number = |key: &str| generation.get(key).and_then(Value::as_f64).map(|number| number as f32);
        // Without do_sample the other fields are there but not in force.
        if generation.get("do_sample").and_then(Value::as_bool) != Some(true) {
            return Defaults::default();
        }
        Defaults {
            temperature: number("temperature"),
            top_p: number("top_p"),
            top_k: generation.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok()),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
        }
    }
}
