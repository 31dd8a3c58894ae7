//! Which blocks are to be cleared: those that sequences have let go. Knows nothing of devices.
//!
//! Where blocks are cleared nobody shares one, so each has one holder. What a sequence holds of a group when its next
//! position is `p`:
//!
//! `[0, n_passed(p)) let go before, perhaps others' by now · [n_passed(p), table.len()) its own`
//!
//! A coordinator gives a block to another at the earliest in the step behind the last slice that reads it, and a rank
//! runs steps in order. So it is soon enough to clear when a step begins.

use crate::runner::sequences::limits::SequenceLimits;
use std::ops::Range;
use types::{BlockId, CacheGroup};

pub(crate) struct LetGo {
    groups: Vec<CacheGroup>,
    /// Of each group, since they were last cleared.
    blocks: Vec<Vec<BlockId>>,
}

impl LetGo {
    /// A block is in there once, as it has one holder: no step needs more room.
    pub fn new(limits: &SequenceLimits) -> LetGo {
        let room = |n_blocks: &u32| Vec::with_capacity(*n_blocks as usize);
        LetGo { groups: limits.groups.clone(), blocks: limits.n_blocks.iter().map(room).collect() }
    }

    /// Those side by side stand in a row, as devices like them best.
    pub fn uncleared(&mut self) -> &mut [Vec<BlockId>] {
        self.blocks.iter_mut().for_each(|blocks| blocks.sort_unstable());
        &mut self.blocks
    }

    /// A slice is going to be computed: no later one reads what is behind the windows of its end.
    pub fn pass(&mut self, tables: &[Vec<BlockId>], slice: &Range<u32>) {
        self.note(tables, |group, _| group.n_passed(slice.start) as usize..group.n_passed(slice.end) as usize);
    }

    /// A sequence is forgotten whose next position this would be.
    pub fn leave(&mut self, tables: &[Vec<BlockId>], n_computed: u32) {
        self.note(tables, |group, n_blocks| group.n_passed(n_computed) as usize..n_blocks);
    }

    fn note(&mut self, tables: &[Vec<BlockId>], entries: impl Fn(&CacheGroup, usize) -> Range<usize>) {
        for ((group, table), blocks) in self.groups.iter().zip(tables).zip(&mut self.blocks) {
            // A sequence that broke the protocol in the middle of a slice has fewer.
            blocks.extend_from_slice(table.get(entries(group, table.len())).unwrap_or_default());
        }
    }
}
