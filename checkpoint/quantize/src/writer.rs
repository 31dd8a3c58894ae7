//! Writes a GGUF: its header, and then the tensors one after another. Knows the container, not what a key or a tensor
//! is for.
//!
//! The file gets its name when it is whole. Until then it has another, and it is removed if writing fails.

use crate::error::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// The number of the type U32 of a value.
const U32: u32 = 4;

/// The head of a tensor.
pub(crate) struct TensorHead<'a> {
    pub name: &'a str,
    /// From the slowest dimension to the fastest: the reverse of the file's order.
    pub dims: &'a [u64],
    pub type_number: u32,
    pub n_bytes: u64,
}

/// Keys with their values, as they are written.
#[derive(Default)]
pub(crate) struct ValueList {
    n: u64,
    bytes: Vec<u8>,
}

impl ValueList {
    /// Adds a key, the type of its value, and the value.
    pub fn push_raw(&mut self, bytes: &[u8]) {
        self.n += 1;
        self.bytes.extend_from_slice(bytes);
    }

    pub fn push_u32(&mut self, key: &str, value: u32) {
        let mut bytes = Vec::new();
        put_text(&mut bytes, key);
        bytes.extend(U32.to_le_bytes());
        bytes.extend(value.to_le_bytes());
        self.push_raw(&bytes);
    }
}

/// A file that is not whole yet.
pub(crate) struct GgufWriter {
    file: File,
    part: PathBuf,
    path: PathBuf,
    alignment: u64,
}

impl GgufWriter {
    /// Begins a file with this header. The tensors must follow in its order.
    pub fn create(path: &Path, values: &ValueList, tensors: &[TensorHead<'_>], alignment: u64) -> Result<GgufWriter> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let part = path.with_file_name(name);
        let file = File::create(&part).map_err(Error::write(&part))?;
        let mut writer = GgufWriter { file, part, path: path.to_owned(), alignment };
        let header = header(values, tensors, alignment);
        writer.write(&header)?;
        writer.pad(header.len() as u64)?;
        Ok(writer)
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::write(&self.part))
    }

    /// Fills up behind a tensor of so many bytes.
    pub fn pad(&mut self, n_bytes: u64) -> Result<()> {
        let n = n_bytes.next_multiple_of(self.alignment) - n_bytes;
        self.write(&vec![0; n as usize])
    }

    /// Gives the file its name. Returns its length.
    pub fn finish(self) -> Result<u64> {
        let written = self.file.sync_all().and_then(|()| self.file.metadata());
        let n_bytes = written.map_err(Error::write(&self.part))?.len();
        std::fs::rename(&self.part, &self.path).map_err(Error::write(&self.path))?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::write(folder))?;
        Ok(n_bytes)
    }
}

impl Drop for GgufWriter {
    fn drop(&mut self) {
        // After `finish` no file has this name.
        let _ = std::fs::remove_file(&self.part);
    }
}

/// magic · version · n_tensors · n_keys │ keys, values │ tensor names, dimensions, types, offsets
fn header(values: &ValueList, tensors: &[TensorHead<'_>], alignment: u64) -> Vec<u8> {
    let mut to = Vec::with_capacity(values.bytes.len() + 96 * tensors.len());
    to.extend(MAGIC);
    to.extend(VERSION.to_le_bytes());
    to.extend((tensors.len() as u64).to_le_bytes());
    to.extend(values.n.to_le_bytes());
    to.extend(&values.bytes);
    let mut offset = 0u64;
    for tensor in tensors {
        put_text(&mut to, tensor.name);
        to.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().rev().for_each(|dim| to.extend(dim.to_le_bytes()));
        to.extend(tensor.type_number.to_le_bytes());
        to.extend(offset.to_le_bytes());
        offset += tensor.n_bytes.next_multiple_of(alignment);
    }
    to
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}
