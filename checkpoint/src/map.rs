//! A file as bytes in memory. Knows nothing of what they mean.

use crate::error::{Error, Result};
use memmap2::Mmap;
use std::fs::File;
use std::path::Path;

/// Maps a whole file, read-only. An empty file is an error here, so that no parser needs to think of it.
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let file = open_regular(path)?;
    if file.metadata().map_err(Error::io(path))?.len() == 0 {
        return Err(Error::Malformed { path: path.to_owned(), what: "the file is empty".into() });
    }
    map_file(&file).map_err(Error::io(path))
}

/// Opens a file that ends: not a pipe, which would wait for a writer, nor a device.
pub(crate) fn open_regular(path: &Path) -> Result<File> {
    if !std::fs::metadata(path).map_err(Error::io(path))?.is_file() {
        return Err(Error::Malformed { path: path.to_owned(), what: "not a file".into() });
    }
    File::open(path).map_err(Error::io(path))
}

#[expect(unsafe_code, reason = "the only way to serve weights without reading them into memory first")]
fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and private. A model file that another process truncates or rewrites while it is
    // served is outside what can be promised: models are written under a temporary name and renamed, never in place.
    unsafe { Mmap::map(file) }
}
