//! The loop's part that sends steps to the ranks and takes their answers.

use super::Replica;
use super::endings::WorkerDismissalCause;
use super::phase::Phase;
use crate::WorkerId;
use crate::members::patience;
use scheduler::StaleAnswer;
use std::time::Duration;
use telemetry::metrics;
use tonic::Status;
use types::{Micros, SliceDone, StepDone};

impl Replica {
    /// Plans and sends steps until enough are in flight or there is nothing to do.
    pub(super) fn plan_steps(&mut self) {
        loop {
            let now = self.now();
            let Phase::Serving(serving) = &mut self.phase else { return };
            let is_first = self.requests.stats().n_steps_in_flight == 0;
            let Some(step) = self.requests.next_step(now) else { return };
            if is_first {
                serving.step_since = now;
            }
            serving.patience.sent(patience::work(self.requests.last_step()));
            if let Err(worker) = self.members.send_step(&serving.placement.ranks, &step) {
                let why = Status::resource_exhausted("this rank does not read its steps");
                return self.report_loss(worker, WorkerDismissalCause::Deaf, why);
            }
        }
    }

    pub(super) fn step_done(&mut self, worker: WorkerId, done: &StepDone) {
        self.members.mark_alive(worker);
        let (now, vocab) = (self.now(), self.config.shape.vocab);
        if !self.is_sampler(worker) || !self.requests.has_served() {
            return;
        }
        let is_token = |slice: &SliceDone| slice.tokens.iter().all(|out| out.token < vocab);
        if !done.slices.iter().all(is_token) {
            let why = Status::invalid_argument("the answer has a token outside the vocabulary");
            return self.report_loss(worker, WorkerDismissalCause::Wrong, why);
        }
        match self.requests.apply(done, now) {
            Ok(()) => self.record_answer(done, now),
            // Its epoch ended while the answer was on its way.
            Err(StaleAnswer::Epoch { .. }) => {}
            Err(stale) => {
                self.report_loss(worker, WorkerDismissalCause::Wrong, Status::invalid_argument(stale.to_string()))
            }
        }
    }

    /// Only the rank that samples answers steps.
    fn is_sampler(&self, worker: WorkerId) -> bool {
        self.phase.placement().is_some_and(|placement| {
            let sampler = placement.blueprint.grid.sampler();
            placement.ranks.is_ready(worker) && placement.ranks.rank(worker) == Some(sampler)
        })
    }

    /// A step's time counts from the answer before it, if that came while the step was in flight.
    fn record_answer(&mut self, done: &StepDone, now: Micros) {
        let Phase::Serving(serving) = &mut self.phase else { return };
        let n_tokens = done.slices.iter().map(|slice| slice.tokens.len() as u64).sum();
        self.performance.measured.record_answer(done.slices.len(), n_tokens, serving.step_since, now);
        serving.patience.record_answer(now.since(serving.step_since).0);
        serving.step_since = now;
        metrics::step(&self.of, Duration::from_micros(done.micros.into()));
    }
}
