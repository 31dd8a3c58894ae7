//! Tensors of a Hugging Face folder: one `model.safetensors`, or shards that an index names. Knows no model.

use crate::error::{Error, ParseError, Result};
use crate::file::SourceFile;
use crate::groups::cells::TensorPart;
use crate::groups::codes::{CodebookMatrix, codebook_matrix};
use crate::groups::fp4::{Fp4Matrix, fp4_matrix};
use crate::groups::join::{digits_of, grouped_matrix};
use crate::groups::method::QuantMethod;
use crate::groups::{GroupQuantMatrix, MatrixReader};
use crate::modules::in_folder;
use crate::scaling::QuantConfig;
use crate::small_files::{is_plain_name, read_json};
use crate::tensor::{ScaleBytes, Tensor, rows_and_cols};
use safetensors::tensor::{Dtype as Stored, Metadata};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use types::{Dtype, Scales};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const SHARDS_MAX: usize = 4096;
/// The bytes of the header's length, which precedes the header.
const LENGTH_BYTES: usize = 8;
/// The format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The suffixes of a matrix's name for its scales. DeepSeek's suggests division, but all of them are factors.
pub(crate) const SCALES: [&str; 2] = ["_scale", "_scale_inv"];

/// All shards, open.
pub(crate) struct Shards {
    shards: Vec<SourceFile>,
    tensors: BTreeMap<String, ShardEntry>,
    /// Why a tensor is not supported, by its name. Some are not needed: first files of GPT-NeoX hold masks of bytes.
    refused: BTreeMap<String, String>,
    scaling: QuantConfig,
}

struct ShardEntry {
    shard: usize,
    dtype: Dtype,
    shape: [usize; 2],
    /// Where its bytes begin.
    start: usize,
    made_of: EntryTensors,
}

/// The file's tensors that make up an entry.
enum EntryTensors {
    Itself,
    /// MXFP4, whose nibbles and exponents are tensors of their own: the exponents' shard, and where they begin.
    Exponents(usize, usize),
    Groups(Box<GroupQuantMatrix>),
    Codes(Box<CodebookMatrix>),
    Fp4(Box<Fp4Matrix>),
}

impl EntryTensors {
    /// Returns its reader, if it consists of several tensors.
    fn reader(&self) -> Option<MatrixReader<'_>> {
        match self {
            EntryTensors::Groups(of) => Some(MatrixReader::Groups(of)),
            EntryTensors::Codes(of) => Some(MatrixReader::Codes(of)),
            EntryTensors::Fp4(of) => Some(MatrixReader::Fp4(of)),
            EntryTensors::Itself | EntryTensors::Exponents(..) => None,
        }
    }
}

impl ShardEntry {
    /// Returns it as a part of a matrix.
    fn part(&self) -> Option<TensorPart> {
        let dtype = match self.dtype {
            Dtype::F32 => Stored::F32,
            Dtype::F16 => Stored::F16,
            Dtype::BF16 => Stored::BF16,
            Dtype::F8E4M3 => Stored::F8_E4M3,
            _ => return None,
        };
        let dims = self.shape.map(|dim| dim as u64).to_vec();
        Some(TensorPart { dtype, dims, shard: self.shard, start: self.start })
    }
}

/// The suffixes of the two byte tensors that form one MXFP4 tensor.
const NIBBLES: &str = "_blocks";
const EXPONENTS: &str = "_scales";

/// Tensors that are only parts of others, by their names.
type TensorParts = BTreeMap<String, TensorPart>;

impl Shards {
    /// Opens a model's files, and those of the modules in its subfolders, whose tensors have the subfolder's name in
    /// theirs.
    pub fn open(folder: &Path, modules: &[&str], scaling: QuantConfig) -> Result<Shards> {
        let (tensors, refused) = (BTreeMap::new(), BTreeMap::new());
        let (mut shards, mut parts) = (Shards { shards: Vec::new(), tensors, refused, scaling }, TensorParts::new());
        for file in shard_files(folder)? {
            shards.add(&file, str::to_owned, &mut parts)?;
        }
        for module in modules {
            let named = |tensor: &str| in_folder(module, tensor);
            shards.add(&folder.join(module).join(SINGLE), named, &mut parts)?;
        }
        shards.join_groups(&mut parts).and_then(|()| shards.join_halves(&parts)).map_err(Error::with_path(folder))?;
        Ok(shards)
    }

    /// Makes one tensor of each matrix of few bits, and removes its parts.
    fn join_groups(&mut self, parts: &mut TensorParts) -> std::result::Result<(), ParseError> {
        let method = self.scaling.method;
        for suffix in digits_of(method) {
            let names = parts.keys().filter(|name| name.ends_with(suffix));
            for name in names.cloned().collect::<Vec<_>>() {
                let (Some(digits), Some(stem)) = (parts.remove(&name), name.strip_suffix(suffix)) else { continue };
                let (tensors, shards) = (&mut self.tensors, &self.shards);
                let mut take = |name: &str| parts.remove(name).or_else(|| tensors.remove(name)?.part());
                let read = |part: &TensorPart, n: usize| read_part(shards, part, n);
                let made_of = match method {
                    QuantMethod::Codes => {
                        EntryTensors::Codes(Box::new(codebook_matrix(stem, &digits, &mut take, &read)?))
                    }
                    QuantMethod::Nvfp4(factor) => {
                        EntryTensors::Fp4(Box::new(fp4_matrix(factor, stem, &digits, &mut take, &read)?))
                    }
                    _ => EntryTensors::Groups(Box::new(grouped_matrix(method, stem, &digits, &mut take, &read)?)),
                };
                let Some(reader) = made_of.reader() else { continue };
                let ((shard, start), shape, dtype) = (reader.file_and_start(), reader.shape(), reader.dtype());
                let entry = ShardEntry { shard, dtype, shape, start, made_of };
                if self.tensors.insert(format!("{stem}.weight"), entry).is_some() {
                    return ParseError::malformed(format!("the matrix {stem} occurs twice"));
                }
            }
        }
        Ok(())
    }

    /// Joins each pair of halves to one tensor. Leaves out what is no half.
    fn join_halves(&mut self, parts: &TensorParts) -> std::result::Result<(), ParseError> {
        for (name, half) in parts {
            let (nibbles, exponents) = (name.strip_suffix(NIBBLES), name.strip_suffix(EXPONENTS));
            let Some(stem) = nibbles.or(exponents).filter(|_| half.dtype == Stored::U8) else {
                self.refused.insert(name.clone(), of_type(name, half.dtype));
                continue;
            };
            let other = format!("{stem}{}", if nibbles.is_some() { EXPONENTS } else { NIBBLES });
            let Some(other) = parts.get(&other).filter(|other| other.dtype == Stored::U8) else {
                self.refused.insert(name.clone(), format!("the tensor {name} of the type U8 without {other}, which"));
                continue;
            };
            if nibbles.is_some() {
                let entry = mxfp4_entry(half, other).ok_or_else(|| {
                    ParseError::Malformed(format!(
                        "{stem} has blocks of {:?} and scales of {:?}",
                        half.dims, other.dims
                    ))
                })?;
                self.tensors.insert(stem.to_owned(), entry);
            }
        }
        Ok(())
    }

    fn add(&mut self, file: &Path, named: impl Fn(&str) -> String, parts: &mut TensorParts) -> Result<()> {
        let opened = SourceFile::open_filled(file)?;
        for (name, tensor) in read_header(&opened, self.shards.len())? {
            let name = named(&name);
            if self.tensors.contains_key(&name) || parts.contains_key(&name) {
                let what = format!("the tensor {name} is in another shard too");
                return Err(Error::Malformed { path: file.to_owned(), what });
            }
            match tensor {
                HeaderEntry::Whole(entry) => drop(self.tensors.insert(name, entry)),
                HeaderEntry::Part(part) => drop(parts.insert(name, part)),
                HeaderEntry::Refused(dtype) => {
                    let why = of_type(&name, dtype);
                    self.refused.insert(name, why);
                }
            }
        }
        self.shards.push(opened);
        Ok(())
    }

    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let entry = self.tensors.get(name)?;
        // Opening the files has checked that all scales exist.
        let scales = self.scales(name, entry).ok().flatten();
        let file = &self.shards[entry.shard];
        if let Some(reader) = entry.made_of.reader() {
            return Some(Tensor::assembled(reader, &self.shards));
        }
        if let EntryTensors::Exponents(shard, start) = entry.made_of {
            let exponents = (&self.shards[shard], start);
            return Some(Tensor::with_split_exponents((file, entry.start), exponents, entry.shape));
        }
        Some(Tensor { scales, ..Tensor::new(file, entry.start, entry.dtype, entry.shape) })
    }

    /// Checks a tensor that may have these names: everything that it also needs must exist. If it is stored under the
    /// first part of one of the names, in a form that is not read, the error says why.
    pub fn check(&self, names: &[Cow<'_, str>]) -> std::result::Result<(), ParseError> {
        let found = names.iter().find_map(|name| Some((name, self.tensors.get(name.as_ref())?)));
        if let Some((name, entry)) = found {
            return self.scales(name, entry).map(|_| ());
        }
        let stems = names.iter().map(|name| name.strip_suffix("weight").unwrap_or(name));
        let why = stems.filter_map(|stem| self.refused.iter().find(|(name, _)| name.starts_with(stem))).next();
        why.map_or(Ok(()), |(_, why)| ParseError::unsupported(why.clone()))
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().chain(self.refused.keys()).map(String::as_str)
    }

    pub fn files(&self) -> &[SourceFile] {
        &self.shards
    }

    fn scales(
        &self,
        name: &str,
        entry: &ShardEntry,
    ) -> std::result::Result<Option<Scales<ScaleBytes<'_>>>, ParseError> {
        if entry.dtype != Dtype::F8E4M3 {
            return Ok(None);
        }
        let found = SCALES.iter().find_map(|suffix| self.tensors.get(&format!("{name}{suffix}")));
        let Some(found) = found else {
            return ParseError::malformed(format!("the tensor {name} of F8_E4M3 has no {name}{}", SCALES[0]));
        };
        let named = |fault| match fault {
            ParseError::Malformed(what) => ParseError::Malformed(format!("the tensor {name} has {what}")),
            other => other,
        };
        let block = self.scaling.block_of(entry.shape, found.shape).map_err(named)?;
        if found.dtype.block() != 1 || !entry.shape[1].is_multiple_of(entry.dtype.block()) {
            let columns = entry.shape[1];
            return ParseError::unsupported(format!(
                "the tensor {name} of F8_E4M3 with {columns} columns, its scales {:?},",
                found.dtype
            ));
        }
        let file = &self.shards[found.shard];
        let bytes = ScaleBytes::new(file, found.start, found.dtype, found.shape);
        let per_row = entry.shape[1].div_ceil(block[1]);
        Ok(Some(Scales { dtype: found.dtype, bytes, block, per_row, first: [0, 0] }))
    }
}

/// The bytes of a small tensor.
fn read_part(shards: &[SourceFile], part: &TensorPart, n_bytes: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; n_bytes];
    shards[part.shard].read_at(part.start as u64, &mut bytes).ok()?;
    Some(bytes)
}

/// Blocks of 16 bytes and as many exponents.
fn mxfp4_entry(nibbles: &TensorPart, exponents: &TensorPart) -> Option<ShardEntry> {
    let (last, dims) = nibbles.dims.split_last()?;
    let (n_blocks, rows) = dims.split_last()?;
    if *last != 16 || dims != exponents.dims {
        return None;
    }
    let cols = n_blocks.checked_mul(Dtype::MXFP4.block() as u64)?;
    let shape = rows_and_cols(&[rows, &[cols]].concat()).ok().filter(|[rows, cols]| rows * cols > 0)?;
    let made_of = EntryTensors::Exponents(exponents.shard, exponents.start);
    Some(ShardEntry { shard: nibbles.shard, dtype: Dtype::MXFP4, shape, start: nibbles.start, made_of })
}

/// The content of a header's line.
enum HeaderEntry {
    Whole(ShardEntry),
    Part(TensorPart),
    /// A tensor of a type that no code reads.
    Refused(Stored),
}

fn of_type(name: &str, dtype: Stored) -> String {
    format!("the tensor {name} has type {dtype:?}, which")
}

/// Whether every file of a folder's index exists, each as long as its header requires.
pub(crate) fn has_all_shards(folder: &Path) -> bool {
    let is_whole = |file: &PathBuf| SourceFile::open(file).and_then(|file| read_metadata(&file)).is_ok();
    shard_files(folder).is_ok_and(|files| files.iter().all(is_whole))
}

/// Returns the names of a folder's weight files.
pub(crate) fn shard_names(folder: &Path) -> Result<Vec<String>> {
    let name = |file: PathBuf| file.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(shard_files(folder)?.into_iter().filter_map(name).collect())
}

fn shard_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if !index.exists() {
        return Ok(vec![folder.join(SINGLE)]);
    }
    let names = index_files(&read_json(&index)?).map_err(Error::with_path(&index))?;
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Returns the files of an index, each a plain name in the same folder.
fn index_files(index: &Value) -> std::result::Result<BTreeSet<String>, ParseError> {
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return ParseError::malformed("the index has no weight_map");
    };
    let mut files = BTreeSet::new();
    for (tensor, file) in map {
        match file.as_str() {
            Some(file) if is_plain_name(file) => files.insert(file.to_owned()),
            _ => {
                return ParseError::malformed(format!(
                    "the index places {tensor} in {file}, which is not a file beside it"
                ));
            }
        };
        if files.len() > SHARDS_MAX {
            return ParseError::malformed(format!("the index names more than {SHARDS_MAX} files"));
        }
    }
    if files.is_empty() { ParseError::malformed("the index names no file") } else { Ok(files) }
}

/// Reads the header only: where the tensors' bytes begin, and their descriptions.
pub(crate) fn read_metadata(file: &SourceFile) -> Result<(usize, Metadata)> {
    let malformed = |what: String| Error::Malformed { path: file.path().to_owned(), what };
    let mut length = [0; LENGTH_BYTES];
    if file.n_bytes() < LENGTH_BYTES as u64 {
        return Err(malformed("not safetensors: shorter than the length of its header".into()));
    }
    file.read_at(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX.min(file.n_bytes() - LENGTH_BYTES as u64) {
        return Err(malformed(format!("not safetensors: a header of {length} bytes: is the file cut off?")));
    }
    let mut header = vec![0; length as usize];
    file.read_at(LENGTH_BYTES as u64, &mut header)?;
    // Checks that the tensors follow each other without a gap, each as long as its shape requires.
    let header: Metadata =
        serde_json::from_slice(&header).map_err(|error| malformed(format!("not safetensors: {error}")))?;
    let data = LENGTH_BYTES + length as usize;
    match data.checked_add(header.data_len()) {
        Some(end) if end as u64 == file.n_bytes() => Ok((data, header)),
        _ => {
            let (n, all) = (header.data_len(), file.n_bytes());
            let what =
                format!("its tensors have {n} bytes after a header of {data}, but the file has {all}: is it cut off?");
            Err(malformed(what))
        }
    }
}

fn read_header(file: &SourceFile, shard: usize) -> Result<Vec<(String, HeaderEntry)>> {
    let (data, header) = read_metadata(file)?;
    let mut entries = Vec::new();
    for name in header.offset_keys() {
        let Some(info) = header.info(&name) else { continue };
        let dtype = match info.dtype {
            Stored::F32 => Dtype::F32,
            Stored::F16 => Dtype::F16,
            Stored::BF16 => Dtype::BF16,
            Stored::F8_E4M3 => Dtype::F8E4M3,
            Stored::U8 | Stored::I8 | Stored::I32 | Stored::I64 => {
                let dims = info.shape.iter().map(|dim| *dim as u64).collect();
                let start = data + info.data_offsets.0;
                entries.push((name, HeaderEntry::Part(TensorPart { dtype: info.dtype, dims, shard, start })));
                continue;
            }
            other => {
                entries.push((name, HeaderEntry::Refused(other)));
                continue;
            }
        };
        let dims: Vec<u64> = info.shape.iter().map(|dim| *dim as u64).collect();
        let shape = shape_of(&name, &dims).map_err(Error::with_path(file.path()))?;
        let start = data + info.data_offsets.0;
        let entry = ShardEntry { shard, dtype, shape, start, made_of: EntryTensors::Itself };
        entries.push((name, HeaderEntry::Whole(entry)));
    }
    Ok(entries)
}

fn shape_of(name: &str, dims: &[u64]) -> std::result::Result<[usize; 2], ParseError> {
    match dims {
        // A single number may have no dimensions.
        [] => Ok([1, 1]),
        dims if dims.contains(&0) => ParseError::malformed(format!("the tensor {name} has a dimension of zero")),
        dims => rows_and_cols(dims),
    }
}
