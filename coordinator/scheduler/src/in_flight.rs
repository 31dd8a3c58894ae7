//! Steps that are planned and not yet applied, oldest first. Reuses its memory.

use crate::costs::StepSize;
use crate::refusal::StaleAnswer;
use crate::slab::SequenceIdx;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;
use types::{Epoch, Micros, RequestId, SliceDone, Step, StepDone, StepId};

/// The sequence that a slice was planned for, so that its result is assigned or dropped.
#[derive(Clone, Debug)]
pub(crate) struct PlannedSlice {
    pub sequence: SequenceIdx,
    pub generation: u64,
    pub range: Range<u32>,
    /// The most tokens that it may draw; zero for a chunk that does not end its log.
    pub draws_max: u32,
    /// Its draw waits for a grammar's mask, and may come back without a token.
    pub may_be_late: bool,
}

pub(crate) struct StepInFlight {
    pub id: StepId,
    pub size: StepSize,
    /// The predicted duration; zero if none was measured before.
    pub predicted: Micros,
    pub slices: Vec<PlannedSlice>,
    /// The pages that it removes from the tier.
    pub n_removals: usize,
}

pub(crate) struct StepsInFlight {
    steps: VecDeque<StepInFlight>,
    /// Emptied lists for reuse, one for each unused place.
    spare: Vec<Vec<PlannedSlice>>,
    epoch: Epoch,
    /// The steps of this epoch.
    n_steps: u64,
    /// Whether all running sequences were in flight at the last attempt to plan, since the last step or answer.
    is_starved: bool,
    /// Sequences that the ranks may forget, to be sent in the next step.
    ends: Vec<RequestId>,
}

impl StepsInFlight {
    pub fn new(epoch: Epoch, steps_max: u32, slices_max: u32) -> StepsInFlight {
        StepsInFlight {
            steps: VecDeque::with_capacity(steps_max as usize),
            spare: (0..steps_max).map(|_| Vec::with_capacity(slices_max as usize)).collect(),
            epoch,
            n_steps: 0,
            is_starved: false,
            ends: Vec::new(),
        }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The steps in flight are lost, and steps are counted from zero. The ranks hold no sequence.
    pub fn begin_epoch(&mut self, epoch: Epoch) {
        debug_assert!(epoch > self.epoch, "step ids start again, so only the epoch identifies an old answer");
        (self.epoch, self.n_steps) = (epoch, 0);
        while let Some(step) = self.pop_oldest() {
            self.recycle(step);
        }
        self.ends.clear();
    }

    /// The next step ends this sequence on the ranks.
    pub fn end(&mut self, id: RequestId) {
        self.ends.push(id);
    }

    /// The id comes back in the step that would have ended it: the start replaces what the ranks hold.
    pub fn start(&mut self, id: RequestId) {
        if !self.ends.is_empty() {
            self.ends.retain(|&ended| ended != id);
        }
    }

    pub fn ends(&self) -> &[RequestId] {
        &self.ends
    }

    /// The steps of this epoch so far.
    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }

    /// There is room in flight and nothing to plan. Returns whether that is new.
    pub fn note_starved(&mut self) -> bool {
        !core::mem::replace(&mut self.is_starved, true)
    }

    /// Allocates memory for `steps_max` steps now.
    pub fn reserve(&mut self, steps_max: u32, slices_max: u32) {
        let steps_max = steps_max as usize;
        self.steps.reserve(steps_max.saturating_sub(self.steps.len()));
        self.spare.resize_with(steps_max, || Vec::with_capacity(slices_max as usize));
    }

    /// Numbers a new step, and returns an empty list for its slices.
    pub fn begin_step(&mut self, step: &mut Step) -> Vec<PlannedSlice> {
        (step.id, step.epoch) = (StepId(self.n_steps), self.epoch);
        self.spare.pop().unwrap_or_default()
    }

    /// The step that was begun is sent, with all ends.
    pub fn push(&mut self, step: &mut Step, planned: StepInFlight) {
        step.ends.append(&mut self.ends);
        self.steps.push_back(planned);
        self.n_steps += 1;
        self.is_starved = false;
    }

    pub fn oldest(&self) -> Option<&StepInFlight> {
        self.steps.front()
    }

    pub fn pop_oldest(&mut self) -> Option<StepInFlight> {
        self.steps.pop_front()
    }

    /// The step is applied.
    pub fn recycle(&mut self, mut step: StepInFlight) {
        step.slices.clear();
        self.spare.push(step.slices);
        self.is_starved = false;
    }

    /// Refuses an answer that does not belong to the oldest step.
    pub fn check_is_oldest(&self, done: &StepDone) -> Result<(), StaleAnswer> {
        if done.epoch != self.epoch {
            return Err(StaleAnswer::Epoch { expected: self.epoch, got: done.epoch });
        }
        let Some(step) = self.oldest().filter(|step| step.id == done.id) else {
            return Err(StaleAnswer::Step { expected: self.oldest().map(|step| step.id), got: done.id });
        };
        if step.slices.len() != done.slices.len() {
            return Err(StaleAnswer::SliceCount { expected: step.slices.len(), got: done.slices.len() });
        }
        for (slice, (planned, slice_done)) in step.slices.iter().zip(&done.slices).enumerate() {
            let (max, got) = (planned.draws_max as usize, slice_done.tokens.len());
            if got > max && slice_done.failed.is_none() {
                return Err(StaleAnswer::TokenCount { slice, max, got });
            }
        }
        Ok(())
    }

    /// Refuses an answer to the oldest step that lacks a token of a request without a grammar.
    pub fn check_all_drawn(&self, done: &StepDone) -> Result<(), StaleAnswer> {
        let oldest = self.oldest().filter(|step| (step.id, self.epoch) == (done.id, done.epoch));
        let planned = oldest.map_or(&[][..], |step| &step.slices);
        let lacks = |(planned, done): (&PlannedSlice, &SliceDone)| {
            !planned.may_be_late && done.failed.is_none() && done.tokens.is_empty() && planned.draws_max > 0
        };
        match planned.iter().zip(&done.slices).position(lacks) {
            Some(slice) => Err(StaleAnswer::NoToken { slice }),
            None => Ok(()),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &StepInFlight> + Clone {
        self.steps.iter()
    }

    pub fn len(&self) -> usize {
        self.steps.len()
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}
