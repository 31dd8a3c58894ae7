//! Checks that fetched chunks are unchanged since they arrived. Works with files and chunks; has no knowledge of their
//! source.
//!
//! A cached file may be damaged long after it was fetched. Before a worker uses the chunks that a journal names, it
//! hashes them again. It fetches none of the intact ones while the files stay as they are.

use crate::fetch::CHUNK_BYTES;
use crate::fetch::journal::{ChunkRecord, JournalChunks};
use checkpoint::{FileStamp, SourceFile, in_threads};
use collective::CancelFlag;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes read and hashed at a time.
const READ_BYTES: usize = 1 << 20;

/// The chunks that this process found intact.
#[derive(Clone, Debug, Default)]
pub struct IntactChunks(Arc<Mutex<CheckedChunks>>);

#[derive(Debug, Default)]
struct CheckedChunks {
    files: Vec<PathBuf>,
    /// The files' stamps at that time.
    stamps: Vec<Option<FileStamp>>,
    chunks: BTreeSet<(u32, u64)>,
}

impl IntactChunks {
    /// Removes damaged chunks from the journal, so that they are fetched again. Returns how many there are; None if the
    /// check was cancelled.
    pub(super) fn remove_damaged(
        &self,
        journal: &mut JournalChunks,
        files: &[PathBuf],
        required: &[BTreeSet<u64>],
        cancel: &CancelFlag,
    ) -> Option<usize> {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The stamps are taken before the hashes, so a change in between is found at the next check.
        let now = stamps(files);
        if found.files != files || found.stamps != now {
            *found = CheckedChunks { files: files.to_vec(), stamps: now, chunks: BTreeSet::new() };
        }
        let is_open = |record: &ChunkRecord, chunk: u64| {
            required[record.file as usize].contains(&chunk) && !found.chunks.contains(&(record.file, chunk))
        };
        let open = |record: &&ChunkRecord| {
            (record.file as usize) < files.len() && record.chunks.clone().any(|chunk| is_open(record, chunk))
        };
        let records: Vec<ChunkRecord> = journal.records().iter().filter(open).cloned().collect();
        let are_whole = which_match(&records, files, cancel);
        if cancel.is_cancelled() {
            return None;
        }
        let n_before = journal.len();
        for (record, is_whole) in records.iter().zip(are_whole) {
            match is_whole {
                true => {
                    found.chunks.extend(record.chunks.clone().map(|chunk| (record.file, chunk)));
                    journal.believe(record);
                }
                false => journal.forget(record),
            }
        }
        Some(n_before - journal.len())
    }

    /// Records that the journal's required chunks are here, and were checked on arrival or later.
    pub(super) fn record_fetched(&self, files: &[PathBuf], required: &[BTreeSet<u64>], journal: &JournalChunks) {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        found.stamps = stamps(files);
        for (file, chunks) in (0..).zip(required) {
            let here = chunks.iter().filter(|chunk| journal.has(file, **chunk));
            found.chunks.extend(here.map(|chunk| (file, *chunk)));
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Option<FileStamp>> {
    files.iter().map(|file| SourceFile::open(file).ok().map(|file| file.stamp())).collect()
}

/// Returns whether each of these records still matches its file.
fn which_match(records: &[ChunkRecord], files: &[PathBuf], cancel: &CancelFlag) -> Vec<bool> {
    let is_whole = |record: &ChunkRecord| {
        let hash = File::open(&files[record.file as usize]).and_then(|file| hash(&file, &record.chunks));
        // A chunk that cannot be read counts as missing.
        hash.is_ok_and(|hash| hash == record.hash)
    };
    let answers = in_threads(records, &|| cancel.is_cancelled(), is_whole);
    answers.into_iter().map(|is_whole| is_whole == Some(true)).collect()
}

/// Returns the hash of these chunks' bytes; the file's end may cut the last chunk.
pub(super) fn hash(file: &File, chunks: &Range<u64>) -> io::Result<[u8; 32]> {
    let (mut at, end) = (chunks.start * CHUNK_BYTES, file.metadata()?.len().min(chunks.end * CHUNK_BYTES));
    let (mut hasher, mut bytes) = (blake3::Hasher::new(), vec![0; READ_BYTES]);
    while at < end {
        let n_bytes = (end - at).min(READ_BYTES as u64) as usize;
        file.read_exact_at(&mut bytes[..n_bytes], at)?;
        hasher.update(&bytes[..n_bytes]);
        at += n_bytes as u64;
    }
    Ok(hasher.finalize().into())
}
