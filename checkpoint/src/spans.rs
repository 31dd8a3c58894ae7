//! Where a model's bytes lie: its files, and the byte range of each tensor in them. For copying parts of a model
//! between machines; knows nothing of how a tensor is read.

use crate::error::{Error, Result};
use crate::file::{FileStamp, SourceFile};
use crate::gguf::Gguf;
use crate::modules;
use crate::safetensors;
use crate::small_files::is_plain_name;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// More files than any model has.
const FILES_MAX: usize = 8192;

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpans {
    pub path: PathBuf,
    /// Its name in the model's folder, or the file's own.
    pub name: String,
    /// The file's stamp when its spans were read.
    pub stamp: FileStamp,
    /// One per tensor, in the order of the file; bytes between them are header or padding.
    pub spans: Vec<TensorSpan>,
}

/// The bytes of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpan {
    /// None for tensors outside the layers, such as embedding and head.
    pub layer: Option<u32>,
    pub bytes: Range<u64>,
}

/// The files of the model at `path`, as `Checkpoint::open` takes it.
pub fn of_model(path: &Path) -> Result<Vec<FileSpans>> {
    let files = if path.is_dir() { folder_files(path)? } else { gguf_files(path) };
    if files.len() > FILES_MAX {
        let what = format!("the model has {} files: at most {FILES_MAX} are supported", files.len());
        return Err(Error::Malformed { path: path.to_owned(), what });
    }
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    files.iter().map(|file| of_file(folder, file)).collect()
}

fn of_file(folder: &Path, path: &Path) -> Result<FileSpans> {
    let file = SourceFile::open(path)?;
    let extension = path.extension().and_then(|extension| extension.to_str());
    let mut spans = match extension {
        Some("gguf") => of_gguf(&file)?,
        Some("safetensors") => of_safetensors(&file)?,
        _ => Vec::new(),
    };
    spans.sort_by_key(|span| span.bytes.start);
    let name = path.strip_prefix(folder).unwrap_or(path).to_string_lossy().into_owned();
    Ok(FileSpans { path: path.to_owned(), name, stamp: file.stamp(), spans })
}

fn of_gguf(file: &SourceFile) -> Result<Vec<TensorSpan>> {
    let (header, _) = Gguf::read(file)?;
    let span = |name: &str, bytes: &Range<usize>| TensorSpan { layer: layer_of(name), bytes: to_u64_range(bytes) };
    Ok(header.tensors().map(|(name, entry)| span(name, &entry.bytes)).collect())
}

fn of_safetensors(file: &SourceFile) -> Result<Vec<TensorSpan>> {
    let (data, header) = safetensors::read_metadata(file)?;
    let span = |name: &str, at: (usize, usize)| TensorSpan {
        layer: layer_of(name),
        bytes: to_u64_range(&(data + at.0..data + at.1)),
    };
    Ok(header.tensors().iter().map(|(name, tensor)| span(name, tensor.data_offsets)).collect())
}

fn to_u64_range(range: &Range<usize>) -> Range<u64> {
    range.start as u64..range.end as u64
}

/// `blk.7.attn_q.weight` and `model.layers.7.self_attn.q_proj.weight` both belong to layer 7, and so does GPT-2's
/// `h.7.ln_1.weight` and BERT's `encoder.layer.7.output.dense.weight`.
fn layer_of(name: &str) -> Option<u32> {
    let mut parts = name.split('.');
    parts.find(|part| matches!(*part, "blk" | "layers" | "layer" | "h"))?;
    parts.next()?.parse().ok()
}

/// The file itself, or all parts of the split model that its name belongs to.
fn gguf_files(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let parts = || {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, _) = rest.rsplit_once('-')?;
        let n: usize = count.parse().ok().filter(|n| count.len() == 5 && (2..=FILES_MAX).contains(n))?;
        Some((1..=n).map(|i| path.with_file_name(format!("{stem}-{i:05}-of-{count}.gguf"))).collect())
    };
    parts().unwrap_or_else(|| vec![path.to_owned()])
}

/// The weights, and the text files that describe them.
fn folder_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let path = entry.map_err(Error::io(folder))?.path();
        let is_plain = path.file_name().and_then(|name| name.to_str()).is_some_and(is_plain_name);
        let is_part = matches!(path.extension().and_then(|e| e.to_str()), Some("json" | "safetensors" | "jinja"));
        if is_plain && is_part && path.is_file() {
            files.push(path);
        }
    }
    files.extend(modules::files(folder, |name| folder.join(name).is_file())?.iter().map(|name| folder.join(name)));
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;
    use std::collections::BTreeSet;

    #[test]
    fn layers_are_read_from_names() {
        assert_eq!(layer_of("blk.7.attn_q.weight"), Some(7));
        assert_eq!(layer_of("model.language_model.layers.31.mlp.up_proj.weight"), Some(31));
        assert_eq!(layer_of("token_embd.weight"), None);
        assert_eq!(layer_of("blk"), None);
    }

    #[test]
    fn parts_of_a_split_file_belong_together() {
        let parts = gguf_files(Path::new("a/m-00002-of-00003.gguf"));
        assert_eq!(parts.len(), 3);
        assert_eq!(parts[0], Path::new("a/m-00001-of-00003.gguf"));
        assert_eq!(gguf_files(Path::new("a/m.gguf")), [Path::new("a/m.gguf")]);
    }

    /// A span's bytes are the tensor's.
    #[test]
    fn spans_are_where_the_tensors_are() {
        for name in ["llama-f32-tied", "llama-f16-sharded"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(name);
            let checkpoint = Checkpoint::open(&folder).unwrap();
            let files = of_model(&folder).unwrap();
            let mut held = BTreeSet::new();
            for file in &files {
                let bytes = std::fs::read(&file.path).unwrap();
                assert_eq!(bytes.len() as u64, file.stamp.n_bytes());
                let spans = file.spans.iter();
                held.extend(spans.map(|s| bytes[s.bytes.start as usize..s.bytes.end as usize].to_vec()));
            }
            for expected in crate::names::required_tensors(checkpoint.spec()) {
                let tensor = checkpoint.tensor(&expected.name).unwrap();
                assert!(held.contains(&tensor.read().unwrap()), "{name}: {}", expected.name);
            }
            assert!(files.iter().any(|file| file.path.ends_with("config.json") && file.spans.is_empty()));
        }
    }
}
