//! Files beside the weights, read whole: JSON and text. And which names of files are believed. Knows no key.

use crate::error::{Error, Result};
use crate::file::SourceFile;
use serde_json::Value;
use std::path::Path;

/// A model's JSON files are small; a larger one is refused.
const JSON_BYTES_MAX: u64 = 256 << 20;

pub(crate) fn read_json(path: &Path) -> Result<Value> {
    serde_json::from_str(&read_text(path)?)
        .map_err(|error| Error::Malformed { path: path.to_owned(), what: format!("not JSON: {error}") })
}

/// Null if there is no such file.
pub(crate) fn read_json_if_there(path: &Path) -> Result<Value> {
    if path.exists() { read_json(path) } else { Ok(Value::Null) }
}

pub(crate) fn read_text(path: &Path) -> Result<String> {
    let malformed = |_| Error::Malformed { path: path.to_owned(), what: "not text".into() };
    String::from_utf8(read_bytes(path)?).map_err(malformed)
}

pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let file = SourceFile::open(path)?;
    if file.n_bytes() > JSON_BYTES_MAX {
        let what = format!("the file exceeds the limit of {JSON_BYTES_MAX} bytes");
        return Err(Error::Malformed { path: path.to_owned(), what });
    }
    let mut bytes = vec![0; file.n_bytes() as usize];
    file.read_at(0, &mut bytes)?;
    file.check_unchanged()?;
    Ok(bytes)
}

/// Whether a file name stays in its folder: no separators, no parents, nothing hidden.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0', ':'])
}
