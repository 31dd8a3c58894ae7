//! A request under way, with all that another link needs to go on with it. Knows no wire and no replica but by digest.

use crate::ledger::Item;
use crate::link::line::up;
use crate::link::{Adopts, Ear, Progress, Told};
use crate::pick::Need;
use crate::refusal::Refusal;
use crate::ticket::Home;
use proto::cluster as wire;
use std::sync::Arc;
use telemetry::Carried;
use tokio::sync::mpsc;
use tokio::time::Instant;
use types::{Finish, PolicyDigest, Request, RequestId, TokenOut};

/// A request under way. `request.output` grows with what was told: together with the prompt it is the token log.
pub(super) struct Entry {
    pub(super) request: Request,
    pub(super) slot: u32,
    pub(super) deadline: Option<Instant>,
    pub(super) digest: PolicyDigest,
    pub(super) adopts: Option<Adopts>,
    pub(super) trace: Carried,
    pub(super) ear: Ear,
    // A place in the ear's queue that is kept for the end, so that a slow reader hears of it too.
    pub(super) last: mpsc::OwnedPermit<(u32, Told)>,
    pub(super) home: Arc<Home>,
    pub(super) work: Item,
    /// When it began to wait for a replica.
    pub(super) since: Instant,
    /// How often its replica was lost since it last said a token.
    pub(super) n_lost: u32,
    /// When the replica that has it last said a token of it.
    pub(super) heard: Option<Instant>,
}

impl Entry {
    pub(super) fn end(self, refusal: Refusal) {
        // First, so that who hears of the end and asks again finds this replica free.
        drop(self.work);
        self.last.send((self.slot, Told::Refused(refusal)));
    }

    pub(super) fn finish(self, progress: Progress) {
        drop(self.work);
        self.last.send((self.slot, Told::Tokens(progress)));
    }

    pub(super) fn need(&self) -> Need {
        let Request { prompt, sampling, .. } = &self.request;
        Need { digest: self.digest, n_tokens: prompt.len() as u64 + u64::from(sampling.tokens_max) }
    }

    pub(super) fn frame(&mut self, id: RequestId, now: Instant) -> wire::RouterFrame {
        let mut request = wire::Request::from(&self.request);
        request.id = id.0;
        request.traceparent.clone_from(&self.trace.parent);
        request.tracestate.clone_from(&self.trace.state);
        request.deadline_micros =
            self.deadline.map(|deadline| deadline.saturating_duration_since(now).as_micros() as u64);
        up(match self.adopts.take() {
            Some(Adopts { of, n_had }) => {
                wire::router_frame::Frame::Adopt(wire::Adopt { of: of.0, request: Some(request), n_had })
            }
            None => wire::router_frame::Frame::Submit(request),
        })
    }

    /// The log is complete: nobody has to be waited for who says so, and could be lost before.
    pub(super) fn finished(&self) -> Option<Finish> {
        let Request { output, sampling, .. } = &self.request;
        let n_output = output.len() as u32;
        match output.last() {
            Some(last) if sampling.is_stop(*last) && n_output > sampling.tokens_min => Some(Finish::Stop),
            Some(_) if n_output >= sampling.tokens_max => Some(Finish::Length),
            _ => None,
        }
    }
}

/// What is new in `tokens`, which begin at `position`; nothing if tokens are missing between what was told and them.
///
/// `[0, position) told · [position, n_told) told twice · [n_told, ..) new`
pub(super) fn splice(n_told: u32, position: u32, tokens: Vec<wire::TokenOut>) -> Option<Vec<TokenOut>> {
    let n_twice = n_told.checked_sub(position)?;
    Some(tokens.into_iter().skip(n_twice as usize).map(TokenOut::from).collect())
}
