//! Qwen3, whose heads of Q and K are normed, and its mixture of experts.

use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, WindowUse};
use super::experts::{n_experts, softmax_experts, unshared_gguf_experts};
use super::llama::{HALVES, LLAMA};
use super::qwen2::is_behind_full_layers;
use crate::config::json::keys::JsonKeys;
use crate::config::{ExpertsSpec, QueryKeyNorms};
use crate::error::ParseError;

pub const QWEN3: FamilyDefinition = FamilyDefinition {
    name: "Qwen3",
    architecture: "qwen3",
    rules: FamilyRules { query_key_norms: QueryKeyNorms::Heads, ..LLAMA.rules },
    config: ConfigRules { class: "Qwen3ForCausalLM", model_type: "qwen3", window: WindowUse::Switched, ..LLAMA.config },
    readers: ConfigReaders { is_local: is_behind_full_layers, ..LLAMA.readers },
    gguf: HALVES,
    ..LLAMA
};

pub const QWEN3_MOE: FamilyDefinition = FamilyDefinition {
    name: "Qwen3 MoE",
    architecture: "qwen3moe",
    config: ConfigRules { class: "Qwen3MoeForCausalLM", model_type: "qwen3_moe", ..QWEN3.config },
    readers: ConfigReaders { experts, ..LLAMA.readers },
    gguf: GgufRules { experts: unshared_gguf_experts, ..HALVES },
    ..QWEN3
};

fn experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    let n = n_experts(keys, "num_experts")?;
    let normalized = keys.bool("norm_topk_prob")?.unwrap_or(false);
    softmax_experts(keys, n, keys.length("moe_intermediate_size")?, normalized).map(Some)
}
