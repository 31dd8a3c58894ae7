//! Refusals and their reasons.

use types::{Epoch, Finish, StepId};

/// A request that was not accepted. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestRejection {
    #[error("the queue is full: {limit} is {max}; try again later")]
    Full { limit: &'static str, max: u64 },
    #[error("the request needs {needed} tokens, and {limit} allows {available}")]
    TooLong { limit: &'static str, needed: u64, available: u64 },
    #[error(
        "the request has {n_tokens} tokens, and the ranks that are left hold {room}; try again when there are more"
    )]
    Outgrown { n_tokens: u64, room: u64 },
    #[error("a rank of an older build does not support all options of the request: try again when it is replaced")]
    OlderRanks,
    #[error("the request with its lists takes {needed} bytes, and starts_bytes_max allows {available}")]
    TooLarge { needed: usize, available: usize },
    #[error("the model is an encoder, which draws no tokens")]
    Encoder,
    #[error("the request has no tokens")]
    Empty,
    /// A request that is resubmitted after it was complete.
    #[error("the request has nothing left to generate ({0:?})")]
    Finished(Finish),
    #[error("a request with this id exists already")]
    Duplicate,
    #[error("this replica is draining and accepts no new requests")]
    Draining,
    #[error("the request's deadline has passed")]
    Deadline,
}

/// An answer that does not belong to the oldest step in flight. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaleAnswer {
    #[error("an answer of epoch {got} arrived in epoch {expected}")]
    Epoch { expected: Epoch, got: Epoch },
    #[error("an answer to step {} arrived, but the oldest step in flight is {expected:?}", got.0)]
    Step { expected: Option<StepId>, got: StepId },
    #[error("the answer has {got} slices, but the step had {expected}")]
    SliceCount { expected: usize, got: usize },
    #[error("slice {slice} of the answer has {got} tokens, but the step requested at most {max}")]
    TokenCount { slice: usize, max: usize, got: usize },
    #[error("slice {slice} of the answer lacks the token that the step requested")]
    NoToken { slice: usize },
}
