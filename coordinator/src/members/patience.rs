//! How long a step may take before its ranks count as hung, from a bounded memory of recent steps' durations. Knows no
//! clock and no rank; the caller passes the time.

use crate::Timings;
use crate::config::micros;
use std::collections::VecDeque;
use types::{Micros, Step};

/// Enough for a meaningful p99; older steps are out of date.
const STEPS_REMEMBERED: usize = 512;
/// Attending to this many earlier positions counts as much as a token itself. No model pays so much for them, so that a
/// growing context gets more time and no blame.
const POSITIONS_PER_TOKEN: u64 = 1024;
/// A step counts as comparable if it has at least this part of another's work.
const COMPARABLE: u64 = 2;

/// The work of a step, in tokens.
pub(crate) fn work(step: &Step) -> u64 {
    let of_slice = |range: &std::ops::Range<u32>| {
        let n_tokens = u64::from(range.end - range.start);
        n_tokens + n_tokens * u64::from(range.end) / POSITIONS_PER_TOKEN
    };
    step.slices.iter().map(|slice| of_slice(&slice.range)).sum::<u64>().max(1)
}

/// The steps in flight, how long the oldest has been awaited, and the durations of those before it.
#[derive(Debug, Default)]
pub(crate) struct StepTimes {
    took: VecDeque<StepTime>,
    /// Work of the steps in flight, oldest first.
    in_flight: VecDeque<u64>,
    awaited_micros: u64,
    ticked: Micros,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StepTime {
    work: u64,
    micros: u64,
}

impl StepTimes {
    /// Starts anew, for an epoch that begins now.
    pub fn starting(now: Micros) -> StepTimes {
        StepTimes { ticked: now, ..StepTimes::default() }
    }

    pub fn sent(&mut self, work: u64) {
        if self.in_flight.is_empty() {
            self.awaited_micros = 0;
        }
        self.in_flight.push_back(work);
    }

    /// Records that the oldest step was answered, `micros` after the answer before it.
    pub fn record_answer(&mut self, micros: u64) {
        self.awaited_micros = 0;
        let Some(work) = self.in_flight.pop_front() else { return };
        if self.took.len() == STEPS_REMEMBERED {
            self.took.pop_front();
        }
        self.took.push_back(StepTime { work, micros });
    }

    /// Call once per beat. No tick counts for much more than a beat, so that a loop that stood still blames no rank.
    pub fn tick(&mut self, now: Micros, beat_micros: u64) {
        let since = now.since(self.ticked).0.min(2 * beat_micros);
        self.ticked = now;
        if !self.in_flight.is_empty() {
            self.awaited_micros += since;
        }
    }

    /// Whether a step has been awaited for longer than it may take.
    pub fn is_over(&self, waits: &Timings) -> bool {
        // Stages that share a machine slow each other down: the oldest step may wait for those behind it.
        let work = self.in_flight.iter().sum();
        !self.in_flight.is_empty() && self.awaited_micros > self.allowed(work, waits)
    }

    pub fn awaited_micros(&self) -> u64 {
        self.awaited_micros
    }

    /// The time that a step may take. Generous before anything is known: the first step finds everything cold.
    fn allowed(&self, work: u64, waits: &Timings) -> u64 {
        let Some(expected) = self.expected(work) else { return micros(waits.step_first_max) };
        let expected = expected.saturating_mul(waits.hang_factor.into());
        expected.clamp(micros(waits.hang_min), micros(waits.step_max).max(micros(waits.hang_min)))
    }

    /// The p99 of comparable steps: never less than that of all steps, and proportionally more for a step that has more
    /// work than any of them.
    fn expected(&self, work: u64) -> Option<u64> {
        let of_all = p99(self.took.iter().map(|took| took.micros))?;
        let scaled = |took: &StepTime| took.micros.saturating_mul(work.max(took.work)) / took.work;
        let alike = self.took.iter().filter(|took| took.work >= work / COMPARABLE);
        let of_alike = p99(alike.map(scaled)).or_else(|| p99(self.took.iter().map(scaled)));
        of_alike.map(|of_alike| of_alike.max(of_all))
    }
}

/// The maximum if there are fewer than a hundred values.
fn p99(values: impl Iterator<Item = u64>) -> Option<u64> {
    let mut sorted: Vec<u64> = values.collect();
    sorted.sort_unstable();
    sorted.get((sorted.len() * 99).div_ceil(100).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use types::{RequestId, Slice, Want};

    const BEAT: u64 = 100_000;
    const MILLI: u64 = 1000;

    fn waits() -> Timings {
        Timings { hang_min: Duration::from_secs(3), step_first_max: Duration::from_secs(120), ..Timings::default() }
    }

    /// Steps one after the other, each as (work, microseconds).
    fn seen(steps: impl IntoIterator<Item = (u64, u64)>) -> StepTimes {
        let mut patience = StepTimes::default();
        for (work, micros) in steps {
            patience.sent(work);
            patience.record_answer(micros);
        }
        patience
    }

    #[test]
    fn work_is_tokens_and_what_they_look_at() {
        let slice = |&(start, end): &(u32, u32)| Slice::new(RequestId(1), start..end, Want::Last);
        let step = |ranges: &[(u32, u32)]| Step { slices: ranges.iter().map(slice).collect(), ..Step::default() };
        assert_eq!(work(&step(&[])), 1);
        assert_eq!(work(&step(&[(0, 512)])), 512 + 256);
        assert_eq!(work(&step(&[(2047, 2048), (0, 1)])), 3 + 1);
    }

    #[test]
    fn p99_leaves_out_one_of_a_hundred() {
        assert_eq!(p99([].into_iter()), None);
        assert_eq!(p99([7].into_iter()), Some(7));
        assert_eq!(p99(1..=99), Some(99));
        assert_eq!(p99(1..=100), Some(99));
        assert_eq!(p99(1..=512), Some(507));
    }

    #[test]
    fn patience_is_eight_times_what_such_steps_take() {
        let waits = waits();
        let allowed = |patience: &StepTimes, work| patience.allowed(work, &waits) / MILLI;
        // Nothing is known: generous.
        assert_eq!(allowed(&StepTimes::default(), 1), 120_000);
        // Fast steps: the floor.
        let fast = seen((0..600).map(|_| (1, 20 * MILLI)));
        assert_eq!(allowed(&fast, 1), 3000);
        // A prompt after nothing but single tokens may take as many times longer as it has tokens.
        assert_eq!(allowed(&fast, 512), 8 * 20 * 512);
        // One prompt has been seen: another like it takes as long, and one of twice the length twice.
        let mixed = seen((0..300).map(|i| if i % 50 == 0 { (512, 1000 * MILLI) } else { (1, 20 * MILLI) }));
        assert_eq!(allowed(&mixed, 512), 8 * 1000);
        assert_eq!(allowed(&mixed, 1024), 8 * 2000);
        // A short step gets as long as the long ones took: it may queue behind one.
        assert_eq!(allowed(&mixed, 1), 8 * 1000);
        // The limit has a maximum.
        assert_eq!(allowed(&fast, u64::MAX / 2), 600_000);
    }

    #[test]
    fn memory_is_bounded_and_forgets() {
        let mut patience = seen((0..10).map(|_| (1, 60_000 * MILLI)));
        assert_eq!(patience.allowed(1, &waits()), 480_000 * MILLI);
        for _ in 0..STEPS_REMEMBERED {
            patience.sent(1);
            patience.record_answer(MILLI);
        }
        assert_eq!((patience.took.len(), patience.allowed(1, &waits())), (STEPS_REMEMBERED, 3000 * MILLI));
        // Other ranks or another cut of the model: older measurements mean nothing.
        let patience = StepTimes::starting(Micros(0));
        assert_eq!(patience.allowed(1, &waits()), 120_000 * MILLI);
    }

    #[test]
    fn waiting_is_counted_in_beats() {
        let waits = waits();
        let mut patience = seen([(1, MILLI)]);
        patience.tick(Micros(1), BEAT);
        patience.sent(1);
        // The loop stood still for a minute: no rank is blamed.
        patience.tick(Micros(60_000_000), BEAT);
        assert!(!patience.is_over(&waits) && patience.awaited_micros() == 2 * BEAT);
        let ticks = |patience: &mut StepTimes, n: u64| {
            let from = patience.ticked.0;
            (1..=n).for_each(|i| patience.tick(Micros(from + i * BEAT), BEAT));
        };
        ticks(&mut patience, 28);
        assert!(!patience.is_over(&waits));
        ticks(&mut patience, 1);
        assert!(patience.is_over(&waits));
        // An answer, and nothing in flight: nothing is awaited.
        patience.record_answer(MILLI);
        ticks(&mut patience, 100);
        assert!(!patience.is_over(&waits));
        patience.sent(1);
        ticks(&mut patience, 30);
        assert!(!patience.is_over(&waits));
    }
}
