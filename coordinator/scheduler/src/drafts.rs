//! How many drafts a slice has: tokens behind the log that the rank that samples has guessed, computed beside the log's
//! last one and kept as far as they are what is drawn. Knows no token, and not how they are guessed.
//!
//! A draft costs a row of the pass and gives a token with the probability that it and those before it hold. What a row
//! costs is configured; how often guesses hold is counted, of each sequence, also of guesses that were no drafts: so a
//! sequence without drafts gets some when its guesses begin to hold, and trying costs nothing.

use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use types::{DRAFT_ROWS_MAX, Goal};

/// How many drafts slices have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafting {
    #[default]
    Off,
    /// As many as are guessed, and at most so many.
    Fixed(u16),
    /// As many of them as make tokens cheaper.
    Adaptive {
        max: u16,
        /// What one more row adds to the time of a step, in thousandths of a step with one row.
        row_permille: u32,
    },
}

/// A probability of one.
const SURE: u32 = 1024;
/// What is thought of guesses that nobody has tried.
pub(crate) const UNTRIED: u32 = SURE / 2;
/// A guess moves the probability by one part in so many of the way.
const MEMORY: u32 = 8;
/// How much more than it costs a draft has to give, in eighths: a sequence with drafts is not planned ahead.
const GAIN_MIN: u64 = 9;

impl Drafting {
    /// The most drafts of a slice.
    pub fn max(self) -> u32 {
        match self {
            Drafting::Off => 0,
            Drafting::Fixed(max) | Drafting::Adaptive { max, .. } => u32::from(max).min(DRAFT_ROWS_MAX),
        }
    }

    /// How many of `n_guess` guesses that hold with a probability of `acceptance` are worth their rows, in a step of
    /// `n_rows` rows.
    fn n_worth(self, n_guess: u32, acceptance: u32, n_rows: u32) -> u32 {
        let n_max = n_guess.min(self.max());
        let Drafting::Adaptive { row_permille, .. } = self else { return n_max };
        let (n_rows, row) = (u64::from(n_rows.max(1)), u64::from(row_permille));
        // Without drafts a step of this time gives a token for each row.
        let step = 1000 + row * (n_rows - 1);
        let pays = |holds: u64| holds * step * 8 > u64::from(SURE) * row * n_rows * GAIN_MIN;
        let mut holds = u64::from(SURE);
        let n_paying = (0..n_max).take_while(|_| {
            holds = holds * u64::from(acceptance) / u64::from(SURE);
            pays(holds)
        });
        n_paying.count() as u32
    }
}

impl Sequence {
    /// `n_drawn` tokens have come back, of which the first `n_hit` had been guessed.
    fn note_guesses(&mut self, n_drawn: u32, n_hit: u32) {
        let n_tried = self.n_guess.min(n_drawn);
        let n_hit = n_hit.min(n_tried);
        (0..n_hit).for_each(|_| self.acceptance += (SURE - self.acceptance) / MEMORY);
        if n_hit < n_tried {
            self.acceptance -= self.acceptance / MEMORY;
        }
    }

    /// The drafts of its slice that is being planned, if there are rows for `n_max`.
    fn n_drafts_now(&self, n_max: u32) -> u32 {
        // Its turn is the log's last token, and nothing of it is in flight: what was guessed stands behind that.
        let is_settled = self.turn == 1 && !self.awaits_draw();
        let n_fitting = (self.length_max - 1).saturating_sub(self.n_known());
        if is_settled { self.n_drafts_wished.min(n_fitting).min(n_max) } else { 0 }
    }
}

impl Scheduler {
    /// Slices planned ahead of known tokens. While somebody has drafts there are none: the others would go on in steps
    /// of their own, and a step costs much the same for a few rows as for one.
    pub(crate) fn ahead_now(&self) -> u32 {
        let drafts = |idx: &u32| self.sequences[*idx].n_drafts_wished > 0;
        if self.running.iter().any(drafts) { 0 } else { self.config.slices_ahead_max }
    }

    /// Adds drafts to the turns of the step being planned. Returns how many, which leaves at least half of the tokens
    /// that are not needed for turns to chunks.
    pub(crate) fn give_drafts(&mut self) -> u32 {
        if self.config.drafting == Drafting::Off {
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

    /// Takes what an answer says of guesses: how many hit, and how many there are for the next slice.
    pub(crate) fn note_guesses(&mut self, idx: u32, n_drawn: u32, n_hit: u32, n_guess: u32) {
        if self.config.drafting == Drafting::Off {
            return;
        }
        let n_rows = (self.running.len() as u32).div_ceil(self.n_turns());
        let drafting = self.config.drafting;
        let sequence = &mut self.sequences[idx];
        sequence.note_guesses(n_drawn, n_hit);
        // Rows of prompts are drawn one by one, and a mask is there for one token.
        let may_have_drafts = sequence.request.goal == Goal::Generate && sequence.request.grammar.is_none();
        sequence.n_guess = if may_have_drafts { n_guess.min(DRAFT_ROWS_MAX) } else { 0 };
        sequence.n_drafts_wished = drafting.n_worth(sequence.n_guess, sequence.acceptance, n_rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_given_where_it_gives_more_than_its_row_costs() {
        let check = |row_permille, acceptance_percent: u32, n_rows, expected| {
            let drafting = Drafting::Adaptive { max: 8, row_permille };
            let acceptance = acceptance_percent * SURE / 100;
            assert_eq!(drafting.n_worth(12, acceptance, n_rows), expected, "{acceptance_percent}% among {n_rows}");
        };
        // A row that costs nothing is always worth it, if it ever holds.
        check(0, 50, 1, 8);
        check(0, 0, 1, 0);
        // A row that costs a tenth of a step: alone, down to a probability of 0.11.
        check(100, 50, 1, 3);
        check(100, 90, 1, 8);
        check(100, 10, 1, 0);
        // Among many the fixed part of a step is small, and a draft must nearly always hold.
        check(100, 80, 8, 2);
        check(100, 90, 64, 0);
        // A row that costs as much as a step never pays.
        check(1000, 100, 1, 0);
    }

    #[test]
    fn a_fixed_number_asks_nothing_and_none_is_none() {
        assert_eq!(Drafting::Fixed(4).n_worth(12, 0, 64), 4);
        assert_eq!(Drafting::Fixed(4).n_worth(3, 0, 64), 3);
        assert_eq!(Drafting::Fixed(1000).max(), DRAFT_ROWS_MAX);
        assert_eq!(Drafting::Off.n_worth(12, SURE, 1), 0);
    }
}
