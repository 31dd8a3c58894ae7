//! The memory of a device, and how data gets there.

use super::{ConvolvedChannels, RecurrentHeads, Routing};
use crate::{Error, Pass, Result, StoredMatrix};
use std::ops::Range;
use std::sync::Arc;
use types::{BlockId, DeviceClass, DeviceKind, KvDtype, KvLayout, Leaves, NumericsMode};

/// The largest batch for which a device allocates memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    pub rows_max: usize,
    /// The most positions of one sequence.
    pub context: u32,
    /// Cache groups, each with tables of its own.
    pub n_groups: usize,
}

/// Changes the memory behind a range of a cache's blocks, in every layer.
pub type ChangeBlocks = Box<dyn Fn(Range<u32>) -> std::io::Result<()> + Send>;

/// The memory of a cache's blocks, which the system allocates and takes back.
pub struct BlockMemory {
    /// Has the system allocate it, from any thread, even during computations.
    pub commit: ChangeBlocks,
    /// Returns it to the system: the blocks are zero when they are next read. No pass may use them at the same time.
    pub release: ChangeBlocks,
}

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

/// The memory of a device. Everything is allocated at load; a step allocates nothing.
pub trait Memory {
    /// Activations in f32: `[rows_max, cols]`.
    type Buffer: Send;
    /// A weight matrix, packed for this device: `[n_out, k]`.
    type Matrix: Send + Sync;
    /// A weight vector in f32: norms, biases.
    type Vector: Send + Sync;
    /// The paged K and V of a cache group's layers.
    type Kv: Send;
    /// Cosines and sines per position.
    type Rope: Send + Sync;
    /// The experts chosen for the rows of a pass, and the buffers to compute with them.
    type Routes: Send;

    /// The device class, which decides how sums are cut.
    fn class(&self) -> DeviceClass;
    /// Devices of equal kind agree in every bit: the class and, for a GPU, its architecture.
    fn device_kind(&self) -> DeviceKind {
        self.class().into()
    }
    /// The numerics mode, on devices that have a choice.
    fn numerics_mode(&self) -> NumericsMode {
        NumericsMode::Lockstep
    }

    fn buffer(&self, rows_max: usize, cols: usize) -> Result<Self::Buffer>;
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
    /// Calls `work` with ranges that together are `0..n_items`, each item once, on the threads that pack weights;
    /// returns when all are done. `work` must not call this device.
    fn parallel_for(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync));
    /// Matrices that meet the same input are stacked by rows, so that it is quantized once. Their types may differ.
    fn matrix(&self, parts: &[StoredMatrix<'_>]) -> Result<Self::Matrix>;
    /// A row-parallel matrix: `stored` holds the columns `leaves.elements(&owned)` of the whole, and the product is
    /// kept as the sums of the largest aligned runs of leaves in `owned`.
    fn matrix_leaves(&self, stored: StoredMatrix<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<Self::Matrix>;
    fn kv(&self, spec: KvSpec) -> Result<Self::Kv>;
    /// Refuses recurrent layers of a shape that this device has no kernel for, before anything is read.
    fn check_recurrence(&self, heads: &RecurrentHeads) -> Result<()>;
    /// The same for short convolutions.
    fn check_convolution(&self, channels: &ConvolvedChannels) -> Result<()>;
    /// Zeroes these blocks in every layer, so that a later sequence finds nothing of an earlier one.
    fn clear(&self, kv: &mut Self::Kv, blocks: &[BlockId]);
    /// The memory of the cache's blocks. None if it is allocated when the cache is made.
    fn block_memory(&self, _kv: &Self::Kv) -> Option<BlockMemory> {
        None
    }
    /// The raw bytes of a block in one layer, for tests.
    fn read_block(&self, kv: &Self::Kv, layer: usize, block: BlockId) -> Vec<u8>;
    /// `cos` and `sin`: `[context, head_dim / 2]`, made once by portable arithmetic.
    fn rope(&self, cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Self::Rope>;
    /// Allocates memory for the batches that `begin` takes.
    fn reserve_batches(&self, _limits: BatchLimits) -> Result<()> {
        Ok(())
    }

    /// Called at the start of every pass, so that the device can upload what it needs before it computes.
    fn begin_pass(&self, _pass: &Pass<'_>) {}

    /// Allocates routes for passes of up to `rows_max` rows through experts of `[inner, hidden]`.
    fn routes(&self, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Self::Routes>;

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
    /// Reads rows back, for collectives and tests.
    fn read(&self, buffer: &Self::Buffer, rows: Range<usize>, out: &mut [f32]);
    /// Writes rows, for stage hand-off and tests.
    fn write(&self, buffer: &mut Self::Buffer, row: usize, values: &[f32]);
    /// The number of columns that `buffer` was made with.
    fn cols(&self, buffer: &Self::Buffer) -> usize;
    /// Reads columns of one row from `col` on.
    fn read_part(&self, buffer: &Self::Buffer, row: usize, col: usize, out: &mut [f32]);
    /// Writes columns of one row from `col` on.
    fn write_part(&self, buffer: &mut Self::Buffer, row: usize, col: usize, values: &[f32]);
}

/// A cache group's pages on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSpec {
    pub n_layers: usize,
    pub n_blocks: usize,
    /// The heads and widths of this rank.
    pub layout: KvLayout,
    pub dtype: KvDtype,
}

impl KvSpec {
    /// Bytes of one block over all layers: the unit of the pool's size.
    pub fn block_bytes(&self) -> u64 {
        self.layout.page_bytes(self.dtype).saturating_mul(self.n_layers as u64)
    }

    /// Bytes of a layer's pages and of all pages, if each takes `page_bytes`; None on overflow.
    pub(crate) fn sizes(&self, page_bytes: u64) -> Option<(usize, usize)> {
        let of_layer = usize::try_from(page_bytes).ok()?.checked_mul(self.n_blocks)?;
        Some((of_layer, of_layer.checked_mul(self.n_layers)?))
    }

    /// The number of heads, and the width of K and V, which must be equal here; of recurrent heads, no width.
    pub(crate) fn heads(&self) -> Result<(usize, usize)> {
        match self.layout {
            KvLayout::Heads { n, k, v, .. } if k == v => Ok((n as usize, k as usize)),
            KvLayout::Heads { k, v, .. } => Err(Error::Shape(format!("heads with {k} numbers of K and {v} of V"))),
            KvLayout::State { n, .. } => Ok((n as usize, 0)),
        }
    }
}

/// Which elements of a head the rope rotates together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// i and i + d/2: Hugging Face's layout.
    Halves,
    /// 2i and 2i + 1: the layout of a GGUF whose converter permuted Q and K.
    Pairs,
}
