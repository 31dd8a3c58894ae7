//! How many drafts a slice has: tokens behind the log that the sampling rank has guessed. They are computed beside the
//! log's last token, and kept as far as they equal what is drawn. Knows no token, and not how they are guessed.
//!
//! Guesses that were no drafts count too: so a sequence without drafts gets some when its guesses begin to hold, and
//! trying costs nothing.

use crate::costs::StepCosts;
use crate::drafting::{DecodeStep, DraftPolicy, MEMORY, SURE, UNTRIED};
use types::DRAFT_ROWS_MAX;

/// The guesses behind a sequence's log.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Guesses {
    /// The drafts that its next slice should have, as of its last answer.
    n_target: u32,
    /// The tokens that were guessed behind its log, as of its last answer.
    n_guessed: u32,
    /// How probable it is that a guess holds, as far as guesses were tried.
    acceptance: u32,
}

impl Default for Guesses {
    fn default() -> Guesses {
        Guesses { n_target: 0, n_guessed: 0, acceptance: UNTRIED }
    }
}

impl Guesses {
    /// Counts an answer: `n_drawn` tokens have come back, of which the first `n_hit` had been guessed.
    pub fn note_drawn(&mut self, n_drawn: u32, n_hit: u32) {
        let n_tried = self.n_guessed.min(n_drawn);
        let n_hit = n_hit.min(n_tried);
        (0..n_hit).for_each(|_| self.acceptance += (SURE - self.acceptance) / MEMORY);
        if n_hit < n_tried {
            self.acceptance -= self.acceptance / MEMORY;
        }
    }

    /// The answer has `n_guessed` new guesses, which `step` may verify.
    pub fn replace(&mut self, n_guessed: u32, policy: DraftPolicy, step: DecodeStep, costs: &StepCosts) {
        self.n_guessed = n_guessed.min(DRAFT_ROWS_MAX);
        self.n_target = policy.n_worth(self.n_guessed, self.acceptance, step, costs);
    }

    /// There are no guesses. How often they held is kept.
    pub fn clear(&mut self) {
        (self.n_target, self.n_guessed) = (0, 0);
    }

    /// The drafts that the next slice should have.
    #[inline]
    pub fn n_target(&self) -> u32 {
        self.n_target
    }

    pub fn check(&self, drafts_max: u32) {
        assert!(self.n_target <= self.n_guessed.min(drafts_max));
    }
}
