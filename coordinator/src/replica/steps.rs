//! The loop's part that moves tokens: requests in, steps out, answers in, outputs out.

use crate::event::WorkerId;
use crate::members::patience;
use crate::members::workers::Role;
use crate::replica::Replica;
use crate::replica::losses::Cause;
use crate::requests::traces;
use proto::cluster as wire;
use proto::cluster::refused::Reason;
use proto::cluster::replica_frame::Frame;
use scheduler::{Output, Rejected, Stale};
use std::time::Duration;
use telemetry::metrics;
use tonic::Status;
use types::{Finish, Request, RequestId, SliceDone, StepDone, Token};

/// A request that is not taken.
struct Refusal {
    reason: Reason,
    message: String,
}

impl From<Rejected> for Refusal {
    fn from(rejected: Rejected) -> Refusal {
        let reason = match rejected {
            Rejected::Full { .. } => Reason::Full,
            Rejected::TooLong { .. } | Rejected::TooLarge { .. } => Reason::TooLong,
            Rejected::Unsupported(_) => Reason::Unsupported,
            Rejected::Empty | Rejected::Finished(_) => Reason::Invalid,
            Rejected::Duplicate => Reason::Duplicate,
            Rejected::Draining => Reason::Draining,
            Rejected::Deadline => Reason::Deadline,
            Rejected::Outgrown { .. } => Reason::NotReady,
        };
        Refusal { reason, message: rejected.to_string() }
    }
}

impl Replica {
    /// Whether it was taken.
    pub(crate) fn submit(&mut self, router: u32, request: wire::Request) -> bool {
        if !self.routers.is_attached(router) {
            return false;
        }
        let id = RequestId(request.id);
        let taken = self.take(request);
        taken.map_err(|refusal| self.refuse(id, refusal)).is_ok()
    }

    fn take(&mut self, request: wire::Request) -> Result<(), Refusal> {
        let now = self.now();
        let invalid = |message: String| Refusal { reason: Reason::Invalid, message };
        let traced = traces::submitted(&request);
        let request = request.received(now).map_err(|malformed| invalid(malformed.to_string()))?;
        if let Some(token) = beyond(&request, self.config.shape.vocab) {
            return Err(invalid(format!("token {token} is outside the vocabulary of {}", self.config.shape.vocab)));
        }
        let Some(serving) = &mut self.serving else {
            return Err(Refusal { reason: Reason::NotReady, message: "the replica is loading".into() });
        };
        let (id, n_prompt, looks_up) = (request.id, request.prompt.len(), !request.cache_bypass);
        let mut displaced = Vec::new();
        serving.scheduler.submit(request, now)?;
        while let Some(id) = serving.scheduler.displaced() {
            displaced.push(id);
        }
        self.routers.taken(id);
        if let Some(submitted) = traced {
            self.traces.taken(submitted, now);
        }
        metrics::taken(&self.of, n_prompt, looks_up);
        displaced.into_iter().for_each(|id| self.displace(id));
        Ok(())
    }

    /// It waited, and another tenant that waits for less has its place now.
    fn displace(&mut self, id: RequestId) {
        let message = "the queue is full, and other tenants have less in it; try again later".into();
        self.traces.given_back(id);
        self.refuse(id, Refusal { reason: Reason::Full, message });
        self.routers.given_back(id);
    }

    fn refuse(&mut self, id: RequestId, refusal: Refusal) {
        let n_waiting = self.serving.as_ref().map_or(0, |serving| serving.scheduler.stats().n_waiting);
        metrics::refused(&self.of, label(refusal.reason));
        let refused = wire::Refused {
            id: id.0,
            reason: refusal.reason.into(),
            message: refusal.message,
            retry_after_ms: self.pace.retry_after_ms(n_waiting),
        };
        let lost = self.routers.send(id.router(), Frame::Refused(refused));
        self.cancel_all(lost);
    }

    /// A router may cancel only what is its own. What ended at a stop string has not been given up.
    pub(crate) fn cancel_for(&mut self, router: u32, id: RequestId, stopped: bool) {
        let Some(serving) = self.serving.as_mut().filter(|_| id.router() == router) else { return };
        serving.scheduler.cancel(id, &mut self.outputs);
        if stopped {
            self.outputs.iter_mut().for_each(|output| output.finish = Some(Finish::Stop));
        }
        self.outputs_without_step();
    }

    /// Plans and sends steps until enough are in flight or there is nothing to do.
    pub(crate) fn plan_steps(&mut self) {
        while self.is_ready {
            let now = self.now();
            let Some(serving) = &mut self.serving else { return };
            let is_first = serving.scheduler.stats().n_steps_in_flight == 0;
            if !serving.scheduler.next_step(now, &mut self.step) {
                return;
            }
            if is_first {
                self.step_since = now;
            }
            self.patience.sent(patience::work(&self.step));
            let bytes = proto::encode_traced_step(&self.step, self.traces.planned(&self.step));
            if let Err(worker) = self.members.send_step(&bytes) {
                self.lose(worker, Cause::Deaf, Status::resource_exhausted("this rank leaves its steps unread"));
            }
        }
    }

    pub(crate) fn step_done(&mut self, worker: WorkerId, done: StepDone) {
        self.members.heard(worker);
        let (now, vocab) = (self.now(), self.config.shape.vocab);
        let sampler = self.blueprint.as_ref().map(|blueprint| blueprint.grid.sampler());
        let is_sampler = matches!(self.members.role(worker), Some(Role::Ready { rank, .. }) if Some(rank) == sampler);
        let Some(serving) = self.serving.as_mut().filter(|_| is_sampler) else { return };
        let is_token = |slice: &SliceDone| slice.tokens.iter().all(|out| out.token < vocab);
        if !done.slices.iter().all(is_token) {
            let why = Status::invalid_argument("a token outside the vocabulary");
            return self.lose(worker, Cause::Wrong, why);
        }
        match serving.scheduler.apply(&done, &mut self.outputs) {
            Ok(()) => {
                self.traces.answered(done.id);
                let n_tokens = done.slices.iter().map(|slice| slice.tokens.len() as u64).sum();
                self.speed.answered(done.slices.len(), n_tokens, self.step_since, now);
                self.patience.answered(now.since(self.step_since).0);
                self.step_since = now;
                metrics::step(&self.of, Duration::from_micros(done.micros.into()));
                self.outputs_of(&done);
            }
            // Its epoch ended while the answer was on its way.
            Err(Stale::Epoch { .. }) => {}
            Err(stale) => self.lose(worker, Cause::Wrong, Status::invalid_argument(stale.to_string())),
        }
    }

    fn outputs_of(&mut self, done: &StepDone) {
        let now = self.now();
        for output in self.outputs.drain(..) {
            self.traces.told(&output, output.finish.map(finish_label), now);
            if let Some(finish) = output.finish {
                self.pace.ended(now);
                metrics::finished(&self.of, finish_label(finish));
            }
            self.routers.push(output_frame(&output, done));
        }
    }

    /// Of cancels, deadlines and losses: they carry no tokens.
    pub(crate) fn outputs_without_step(&mut self) {
        if !self.outputs.is_empty() {
            self.outputs_of(&StepDone::default());
        }
    }
}

fn output_frame(output: &Output, done: &StepDone) -> wire::Output {
    let slice = done.slices.get(output.slice);
    let drawn = slice.map_or(&[][..], |slice| &slice.tokens);
    let beside = slice.filter(|_| output.scored_position > 0);
    let tokens = drawn.iter().take(output.n_tokens as usize).map(wire::TokenOut::from).collect();
    wire::Output {
        id: output.id.0,
        position: output.position,
        tokens,
        finish: output.finish.map_or(wire::Finish::Unspecified, wire::Finish::from).into(),
        cached_tokens: output.n_cached,
        scored_position: output.scored_position,
        scored: beside.map_or(&[][..], |slice| &slice.scored).iter().map(wire::TokenOut::from).collect(),
        pooled: beside.map_or_else(Vec::new, |slice| slice.pooled.clone()),
    }
}

/// A token that the embedding has no row for: it would fail the whole step.
fn beyond(request: &Request, vocab: u32) -> Option<Token> {
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

/// As vLLM's `finished_reason` has them, where it has them.
fn finish_label(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "abort",
        Finish::Deadline => "deadline",
        Finish::Failed | Finish::Outgrown => "error",
    }
}
