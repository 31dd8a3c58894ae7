//! The pages of one sequence's states in a draft model's cache. Has no knowledge of passes.
//!
//! A page has the state at its block's start and the rows of the block's positions (`types::KvLayout::State`). So the
//! page of a position restores every position of its block: what is computed from there on overwrites the rest. Of a
//! known log only the last page is kept. Guesses go on from it in pages of their own, and leave it as it is.

use backend::BlockTables;
use std::ops::Range;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, CacheGroup};

#[derive(Debug, Default)]
pub(super) struct DraftStates {
    /// All of the sequence's pages, the same in each group of states. Empty until it computes.
    pages: Vec<DraftStatePage>,
}

#[derive(Clone, Copy, Debug)]
struct DraftStatePage {
    id: BlockId,
    /// The block of positions whose state it has.
    block: Option<u32>,
}

impl DraftStates {
    pub fn has_pages(&self) -> bool {
        !self.pages.is_empty()
    }

    pub fn give(&mut self, ids: impl Iterator<Item = BlockId>) {
        self.pages.extend(ids.map(|id| DraftStatePage { id, block: None }));
    }

    pub fn take_back(&mut self) -> impl Iterator<Item = BlockId> {
        self.pages.drain(..).map(|page| page.id)
    }

    /// Returns how many of `n_computed` positions need not be computed again: all of them if the page of the last one
    /// is kept, or none.
    pub fn n_restored(&self, n_computed: usize) -> usize {
        let Some(last) = n_computed.checked_sub(1) else { return 0 };
        let last = last as u32 / BLOCK_TOKENS;
        let is_kept = self.pages.is_empty() || self.pages.iter().any(|page| page.block == Some(last));
        if is_kept { n_computed } else { 0 }
    }

    /// Gives pages to the positions of a slice, except to those over which it carries the state. Drops the states of
    /// the positions that it computes again, and those that no slice from position `earliest` on reads. Returns false
    /// if there are not enough pages.
    pub fn cover(&mut self, slice: &Range<u32>, earliest: u32) -> bool {
        let n_before = blocks_for(slice.start);
        let needed = CacheGroup::STATE.n_passed(earliest.min(slice.start))..n_before;
        for page in &mut self.pages {
            page.block = page.block.filter(|block| needed.contains(block));
        }
        let mut new = (n_before..blocks_for(slice.end)).filter(|block| !CacheGroup::STATE.may_lack(*block, slice, 0));
        new.all(|block| {
            let spare = self.pages.iter_mut().find(|page| page.block.is_none());
            spare.map(|page| page.block = Some(block)).is_some()
        })
    }

    /// Adds the table of a slice that ends at `end`.
    pub fn lay_out(&self, end: u32, table: &mut BlockTables) {
        let first = table.blocks.len();
        table.blocks.resize(first + blocks_for(end) as usize, BlockId::NONE);
        for page in &self.pages {
            let entry = page.block.and_then(|block| table.blocks.get_mut(first + block as usize));
            entry.into_iter().for_each(|entry| *entry = page.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::DRAFT_ROWS_MAX;
    use types::cache::DRAFT_STATES_MAX;

    fn states() -> DraftStates {
        let mut states = DraftStates::default();
        states.give((0..DRAFT_STATES_MAX).map(BlockId));
        states
    }

    fn kept(states: &DraftStates) -> Vec<u32> {
        let mut kept: Vec<u32> = states.pages.iter().filter_map(|page| page.block).collect();
        kept.sort_unstable();
        kept
    }

    /// Returns the blocks that have a page in the table of a slice.
    fn in_table(states: &DraftStates, end: u32) -> Vec<usize> {
        let mut table = BlockTables { blocks: vec![BlockId(7)], bounds: vec![0, 1] };
        states.lay_out(end, &mut table);
        (1..table.blocks.len()).filter(|i| table.blocks[*i] != BlockId::NONE).map(|i| i - 1).collect()
    }

    #[test]
    fn a_log_keeps_its_end_and_guesses_have_pages_of_their_own() {
        let mut states = states();
        assert_eq!((states.n_restored(0), DraftStates::default().n_restored(9)), (0, 9));
        assert!(states.cover(&(0..100), 99));
        assert_eq!((kept(&states), in_table(&states, 100)), (vec![6], vec![6]));
        assert!((100..131).all(|at| states.cover(&(at..at + 1), 99)));
        assert_eq!((kept(&states), in_table(&states, 131)), (vec![6, 7, 8], vec![6, 7, 8]));
        // The log goes on behind one guess of them, and then behind all.
        assert_eq!((states.n_restored(101), states.n_restored(131)), (101, 131));
        assert!(states.cover(&(101..103), 102));
        assert_eq!(kept(&states), [6]);
        // The log went back: to a block that is kept, and to one that is not.
        assert_eq!((states.n_restored(97), states.n_restored(96)), (97, 0));
        assert!(states.cover(&(0..20), 19) && kept(&states) == [1]);
        assert_eq!(states.take_back().count() as u32, DRAFT_STATES_MAX);
    }

    /// From every position, with every number of guesses, and with every number of them that hold.
    #[test]
    fn the_pages_are_enough_and_the_next_position_has_its_state() {
        for n_log in 1..70 {
            for n_guesses in 0..=DRAFT_ROWS_MAX {
                let mut states = states();
                assert!(states.cover(&(0..n_log), n_log - 1));
                // The last guess is not computed.
                let end = (n_log + n_guesses).saturating_sub(1).max(n_log);
                assert!((n_log..end).all(|at| states.cover(&(at..at + 1), n_log - 1)));
                assert!((n_log - 1..=end).all(|n| states.n_restored(n as usize) == n as usize), "{n_log} {n_guesses}");
                for n_same in n_log - 1..=end {
                    let mut states = DraftStates { pages: states.pages.clone() };
                    let next = n_same + 1..n_same + 41;
                    assert!(states.cover(&(n_same..next.end), next.end - 1));
                    let reads = n_same.checked_sub(1).map(|last| last as usize / BLOCK_TOKENS as usize);
                    let table = in_table(&states, next.end);
                    assert!(reads.is_none_or(|block| table.contains(&block)), "{n_log} {n_guesses} {n_same}");
                }
            }
        }
    }
}
