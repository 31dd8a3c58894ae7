//! The contents of a file of packed matrices, from the matrices in memory.

use super::table::PackedTable;
use super::{LoadedMatrix, PackedKey};
use backend::PackedBytes;
use std::io::{Error, ErrorKind, Result, Write};

/// Bytes written between two questions whether to go on.
const CHUNK_BYTES: usize = 1 << 20;

/// What a file will have. Shares the bytes with the model; they stay in memory while this lives.
pub struct PackedImage {
    head: Vec<u8>,
    /// Where each matrix begins, and its bytes.
    matrices: Vec<(u64, PackedBytes)>,
    n_bytes: u64,
}

impl PackedImage {
    pub(super) fn new(key: PackedKey, loaded: Vec<LoadedMatrix>) -> PackedImage {
        let (mut entries, bytes): (Vec<_>, Vec<_>) = loaded.into_iter().map(|of| (of.entry, of.bytes)).unzip();
        let head = PackedTable::encode(&key, &mut entries);
        let n_bytes = entries.last().map_or(0, |last| last.at + last.n_bytes as u64);
        PackedImage { head, matrices: entries.iter().map(|entry| entry.at).zip(bytes).collect(), n_bytes }
    }

    /// Bytes of the file.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Writes the file, as long as `goes_on`; otherwise fails with `ErrorKind::Interrupted`.
    pub fn write(&self, to: &mut impl Write, goes_on: &dyn Fn() -> bool) -> Result<()> {
        to.write_all(&self.head)?;
        let mut written = self.head.len() as u64;
        for (at, packed) in &self.matrices {
            let gap = at.saturating_sub(written);
            std::io::copy(&mut std::io::Read::take(std::io::repeat(0), gap), to)?;
            for chunk in packed.bytes().chunks(CHUNK_BYTES) {
                if !goes_on() {
                    return Err(Error::new(ErrorKind::Interrupted, "the model is no longer held"));
                }
                to.write_all(chunk)?;
            }
            written = at + packed.bytes().len() as u64;
        }
        to.flush()
    }
}
