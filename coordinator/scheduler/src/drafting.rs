//! How many guessed tokens are worth a row of a step each. Knows no sequence.
//!
//! A draft costs a row of the pass and gives a token with the probability that it and those before it hold. What a row
//! costs is learned from the steps before; how often guesses hold is counted, of each sequence.

use crate::costs::{RowTimes, StepCosts};
use types::DRAFT_ROWS_MAX;

/// How many drafts slices have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftPolicy {
    #[default]
    Off,
    /// As many as are guessed, and at most this number.
    Fixed(u16),
    /// As many of them as make tokens cheaper.
    Adaptive { max: u16, row: RowCost },
}

/// The time that one more row adds to a step, in thousandths of a step with one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowCost {
    Fixed(u32),
    /// As steps show it; this much until one was wide enough.
    Learned(u32),
}

impl RowCost {
    /// Returns the configured cost.
    pub fn permille(self) -> u32 {
        let (RowCost::Fixed(permille) | RowCost::Learned(permille)) = self;
        permille
    }

    /// Returns the times of a step and of each of `n_more` rows beside its own.
    fn times(self, DecodeStep { n_rows, n_context }: DecodeStep, n_more: u32, costs: &StepCosts) -> RowTimes {
        let learned = match self {
            RowCost::Fixed(_) => None,
            RowCost::Learned(_) => costs.row_times(n_rows, n_more, n_context),
        };
        let row = u64::from(self.permille());
        learned.unwrap_or(RowTimes { step: 1000 + row * u64::from(n_rows - 1), row })
    }
}

/// A step that draws one token for each of its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeStep {
    pub n_rows: u32,
    /// The positions that a draft attends to.
    pub n_context: u32,
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

    /// Returns how many of `n_guess` guesses are worth their rows in a step, if they hold with a probability of
    /// `acceptance`.
    pub(crate) fn n_worth(self, n_guess: u32, acceptance: u32, step: DecodeStep, costs: &StepCosts) -> u32 {
        let n_max = n_guess.min(self.max());
        let DraftPolicy::Adaptive { row, .. } = self else { return n_max };
        let n_rows = step.n_rows.max(1);
        // Without drafts a step of this time gives a token for each row.
        let RowTimes { step, row } = row.times(DecodeStep { n_rows, ..step }, n_max.max(1), costs);
        let pays = |holds: u64| holds * step * 8 > u64::from(SURE) * row * u64::from(n_rows) * GAIN_MIN;
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
    use crate::costs::StepSize;
    use types::Micros;

    fn of(n_rows: u32) -> DecodeStep {
        DecodeStep { n_rows, n_context: 0 }
    }

    #[test]
    fn a_draft_is_given_where_it_gives_more_than_its_row_costs() {
        let check = |row_permille, acceptance_percent: u32, n_rows, expected| {
            let acceptance = acceptance_percent * SURE / 100;
            for row in [RowCost::Fixed(row_permille), RowCost::Learned(row_permille)] {
                let drafting = DraftPolicy::Adaptive { max: 8, row };
                let n = drafting.n_worth(12, acceptance, of(n_rows), &StepCosts::default());
                assert_eq!(n, expected, "{row:?}, {acceptance_percent}% among {n_rows}");
            }
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

    /// Steps of up to eight rows take 3 ms, and each further row 1 ms.
    #[test]
    fn a_rows_cost_is_that_of_the_steps_before() {
        let mut costs = StepCosts::default();
        for rows in [1, 2, 4, 8, 12, 16] {
            let size = StepSize { rows, pairs: 0 };
            (0..20).for_each(|_| costs.learn(size, Micros(3000 + 1000 * u64::from(rows.saturating_sub(8)))));
        }
        let n = |row, n_rows| DraftPolicy::Adaptive { max: 4, row }.n_worth(4, SURE * 3 / 4, of(n_rows), &costs);
        assert_eq!((n(RowCost::Learned(1000), 1), n(RowCost::Learned(1000), 4)), (4, 4), "rows that cost nothing");
        assert_eq!(n(RowCost::Learned(0), 8), 0, "a row for each token costs more than a step of eight gives");
        assert_eq!(n(RowCost::Learned(0), 100), 4, "no step was as wide");
        assert_eq!((n(RowCost::Fixed(1000), 1), n(RowCost::Fixed(0), 8)), (0, 4), "nothing is learned");
    }

    /// Rows that cost nothing by themselves, and a microsecond for each position that they attend to.
    #[test]
    fn a_long_context_makes_rows_dear() {
        let mut costs = StepCosts::default();
        for _ in 0..400 {
            for (rows, pairs) in [(1, 0), (8, 0), (16, 0), (16, 16_000), (16, 32_000)] {
                costs.learn(StepSize { rows, pairs }, Micros(3000 + pairs));
            }
        }
        let policy = DraftPolicy::Adaptive { max: 4, row: RowCost::Learned(1000) };
        let n = |n_context| policy.n_worth(4, SURE / 2, DecodeStep { n_rows: 1, n_context }, &costs);
        assert_eq!((n(0), n(1000), n(8000)), (4, 1, 0));
    }

    #[test]
    fn fixed_drafting_ignores_acceptance_and_off_is_zero() {
        let costs = StepCosts::default();
        assert_eq!(DraftPolicy::Fixed(4).n_worth(12, 0, of(64), &costs), 4);
        assert_eq!(DraftPolicy::Fixed(4).n_worth(3, 0, of(64), &costs), 3);
        assert_eq!(DraftPolicy::Fixed(1000).max(), DRAFT_ROWS_MAX);
        assert_eq!(DraftPolicy::Off.n_worth(12, SURE, of(1), &costs), 0);
    }
}
