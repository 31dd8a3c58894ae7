//! The names of a family's tensors in a Hugging Face folder and in a GGUF, their shapes, and which part of a file's
//! tensor each is. One table per kind of layer, from which everything else follows.
//!
//! The model asks by the names on the left, which are Llama's and what other families add to them. A file may use
//! another name for a tensor, store several in one, or store it transposed.

use crate::config::{ExpertsSpec, Family, LayerSpec, ModelSpec};
use crate::pieces::CutBy;
use std::collections::HashMap;

/// A length that the spec determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dim {
    One,
    Hidden,
    Heads,
    KvHeads,
    OneHead,
    Inner,
    ExpertInner,
    Experts,
    Context,
    Vocab,
}

use Dim::{Context, ExpertInner, Experts, Heads, Hidden, Inner, KvHeads, One, OneHead, Vocab};

/// Our name, the folder's name, the GGUF's name, `[rows, cols]`.
struct Row {
    name: &'static str,
    dims: [Dim; 2],
    folder: Place,
    gguf: Place,
}

/// Where a format stores it. `{e}` is the expert's index.
#[derive(Clone, Copy)]
struct Place {
    file: &'static str,
    cut: Cut,
    is_turned: bool,
}

#[derive(Clone, Copy)]
enum Cut {
    Whole,
    /// A range of the rows (of a vector: of the elements): those after `before`, of `all`.
    Rows {
        before: &'static [Dim],
        all: &'static [Dim],
    },
    /// One of the experts' matrices, which are stored one after another.
    Expert,
}

const fn at(file: &'static str) -> Place {
    Place { file, cut: Cut::Whole, is_turned: false }
}

const fn part(file: &'static str, before: &'static [Dim], all: &'static [Dim]) -> Place {
    Place { file, cut: Cut::Rows { before, all }, is_turned: false }
}

const fn turned(place: Place) -> Place {
    Place { is_turned: true, ..place }
}

const fn stacked(file: &'static str) -> Place {
    Place { file, cut: Cut::Expert, is_turned: false }
}

/// A tensor with the same name in a folder as here.
const fn row(name: &'static str, dims: [Dim; 2], gguf: &'static str) -> Row {
    Row { name, dims, folder: at(name), gguf: at(gguf) }
}

const NORMS: &[Row] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
];
const GEMMA_NORMS: &[Row] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
    row("pre_feedforward_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
    row("post_feedforward_layernorm.weight", [One, Hidden], "post_ffw_norm.weight"),
];
const ATTENTION: &[Row] = &[
    row("self_attn.q_proj.weight", [Heads, Hidden], "attn_q.weight"),
    row("self_attn.k_proj.weight", [KvHeads, Hidden], "attn_k.weight"),
    row("self_attn.v_proj.weight", [KvHeads, Hidden], "attn_v.weight"),
    row("self_attn.o_proj.weight", [Hidden, Heads], "attn_output.weight"),
];
const ATTENTION_BIAS: &[Row] = &[
    row("self_attn.q_proj.bias", [One, Heads], "attn_q.bias"),
    row("self_attn.k_proj.bias", [One, KvHeads], "attn_k.bias"),
    row("self_attn.v_proj.bias", [One, KvHeads], "attn_v.bias"),
];
const HEAD_NORMS: &[Row] = &[
    row("self_attn.q_norm.weight", [One, OneHead], "attn_q_norm.weight"),
    row("self_attn.k_norm.weight", [One, OneHead], "attn_k_norm.weight"),
];
const MLP: &[Row] = &[
    row("mlp.gate_proj.weight", [Inner, Hidden], "ffn_gate.weight"),
    row("mlp.up_proj.weight", [Inner, Hidden], "ffn_up.weight"),
    row("mlp.down_proj.weight", [Hidden, Inner], "ffn_down.weight"),
];

const fn expert(name: &'static str, dims: [Dim; 2], folder: &'static str, gguf: &'static str) -> Row {
    Row { name, dims, folder: at(folder), gguf: stacked(gguf) }
}

const EXPERTS: &[Row] = &[
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
const MIXTRAL_EXPERTS: &[Row] = &[
    Row {
        name: "mlp.gate.weight",
        dims: [Experts, Hidden],
        folder: at("block_sparse_moe.gate.weight"),
        gguf: at("ffn_gate_inp.weight"),
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

const fn fused(name: &'static str, dims: [Dim; 2], files: [&'static str; 2], before: &'static [Dim]) -> Row {
    let all = if matches!(dims[0], Inner) { GATE_UP } else { QKV };
    Row { name, dims, folder: part(files[0], before, all), gguf: part(files[1], before, all) }
}

const QKV_FILES: [&str; 2] = ["self_attn.qkv_proj.weight", "attn_qkv.weight"];
/// Phi-3's converter stores both halves under the name of one.
const GATE_UP_FILES: [&str; 2] = ["mlp.gate_up_proj.weight", "ffn_up.weight"];

const PHI3: &[Row] = &[
    fused("self_attn.q_proj.weight", [Heads, Hidden], QKV_FILES, &[]),
    fused("self_attn.k_proj.weight", [KvHeads, Hidden], QKV_FILES, &[Heads]),
    fused("self_attn.v_proj.weight", [KvHeads, Hidden], QKV_FILES, &[Heads, KvHeads]),
    row("self_attn.o_proj.weight", [Hidden, Heads], "attn_output.weight"),
    fused("mlp.gate_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[]),
    fused("mlp.up_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[Inner]),
    row("mlp.down_proj.weight", [Hidden, Inner], "ffn_down.weight"),
];

const fn gpt2(name: &'static str, dims: [Dim; 2], folder: Place, gguf: &'static str) -> Row {
    Row { name, dims, folder, gguf: Place { file: gguf, is_turned: false, ..folder } }
}

/// GPT-2's matrices are stored transposed in a folder, but not in a GGUF.
const GPT2: &[Row] = &[
    gpt2("input_layernorm.weight", [One, Hidden], at("ln_1.weight"), "attn_norm.weight"),
    gpt2("input_layernorm.bias", [One, Hidden], at("ln_1.bias"), "attn_norm.bias"),
    gpt2("self_attn.q_proj.weight", [Heads, Hidden], turned(part("attn.c_attn.weight", &[], QKV)), "attn_qkv.weight"),
    gpt2(
        "self_attn.k_proj.weight",
        [KvHeads, Hidden],
        turned(part("attn.c_attn.weight", &[Heads], QKV)),
        "attn_qkv.weight",
    ),
    gpt2(
        "self_attn.v_proj.weight",
        [KvHeads, Hidden],
        turned(part("attn.c_attn.weight", &[Heads, KvHeads], QKV)),
        "attn_qkv.weight",
    ),
    gpt2("self_attn.q_proj.bias", [One, Heads], part("attn.c_attn.bias", &[], QKV), "attn_qkv.bias"),
    gpt2("self_attn.k_proj.bias", [One, KvHeads], part("attn.c_attn.bias", &[Heads], QKV), "attn_qkv.bias"),
    gpt2("self_attn.v_proj.bias", [One, KvHeads], part("attn.c_attn.bias", &[Heads, KvHeads], QKV), "attn_qkv.bias"),
    gpt2("self_attn.o_proj.weight", [Hidden, Heads], turned(at("attn.c_proj.weight")), "attn_output.weight"),
    gpt2("self_attn.o_proj.bias", [One, Hidden], at("attn.c_proj.bias"), "attn_output.bias"),
    gpt2("post_attention_layernorm.weight", [One, Hidden], at("ln_2.weight"), "ffn_norm.weight"),
    gpt2("post_attention_layernorm.bias", [One, Hidden], at("ln_2.bias"), "ffn_norm.bias"),
    gpt2("mlp.up_proj.weight", [Inner, Hidden], turned(at("mlp.c_fc.weight")), "ffn_up.weight"),
    gpt2("mlp.up_proj.bias", [One, Inner], at("mlp.c_fc.bias"), "ffn_up.bias"),
    gpt2("mlp.down_proj.weight", [Hidden, Inner], turned(at("mlp.c_proj.weight")), "ffn_down.weight"),
    gpt2("mlp.down_proj.bias", [One, Hidden], at("mlp.c_proj.bias"), "ffn_down.bias"),
];

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const POSITIONS: &str = "model.embed_positions.weight";
pub const NORM: &str = "model.norm.weight";
pub const NORM_BIAS: &str = "model.norm.bias";
pub const HEAD: &str = "lm_head.weight";

const OUTER: &[Row] = &[
    row(EMBEDDING, [Vocab, Hidden], "token_embd.weight"),
    row(NORM, [One, Hidden], "output_norm.weight"),
    row(HEAD, [Vocab, Hidden], "output.weight"),
];
const GPT2_OUTER: &[Row] = &[
    gpt2(EMBEDDING, [Vocab, Hidden], at("transformer.wte.weight"), "token_embd.weight"),
    gpt2(POSITIONS, [Context, Hidden], at("transformer.wpe.weight"), "position_embd.weight"),
    gpt2(NORM, [One, Hidden], at("transformer.ln_f.weight"), "output_norm.weight"),
    gpt2(NORM_BIAS, [One, Hidden], at("transformer.ln_f.bias"), "output_norm.bias"),
    gpt2(HEAD, [Vocab, Hidden], at("lm_head.weight"), "output.weight"),
];

/// The rows of a layer.
fn layer_rows(spec: &ModelSpec, layer: &LayerSpec) -> Vec<&'static [Row]> {
    let mut rows = match spec.family {
        Family::Gpt2 => return vec![GPT2],
        Family::Phi3 => return vec![NORMS, PHI3],
        Family::Gemma2 | Family::Gemma3 => vec![GEMMA_NORMS, ATTENTION],
        _ => vec![NORMS, ATTENTION],
    };
    if spec.attention.has_bias {
        rows.push(ATTENTION_BIAS);
    }
    if spec.attention.has_head_norms {
        rows.push(HEAD_NORMS);
    }
    rows.push(match (layer.has_experts, spec.family) {
        (false, _) => MLP,
        (true, Family::Mixtral) => MIXTRAL_EXPERTS,
        (true, _) => EXPERTS,
    });
    rows
}

/// One tensor that a model must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub name: String,
    /// None for tensors outside the layers: the embedding, the last norm, the head.
    pub layer: Option<u32>,
    pub shape: [usize; 2],
}

/// The two formats of model files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    Folder,
    Gguf,
}

/// Where a file stores a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredTensor {
    /// The name of the file's tensor that contains it.
    pub file: String,
    /// The shape of the requested tensor.
    pub shape: [usize; 2],
    /// How many rows (of a vector: elements) of the file's tensor come before it, and how many there are.
    pub before: usize,
    pub all: usize,
    /// Whether the file stores it transposed.
    pub is_turned: bool,
    /// The units by which ranks divide its rows and columns.
    pub cut_by: [Option<CutBy>; 2],
}

impl StoredTensor {
    /// The first dimension counts what is divided: a vector is one row, and is divided by elements.
    pub fn is_vector(&self) -> bool {
        self.shape[0] == 1
    }

    /// The shape that the file's tensor must have.
    pub fn shape_in_file(&self) -> [usize; 2] {
        match (self.is_vector(), self.is_turned) {
            (true, _) => [1, self.all],
            (false, false) => [self.all, self.shape[1]],
            (false, true) => [self.shape[1], self.all],
        }
    }
}

/// Every tensor that a model of this spec must have, layers in order.
pub fn expected(spec: &ModelSpec) -> Vec<Expected> {
    // Names and shapes do not depend on the format.
    all(spec, FileKind::Folder).into_iter().map(|(expected, _)| expected).collect()
}

/// The location of each tensor, by its Hugging Face name.
pub(crate) fn sources(spec: &ModelSpec, format: FileKind) -> HashMap<String, StoredTensor> {
    all(spec, format).into_iter().map(|(expected, source)| (expected.name, source)).collect()
}

fn all(spec: &ModelSpec, format: FileKind) -> Vec<(Expected, StoredTensor)> {
    let outer = if spec.family == Family::Gpt2 { GPT2_OUTER } else { OUTER };
    let outer = outer.iter().filter(|row| row.name != HEAD || !spec.tied_embeddings);
    let mut all: Vec<_> = outer.map(|row| one(spec, format, row, None, None)).collect();
    for (i, layer) in (0..).zip(&spec.layers) {
        for row in layer_rows(spec, layer).into_iter().flatten() {
            match row.name.contains("{e}") {
                false => all.push(one(spec, format, row, Some(i), None)),
                true => all.extend((0..n_experts(spec)).map(|e| one(spec, format, row, Some(i), Some(e)))),
            }
        }
    }
    all
}

fn n_experts(spec: &ModelSpec) -> u32 {
    spec.experts.map_or(0, |ExpertsSpec { n, .. }| n)
}

fn one(
    spec: &ModelSpec,
    format: FileKind,
    row: &Row,
    layer: Option<u32>,
    expert: Option<u32>,
) -> (Expected, StoredTensor) {
    let place = if format == FileKind::Gguf { row.gguf } else { row.folder };
    let prefix = match (format, spec.family) {
        (FileKind::Gguf, _) => "blk",
        (FileKind::Folder, Family::Gpt2) => "transformer.h",
        (FileKind::Folder, _) => "model.layers",
    };
    let in_layer = |prefix: &str, name: &str| {
        let name = expert.map_or_else(|| name.to_owned(), |e| name.replace("{e}", &e.to_string()));
        layer.map_or_else(|| name.clone(), |layer| format!("{prefix}.{layer}.{name}"))
    };
    let shape = row.dims.map(|dim| length(dim, spec));
    let sum = |dims: &[Dim]| dims.iter().map(|dim| length(*dim, spec)).sum();
    let unit = if shape[0] == 1 { shape[1] } else { shape[0] };
    let (before, all) = match place.cut {
        Cut::Whole => (0, unit),
        Cut::Rows { before, all } => (sum(before), sum(all)),
        Cut::Expert => (expert.unwrap_or(0) as usize * unit, n_experts(spec) as usize * unit),
    };
    let (file, is_turned, cut_by) = (in_layer(prefix, place.file), place.is_turned, cut_by(row.dims));
    let source = StoredTensor { file, shape, before, all, is_turned, cut_by };
    (Expected { name: in_layer("model.layers", row.name), layer, shape }, source)
}

/// Every rank reads a vector whole, and the rank that has an expert reads that whole.
fn cut_by(dims: [Dim; 2]) -> [Option<CutBy>; 2] {
    let of_dim = |dim| match dim {
        Dim::Heads => Some(CutBy::Heads),
        Dim::KvHeads => Some(CutBy::KvHeads),
        Dim::Inner => Some(CutBy::Inner),
        Dim::Vocab => Some(CutBy::Vocabulary),
        Dim::One | Dim::Hidden | Dim::OneHead | Dim::ExpertInner | Dim::Experts | Dim::Context => None,
    };
    if dims[0] == Dim::One { [None, None] } else { dims.map(of_dim) }
}

fn length(dim: Dim, spec: &ModelSpec) -> usize {
    let heads = |n: u32| n as usize * spec.head_dim as usize;
    let length = match dim {
        Dim::One => 1,
        Dim::Hidden => spec.hidden,
        Dim::Heads => return heads(spec.n_heads),
        Dim::KvHeads => return heads(spec.n_kv_heads),
        Dim::OneHead => spec.head_dim,
        Dim::Inner => spec.inner,
        Dim::ExpertInner => spec.experts.map_or(0, |experts| experts.inner),
        Dim::Experts => n_experts(spec),
        Dim::Context => spec.context,
        Dim::Vocab => spec.vocab,
    };
    length as usize
}
