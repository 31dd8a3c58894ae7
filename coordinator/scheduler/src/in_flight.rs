//! Steps that are planned and not yet applied, oldest first. Reuses its memory.

use crate::sequence::SequenceIdx;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;
use types::StepId;

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
    pub slices: Vec<PlannedSlice>,
}

pub(crate) struct StepsInFlight {
    steps: VecDeque<StepInFlight>,
    /// Emptied lists for reuse, one for each unused place.
    spare: Vec<Vec<PlannedSlice>>,
}

impl StepsInFlight {
    pub fn new(steps_max: u32, slices_max: u32) -> StepsInFlight {
        StepsInFlight {
            steps: VecDeque::with_capacity(steps_max as usize),
            spare: (0..steps_max).map(|_| Vec::with_capacity(slices_max as usize)).collect(),
        }
    }

    /// Allocates memory for `steps_max` steps now.
    pub fn reserve(&mut self, steps_max: u32, slices_max: u32) {
        let steps_max = steps_max as usize;
        self.steps.reserve(steps_max.saturating_sub(self.steps.len()));
        self.spare.resize_with(steps_max, || Vec::with_capacity(slices_max as usize));
    }

    /// An empty list for the slices of a new step.
    pub fn list(&mut self) -> Vec<PlannedSlice> {
        self.spare.pop().unwrap_or_default()
    }

    pub fn push(&mut self, id: StepId, slices: Vec<PlannedSlice>) {
        self.steps.push_back(StepInFlight { id, slices });
    }

    pub fn oldest(&self) -> Option<&StepInFlight> {
        self.steps.front()
    }

    pub fn pop_oldest(&mut self) -> Option<StepInFlight> {
        self.steps.pop_front()
    }

    pub fn recycle(&mut self, mut step: StepInFlight) {
        step.slices.clear();
        self.spare.push(step.slices);
    }

    pub fn clear(&mut self) {
        while let Some(step) = self.pop_oldest() {
            self.recycle(step);
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
