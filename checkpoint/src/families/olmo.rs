//! OLMo 2 and 3: norms behind each sublayer and none before, Q and K normed over all heads together. OLMo 3 has windows
//! on three layers of four, and its GGUFs have the name of OLMo 2.

use super::definition::{
    ConfigRules, FamilyDefinition, FamilyRules, GgufRules, GgufVariant, LayerPositions, LocalTheta, TensorTables,
    WindowPattern, WindowUse,
};
use super::llama::{HALVES, LLAMA};
use crate::config::{BlockNorms, DecoderForm, Norms, PositionEncoding, QueryKeyNorms};
use crate::names::rows::Dim::{Heads, Hidden, KvHeads, One};
use crate::names::rows::{TensorMapping, row};

pub const OLMO2: FamilyDefinition = FamilyDefinition {
    name: "OLMo 2",
    architecture: "olmo2",
    rules: FamilyRules { query_key_norms: QueryKeyNorms::Projection, ..LLAMA.rules },
    config: ConfigRules { class: "Olmo2ForCausalLM", model_type: "olmo2", eps: 1e-5, ..LLAMA.config },
    gguf: HALVES,
    tensors: TensorTables { norms: &[NORMS_BEHIND], query_key_norms: &[PROJECTION_NORMS], ..LLAMA.tensors },
    form: DecoderForm {
        norms: BlockNorms::InTurn {
            attention: Norms::Behind("post_attention_layernorm"),
            mlp: Norms::Behind("post_feedforward_layernorm"),
        },
        ..LLAMA.form
    },
    ..LLAMA
};

pub const OLMO3: FamilyDefinition = FamilyDefinition {
    name: "OLMo 3",
    architecture: "olmo3",
    rules: FamilyRules {
        positions: LayerPositions { local: PositionEncoding::LocalRope, ..LLAMA.rules.positions },
        window_period: 4,
        local_theta: Some(LocalTheta::Same),
        ..OLMO2.rules
    },
    config: ConfigRules {
        class: "Olmo3ForCausalLM",
        model_type: "olmo3",
        theta: 500_000.0,
        window: WindowUse::Always { absent: Some(4096) },
        ..OLMO2.config
    },
    gguf: GgufRules {
        variant: Some(GgufVariant {
            architecture: "olmo2",
            is_in: |keys| keys.optional("attention.sliding_window").is_ok_and(|window| window.is_some()),
        }),
        window_pattern: WindowPattern::List,
        ..HALVES
    },
    ..OLMO2
};

pub const NORMS_BEHIND: &[TensorMapping] = &[
    row("post_attention_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
    row("post_feedforward_layernorm.weight", [One, Hidden], "post_ffw_norm.weight"),
];
const PROJECTION_NORMS: &[TensorMapping] = &[
    row("self_attn.q_norm.weight", [One, Heads], "attn_q_norm.weight"),
    row("self_attn.k_norm.weight", [One, KvHeads], "attn_k_norm.weight"),
];
