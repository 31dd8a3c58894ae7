//! Which bytes of a model have been read: hashes of pieces, and the root over all of them. Knows no file, no rank and
//! nothing of how a weight is packed.
//!
//! ```text
//! weight   [ piece 0 ][ piece 1 ][ piece 2 ][ piece 3 ]     the same pieces on every grid
//! rank 0    ======================                          a run: first 0, two hashes
//! rank 1               ================================     a run: first 1, three hashes; piece 1 is shared
//! ```
//! No rank's part begins or ends within a piece, so that the same hashes arise wherever a model is cut.

use crate::Hex;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// A hash of the bytes of one piece as they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceHash(pub [u8; 32]);

/// Consecutive pieces of one weight that a rank has read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceRun {
    pub weight: String,
    /// The number of pieces of the whole weight.
    pub n_pieces: u32,
    pub first: u32,
    pub hashes: Vec<PieceHash>,
}

/// Names all bytes of a model's weights: equal roots, equal bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightsRoot(pub [u8; 32]);

impl PieceHash {
    /// The hash of a piece that was read in parts, from their hashes in order. Where the parts end depends on the
    /// weight alone.
    pub fn of_parts(parts: impl IntoIterator<Item = [u8; 32]>) -> PieceHash {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 piece of a weight");
        for part in parts {
            hasher.update(&part);
        }
        PieceHash(*hasher.finalize().as_bytes())
    }
}

impl WeightsRoot {
    /// The root over whole weights, each with the hashes of all of its pieces. Call with ascending names.
    pub fn of<'a>(weights: impl IntoIterator<Item = (&'a str, &'a [PieceHash])>) -> WeightsRoot {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 all bytes of the weights");
        for (name, hashes) in weights {
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
            hasher.update(&(hashes.len() as u64).to_le_bytes());
            for PieceHash(hash) in hashes {
                hasher.update(hash);
            }
        }
        WeightsRoot(*hasher.finalize().as_bytes())
    }
}

impl fmt::Debug for WeightsRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeightsRoot(")?;
        write!(f, "{})", Hex(&self.0[..8]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_knows_names_pieces_and_where_a_weight_ends() {
        let [a, b] = [1, 2].map(|byte| PieceHash([byte; 32]));
        let (both, one, other) = ([a, b], [a], [b]);
        let all = [
            WeightsRoot::of([("x", &both[..])]),
            WeightsRoot::of([("x", &one[..]), ("y", &other[..])]),
            WeightsRoot::of([("x", &other[..]), ("y", &one[..])]),
            WeightsRoot::of([("y", &both[..])]),
            WeightsRoot::of([("x", &[b, a][..])]),
            WeightsRoot::of([]),
        ];
        assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");
        assert_ne!(PieceHash::of_parts([[1; 32], [2; 32]]), PieceHash::of_parts([[2; 32], [1; 32]]));
    }
}
