//! How many guessed tokens are worth a row of a step each. Knows no sequence.
//!
//! A draft costs a row of the pass and gives a token with the probability that it and those before it hold. What a row
//! costs is configured; how often guesses hold is counted, of each sequence.

use types::DRAFT_ROWS_MAX;

/// How many drafts slices have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftPolicy {
    #[default]
    Off,
    /// As many as are guessed, and at most this number.
    Fixed(u16),
    /// As many of them as make tokens cheaper.
    Adaptive {
        max: u16,
        /// The time that one more row adds to a step, in thousandths of a step with one row.
        row_permille: u32,
    },
}

/// A probability of one.
pub(crate) const SURE: u32 = 1024;
/// The assumed probability of guesses that no slice has tried.
pub(crate) const UNTRIED: u32 = SURE / 2;
/// Each guess moves the probability by this fraction of the distance: one part in so many.
pub(crate) const MEMORY: u32 = 8;
/// The least gain of a draft over its cost, in eighths: a sequence with drafts is not planned ahead.
const GAIN_MIN: u64 = 9;

impl DraftPolicy {
    /// The most drafts of a slice.
    pub fn max(self) -> u32 {
        match self {
            DraftPolicy::Off => 0,
            DraftPolicy::Fixed(max) | DraftPolicy::Adaptive { max, .. } => u32::from(max).min(DRAFT_ROWS_MAX),
        }
    }

    /// Returns how many of `n_guess` guesses are worth their rows, if they hold with a probability of `acceptance`, in
    /// a step of `n_rows` rows.
    pub(crate) fn n_worth(self, n_guess: u32, acceptance: u32, n_rows: u32) -> u32 {
        let n_max = n_guess.min(self.max());
        let DraftPolicy::Adaptive { row_permille, .. } = self else { return n_max };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_given_where_it_gives_more_than_its_row_costs() {
        let check = |row_permille, acceptance_percent: u32, n_rows, expected| {
            let drafting = DraftPolicy::Adaptive { max: 8, row_permille };
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
    fn fixed_drafting_ignores_acceptance_and_off_is_zero() {
        assert_eq!(DraftPolicy::Fixed(4).n_worth(12, 0, 64), 4);
        assert_eq!(DraftPolicy::Fixed(4).n_worth(3, 0, 64), 3);
        assert_eq!(DraftPolicy::Fixed(1000).max(), DRAFT_ROWS_MAX);
        assert_eq!(DraftPolicy::Off.n_worth(12, SURE, 1), 0);
    }
}
