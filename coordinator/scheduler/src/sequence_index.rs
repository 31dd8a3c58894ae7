//! How one sequence names another, and what a waiting one waits for.

use types::FetchId;

/// Its place in the slab; another sequence may have it later.
pub(crate) type SequenceIdx = u32;

/// The front of a waiting sequence's log, as long as another computes it.
#[derive(Clone, Copy)]
pub(crate) struct AwaitedPrefix {
    pub of: SequenceIdx,
    /// That admission of it.
    pub generation: u64,
    /// It is computed when all positions before this one are.
    pub position: u32,
}

/// The front of a waiting sequence's log that is on its way to the pools.
#[derive(Clone, Copy)]
pub(crate) enum Awaited {
    Prefix(AwaitedPrefix),
    /// Until the fetch ends.
    Fetch(FetchId),
}
