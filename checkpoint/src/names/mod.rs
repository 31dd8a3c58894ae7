//! The names of a family's tensors in a Hugging Face folder and in a GGUF, their shapes, and which part of a file's
//! tensor each one is. A family's definition has the tables.
//!
//! The model uses the names on the left: Llama's, and additions by other families. A file may use another name for a
//! tensor, store several in one, or store it transposed.

pub(crate) mod mtp;
pub(crate) mod pooling;
pub(crate) mod rows;

use crate::config::{EncoderSpec, ExpertsSpec, LayerSpec, MixerSpec, ModelSpec, QueryKeyNorms, RecurrenceSpec};
use crate::pieces::CutUnit;
use crate::tensor::InterleavedRows;
use rows::{Dim, TensorCut, TensorMapping};
use std::collections::{BTreeMap, HashMap};

pub use mtp::MtpSpec;
pub use rows::{EMBEDDING, GATE_UP_TOGETHER, HEAD, LAYER_INPUTS, MTP_PRODUCT, POSITIONS};

/// One tensor that a model must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequiredTensor {
    pub name: String,
    /// None for tensors outside the layers: the embedding, the last norm, the head.
    pub layer: Option<u32>,
    pub shape: [usize; 2],
}

/// The formats of model files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A folder as transformers writes it for most families.
    Folder,
    /// A folder with the experts of a layer in one tensor.
    FolderOfStacks,
    /// The same with each expert's matrix transposed.
    FolderOfTurnedStacks,
    Gguf,
}

/// Where a file stores a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredTensor {
    /// The name of the file's tensor that contains it.
    pub file: String,
    /// Which of the experts' matrices in the file's tensor contains it, if that is a stack.
    pub stack: Option<StackIndex>,
    /// The shape of the requested tensor.
    pub shape: [usize; 2],
    /// How many rows (for a vector: elements) of the file's matrix come before it, and how many there are.
    pub before: usize,
    pub all: usize,
    /// Whether the file stores it transposed.
    pub is_turned: bool,
    /// Whether its rows are interleaved with those of others.
    pub woven: Option<InterleavedRows>,
    /// The units by which ranks divide its rows and columns.
    pub cut_by: [Option<CutUnit>; 2],
}

/// One of the matrices that a tensor consists of, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StackIndex {
    pub index: usize,
    pub n: usize,
}

impl StoredTensor {
    /// The first dimension counts the divided units: a vector is one row, and is divided by elements.
    pub fn is_vector(&self) -> bool {
        self.shape[0] == 1
    }

    /// The shape of the part of the file's tensor that contains its rows.
    pub fn shape_of_part(&self) -> [usize; 2] {
        let among = |n: usize| self.woven.map_or(n, |woven| n / woven.run * woven.period);
        if self.is_vector() { [1, among(self.shape[1])] } else { [among(self.shape[0]), self.shape[1]] }
    }

    /// The shape of the file's matrix that contains it.
    pub fn shape_of_matrix(&self) -> [usize; 2] {
        match (self.is_vector(), self.is_turned) {
            (true, _) => [1, self.all],
            (false, false) => [self.all, self.shape[1]],
            (false, true) => [self.shape[1], self.all],
        }
    }

    /// The shape that the file's tensor must have.
    pub fn shape_in_file(&self) -> [usize; 2] {
        let [rows, cols] = self.shape_of_matrix();
        [self.stack.map_or(1, |stack| stack.n) * rows, cols]
    }

    /// How many rows (for a vector: elements) of the file's tensor come before that matrix.
    pub fn before_matrix(&self) -> usize {
        let [rows, cols] = self.shape_of_matrix();
        self.stack.map_or(0, |stack| stack.index) * if rows == 1 { cols } else { rows }
    }
}

/// Every tensor that a model of this spec must have, layers in order.
pub fn required_tensors(spec: &ModelSpec) -> Vec<RequiredTensor> {
    // Names and shapes do not depend on the format.
    required_and_stored(spec, FileKind::Folder).into_iter().map(|(expected, _)| expected).collect()
}

/// The tensors that files of this kind have for a model of this spec, by their names there. More than two dimensions
/// count as rows.
pub fn tensors_in_files(spec: &ModelSpec, kind: FileKind) -> BTreeMap<String, [usize; 2]> {
    let named = |tensor: StoredTensor| (tensor.file.clone(), tensor.shape_in_file());
    stored_tensors(spec, kind).into_values().map(named).collect()
}

/// The location of each tensor, by its Hugging Face name.
pub(crate) fn stored_tensors(spec: &ModelSpec, format: FileKind) -> HashMap<String, StoredTensor> {
    required_and_stored(spec, format).into_iter().map(|(expected, source)| (expected.name, source)).collect()
}

fn required_and_stored(spec: &ModelSpec, format: FileKind) -> Vec<(RequiredTensor, StoredTensor)> {
    let of = &spec.family.definition().tensors;
    let inputs: &[TensorMapping] = if spec.layer_input > 0 { of.layer_inputs } else { &[] };
    let outer = of.outer.iter().filter(|row| is_in_model(spec, row)).chain(inputs);
    let mut all: Vec<_> = outer.map(|row| expected_tensor(spec, format, row, None, None)).collect();
    for (i, layer) in (0..).zip(&spec.layers) {
        all.extend(tensors_of_layer(spec, format, i, layer));
    }
    all.extend(pooling::tensors(&spec.pooling));
    all
}

/// Whether a model has a tensor outside the layers that some models of its family have.
fn is_in_model(spec: &ModelSpec, row: &TensorMapping) -> bool {
    let of_encoder = |of: fn(&EncoderSpec) -> u32| spec.encoder.as_ref().is_some_and(|encoder| of(encoder) > 0);
    match row.name {
        HEAD => !spec.tied_embeddings && spec.encoder.is_none(),
        rows::TOKEN_TYPES => of_encoder(|of| of.n_token_types),
        rows::DISTANCES => of_encoder(|of| of.n_distance_buckets),
        _ => true,
    }
}

fn tensors_of_layer(
    spec: &ModelSpec,
    format: FileKind,
    i: u32,
    layer: &LayerSpec,
) -> impl Iterator<Item = (RequiredTensor, StoredTensor)> {
    layer_rows(spec, i, layer).flat_map(move |row| {
        let is_of_expert = row.name.contains("{e}");
        let experts = if is_of_expert { (0..n_experts(spec)).map(Some).collect() } else { vec![None] };
        experts.into_iter().map(move |expert| expected_tensor(spec, format, row, Some(i), expert))
    })
}

/// The rows of a layer: its norms, its mixer, its MLP, its input.
fn layer_rows(spec: &ModelSpec, i: u32, layer: &LayerSpec) -> impl Iterator<Item = &'static TensorMapping> {
    let of = &spec.family.definition().tensors;
    let is_attention = layer.mixer.has_attention();
    let rule = layer.mixer.recurrence().map(|of| of.rule);
    let has_norms = is_attention && spec.attention.query_key_norms != QueryKeyNorms::None;
    let has_shared_expert = layer.has_experts && spec.experts.is_some_and(|of| of.shared > 0);
    let tables = [
        (true, of.norms),
        (is_attention, of.attention),
        (rule.is_some(), of.recurrence),
        (matches!(layer.mixer, MixerSpec::Convolution(_)), of.convolution),
        (is_attention && spec.attention.has_bias, of.bias),
        (has_norms, of.query_key_norms),
        (layer.has_mlp, if layer.has_experts { of.experts } else { of.mlp }),
        (has_shared_expert, of.shared_expert),
        (spec.layer_input > 0, of.layer_input),
    ];
    let (reads_others, has_values) = (layer.kv_of.is_some(), !spec.kv_heads_of(layer).values_are_keys);
    let skips_norm = i == 0 && spec.encoder.is_some_and(|of| of.skips_first_norm);
    let is_stored = move |row: &&TensorMapping| match row.name {
        "input_layernorm.weight" | "input_layernorm.bias" => !skips_norm,
        "self_attn.k_proj.weight" | "self_attn.k_norm.weight" => !reads_others,
        "self_attn.v_proj.weight" => !reads_others && has_values,
        "linear_attn.norm.weight" => rule.is_none_or(|rule| rule.has_norm()),
        _ => true,
    };
    let rows = tables.into_iter().filter(|(exists, _)| *exists).flat_map(|(_, rows)| rows.iter().copied().flatten());
    rows.filter(is_stored)
}

fn n_experts(spec: &ModelSpec) -> u32 {
    spec.experts.map_or(0, |ExpertsSpec { n, .. }| n)
}

fn expected_tensor(
    spec: &ModelSpec,
    format: FileKind,
    row: &TensorMapping,
    layer: Option<u32>,
    expert: Option<u32>,
) -> (RequiredTensor, StoredTensor) {
    let place = match format {
        FileKind::Folder => row.folder,
        FileKind::FolderOfStacks => row.stacked_source(),
        FileKind::FolderOfTurnedStacks => row.turned_stacked_source(),
        FileKind::Gguf => row.gguf,
    };
    let prefix = match format {
        FileKind::Gguf => "blk",
        _ => spec.family.definition().tensors.layers,
    };
    let in_layer = |prefix: &str, name: &str| {
        let name = expert.map_or_else(|| name.to_owned(), |e| name.replace("{e}", &e.to_string()));
        layer.map_or_else(|| name.clone(), |layer| format!("{prefix}.{layer}.{name}"))
    };
    let shape = row.dims.map(|dim| length(dim, spec, layer));
    let sum = |dims: &[Dim]| dims.iter().map(|dim| length(*dim, spec, layer)).sum::<usize>();
    let unit = if shape[0] == 1 { shape[1] } else { shape[0] };
    let rows_of = |all: &[Dim]| if all.is_empty() { unit } else { sum(all) };
    let (before, all) = match place.cut {
        TensorCut::Whole => (0, unit),
        TensorCut::Rows { before, all } | TensorCut::Expert { before, all } => (sum(before), rows_of(all)),
    };
    let is_stack = matches!(place.cut, TensorCut::Expert { .. });
    let stack = is_stack.then(|| StackIndex { index: expert.unwrap_or(0) as usize, n: n_experts(spec) as usize });
    let weave =
        |(run, before, all)| InterleavedRows { run: length(run, spec, layer), before: sum(before), period: sum(all) };
    let woven = place.woven.map(weave);
    let (file, is_turned, cut_by) = (in_layer(prefix, place.file), place.is_turned, cut_by(row.dims));
    let source = StoredTensor { file, stack, shape, before, all, is_turned, woven, cut_by };
    (RequiredTensor { name: in_layer("model.layers", row.name), layer, shape }, source)
}

/// Every rank reads a vector whole, and a rank reads each of its experts whole.
fn cut_by(dims: [Dim; 2]) -> [Option<CutUnit>; 2] {
    let of_dim = |dim| match dim {
        Dim::Heads => Some(CutUnit::Heads),
        Dim::KvHeads => Some(CutUnit::KvHeads),
        Dim::Keys => Some(CutUnit::Keys),
        Dim::Values | Dim::Convolved => Some(CutUnit::Values),
        Dim::StateHeads => Some(CutUnit::StateHeads),
        Dim::Inner => Some(CutUnit::Inner),
        Dim::SharedInner => Some(CutUnit::SharedInner),
        Dim::Vocab => Some(CutUnit::Vocabulary),
        Dim::One | Dim::Hidden | Dim::TwiceHidden | Dim::OneHead | Dim::OneOfHeads => None,
        Dim::OneKey | Dim::OneValue | Dim::ValuesOfKey | Dim::HeadsOfKey | Dim::Taps => None,
        Dim::ExpertInner | Dim::Experts | Dim::Context | Dim::LayerInput | Dim::LayerInputs => None,
        Dim::BeforeFirst | Dim::TokenTypes | Dim::DistanceBuckets | Dim::QueryHeads => None,
    };
    if dims[0] == Dim::One { [None, None] } else { dims.map(of_dim) }
}

fn length(dim: Dim, spec: &ModelSpec, layer: Option<u32>) -> usize {
    let layer = layer.map_or(&LayerSpec::EMPTY, |layer| &spec.layers[layer as usize]);
    let kv_heads = spec.kv_heads_of(layer);
    let heads = |n: u32| n as usize * kv_heads.dim as usize;
    let state = |of: fn(&RecurrenceSpec) -> u32| spec.recurrence().as_ref().map_or(0, of);
    let of_encoder = |of: fn(&EncoderSpec) -> u32| spec.encoder.as_ref().map_or(0, of);
    let length = match dim {
        Dim::One => 1,
        Dim::Hidden => spec.hidden,
        Dim::TwiceHidden => 2 * spec.hidden,
        Dim::Heads => return heads(spec.n_heads),
        Dim::KvHeads => return heads(kv_heads.n),
        Dim::OneHead => kv_heads.dim,
        Dim::Inner => spec.inner_of(layer),
        Dim::OneOfHeads => spec.n_heads,
        Dim::SharedInner => spec.experts.map_or(0, |experts| experts.shared),
        Dim::ExpertInner => spec.experts.map_or(0, |experts| experts.inner),
        Dim::Experts => n_experts(spec),
        Dim::Keys => state(|of| of.n_key_heads * of.key_dim),
        Dim::Values => state(|of| of.n_heads * of.value_dim),
        Dim::StateHeads => state(|of| of.n_heads),
        Dim::OneKey => state(|of| of.key_dim),
        Dim::OneValue => state(|of| of.value_dim),
        Dim::ValuesOfKey => state(|of| of.n_heads / of.n_key_heads * of.value_dim),
        Dim::HeadsOfKey => state(|of| of.n_heads / of.n_key_heads),
        Dim::Convolved => spec.state_heads().map_or(0, |of| of.n * of.dim),
        Dim::Taps => spec.state_mixer().map_or(0, |mixer| mixer.taps()),
        Dim::Context => spec.context,
        Dim::BeforeFirst => of_encoder(|of| of.n_rows_before_first),
        Dim::TokenTypes => of_encoder(|of| of.n_token_types),
        Dim::DistanceBuckets => of_encoder(|of| of.n_distance_buckets),
        Dim::QueryHeads => spec.n_heads,
        Dim::Vocab => spec.vocab,
        Dim::LayerInput => spec.layer_input,
        Dim::LayerInputs => spec.layer_input * spec.n_layers,
    };
    length as usize
}
