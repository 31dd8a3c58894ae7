//! The blocks that sequences have freed and that must be cleared. Has no knowledge of devices.
//!
//! Blocks that are cleared are never shared, so each has one holder. A sequence whose next position is `p` holds these
//! blocks of a group:
//!
//! `[0, n_passed(p)) freed before, perhaps of another sequence by now · [n_passed(p), table.len()) its own`
//!
//! A coordinator gives a block to another sequence in a later step than the last slice that reads it, and a rank runs
//! steps in order. So it is early enough to clear blocks when a step begins.

use crate::runner::sequences::limits::SequenceLimits;
use std::ops::Range;
use types::{BlockId, CacheGroup};

pub(crate) struct FreedBlocks {
    groups: Vec<CacheGroup>,
    /// One list per group: blocks freed since the last clearing.
    blocks: Vec<Vec<BlockId>>,
}

impl FreedBlocks {
    /// A block has one holder and so is in the list once: no step needs more room.
    pub fn new(limits: &SequenceLimits) -> FreedBlocks {
        let room = |n_blocks: &u32| Vec::with_capacity(*n_blocks as usize);
        let blocks = match limits.keeps_nothing() {
            // The memory of a pass.
            true => vec![Vec::with_capacity(limits.rows_max)],
            false => limits.n_blocks.iter().map(room).collect(),
        };
        FreedBlocks { groups: limits.groups.clone(), blocks }
    }

    /// Returns the blocks in ascending order, so that neighbouring blocks are adjacent, which devices prefer.
    pub fn uncleared(&mut self) -> &mut [Vec<BlockId>] {
        self.blocks.iter_mut().for_each(|blocks| blocks.sort_unstable());
        &mut self.blocks
    }

    /// Before a slice is computed: frees the blocks before the window of its end, which no later slice reads.
    pub fn free_passed(&mut self, tables: &[Vec<BlockId>], slice: &Range<u32>) {
        self.note(tables, |group, _| group.n_passed(slice.start) as usize..group.n_passed(slice.end) as usize);
    }

    /// Frees the blocks of a sequence that ends, whose next position would be `n_computed`.
    pub fn leave(&mut self, tables: &[Vec<BlockId>], n_computed: u32) {
        self.note(tables, |group, n_blocks| group.n_passed(n_computed) as usize..n_blocks);
    }

    /// A pass of a model that keeps nothing uses these blocks, and no later one reads them.
    pub fn leave_pass(&mut self, used: &[BlockId]) {
        self.blocks.iter_mut().for_each(|blocks| blocks.extend_from_slice(used));
    }

    fn note(&mut self, tables: &[Vec<BlockId>], entries: impl Fn(&CacheGroup, usize) -> Range<usize>) {
        for ((group, table), blocks) in self.groups.iter().zip(tables).zip(&mut self.blocks) {
            // A sequence that broke the protocol in the middle of a slice has fewer blocks.
            let freed = table.get(entries(group, table.len())).unwrap_or_default();
            blocks.extend(freed.iter().filter(|block| **block != BlockId::NONE));
        }
    }
}
