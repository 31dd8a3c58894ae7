//! Refusals and their reasons.

use types::{Epoch, Finish, StepId};

/// A request that was not accepted. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestRejection {
    #[error("the queue is full: {limit} is {max}; try again later")]
    Full { limit: &'static str, max: u64 },
    #[error("the request needs room for {needed} tokens and {limit} gives {available}")]
    TooLong { limit: &'static str, needed: u64, available: u64 },
    #[error(
        "the request has {n_tokens} tokens, and the ranks that are left hold {room}; try again when there are more"
    )]
    Outgrown { n_tokens: u64, room: u64 },
    #[error("a rank of an older build, which does not heed all that is asked for, is being replaced; try again then")]
    OlderRanks,
    #[error("the request with its lists takes {needed} bytes and starts_bytes_max gives {available}")]
    TooLarge { needed: usize, available: usize },
    #[error("the request has no tokens")]
    Empty,
    /// A request that is resubmitted after it was complete.
    #[error("the request has nothing left to generate ({0:?})")]
    Finished(Finish),
    #[error("a request of this id is here already")]
    Duplicate,
    #[error("no new requests are taken: this replica is draining")]
    Draining,
    #[error("the request's deadline has passed")]
    Deadline,
}

/// An answer that does not belong to the oldest step in flight. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaleAnswer {
    #[error("an answer of epoch {got} came in epoch {expected}")]
    Epoch { expected: Epoch, got: Epoch },
    #[error("an answer to step {} came, the oldest step in flight is {expected:?}", got.0)]
    Step { expected: Option<StepId>, got: StepId },
    #[error("the answer has {got} slices, the step had {expected}")]
    SliceCount { expected: usize, got: usize },
    #[error("slice {slice} of the answer has {got} tokens, the step asked for at most {max}")]
    TokenCount { slice: usize, max: usize, got: usize },
    #[error("slice {slice} of the answer lacks the token that the step asked for")]
    NoToken { slice: usize },
}
