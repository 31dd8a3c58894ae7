//! One sequence in a draft model's cache, and the cache's free blocks. Has no knowledge of passes.

use types::cache::blocks_for;
use types::{BlockId, DRAFT_ROWS_MAX, Request, Sampling, Token};

/// `[0, n_computed) in the cache · [n_computed, tokens.len()) to be computed`
#[derive(Debug, Default)]
pub(super) struct DraftSequence {
    /// The log, and the guesses behind it.
    pub tokens: Vec<Token>,
    pub n_computed: usize,
    n_prompt: usize,
    /// The target's sampling, without the fields that change no token.
    pub sampling: Sampling,
    /// The blocks of its positions, the same in each cache group.
    pub table: Vec<BlockId>,
}

impl DraftSequence {
    pub fn restart(&mut self, request: &Request, context: usize) {
        let n_max = request.prompt.len().saturating_add(request.sampling.tokens_max as usize).max(request.n_tokens());
        self.tokens.clear();
        self.tokens.reserve(n_max.min(context) + DRAFT_ROWS_MAX as usize);
        self.n_computed = 0;
        self.n_prompt = request.prompt.len();
        self.sampling.clone_from(&request.sampling);
        self.sampling.logprobs = None;
        self.table.reserve(blocks_for(n_max.min(context) as u32 + DRAFT_ROWS_MAX) as usize);
    }

    /// Continues behind this log. Computes again the last token, whose row draws, and every cached position that has
    /// another token.
    pub fn sync_with_log(&mut self, log: &[Token]) {
        let computed = self.tokens[..self.n_computed].iter();
        let n_same = computed.zip(log).take_while(|(one, other)| one == other).count();
        self.n_computed = n_same.min(log.len() - 1);
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

/// The free blocks of a draft model's cache.
pub(super) struct FreeDraftBlocks {
    free: Vec<BlockId>,
    /// For each cache group the freed blocks that are still to be cleared. None where blocks are not cleared.
    uncleared: Option<Vec<Vec<BlockId>>>,
}

impl FreeDraftBlocks {
    /// `cleared` is the number of groups if freed blocks are cleared.
    pub fn new(n_blocks: u32, cleared: Option<usize>) -> FreeDraftBlocks {
        let uncleared = cleared.map(|n_groups| vec![Vec::with_capacity(n_blocks as usize); n_groups]);
        FreeDraftBlocks { free: (0..n_blocks).rev().map(BlockId).collect(), uncleared }
    }

    /// Extends the table to this many positions. Returns false, and changes nothing, if there are not enough blocks.
    pub fn fill(&mut self, table: &mut Vec<BlockId>, n_positions: usize) -> bool {
        let n_new = (blocks_for(n_positions as u32) as usize).saturating_sub(table.len());
        let Some(n_left) = self.free.len().checked_sub(n_new) else { return false };
        table.extend(self.free.drain(n_left..));
        true
    }

    pub fn take_back(&mut self, table: &mut Vec<BlockId>) {
        for blocks in self.uncleared.iter_mut().flatten() {
            blocks.extend_from_slice(table);
        }
        self.free.append(table);
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

    #[test]
    fn blocks_are_given_whole_or_not_at_all_and_come_back() {
        let (mut free, mut one, mut other) = (FreeDraftBlocks::new(3, Some(2)), Vec::new(), Vec::new());
        assert!(free.fill(&mut one, 17) && free.fill(&mut one, 32) && free.fill(&mut other, 1));
        assert!(!free.fill(&mut other, 17) && other.len() == 1);
        free.take_back(&mut one);
        assert!(one.is_empty() && free.fill(&mut other, 48));
        assert!(free.uncleared().unwrap().iter().all(|blocks| blocks.len() == 2));
    }
}
