//! One matrix of a file of packed matrices: what it is, where it lies, and the hash of its bytes.

use backend::{MatrixShape, Memory, PACKED_PIECE_BYTES};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use types::PieceRun;

/// Which matrix: the part of the model's tensors, and how it is packed.
pub(crate) struct PackedOrigin {
    pub name: String,
    pub form: String,
}

/// A matrix in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackedEntry {
    pub name: String,
    /// Types and shapes of its parts, and the leaves of its sum.
    pub form: String,
    /// Where its bytes begin in the file.
    pub at: u64,
    pub n_bytes: usize,
    pub hash: [u8; 32],
    /// Hashes of the bytes that it was packed from.
    pub runs: Vec<PieceRun>,
}

impl PackedOrigin {
    pub fn new(name: String, shape: &MatrixShape<'_>) -> PackedOrigin {
        let part =
            |part: &backend::StoredMatrix<'_>| format!("{:?} {}x{} from {}", part.dtype, part.rows, part.k, part.first);
        let parts = shape.parts.iter().map(part).collect::<Vec<_>>().join(", ");
        let form = match &shape.leaves {
            Some((leaves, owned)) => format!("{parts}, leaves {owned:?} of {}", leaves.len()),
            None => parts,
        };
        PackedOrigin { name, form }
    }
}

impl PackedEntry {
    pub fn new(origin: PackedOrigin, n_bytes: usize, hash: [u8; 32], runs: Vec<PieceRun>) -> PackedEntry {
        PackedEntry { name: origin.name, form: origin.form, at: 0, n_bytes, hash, runs }
    }

    /// Reads its bytes from offset `at` on.
    pub fn read(&self, file: &File, at: usize, to: &mut [u8]) -> io::Result<()> {
        file.read_exact_at(to, self.at + at as u64)
    }
}

/// Hashes of the pieces of one packed matrix, which several threads add.
pub(super) struct PieceHashes(Vec<OnceLock<[u8; 32]>>);

impl PieceHashes {
    pub fn new(n_bytes: usize) -> PieceHashes {
        PieceHashes((0..n_bytes.div_ceil(PACKED_PIECE_BYTES)).map(|_| OnceLock::new()).collect())
    }

    /// The hash of a packed matrix, on all threads of the device.
    pub fn of(bytes: &[u8], device: &impl Memory) -> [u8; 32] {
        let hashes = PieceHashes::new(bytes.len());
        device.parallel_for(hashes.0.len(), &|pieces| {
            for at in pieces.map(|piece| piece * PACKED_PIECE_BYTES) {
                hashes.add(at, &bytes[at..bytes.len().min(at + PACKED_PIECE_BYTES)]);
            }
        });
        hashes.combine()
    }

    /// Adds the piece at offset `at`.
    pub fn add(&self, at: usize, piece: &[u8]) {
        self.0[at / PACKED_PIECE_BYTES].get_or_init(|| blake3::hash(piece).into());
    }

    pub fn combine(self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 packed matrix");
        for piece in self.0 {
            hasher.update(&piece.into_inner().unwrap_or_default());
        }
        hasher.finalize().into()
    }
}
