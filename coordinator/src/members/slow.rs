//! Finds slow ranks: they compute for much longer than the others do for the same work. A slow rank is named and stays.
//! The caller passes the times.

use std::collections::BTreeMap;
use types::Rank;

/// A slow rank takes this many times as long for a step as the others.
const SLOW_FACTOR: f64 = 2.0;
/// And at least this much longer: a smaller difference delays no rank.
const SLOW_MICROS: f64 = 1000.0;
/// Looks in a row until a rank counts as slow, or no longer does.
const LOOKS: u32 = 5;
/// A look with fewer steps does not count.
const STEPS_MIN: u64 = 5;

/// One rank's time between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankTime {
    pub rank: Rank,
    pub stage: u16,
    pub n_steps: u64,
    pub compute_micros: u64,
}

impl RankTime {
    fn per_step(&self) -> f64 {
        self.compute_micros as f64 / self.n_steps.max(1) as f64
    }
}

#[derive(Debug, Default)]
pub(crate) struct SlownessDetector {
    ranks: BTreeMap<Rank, JudgedRank>,
}

#[derive(Clone, Copy, Debug, Default)]
struct JudgedRank {
    is_slow: bool,
    /// How many looks in a row disagreed with the present verdict.
    n_contrary: u32,
}

/// A rank that has become slow, or no longer is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SlownessChange {
    pub rank: Rank,
    pub is_slow: bool,
    /// Its time per step, and that of the others.
    pub micros: f64,
    pub others_micros: f64,
}

impl SlownessDetector {
    pub fn is_slow(&self, rank: Rank) -> bool {
        self.ranks.get(&rank).is_some_and(|judged| judged.is_slow)
    }

    pub fn slow_ranks(&self) -> Vec<Rank> {
        self.ranks.iter().filter(|(_, judged)| judged.is_slow).map(|(rank, _)| *rank).collect()
    }

    /// Call about once a second.
    pub fn look(&mut self, times: &[RankTime]) -> Vec<SlownessChange> {
        let measured = times.iter().filter(|time| time.n_steps >= STEPS_MIN);
        measured.filter_map(|time| self.judge(time, median_of_others(time, times)?)).collect()
    }

    fn judge(&mut self, time: &RankTime, others_micros: f64) -> Option<SlownessChange> {
        let micros = time.per_step();
        let seems_slow = micros > others_micros * SLOW_FACTOR && micros > others_micros + SLOW_MICROS;
        let judged = self.ranks.entry(time.rank).or_default();
        judged.n_contrary = if seems_slow == judged.is_slow { 0 } else { judged.n_contrary + 1 };
        if judged.n_contrary < LOOKS {
            return None;
        }
        *judged = JudgedRank { is_slow: seems_slow, n_contrary: 0 };
        Some(SlownessChange { rank: time.rank, is_slow: seems_slow, micros, others_micros })
    }
}

/// The median of the other ranks of its stage, which do the same work; of all other ranks, if it is alone in its stage.
fn median_of_others(time: &RankTime, times: &[RankTime]) -> Option<f64> {
    let of = |is_meant: &dyn Fn(&RankTime) -> bool| {
        let others = times.iter().filter(|other| other.rank != time.rank && other.n_steps >= STEPS_MIN);
        let mut sorted: Vec<f64> = others.filter(|other| is_meant(other)).map(RankTime::per_step).collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    };
    of(&|other| other.stage == time.stage).or_else(|| of(&|_| true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(per_step: &[u64], tp: usize) -> Vec<RankTime> {
        let time = |(i, micros): (usize, &u64)| RankTime {
            rank: Rank(i as u16),
            stage: (i / tp) as u16,
            n_steps: 10,
            compute_micros: micros * 10,
        };
        per_step.iter().enumerate().map(time).collect()
    }

    #[test]
    fn slow_rank_is_reported_once() {
        let mut slowness = SlownessDetector::default();
        for look in 1..=8 {
            let changes = slowness.look(&times(&[2000, 2000, 9000, 2000], 4));
            let expect: &[Rank] = if look == 5 { &[Rank(2)] } else { &[] };
            assert_eq!(changes.iter().map(|change| change.rank).collect::<Vec<_>>(), expect, "look {look}");
        }
        assert!(slowness.is_slow(Rank(2)) && !slowness.is_slow(Rank(0)));
        // One good second does not clear it; five do.
        assert_eq!(slowness.look(&times(&[2000, 2000, 2000, 2000], 4)), []);
        assert_eq!(slowness.look(&times(&[2000, 2000, 9000, 2000], 4)), []);
        for look in 1..=5 {
            let changes = slowness.look(&times(&[2000, 2000, 2500, 2000], 4));
            assert_eq!(changes.len(), usize::from(look == 5));
        }
        assert!(!slowness.is_slow(Rank(2)) && slowness.slow_ranks().is_empty());
    }

    #[test]
    fn only_the_same_work_is_compared() {
        let mut slowness = SlownessDetector::default();
        // A stage with three times the layers; little steps whose noise means nothing; too few steps; one alone.
        for _ in 0..10 {
            assert_eq!(slowness.look(&times(&[2000, 2000, 6000, 6000], 2)), []);
            assert_eq!(slowness.look(&times(&[20, 20, 90, 20], 4)), []);
            let few: Vec<RankTime> =
                times(&[9000, 20], 2).into_iter().map(|time| RankTime { n_steps: 2, ..time }).collect();
            assert_eq!(slowness.look(&few), []);
            assert_eq!(slowness.look(&times(&[9000], 1)), []);
        }
        // Stages of one rank each are cut to take equally long.
        let changes = (0..5).flat_map(|_| slowness.look(&times(&[2000, 9000], 1))).count();
        assert_eq!((changes, slowness.slow_ranks()), (1, vec![Rank(1)]));
    }
}
