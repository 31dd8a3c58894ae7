//! Requests that change their router, because a client goes on with its stream at another one. Their output so far is
//! sent again, and they go on under a new id. Knows tokens, and no clients.
//!
//! A log is a function of its request, so sending the same request reveals nothing that computing it again would not; a
//! different request has no claim to it.

use super::LiveRequests;
use proto::cluster as wire;
use types::{Goal, Micros, Request, RequestId, Token};

impl LiveRequests {
    pub fn adopt(&mut self, wire::Adopt { of, request, n_had }: wire::Adopt, now: Micros) {
        let (of, Some(mut request)) = (RequestId(of), request) else { return };
        let (id, n_known) = (request.id, request.output.len());
        let tail = self.output_since(of, &request, n_had as usize);
        request.output.extend_from_slice(&tail);
        if !self.submit(request, now) {
            return;
        }
        if !tail.is_empty() {
            let tokens = tail.into_iter().map(|token| wire::TokenOut { token, ..Default::default() }).collect();
            self.routers.push(wire::Output { id, position: n_known as u32, tokens, ..Default::default() });
        }
        // The old one's output has no reader. Its blocks stay in the prefix cache, where the new one finds them.
        if self.routers.is_abandoned(of) {
            self.cancel_all(vec![of], now);
        }
    }

    /// Returns the output of the same request beyond what its new router has. The log has no logprobs: if the request
    /// has them, the output ends where the client's does, and later tokens are drawn again.
    ///
    /// `[0, output) known to the router · [output, n_had) had by the client · [n_had, end) not sent yet`
    fn output_since(&self, of: RequestId, request: &wire::Request, n_had: usize) -> Vec<Token> {
        let Some(left) = self.planner.as_ref().and_then(|planner| planner.scheduler.request(of)) else {
            return Vec::new();
        };
        let Ok(request) = Request::try_from(request.clone()) else { return Vec::new() };
        let is_same = request.goal == Goal::Generate && proto::stream_key(left) == proto::stream_key(&request);
        let Some(tail) = left.output.strip_prefix(request.output.as_slice()).filter(|_| is_same) else {
            return Vec::new();
        };
        let n_had = n_had.saturating_sub(request.output.len());
        let n_kept = if request.sampling.logprobs.is_some() { tail.len().min(n_had) } else { tail.len() };
        tail[..n_kept].to_vec()
    }
}
