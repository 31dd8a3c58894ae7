//! Blocks in the order of their last use: a linked list in arrays, so that it never allocates.

use alloc::vec;
use alloc::vec::Vec;
use types::BlockId;

const NONE: u32 = u32::MAX;

pub(crate) struct Lru {
    /// Links to the next older and the next newer block; the last entry is the list's own head and tail.
    older: Vec<u32>,
    newer: Vec<u32>,
    len: u32,
}

impl Lru {
    pub fn new(n_blocks: u32) -> Lru {
        let mut lru =
            Lru { older: vec![NONE; n_blocks as usize + 1], newer: vec![NONE; n_blocks as usize + 1], len: 0 };
        let ends = lru.ends();
        (lru.older[ends], lru.newer[ends]) = (n_blocks, n_blocks);
        lru
    }

    fn ends(&self) -> usize {
        self.older.len() - 1
    }

    /// Adds a block as the newest.
    pub fn push(&mut self, block: BlockId) {
        debug_assert!(!self.contains(block));
        let (ends, at) = (self.ends(), block.0 as usize);
        let newest = self.older[ends];
        (self.older[at], self.newer[at]) = (newest, ends as u32);
        self.newer[newest as usize] = block.0;
        self.older[ends] = block.0;
        self.len += 1;
    }

    pub fn remove(&mut self, block: BlockId) {
        debug_assert!(self.contains(block));
        let (older, newer) = (self.older[block.0 as usize], self.newer[block.0 as usize]);
        self.newer[older as usize] = newer;
        self.older[newer as usize] = older;
        (self.older[block.0 as usize], self.newer[block.0 as usize]) = (NONE, NONE);
        self.len -= 1;
    }

    pub fn pop_oldest(&mut self) -> Option<BlockId> {
        let oldest = BlockId(self.newer[self.ends()]);
        if self.len == 0 {
            return None;
        }
        self.remove(oldest);
        Some(oldest)
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.older[block.0 as usize] != NONE
    }

    pub fn len(&self) -> u32 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first() {
        let mut lru = Lru::new(5);
        assert_eq!(lru.pop_oldest(), None);
        for block in [3, 0, 4, 1] {
            lru.push(BlockId(block));
        }
        lru.remove(BlockId(0));
        lru.remove(BlockId(1));
        lru.push(BlockId(0));
        assert_eq!(lru.len(), 3);
        let order: Vec<_> = core::iter::from_fn(|| lru.pop_oldest()).collect();
        assert_eq!(order, [BlockId(3), BlockId(4), BlockId(0)]);
        assert!(!lru.contains(BlockId(3)));
    }
}
