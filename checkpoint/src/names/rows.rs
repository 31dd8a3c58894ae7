//! The vocabulary of tensor tables: where the two kinds of files store a tensor, and the tables that families share.

/// A length that the spec determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    One,
    Hidden,
    /// An embedding and a hidden state, one behind the other.
    TwiceHidden,
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
    /// The rows of a table of positions before that of the first token.
    BeforeFirst,
    TokenTypes,
    DistanceBuckets,
    /// One number for each query head, in each row of a table.
    QueryHeads,
    Vocab,
    /// The width of each layer's own input, and that of all layers together.
    LayerInput,
    LayerInputs,
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

use Dim::{ExpertInner, Experts, Heads, Hidden, Inner, KvHeads, One, OneHead, TwiceHidden, Vocab};

/// Our name, the folder's name, the GGUF's name, `[rows, cols]`.
pub struct TensorMapping {
    pub name: &'static str,
    pub dims: [Dim; 2],
    pub folder: TensorSource,
    pub gguf: TensorSource,
}

/// Where a format stores it. `{e}` is the expert's index.
#[derive(Clone, Copy)]
pub struct TensorSource {
    pub file: &'static str,
    pub cut: TensorCut,
    pub is_turned: bool,
    /// Its rows stand between those of other matrices: runs of so many, after others, in all of which there is one.
    pub woven: Option<(Dim, &'static [Dim], &'static [Dim])>,
}

#[derive(Clone, Copy)]
pub enum TensorCut {
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

pub const fn whole(file: &'static str) -> TensorSource {
    TensorSource { file, cut: TensorCut::Whole, is_turned: false, woven: None }
}

pub const fn part(file: &'static str, before: &'static [Dim], all: &'static [Dim]) -> TensorSource {
    TensorSource { file, cut: TensorCut::Rows { before, all }, is_turned: false, woven: None }
}

pub const fn transposed(place: TensorSource) -> TensorSource {
    TensorSource { is_turned: true, ..place }
}

pub const fn stacked(file: &'static str) -> TensorSource {
    expert_part(file, &[], &[])
}

/// With an empty `all` the whole of each expert's matrix.
pub const fn expert_part(file: &'static str, before: &'static [Dim], all: &'static [Dim]) -> TensorSource {
    TensorSource { file, cut: TensorCut::Expert { before, all }, is_turned: false, woven: None }
}

pub const fn interleaved(place: TensorSource, run: Dim, before: &'static [Dim], all: &'static [Dim]) -> TensorSource {
    TensorSource { woven: Some((run, before, all)), ..place }
}

/// A tensor with the same name in a folder as here.
pub const fn row(name: &'static str, dims: [Dim; 2], gguf: &'static str) -> TensorMapping {
    renamed(name, dims, name, gguf)
}

/// A tensor whose name in a folder differs from the one here.
pub const fn renamed(name: &'static str, dims: [Dim; 2], folder: &'static str, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder: whole(folder), gguf: whole(gguf) }
}

pub const NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "ffn_norm.weight"),
];
pub const ATTENTION: &[TensorMapping] = &[
    row("self_attn.q_proj.weight", [Heads, Hidden], "attn_q.weight"),
    row("self_attn.k_proj.weight", [KvHeads, Hidden], "attn_k.weight"),
    row("self_attn.v_proj.weight", [KvHeads, Hidden], "attn_v.weight"),
    row("self_attn.o_proj.weight", [Hidden, Heads], "attn_output.weight"),
];
pub const ATTENTION_BIAS: &[TensorMapping] = &[
    row("self_attn.q_proj.bias", [One, Heads], "attn_q.bias"),
    row("self_attn.k_proj.bias", [One, KvHeads], "attn_k.bias"),
    row("self_attn.v_proj.bias", [One, KvHeads], "attn_v.bias"),
];
pub const HEAD_NORMS: &[TensorMapping] = &[
    row("self_attn.q_norm.weight", [One, OneHead], "attn_q_norm.weight"),
    row("self_attn.k_norm.weight", [One, OneHead], "attn_k_norm.weight"),
];
pub const MLP: &[TensorMapping] = &[
    row("mlp.gate_proj.weight", [Inner, Hidden], "ffn_gate.weight"),
    row("mlp.up_proj.weight", [Inner, Hidden], "ffn_up.weight"),
    row("mlp.down_proj.weight", [Hidden, Inner], "ffn_down.weight"),
];

pub const fn expert(name: &'static str, dims: [Dim; 2], folder: &'static str, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder: whole(folder), gguf: stacked(gguf) }
}

/// The same of a family whose folders also keep all experts in one tensor.
pub const fn stacked_expert(
    name: &'static str,
    dims: [Dim; 2],
    folder: &'static str,
    gguf: &'static str,
) -> TensorMapping {
    TensorMapping { name, dims, folder: stacked(folder), gguf: stacked(gguf) }
}

pub const EXPERTS: &[TensorMapping] = &[
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
pub const EXPERTS_TOGETHER: [(&str, TensorSource); 3] = [
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

    /// The same where each expert's matrix is transposed.
    pub fn turned_stacked_source(&self) -> TensorSource {
        let place = self.stacked_source();
        let is_matrix = matches!(place.cut, TensorCut::Expert { .. }) && self.dims[0] != One;
        if is_matrix { transposed(place) } else { place }
    }
}

pub const QKV: &[Dim] = &[Heads, KvHeads, KvHeads];
pub const GATE_UP: &[Dim] = &[Inner, Inner];

pub const fn fused(
    name: &'static str,
    dims: [Dim; 2],
    files: [&'static str; 2],
    before: &'static [Dim],
) -> TensorMapping {
    let all = if matches!(dims[0], Inner) { GATE_UP } else { QKV };
    TensorMapping { name, dims, folder: part(files[0], before, all), gguf: part(files[1], before, all) }
}

/// The converter stores both halves under the name of one.
pub const GATE_UP_FILES: [&str; 2] = ["mlp.gate_up_proj.weight", "ffn_up.weight"];

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const POSITIONS: &str = "model.embed_positions.weight";
pub const LAYER_INPUTS: &str = "model.embed_tokens_per_layer.weight";
pub const TOKEN_TYPES: &str = "model.embed_types.weight";
pub const DISTANCES: &str = "model.distances.weight";
pub const EMBEDDING_NORM: &str = "model.embed_norm.weight";
pub const EMBEDDING_NORM_BIAS: &str = "model.embed_norm.bias";
pub const NORM: &str = "model.norm.weight";
pub const NORM_BIAS: &str = "model.norm.bias";
pub const HEAD: &str = "lm_head.weight";

pub const OUTER: &[TensorMapping] = &[
    row(EMBEDDING, [Vocab, Hidden], "token_embd.weight"),
    row(NORM, [One, Hidden], "output_norm.weight"),
    row(HEAD, [Vocab, Hidden], "output.weight"),
];
/// In GGUFs of some families the second norm has the name of one behind attention.
pub const OTHER_NORMS: &[TensorMapping] = &[
    row("input_layernorm.weight", [One, Hidden], "attn_norm.weight"),
    row("post_attention_layernorm.weight", [One, Hidden], "post_attention_norm.weight"),
];
pub const GATE_UP_FUSED: &[TensorMapping] = &[
    fused("mlp.gate_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[]),
    fused("mlp.up_proj.weight", [Inner, Hidden], GATE_UP_FILES, &[Inner]),
    row("mlp.down_proj.weight", [Hidden, Inner], "ffn_down.weight"),
];
pub const OF_EXPERT: &[Dim] = &[ExpertInner, ExpertInner];
pub const fn tensor(name: &'static str, dims: [Dim; 2], place: TensorSource) -> TensorMapping {
    TensorMapping { name, dims, folder: place, gguf: place }
}

/// A tensor that both kinds of files have in the same form.
pub const fn stored(name: &'static str, dims: [Dim; 2], folder: TensorSource, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims, folder, gguf: TensorSource { file: gguf, ..folder } }
}

/// A tensor with the same name in the folder.
pub const fn same(name: &'static str, dims: [Dim; 2]) -> TensorMapping {
    tensor(name, dims, whole(name))
}

/// Where files store the layer that predicts one token further. `{n}` is the number of the model's layers, behind which
/// the layer has its number.
pub struct MtpTables {
    /// The path in a folder of what the layer has in common with the model's layers.
    pub layer: &'static str,
    /// What it has besides.
    pub outer: &'static [TensorMapping],
    /// What only some files have; elsewhere it is the model's.
    pub ends: &'static [TensorMapping],
}

/// The path of the layer in a GGUF.
pub const MTP_LAYER_OF_GGUF: &str = "blk.{n}";
pub const MTP_PRODUCT: &str = "mtp.fc.weight";
pub const MTP_EMBEDDING: &str = "mtp.embed_tokens.weight";
pub const MTP_HEAD: &str = "mtp.lm_head.weight";

const MTP_EMBEDDING_OF_GGUF: &str = "blk.{n}.nextn.embed_tokens.weight";
const MTP_HEAD_OF_GGUF: &str = "blk.{n}.nextn.shared_head_head.weight";

/// With the names of Qwen.
pub const MTP: MtpTables = MtpTables {
    layer: "mtp.layers.0",
    outer: &[
        row(MTP_PRODUCT, [Hidden, TwiceHidden], "blk.{n}.nextn.eh_proj.weight"),
        row("mtp.pre_fc_norm_embedding.weight", [One, Hidden], "blk.{n}.nextn.enorm.weight"),
        row("mtp.pre_fc_norm_hidden.weight", [One, Hidden], "blk.{n}.nextn.hnorm.weight"),
        row("mtp.norm.weight", [One, Hidden], "blk.{n}.nextn.shared_head_norm.weight"),
    ],
    ends: &[
        row(MTP_EMBEDDING, [Vocab, Hidden], MTP_EMBEDDING_OF_GGUF),
        row(MTP_HEAD, [Vocab, Hidden], MTP_HEAD_OF_GGUF),
    ],
};

/// With the names of DeepSeek.
pub const MTP_BEHIND_LAYERS: MtpTables = MtpTables {
    layer: "model.layers.{n}",
    outer: &[
        mtp(MTP.outer[0].name, MTP.outer[0].dims, "model.layers.{n}.eh_proj.weight", MTP.outer[0].gguf),
        mtp(MTP.outer[1].name, MTP.outer[1].dims, "model.layers.{n}.enorm.weight", MTP.outer[1].gguf),
        mtp(MTP.outer[2].name, MTP.outer[2].dims, "model.layers.{n}.hnorm.weight", MTP.outer[2].gguf),
        mtp(MTP.outer[3].name, MTP.outer[3].dims, "model.layers.{n}.shared_head.norm.weight", MTP.outer[3].gguf),
    ],
    ends: &[
        renamed(MTP_EMBEDDING, [Vocab, Hidden], "model.layers.{n}.embed_tokens.weight", MTP_EMBEDDING_OF_GGUF),
        renamed(MTP_HEAD, [Vocab, Hidden], "model.layers.{n}.shared_head.head.weight", MTP_HEAD_OF_GGUF),
    ],
};

const fn mtp(name: &'static str, dims: [Dim; 2], folder: &'static str, gguf: TensorSource) -> TensorMapping {
    TensorMapping { name, dims, folder: whole(folder), gguf }
}
