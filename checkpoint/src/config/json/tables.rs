//! The names of values in each family's `config.json`, and the meaning of absent ones.

use super::keys::JsonKeys;
use crate::config::Family;
use crate::error::ParseError;
use serde_json::Value;
use std::borrow::Cow;

/// The names in a family's config, and the meaning of absent ones.
pub(super) struct FamilyTable {
    pub family: Family,
    pub architecture: &'static str,
    pub model_type: &'static str,
    /// The names of hidden size, layers, heads, context, MLP width, epsilon and activation.
    pub names: &'static ConfigKeys,
    /// The activations that it may name and that are implemented.
    pub activations: &'static [&'static str],
    pub eps: f32,
    pub theta: f32,
    /// The part of a head that the rope turns.
    pub turned: f32,
    /// Whether neighbours turn together.
    pub pairs: bool,
}

pub(super) struct ConfigKeys {
    pub hidden: &'static str,
    pub n_layers: &'static str,
    pub n_heads: &'static str,
    pub context: &'static str,
    pub inner: &'static str,
    pub eps: &'static str,
    pub activation: &'static str,
    /// The keys of the rope's base and of the turned part of a head, where they are outside any object.
    pub theta: &'static str,
    pub turned: &'static str,
}

const COMMON: ConfigKeys = ConfigKeys {
    hidden: "hidden_size",
    n_layers: "num_hidden_layers",
    n_heads: "num_attention_heads",
    context: "max_position_embeddings",
    inner: "intermediate_size",
    eps: "rms_norm_eps",
    activation: "hidden_act",
    theta: "rope_theta",
    turned: "partial_rotary_factor",
};
const LAYER_NORM: ConfigKeys = ConfigKeys { eps: "layer_norm_eps", ..COMMON };
const NEOX: ConfigKeys = ConfigKeys { theta: "rotary_emb_base", turned: "rotary_pct", ..LAYER_NORM };
const GEMMA: ConfigKeys = ConfigKeys { activation: "hidden_activation", ..COMMON };
const LFM2: ConfigKeys = ConfigKeys { eps: "norm_eps", ..COMMON };
const NEMOTRON: ConfigKeys = ConfigKeys { eps: "layer_norm_epsilon", activation: "mlp_hidden_act", ..COMMON };
const GRANITE_4: ConfigKeys = ConfigKeys { inner: "shared_intermediate_size", ..COMMON };
const GPT2: ConfigKeys = ConfigKeys {
    hidden: "n_embd",
    n_layers: "n_layer",
    n_heads: "n_head",
    context: "n_positions",
    inner: "n_inner",
    eps: "layer_norm_epsilon",
    activation: "activation_function",
    ..COMMON
};

const SQUARED_RELU: &[&str] = &["relu2"];
const SILU: &[&str] = &["silu", "swish"];
const GELU_ERF: &[&str] = &["gelu"];
const GELU_TANH: &[&str] = &["gelu_pytorch_tanh", "gelu_new"];

const fn gated(family: Family, architecture: &'static str, model_type: &'static str) -> FamilyTable {
    FamilyTable {
        family,
        architecture,
        model_type,
        names: &COMMON,
        activations: SILU,
        eps: 1e-6,
        theta: 10_000.0,
        turned: 1.0,
        pairs: false,
    }
}

const TABLES: [FamilyTable; 30] = [
    gated(Family::Llama, "LlamaForCausalLM", "llama"),
    gated(Family::Mistral, "MistralForCausalLM", "mistral"),
    gated(Family::SmolLm3, "SmolLM3ForCausalLM", "smollm3"),
    gated(Family::Qwen2, "Qwen2ForCausalLM", "qwen2"),
    gated(Family::Qwen3, "Qwen3ForCausalLM", "qwen3"),
    FamilyTable { eps: 1e-5, ..gated(Family::Phi3, "Phi3ForCausalLM", "phi3") },
    FamilyTable { eps: 1e-5, ..gated(Family::Mixtral, "MixtralForCausalLM", "mixtral") },
    gated(Family::Qwen3Moe, "Qwen3MoeForCausalLM", "qwen3_moe"),
    FamilyTable { names: &GEMMA, activations: GELU_TANH, ..gated(Family::Gemma2, "Gemma2ForCausalLM", "gemma2") },
    FamilyTable {
        names: &GEMMA,
        activations: GELU_TANH,
        theta: 1_000_000.0,
        ..gated(Family::Gemma3, "Gemma3ForCausalLM", "gemma3_text")
    },
    FamilyTable { names: &GPT2, activations: GELU_TANH, eps: 1e-5, ..gated(Family::Gpt2, "GPT2LMHeadModel", "gpt2") },
    FamilyTable { eps: 1e-5, ..gated(Family::Olmo2, "Olmo2ForCausalLM", "olmo2") },
    FamilyTable { eps: 1e-5, theta: 500_000.0, ..gated(Family::Olmo3, "Olmo3ForCausalLM", "olmo3") },
    gated(Family::Granite, "GraniteForCausalLM", "granite"),
    gated(Family::GraniteMoe, "GraniteMoeForCausalLM", "granitemoe"),
    FamilyTable { eps: 1e-5, theta: 150_000.0, ..gated(Family::GptOss, "GptOssForCausalLM", "gpt_oss") },
    FamilyTable { eps: 1.5625e-7, turned: 0.5, pairs: true, ..gated(Family::Glm4, "Glm4ForCausalLM", "glm4") },
    FamilyTable { eps: 1e-5, turned: 0.5, ..gated(Family::Glm4Moe, "Glm4MoeForCausalLM", "glm4_moe") },
    gated(Family::Ministral, "MinistralForCausalLM", "ministral"),
    FamilyTable { eps: 1e-5, theta: 1_000_000.0, ..gated(Family::Ministral3, "Ministral3ForCausalLM", "ministral3") },
    FamilyTable {
        names: &LAYER_NORM,
        eps: 1e-5,
        pairs: true,
        ..gated(Family::Cohere2, "Cohere2ForCausalLM", "cohere2")
    },
    FamilyTable {
        names: &NEOX,
        activations: GELU_ERF,
        eps: 1e-5,
        turned: 0.25,
        ..gated(Family::GptNeox, "GPTNeoXForCausalLM", "gpt_neox")
    },
    FamilyTable { turned: 0.25, ..gated(Family::Qwen3Next, "Qwen3NextForCausalLM", "qwen3_next") },
    FamilyTable { turned: 0.25, ..gated(Family::Qwen35, "Qwen3_5ForCausalLM", "qwen3_5_text") },
    FamilyTable { turned: 0.25, ..gated(Family::Qwen35Moe, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text") },
    FamilyTable {
        names: &GRANITE_4,
        ..gated(Family::GraniteHybrid, "GraniteMoeHybridForCausalLM", "granitemoehybrid")
    },
    FamilyTable { names: &LFM2, eps: 1e-5, theta: 1_000_000.0, ..gated(Family::Lfm2, "Lfm2ForCausalLM", "lfm2") },
    FamilyTable {
        names: &LFM2,
        eps: 1e-5,
        theta: 1_000_000.0,
        ..gated(Family::Lfm2Moe, "Lfm2MoeForCausalLM", "lfm2_moe")
    },
    FamilyTable { eps: 1e-5, turned: 0.5, ..gated(Family::Bamba, "BambaForCausalLM", "bamba") },
    FamilyTable {
        names: &NEMOTRON,
        activations: SQUARED_RELU,
        eps: 1e-5,
        ..gated(Family::NemotronH, "NemotronHForCausalLM", "nemotron_h")
    },
];

/// Architectures that also take images, with the text model in an object of its own.
const WITH_IMAGES: [&str; 4] = [
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
];

/// The values of keys that Gemma 3's `text_config` omits: its makers leave out the defaults of transformers.
const GEMMA3_DEFAULTS: [(&str, u32); 7] = [
    ("vocab_size", 262_208),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
    ("query_pre_attn_scalar", 256),
    ("sliding_window", 4096),
];

/// Returns the text model's config: the whole, or the text part of a model for images, with the shared outer fields
/// added.
pub(super) fn text_config(config: &Value) -> Cow<'_, Value> {
    let architecture = config["architectures"][0].as_str().unwrap_or_default();
    let part = config.get("text_config").and_then(Value::as_object).filter(|_| WITH_IMAGES.contains(&architecture));
    let Some(part) = part else { return Cow::Borrowed(config) };
    let mut text = part.clone();
    text.remove("architectures");
    for key in ["tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config"] {
        if let Some(value) = config.get(key).filter(|_| text.get(key).is_none_or(Value::is_null)) {
            text.insert(key.to_owned(), value.clone());
        }
    }
    if text.get("model_type").is_some_and(|kind| kind == "gemma3_text") {
        for (key, value) in GEMMA3_DEFAULTS {
            if text.get(key).is_none_or(Value::is_null) {
                text.insert(key.to_owned(), value.into());
            }
        }
    }
    Cow::Owned(Value::Object(text))
}

pub(super) fn table_of(keys: &JsonKeys<'_>) -> Result<&'static FamilyTable, ParseError> {
    let architecture = keys.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let (found, name) = match (architecture, keys.text("model_type")) {
        (Some(name), _) => (TABLES.iter().find(|table| table.architecture == name), name),
        (None, Some(name)) => (TABLES.iter().find(|table| table.model_type == name), name),
        (None, None) => return ParseError::malformed("config.json does not name an architecture"),
    };
    found.map_or_else(|| ParseError::unsupported(format!("the architecture {name}")), Ok)
}
