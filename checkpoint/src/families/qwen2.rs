//! Qwen2: Q, K and V have a bias, and layers behind some have a window.

use super::definition::{AttentionBias, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, WindowUse};
use super::llama::{HALVES, LLAMA};
use crate::config::json::keys::JsonKeys;
use crate::error::ParseError;

pub const QWEN2: FamilyDefinition = FamilyDefinition {
    name: "Qwen2",
    architecture: "qwen2",
    rules: FamilyRules { bias: AttentionBias::Always, ..LLAMA.rules },
    config: ConfigRules { class: "Qwen2ForCausalLM", model_type: "qwen2", window: WindowUse::Switched, ..LLAMA.config },
    readers: ConfigReaders { is_local: is_behind_full_layers, ..LLAMA.readers },
    gguf: HALVES,
    ..LLAMA
};

/// Whether a layer stands behind those that attend to all positions.
pub fn is_behind_full_layers(keys: &JsonKeys<'_>, layer: u32, _: u32) -> Result<bool, ParseError> {
    Ok(layer >= keys.optional("max_window_layers")?.unwrap_or(28))
}
