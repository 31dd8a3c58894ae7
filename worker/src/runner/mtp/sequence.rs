//! One sequence in the cache of the layer that predicts one token further. Has no knowledge of passes.

use crate::runner::draft_model::{CachedLog, DraftMemory};
use std::ops::Range;
use types::cache::blocks_for;
use types::{DRAFT_ROWS_MAX, Request, Sampling, Token};

/// `[first, end) of the log is in the cache`, from the cache's position 0 on. What the model computed before `first`
/// was not seen: attention without it changes only guesses.
#[derive(Debug, Default)]
pub(super) struct MtpSequence {
    /// The log, and the guesses behind it.
    pub tokens: Vec<Token>,
    pub n_log: usize,
    first: usize,
    end: usize,
    n_prompt: usize,
    /// The model's sampling, without the fields that change no token.
    pub sampling: Sampling,
    pub memory: DraftMemory,
}

impl CachedLog for MtpSequence {
    fn restart(&mut self, request: &Request, context: usize) {
        let n_max = request.prompt.len().saturating_add(request.sampling.tokens_max as usize).max(request.n_tokens());
        self.tokens.clear();
        self.tokens.reserve(n_max.min(context) + DRAFT_ROWS_MAX as usize);
        (self.n_log, self.first, self.end) = (0, 0, 0);
        self.n_prompt = request.prompt.len();
        self.sampling.clone_from(&request.sampling);
        self.sampling.logprobs = None;
        self.memory.blocks.reserve(blocks_for(n_max.min(context) as u32 + DRAFT_ROWS_MAX) as usize);
    }

    fn memory(&mut self) -> &mut DraftMemory {
        &mut self.memory
    }
}

impl MtpSequence {
    /// Continues behind this log, after the model has computed `computed`. Returns the positions of it whose next token
    /// is known: those are to be computed. Positions that follow none in the cache begin it anew.
    pub fn follow(&mut self, log: &[Token], computed: Range<u32>) -> Range<usize> {
        self.tokens.truncate(self.n_log.min(log.len()));
        self.tokens.extend_from_slice(&log[self.tokens.len()..]);
        self.n_log = log.len();
        let (start, end) = (computed.start as usize, (computed.end as usize).min(log.len().saturating_sub(1)));
        if !(self.first..=self.end).contains(&start) {
            self.first = start;
        }
        self.end = end.max(start);
        start..self.end
    }

    /// The positions in the cache of these positions of the log.
    pub fn in_cache(&self, positions: &Range<usize>) -> Range<usize> {
        positions.start - self.first..positions.end - self.first
    }

    /// Whether the cache has all positions that guesses behind the log need.
    pub fn has_caught_up(&self) -> bool {
        self.end + 1 == self.n_log
    }

    /// Forgets what is in the cache.
    pub fn lose(&mut self) {
        (self.first, self.end) = (0, 0);
    }

    pub fn n_guessed(&self) -> usize {
        self.tokens.len() - self.n_log
    }

    /// Returns prompt and output.
    pub fn prompt_and_output(&self) -> (&[Token], &[Token]) {
        self.tokens.split_at(self.n_prompt.min(self.tokens.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence() -> MtpSequence {
        let mut sequence = MtpSequence::default();
        sequence.restart(&Request { prompt: vec![1, 2, 3, 4, 5, 6], ..Request::default() }, 64);
        sequence
    }

    #[test]
    fn positions_are_computed_as_far_as_the_next_token_is_known() {
        let mut sequence = sequence();
        // A chunk of the prompt, then the rest of it and a drawn token.
        assert_eq!(sequence.follow(&[1, 2, 3, 4, 5, 6], 0..4), 0..4);
        assert!(!sequence.has_caught_up());
        assert_eq!(sequence.follow(&[1, 2, 3, 4, 5, 6, 7], 4..6), 4..6);
        assert!(sequence.has_caught_up());
        // Of three drafts one holds: the rows of the others count for nothing.
        sequence.tokens.extend([8, 9, 9]);
        assert_eq!(sequence.n_guessed(), 3);
        assert_eq!(sequence.follow(&[1, 2, 3, 4, 5, 6, 7, 8, 5], 6..10), 6..8);
        assert_eq!((sequence.n_guessed(), sequence.has_caught_up()), (0, true));
        assert_eq!(sequence.tokens, [1, 2, 3, 4, 5, 6, 7, 8, 5]);
        // A step is repeated.
        assert_eq!(sequence.follow(&[1, 2, 3, 4, 5, 6, 7, 8, 5, 4], 8..9), 8..9);
        assert_eq!(sequence.in_cache(&(8..9)), 8..9);
    }

    #[test]
    fn positions_that_were_not_seen_are_left_out() {
        let mut sequence = sequence();
        // The first four came from the cache of prefixes.
        assert_eq!(sequence.follow(&[1, 2, 3, 4, 5, 6, 7], 4..6), 4..6);
        assert_eq!(sequence.in_cache(&(4..6)), 0..2);
        assert!(sequence.has_caught_up());
        // Position 6 is missing.
        assert_eq!(sequence.follow(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 7..8), 7..8);
        assert_eq!(sequence.in_cache(&(7..8)), 0..1);
        // Positions are computed again from the beginning.
        assert_eq!(sequence.follow(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 0..9), 0..8);
        assert_eq!(sequence.in_cache(&(0..8)), 0..8);
    }
}
