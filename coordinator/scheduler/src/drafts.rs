//! How many drafts a slice has: tokens behind the log that the sampling rank has guessed. They are computed beside the
//! log's last token, and kept as far as they equal what is drawn. Knows no token, and not how they are guessed.
//!
//! Guesses that were no drafts count too: so a sequence without drafts gets some when its guesses begin to hold, and
//! trying costs nothing.

use crate::drafting::{DraftPolicy, MEMORY, SURE};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use types::{DRAFT_ROWS_MAX, Goal};

impl Sequence {
    /// Counts an answer: `n_drawn` tokens have come back, of which the first `n_hit` had been guessed.
    fn note_guesses(&mut self, n_drawn: u32, n_hit: u32) {
        let n_tried = self.n_guess.min(n_drawn);
        let n_hit = n_hit.min(n_tried);
        (0..n_hit).for_each(|_| self.acceptance += (SURE - self.acceptance) / MEMORY);
        if n_hit < n_tried {
            self.acceptance -= self.acceptance / MEMORY;
        }
    }

    /// Returns the drafts of its slice that is being planned, if there are rows for `n_max`.
    fn n_drafts_now(&self, n_max: u32) -> u32 {
        // Its turn is the log's last token, and nothing of it is in flight: the guesses stand behind that token.
        let is_settled = self.turn == 1 && !self.awaits_draw();
        let n_fitting = (self.length_max - 1).saturating_sub(self.n_known());
        if is_settled { self.n_drafts_target.min(n_fitting).min(n_max) } else { 0 }
    }
}

impl Scheduler {
    /// Slices planned ahead of known tokens. While any sequence has drafts there are none: the others would go on in
    /// steps of their own, and a step costs much the same for a few rows as for one.
    pub(crate) fn ahead_now(&self) -> u32 {
        let drafts = |idx: &u32| self.sequences[*idx].n_drafts_target > 0;
        if self.running.iter().any(drafts) { 0 } else { self.config.slices_ahead_max }
    }

    /// Adds drafts to the turns of the step being planned. Returns how many, which leaves at least half of the tokens
    /// that are not needed for turns to chunks.
    pub(crate) fn give_drafts(&mut self) -> u32 {
        if self.config.drafting == DraftPolicy::Off {
            return 0;
        }
        let n_spare = (self.config.batch_tokens_max - self.running.len() as u32) / 2;
        let n_all = DRAFT_ROWS_MAX.min(n_spare);
        let slice_max = self.config.slice_max() - 1;
        let mut n_left = n_all;
        for &idx in &self.running {
            let sequence = &mut self.sequences[idx];
            sequence.n_drafts = sequence.n_drafts_now(n_left.min(slice_max));
            sequence.turn += sequence.n_drafts;
            n_left -= sequence.n_drafts;
        }
        n_all - n_left
    }

    /// Takes the guesses of an answer: how many hit, and how many there are for the next slice.
    pub(crate) fn note_guesses(&mut self, idx: u32, n_drawn: u32, n_hit: u32, n_guess: u32) {
        if self.config.drafting == DraftPolicy::Off {
            return;
        }
        let n_rows = (self.running.len() as u32).div_ceil(self.steps_per_turn());
        let drafting = self.config.drafting;
        let sequence = &mut self.sequences[idx];
        sequence.note_guesses(n_drawn, n_hit);
        // Rows of prompts are drawn one by one.
        let may_have_drafts = sequence.request.goal == Goal::Generate;
        sequence.n_guess = if may_have_drafts { n_guess.min(DRAFT_ROWS_MAX) } else { 0 };
        sequence.n_drafts_target = drafting.n_worth(sequence.n_guess, sequence.acceptance, n_rows);
    }
}
