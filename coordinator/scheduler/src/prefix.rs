//! Maps the name of a full block's content to its block. A hash table of a fixed size, so that naming never allocates.
//! `plan` looks up prefix hits in it when a sequence is admitted; `apply` names blocks that have become full.

use crate::journal::BlockNameJournal;
use alloc::vec;
use alloc::vec::Vec;
use types::{BlockHash, BlockId};

const NONE: u32 = u32::MAX;

pub(crate) struct PrefixIndex {
    /// The first block of each chain. A name is a cryptographic hash already: its first bits select the chain.
    buckets: Vec<u32>,
    /// The next block of the same chain.
    next: Vec<u32>,
    names: Vec<Option<BlockHash>>,
    n_named: u32,
    pub journal: BlockNameJournal,
}

impl PrefixIndex {
    pub fn new(n_blocks: u32) -> PrefixIndex {
        PrefixIndex {
            buckets: vec![NONE; (n_blocks as usize).next_power_of_two()],
            next: vec![NONE; n_blocks as usize],
            names: vec![None; n_blocks as usize],
            n_named: 0,
            journal: BlockNameJournal::new(),
        }
    }

    fn bucket(&self, name: &BlockHash) -> usize {
        let [a, b, c, d, ..] = name.0;
        u32::from_le_bytes([a, b, c, d]) as usize & (self.buckets.len() - 1)
    }

    pub fn find(&self, name: &BlockHash) -> Option<BlockId> {
        let mut at = self.buckets[self.bucket(name)];
        while at != NONE {
            if self.names[at as usize].as_ref() == Some(name) {
                return Some(BlockId(at));
            }
            at = self.next[at as usize];
        }
        None
    }

    pub fn name_of(&self, block: BlockId) -> Option<&BlockHash> {
        self.names[block.0 as usize].as_ref()
    }

    pub fn insert(&mut self, block: BlockId, name: BlockHash) {
        debug_assert!(self.name_of(block).is_none() && self.find(&name).is_none());
        let bucket = self.bucket(&name);
        self.next[block.0 as usize] = self.buckets[bucket];
        self.buckets[bucket] = block.0;
        self.names[block.0 as usize] = Some(name);
        self.n_named += 1;
        self.journal.note(name.short(), true);
    }

    pub fn remove(&mut self, block: BlockId) {
        let Some(name) = self.names[block.0 as usize].take() else { return };
        let bucket = self.bucket(&name);
        let after = core::mem::replace(&mut self.next[block.0 as usize], NONE);
        self.n_named -= 1;
        self.journal.note(name.short(), false);
        if self.buckets[bucket] == block.0 {
            self.buckets[bucket] = after;
            return;
        }
        let mut at = self.buckets[bucket] as usize;
        while self.next[at] != block.0 {
            at = self.next[at] as usize;
        }
        self.next[at] = after;
    }

    /// The names of the blocks in this range. False: there are no blocks behind it.
    pub fn append_names(&self, blocks: core::ops::Range<u32>, out: &mut Vec<u64>) -> bool {
        let end = (blocks.end as usize).min(self.names.len());
        let start = (blocks.start as usize).min(end);
        out.extend(self.names[start..end].iter().flatten().map(BlockHash::short));
        end < self.names.len()
    }

    pub fn n_named(&self) -> u32 {
        self.n_named
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(bucket: u8, rest: u8) -> BlockHash {
        let mut bytes = [rest; 16];
        bytes[..4].copy_from_slice(&[bucket, 0, 0, 0]);
        BlockHash(bytes)
    }

    #[test]
    fn names_of_one_chain_are_found_and_removed_apart() {
        for removed in 0..4u32 {
            let mut index = PrefixIndex::new(4);
            (0..4u32).for_each(|i| index.insert(BlockId(i), name(1, i as u8)));
            index.remove(BlockId(removed));
            for i in 0..4u32 {
                assert_eq!(index.find(&name(1, i as u8)), (i != removed).then_some(BlockId(i)));
            }
            assert_eq!(index.find(&name(0, 0)), None);
            index.insert(BlockId(removed), name(2, 9));
            assert_eq!(index.find(&name(2, 9)), Some(BlockId(removed)));
            assert_eq!(index.n_named(), 4);
        }
    }
}
