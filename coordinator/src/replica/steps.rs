//! The loop's part that sends steps to the ranks, takes their answers, and has ranks that grow commit as much memory as
//! the requests need.

use super::Replica;
use crate::WorkerId;
use crate::members::kv_target::{AHEAD, AHEAD_MIN, KvNeeds};
use crate::members::patience;
use scheduler::StaleAnswer;
use types::{Micros, SliceDone, StepDone};

impl Replica {
    /// Plans and sends steps until enough are in flight or there is nothing to do.
    pub(super) fn plan_steps(&mut self) {
        while self.deployment.is_serving() {
            let now = self.clock.now();
            let is_first = self.requests.stats().n_steps_in_flight == 0;
            let Some(step) = self.requests.next_step(now) else { return };
            if !self.deployment.send_step(&step, patience::work(self.requests.last_step()), is_first, now) {
                return;
            }
        }
    }

    pub(super) fn step_done(&mut self, worker: WorkerId, done: &StepDone, now: Micros) {
        self.deployment.mark_alive(worker);
        if !self.deployment.is_sampler(worker) || !self.requests.has_served() {
            return;
        }
        let vocab = self.config.shape.vocab;
        let is_token = |slice: &SliceDone| slice.tokens.iter().all(|out| out.token < vocab);
        if !done.slices.iter().all(is_token) {
            return self.deployment.refuse_answer(worker, "the answer has a token outside the vocabulary".into());
        }
        match self.requests.apply(done, self.deployment.duration(done, now), now) {
            Ok(()) => self.deployment.record_answer(done, now),
            // Its epoch ended while the answer was on its way.
            Err(StaleAnswer::Epoch { .. }) => {}
            Err(stale) => self.deployment.refuse_answer(worker, stale.to_string()),
        }
    }

    /// Has ranks that grow commit what requests will soon need.
    pub(super) fn grow_kv(&mut self) {
        let Some(parts) = self.deployment.kv_target_parts() else { return };
        if self.requests.kv_target(AHEAD_MIN) > parts {
            self.deployment.raise_kv_target(self.requests.kv_target(AHEAD));
        }
    }

    /// Has them give back what has held no block for a while. The blocks are taken from the pools first.
    pub(super) fn shrink_kv(&mut self, now: Micros) {
        if self.deployment.kv_target_parts().is_none() {
            return;
        }
        let (target, spare) = (self.requests.kv_target(AHEAD), self.requests.kv_target(2 * AHEAD));
        let needs = KvNeeds { target, spare, held: self.requests.kv_held() };
        if let Some(parts) = self.deployment.lower_kv_target(needs, now) {
            self.requests.kv_committed(parts);
            self.deployment.send_kv_target();
        }
    }
}
