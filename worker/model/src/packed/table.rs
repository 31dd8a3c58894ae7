//! The head of a file of packed matrices. Numbers are little-endian; strings and lists begin with their length.
//!
//! ```text
//! magic 8 · version 4 · key 32 · bytes of the table 8 · hash of the table 32 · table · matrices, each on a page
//! table      number of matrices 4 · for each: name · form · start 8 · bytes 8 · hash 32 · runs
//! run        weight · pieces of the weight 4 · first 4 · hashes
//! ```

use super::PackedKey;
use super::entry::PackedEntry;
use std::fs::File;
use std::os::unix::fs::FileExt;
use types::{PieceHash, PieceRun};

const MAGIC: [u8; 8] = *b"LOCKPACK";
/// Of this format; how matrices are packed has a version of its own, in the key.
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 8 + 4 + 32 + 8 + 32;
const PAGE_BYTES: u64 = 4096;
/// A table beyond this is damaged.
const TABLE_BYTES_MAX: u64 = 1 << 30;

/// The list of a file's matrices.
pub(super) struct PackedTable;

impl PackedTable {
    /// Gives each matrix its place, and returns the bytes before the first.
    pub fn encode(key: &PackedKey, entries: &mut [PackedEntry]) -> Vec<u8> {
        // The length of the table does not depend on the places.
        let mut at = (HEAD_BYTES + encode_entries(entries).len()) as u64;
        for entry in entries.iter_mut() {
            entry.at = at.next_multiple_of(PAGE_BYTES);
            at = entry.at + entry.n_bytes as u64;
        }
        let table = encode_entries(entries);
        let mut head = Vec::with_capacity(HEAD_BYTES + table.len());
        head.extend(MAGIC);
        head.extend(VERSION.to_le_bytes());
        head.extend(key);
        head.extend((table.len() as u64).to_le_bytes());
        head.extend(blake3::hash(&table).as_bytes());
        head.extend(table);
        head
    }

    /// Reads and checks the table of a file, which must have all bytes of every matrix.
    pub fn read(file: &File, key: &PackedKey) -> Result<Vec<PackedEntry>, String> {
        let n_bytes = file.metadata().map_err(|error| error.to_string())?.len();
        let mut head = [0; HEAD_BYTES];
        file.read_exact_at(&mut head, 0).map_err(|error| format!("its head: {error}"))?;
        let mut fields = TableReader(&head);
        if fields.array() != Some(MAGIC) {
            return Err("it is no file of packed matrices".into());
        }
        match fields.number() {
            Some(VERSION) => {}
            version => return Err(format!("its version is {} and not {VERSION}", version.unwrap_or(0))),
        }
        if fields.array().as_ref() != Some(key) {
            return Err("it belongs to another key".into());
        }
        let length = fields.length().unwrap_or(u64::MAX);
        if length > TABLE_BYTES_MAX.min(n_bytes) {
            return Err(format!("its table has {length} bytes, but the file {n_bytes}"));
        }
        let mut table = vec![0; length as usize];
        file.read_exact_at(&mut table, HEAD_BYTES as u64).map_err(|error| format!("its table: {error}"))?;
        if fields.array() != Some(*blake3::hash(&table).as_bytes()) {
            return Err("its table differs from its hash".into());
        }
        let entries = TableReader(&table).entries().ok_or("its table is malformed")?;
        let is_whole =
            |entry: &PackedEntry| entry.at.checked_add(entry.n_bytes as u64).is_some_and(|end| end <= n_bytes);
        match entries.iter().find(|entry| !is_whole(entry)) {
            None => Ok(entries),
            Some(entry) => Err(format!("it ends at byte {n_bytes}, within {}", entry.name)),
        }
    }
}

fn encode_entries(entries: &[PackedEntry]) -> Vec<u8> {
    let mut to = (entries.len() as u32).to_le_bytes().to_vec();
    for PackedEntry { name, form, at, n_bytes, hash, runs } in entries {
        put_text(&mut to, name);
        put_text(&mut to, form);
        to.extend(at.to_le_bytes());
        to.extend((*n_bytes as u64).to_le_bytes());
        to.extend(hash);
        to.extend((runs.len() as u32).to_le_bytes());
        for PieceRun { weight, n_pieces, first, hashes } in runs {
            put_text(&mut to, weight);
            to.extend([*n_pieces, *first, hashes.len() as u32].map(u32::to_le_bytes).as_flattened());
            hashes.iter().for_each(|hash| to.extend(hash.0));
        }
    }
    to
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u32).to_le_bytes());
    to.extend(text.as_bytes());
}

/// Takes fields from the front. None where the bytes end too early.
struct TableReader<'a>(&'a [u8]);

impl<'a> TableReader<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn number(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn length(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Option<String> {
        let n = self.number()? as usize;
        String::from_utf8(self.bytes(n)?.to_vec()).ok()
    }

    fn entries(&mut self) -> Option<Vec<PackedEntry>> {
        let n = self.number()?;
        let entries = (0..n).map(|_| self.entry()).collect::<Option<Vec<_>>>()?;
        self.0.is_empty().then_some(entries)
    }

    fn entry(&mut self) -> Option<PackedEntry> {
        let (name, form) = (self.text()?, self.text()?);
        let (at, n_bytes, hash) = (self.length()?, usize::try_from(self.length()?).ok()?, self.array()?);
        let n_runs = self.number()?;
        let runs = (0..n_runs).map(|_| self.run()).collect::<Option<Vec<_>>>()?;
        Some(PackedEntry { name, form, at, n_bytes, hash, runs })
    }

    fn run(&mut self) -> Option<PieceRun> {
        let weight = self.text()?;
        let [n_pieces, first, n_hashes] = [self.number()?, self.number()?, self.number()?];
        let hashes = (0..n_hashes).map(|_| self.array().map(PieceHash)).collect::<Option<Vec<_>>>()?;
        Some(PieceRun { weight, n_pieces, first, hashes })
    }
}
