//! One sequence in a draft model's cache, and the cache's free blocks. Has no knowledge of passes.

use super::held::CachedLog;
use super::states::DraftStates;
use backend::BlockTables;
use std::ops::Range;
use types::cache::{DRAFT_STATES_MAX, blocks_for};
use types::{BLOCKS_MAX, BlockId, DRAFT_ROWS_MAX, Request, Sampling, Token};

/// `[0, n_computed) in the cache · [n_computed, tokens.len()) to be computed`
#[derive(Debug, Default)]
pub(super) struct DraftSequence {
    /// The log, and the guesses behind it.
    pub tokens: Vec<Token>,
    pub n_computed: usize,
    n_prompt: usize,
    /// The target's sampling, without the fields that change no token.
    pub sampling: Sampling,
    pub memory: DraftMemory,
}

/// Where a sequence is in the cache.
#[derive(Debug, Default)]
pub(in crate::runner) struct DraftMemory {
    /// The blocks of its positions, the same in each group of what attention reads.
    pub blocks: Vec<BlockId>,
    states: DraftStates,
}

impl CachedLog for DraftSequence {
    fn restart(&mut self, request: &Request, context: usize) {
        let n_max = request.prompt.len().saturating_add(request.sampling.tokens_max as usize).max(request.n_tokens());
        self.tokens.clear();
        self.tokens.reserve(n_max.min(context) + DRAFT_ROWS_MAX as usize);
        self.n_computed = 0;
        self.n_prompt = request.prompt.len();
        self.sampling.clone_from(&request.sampling);
        self.sampling.logprobs = None;
        self.memory.blocks.reserve(blocks_for(n_max.min(context) as u32 + DRAFT_ROWS_MAX) as usize);
    }

    fn memory(&mut self) -> &mut DraftMemory {
        &mut self.memory
    }
}

impl DraftSequence {
    /// Continues behind this log. Computes again the last token, whose row draws, and every cached position that has
    /// another token or whose state is lost.
    pub fn sync_with_log(&mut self, log: &[Token]) {
        let computed = self.tokens[..self.n_computed].iter();
        let n_same = computed.zip(log).take_while(|(one, other)| one == other).count();
        self.n_computed = self.memory.states.n_restored(n_same.min(log.len() - 1));
        self.tokens.truncate(n_same);
        self.tokens.extend_from_slice(&log[n_same..]);
    }

    pub fn n_lacking(&self) -> usize {
        self.tokens.len() - self.n_computed
    }

    /// Returns prompt and output.
    pub fn prompt_and_output(&self) -> (&[Token], &[Token]) {
        self.tokens.split_at(self.n_prompt.min(self.tokens.len()))
    }
}

impl DraftMemory {
    /// Adds the tables of a slice that ends at `end`.
    pub fn lay_out(&self, end: u32, are_states: &[bool], tables: &mut [BlockTables]) {
        for (table, is_state) in tables.iter_mut().zip(are_states) {
            if *is_state {
                self.states.lay_out(end, table);
            } else {
                table.blocks.extend_from_slice(&self.blocks);
            }
            table.bounds.push(table.blocks.len() as u32);
        }
    }
}

/// How many sequences a draft model's cache has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::runner) struct DraftRoom {
    pub n_blocks: u32,
    /// The pages of states.
    pub n_pages: u32,
}

impl DraftRoom {
    /// Divides `n_bytes` between blocks and pages, of these sizes over all groups, for at most `n_sequences` of
    /// `n_blocks_each`. States get half, and what blocks do not need.
    pub fn divide(n_bytes: u64, sizes: [u64; 2], n_sequences: u32, n_blocks_each: u32) -> DraftRoom {
        let [block_bytes, page_bytes] = sizes;
        let n_blocks_max = u64::from(n_sequences) * u64::from(n_blocks_each);
        let of_blocks = block_bytes.saturating_mul(n_blocks_max);
        let of_states = (n_bytes / 2).max(n_bytes.saturating_sub(of_blocks));
        let (n_each, n_most) = (u64::from(DRAFT_STATES_MAX), u64::from(n_sequences.max(1)));
        let n_with_states = of_states.checked_div(page_bytes.saturating_mul(n_each)).unwrap_or(n_most).clamp(1, n_most);
        let n_pages = (n_with_states * n_each).min(BLOCKS_MAX.into());
        let rest = n_bytes.saturating_sub(page_bytes.saturating_mul(n_pages));
        let n_blocks =
            rest.checked_div(block_bytes).unwrap_or(n_blocks_max).min(n_blocks_max).clamp(1, BLOCKS_MAX.into());
        DraftRoom { n_blocks: n_blocks as u32, n_pages: n_pages as u32 }
    }

    /// The blocks of a cache group.
    pub fn of_group(&self, is_state: bool) -> u32 {
        if is_state { self.n_pages } else { self.n_blocks }
    }
}

/// The free blocks and pages of a draft model's cache.
pub(in crate::runner) struct FreeDraftBlocks {
    blocks: Vec<BlockId>,
    /// None without any group of states.
    pages: Option<Vec<BlockId>>,
    /// For each cache group whether it has states.
    are_states: Vec<bool>,
    /// For each cache group the freed blocks that are still to be cleared. None where blocks are not cleared.
    uncleared: Option<Vec<Vec<BlockId>>>,
}

impl FreeDraftBlocks {
    pub fn new(room: DraftRoom, are_states: Vec<bool>, is_cleared: bool) -> FreeDraftBlocks {
        let all = |n: u32| (0..n).rev().map(BlockId).collect();
        let list = |is_state: &bool| Vec::with_capacity(room.of_group(*is_state) as usize);
        let uncleared = is_cleared.then(|| are_states.iter().map(list).collect());
        let pages = are_states.contains(&true).then(|| all(room.n_pages));
        FreeDraftBlocks { blocks: all(room.n_blocks), pages, are_states, uncleared }
    }

    pub fn are_states(&self) -> &[bool] {
        &self.are_states
    }

    /// Prepares the memory for a slice. Later slices begin at `earliest` or behind it. Returns false if there is not
    /// enough; then the sequence gets no block.
    pub fn fill(&mut self, memory: &mut DraftMemory, slice: &Range<u32>, earliest: u32) -> bool {
        let n_new = (blocks_for(slice.end) as usize).saturating_sub(memory.blocks.len());
        let Some(n_left) = self.blocks.len().checked_sub(n_new) else { return false };
        if let Some(pages) = &mut self.pages {
            // All pages at once, so that a sequence that has begun never waits for one.
            if !memory.states.has_pages() {
                let Some(n_left) = pages.len().checked_sub(DRAFT_STATES_MAX as usize) else { return false };
                memory.states.give(pages.drain(n_left..));
            }
            if !memory.states.cover(slice, earliest) {
                return false;
            }
        }
        memory.blocks.extend(self.blocks.drain(n_left..));
        true
    }

    pub fn take_back(&mut self, memory: &mut DraftMemory) {
        let n_pages = self.pages.as_ref().map_or(0, Vec::len);
        if let Some(pages) = &mut self.pages {
            pages.extend(memory.states.take_back());
        }
        let pages = self.pages.as_deref().unwrap_or_default().get(n_pages..).unwrap_or_default();
        for (freed, is_state) in self.uncleared.iter_mut().flatten().zip(&self.are_states) {
            freed.extend_from_slice(if *is_state { pages } else { &memory.blocks });
        }
        self.blocks.append(&mut memory.blocks);
    }

    pub fn uncleared(&mut self) -> Option<&mut [Vec<BlockId>]> {
        self.uncleared.as_deref_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn following(logs: &[&[Token]], guesses: &[Token]) -> (Vec<Token>, usize) {
        let mut drafted = DraftSequence::default();
        drafted.restart(&Request { prompt: vec![1, 2, 3], ..Request::default() }, 64);
        for log in logs {
            drafted.sync_with_log(log);
            drafted.n_computed = drafted.tokens.len();
            drafted.tokens.extend_from_slice(guesses);
            drafted.n_computed = drafted.tokens.len() - 1;
        }
        (drafted.tokens, drafted.n_computed)
    }

    #[test]
    fn what_held_stays_and_the_last_token_is_computed_again() {
        let check = |log: &[Token], n_computed| {
            let (tokens, n) = following(&[&[1, 2, 3]], &[7, 8, 9]);
            let mut drafted = DraftSequence { tokens, n_computed: n, ..DraftSequence::default() };
            drafted.sync_with_log(log);
            assert_eq!((drafted.tokens.as_slice(), drafted.n_computed), (log, n_computed), "{log:?}");
        };
        // All tokens hold, and one more follows.
        check(&[1, 2, 3, 7, 8, 9], 5);
        check(&[1, 2, 3, 7, 8, 9, 4], 5);
        // The second guess fails, and then the first.
        check(&[1, 2, 3, 7, 5], 4);
        check(&[1, 2, 3, 6], 3);
        // The log went back.
        check(&[1, 2], 1);
    }

    const ROOM: DraftRoom = DraftRoom { n_blocks: 3, n_pages: 4 };

    #[test]
    fn blocks_are_given_whole_or_not_at_all_and_come_back() {
        let mut free = FreeDraftBlocks::new(ROOM, vec![false, false], true);
        let (mut one, mut other) = (DraftMemory::default(), DraftMemory::default());
        assert!(free.fill(&mut one, &(0..17), 16) && free.fill(&mut one, &(17..32), 31));
        assert!(free.fill(&mut other, &(0..1), 0));
        assert!(!free.fill(&mut other, &(1..17), 16) && other.blocks.len() == 1);
        free.take_back(&mut one);
        assert!(one.blocks.is_empty() && free.fill(&mut other, &(1..48), 47));
        assert!(free.uncleared().unwrap().iter().all(|blocks| blocks.len() == 2));
    }

    #[test]
    fn pages_of_states_are_given_all_at_once_and_come_back() {
        let mut free = FreeDraftBlocks::new(ROOM, vec![true, false], true);
        let (mut one, mut other) = (DraftMemory::default(), DraftMemory::default());
        assert!(free.fill(&mut one, &(0..1), 0));
        assert!(!free.fill(&mut other, &(0..1), 0), "one page is left");
        assert!(other.blocks.is_empty(), "a sequence without pages holds no blocks");
        let mut tables = [BlockTables::default(), BlockTables::default()];
        one.lay_out(1, free.are_states(), &mut tables);
        assert_eq!(tables.each_ref().map(|table| table.bounds.as_slice()), [[0, 1], [0, 1]]);
        free.take_back(&mut one);
        assert!(free.fill(&mut other, &(0..33), 32));
        assert_eq!(free.uncleared().unwrap().iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
    }

    #[test]
    fn room_is_divided_between_blocks_and_states() {
        let room = |n_bytes, sizes| {
            let DraftRoom { n_blocks, n_pages } = DraftRoom::divide(n_bytes, sizes, 8, 10);
            (n_blocks, n_pages)
        };
        assert_eq!((room(500, [10, 0]).0, room(5000, [10, 0]).0, room(5, [10, 0]).0), (50, 80, 1));
        assert_eq!(room(600, [10, 20]), (30, 15), "half of it has states of five sequences");
        assert_eq!(room(1000, [10, 20]), (52, 24), "more than eight sequences do not run");
        assert_eq!(room(600, [1, 20]), (80, 24), "blocks need less than half");
        assert_eq!((room(130, [0, 20]), room(50, [0, 20])), ((80, 6), (80, 3)), "nothing but states");
        assert_eq!(room(10, [10, 20]), (1, 3), "one sequence at least");
    }
}
