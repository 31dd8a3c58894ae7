//! Workers that do not reach each other: after a few attempts in a row the pair is known, and one of the two is left
//! out for a while, each time for longer. The caller passes the time.

use crate::WorkerId;
use std::collections::BTreeMap;
use types::Micros;

/// Attempts in a row in which ranks do not meet, until one of them is left out.
const TRIES_MAX: usize = 3;
const DOUBLINGS_MAX: u32 = 6;

#[derive(Default)]
pub(crate) struct UnreachableWorkers {
    /// Misses since the ranks last met, in order.
    misses: Vec<MissedPeer>,
    /// Includes those whose time is over: they have one more attempt.
    out: BTreeMap<WorkerId, ExcludedWorker>,
}

/// Rank `by` did not reach rank `of`.
#[derive(Clone, Debug)]
pub(crate) struct MissedPeer {
    pub by: WorkerId,
    pub of: WorkerId,
    pub why: String,
}

/// A worker that is left out, because it and `from` do not reach each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExcludedWorker {
    pub from: WorkerId,
    pub why: String,
    pub until: Micros,
    n_times: u32,
}

impl MissedPeer {
    fn has(&self, worker: WorkerId) -> bool {
        self.by == worker || self.of == worker
    }

    fn other(&self, worker: WorkerId) -> WorkerId {
        if self.by == worker { self.of } else { self.by }
    }
}

impl UnreachableWorkers {
    /// Returns the worker to leave out after this miss, if any. The first time lasts `out_min`.
    pub fn record_miss(&mut self, miss: MissedPeer, now: Micros, out_min: u64) -> Option<(WorkerId, ExcludedWorker)> {
        let is_known = self.out.keys().any(|worker| miss.has(*worker));
        self.misses.push(miss);
        if self.misses.len() < TRIES_MAX && !is_known {
            return None;
        }
        let worker = self.most_involved()?;
        let last = self.misses.iter().rfind(|miss| miss.has(worker))?;
        let (from, why) = (last.other(worker), last.why.clone());
        let n_times = self.out.get(&worker).map_or(0, |out| out.n_times);
        let out =
            ExcludedWorker { from, why, until: now.plus(out_min << n_times.min(DOUBLINGS_MAX)), n_times: n_times + 1 };
        self.misses.clear();
        // A worker that was left out because of this one may be well.
        self.out.retain(|_, out| out.from != worker);
        self.out.insert(worker, out.clone());
        Some((worker, out))
    }

    /// The worker with the most misses on either side; among equals, the one that was missed more often.
    fn most_involved(&self) -> Option<WorkerId> {
        let weight = |worker: WorkerId| {
            let n_before = self.out.values().filter(|out| out.from == worker).count();
            let n_has = self.misses.iter().filter(|miss| miss.has(worker)).count();
            let n_of = self.misses.iter().filter(|miss| miss.of == worker).count();
            (self.out.contains_key(&worker), n_has + n_before, n_of, worker)
        };
        self.misses.iter().flat_map(|miss| [miss.by, miss.of]).max_by_key(|worker| weight(*worker))
    }

    /// These workers have met.
    pub fn record_met(&mut self, workers: impl Iterator<Item = WorkerId>) {
        self.misses.clear();
        for worker in workers {
            self.out.remove(&worker);
        }
    }

    /// The worker is gone.
    pub fn forget(&mut self, worker: WorkerId) {
        self.misses.retain(|miss| !miss.has(worker));
        self.out.remove(&worker);
        self.out.retain(|_, out| out.from != worker);
    }

    pub fn is_excluded(&self, worker: WorkerId, now: Micros) -> bool {
        self.out.get(&worker).is_some_and(|out| now < out.until)
    }

    /// The workers that are left out now.
    pub fn excluded(&self, now: Micros) -> impl Iterator<Item = (WorkerId, &ExcludedWorker)> {
        self.out.iter().filter(move |(_, out)| now < out.until).map(|(worker, out)| (*worker, out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: u64 = 10;

    fn missed(unreachable: &mut UnreachableWorkers, by: u64, of: u64, now: u64) -> Option<u64> {
        let miss = MissedPeer { by: WorkerId(by), of: WorkerId(of), why: "silence".into() };
        unreachable.record_miss(miss, Micros(now), MIN).map(|(worker, _)| worker.0)
    }

    fn out(unreachable: &UnreachableWorkers, now: u64) -> Vec<(u64, u64)> {
        unreachable.excluded(Micros(now)).map(|(worker, out)| (worker.0, out.from.0)).collect()
    }

    #[test]
    fn worker_missed_repeatedly_is_left_out_for_longer() {
        let mut unreachable = UnreachableWorkers::default();
        // Whichever rank reports first, worker 3 is in every miss.
        assert_eq!([(1, 3), (3, 2), (2, 3)].map(|(by, of)| missed(&mut unreachable, by, of, 0)), [None, None, Some(3)]);
        assert_eq!((out(&unreachable, 9), out(&unreachable, 10)), (vec![(3, 2)], vec![]));
        // It had its second attempt: one miss is enough now.
        assert_eq!(missed(&mut unreachable, 3, 1, 100), Some(3));
        assert!(
            unreachable.is_excluded(WorkerId(3), Micros(119)) && !unreachable.is_excluded(WorkerId(3), Micros(120))
        );
        // Once it meets the others, nothing is remembered.
        unreachable.record_met([1, 2, 3].map(WorkerId).into_iter());
        assert_eq!(missed(&mut unreachable, 3, 1, 200), None);
    }

    #[test]
    fn worker_that_finds_no_peer_is_left_out() {
        let mut unreachable = UnreachableWorkers::default();
        assert_eq!([1, 2, 3].map(|now| missed(&mut unreachable, 1, 2, now)), [None, None, Some(2)]);
        // A spare has taken the other's place and is not reached either: so the worker that was left out first was
        // well.
        assert_eq!([4, 5, 6].map(|now| missed(&mut unreachable, 1, 5, now)), [None, None, Some(1)]);
        assert_eq!(out(&unreachable, 7), [(1, 5)]);
        unreachable.forget(WorkerId(5));
        assert_eq!(out(&unreachable, 7), []);
    }

    #[test]
    fn a_meeting_between_misses_clears_them() {
        let mut unreachable = UnreachableWorkers::default();
        for now in 0..20 {
            assert_eq!(missed(&mut unreachable, 1, 2, now), None);
            if now % 2 == 1 {
                unreachable.record_met([1, 2].map(WorkerId).into_iter());
            }
        }
    }
}
