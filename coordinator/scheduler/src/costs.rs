//! What a step costs, learned from the steps before: from its rows, and from the positions that they attend to. In
//! integers and without a clock: durations come with the answers.
//!
//! ```text
//! cost(rows, pairs) = base(rows) + pairs * per_pair      base is linear between the knots
//! ```
//!
//! The base of a width that no step had is estimated from the widths around it, and grows with the rows behind the
//! widest. The first step of a width replaces the estimate.

use types::Micros;

/// Rows: two knots to an octave.
const KNOTS: [u32; 25] =
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144];
/// `per_pair` is in nanoseconds for so many pairs.
const PAIRS_UNIT: u64 = 1024;
/// The part of an error that one step corrects: one of so many.
const RATE: i64 = 4;
/// One in fixed point.
const WHOLE: u64 = 1024;

/// The size of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepSize {
    pub rows: u32,
    /// For each row, the positions that it attends to, summed.
    pub pairs: u64,
}

/// The predicted and the measured duration of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTiming {
    pub predicted: Micros,
    pub measured: Micros,
}

impl StepTiming {
    /// Whether the prediction is within a fifth of the measurement.
    pub(crate) fn is_close(self) -> bool {
        self.predicted.0.abs_diff(self.measured.0) * 5 <= self.measured.0
    }
}

/// The cost of a step of so many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCost {
    pub rows: u32,
    pub micros: Micros,
}

/// The time of a step, and of each row beside its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowTimes {
    pub step: u64,
    pub row: u64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct StepCosts {
    /// Nanoseconds; zero where no step was near.
    base: [u64; KNOTS.len()],
    per_pair: u64,
    /// The most pairs of any step so far. Steps with far fewer say little about the cost of a pair.
    pairs_max: u64,
}

impl StepSize {
    /// Adds the rows of positions from `start` on.
    #[inline]
    pub fn add(&mut self, start: u32, n_rows: u32) {
        let (start, n) = (u64::from(start), u64::from(n_rows));
        self.rows += n_rows;
        self.pairs += n * start + n * (n + 1) / 2;
    }
}

impl StepCosts {
    /// Returns the predicted duration in nanoseconds; zero before the first measurement, and for a step without rows.
    pub fn nanos(&self, size: StepSize) -> u64 {
        match self.base(size.rows) {
            0 => 0,
            base => base + self.nanos_of_pairs(size.pairs),
        }
    }

    /// Returns the times of a step of `n_rows` rows and of each of `n_more` beside them, if each attends to `n_context`
    /// positions. None if no step was as wide as both.
    pub fn row_times(&self, n_rows: u32, n_more: u32, n_context: u32) -> Option<RowTimes> {
        let widest = n_rows + n_more;
        self.known_from(KNOTS.partition_point(|knot| *knot < widest))?;
        let step = self.base(n_rows);
        let row = self.base(widest).saturating_sub(step) / u64::from(n_more.max(1));
        let attention = self.nanos_of_pairs(n_context.into());
        Some(RowTimes { step: step + attention * u64::from(n_rows), row: row + attention })
    }

    /// Returns the first knot from `first` on that some step was near.
    fn known_from(&self, first: usize) -> Option<usize> {
        (first..KNOTS.len()).find(|i| self.base[*i] > 0)
    }

    /// The widths that steps had, and what a step of each costs without the positions that it attends to.
    pub fn known(&self) -> impl Iterator<Item = StepCost> {
        let knots = KNOTS.iter().zip(&self.base).filter(|(_, base)| **base > 0);
        knots.map(|(rows, base)| StepCost { rows: *rows, micros: Micros(base / 1000) })
    }

    fn nanos_of_pairs(&self, pairs: u64) -> u64 {
        pairs.saturating_mul(self.per_pair) / PAIRS_UNIT
    }

    fn base(&self, rows: u32) -> u64 {
        if rows == 0 {
            return 0;
        }
        let upper = KNOTS.partition_point(|knot| *knot < rows);
        let above = self.known_from(upper);
        let below = (0..upper).rev().find(|i| self.base[*i] > 0);
        let rows = u64::from(rows);
        match (below, above) {
            (None, None) => 0,
            (None, Some(above)) => self.base[above],
            (Some(below), None) => self.base[below] * rows / u64::from(KNOTS[below]),
            (Some(below), Some(above)) => {
                let [from, to] = [below, above].map(|i| u64::from(KNOTS[i]));
                let part = (rows - from) * WHOLE / (to - from);
                (self.base[below] * (WHOLE - part) + self.base[above] * part) / WHOLE
            }
        }
    }

    /// A step of this size took so long. Corrects the numbers that its prediction used, each by its part in it
    /// (normalized least mean squares).
    pub fn learn(&mut self, size: StepSize, took: Micros) {
        let took = took.0.saturating_mul(1000);
        if took == 0 || size.rows == 0 {
            return;
        }
        self.pairs_max = self.pairs_max.max(size.pairs).max(1);
        let nearest = nearest_knot(size.rows);
        if self.base[nearest] == 0 {
            self.base[nearest] = took.saturating_sub(self.nanos_of_pairs(size.pairs)).max(1);
            return;
        }
        let predicted = self.nanos(size);
        // One step that the machine delayed changes little.
        let limit = (predicted / 2) as i64;
        let error = (took as i64 - predicted as i64).clamp(-limit, limit);
        let (lower, upper, of_upper) = knots_around(size.rows);
        let of_lower = WHOLE - of_upper;
        let of_pairs = size.pairs * WHOLE / self.pairs_max;
        let squares = [of_lower, of_upper, of_pairs].map(|part| part * part).iter().sum::<u64>() / WHOLE;
        let change = |part: u64| error / RATE * part as i64 / squares.max(1) as i64;
        // Both are known before either changes.
        let before = [lower, upper].map(|i| self.base(KNOTS[i]));
        for (i, before, part) in [(lower, before[0], of_lower), (upper, before[1], of_upper)] {
            if part > 0 {
                self.base[i] = before.saturating_add_signed(change(part)).max(1);
            }
        }
        let per_pair = i128::from(change(of_pairs)) * i128::from(PAIRS_UNIT) / i128::from(self.pairs_max);
        self.per_pair = self.per_pair.saturating_add_signed(per_pair as i64);
    }

    /// The most rows of a chunk, up to `n_max` behind `n_context` positions, with which a step takes at most `target`
    /// nanoseconds. All of them before the first measurement.
    pub fn rows_within(&self, target: u64, others: StepSize, n_context: u32, n_max: u32) -> u32 {
        let fits = |n_rows: u32| {
            let mut size = others;
            size.add(n_context, n_rows);
            self.nanos(size) <= target
        };
        if fits(n_max) {
            return n_max;
        }
        // The largest that is known to fit, and the smallest that is known not to.
        let (mut fit, mut not) = (0, n_max);
        while not - fit > 1 {
            let middle = fit + (not - fit) / 2;
            if fits(middle) { fit = middle } else { not = middle }
        }
        fit
    }
}

fn nearest_knot(rows: u32) -> usize {
    let (lower, upper, of_upper) = knots_around(rows);
    if of_upper * 2 > WHOLE { upper } else { lower }
}

/// The knots on both sides of these rows, and the part of the way from the lower to the upper one.
fn knots_around(rows: u32) -> (usize, usize, u64) {
    let upper = KNOTS.partition_point(|knot| *knot < rows);
    if upper == KNOTS.len() || KNOTS[upper] == rows || upper == 0 {
        let knot = upper.min(KNOTS.len() - 1);
        return (knot, knot, 0);
    }
    let (from, to) = (KNOTS[upper - 1], KNOTS[upper]);
    (upper - 1, upper, u64::from(rows - from) * WHOLE / u64::from(to - from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn size(rows: u32, context: u32) -> StepSize {
        let mut size = StepSize::default();
        (0..rows).for_each(|_| size.add(context, 1));
        size
    }

    /// 3 ms for the weights or 40 us for each row, whichever is more, and 20 ns for each pair.
    fn took(size: StepSize) -> u64 {
        3000.max(u64::from(size.rows) * 40) + size.pairs / 50
    }

    #[test]
    fn costs_are_learned_within_a_tenth() {
        let mut costs = StepCosts::default();
        assert_eq!(costs.nanos(size(7, 0)), 0);
        let mut state = 1_u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut n_far = 0;
        for step in 0..2000 {
            let size = size(1 + next(300) as u32, next(2000) as u32);
            let noise = 950 + next(100);
            let (took, predicted) = (took(size) * noise / 1000, costs.nanos(size) / 1000);
            n_far += u32::from(step >= 1000 && took.abs_diff(predicted) * 10 > took);
            costs.learn(size, Micros(took));
        }
        assert!(n_far < 20, "{n_far} of 1,000 predictions are off by more than a tenth");
    }

    #[test]
    fn unknown_widths_are_estimated_from_known_ones() {
        let mut costs = StepCosts::default();
        costs.learn(size(128, 0), Micros(6000));
        let at = |costs: &StepCosts, rows| costs.nanos(size(rows, 0)) / 1000;
        assert!(at(&costs, 8) <= 6000 && at(&costs, 256) >= 10_000);
        assert_eq!(costs.nanos(StepSize::default()), 0, "a step without rows only ends sequences");
        costs.learn(size(1, 0), Micros(3000));
        let known: Vec<_> = costs.known().map(|cost| (cost.rows, cost.micros.0)).collect();
        assert_eq!(known, [(1, 3000), (128, 6000)]);
        let estimates = [1, 2, 8, 64, 128, 512].map(|rows| at(&costs, rows));
        assert!(estimates.is_sorted(), "{estimates:?}");
        assert!((2900..3200).contains(&estimates[0]), "{estimates:?}");
    }

    #[test]
    fn one_late_step_changes_little() {
        let mut costs = StepCosts::default();
        (0..50).for_each(|_| costs.learn(size(8, 100), Micros(5000)));
        costs.learn(size(8, 100), Micros(500_000));
        assert!(costs.nanos(size(8, 100)) < 6_000_000);
    }

    #[test]
    fn a_chunk_is_cut_to_the_time_that_is_left() {
        let mut costs = StepCosts::default();
        assert_eq!(costs.rows_within(1, size(8, 0), 0, 512), 512, "nothing is known");
        for rows in [1, 8, 64, 128, 256, 512] {
            let sizes = (0..100).map(|i| size(rows, i % 2 * 2000));
            sizes.for_each(|size| costs.learn(size, Micros(took(size))));
        }
        let n_rows = costs.rows_within(10_000_000, size(8, 0), 0, 512);
        assert!((220..=250).contains(&n_rows), "8 and {n_rows} rows in 10 ms");
        assert!(costs.rows_within(10_000_000, size(8, 0), 10_000, 512) < n_rows);
        assert_eq!(
            (costs.rows_within(u64::MAX, size(8, 0), 0, 512), costs.rows_within(0, size(8, 0), 0, 512)),
            (512, 0)
        );
    }
}
