//! A request at a link: how it is submitted, what its owner receives, and all that another link needs to continue it.
//! Knows no wire, and of replicas only their digest.

use crate::board::ledger::RemainingWork;
use crate::board::pick::ContinuationNeed;
use crate::link::absence::ComputeAbsence;
use crate::link::ticket::CancelRoute;
use crate::refusal::Refusal;
use proto::cluster as wire;
use proto::cluster::passage::Kind;
use proto::cluster::router_frame::Frame;
use std::sync::Arc;
use telemetry::TraceHeaders;
use tokio::sync::mpsc;
use tokio::time::Instant;
use types::{Finish, Goal, PolicyDigest, Request, RequestId};

/// What all requests of one client's call have in common. Each has a slot, its owner's number for it.
pub struct ClientCall {
    /// The key of slot zero, unique among all links of this router. Those of the other slots follow.
    pub first_key: u64,
    pub deadline: Option<Instant>,
    /// Replicas with another digest would give other tokens.
    pub digest: PolicyDigest,
    /// How many tokens of each request the replica's cache probably has.
    pub n_cached: u32,
    /// The call's span; empty if it is not recorded.
    pub trace: TraceHeaders,
    /// The client watches how far its prompts are.
    pub needs_progress: bool,
    pub outputs: OutputSender,
}

/// The most events of a request between two of its outputs. Later ones are dropped.
const EVENTS_MAX: usize = 32;

/// A request that the replica may have already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adoption {
    pub of: RequestId,
    /// How many tokens the client has.
    pub n_had: u32,
}

/// Outputs for the owner of some requests: a slot, and its tokens without gap or repetition, whatever happened to the
/// replica in between. `position` is that of the first new token. `finish` is set in the last output, also if the link
/// detects the end before the replica reports it. Logprobs of the prompt come as the replica sends them, perhaps
/// repeatedly. After a refusal no further output follows.
pub type SlotOutput = (u32, Result<wire::Output, Refusal>);
pub type OutputSender = mpsc::Sender<SlotOutput>;

/// A running request at a link.
pub(super) struct LinkRequest {
    /// Its id depends on the replica and is filled in on sending. Its output grows with what the owner receives:
    /// together with the prompt it is the token log.
    pub(super) request: Request,
    pub(super) slot: u32,
    pub(super) call: Arc<ClientCall>,
    pub(super) adopts: Option<Adoption>,
    // A place in the owner's queue that is kept for the end, so that it reaches a slow reader too.
    pub(super) last: mpsc::OwnedPermit<SlotOutput>,
    pub(super) home: Arc<CancelRoute>,
    pub(super) work: RemainingWork,
    /// When it began to wait for its first token at this replica.
    pub(super) since: Instant,
    pub(super) absence: ComputeAbsence,
    /// How often its replica was lost since its last token.
    pub(super) n_lost: u32,
    /// How often of these its coordinator was lost too.
    pub(super) n_coordinators_lost: u32,
    /// When the present replica last sent a token of it.
    pub(super) last_token_at: Option<Instant>,
    /// What happened to it here since its last output. The next output reports it.
    pub(super) events: Vec<(Kind, Instant)>,
}

impl LinkRequest {
    pub(super) fn end(self, refusal: Refusal) {
        self.last(Err(refusal));
    }

    /// Records that something happened to it here. Silently drops the event if `EVENTS_MAX` are already recorded since
    /// its last output.
    pub(super) fn record_event(&mut self, kind: Kind, now: Instant) {
        if self.events.len() < EVENTS_MAX {
            self.events.push((kind, now));
        }
    }

    /// Records that its replica no longer has it. `is_gone`: its coordinator is lost too.
    pub(super) fn record_loss(&mut self, is_gone: bool, now: Instant) {
        (self.since, self.n_lost) = (now, self.n_lost + 1);
        self.n_coordinators_lost += u32::from(is_gone);
        self.record_event(Kind::Lost, now);
    }

    /// Adds what happened to it here to an output, before the reports of its present replica.
    pub(super) fn report_events(&mut self, output: &mut wire::Output, now: Instant) {
        if self.events.is_empty() {
            return;
        }
        let passage = |(kind, at): (Kind, Instant)| wire::Passage {
            kind: kind.into(),
            micros_ago: now.saturating_duration_since(at).as_micros() as u64,
            ..wire::Passage::default()
        };
        output.passages.splice(..0, self.events.drain(..).map(passage));
    }

    pub(super) fn finish(self, output: wire::Output, finish: Finish) {
        self.last(Ok(wire::Output { finish: wire::Finish::from(finish).into(), ..output }));
    }

    fn last(self, output: Result<wire::Output, Refusal>) {
        // The work ends first, so that a client that learns of the end and sends a new request finds this replica free.
        drop(self.work);
        self.last.send((self.slot, output));
    }

    /// Whether its owner may have part of the answer: then it is not given up while its replica comes back.
    pub(super) fn has_begun(&self) -> bool {
        !self.request.output.is_empty() || self.n_lost > 0
    }

    pub(super) fn need(&self) -> ContinuationNeed {
        let request = &self.request;
        // Nothing is drawn behind a pooled prompt, which may fill the whole context.
        let undrawn = u64::from(request.goal == Goal::Pool);
        let n_tokens = request.prompt.len() as u64 + u64::from(request.sampling.tokens_max) - undrawn;
        let (n_known, protocol) = (request.n_tokens() as u64 - undrawn, proto::needed(request));
        ContinuationNeed { digest: self.call.digest, n_tokens, n_known, protocol }
    }

    pub(super) fn frame(&mut self, id: RequestId, now: Instant) -> Frame {
        let mut request = wire::Request::from(&self.request);
        request.id = id.0;
        request.traceparent.clone_from(&self.call.trace.parent);
        request.tracestate.clone_from(&self.call.trace.state);
        request.needs_progress = self.call.needs_progress;
        request.deadline_micros =
            self.call.deadline.map(|deadline| deadline.saturating_duration_since(now).as_micros() as u64);
        match self.adopts.take() {
            Some(Adoption { of, n_had }) => Frame::Adopt(wire::Adopt { of: of.0, request: Some(request), n_had }),
            None => Frame::Submit(request),
        }
    }

    /// Returns how the request ended, if its log is complete. That saves waiting for the replica to report it, which
    /// could be lost first.
    pub(super) fn known_finish(&self) -> Option<Finish> {
        let Request { output, sampling, .. } = &self.request;
        let n_output = output.len() as u32;
        match output.last() {
            Some(last) if sampling.is_stop(*last) && n_output > sampling.tokens_min => Some(Finish::Stop),
            Some(_) if n_output >= sampling.tokens_max => Some(Finish::Length),
            _ => None,
        }
    }
}
