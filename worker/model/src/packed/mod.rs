//! The packed matrices of one rank's part of a model, so that the next load of the same part neither reads nor packs
//! them: a file has them, or they are gathered for one. Knows nothing of folders, nor of what the key is made of.
//!
//! ```text
//! file absent    every matrix is packed, hashed and gathered      -> image -> file
//! file sound     every matrix is read from the file, and hashed
//! one bad byte   that matrix is packed and gathered               -> image, with all others -> file
//! ```
//! The file is read and not mapped: what was hashed stays as it is, on huge pages, even if the file changes.

mod entry;
mod image;
mod table;

pub(crate) use entry::PackedOrigin;
pub use image::PackedImage;

use backend::{MatrixShape, Memory, PackedBytes};
use entry::{PackedEntry, PieceHashes};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::Path;
use table::PackedTable;
use types::PieceRun;

/// Identifies a rank's part of a model, and how it is packed. Equal keys have equal packed bytes.
pub type PackedKey = [u8; 32];

/// The packed matrices of one load.
pub struct PackedMatrices {
    key: PackedKey,
    file: Option<PackedFile>,
    /// Every matrix of this load.
    loaded: RefCell<Vec<LoadedMatrix>>,
    names: RefCell<HashSet<String>>,
    n_packed: Cell<usize>,
    refused: RefCell<Option<String>>,
}

struct PackedFile {
    file: File,
    entries: HashMap<String, PackedEntry>,
}

/// A matrix in memory, with the entry that a file gets for it.
struct LoadedMatrix {
    entry: PackedEntry,
    bytes: PackedBytes,
}

impl PackedMatrices {
    /// Without a file: every matrix is packed.
    pub fn new(key: PackedKey) -> PackedMatrices {
        let (loaded, names) = (RefCell::default(), RefCell::default());
        PackedMatrices { key, file: None, loaded, names, n_packed: Cell::new(0), refused: RefCell::default() }
    }

    /// Opens the file of this key. The error says why the file cannot be used.
    pub fn open(path: &Path, key: PackedKey) -> Result<PackedMatrices, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let entries = PackedTable::read(&file, &key)?;
        let entries = entries.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        Ok(PackedMatrices { file: Some(PackedFile { file, entries }), ..PackedMatrices::new(key) })
    }

    /// The matrices that the file had, and those that were packed.
    pub fn counts(&self) -> (usize, usize) {
        let n_packed = self.n_packed.get();
        (self.loaded.borrow().len() - n_packed, n_packed)
    }

    /// Why the file's bytes of a matrix were not used, if it has any: the first such reason.
    pub fn refused(&self) -> Option<String> {
        self.refused.borrow().clone()
    }

    /// What a file of these matrices has; None if the file is complete.
    pub fn into_image(self) -> Option<PackedImage> {
        let is_complete = self.file.is_some() && self.n_packed.get() == 0;
        let loaded = self.loaded.into_inner();
        (!is_complete && !loaded.is_empty()).then(|| PackedImage::new(self.key, loaded))
    }

    /// Returns the matrix from the file, and the hashes of the bytes that it was packed from.
    pub(crate) fn restore<M: Memory>(
        &self,
        device: &M,
        origin: &PackedOrigin,
        shape: &MatrixShape<'_>,
    ) -> backend::Result<Option<(M::Matrix, Vec<PieceRun>)>> {
        let Some(file) = &self.file else { return Ok(None) };
        let Some(entry) = file.entries.get(&origin.name) else {
            return Ok(self.refuse(format!("it lacks {}", origin.name)));
        };
        if entry.form != origin.form {
            return Ok(self.refuse(format!("{} is {} and not {}", entry.name, entry.form, origin.form)));
        }
        let hashes = PieceHashes::new(entry.n_bytes);
        let failed = std::sync::OnceLock::new();
        let matrix = device.matrix_of_packed(shape, entry.n_bytes, &|at, to| match entry.read(&file.file, at, to) {
            Ok(()) => hashes.add(at, to),
            Err(error) => _ = failed.set(error.to_string()),
        })?;
        let Some(matrix) = matrix else {
            return Ok(self.refuse(format!("{} has {} bytes, which is another packing", entry.name, entry.n_bytes)));
        };
        if let Some(error) = failed.into_inner() {
            return Ok(self.refuse(format!("{} cannot be read: {error}", entry.name)));
        }
        if hashes.combine() != entry.hash {
            return Ok(self.refuse(format!("the bytes of {} differ from their hash", entry.name)));
        }
        self.add(entry.clone(), device.packed_bytes(&matrix));
        Ok(Some((matrix, entry.runs.clone())))
    }

    /// Adds a matrix that was packed. Hashes it now, so that damage before it is written is found when it is read.
    pub(crate) fn gather<M: Memory>(&self, device: &M, origin: PackedOrigin, matrix: &M::Matrix, runs: Vec<PieceRun>) {
        let Some(packed) = device.packed_bytes(matrix) else { return };
        let hash = PieceHashes::of(packed.bytes(), device);
        let entry = PackedEntry::new(origin, packed.bytes().len(), hash, runs);
        self.n_packed.set(self.n_packed.get() + usize::from(self.add(entry, Some(packed))));
    }

    /// Returns whether it is the first of its name: some models load a matrix twice.
    fn add(&self, entry: PackedEntry, bytes: Option<PackedBytes>) -> bool {
        let is_new = self.names.borrow_mut().insert(entry.name.clone());
        let loaded = bytes.filter(|_| is_new).map(|bytes| LoadedMatrix { entry, bytes });
        let is_added = loaded.is_some();
        self.loaded.borrow_mut().extend(loaded);
        is_added
    }

    fn refuse<T>(&self, why: String) -> Option<T> {
        self.refused.borrow_mut().get_or_insert(why);
        None
    }
}
