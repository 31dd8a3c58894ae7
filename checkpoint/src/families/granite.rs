//! Granite and its mixture of experts: the embedding, the residual stream, scores and logits are scaled.

use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition, GgufRules, TensorTables};
use super::experts::unshared_gguf_experts;
use super::llama::LLAMA;
use super::mistral::mixtral_experts;
use crate::config::ModelMultipliers;
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::error::ParseError;
use crate::names::rows::Dim::{ExpertInner, Experts, Hidden};
use crate::names::rows::{OF_EXPERT, TensorMapping, expert_part, renamed, stacked, stacked_expert};

pub const GRANITE: FamilyDefinition = FamilyDefinition {
    name: "Granite",
    architecture: "granite",
    config: ConfigRules { class: "GraniteForCausalLM", model_type: "granite", ..LLAMA.config },
    readers: ConfigReaders {
        scale: |keys, _| Ok(keys.float("attention_multiplier")?.unwrap_or(1.0)),
        multipliers,
        ..LLAMA.readers
    },
    gguf: GgufRules { has_scale: true, multipliers: gguf_multipliers, ..LLAMA.gguf },
    ..LLAMA
};

pub const GRANITE_MOE: FamilyDefinition = FamilyDefinition {
    name: "Granite MoE",
    architecture: "granitemoe",
    config: ConfigRules { class: "GraniteMoeForCausalLM", model_type: "granitemoe", ..GRANITE.config },
    readers: ConfigReaders { experts: mixtral_experts, ..GRANITE.readers },
    gguf: GgufRules { experts: unshared_gguf_experts, ..GRANITE.gguf },
    tensors: TensorTables { experts: &[GRANITE_EXPERTS], ..GRANITE.tensors },
    ..GRANITE
};

fn multipliers(keys: &JsonKeys<'_>) -> Result<ModelMultipliers, ParseError> {
    let given = |key: &str| Ok(keys.float(key)?.filter(|factor| *factor != 1.0));
    Ok(ModelMultipliers {
        embedding: given("embedding_multiplier")?,
        residual: given("residual_multiplier")?,
        logits: given("logits_scaling")?.map(|divisor| 1.0 / divisor),
        ..ModelMultipliers::NONE
    })
}

fn gguf_multipliers(keys: &GgufKeys<'_>) -> Result<ModelMultipliers, ParseError> {
    Ok(ModelMultipliers {
        embedding: keys.factor("embedding_scale")?,
        residual: keys.factor("residual_scale")?,
        logits: keys.factor("logit_scale")?.map(|divisor| 1.0 / divisor),
        ..ModelMultipliers::NONE
    })
}

const GRANITE_INPUT: &str = "block_sparse_moe.input_linear.weight";
pub const GRANITE_EXPERTS: &[TensorMapping] = &[
    renamed("mlp.gate.weight", [Experts, Hidden], "block_sparse_moe.router.layer.weight", "ffn_gate_inp.weight"),
    TensorMapping {
        name: "mlp.experts.{e}.gate_proj.weight",
        dims: [ExpertInner, Hidden],
        folder: expert_part(GRANITE_INPUT, &[], OF_EXPERT),
        gguf: stacked("ffn_gate_exps.weight"),
    },
    TensorMapping {
        name: "mlp.experts.{e}.up_proj.weight",
        dims: [ExpertInner, Hidden],
        folder: expert_part(GRANITE_INPUT, &[ExpertInner], OF_EXPERT),
        gguf: stacked("ffn_up_exps.weight"),
    },
    stacked_expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "block_sparse_moe.output_linear.weight",
        "ffn_down_exps.weight",
    ),
];
