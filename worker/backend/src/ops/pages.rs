//! The pages of the cache.

use crate::{Error, Result};
use std::ops::Range;
use types::{BlockId, KvDtype, KvLayout};

/// Changes the memory behind a range of a cache's blocks, in every layer.
pub type ChangeBlocks = Box<dyn Fn(Range<u32>) -> std::io::Result<()> + Send>;

/// The memory of a cache's blocks, which the system allocates and takes back.
pub struct BlockMemory {
    /// Has the system allocate it, from any thread, even during computations.
    pub commit: ChangeBlocks,
    /// Returns it to the system: the blocks are zero when they are next read. No pass may use them at the same time.
    pub release: ChangeBlocks,
}

/// The bytes of a block over all layers, on their way to the host. The call waits for them, in any thread.
pub type PageCopy = Box<dyn FnOnce() -> Result<Vec<u8>> + Send>;

/// Writes the bytes of a block over all layers, from any thread, even during computations. Nothing may use the block at
/// the same time.
pub type WritePage = Box<dyn Fn(BlockId, &[u8]) -> Result<()> + Send + Sync>;

/// Moves the pages of a cache group between its blocks and the host, beside the passes.
pub trait PageMover: Send + Sync {
    /// The bytes of a block in one layer.
    fn block_bytes(&self) -> usize;
    /// Begins to copy a block as the passes begun so far leave it. None while too many copies are under way.
    fn copy(&self, block: BlockId) -> Option<PageCopy>;
    /// Returns what writes blocks that no pass uses which is begun later. Passes begun so far may still read them.
    fn writer(&self) -> Result<WritePage>;
}

/// The pages of the cache. They are allocated at load.
pub trait KvPages {
    /// The paged K and V, or the states, of a cache group's layers.
    type Kv: Send;

    fn kv(&self, spec: KvSpec) -> Result<Self::Kv>;
    /// Zeroes these blocks in every layer, so that a later sequence finds nothing of an earlier one.
    fn clear(&self, kv: &mut Self::Kv, blocks: &[BlockId]);
    /// The memory of the cache's blocks. None if it is allocated when the cache is made.
    fn block_memory(&self, _kv: &Self::Kv) -> Option<BlockMemory> {
        None
    }
    /// Returns what moves pages to and from the host. Its memory is allocated here.
    fn page_mover(&self, kv: &Self::Kv) -> Result<Box<dyn PageMover>>;
    /// The raw bytes of a block in one layer.
    fn read_block(&self, kv: &Self::Kv, layer: usize, block: BlockId) -> Vec<u8>;
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
