//! The weights of a model, packed for a device.

use crate::{Result, StoredMatrix};
use std::ops::Range;
use std::sync::Arc;
use types::Leaves;

/// The bytes of a weight in this process's memory, as kernels read them. They do not change. Clones share them.
#[derive(Clone)]
pub struct PackedBytes {
    all: Arc<dyn AsRef<[u8]> + Send + Sync>,
    n_bytes: usize,
}

impl PackedBytes {
    /// The first `n_bytes` of these.
    pub fn new(all: Arc<dyn AsRef<[u8]> + Send + Sync>, n_bytes: usize) -> PackedBytes {
        PackedBytes { all, n_bytes }
    }

    pub fn bytes(&self) -> &[u8] {
        &(*self.all).as_ref()[..self.n_bytes]
    }
}

/// The bytes of a piece of a packed matrix. Threads fill and hash packed bytes piece by piece; the last one is shorter.
pub const PACKED_PIECE_BYTES: usize = 128 << 10;

/// Fills the piece of a packed matrix that begins at an offset. Several threads call it.
pub type FillPiece<'a> = dyn Fn(usize, &mut [u8]) + Sync + 'a;

/// Everything on which the layout of a packed matrix depends.
pub struct MatrixShape<'a> {
    /// The stacked matrices; their bytes and scales are not used.
    pub parts: &'a [StoredMatrix<'a>],
    /// The leaves of a row-parallel matrix, and which of them it has.
    pub leaves: Option<(&'a Leaves, Range<u32>)>,
}

/// Packs weights, and the tables that are made with them. They are allocated at load.
pub trait Weights {
    /// A weight matrix, packed for this device: `[n_out, k]`.
    type Matrix: Send + Sync;
    /// A weight vector in f32: norms, biases.
    type Vector: Send + Sync;
    /// Cosines and sines per position.
    type Rope: Send + Sync;

    /// Matrices that meet the same input are stacked by rows, so that it is quantized once. Their types may differ.
    fn matrix(&self, parts: &[StoredMatrix<'_>]) -> Result<Self::Matrix>;
    /// A row-parallel matrix: `stored` holds the columns `leaves.elements(&owned)` of the whole, and the product is
    /// kept as the sums of the largest aligned runs of leaves in `owned`.
    fn matrix_leaves(&self, stored: StoredMatrix<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<Self::Matrix>;
    /// A matrix whose packed bytes are known: `fill` writes those that `packed_bytes` returned for a matrix of this
    /// shape, all of its `n_bytes`. None if this device packs such a matrix into another number of bytes, or keeps
    /// packed weights in memory of its own.
    fn matrix_of_packed(
        &self,
        _shape: &MatrixShape<'_>,
        _n_bytes: usize,
        _fill: &FillPiece<'_>,
    ) -> Result<Option<Self::Matrix>> {
        Ok(None)
    }
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
    /// `cos` and `sin`: `[context, head_dim / 2]`, made once by portable arithmetic.
    fn rope(&self, cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Self::Rope>;
    /// Calls `work` with ranges that together are `0..n_items`, each item once, on the threads that pack weights;
    /// returns when all are done. `work` must not call this device.
    fn parallel_for(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync));

    /// Bytes that the packed weights of a matrix occupy.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;
    /// The packed weights themselves; None where they are in memory of the device's own.
    fn packed_bytes(&self, _matrix: &Self::Matrix) -> Option<PackedBytes> {
        None
    }
    /// The same for a vector.
    fn vector_bytes(&self, _vector: &Self::Vector) -> Option<PackedBytes> {
        None
    }
    /// The same for the cosines and the sines.
    fn rope_bytes(&self, _rope: &Self::Rope) -> Option<[PackedBytes; 2]> {
        None
    }
}

/// Which elements of a head the rope rotates together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// i and i + d/2: Hugging Face's layout.
    Halves,
    /// i and i + n: only the first pairs of a head turn, whose halves are n long.
    Apart(usize),
    /// 2i and 2i + 1: the layout of a GGUF whose converter permuted Q and K.
    Pairs,
}
