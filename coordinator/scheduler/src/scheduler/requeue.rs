//! The workers were lost: every sequence begins again from its log, in a new epoch.
//!
//! Maybe a request broke them. It must not break the next workers for ever, and its neighbours must not end for it:
//!
//! 1. A sequence with a slice in the oldest step in flight becomes a suspect: answers come in order, so that step is
//!    lost.
//! 2. A sequence that gets a token is cleared. One that breaks the ranks never gets another.
//! 3. One suspect runs at a time, the least suspicious first. So a neighbour that was lost beside the culprit never
//!    meets it again until it is cleared, and if workers are lost for another reason three times in a row, the sequence
//!    that runs alone is not the same each time.
//! 4. While there is a suspect, one step is in flight. Stages run different steps at once, and a later one may break
//!    first; alone in flight, the oldest step is the one that was lost.
//!
//! Rule 1 may accuse a neighbour once for a later step, before there are suspects, and once more beside a culprit that
//! is not yet a suspect. From then on only the culprit is accused, so a limit above two losses ends the culprit alone.

use super::Scheduler;
use crate::config::Config;
use crate::costs::StepCosts;
use crate::loss::WorkerLoss;
use crate::output::RequestOutput;
use crate::sequence::{Sequence, SequenceState};
use crate::slab::SequenceIdx;
use crate::table::BlockTable;
use alloc::vec::Vec;
use types::{Epoch, Finish, Unsupported};

impl Scheduler {
    /// All running sequences wait again, with their logs and their places in the order. The caches of the workers are
    /// gone, so no block has a name; steps in flight will not come back; steps are counted from zero.
    pub fn requeue_all(&mut self, epoch: Epoch, loss: WorkerLoss, out: &mut Vec<RequestOutput>) {
        let n_blocks = self.config.n_blocks.clone();
        self.requeue_into(epoch, &n_blocks, loss, out);
    }

    /// The same for workers with `n_blocks` of each group. Requests that might outgrow them end with `Finish::Failed`,
    /// so placement should give them blocks for a full context if it can. So do those above the limit of suspicion.
    pub fn requeue_into(&mut self, epoch: Epoch, n_blocks: &[u32], loss: WorkerLoss, out: &mut Vec<RequestOutput>) {
        assert_eq!(n_blocks.len(), self.config.groups.len(), "one pool for each cache group");
        self.accuse_oldest_step(loss.weight());
        self.in_flight.begin_epoch(epoch);
        self.config.n_blocks.copy_from_slice(n_blocks);
        self.pools.reset(&self.config);
        self.running.clear();
        let all: Vec<SequenceIdx> = self.sequences.iter().map(|(idx, _)| idx).collect();
        all.iter().for_each(|&idx| self.requeue(idx));
        self.end_what_is_outgrown(out);
        self.fail_what_cannot_fit(out);
        self.fail_what_is_suspected_too_much(out);
    }

    /// Sets the number of stages and of steps in flight. Call between two epochs.
    pub fn reshape(&mut self, n_stages: u32, steps_in_flight_max: u32) -> Result<(), Unsupported> {
        assert!(self.in_flight.is_empty(), "no step is in flight in stages of the old epoch");
        let config = Config { n_stages, steps_in_flight_max, ..self.config.clone() };
        config.supported()?;
        self.in_flight.reserve(steps_in_flight_max, config.running_max);
        self.config = config;
        // Another grid has other costs.
        self.costs = StepCosts::default();
        Ok(())
    }

    /// Sets how many tokens of a log the workers hold, if that is less than the promised context. Logs that fit go on;
    /// one that reaches this limit before its own ends with `Finish::Outgrown`. If the workers would ignore a part of
    /// some requests (`supports_newest_features` is false), there is no room at all for logs of such requests. Call
    /// before `requeue_into`.
    pub fn limit_log_length(&mut self, room: u32, supports_newest_features: bool) {
        self.acceptance.set_room(room.min(self.config.context_max), supports_newest_features);
        for sequence in self.sequences.iter_mut() {
            sequence.limit_length(self.acceptance.room_for(&sequence.request));
        }
    }

    fn accuse_oldest_step(&mut self, weight: u32) {
        let Some(step) = self.in_flight.pop_oldest() else { return };
        step.slices.iter().for_each(|planned| self.sequences.accuse(planned.sequence, planned.generation, weight));
        self.in_flight.recycle(step);
    }

    fn requeue(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        match sequence.state() {
            SequenceState::Waiting => {
                sequence.awaited = None;
                sequence.found.forget_tier();
            }
            SequenceState::Ending => self.sequences.remove(idx),
            SequenceState::Running => {
                self.counters.requeued += 1;
                self.counters.tokens_requeued += u64::from(sequence.progress().n_computed);
                sequence.tables.iter_mut().for_each(BlockTable::clear);
                sequence.rewind();
                let tenant = sequence.tenant;
                self.enqueue(idx);
                self.tenants.remove_running(tenant);
            }
        }
    }

    fn end_what_is_outgrown(&mut self, out: &mut Vec<RequestOutput>) {
        self.end_waiting(Finish::Outgrown, |sequence| sequence.n_known() >= sequence.length_max(), out);
    }

    fn fail_what_cannot_fit(&mut self, out: &mut Vec<RequestOutput>) {
        let config = self.config.clone();
        self.end_waiting(Finish::Failed, |sequence| config.too_small_pool(sequence.length_max()).is_some(), out);
    }

    fn fail_what_is_suspected_too_much(&mut self, out: &mut Vec<RequestOutput>) {
        let suspicion_max = self.config.suspicion_max;
        self.end_waiting(Finish::Failed, |sequence| sequence.suspicion() >= suspicion_max, out);
    }

    fn end_waiting(&mut self, finish: Finish, is_hopeless: impl Fn(&Sequence) -> bool, out: &mut Vec<RequestOutput>) {
        let hopeless: Vec<SequenceIdx> = self.waiting.iter().filter(|&idx| is_hopeless(&self.sequences[idx])).collect();
        hopeless.iter().for_each(|&idx| self.end_early(idx, finish, out));
    }
}
