//! The blocks that a sequence holds of one group.

use alloc::vec::Vec;
use types::BlockId;

/// A sequence's block table in one group: entry i is for positions `[i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)`.
///
/// `[0, n_passed) behind the window, NONE · [n_passed, len) held`, of a recurrence only those that are not NONE.
#[derive(Clone, Default)]
pub(crate) struct BlockTable {
    pub blocks: Vec<BlockId>,
    pub n_passed: u32,
    pub n_held: u32,
}

impl BlockTable {
    /// The blocks that it holds, with their places.
    pub fn held(&self) -> impl DoubleEndedIterator<Item = (usize, BlockId)> + '_ {
        let places = self.blocks.iter().copied().enumerate().skip(self.n_passed as usize);
        places.filter(|(_, block)| *block != BlockId::NONE)
    }

    pub fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
        self.n_held += u32::from(block != BlockId::NONE);
    }

    pub fn clear(&mut self) {
        self.blocks.clear();
        (self.n_passed, self.n_held) = (0, 0);
    }
}
