//! Reads a spec from `config.json`, and from `generation_config.json` and `tokenizer_config.json` if they exist.

use super::{
    AttentionSpec, Defaults, ExpertsSpec, Family, LayerSpec, ModelSpec, Positions, RopeScaling, RopeSpec, distinct,
    length,
};
use crate::error::Fault;
use crate::scaling::Scaling;
use serde_json::Value;
use types::Token;

/// The names in a family's config, and the meaning of absent ones.
struct Table {
    family: Family,
    architecture: &'static str,
    model_type: &'static str,
    /// The names of hidden size, layers, heads, context, MLP width, epsilon and activation.
    names: &'static Names,
    /// The activations that it may name and that are implemented.
    activations: &'static [&'static str],
    eps: f32,
    theta: f32,
}

struct Names {
    hidden: &'static str,
    n_layers: &'static str,
    n_heads: &'static str,
    context: &'static str,
    inner: &'static str,
    eps: &'static str,
    activation: &'static str,
}

const COMMON: Names = Names {
    hidden: "hidden_size",
    n_layers: "num_hidden_layers",
    n_heads: "num_attention_heads",
    context: "max_position_embeddings",
    inner: "intermediate_size",
    eps: "rms_norm_eps",
    activation: "hidden_act",
};
const GEMMA: Names = Names { activation: "hidden_activation", ..COMMON };
const GPT2: Names = Names {
    hidden: "n_embd",
    n_layers: "n_layer",
    n_heads: "n_head",
    context: "n_positions",
    inner: "n_inner",
    eps: "layer_norm_epsilon",
    activation: "activation_function",
};

const SILU: &[&str] = &["silu", "swish"];
const GELU_TANH: &[&str] = &["gelu_pytorch_tanh", "gelu_new"];

const fn gated(family: Family, architecture: &'static str, model_type: &'static str) -> Table {
    Table { family, architecture, model_type, names: &COMMON, activations: SILU, eps: 1e-6, theta: 10_000.0 }
}

const TABLES: [Table; 11] = [
    gated(Family::Llama, "LlamaForCausalLM", "llama"),
    gated(Family::Mistral, "MistralForCausalLM", "mistral"),
    gated(Family::SmolLm3, "SmolLM3ForCausalLM", "smollm3"),
    gated(Family::Qwen2, "Qwen2ForCausalLM", "qwen2"),
    gated(Family::Qwen3, "Qwen3ForCausalLM", "qwen3"),
    Table { eps: 1e-5, ..gated(Family::Phi3, "Phi3ForCausalLM", "phi3") },
    Table { eps: 1e-5, ..gated(Family::Mixtral, "MixtralForCausalLM", "mixtral") },
    gated(Family::Qwen3Moe, "Qwen3MoeForCausalLM", "qwen3_moe"),
    Table { names: &GEMMA, activations: GELU_TANH, ..gated(Family::Gemma2, "Gemma2ForCausalLM", "gemma2") },
    Table {
        names: &GEMMA,
        activations: GELU_TANH,
        theta: 1_000_000.0,
        ..gated(Family::Gemma3, "Gemma3ForCausalLM", "gemma3_text")
    },
    Table { names: &GPT2, activations: GELU_TANH, eps: 1e-5, ..gated(Family::Gpt2, "GPT2LMHeadModel", "gpt2") },
];

impl ModelSpec {
    pub(crate) fn from_config(
        config: &Value,
        generation: &Value,
        tokenizer: &Value,
        folder_name: &str,
    ) -> Result<ModelSpec, Fault> {
        let keys = JsonKeys(config);
        let table = table_of(&keys)?;
        let (family, names) = (table.family, table.names);
        refuse_unserved(&keys, table)?;
        let (hidden, n_heads) = (keys.length(names.hidden)?, keys.length(names.n_heads)?);
        let n_layers = keys.length(names.n_layers)?;
        let head_dim = keys.optional("head_dim")?.unwrap_or(hidden / n_heads.max(1));
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
            norm_offset: if is_gemma(family) { 1.0 } else { 0.0 },
            attention: attention(&keys, family, head_dim)?,
            layers: layers(&keys, family, n_layers, experts.is_some())?,
            experts,
            rope: rope(&keys, table, "full_attention", head_dim, context)?,
            local_rope: local_rope(&keys, table, head_dim, context)?,
            logits_cap: keys.float("final_logit_softcapping")?.filter(|_| is_gemma(family)),
            tied_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(is_gemma(family) || family == Family::Gpt2),
            bos: first_token(config, "bos_token_id").or_else(|| first_token(generation, "bos_token_id")),
            eos: config_eos(config, generation, tokenizer)?,
        };
        spec.checked()
    }
}

fn is_gemma(family: Family) -> bool {
    matches!(family, Family::Gemma2 | Family::Gemma3)
}

fn table_of(keys: &JsonKeys<'_>) -> Result<&'static Table, Fault> {
    let architecture = keys.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let (found, name) = match (architecture, keys.text("model_type")) {
        (Some(name), _) => (TABLES.iter().find(|table| table.architecture == name), name),
        (None, Some(name)) => (TABLES.iter().find(|table| table.model_type == name), name),
        (None, None) => return Fault::malformed("config.json does not name an architecture"),
    };
    found.map_or_else(|| Fault::unsupported(format!("the architecture {name}")), Ok)
}

/// Refuses what a config can ask for and nothing computes.
fn refuse_unserved(keys: &JsonKeys<'_>, table: &Table) -> Result<(), Fault> {
    const SWITCHES: [&str; 5] = [
        "attention_bias",
        "mlp_bias",
        "use_bidirectional_attention",
        "scale_attn_by_inverse_layer_idx",
        "add_cross_attention",
    ];
    for switch in SWITCHES {
        if keys.bool(switch)?.unwrap_or(false) {
            return Fault::unsupported(format!("a model with {switch}"));
        }
    }
    if keys.bool("scale_attn_weights")? == Some(false) {
        return Fault::unsupported("a model without scale_attn_weights");
    }
    Scaling::from_config(keys.0)?;
    match keys.text(table.names.activation) {
        Some(other) if !table.activations.contains(&other) => Fault::unsupported(format!("the activation {other}")),
        _ => Ok(()),
    }
}

fn inner(keys: &JsonKeys<'_>, table: &Table, hidden: u32) -> Result<u32, Fault> {
    match table.family {
        Family::Gpt2 => Ok(keys.optional(table.names.inner)?.unwrap_or(4 * hidden)),
        _ => keys.length(table.names.inner),
    }
}

fn attention(keys: &JsonKeys<'_>, family: Family, head_dim: u32) -> Result<AttentionSpec, Fault> {
    let scaled_by = match is_gemma(family) {
        true => keys.float("query_pre_attn_scalar")?.unwrap_or(256.0),
        false => head_dim as f32,
    };
    Ok(AttentionSpec {
        scale: 1.0 / scaled_by.sqrt(),
        cap: keys.float("attn_logit_softcapping")?.filter(|_| is_gemma(family)),
        has_bias: matches!(family, Family::Qwen2 | Family::Gpt2),
        has_head_norms: matches!(family, Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3),
    })
}

fn experts(keys: &JsonKeys<'_>, family: Family) -> Result<Option<ExpertsSpec>, Fault> {
    let n_used = || keys.length("num_experts_per_tok");
    match family {
        Family::Mixtral => Ok(Some(ExpertsSpec {
            n: keys.length("num_local_experts")?,
            n_used: n_used()?,
            inner: keys.length("intermediate_size")?,
            normalized: true,
        })),
        Family::Qwen3Moe => Ok(Some(ExpertsSpec {
            // Newer files use Mixtral's name for it.
            n: keys.optional("num_experts")?.map_or_else(|| keys.length("num_local_experts"), Ok)?,
            n_used: n_used()?,
            inner: keys.length("moe_intermediate_size")?,
            normalized: keys.bool("norm_topk_prob")?.unwrap_or(false),
        })),
        _ => Ok(None),
    }
}

fn layers(keys: &JsonKeys<'_>, family: Family, n_layers: u32, has_experts: bool) -> Result<Vec<LayerSpec>, Fault> {
    let n_layers = n_layers.min(super::LAYERS_MAX as u32);
    let window = window(keys, family)?;
    let listed = keys.texts("layer_types")?;
    if let Some(listed) = listed.as_ref().filter(|listed| listed.len() != n_layers as usize) {
        return Fault::malformed(format!("layer_types names {} layers of {n_layers}", listed.len()));
    }
    let mlp_only = keys.lengths("mlp_only_layers")?.unwrap_or_default();
    let sparse_step = keys.optional("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense = |i: u32| mlp_only.contains(&i) || !(i + 1).is_multiple_of(sparse_step);
    let layer = |i: u32| {
        let is_local = match listed.as_ref().map(|listed| listed[i as usize]) {
            Some("full_attention") => false,
            Some("sliding_attention") => true,
            Some(other) => return Fault::unsupported(format!("a layer of the type {other}")),
            None => is_local(keys, family, i)?,
        };
        Ok(LayerSpec {
            window: window.filter(|_| is_local),
            positions: positions(keys, family, i, is_local)?,
            has_experts: has_experts && !dense(i),
        })
    };
    (0..n_layers).map(layer).collect()
}

/// The window of layers that do not attend to all positions.
fn window(keys: &JsonKeys<'_>, family: Family) -> Result<Option<u32>, Fault> {
    let is_used = match family {
        Family::Mistral | Family::Mixtral | Family::Phi3 | Family::Gemma2 | Family::Gemma3 => true,
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe | Family::SmolLm3 => {
            keys.bool("use_sliding_window")?.unwrap_or(false)
        }
        Family::Llama | Family::Gpt2 => false,
    };
    let is_left_out = keys.0.get("sliding_window").is_none();
    match family {
        Family::Mistral | Family::Gemma2 | Family::Gemma3 if is_left_out => Ok(Some(4096)),
        _ => Ok(keys.optional("sliding_window")?.filter(|_| is_used)),
    }
}

/// Whether a layer has a window, if no list says so.
fn is_local(keys: &JsonKeys<'_>, family: Family, layer: u32) -> Result<bool, Fault> {
    let every = |period: u32| Ok(period == 0 || !(layer + 1).is_multiple_of(period));
    match family {
        Family::Mistral | Family::Mixtral | Family::Phi3 | Family::Qwen3Moe => Ok(true),
        Family::Qwen2 | Family::Qwen3 => Ok(layer >= keys.optional("max_window_layers")?.unwrap_or(28)),
        Family::Gemma2 => every(2),
        Family::Gemma3 => every(keys.optional("sliding_window_pattern")?.unwrap_or(6)),
        Family::SmolLm3 => Ok(positions(keys, family, layer, false)? == Positions::None),
        Family::Llama | Family::Gpt2 => Ok(false),
    }
}

fn positions(keys: &JsonKeys<'_>, family: Family, layer: u32, is_local: bool) -> Result<Positions, Fault> {
    match family {
        Family::Gpt2 => Ok(Positions::None),
        Family::Gemma3 if is_local => Ok(Positions::LocalRope),
        Family::SmolLm3 => {
            // In this list, one means that a layer has a rope, despite the list's name.
            let has_rope = match keys.lengths("no_rope_layers")? {
                Some(list) => list.get(layer as usize).is_none_or(|flag| *flag != 0),
                None => !(layer + 1).is_multiple_of(keys.optional("no_rope_layer_interval")?.unwrap_or(4).max(1)),
            };
            Ok(if has_rope { Positions::Rope } else { Positions::None })
        }
        _ => Ok(Positions::Rope),
    }
}

/// Newer files keep all of a rope in one object, or in one per type of layer.
fn rope(keys: &JsonKeys<'_>, table: &Table, layers: &str, head_dim: u32, context: u32) -> Result<RopeSpec, Fault> {
    let object = keys.object("rope_parameters").or_else(|| keys.object("rope_scaling"));
    let object = object.map(|object| JsonKeys(object).object(layers).unwrap_or(object));
    let own = JsonKeys(object.unwrap_or(&Value::Null));
    let theta = match own.float("rope_theta")? {
        Some(theta) => theta,
        None => keys.float("rope_theta")?.unwrap_or(table.theta),
    };
    let turned = match own.float("partial_rotary_factor")? {
        Some(part) => part,
        None => keys.float("partial_rotary_factor")?.unwrap_or(1.0),
    };
    if table.family == Family::Gpt2 {
        return Ok(RopeSpec { theta, dim: 2, pairs: false, scaling: RopeScaling::None });
    }
    let dim = (f64::from(head_dim) * f64::from(turned)) as u32;
    Ok(RopeSpec { theta, dim, pairs: false, scaling: scaling(keys, &own, table.family, context)? })
}

/// The rope of Gemma 3's local layers, with a smaller theta.
fn local_rope(keys: &JsonKeys<'_>, table: &Table, head_dim: u32, context: u32) -> Result<Option<RopeSpec>, Fault> {
    if table.family != Family::Gemma3 {
        return Ok(None);
    }
    let by_layers = keys.object("rope_parameters").and_then(|object| JsonKeys(object).object("sliding_attention"));
    if by_layers.is_some() {
        return rope(keys, &Table { theta: 10_000.0, ..*table }, "sliding_attention", head_dim, context).map(Some);
    }
    let theta = keys.float("rope_local_base_freq")?.unwrap_or(10_000.0);
    Ok(Some(RopeSpec { theta, dim: head_dim, pairs: false, scaling: RopeScaling::None }))
}

fn scaling(keys: &JsonKeys<'_>, own: &JsonKeys<'_>, family: Family, context: u32) -> Result<RopeScaling, Fault> {
    let need = |key: &str| match own.float(key)? {
        Some(number) => Ok(number),
        None => Fault::malformed(format!("{key} is missing in the rope scaling of config.json")),
    };
    let original_context = || match own.optional("original_max_position_embeddings")? {
        Some(length) => Ok(length),
        None => Ok(keys.optional("original_max_position_embeddings")?.unwrap_or(context)),
    };
    match own.text("rope_type").or(own.text("type")) {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: need("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_context: own.length("original_max_position_embeddings")?,
        }),
        // Phi-3's first files used other names for it.
        Some("longrope" | "su") => long_rope(own, original_context()?, context),
        Some("yarn") if family == Family::Phi3 => long_rope(own, original_context()?, context),
        Some("yarn") => yarn(own, original_context()?, context),
        Some(other) => Fault::unsupported(format!("rope scaling of the type {other}")),
    }
}

fn long_rope(own: &JsonKeys<'_>, original_context: u32, context: u32) -> Result<RopeScaling, Fault> {
    let factor = own.float("factor")?.unwrap_or(context as f32 / original_context.max(1) as f32);
    let grown = || libm::sqrt(1.0 + libm::log(f64::from(factor)) / libm::log(f64::from(original_context))) as f32;
    let magnitude = own.float("attention_factor")?.unwrap_or_else(|| if factor <= 1.0 { 1.0 } else { grown() });
    let set = |key: &str| match own.floats(key)? {
        Some(set) => Ok(set),
        None => Fault::malformed(format!("{key} is missing in the rope scaling of config.json")),
    };
    Ok(RopeScaling::Long { short: set("short_factor")?, long: set("long_factor")?, original_context, magnitude })
}

fn yarn(own: &JsonKeys<'_>, original_context: u32, context: u32) -> Result<RopeScaling, Fault> {
    let factor = own.float("factor")?.unwrap_or(context as f32 / original_context.max(1) as f32);
    let one = |scale: f32| super::yarn_magnitude(factor, scale);
    let non_zero = |key| Ok(own.float(key)?.filter(|number| *number != 0.0));
    let magnitude = match (own.float("attention_factor")?, non_zero("mscale")?, non_zero("mscale_all_dim")?) {
        (Some(given), _, _) => given,
        (None, Some(scale), Some(scale_all)) => one(scale) / one(scale_all),
        _ => one(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: non_zero("beta_fast")?.unwrap_or(32.0),
        beta_slow: non_zero("beta_slow")?.unwrap_or(1.0),
        original_context,
        magnitude,
        truncate: own.bool("truncate")?.unwrap_or(true),
    })
}

/// Keys of a JSON object; null counts as absent.
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

    fn list<T>(&self, key: &str, what: &str, one: impl Fn(&'a Value) -> Option<T>) -> Result<Option<Vec<T>>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_array().and_then(|list| list.iter().map(one).collect()) {
            Some(list) => Ok(Some(list)),
            None => Fault::malformed(format!("{key} is not a list of {what}")),
        }
    }

    fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, Fault> {
        self.list(key, "texts", Value::as_str)
    }

    fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, Fault> {
        self.list(key, "numbers", |value| value.as_f64().map(|number| number as f32))
    }

    fn lengths(&self, key: &str) -> Result<Option<Vec<u32>>, Fault> {
        self.list(key, "whole numbers", |value| value.as_u64().and_then(|number| u32::try_from(number).ok()))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
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
        // Without `do_sample` the other fields are not in force.
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
