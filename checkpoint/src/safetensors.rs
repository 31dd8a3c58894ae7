//! Tensors of a Hugging Face folder: one `model.safetensors`, or shards that an index names. Knows no model.

use crate::error::{Error, Fault, Result};
use crate::map::map;
use crate::scaling::Scaling;
use crate::tensor::{Dtype, Scales, Tensor, rows_and_cols};
use memmap2::Mmap;
use safetensors::tensor::{Dtype as Stored, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const SHARDS_MAX: usize = 4096;

/// What follows a matrix's name in that of its scales. DeepSeek's sounds as if one divided by it; all of them are what
/// to multiply by.
const SCALES: [&str; 2] = ["_scale", "_scale_inv"];

/// All shards, mapped.
pub(crate) struct Shards {
    shards: Vec<Mmap>,
    tensors: BTreeMap<String, Entry>,
    scaling: Scaling,
}

struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: [usize; 2],
    bytes: Range<usize>,
}

impl Shards {
    pub fn open(folder: &Path, scaling: Scaling) -> Result<Shards> {
        let mut shards = Shards { shards: Vec::new(), tensors: BTreeMap::new(), scaling };
        for file in shard_files(folder)? {
            shards.add(&file)?;
        }
        Ok(shards)
    }

    fn add(&mut self, file: &Path) -> Result<()> {
        let bytes = map(file)?;
        for (name, entry) in read_header(&bytes, self.shards.len()).map_err(Error::fault(file))? {
            if self.tensors.contains_key(&name) {
                let what = format!("the tensor {name} is in another shard too");
                return Err(Error::Malformed { path: file.to_owned(), what });
            }
            self.tensors.insert(name, entry);
        }
        self.shards.push(bytes);
        Ok(())
    }

    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let entry = self.tensors.get(name)?;
        // Who opened the files has looked whether all scales are there.
        let scales = self.scales(name, entry).ok().flatten();
        Some(Tensor { dtype: entry.dtype, shape: entry.shape, bytes: self.bytes(entry), scales })
    }

    /// Whether all is there that its tensors need besides themselves, of these.
    pub fn check(&self, names: &[&str]) -> std::result::Result<(), Fault> {
        let found = names.iter().find_map(|name| Some((name, self.tensors.get(*name)?)));
        let Some((name, entry)) = found else { return Ok(()) };
        self.scales(name, entry).map(|_| ())
    }

    fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.shards[entry.shard][entry.bytes.clone()]
    }

    fn scales(&self, name: &str, entry: &Entry) -> std::result::Result<Option<Scales<'_>>, Fault> {
        if entry.dtype != Dtype::F8E4M3 {
            return Ok(None);
        }
        let found = SCALES.iter().find_map(|suffix| self.tensors.get(&format!("{name}{suffix}")));
        let Some(found) = found else {
            return Fault::malformed(format!("the tensor {name} of F8_E4M3 has no {name}{}", SCALES[0]));
        };
        let named = |fault| match fault {
            Fault::Malformed(what) => Fault::Malformed(format!("the tensor {name} has {what}")),
            other => other,
        };
        let block = self.scaling.block_of(entry.shape, found.shape).map_err(named)?;
        if found.dtype.block() != 1 || !entry.shape[1].is_multiple_of(entry.dtype.block()) {
            let columns = entry.shape[1];
            return Fault::unsupported(format!(
                "the tensor {name} of F8_E4M3 with {columns} columns, its scales {:?},",
                found.dtype
            ));
        }
        let (per_row, bytes) = (entry.shape[1].div_ceil(block[1]), self.bytes(found));
        Ok(Some(Scales { dtype: found.dtype, bytes, block, per_row, first_row: 0 }))
    }
}

fn shard_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if !index.exists() {
        return Ok(vec![folder.join(SINGLE)]);
    }
    let names = index_files(&crate::read_json(&index)?).map_err(Error::fault(&index))?;
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// The files of an index, each a plain name in the same folder.
fn index_files(index: &Value) -> std::result::Result<BTreeSet<String>, Fault> {
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Fault::malformed("the index has no weight_map");
    };
    let mut files = BTreeSet::new();
    for (tensor, file) in map {
        match file.as_str() {
            Some(file) if crate::is_plain_name(file) => files.insert(file.to_owned()),
            _ => {
                return Fault::malformed(format!("the index places {tensor} in {file}, which is not a file beside it"));
            }
        };
        if files.len() > SHARDS_MAX {
            return Fault::malformed(format!("the index names more than {SHARDS_MAX} files"));
        }
    }
    if files.is_empty() { Fault::malformed("the index names no file") } else { Ok(files) }
}

fn read_header(bytes: &[u8], shard: usize) -> std::result::Result<Vec<(String, Entry)>, Fault> {
    let parsed =
        SafeTensors::deserialize(bytes).map_err(|error| Fault::Malformed(format!("not safetensors: {error}")))?;
    let mut entries = Vec::new();
    for (name, view) in parsed.iter() {
        let dtype = match view.dtype() {
            Stored::F32 => Dtype::F32,
            Stored::F16 => Dtype::F16,
            Stored::BF16 => Dtype::BF16,
            Stored::F8_E4M3 => Dtype::F8E4M3,
            other => return Fault::unsupported(format!("the tensor {name} has type {other:?}, which")),
        };
        let dims: Vec<u64> = view.shape().iter().map(|dim| *dim as u64).collect();
        if dims.contains(&0) {
            return Fault::malformed(format!("the tensor {name} has a dimension of zero"));
        }
        // One number may have no dimensions.
        let dims = if dims.is_empty() { vec![1] } else { dims };
        let data = view.data();
        let start = data.as_ptr().addr() - bytes.as_ptr().addr();
        entries.push((
            name.to_owned(),
            Entry { shard, dtype, shape: rows_and_cols(&dims)?, bytes: start..start + data.len() },
        ));
    }
    Ok(entries)
}
