//! A request at a link: as it is given to one, what its owner is told of it, and all that another link needs to go on
//! with it. Knows no wire, and of replicas only their digest.

use crate::board::ledger::Item;
use crate::board::pick::Need;
use crate::link::absence::Absence;
use crate::link::ticket::Home;
use crate::refusal::Refusal;
use proto::cluster as wire;
use proto::cluster::router_frame::Frame;
use std::sync::Arc;
use telemetry::Carried;
use tokio::sync::mpsc;
use tokio::time::Instant;
use types::{Finish, PolicyDigest, Request, RequestId};

/// A request on its way to the replica.
pub struct Submit {
    /// Unique among all links of this router.
    pub key: u64,
    /// Its id is filled in when it is sent: it depends on the replica. Its output grows with what the owner is told:
    /// together with the prompt it is the token log.
    pub request: Request,
    /// The owner's number for it.
    pub slot: u32,
    pub deadline: Option<Instant>,
    /// Replicas with another digest would give other tokens.
    pub digest: PolicyDigest,
    /// How many of its tokens the replica's cache is said to have.
    pub n_cached: u32,
    pub adopts: Option<Adopts>,
    /// The request's span; empty where nobody records it.
    pub trace: Carried,
    pub outputs: OutputSender,
}

/// A request that the replica may have already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopts {
    pub of: RequestId,
    /// Tokens that the client has.
    pub n_had: u32,
}

/// What a request's owner is told.
#[derive(Debug)]
pub enum ReplicaOutput {
    /// Tokens without gap or repetition, whatever happened to the replica in between: `position` is that of the first
    /// one that is new. Logprobs of the prompt stand as the replica says them, perhaps not for the first time. Beside
    /// the output, how the request ended, if it has.
    Output(wire::Output, Option<Finish>),
    /// Nothing follows.
    Refused(Refusal),
}

/// Where a request's owner receives what is told, each with the request's slot.
pub type OutputSender = mpsc::Sender<(u32, ReplicaOutput)>;

/// A request under way at a link.
pub(super) struct LinkRequest {
    pub(super) submit: Submit,
    // A place in the owner's queue that is kept for the end, so that a slow reader hears of it too.
    pub(super) last: mpsc::OwnedPermit<(u32, ReplicaOutput)>,
    pub(super) home: Arc<Home>,
    pub(super) work: Item,
    /// When it began to wait for its first token at this replica.
    pub(super) since: Instant,
    pub(super) absence: Absence,
    /// How often its replica was lost since it last said a token.
    pub(super) n_lost: u32,
    /// When the replica that has it last said a token of it.
    pub(super) heard: Option<Instant>,
}

impl LinkRequest {
    pub(super) fn end(self, refusal: Refusal) {
        self.last(ReplicaOutput::Refused(refusal));
    }

    pub(super) fn finish(self, output: wire::Output, finish: Finish) {
        self.last(ReplicaOutput::Output(output, Some(finish)));
    }

    fn last(self, output: ReplicaOutput) {
        // The work ends first, so that a client that hears of the end and asks again finds this replica free.
        drop(self.work);
        self.last.send((self.submit.slot, output));
    }

    /// Whether its owner may have a part of the answer: then it is not given up while its replica comes back.
    pub(super) fn has_begun(&self) -> bool {
        !self.submit.request.output.is_empty() || self.n_lost > 0
    }

    pub(super) fn need(&self) -> Need {
        let request = &self.submit.request;
        let n_tokens = request.prompt.len() as u64 + u64::from(request.sampling.tokens_max);
        Need { digest: self.submit.digest, n_tokens, n_known: request.n_tokens() as u64 }
    }

    pub(super) fn frame(&mut self, id: RequestId, now: Instant) -> Frame {
        let mut request = wire::Request::from(&self.submit.request);
        request.id = id.0;
        request.traceparent.clone_from(&self.submit.trace.parent);
        request.tracestate.clone_from(&self.submit.trace.state);
        request.deadline_micros =
            self.submit.deadline.map(|deadline| deadline.saturating_duration_since(now).as_micros() as u64);
        match self.submit.adopts.take() {
            Some(Adopts { of, n_had }) => Frame::Adopt(wire::Adopt { of: of.0, request: Some(request), n_had }),
            None => Frame::Submit(request),
        }
    }

    /// How the request ended, where its log is complete. That saves waiting for the replica to say so, which could be
    /// lost before it does.
    pub(super) fn finished(&self) -> Option<Finish> {
        let Request { output, sampling, .. } = &self.submit.request;
        let n_output = output.len() as u32;
        match output.last() {
            Some(last) if sampling.is_stop(*last) && n_output > sampling.tokens_min => Some(Finish::Stop),
            Some(_) if n_output >= sampling.tokens_max => Some(Finish::Length),
            _ => None,
        }
    }
}
