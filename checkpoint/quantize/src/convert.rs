//! Reads a model and writes it with the types of a recipe: metadata as it is, and tensors in pieces, so that memory
//! holds a few rows of one tensor at a time.

use crate::decode::{can_decode, decode_row};
use crate::encode::{EncodeError, encode_row};
use crate::error::{Error, Result};
use crate::recipe::{Recipe, RecipeInputs, TypeChooser, has_values, is_changed, layer_of};
use crate::writer::{GgufWriter, TensorHead, ValueList};
use checkpoint::JoinedGguf;
use checkpoint::gguf::{TensorEntry, type_number};
use std::collections::HashMap;
use std::path::Path;
use types::Dtype;

/// Keys that the written file does not take from the model. It has no parts, and other types.
const DROPPED: [&str; 5] =
    ["general.file_type", "general.quantization_version", "split.no", "split.count", "split.tensors.count"];
/// The version of the block types; llama.cpp requires it.
const QUANTIZATION_VERSION: u32 = 2;
const ALIGNMENT_DEFAULT: u64 = 32;
/// Bytes of a tensor that are read at once.
const PIECE_BYTES: usize = 32 << 20;

/// The tensor that is being written, and how many of the model's bytes are done.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeProgress<'a> {
    pub tensor: &'a str,
    pub done: u64,
    pub total: u64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizeReport {
    pub bytes_before: u64,
    pub bytes_after: u64,
    /// For each type the number of its tensors, in the order in which they first occur.
    pub types: Vec<(Dtype, usize)>,
}

/// A tensor of the model, and its type in the written file.
struct PlannedTensor<'a> {
    name: &'a str,
    entry: &'a TensorEntry,
    dtype: Dtype,
}

impl PlannedTensor<'_> {
    fn columns(&self) -> usize {
        self.entry.dims.last().map_or(0, |columns| *columns as usize)
    }

    fn rows(&self) -> usize {
        self.entry.dims.iter().rev().skip(1).product::<u64>() as usize
    }

    fn n_bytes(&self) -> u64 {
        (self.rows() * self.dtype.row_bytes(self.columns())) as u64
    }
}

/// Writes the GGUF `input` to `output`, with the types of a recipe. Replaces a file that is there.
pub fn file(
    input: &Path,
    output: &Path,
    recipe: Recipe,
    progress: &mut dyn FnMut(QuantizeProgress<'_>),
) -> Result<QuantizeReport> {
    if input.is_dir() {
        return Err(Error::Folder { path: input.to_owned() });
    }
    let model = JoinedGguf::open(input)?;
    check_output(&model, output)?;
    let tensors = plan(&model, input, recipe)?;
    let alignment = unsigned(&model, input, "general.alignment")?.unwrap_or(ALIGNMENT_DEFAULT);
    let heads: Vec<TensorHead<'_>> = tensors.iter().map(head).collect();
    let mut writer = GgufWriter::create(output, &values(&model, recipe), &heads, alignment)?;
    let mut done = 0;
    let total: u64 = tensors.iter().map(|tensor| tensor.entry.bytes.len() as u64).sum();
    for tensor in &tensors {
        let mut advance = |n_bytes: usize| {
            done += n_bytes as u64;
            progress(QuantizeProgress { tensor: tensor.name, done, total });
        };
        match tensor.dtype == tensor.entry.dtype {
            true => copy(&model, tensor, &mut writer, &mut advance)?,
            false => requantize(&model, tensor, &mut writer, &mut advance)?,
        }
        writer.pad(tensor.n_bytes())?;
    }
    for file in &model.files {
        file.check_unchanged()?;
    }
    let bytes_before = model.files.iter().map(checkpoint::SourceFile::n_bytes).sum();
    Ok(QuantizeReport { bytes_before, bytes_after: writer.finish()?, types: count_types(&tensors) })
}

/// The output must not be a file that is read.
fn check_output(model: &JoinedGguf, output: &Path) -> Result<()> {
    let Ok(written) = output.canonicalize() else { return Ok(()) };
    let is_read = model.files.iter().any(|file| file.path().canonicalize().is_ok_and(|read| read == written));
    if is_read { Err(Error::SameFile { path: output.to_owned() }) } else { Ok(()) }
}

/// Chooses types, in the order of layers. Returns the tensors in the file's order.
fn plan<'a>(model: &'a JoinedGguf, input: &Path, recipe: Recipe) -> Result<Vec<PlannedTensor<'a>>> {
    let mut named: Vec<(&str, &TensorEntry)> = model.header.tensors().collect();
    named.sort_by_key(|(name, _)| layer_of(name).map_or(0, |layer| layer + 1));
    let mut chooser = TypeChooser::new(recipe, recipe_inputs(model, input)?);
    let mut tensors = Vec::with_capacity(named.len());
    for (name, entry) in named {
        let columns = entry.dims.last().copied().unwrap_or_default();
        let dtype = if is_changed(name, &entry.dims) { chooser.next(name, columns) } else { entry.dtype };
        if dtype != entry.dtype && !can_decode(entry.dtype) {
            let (path, tensor) = (input.to_owned(), name.to_owned());
            return Err(Error::NoDecoder { path, tensor, dtype: entry.dtype });
        }
        tensors.push(PlannedTensor { name, entry, dtype });
    }
    tensors.sort_by_key(|tensor| (tensor.entry.file, tensor.entry.bytes.start));
    Ok(tensors)
}

fn recipe_inputs(model: &JoinedGguf, input: &Path) -> Result<RecipeInputs> {
    let family = model.header.text(&model.bytes, "general.architecture");
    let family = family.map_err(|_| metadata_error(input, "general.architecture"))?.unwrap_or_default();
    let number = |key: &str| unsigned(model, input, &format!("{family}.{key}"));
    let n_heads = number("attention.head_count")?;
    let n_kv_heads = number("attention.head_count_kv")?.or(n_heads).unwrap_or_default();
    Ok(RecipeInputs {
        n_layers: number("block_count")?.unwrap_or_default() as usize,
        n_grouped: n_heads.unwrap_or_default().checked_div(n_kv_heads).unwrap_or_default(),
        n_experts: number("expert_count")?.unwrap_or_default(),
        n_values: model.header.tensors().filter(|(name, _)| has_values(name)).count(),
        has_head: model.header.tensor("output.weight").is_some(),
    })
}

/// A number, or the first of a list with one for each layer.
fn unsigned(model: &JoinedGguf, input: &Path, key: &str) -> Result<Option<u64>> {
    let error = || metadata_error(input, key);
    if model.header.list_length(key).is_none() {
        return model.header.unsigned(key).map_err(|_| error());
    }
    let all = model.header.integers(&model.bytes, key).map_err(|_| error())?.unwrap_or_default();
    all.first().map(|first| u64::try_from(*first).map_err(|_| error())).transpose()
}

fn metadata_error(input: &Path, key: &str) -> Error {
    Error::Metadata { path: input.to_owned(), key: key.to_owned() }
}

fn values(model: &JoinedGguf, recipe: Recipe) -> ValueList {
    let mut values = ValueList::default();
    for (_, range) in model.header.raw_values().filter(|(key, _)| !DROPPED.contains(key)) {
        values.push_raw(&model.bytes[range]);
    }
    values.push_u32("general.file_type", recipe.file_type());
    values.push_u32("general.quantization_version", QUANTIZATION_VERSION);
    values
}

fn head<'a>(tensor: &PlannedTensor<'a>) -> TensorHead<'a> {
    let number = type_number(tensor.dtype);
    TensorHead {
        name: tensor.name,
        dims: &tensor.entry.dims,
        type_number: number.unwrap_or_else(|| unreachable!("recipes and GGUFs have only types of GGUFs")),
        n_bytes: tensor.n_bytes(),
    }
}

fn copy(
    model: &JoinedGguf,
    tensor: &PlannedTensor<'_>,
    writer: &mut GgufWriter,
    advance: &mut dyn FnMut(usize),
) -> Result<()> {
    let range = tensor.entry.bytes.clone();
    for start in range.clone().step_by(PIECE_BYTES) {
        let mut piece = vec![0; PIECE_BYTES.min(range.end - start)];
        model.files[tensor.entry.file].read_at(start as u64, &mut piece)?;
        writer.write(&piece)?;
        advance(piece.len());
    }
    Ok(())
}

/// Decodes and encodes a tensor in pieces of whole rows.
fn requantize(
    model: &JoinedGguf,
    tensor: &PlannedTensor<'_>,
    writer: &mut GgufWriter,
    advance: &mut dyn FnMut(usize),
) -> Result<()> {
    let rows = RowTypes { columns: tensor.columns(), from: tensor.entry.dtype, to: tensor.dtype };
    let rows_max = (PIECE_BYTES / rows.source_bytes()).max(1);
    for first in (0..tensor.rows()).step_by(rows_max) {
        let n_rows = rows_max.min(tensor.rows() - first);
        let mut source = vec![0; n_rows * rows.source_bytes()];
        let start = tensor.entry.bytes.start + first * rows.source_bytes();
        model.files[tensor.entry.file].read_at(start as u64, &mut source)?;
        let mut target = vec![0; n_rows * rows.target_bytes()];
        rows.encode(&source, &mut target).map_err(|(row, source)| Error::Row {
            tensor: tensor.name.to_owned(),
            row: first + row,
            source,
        })?;
        writer.write(&target)?;
        advance(source.len());
    }
    Ok(())
}

/// Rows that change from one type to another.
#[derive(Clone, Copy)]
struct RowTypes {
    columns: usize,
    from: Dtype,
    to: Dtype,
}

impl RowTypes {
    fn source_bytes(self) -> usize {
        self.from.row_bytes(self.columns)
    }

    fn target_bytes(self) -> usize {
        self.to.row_bytes(self.columns)
    }

    /// Encodes rows, each of a machine's processors its part. An error has the index of its row.
    fn encode(self, source: &[u8], target: &mut [u8]) -> std::result::Result<(), (usize, EncodeError)> {
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let n_each = (source.len() / self.source_bytes()).div_ceil(n_threads);
        let sources = source.chunks(n_each * self.source_bytes());
        let parts = sources.zip(target.chunks_mut(n_each * self.target_bytes())).enumerate();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                parts.map(|(i, (source, target))| (i, scope.spawn(move || self.encode_part(source, target)))).collect();
            threads.into_iter().try_for_each(|(i, thread)| match thread.join() {
                Ok(done) => done.map_err(|(row, error)| (i * n_each + row, error)),
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    fn encode_part(self, source: &[u8], target: &mut [u8]) -> std::result::Result<(), (usize, EncodeError)> {
        let mut numbers = vec![0.0; self.columns];
        let rows = source.chunks_exact(self.source_bytes()).zip(target.chunks_exact_mut(self.target_bytes()));
        rows.enumerate().try_for_each(|(row, (source, target))| {
            decode_row(self.from, source, &mut numbers);
            encode_row(self.to, &numbers, None, target).map_err(|error| (row, error))
        })
    }
}

fn count_types(tensors: &[PlannedTensor<'_>]) -> Vec<(Dtype, usize)> {
    let mut order = Vec::new();
    let mut counts: HashMap<Dtype, usize> = HashMap::new();
    for tensor in tensors {
        let count = counts.entry(tensor.dtype).or_insert_with(|| {
            order.push(tensor.dtype);
            0
        });
        *count += 1;
    }
    order.into_iter().map(|dtype| (dtype, counts[&dtype])).collect()
}
