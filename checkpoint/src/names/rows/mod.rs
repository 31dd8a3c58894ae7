//! The rows of the table: which tensors a family has, and where the two kinds of files store them.

mod recurrent;

use crate::config::{Family, LayerSpec, ModelSpec, QueryKeyNorms};

/// A length that the spec determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dim {
    One,
    Hidden,
    Heads,
    KvHeads,
    OneHead,
    /// One number for each query head.
    OneOfHeads,
    Inner,
    ExpertInner,
    SharedInner,
    Experts,
    Context,
    Vocab,
    /// All heads of Q or K of recurrent layers, and all of V.
    Keys,
    Values,
    /// One number for each head of V.
    StateHeads,
    OneKey,
    OneValue,
    /// The heads of V that read one of K, and their numbers.
    HeadsOfKey,
    ValuesOfKey,
    /// All channels of a short convolution.
    Convolved,
    Taps,
}

use Dim::{Context, ExpertInner, Experts, Heads, Hidden, Inner, KvHeads, One, OneHead, OneOfHeads, SharedInner, Vocab};

/// Our name, the folder's name, the GGUF's name, `[rows, cols]`.
pub(super) struct TensorMapping {
    pub name: &'static str,
    pub dims: [Dim; 2],
    pub folder: TensorSource,
    pub gguf: TensorSource,
}

/// Where a format stores it. `{e}` is the expert's index.
#[derive(Clone, Copy)]
pub(super) struct TensorSource {
    pub file: &'static str,
    pub cut: TensorCut,
    pub is_turned: bool,
    /// Its rows stand between those of other matrices: runs of so many, after others, in all of which there is one.
    pub woven: Option<(Dim, &'static [Dim], &'static [Dim])>,
}

#[derive(Clone, Copy)]
pub(super) enum TensorCut {
    Whole,
    /// A range of the rows (of a vector: of the elements): those after `before`, of `all`.
    Rows {
        before: &'static [Dim],
        all: &'static [Dim],
    },
    /// One of the experts' matrices, which are stored one after another: in each the rows after `before`, of `all`.
    Expert {
        before: &'static [Dim],
        all: &'static [Dim],
    },
}

const fn whole(file: &'static str) -> TensorSource {
    TensorSource { file, cut: TensorCut::Whole, is_turned: false, woven: None }
}

const fn part(file: &'static str, before: &'static [Dim], all: &'static [Dim]) -> TensorSource {
    TensorSource { file, cut: TensorCut::Rows { before, all }, is_turned: false, woven: None }
}

const fn transposed(place: TensorSource) -> TensorSource {
    TensorSource { is_turned: true, ..place }
}

const fn stacked(file: &'static str) -> TensorSource {
    expert_part(file, &[], &[])
}

/// With an empty `all` the whole of each expert's matrix.
const fn expert_part(file: &'static str, before: &'static [Dim], all: &'static [Dim]) -> TensorSource {
    TensorSource { file, cut: TensorCut::Expert { before, all }, is_turned: false, woven: None }
}

const fn interleaved(place: TensorSource, run: Dim, before: &'static [Dim], all: &'static [Dim]) -> TensorSource {
    TensorSource { woven: Some((run, before, all)), ..place }
}

/// A tensor with the same name in a folder as here.
const fn row(name: &'static str, dims: [Dim; 2], gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder: whole(name), gguf: whole(gguf) }
}

const NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
];
const GEMMA_NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
    row("pre_feedforward_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
    row("post_feedforward_layernorm.weight", [One, Hidden], "post_ffw_norm.weight"),
];
const ATTENTION: &[TensorMapping] = &[
    row("self_attn.q_proj.weight", [Heads, Hidden], "attn_q.weight"),
    row("self_attn.k_proj.weight", [KvHeads, Hidden], "attn_k.weight"),
    row("self_attn.v_proj.weight", [KvHeads, Hidden], "attn_v.weight"),
    row("self_attn.o_proj.weight", [Hidden, Heads], "attn_output.weight"),
];
const ATTENTION_BIAS: &[TensorMapping] = &[
    row("self_attn.q_proj.bias", [One, Heads], "attn_q.bias"),
    row("self_attn.k_proj.bias", [One, KvHeads], "attn_k.bias"),
    row("self_attn.v_proj.bias", [One, KvHeads], "attn_v.bias"),
];
const HEAD_NORMS: &[TensorMapping] = &[
    row("self_attn.q_norm.weight", [One, OneHead], "attn_q_norm.weight"),
    row("self_attn.k_norm.weight", [One, OneHead], "attn_k_norm.weight"),
];
const MLP: &[TensorMapping] = &[
    row("mlp.gate_proj.weight", [Inner, Hidden], "ffn_gate.weight"),
    row("mlp.up_proj.weight", [Inner, Hidden], "ffn_up.weight"),
    row("mlp.down_proj.weight", [Hidden, Inner], "ffn_down.weight"),
];

const fn expert(name: &'static str, dims: [Dim; 2], folder: &'static str, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder: whole(folder), gguf: stacked(gguf) }
}

const EXPERTS: &[TensorMapping] = &[
    row("mlp.gate.weight", [Experts, Hidden], "ffn_gate_inp.weight"),
    expert(
        "mlp.experts.{e}.gate_proj.weight",
        [ExpertInner, Hidden],
        "mlp.experts.{e}.gate_proj.weight",
        "ffn_gate_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.up_proj.weight",
        [ExpertInner, Hidden],
        "mlp.experts.{e}.up_proj.weight",
        "ffn_up_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "mlp.experts.{e}.down_proj.weight",
        "ffn_down_exps.weight",
    ),
];
/// Where a folder has them when it keeps the experts of a layer in one tensor.
const EXPERTS_TOGETHER: [(&str, TensorSource); 3] = [
    ("mlp.experts.{e}.gate_proj.weight", expert_part(GATE_UP_TOGETHER, &[], OF_EXPERT)),
    ("mlp.experts.{e}.up_proj.weight", expert_part(GATE_UP_TOGETHER, &[ExpertInner], OF_EXPERT)),
    ("mlp.experts.{e}.down_proj.weight", stacked("mlp.experts.down_proj")),
];
pub const GATE_UP_TOGETHER: &str = "mlp.experts.gate_up_proj";

impl TensorMapping {
    /// Of experts that have their own names in a folder, where they stand when they are together.
    pub fn stacked_source(&self) -> TensorSource {
        let is_own = |(name, _): &&(&str, TensorSource)| *name == self.name && *name == self.folder.file;
        EXPERTS_TOGETHER.iter().find(is_own).map_or(self.folder, |(_, place)| *place)
    }
}

const MIXTRAL_EXPERTS: &[TensorMapping] = &[
    TensorMapping {
        name: "mlp.gate.weight",
        dims: [Experts, Hidden],
        folder: whole("block_sparse_moe.gate.weight"),
        gguf: whole("ffn_gate_inp.weight"),
    },
    expert(
        "mlp.experts.{e}.gate_proj.weight",
        [ExpertInner, Hidden],
        "block_sparse_moe.experts.{e}.w1.weight",
        "ffn_gate_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.up_proj.weight",
        [ExpertInner, Hidden],
        "block_sparse_moe.experts.{e}.w3.weight",
        "ffn_up_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "block_sparse_moe.experts.{e}.w2.weight",
        "ffn_down_exps.weight",
    ),
];

const QKV: &[Dim] = &[Heads, KvHeads, KvHeads];
const GATE_UP: &[Dim] = &[Inner, Inner];

const fn fused(name: &'static str, dims: [Dim; 2], files: [&'static str; 2], before: &'static [Dim]) -> TensorMapping {
    let all = if matches!(dims[0], Inner) { GATE_UP } else { QKV };
    TensorMapping { name, dims, folder: part(files[0], before, all), gguf: part(files[1], before, all) }
}

const QKV_FILES: [&str; 2] = ["self_attn.qkv_proj.weight", "attn_qkv.weight"];
/// Phi-3's converter stores both halves under the name of one.
const GATE_UP_FILES: [&str; 2] = ["mlp.gate_up_proj.weight", "ffn_up.weight"];

const PHI3: &[TensorMapping] = &[
    fused("self_attn.q_proj.weight", [Heads, Hidden], QKV_FILES, &[]),
    fused("self_attn.k_proj.weight", [KvHeads, Hidden], QKV_FILES, &[Heads]),
    fused("self_attn.v_proj.weight", [KvHeads, Hidden], QKV_FILES, &[Heads, KvHeads]),
    row("self_attn.o_proj.weight", [Hidden, Heads], "attn_output.weight"),
    fused("mlp.gate_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[]),
    fused("mlp.up_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[Inner]),
    row("mlp.down_proj.weight", [Hidden, Inner], "ffn_down.weight"),
];

const fn gpt2(name: &'static str, dims: [Dim; 2], folder: TensorSource, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder, gguf: TensorSource { file: gguf, is_turned: false, ..folder } }
}

/// GPT-2's matrices are stored transposed in a folder, but not in a GGUF.
const GPT2: &[TensorMapping] = &[
    gpt2("input_layernorm.weight", [One, Hidden], whole("ln_1.weight"), "attn_norm.weight"),
    gpt2("input_layernorm.bias", [One, Hidden], whole("ln_1.bias"), "attn_norm.bias"),
    gpt2(
        "self_attn.q_proj.weight",
        [Heads, Hidden],
        transposed(part("attn.c_attn.weight", &[], QKV)),
        "attn_qkv.weight",
    ),
    gpt2(
        "self_attn.k_proj.weight",
        [KvHeads, Hidden],
        transposed(part("attn.c_attn.weight", &[Heads], QKV)),
        "attn_qkv.weight",
    ),
    gpt2(
        "self_attn.v_proj.weight",
        [KvHeads, Hidden],
        transposed(part("attn.c_attn.weight", &[Heads, KvHeads], QKV)),
        "attn_qkv.weight",
    ),
    gpt2("self_attn.q_proj.bias", [One, Heads], part("attn.c_attn.bias", &[], QKV), "attn_qkv.bias"),
    gpt2("self_attn.k_proj.bias", [One, KvHeads], part("attn.c_attn.bias", &[Heads], QKV), "attn_qkv.bias"),
    gpt2("self_attn.v_proj.bias", [One, KvHeads], part("attn.c_attn.bias", &[Heads, KvHeads], QKV), "attn_qkv.bias"),
    gpt2("self_attn.o_proj.weight", [Hidden, Heads], transposed(whole("attn.c_proj.weight")), "attn_output.weight"),
    gpt2("self_attn.o_proj.bias", [One, Hidden], whole("attn.c_proj.bias"), "attn_output.bias"),
    gpt2("post_attention_layernorm.weight", [One, Hidden], whole("ln_2.weight"), "ffn_norm.weight"),
    gpt2("post_attention_layernorm.bias", [One, Hidden], whole("ln_2.bias"), "ffn_norm.bias"),
    gpt2("mlp.up_proj.weight", [Inner, Hidden], transposed(whole("mlp.c_fc.weight")), "ffn_up.weight"),
    gpt2("mlp.up_proj.bias", [One, Inner], whole("mlp.c_fc.bias"), "ffn_up.bias"),
    gpt2("mlp.down_proj.weight", [Hidden, Inner], transposed(whole("mlp.c_proj.weight")), "ffn_down.weight"),
    gpt2("mlp.down_proj.bias", [One, Hidden], whole("mlp.c_proj.bias"), "ffn_down.bias"),
];

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const POSITIONS: &str = "model.embed_positions.weight";
const NORM: &str = "model.norm.weight";
const NORM_BIAS: &str = "model.norm.bias";
pub const HEAD: &str = "lm_head.weight";

const OUTER: &[TensorMapping] = &[
    row(EMBEDDING, [Vocab, Hidden], "token_embd.weight"),
    row(NORM, [One, Hidden], "output_norm.weight"),
    row(HEAD, [Vocab, Hidden], "output.weight"),
];
const GPT2_OUTER: &[TensorMapping] = &[
    gpt2(EMBEDDING, [Vocab, Hidden], whole("transformer.wte.weight"), "token_embd.weight"),
    gpt2(POSITIONS, [Context, Hidden], whole("transformer.wpe.weight"), "position_embd.weight"),
    gpt2(NORM, [One, Hidden], whole("transformer.ln_f.weight"), "output_norm.weight"),
    gpt2(NORM_BIAS, [One, Hidden], whole("transformer.ln_f.bias"), "output_norm.bias"),
    gpt2(HEAD, [Vocab, Hidden], whole("lm_head.weight"), "output.weight"),
];

const BEHIND: &[TensorMapping] = &[
    row("post_attention_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
    row("post_feedforward_layernorm.weight", [One, Hidden], "post_ffw_norm.weight"),
];
const GLM4_NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_self_attn_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
    row("post_mlp_layernorm.weight", [One, Hidden], "post_ffw_norm.weight"),
];
/// In GGUFs of some families the second norm has the name of one behind attention.
const OTHER_NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
];
const ONE_NORM: &[TensorMapping] = &[row("input_layernorm.weight", [One, Hidden], "attn_norm.weight")];
const PROJECTION_NORMS: &[TensorMapping] = &[
    row("self_attn.q_norm.weight", [One, Heads], "attn_q_norm.weight"),
    row("self_attn.k_norm.weight", [One, KvHeads], "attn_k_norm.weight"),
];
const GATE_UP_FUSED: &[TensorMapping] = &[
    fused("mlp.gate_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[]),
    fused("mlp.up_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[Inner]),
    row("mlp.down_proj.weight", [Hidden, Inner], "ffn_down.weight"),
];
const OF_EXPERT: &[Dim] = &[ExpertInner, ExpertInner];
const GRANITE_INPUT: &str = "block_sparse_moe.input_linear.weight";
const GRANITE_EXPERTS: &[TensorMapping] = &[
    TensorMapping {
        name: "mlp.gate.weight",
        dims: [Experts, Hidden],
        folder: whole("block_sparse_moe.router.layer.weight"),
        gguf: whole("ffn_gate_inp.weight"),
    },
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
    TensorMapping {
        name: "mlp.experts.{e}.down_proj.weight",
        dims: [Hidden, ExpertInner],
        folder: stacked("block_sparse_moe.output_linear.weight"),
        gguf: stacked("ffn_down_exps.weight"),
    },
];
const GLM4_ROUTER: &[TensorMapping] = &[row("mlp.gate.e_score_correction_bias", [One, Experts], "exp_probs_b.bias")];
const SHARED_EXPERT: &[TensorMapping] = &[
    row("mlp.shared_experts.gate_proj.weight", [SharedInner, Hidden], "ffn_gate_shexp.weight"),
    row("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], "ffn_up_shexp.weight"),
    row("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], "ffn_down_shexp.weight"),
];

/// Gate and up of a gpt-oss folder stand in turn, row by row.
const fn gpt_oss(
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

const GPT_OSS_GATE_UP: [&str; 2] = ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"];
const GPT_OSS: &[TensorMapping] = &[
    row("self_attn.o_proj.bias", [One, Hidden], "attn_output.bias"),
    row("self_attn.sinks", [One, OneOfHeads], "attn_sinks.weight"),
    TensorMapping {
        name: "mlp.gate.weight",
        dims: [Experts, Hidden],
        folder: whole("mlp.router.weight"),
        gguf: whole("ffn_gate_inp.weight"),
    },
    TensorMapping {
        name: "mlp.gate.bias",
        dims: [One, Experts],
        folder: whole("mlp.router.bias"),
        gguf: whole("ffn_gate_inp.bias"),
    },
    gpt_oss("mlp.experts.{e}.gate_proj.weight", [ExpertInner, Hidden], GPT_OSS_GATE_UP[0], 0, "ffn_gate_exps.weight"),
    gpt_oss("mlp.experts.{e}.up_proj.weight", [ExpertInner, Hidden], GPT_OSS_GATE_UP[0], 1, "ffn_up_exps.weight"),
    expert_at(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "mlp.experts.down_proj",
        "ffn_down_exps.weight",
    ),
    gpt_oss("mlp.experts.{e}.gate_proj.bias", [One, ExpertInner], GPT_OSS_GATE_UP[1], 0, "ffn_gate_exps.bias"),
    gpt_oss("mlp.experts.{e}.up_proj.bias", [One, ExpertInner], GPT_OSS_GATE_UP[1], 1, "ffn_up_exps.bias"),
    expert_at("mlp.experts.{e}.down_proj.bias", [One, Hidden], "mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
];

const fn expert_at(name: &'static str, dims: [Dim; 2], folder: &'static str, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder: stacked(folder), gguf: stacked(gguf) }
}

const fn neox(name: &'static str, dims: [Dim; 2], folder: &'static str, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder: whole(folder), gguf: whole(gguf) }
}

/// Q, K and V of a head stand together in a folder, and in a GGUF those of all heads.
const fn neox_qkv(name: &'static str, dims: [Dim; 2], files: [&'static str; 2], nth: usize) -> TensorMapping {
    const HEAD: &[Dim] = &[OneHead, OneHead, OneHead];
    let (before, of_head): (&[Dim], &[Dim]) = match nth {
        0 => (&[], &[]),
        1 => (&[Heads], &[OneHead]),
        _ => (&[Heads, KvHeads], &[OneHead, OneHead]),
    };
    TensorMapping {
        name,
        dims,
        folder: interleaved(part(files[0], &[], QKV), OneHead, of_head, HEAD),
        gguf: part(files[1], before, QKV),
    }
}

const NEOX_WEIGHT: [&str; 2] = ["attention.query_key_value.weight", "attn_qkv.weight"];
const NEOX_BIAS: [&str; 2] = ["attention.query_key_value.bias", "attn_qkv.bias"];
const NEOX: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("input_layernorm.bias", [One, Hidden], "attn_norm.bias"),
    row("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
    row("post_attention_layernorm.bias", [One, Hidden], "ffn_norm.bias"),
    neox_qkv("self_attn.q_proj.weight", [Heads, Hidden], NEOX_WEIGHT, 0),
    neox_qkv("self_attn.k_proj.weight", [KvHeads, Hidden], NEOX_WEIGHT, 1),
    neox_qkv("self_attn.v_proj.weight", [KvHeads, Hidden], NEOX_WEIGHT, 2),
    neox_qkv("self_attn.q_proj.bias", [One, Heads], NEOX_BIAS, 0),
    neox_qkv("self_attn.k_proj.bias", [One, KvHeads], NEOX_BIAS, 1),
    neox_qkv("self_attn.v_proj.bias", [One, KvHeads], NEOX_BIAS, 2),
    neox("self_attn.o_proj.weight", [Hidden, Heads], "attention.dense.weight", "attn_output.weight"),
    neox("self_attn.o_proj.bias", [One, Hidden], "attention.dense.bias", "attn_output.bias"),
    neox("mlp.up_proj.weight", [Inner, Hidden], "mlp.dense_h_to_4h.weight", "ffn_up.weight"),
    neox("mlp.up_proj.bias", [One, Inner], "mlp.dense_h_to_4h.bias", "ffn_up.bias"),
    neox("mlp.down_proj.weight", [Hidden, Inner], "mlp.dense_4h_to_h.weight", "ffn_down.weight"),
    neox("mlp.down_proj.bias", [One, Hidden], "mlp.dense_4h_to_h.bias", "ffn_down.bias"),
];
const NEOX_OUTER: &[TensorMapping] = &[
    neox(EMBEDDING, [Vocab, Hidden], "gpt_neox.embed_in.weight", "token_embd.weight"),
    neox(NORM, [One, Hidden], "gpt_neox.final_layer_norm.weight", "output_norm.weight"),
    neox(NORM_BIAS, [One, Hidden], "gpt_neox.final_layer_norm.bias", "output_norm.bias"),
    neox(HEAD, [Vocab, Hidden], "embed_out.weight", "output.weight"),
];

/// The rows outside the layers.
pub(super) fn outer_rows(family: Family) -> &'static [TensorMapping] {
    match family {
        Family::Gpt2 => GPT2_OUTER,
        Family::GptNeox => NEOX_OUTER,
        Family::Lfm2 | Family::Lfm2Moe => recurrent::LFM2_OUTER,
        Family::Bamba => recurrent::BAMBA_OUTER,
        Family::NemotronH => recurrent::NEMOTRON_OUTER,
        _ => OUTER,
    }
}

/// The rows of a layer.
pub(super) fn layer_rows(spec: &ModelSpec, layer: &LayerSpec) -> Vec<&'static [TensorMapping]> {
    if spec.recurrence.is_some() || spec.convolution.is_some() {
        return recurrent::layer_rows(spec, layer);
    }
    let mut rows = match spec.family {
        Family::Gpt2 => return vec![GPT2],
        Family::GptNeox => return vec![NEOX],
        Family::Phi3 => return vec![NORMS, PHI3],
        Family::GptOss => return vec![OTHER_NORMS, ATTENTION, ATTENTION_BIAS, GPT_OSS],
        Family::Gemma2 | Family::Gemma3 => vec![GEMMA_NORMS, ATTENTION],
        Family::Olmo2 | Family::Olmo3 => vec![BEHIND, ATTENTION],
        Family::Glm4 => vec![GLM4_NORMS, ATTENTION],
        Family::Glm4Moe => vec![OTHER_NORMS, ATTENTION],
        Family::Cohere2 => vec![ONE_NORM, ATTENTION],
        _ => vec![NORMS, ATTENTION],
    };
    if spec.attention.has_bias {
        rows.push(ATTENTION_BIAS);
    }
    match spec.attention.query_key_norms {
        QueryKeyNorms::None => {}
        QueryKeyNorms::Heads => rows.push(HEAD_NORMS),
        QueryKeyNorms::Projection => rows.push(PROJECTION_NORMS),
    }
    rows.extend(mlp_rows(spec, layer));
    rows
}

fn mlp_rows(spec: &ModelSpec, layer: &LayerSpec) -> Vec<&'static [TensorMapping]> {
    match (layer.has_experts, spec.family) {
        (false, Family::Glm4) => vec![GATE_UP_FUSED],
        (false, _) => vec![MLP],
        (true, Family::Mixtral) => vec![MIXTRAL_EXPERTS],
        (true, Family::GraniteMoe) => vec![GRANITE_EXPERTS],
        (true, Family::Glm4Moe) if spec.experts.is_some_and(|of| of.shared > 0) => {
            vec![EXPERTS, GLM4_ROUTER, SHARED_EXPERT]
        }
        (true, Family::Glm4Moe) => vec![EXPERTS, GLM4_ROUTER],
        (true, _) => vec![EXPERTS],
    }
}
