//! What a request gets from a step, or instead of one.

use crate::sequence::{FoundPrefix, Sequence};
use types::{Finish, PrefixReuse, RequestId};

/// An event of a request: it got a token, or it ended, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestOutput {
    pub id: RequestId,
    /// The first token's position, counted from the end of the prompt; without a token, the position of the next one.
    pub position: u32,
    /// The tokens are `done.slices[slice].tokens[..n_tokens]`.
    pub slice: usize,
    pub n_tokens: u32,
    /// The slice's other results (scores, pooled states) begin at this position of the log; zero if there are none.
    pub scored_position: u32,
    /// Tokens of the prompt that the prefix cache had when the request was first admitted.
    pub n_cached: u32,
    /// Why it had no more.
    pub reuse: PrefixReuse,
    /// Of the slice's drafts, how many are among the tokens, and how many are not.
    pub drafts_accepted: u32,
    pub drafts_rejected: u32,
    pub finish: Option<Finish>,
}

impl RequestOutput {
    /// An output without a token.
    pub(crate) fn of(sequence: &Sequence) -> RequestOutput {
        let (id, position) = (sequence.id, sequence.n_output());
        let FoundPrefix { n_cached, reuse, .. } = sequence.found;
        RequestOutput { id, position, n_cached, reuse, ..RequestOutput::default() }
    }
}
