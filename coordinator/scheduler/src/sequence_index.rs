//! How one sequence names another.

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
