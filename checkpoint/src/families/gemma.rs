//! Gemma 2 and 3: norms on both sides of each sublayer, a scaled embedding, local layers between those that attend to
//! everything, GELU as the gate. Gemma 2 caps scores and logits; Gemma 3 norms its heads instead, and its local layers
//! have a rope of their own.

use super::definition::{
    ChatForm, ConfigKeys, ConfigReaders, ConfigRules, EncoderReaders, FamilyDefinition, FamilyRules, GgufRules,
    LayerPositions, LocalTheta, TensorTables, WindowPattern, WindowUse,
};
use super::llama::{GELU_TANH, HALVES, KEYS, LLAMA, is_local_in_pattern};
use crate::config::{
    Activation, BlockNorms, DecoderForm, EncoderSpec, LayerSpec, Norms, PositionEncoding, QueryKeyNorms,
};
use crate::names::rows::Dim::{Hidden, One};
use crate::names::rows::{TensorMapping, row};

pub const GEMMA2: FamilyDefinition = FamilyDefinition {
    name: "Gemma 2",
    architecture: "gemma2",
    rules: FamilyRules { has_caps: true, scales_embedding: true, window_period: 2, ..LLAMA.rules },
    config: ConfigRules {
        class: "Gemma2ForCausalLM",
        model_type: "gemma2",
        keys: &ConfigKeys { activation: "hidden_activation", ..KEYS },
        activations: GELU_TANH,
        norm_offset: 1.0,
        is_tied: true,
        window: WindowUse::Always { absent: Some(4096) },
        ..LLAMA.config
    },
    readers: ConfigReaders {
        scale: |keys, _| Ok(1.0 / keys.float("query_pre_attn_scalar")?.unwrap_or(256.0).sqrt()),
        ..LLAMA.readers
    },
    gguf: GgufRules { n_layers_of_largest: Some(46), ..HALVES },
    tensors: TensorTables { norms: &[GEMMA_NORMS], ..LLAMA.tensors },
    form: DecoderForm {
        activation: Activation::Gelu,
        norms: BlockNorms::InTurn {
            attention: Norms::Around { before: "input_layernorm", behind: "post_attention_layernorm" },
            mlp: Norms::Around { before: "pre_feedforward_layernorm", behind: "post_feedforward_layernorm" },
        },
        ..LLAMA.form
    },
    ..LLAMA
};

pub const GEMMA3: FamilyDefinition = FamilyDefinition {
    name: "Gemma 3",
    architecture: "gemma3",
    rules: FamilyRules {
        query_key_norms: QueryKeyNorms::Heads,
        positions: LayerPositions { local: PositionEncoding::LocalRope, ..LLAMA.rules.positions },
        window_period: 6,
        local_theta: Some(LocalTheta::Own("rope_local_base_freq", 10_000.0)),
        ..GEMMA2.rules
    },
    config: ConfigRules { class: "Gemma3ForCausalLM", model_type: "gemma3_text", theta: 1_000_000.0, ..GEMMA2.config },
    readers: ConfigReaders { is_local: is_local_in_pattern, ..GEMMA2.readers },
    gguf: GgufRules { n_layers_of_largest: Some(62), window_pattern: WindowPattern::Period, ..HALVES },
    ..GEMMA2
};

/// Gemma 3 as an encoder. A window's number counts the positions on both sides.
pub const EMBEDDING_GEMMA: FamilyDefinition = FamilyDefinition {
    name: "EmbeddingGemma",
    architecture: "gemma-embedding",
    config: ConfigRules { class: "Gemma3TextModel", model_type: "gemma3_text_encoder", ..GEMMA3.config },
    readers: ConfigReaders {
        adjust_layers: |keys, layers| match keys.bool("use_bidirectional_attention")?.unwrap_or(false) {
            true => Ok(layers.into_iter().map(with_half_window).collect()),
            false => Ok(layers),
        },
        ..GEMMA3.readers
    },
    gguf: GgufRules {
        adjust_layers: |_, layers| Ok(layers.into_iter().map(with_half_window).collect()),
        ..GEMMA3.gguf
    },
    encoder: EncoderReaders {
        config: |keys| Ok(keys.bool("use_bidirectional_attention")?.unwrap_or(false).then_some(EncoderSpec::PLAIN)),
        gguf: |_| Ok(Some(EncoderSpec::PLAIN)),
        ..GEMMA3.encoder
    },
    ..GEMMA3
};

fn with_half_window(layer: LayerSpec) -> LayerSpec {
    LayerSpec { window: layer.window.map(|window| window / 2 + 1), ..layer }
}

pub const GEMMA_NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
    row("pre_feedforward_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
    row("post_feedforward_layernorm.weight", [One, Hidden], "post_ffw_norm.weight"),
];

pub const GEMMA_CHAT: ChatForm = ChatForm {
    name: "Gemma",
    token: "<start_of_turn>",
    source: "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' \
        else 'user' }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}\
        <start_of_turn>model\n{% endif %}",
};
