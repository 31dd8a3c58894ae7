//! Stages in a row, each with a step of its own. The caller chooses which step moves next, so that any order that real
//! stages could take is tried.

use super::disk::SimulatedDisk;
use super::rng::Rng;
use super::worker::{Hidden, Worker};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use types::{Epoch, FetchDone, FetchId, Slice, SliceDone, Step, StepDone};

pub struct OnItsWay {
    pub step: Step,
    /// The blocks of each group that have memory from this step on.
    n_blocks: Vec<u32>,
    /// Its number over all epochs.
    number: u64,
    n_passed: usize,
    hidden: Option<Hidden>,
    done: Option<StepDone>,
}

pub struct Pipeline {
    stages: Vec<Worker>,
    /// The oldest first. Steps that have passed all stages wait for their answers to be delivered.
    steps: VecDeque<OnItsWay>,
    /// At least one for each stage.
    pub disks: Vec<SimulatedDisk>,
    /// The answers of some stages to each fetch: how many, and the pages that one of them lacks.
    answers: BTreeMap<FetchId, (usize, BTreeSet<u32>)>,
}

impl Pipeline {
    pub fn new(stages: Vec<Worker>) -> Pipeline {
        let disks = stages.iter().map(|_| SimulatedDisk::default()).collect();
        Pipeline { stages, steps: VecDeque::new(), disks, answers: BTreeMap::new() }
    }

    /// New workers, with the disks of those before.
    pub fn with_disks(stages: Vec<Worker>, mut disks: Vec<SimulatedDisk>) -> Pipeline {
        disks.iter_mut().for_each(SimulatedDisk::lose_workers);
        Pipeline { disks, ..Pipeline::new(stages) }
    }

    /// Some stage reads some pages of a fetch that `is_ready`. Returns the answer, if all stages have given theirs.
    pub fn read_pages(&mut self, rng: &mut Rng, epoch: Epoch, is_ready: impl Fn(FetchId) -> bool) -> Option<FetchDone> {
        let at = rng.below(self.stages.len() as u64) as usize;
        let done = self.stages[at].read_pages(&mut self.disks[at], rng, is_ready)?;
        let (n_answers, missing) = self.answers.entry(done.id).or_default();
        *n_answers += 1;
        missing.extend(done.missing);
        if *n_answers < self.stages.len() {
            return None;
        }
        let (_, missing) = self.answers.remove(&done.id)?;
        Some(FetchDone { epoch, id: done.id, missing: missing.into_iter().collect(), micros: 0 })
    }

    pub fn n_stages(&self) -> usize {
        self.stages.len()
    }

    /// Steps that some stage has begun and the last has not ended.
    pub fn n_inside(&self) -> usize {
        self.steps.iter().filter(|step| (1..self.stages.len()).contains(&step.n_passed)).count()
    }

    pub fn n_held(&self) -> usize {
        self.stages.iter().map(Worker::n_held).sum()
    }

    pub fn len(&self) -> usize {
        self.steps.len()
    }

    pub fn slices(&self) -> impl Iterator<Item = &Slice> {
        self.steps.iter().flat_map(|on_its_way| &on_its_way.step.slices)
    }

    pub fn oldest(&self) -> Option<&OnItsWay> {
        self.steps.front()
    }

    pub fn push(&mut self, step: Step, n_blocks: Vec<u32>, number: u64) {
        self.steps.push_back(OnItsWay { step, n_blocks, number, n_passed: 0, hidden: None, done: None });
    }

    /// The steps that could enter their next stage now. If any are on their way, the oldest can.
    pub fn movable(&self) -> Vec<usize> {
        (0..self.steps.len()).filter(|&i| self.may_move(i)).collect()
    }

    fn may_move(&self, i: usize) -> bool {
        let OnItsWay { step, n_passed, .. } = &self.steps[i];
        let is_open = i == 0 || self.steps[i - 1].n_passed > *n_passed;
        *n_passed < self.stages.len() && is_open && (*n_passed > 0 || self.stages[0].is_ready(step))
    }

    /// The step that would move, and whether into the last stage.
    pub fn next_of(&self, i: usize) -> (&Step, bool) {
        (&self.steps[i].step, self.steps[i].n_passed + 1 == self.stages.len())
    }

    /// Runs a step in its next stage. After the last its tokens go to the first.
    pub fn advance(&mut self, i: usize) {
        let OnItsWay { step, n_blocks, number, n_passed, hidden, done } = &mut self.steps[i];
        let disk = &mut self.disks[*n_passed];
        disk.begin_step(*number);
        self.stages[*n_passed].set_memory(n_blocks);
        let rows = self.stages[*n_passed].run(step, hidden.as_ref(), disk);
        *n_passed += 1;
        if *n_passed == self.stages.len() {
            let answer = self.stages[*n_passed - 1].draw(step);
            self.stages[0].learn(step, &rows, &answer);
            *done = Some(answer);
        }
        *hidden = Some(rows);
    }

    /// A possible answer to the oldest step: its own, or one without tokens if it has not run yet.
    pub fn oldest_answer(&self) -> Option<StepDone> {
        let OnItsWay { step, done, .. } = self.oldest()?;
        let slices = step.slices.iter().map(|_| SliceDone::default()).collect();
        Some(done.clone().unwrap_or(StepDone { id: step.id, epoch: step.epoch, slices, micros: 0 }))
    }

    /// The oldest step and its answer, if it has one.
    pub fn deliver(&mut self) -> Option<(Step, StepDone)> {
        self.oldest()?.done.as_ref()?;
        let OnItsWay { step, done, .. } = self.steps.pop_front()?;
        done.map(|done| (step, done))
    }
}
