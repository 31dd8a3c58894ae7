//! The tier behind the pools, as far as the scheduler knows it: which pages it should have, the fetches in flight, and
//! what the next step has for it. A fetch brings pages into blocks of the pools, where the sequence that waits for them
//! then finds them like any other prefix. So a miss, a late answer and a lost rank need no second way: the sequence is
//! admitted with what the pools have.

mod index;

use crate::table::BlockTable;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use index::PageIndex;
use types::{FetchId, Micros, Page, PageFetch, PageKey, TierWork};

/// The part of a measured difference by which the expected time of a page changes: one of so many.
const RATE: u64 = 4;
/// A page of a late fetch is expected to take so many times as long as the fetch had for each.
const LATE: u64 = 4;

pub(crate) struct Tier {
    index: PageIndex,
    fetches: Vec<FetchInFlight>,
    n_fetches: u64,
    /// For the next step, without its removals.
    work: TierWork,
    /// `[0, n_sent) in steps without an answer · [n_sent, ..) for the next step`
    removals: VecDeque<PageKey>,
    n_removals_sent: usize,
    /// The expected time to fetch a page; zero before the first fetch.
    page_nanos: u64,
}

/// A fetch that the ranks have not answered.
pub(crate) struct FetchInFlight {
    pub id: FetchId,
    pub pages: Vec<Page>,
    /// What it holds of each group: the blocks of its pages, and those of the same prefix that the pools have.
    pub tables: Vec<BlockTable>,
    /// Pages that turned out to be damaged: they get no names.
    pub damaged: Vec<PageKey>,
    pub begun: Micros,
    pub deadline: Micros,
}

impl Tier {
    /// A tier of at most so many pages; zero for none.
    pub fn new(n_pages: u32) -> Tier {
        Tier {
            index: PageIndex::new(n_pages),
            fetches: Vec::new(),
            n_fetches: 0,
            work: TierWork::default(),
            removals: VecDeque::new(),
            n_removals_sent: 0,
            page_nanos: 0,
        }
    }

    /// The blocks are gone: no fetch is answered any more, and what was not sent is not stored. Damaged pages outlive
    /// the blocks, so removals that no answer confirms are sent again.
    pub fn begin_epoch(&mut self) {
        self.fetches.clear();
        self.work.stores.iter().for_each(|page| self.index.remove(&page.key));
        self.work.clear();
        self.n_removals_sent = 0;
    }

    /// The ranks have another tier, of at most so many pages.
    pub fn resize(&mut self, n_pages: u32) {
        self.index = PageIndex::new(n_pages);
        self.work.stores.clear();
    }

    pub fn has(&self, key: &PageKey) -> bool {
        self.index.has(key)
    }

    /// The tier has this page, as a rank reports.
    pub fn insert(&mut self, key: PageKey) {
        self.index.insert(key);
    }

    /// Stores a block that is full and has just been named, unless the tier has its page. Ranks apply the removals of a
    /// step behind its stores, so no page is stored in the step that removes it.
    pub fn store(&mut self, page: Page) {
        let is_removed = self.removals.range(self.n_removals_sent..).any(|key| *key == page.key);
        if !is_removed && self.index.insert(page.key) {
            self.work.stores.push(page);
        }
    }

    /// No rank keeps this page: it may be damaged. Ranks may have pages that the index has pushed out.
    pub fn forget(&mut self, key: PageKey) {
        if self.index.is_empty() {
            return;
        }
        let is_fetched = |fetch: &&mut FetchInFlight| fetch.pages.iter().any(|page| page.key == key);
        self.fetches.iter_mut().filter(is_fetched).for_each(|fetch| fetch.damaged.push(key));
        self.index.remove(&key);
        self.work.stores.retain(|page| page.key != key);
        self.removals.push_back(key);
    }

    /// The ranks lack this page.
    pub fn note_missing(&mut self, key: &PageKey) {
        self.index.remove(key);
    }

    /// Begins a fetch into blocks that nothing else uses.
    pub fn begin(&mut self, pages: Vec<Page>, tables: Vec<BlockTable>, begun: Micros, deadline: Micros) -> FetchId {
        let id = FetchId(self.n_fetches);
        self.n_fetches += 1;
        self.work.fetches.push(PageFetch { id, pages: pages.clone() });
        self.fetches.push(FetchInFlight { id, pages, tables, damaged: Vec::new(), begun, deadline });
        id
    }

    /// Returns the fetch that brings this page.
    pub fn fetch_of(&self, key: &PageKey) -> Option<FetchId> {
        self.fetches.iter().find(|fetch| fetch.pages.iter().any(|page| page.key == *key)).map(|fetch| fetch.id)
    }

    /// The ranks have answered a fetch, `nanos` after it began. None if it was cancelled.
    pub fn finish(&mut self, id: FetchId, nanos: u64) -> Option<FetchInFlight> {
        let at = self.fetches.iter().position(|fetch| fetch.id == id)?;
        let fetch = self.fetches.remove(at);
        self.learn(nanos, &fetch);
        Some(fetch)
    }

    /// Returns a fetch whose deadline has come. Its blocks may be given to others from the next step on.
    pub fn cancel_late(&mut self, now: Micros) -> Option<FetchInFlight> {
        let at = self.fetches.iter().position(|fetch| fetch.deadline <= now)?;
        let fetch = self.fetches.remove(at);
        // How much longer it would have taken is not known. So slow a tier is not tried again soon.
        let waited = now.since(fetch.begun).0.saturating_mul(1000) / fetch.pages.len().max(1) as u64;
        self.page_nanos = self.page_nanos.max(waited.saturating_mul(LATE));
        match self.work.fetches.iter().position(|unsent| unsent.id == fetch.id) {
            Some(unsent) => drop(self.work.fetches.remove(unsent)),
            None => self.work.cancels.push(fetch.id),
        }
        Some(fetch)
    }

    /// Whether fetching so many pages is expected to take no longer than `nanos`; true where either is not known. The
    /// expectation shrinks with each refusal: a tier that was slow once is tried again.
    pub fn is_worth(&mut self, n_pages: u32, nanos: u64) -> bool {
        let is_worth = nanos == 0 || self.page_nanos.saturating_mul(n_pages.into()) <= nanos;
        if !is_worth {
            self.page_nanos -= self.page_nanos.div_ceil(RATE * RATE).min(self.page_nanos);
        }
        is_worth
    }

    fn learn(&mut self, nanos: u64, fetch: &FetchInFlight) {
        let measured = nanos / fetch.pages.len().max(1) as u64;
        self.page_nanos = match self.page_nanos {
            0 => measured,
            expected => expected - expected / RATE + measured / RATE,
        };
    }

    /// Moves what there is to do into a step. Returns the number of its removals.
    pub fn take_work(&mut self, out: &mut TierWork) -> usize {
        out.stores.append(&mut self.work.stores);
        out.fetches.append(&mut self.work.fetches);
        out.cancels.append(&mut self.work.cancels);
        // Ranks without a tier remove nothing.
        if !self.index.is_empty() {
            out.removals.extend(self.removals.range(self.n_removals_sent..));
            self.n_removals_sent = self.removals.len();
        }
        out.removals.len()
    }

    /// The ranks have answered the oldest step, which had so many removals.
    pub fn confirm_removals(&mut self, n: usize) {
        self.removals.drain(..n);
        self.n_removals_sent -= n;
    }

    /// Whether the next step is needed even without slices.
    pub fn is_urgent(&self) -> bool {
        self.work.is_urgent()
    }

    pub fn fetches(&self) -> &[FetchInFlight] {
        &self.fetches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use types::{BlockHash, BlockId};

    fn page(n: u8) -> Page {
        Page { key: PageKey { group: 0, name: BlockHash([n; 16]) }, block: BlockId(n.into()) }
    }

    #[test]
    fn a_page_is_stored_once_and_a_damaged_one_is_removed() {
        let mut tier = Tier::new(64);
        [1, 2, 1].into_iter().for_each(|n| tier.store(page(n)));
        tier.forget(page(2).key);
        tier.forget(page(3).key);
        let mut work = TierWork::default();
        tier.take_work(&mut work);
        assert_eq!((work.stores, work.removals), (vec![page(1)], vec![page(2).key, page(3).key]));
        // What no step has carried when the ranks are lost is stored again.
        tier.store(page(4));
        tier.begin_epoch();
        assert!(tier.has(&page(1).key) && !tier.has(&page(4).key));
    }

    #[test]
    fn late_fetches_are_cancelled_and_slow_ones_refused_for_a_while() {
        let mut tier = Tier::new(64);
        let pages = || vec![page(1), page(2)];
        let begin = |tier: &mut Tier, now| tier.begin(pages(), vec![], Micros(now), Micros(now + 100));
        let mut work = TierWork::default();
        let first = begin(&mut tier, 0);
        assert_eq!(tier.fetch_of(&page(2).key), Some(first));
        tier.take_work(&mut work);
        assert!(tier.cancel_late(Micros(99)).is_none() && tier.cancel_late(Micros(100)).is_some());
        tier.take_work(&mut work);
        assert_eq!((&work.cancels[..], tier.finish(first, 1).is_none()), (&[first][..], true));
        // The fetch had 50 us for each page: four times as much is expected.
        assert!(tier.is_worth(2, 400_000) && tier.is_worth(2, 0));
        let n_refused = (0..1000).take_while(|_| !tier.is_worth(2, 100_000)).count();
        assert!((15..30).contains(&n_refused), "{n_refused}");
        // A fetch that no step has carried needs no cancel.
        begin(&mut tier, 200);
        assert!(tier.cancel_late(Micros(300)).is_some() && !tier.is_urgent());
    }
}
