//! GLM-4: norms around each sublayer, pairs of neighbours turned on half of a head. GLM-4.5 has Llama's norms, and
//! experts whose scores are sigmoids.

use super::definition::{
    AttentionBias, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, TensorTables,
};
use super::experts::{grouped_scores, n_experts, sigmoid_gguf_experts, softmax_experts};
use super::llama::{HALVES, LLAMA};
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{BlockNorms, DecoderForm, ExpertsSpec, Norms, QueryKeyNorms};
use crate::error::ParseError;
use crate::names::rows::Dim::{Experts, Hidden, One, SharedInner};
use crate::names::rows::{EXPERTS, GATE_UP_FUSED, MTP_BEHIND_LAYERS, OTHER_NORMS, TensorMapping, row};

pub const GLM4: FamilyDefinition = FamilyDefinition {
    name: "GLM-4",
    architecture: "glm4",
    rules: FamilyRules { bias: AttentionBias::Optional { absent: true }, ..LLAMA.rules },
    config: ConfigRules {
        class: "Glm4ForCausalLM",
        model_type: "glm4",
        eps: 1.5625e-7,
        turned: 0.5,
        pairs: true,
        ..LLAMA.config
    },
    tensors: TensorTables { norms: &[GLM4_NORMS], mlp: &[GATE_UP_FUSED], ..LLAMA.tensors },
    form: DecoderForm {
        norms: BlockNorms::InTurn {
            attention: Norms::Around { before: "input_layernorm", behind: "post_self_attn_layernorm" },
            mlp: Norms::Around { before: "post_attention_layernorm", behind: "post_mlp_layernorm" },
        },
        ..LLAMA.form
    },
    ..LLAMA
};

pub const GLM4_MOE: FamilyDefinition = FamilyDefinition {
    name: "GLM-4.5",
    architecture: "glm4moe",
    rules: FamilyRules {
        bias: AttentionBias::Optional { absent: false },
        query_key_norms: QueryKeyNorms::Heads,
        norms_are_optional: true,
        ..LLAMA.rules
    },
    config: ConfigRules {
        class: "Glm4MoeForCausalLM",
        model_type: "glm4_moe",
        eps: 1e-5,
        turned: 0.5,
        dense_layers: ("first_k_dense_replace", 1),
        ..LLAMA.config
    },
    readers: ConfigReaders { experts, ..LLAMA.readers },
    gguf: GgufRules { experts: of_gguf, ..HALVES },
    tensors: TensorTables {
        norms: &[OTHER_NORMS],
        experts: &[EXPERTS, ROUTER],
        shared_expert: &[SHARED_EXPERT],
        mtp: Some(&MTP_BEHIND_LAYERS),
        ..LLAMA.tensors
    },
    ..LLAMA
};

fn experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    let inner = keys.length("moe_intermediate_size")?;
    let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
    let scores = grouped_scores(keys)?;
    let n = n_experts(keys, "n_routed_experts")?;
    Ok(Some(ExpertsSpec {
        scores,
        factor: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
        shared: inner.saturating_mul(keys.optional("n_shared_experts")?.unwrap_or(1)),
        ..softmax_experts(keys, n, inner, normalized)?
    }))
}

fn of_gguf(keys: &GgufKeys<'_>, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    let of = sigmoid_gguf_experts(keys, inner)?;
    let shared = of.inner.saturating_mul(keys.optional("expert_shared_count")?.unwrap_or(0));
    Ok(Some(ExpertsSpec { shared, ..of }))
}

const GLM4_NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_self_attn_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
    row("post_mlp_layernorm.weight", [One, Hidden], "post_ffw_norm.weight"),
];
/// Added to the scores by which experts are chosen.
const ROUTER: &[TensorMapping] = &[row("mlp.gate.e_score_correction_bias", [One, Experts], "exp_probs_b.bias")];
const SHARED_EXPERT: &[TensorMapping] = &[
    row("mlp.shared_experts.gate_proj.weight", [SharedInner, Hidden], "ffn_gate_shexp.weight"),
    row("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], "ffn_up_shexp.weight"),
    row("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], "ffn_down_shexp.weight"),
];
