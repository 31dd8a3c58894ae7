//! Llama, of which most families change a few values: pre-norm decoder layers, grouped-query attention, a gated MLP.

use super::definition::{
    AttentionBias, ChatForm, ConfigKeys, ConfigReaders, ConfigRules, EncoderReaders, FamilyDefinition, FamilyRules,
    GgufRules, LayerPositions, TensorTables, WindowPattern, WindowUse,
};
use super::experts::{no_experts, no_gguf_experts};
use crate::config::json::keys::JsonKeys;
use crate::config::{
    Activation, BlockNorms, DecoderForm, MixerSpec, ModelMultipliers, NormKind, Norms, PooledLayer, Pooling,
    PositionEncoding, QueryKeyNorms,
};
use crate::error::ParseError;
use crate::names::rows::{ATTENTION, ATTENTION_BIAS, EXPERTS, HEAD_NORMS, MLP, NORMS, OUTER};

pub const LLAMA: FamilyDefinition = FamilyDefinition {
    name: "Llama",
    architecture: "llama",
    rules: FamilyRules {
        bias: AttentionBias::Never,
        query_key_norms: QueryKeyNorms::None,
        norms_values: false,
        norms_are_optional: false,
        has_sinks: false,
        has_gate: false,
        has_caps: false,
        has_temperature: false,
        scales_embedding: false,
        positions: LayerPositions::all(PositionEncoding::Rope),
        window_period: NO_PERIOD,
        local_theta: None,
    },
    config: ConfigRules {
        class: "LlamaForCausalLM",
        other_classes: &[],
        model_type: "llama",
        keys: &KEYS,
        activations: &["silu", "swish"],
        eps: 1e-6,
        theta: 10_000.0,
        turned: 1.0,
        pairs: false,
        norm_offset: 0.0,
        is_tied: false,
        window: WindowUse::Never,
        dense_layers: ("first_k_dense_replace", 0),
        attention_names: &["full_attention"],
        yarn_is_long: false,
    },
    readers: ConfigReaders {
        n_layers: |keys, names| keys.length(names.n_layers),
        head_dim: |keys, part| Ok(keys.optional("head_dim")?.unwrap_or(part)),
        inner: |keys, names, _| keys.length(names.inner),
        scale: |_, head_dim| Ok(1.0 / (head_dim as f32).sqrt()),
        multipliers: |_| Ok(NO_MULTIPLIERS),
        is_parallel: |_| Ok(false),
        experts: no_experts,
        layers: None,
        mixer: |_, _, _| Ok(MixerSpec::Attention),
        is_local: |_, layer, period| Ok(is_local(layer, period)),
        positions: |_, _, of_rules| Ok(of_rules),
        adjust_layers: |_, layers| Ok(layers),
        layer_input: |_| Ok(0),
    },
    gguf: GgufRules {
        is_read: true,
        also: None,
        variant: None,
        pairs: true,
        ends: END_TEXTS,
        n_layers_of_largest: None,
        has_scale: false,
        window_pattern: WindowPattern::Unused,
        truncates_yarn: true,
        divides_yarn: false,
        multipliers: |_| Ok(NO_MULTIPLIERS),
        is_parallel: |_| Ok(false),
        experts: no_gguf_experts,
        layer: |_, _, usual| Ok(usual),
        adjust_layers: |_, layers| Ok(layers),
        layers_differ: false,
        scale: None,
        layer_input: None,
    },
    encoder: EncoderReaders {
        config: |_| Ok(None),
        gguf: |_| Ok(None),
        classifier: |_, hidden, n| Ok((Pooling::Last, vec![PooledLayer::product("score", hidden, n)])),
    },
    tensors: TensorTables {
        outer: OUTER,
        layers: "model.layers",
        norms: &[NORMS],
        attention: &[ATTENTION],
        bias: &[ATTENTION_BIAS],
        query_key_norms: &[HEAD_NORMS],
        recurrence: &[],
        convolution: &[],
        mlp: &[MLP],
        experts: &[EXPERTS],
        turns_plain_experts: false,
        shared_expert: &[],
        layer_inputs: &[],
        layer_input: &[],
        mtp: None,
    },
    form: DecoderForm {
        activation: Activation::Silu,
        norms: BlockNorms::InTurn {
            attention: Norms::Before("input_layernorm"),
            mlp: Norms::Before("post_attention_layernorm"),
        },
        recurrent_norms: None,
        norm_kind: NormKind::Rms,
        learns_positions: false,
        norms_embedding: false,
        norms_output: true,
        scales_layers: false,
    },
    parallel_norms: None,
    norms_beside_experts: None,
    chat_form: &CHATML,
};

pub const KEYS: ConfigKeys = ConfigKeys {
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

/// The form of most fine-tunes.
pub const CHATML: ChatForm = ChatForm {
    name: "ChatML",
    token: "<|im_start|>",
    source: "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
};
pub const LLAMA3_CHAT: ChatForm = ChatForm {
    name: "Llama 3",
    token: "<|start_header_id|>",
    source: "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}\
        <|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}\
        {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
};

/// The rules of a GGUF that no code reads.
pub const UNREAD: GgufRules = GgufRules { is_read: false, ..LLAMA.gguf };
/// The rules of a GGUF whose rope rotates halves, as folders have it.
pub const HALVES: GgufRules = GgufRules { pairs: false, ..LLAMA.gguf };

pub const GELU_TANH: &[&str] = &["gelu_pytorch_tanh", "gelu_new"];
pub const NO_MULTIPLIERS: ModelMultipliers = ModelMultipliers::NONE;

/// Where a model has windows, all its layers have them.
const NO_PERIOD: u32 = u32::MAX;

/// Texts of control tokens that end an answer in some chat template, whatever the file's own end token is.
const END_TEXTS: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|return|>",
    "<EOT>",
    "< EOT >",
    "_<EOT>",
];

/// Whether a layer has a window, where each layer of a period has none.
pub fn is_local(layer: u32, period: u32) -> bool {
    period == 0 || !(layer + 1).is_multiple_of(period)
}

/// The same, where a config may have another period.
pub fn is_local_in_pattern(keys: &JsonKeys<'_>, layer: u32, period: u32) -> Result<bool, ParseError> {
    Ok(is_local(layer, keys.optional("sliding_window_pattern")?.unwrap_or(period)))
}
