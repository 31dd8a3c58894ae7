//! What a draft model's guess costs on this rank, learned from the time of its passes and of the steps that verify.
//! Durations come as arguments: no clock here. They decide only how much is guessed.

use super::worth::DraftCost;
use std::time::Duration;
use types::DRAFT_ROWS_MAX;

/// Wider passes are of prompts, and say little about those with guesses.
const ROWS_MAX: usize = 2 * DRAFT_ROWS_MAX as usize;
/// The passes after which their time is known.
const PASSES_MIN: u32 = 8;
/// The weight of the newest pass is one in this many.
const MEMORY: u32 = 32;
/// The passes of another width than the one before, after which the time of a row is known.
const CHANGES_MIN: u32 = 4;

/// The cost of guesses: as configured, until passes and steps were measured.
#[derive(Clone, Copy, Debug)]
pub struct LearnedDraftCost {
    configured: DraftCost,
    is_learned: bool,
    steps: RowTimeLine,
    passes: RowTimeLine,
}

/// The time of passes by their rows: a line through the mean of the last passes. Its slope is the least-squares fit to
/// the differences between one pass and the next, so that a level that drifts does not look like the time of a row.
#[derive(Clone, Copy, Debug, Default)]
struct RowTimeLine {
    n_noted: u32,
    /// Means.
    rows: f64,
    micros: f64,
    /// The rows and the microseconds of the newest pass.
    last: (f64, f64),
    /// The differences of rows from pass to pass, where there are any: squared, and times those of microseconds. Older
    /// ones count less.
    n_changes: u32,
    squares: f64,
    products: f64,
}

/// The microseconds of a pass of one row, and of each row beside it.
#[derive(Clone, Copy, Debug)]
struct RowTime {
    first: f64,
    more: f64,
}

impl LearnedDraftCost {
    /// Learns nothing unless `is_learned`.
    pub fn new(configured: DraftCost, is_learned: bool) -> LearnedDraftCost {
        let (steps, passes) = (RowTimeLine::default(), RowTimeLine::default());
        LearnedDraftCost { configured, is_learned, steps, passes }
    }

    /// A step of the target took so long on this rank.
    pub fn note_step(&mut self, n_rows: usize, took: Duration) {
        self.steps.note(n_rows, took);
    }

    /// A pass of the draft model took so long.
    pub fn note_pass(&mut self, n_rows: usize, took: Duration) {
        self.passes.note(n_rows, took);
    }

    /// Returns the cost for `n_sequences` that share the passes.
    pub fn of(&self, n_sequences: usize) -> DraftCost {
        let row = f64::from(self.configured.row_permille) / 1000.0;
        let known = self.steps.time(row).zip(self.passes.time(row)).filter(|_| self.is_learned);
        let Some((step, pass)) = known else { return self.configured };
        let permille = |part: f64, whole: f64| (part * 1000.0 / whole) as u32;
        let n = n_sequences.max(1);
        DraftCost { row_permille: permille(step.more, step.first), pass_permille: permille(pass.of(n), step.of(n)) }
    }
}

impl RowTimeLine {
    fn note(&mut self, n_rows: usize, took: Duration) {
        let micros = took.as_secs_f64() * 1e6;
        if !(1..=ROWS_MAX).contains(&n_rows) || micros <= 0.0 {
            return;
        }
        let rows = n_rows as f64;
        // One pass that the machine delayed changes little.
        let expected = self.time(0.0).map_or(micros, |time| time.of(n_rows));
        let micros = micros.clamp(expected / 2.0, expected * 2.0);
        self.note_change(rows - self.last.0, micros - self.last.1);
        self.last = (rows, micros);
        self.n_noted = self.n_noted.saturating_add(1);
        let part = 1.0 / f64::from(self.n_noted.min(MEMORY));
        self.rows += part * (rows - self.rows);
        self.micros += part * (micros - self.micros);
    }

    fn note_change(&mut self, more_rows: f64, more_micros: f64) {
        if self.n_noted == 0 || more_rows == 0.0 {
            return;
        }
        self.n_changes = self.n_changes.saturating_add(1);
        let kept = 1.0 - 1.0 / f64::from(MEMORY);
        self.squares = kept * self.squares + more_rows * more_rows;
        self.products = kept * self.products + more_rows * more_micros;
    }

    /// Returns the times, if they are known. `of_row` is the part of the first row's time that each further row takes,
    /// for as long as no passes of other widths have shown it.
    fn time(&self, of_row: f64) -> Option<RowTime> {
        if self.n_noted < PASSES_MIN {
            return None;
        }
        let n_more = self.rows - 1.0;
        let assumed = || of_row * self.micros / (1.0 + of_row * n_more);
        let is_shown = self.n_changes >= CHANGES_MIN;
        let more = if is_shown { self.products / self.squares } else { assumed() };
        // The first row takes as long as any other at least.
        let more = more.clamp(0.0, self.micros / self.rows);
        Some(RowTime { first: self.micros - more * n_more, more })
    }
}

impl RowTime {
    fn of(&self, n_rows: usize) -> f64 {
        self.first + self.more * (n_rows as f64 - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIGURED: DraftCost = DraftCost { row_permille: 270, pass_permille: 100 };

    fn micros(n: usize) -> Duration {
        Duration::from_micros(n as u64)
    }

    /// Notes passes of 1 to `n_rows_max` rows: 400 us, and 20 us for each row beside the first.
    fn with_passes(n: usize, n_rows_max: usize) -> LearnedDraftCost {
        let mut cost = LearnedDraftCost::new(CONFIGURED, true);
        (0..n).map(|i| i % n_rows_max + 1).for_each(|rows| cost.note_pass(rows, micros(400 + 20 * (rows - 1))));
        cost
    }

    fn is_near(value: u32, expected: u32) -> bool {
        value.abs_diff(expected) * 10 <= expected
    }

    #[test]
    fn the_configured_cost_holds_until_both_are_known() {
        let mut cost = with_passes(100, 5);
        assert_eq!(cost.of(1), CONFIGURED, "no step is known");
        (0..PASSES_MIN - 1).for_each(|_| cost.note_step(1, micros(1000)));
        cost.note_step(ROWS_MAX + 1, micros(1_000_000));
        cost.note_step(0, micros(10));
        assert_eq!(cost.of(1), CONFIGURED, "one step is missing");
        cost.note_step(1, micros(1000));
        // All steps have one row, so the time of another one is still the configured part.
        let DraftCost { row_permille, pass_permille } = cost.of(1);
        assert!(is_near(row_permille, 270) && is_near(pass_permille, 400), "{:?}", cost.of(1));
    }

    #[test]
    fn rows_and_passes_are_learned_by_their_widths() {
        let mut cost = with_passes(200, 5);
        (0..200).map(|i| i % 7 + 1).for_each(|rows| cost.note_step(rows, micros(1000 + 100 * (rows - 1))));
        let (one, eleven) = (cost.of(1), cost.of(11));
        assert!(is_near(one.row_permille, 100) && is_near(one.pass_permille, 400), "{one:?}");
        assert!(is_near(eleven.row_permille, 100) && is_near(eleven.pass_permille, 300), "{eleven:?}");
        // From now on all steps have five rows. The time of a row stays, and the level follows.
        (0..400).for_each(|_| cost.note_step(5, micros(2400)));
        let DraftCost { row_permille, pass_permille } = cost.of(1);
        assert!(is_near(row_permille, 50) && is_near(pass_permille, 200), "{:?}", cost.of(1));
    }

    #[test]
    fn one_late_pass_changes_little() {
        let mut cost = with_passes(200, 5);
        (0..200).map(|i| i % 7 + 1).for_each(|rows| cost.note_step(rows, micros(1000 + 100 * (rows - 1))));
        cost.note_pass(1, micros(1_000_000));
        assert!((400..450).contains(&cost.of(1).pass_permille), "{:?}", cost.of(1));
        cost.note_step(1, micros(1_000_000));
        assert!((370..450).contains(&cost.of(1).pass_permille), "{:?}", cost.of(1));
    }

    #[test]
    fn nothing_is_learned_where_the_cost_is_fixed() {
        let mut cost = LearnedDraftCost { is_learned: false, ..with_passes(100, 5) };
        (0..100).for_each(|_| cost.note_step(1, micros(1000)));
        assert_eq!(cost.of(1), CONFIGURED);
    }
}
