//! gpt-oss: experts with clamps and a bias, one more score for each head, windows on every second layer.

use super::definition::{
    AttentionBias, ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, TensorTables, WindowUse,
};
use super::experts::gguf_experts;
use super::llama::{HALVES, LLAMA};
use super::mistral::mixtral_experts;
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{ClampedSilu, ExpertsSpec};
use crate::error::ParseError;
use crate::names::rows::Dim::{ExpertInner, Experts, Hidden, One, OneOfHeads};
use crate::names::rows::{
    ATTENTION_BIAS, Dim, OF_EXPERT, OTHER_NORMS, TensorMapping, expert_part, interleaved, renamed, row, stacked,
    stacked_expert,
};

pub const GPT_OSS: FamilyDefinition = FamilyDefinition {
    name: "gpt-oss",
    architecture: "gpt-oss",
    rules: FamilyRules { bias: AttentionBias::Required, has_sinks: true, window_period: 2, ..LLAMA.rules },
    config: ConfigRules {
        class: "GptOssForCausalLM",
        model_type: "gpt_oss",
        eps: 1e-5,
        theta: 150_000.0,
        window: WindowUse::Always { absent: Some(128) },
        ..LLAMA.config
    },
    readers: ConfigReaders { experts, ..LLAMA.readers },
    gguf: GgufRules { ends: ENDS, truncates_yarn: false, experts: of_gguf, ..HALVES },
    tensors: TensorTables {
        norms: &[OTHER_NORMS],
        bias: &[ATTENTION_BIAS, OUTPUT_BIAS],
        mlp: &[GPT_OSS_EXPERTS],
        experts: &[GPT_OSS_EXPERTS],
        turns_plain_experts: true,
        ..LLAMA.tensors
    },
    ..LLAMA
};

/// An answer has several messages: `<|end|>` ends one of them.
const ENDS: &[&str] = &["<|return|>", "<|call|>", "<|endoftext|>"];
const CLAMP: ClampedSilu = ClampedSilu { alpha: 1.702, limit: 7.0 };

fn experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    let (alpha, limit) = (keys.float("swiglu_alpha")?, keys.float("swiglu_limit")?);
    let clamp = ClampedSilu { alpha: alpha.unwrap_or(CLAMP.alpha), limit: limit.unwrap_or(CLAMP.limit) };
    let of = mixtral_experts(keys)?;
    Ok(of.map(|of| ExpertsSpec { clamp: Some(clamp), has_bias: true, ..of }))
}

fn of_gguf(keys: &GgufKeys<'_>, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    Ok(Some(ExpertsSpec { clamp: Some(CLAMP), has_bias: true, ..gguf_experts(keys, inner)? }))
}

/// Gate and up of a gpt-oss folder stand in turn, row by row.
const fn in_turn(
    name: &'static str,
    dims: [Dim; 2],
    file: &'static str,
    nth: usize,
    gguf: &'static str,
) -> TensorMapping {
    let before: &[Dim] = if nth == 0 { &[] } else { &[One] };
    TensorMapping {
        name,
        dims,
        folder: interleaved(expert_part(file, &[], OF_EXPERT), One, before, &[One, One]),
        gguf: stacked(gguf),
    }
}

const GATE_UP_TENSORS: [&str; 2] = ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"];
const OUTPUT_BIAS: &[TensorMapping] = &[
    row("self_attn.o_proj.bias", [One, Hidden], "attn_output.bias"),
    row("self_attn.sinks", [One, OneOfHeads], "attn_sinks.weight"),
];
const GPT_OSS_EXPERTS: &[TensorMapping] = &[
    renamed("mlp.gate.weight", [Experts, Hidden], "mlp.router.weight", "ffn_gate_inp.weight"),
    renamed("mlp.gate.bias", [One, Experts], "mlp.router.bias", "ffn_gate_inp.bias"),
    in_turn("mlp.experts.{e}.gate_proj.weight", [ExpertInner, Hidden], GATE_UP_TENSORS[0], 0, "ffn_gate_exps.weight"),
    in_turn("mlp.experts.{e}.up_proj.weight", [ExpertInner, Hidden], GATE_UP_TENSORS[0], 1, "ffn_up_exps.weight"),
    stacked_expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "mlp.experts.down_proj",
        "ffn_down_exps.weight",
    ),
    in_turn("mlp.experts.{e}.gate_proj.bias", [One, ExpertInner], GATE_UP_TENSORS[1], 0, "ffn_gate_exps.bias"),
    in_turn("mlp.experts.{e}.up_proj.bias", [One, ExpertInner], GATE_UP_TENSORS[1], 1, "ffn_up_exps.bias"),
    stacked_expert("mlp.experts.{e}.down_proj.bias", [One, Hidden], "mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
];
