//! The tier behind a device's pools: pages of the cache that outlive their blocks. What a step has for it, and what a
//! rank answers.

use crate::{BlockHash, BlockId, Epoch};
use alloc::vec::Vec;

/// The name of a page: a full block of one cache group. Each rank keeps its own part of it, by layers and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey {
    /// The cache group, as the model numbers them.
    pub group: u8,
    pub name: BlockHash,
}

/// A page, and the block that has its content or will have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    pub key: PageKey,
    pub block: BlockId,
}

/// The number of a fetch, within an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(pub u64);

/// Pages to read from the tier into blocks. No slice uses these blocks until the ranks have answered, or until the
/// fetch is cancelled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageFetch {
    pub id: FetchId,
    pub pages: Vec<Page>,
}

/// What a step has for the tier. A rank applies it after the ends and before anything else: it copies the stores, stops
/// the cancelled fetches, forgets the removals, and begins the fetches. Fetches run beside the steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierWork {
    /// Pages to keep. Their content is that of the blocks before this step.
    pub stores: Vec<Page>,
    pub fetches: Vec<PageFetch>,
    /// Fetches whose blocks this step or a later one may give to others.
    pub cancels: Vec<FetchId>,
    /// Pages that no rank may keep, because a failed request may have damaged them.
    pub removals: Vec<PageKey>,
}

impl TierWork {
    pub fn clear(&mut self) {
        self.stores.clear();
        self.fetches.clear();
        self.cancels.clear();
        self.removals.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.stores.is_empty() && !self.is_urgent() && self.removals.is_empty()
    }

    /// Whether something in it cannot wait for a step with slices.
    pub fn is_urgent(&self) -> bool {
        !self.fetches.is_empty() || !self.cancels.is_empty()
    }
}

/// A rank's answer to a fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchDone {
    pub epoch: Epoch,
    pub id: FetchId,
    /// The pages that are not in their blocks, by their places in the fetch, in ascending order.
    pub missing: Vec<u32>,
    /// The time that it took.
    pub micros: u64,
}
