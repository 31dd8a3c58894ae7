//! Accepts, adopts, refuses and cancels requests, each for the router that it came from.

use super::adopt::output_since;
use super::histories::AcceptedRequest;
use super::{LiveRequests, traces};
use proto::Malformed;
use proto::cluster as wire;
use proto::cluster::refused::Reason;
use proto::cluster::replica_frame::Frame;
use proto::since;
use scheduler::RequestRejection;
use telemetry::metrics::{self, QueueLimit};
use types::{Finish, Micros, Request, RequestId, Token};

/// A request that is not taken.
struct SubmitRefusal {
    reason: Reason,
    message: String,
}

impl From<RequestRejection> for SubmitRefusal {
    fn from(rejected: RequestRejection) -> SubmitRefusal {
        let reason = match rejected {
            RequestRejection::Full { .. } => Reason::Full,
            RequestRejection::TooLong { .. } | RequestRejection::TooLarge { .. } => Reason::TooLong,
            RequestRejection::Empty | RequestRejection::Finished(_) => Reason::Invalid,
            RequestRejection::Encoder => Reason::Unsupported,
            RequestRejection::Duplicate => Reason::Duplicate,
            RequestRejection::Draining => Reason::Draining,
            RequestRejection::Deadline => Reason::Deadline,
            RequestRejection::Outgrown { .. } | RequestRejection::OlderRanks => Reason::NotReady,
        };
        SubmitRefusal { reason, message: rejected.to_string() }
    }
}

impl From<Malformed> for SubmitRefusal {
    fn from(malformed: Malformed) -> SubmitRefusal {
        let reason = match malformed {
            Malformed::Unsupported(_) => Reason::Unsupported,
            _ => Reason::Invalid,
        };
        SubmitRefusal { reason, message: malformed.to_string() }
    }
}

impl LiveRequests {
    /// Whether it was accepted.
    pub fn submit(&mut self, request: wire::Request, now: Micros) -> bool {
        let id = RequestId(request.id);
        if !self.routers.is_attached(id.router()) {
            return false;
        }
        let taken = self.try_submit(request, now);
        taken.map_err(|refusal| self.refuse(id, refusal, now)).is_ok()
    }

    /// Takes over a request that may be here already, under another id.
    pub fn adopt(&mut self, wire::Adopt { of, request, n_had }: wire::Adopt, now: Micros) {
        let (of, Some(mut request)) = (RequestId(of), request) else { return };
        let (id, n_known) = (request.id, request.output.len());
        let left = self.planner.as_ref().and_then(|planner| planner.scheduler.request(of));
        let tail = left.map_or_else(Vec::new, |left| output_since(left, &request, n_had as usize));
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

    fn try_submit(&mut self, request: wire::Request, now: Micros) -> Result<(), SubmitRefusal> {
        let invalid = |message: String| SubmitRefusal { reason: Reason::Invalid, message };
        let traced = traces::submitted(&request);
        self.check_features_known(&request)?;
        let is_watched = request.needs_progress && request.output.is_empty();
        let request = request.received(now)?;
        if let Some(token) = token_beyond_vocab(&request, self.vocab) {
            return Err(invalid(format!("token {token} is outside the vocabulary of {}", self.vocab)));
        }
        let Some(planner) = &mut self.planner else {
            return Err(SubmitRefusal { reason: Reason::NotReady, message: "the replica is loading".into() });
        };
        let (id, n_prompt, looks_up) = (request.id, request.prompt.len(), !request.cache_bypass);
        let is_begun = !request.output.is_empty();
        let mut displaced = Vec::new();
        planner.scheduler.submit(request, now).inspect_err(|rejected| {
            if let RequestRejection::Full { limit, .. } = rejected {
                let is_requests = *limit == "waiting_max";
                let limit = if is_requests { QueueLimit::Requests } else { QueueLimit::Tokens };
                metrics::admission_rejected(Some(&self.of), limit);
            }
        })?;
        while let Some(id) = planner.scheduler.take_displaced() {
            displaced.push(id);
        }
        self.taken_over = if is_begun { Some(now) } else { self.taken_over };
        self.routers.request_accepted(id);
        let accepted = AcceptedRequest { id, n_prompt, looks_up, is_watched, traced };
        self.histories.request_accepted(accepted, now);
        displaced.into_iter().for_each(|id| self.displace(id, now));
        Ok(())
    }

    /// Refuses features of a number that this build does not speak, as builds before that number do.
    fn check_features_known(&self, request: &wire::Request) -> Result<(), SubmitRefusal> {
        let unknown = |what: &'static str| Err(Malformed::Unsupported(types::Unsupported(what)).into());
        match request {
            wire::Request { constraint: Some(_), .. } if !self.speaks.knows(since::GRAMMARS) => unknown("grammars"),
            wire::Request { cache_apart: true, .. } if !self.speaks.knows(since::APART) => unknown("cache_apart"),
            wire::Request { sampling: Some(sampling), .. }
                if !sampling.logprob_token_ids.is_empty() && !self.speaks.knows(since::NAMED_LOGPROBS) =>
            {
                unknown("logprobs of named tokens")
            }
            wire::Request { sampling: Some(wire::Sampling { penalties: Some(penalties), .. }), .. }
                if penalties.window > 0 && !self.speaks.knows(since::PENALTY_WINDOWS) =>
            {
                unknown("penalty windows")
            }
            _ => Ok(()),
        }
    }

    /// Removes a waiting request: a request of a tenant with less waiting takes its place.
    fn displace(&mut self, id: RequestId, now: Micros) {
        let message = "the queue is full, and other tenants have fewer requests in it: try again later".into();
        self.histories.request_retracted(id);
        self.refuse(id, SubmitRefusal { reason: Reason::Full, message }, now);
        self.routers.request_retracted(id);
    }

    fn refuse(&mut self, id: RequestId, refusal: SubmitRefusal, now: Micros) {
        let n_waiting = self.stats().n_waiting;
        metrics::refused(&self.of, label(refusal.reason));
        let refused = wire::Refused {
            id: id.0,
            reason: refusal.reason.into(),
            message: refusal.message,
            retry_after_ms: self.histories.retry_after_ms(n_waiting),
        };
        let lost = self.routers.send(id.router(), Frame::Refused(refused));
        self.cancel_all(lost, now);
    }

    /// A router may cancel only its own requests. One that ended at a stop string was not given up.
    pub fn cancel_for(&mut self, router: u32, id: RequestId, stopped: bool, now: Micros) {
        let Some(planner) = self.planner.as_mut().filter(|_| id.router() == router) else { return };
        planner.scheduler.cancel(id, &mut self.outputs);
        if stopped {
            self.outputs.iter_mut().for_each(|output| output.finish = Some(Finish::Stop));
        }
        self.outputs_without_step(now);
    }
}

/// A token that the embedding has no row for: it would fail the whole step.
fn token_beyond_vocab(request: &Request, vocab: u32) -> Option<Token> {
    request.prompt.iter().chain(&request.output).copied().find(|token| *token >= vocab)
}

fn label(reason: Reason) -> &'static str {
    match reason {
        Reason::Unspecified => "unspecified",
        Reason::Full => "full",
        Reason::Draining => "draining",
        Reason::TooLong => "too_long",
        Reason::Unsupported => "unsupported",
        Reason::Duplicate => "duplicate",
        Reason::NotReady => "not_ready",
        Reason::Deadline => "deadline",
        Reason::Invalid => "invalid",
    }
}
