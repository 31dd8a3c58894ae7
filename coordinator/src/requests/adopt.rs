//! What a request brings along when it changes its router, because a client goes on with its stream at another one. Its
//! output so far is sent again, and it goes on under a new id. Knows tokens, and no clients.
//!
//! A log is a function of its request, so sending the same request reveals nothing that computing it again would not; a
//! different request has no claim to it.

use proto::cluster as wire;
use types::{Goal, Request, Token};

/// Returns the output of the same request, which is left behind, beyond what its new router has. The log has no
/// logprobs: if the request has them, the output ends where the client's does, and later tokens are drawn again.
///
/// `[0, output) known to the router · [output, n_had) had by the client · [n_had, end) not sent yet`
pub(super) fn output_since(left: &Request, request: &wire::Request, n_had: usize) -> Vec<Token> {
    let Ok(request) = Request::try_from(request.clone()) else { return Vec::new() };
    let is_same = request.goal == Goal::Generate && proto::stream_key(left) == proto::stream_key(&request);
    let Some(tail) = left.output.strip_prefix(request.output.as_slice()).filter(|_| is_same) else {
        return Vec::new();
    };
    let n_had = n_had.saturating_sub(request.output.len());
    let n_kept = if request.sampling.logprobs.is_some() { tail.len().min(n_had) } else { tail.len() };
    tail[..n_kept].to_vec()
}
