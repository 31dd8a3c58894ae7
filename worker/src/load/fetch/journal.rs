//! The journal of a model's cached files: which chunks are here, and their hashes on arrival. An entry is written after
//! its chunks, so the journal never names a missing chunk.

use proto::cluster::ModelFiles;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::{Deref, DerefMut, Range};
use std::path::Path;

const HEAD_BYTES: usize = 32;
/// File, first chunk, end, the chunks' hash, and a checksum of the four: a half-written record is ignored.
const RECORD_BYTES: usize = 4 + 8 + 8 + 32 + 4;

pub(super) struct FetchJournal {
    file: File,
    there: JournalChunks,
}

/// The contents of a journal.
#[derive(Default)]
pub(super) struct JournalChunks {
    records: Vec<ChunkRecord>,
    chunks: BTreeSet<(u32, u64)>,
}

/// Chunks of a file that arrived together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChunkRecord {
    pub file: u32,
    pub chunks: Range<u64>,
    /// The hash of their bytes.
    pub hash: [u8; 32],
}

/// Reads the journal of these files, without writing; returns None if there is none.
pub(super) fn read(path: &Path, files: &ModelFiles) -> io::Result<Option<JournalChunks>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(JournalChunks::of(&bytes, files).map(|(there, _)| there)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

impl FetchJournal {
    /// Opens the journal, or begins a new one if there is none or it belongs to other files.
    pub fn open(path: &Path, files: &ModelFiles) -> io::Result<FetchJournal> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let (there, n_good) = JournalChunks::of(&bytes, files).unwrap_or_default();
        file.set_len(n_good as u64)?;
        io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
        if n_good == 0 {
            file.write_all(&head(files))?;
        }
        Ok(FetchJournal { file, there })
    }

    pub fn add(&mut self, file: u32, chunks: Range<u64>, hash: [u8; 32]) -> io::Result<()> {
        let record = ChunkRecord { file, chunks, hash };
        self.file.write_all(&encode(&record))?;
        self.there.note(record);
        Ok(())
    }
}

impl Deref for FetchJournal {
    type Target = JournalChunks;

    fn deref(&self) -> &JournalChunks {
        &self.there
    }
}

impl DerefMut for FetchJournal {
    fn deref_mut(&mut self) -> &mut JournalChunks {
        &mut self.there
    }
}

impl JournalChunks {
    /// Parses a journal's bytes, and counts the valid ones; returns None if they belong to other files.
    fn of(bytes: &[u8], files: &ModelFiles) -> Option<(JournalChunks, usize)> {
        let records = bytes.strip_prefix(&head(files))?;
        let (mut there, mut n_good) = (JournalChunks::default(), HEAD_BYTES);
        for record in records.chunks_exact(RECORD_BYTES) {
            let Some(record) = decode(record) else { break };
            there.note(record);
            n_good += RECORD_BYTES;
        }
        Some((there, n_good))
    }

    pub fn has(&self, file: u32, chunk: u64) -> bool {
        self.chunks.contains(&(file, chunk))
    }

    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    pub fn records(&self) -> &[ChunkRecord] {
        &self.records
    }

    /// Drops a record. It stays on disk: it is right again once the same chunks are fetched again.
    pub fn forget(&mut self, record: &ChunkRecord) {
        self.chunks.retain(|(file, chunk)| *file != record.file || !record.chunks.contains(chunk));
    }

    /// Adds a record, even if an earlier one of the same chunks was dropped.
    pub fn believe(&mut self, record: &ChunkRecord) {
        self.chunks.extend(record.chunks.clone().map(|chunk| (record.file, chunk)));
    }

    fn note(&mut self, record: ChunkRecord) {
        self.believe(&record);
        self.records.push(record);
    }
}

/// Returns a digest of the files' place, names and sizes: another list gets another journal.
fn head(files: &ModelFiles) -> [u8; HEAD_BYTES] {
    let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 journal of a fetched model, with hashes");
    hasher.update(&files.digest);
    hasher.update(&(files.name.len() as u64).to_le_bytes()).update(files.name.as_bytes());
    hasher.update(&[files.is_folder.into()]);
    for file in &files.files {
        hasher.update(&(file.name.len() as u64).to_le_bytes()).update(file.name.as_bytes());
        hasher.update(&file.n_bytes.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn encode(ChunkRecord { file, chunks, hash }: &ChunkRecord) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[..4].copy_from_slice(&file.to_le_bytes());
    record[4..12].copy_from_slice(&chunks.start.to_le_bytes());
    record[12..20].copy_from_slice(&chunks.end.to_le_bytes());
    record[20..52].copy_from_slice(hash);
    let sum = blake3::hash(&record[..52]);
    record[52..].copy_from_slice(&sum.as_bytes()[..4]);
    record
}

fn decode(bytes: &[u8]) -> Option<ChunkRecord> {
    let file = u32::from_le_bytes(bytes[..4].try_into().ok()?);
    let start = u64::from_le_bytes(bytes[4..12].try_into().ok()?);
    let end = u64::from_le_bytes(bytes[12..20].try_into().ok()?);
    let record = ChunkRecord { file, chunks: start..end, hash: bytes[20..52].try_into().ok()? };
    (encode(&record)[..] == *bytes && start < end).then_some(record)
}
