//! What the ranks of an epoch report of the disks behind their pools. Each keeps its own part of a page, so a fetch is
//! over when all have answered, and a page is there if all have it.

use crate::WorkerId;
use proto::cluster as wire;
use std::collections::{BTreeMap, BTreeSet};
use types::{FetchDone, FetchId, PageKey};

/// Answers to so many fetches are awaited at most; the scheduler gives up a fetch long before.
const FETCHES_MAX: usize = 4096;
/// The names of so many pages wait at most; others are found missing.
const KEPT_MAX: usize = 1 << 18;

#[derive(Default)]
pub(crate) struct RankTiers {
    /// The ranks that are ready and have a disk.
    n_ranks: usize,
    kept: Vec<PageKey>,
    /// The answers of some ranks, by fetch.
    fetches: BTreeMap<FetchId, FetchAnswers>,
}

#[derive(Default)]
struct FetchAnswers {
    from: BTreeSet<WorkerId>,
    missing: BTreeSet<u32>,
    /// The longest time of a rank.
    micros: u64,
}

impl RankTiers {
    pub fn record_ready(&mut self, has_tier: bool) {
        self.n_ranks += usize::from(has_tier);
    }

    /// Whether all of `n_ranks` ranks have one.
    pub fn has_all(&self, n_ranks: usize) -> bool {
        self.n_ranks == n_ranks
    }

    pub fn record_kept(&mut self, pages: &wire::PagesKept) {
        let n_free = KEPT_MAX.saturating_sub(self.kept.len());
        self.kept.extend(pages.keys().take(n_free));
    }

    pub fn take_kept(&mut self) -> Vec<PageKey> {
        std::mem::take(&mut self.kept)
    }

    /// Returns the answer of all `n_ranks` ranks, once the last has come.
    pub fn record_fetched(&mut self, worker: WorkerId, done: FetchDone, n_ranks: usize) -> Option<FetchDone> {
        let answers = self.fetches.entry(done.id).or_default();
        answers.from.insert(worker);
        answers.missing.extend(done.missing);
        answers.micros = answers.micros.max(done.micros);
        if answers.from.len() < n_ranks {
            if self.fetches.len() > FETCHES_MAX {
                self.fetches.pop_first();
            }
            return None;
        }
        let FetchAnswers { missing, micros, .. } = self.fetches.remove(&done.id)?;
        Some(FetchDone { missing: missing.into_iter().collect(), micros, ..done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_there_if_all_ranks_have_it() {
        let mut tier = RankTiers::default();
        tier.record_ready(true);
        tier.record_ready(false);
        assert!(!tier.has_all(2) && tier.has_all(1));
        let done = |id, missing: &[u32], micros| {
            let (id, missing) = (FetchId(id), missing.to_vec());
            FetchDone { id, missing, micros, ..FetchDone::default() }
        };
        let [a, b] = [WorkerId(1), WorkerId(2)];
        assert_eq!(tier.record_fetched(a, done(1, &[2, 5], 30), 2), None);
        assert_eq!(tier.record_fetched(a, done(1, &[2, 5], 30), 2), None, "each rank answers once");
        assert_eq!(tier.record_fetched(b, done(2, &[], 1), 2), None);
        assert_eq!(tier.record_fetched(b, done(1, &[0, 5], 20), 2), Some(done(1, &[0, 2, 5], 30)));
        assert_eq!(tier.record_fetched(a, done(2, &[], 3), 2), Some(done(2, &[], 3)));
        assert!(tier.fetches.is_empty());
    }
}
