//! Which chunks of a model's files are here, on disk beside them. Written behind the chunks, so it never says too much.

use proto::cluster::ModelFiles;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::Path;

const HEAD_BYTES: usize = 32;
/// File, first chunk, end, and a checksum of the three: one that was half written is none.
const RECORD_BYTES: usize = 4 + 8 + 8 + 4;

pub(super) struct Journal {
    file: File,
    chunks: BTreeSet<(u32, u64)>,
}

impl Journal {
    /// Begins a new one where there is none, or where it is of other files.
    pub fn open(path: &Path, files: &ModelFiles) -> io::Result<Journal> {
        let head = head(files);
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let mut journal = Journal { file, chunks: BTreeSet::new() };
        let n_good = if bytes.starts_with(&head) { HEAD_BYTES + journal.read(&bytes[HEAD_BYTES..]) } else { 0 };
        journal.file.set_len(n_good as u64)?;
        io::Seek::seek(&mut journal.file, io::SeekFrom::End(0))?;
        if n_good == 0 {
            journal.file.write_all(&head)?;
        }
        Ok(journal)
    }

    /// How many bytes were records.
    fn read(&mut self, bytes: &[u8]) -> usize {
        let mut n_good = 0;
        for record in bytes.chunks_exact(RECORD_BYTES) {
            let Some((file, chunks)) = decode(record) else { break };
            self.chunks.extend(chunks.map(|chunk| (file, chunk)));
            n_good += RECORD_BYTES;
        }
        n_good
    }

    pub fn has(&self, file: u32, chunk: u64) -> bool {
        self.chunks.contains(&(file, chunk))
    }

    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    pub fn add(&mut self, file: u32, chunks: Range<u64>) -> io::Result<()> {
        self.file.write_all(&encode(file, &chunks))?;
        self.chunks.extend(chunks.map(|chunk| (file, chunk)));
        Ok(())
    }
}

/// Of where the files lie, their names and sizes: another list is another journal.
fn head(files: &ModelFiles) -> [u8; HEAD_BYTES] {
    let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 journal of a fetched model");
    hasher.update(&files.digest);
    hasher.update(&(files.name.len() as u64).to_le_bytes()).update(files.name.as_bytes());
    hasher.update(&[files.is_folder.into()]);
    for file in &files.files {
        hasher.update(&(file.name.len() as u64).to_le_bytes()).update(file.name.as_bytes());
        hasher.update(&file.n_bytes.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn encode(file: u32, chunks: &Range<u64>) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[..4].copy_from_slice(&file.to_le_bytes());
    record[4..12].copy_from_slice(&chunks.start.to_le_bytes());
    record[12..20].copy_from_slice(&chunks.end.to_le_bytes());
    let sum = blake3::hash(&record[..20]);
    record[20..].copy_from_slice(&sum.as_bytes()[..4]);
    record
}

fn decode(record: &[u8]) -> Option<(u32, Range<u64>)> {
    let file = u32::from_le_bytes(record[..4].try_into().ok()?);
    let start = u64::from_le_bytes(record[4..12].try_into().ok()?);
    let end = u64::from_le_bytes(record[12..20].try_into().ok()?);
    (encode(file, &(start..end))[..] == *record && start < end).then_some((file, start..end))
}
