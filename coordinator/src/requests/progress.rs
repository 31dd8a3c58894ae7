//! The progress of the prompts that clients watch: sent before their first token, from what is planned and answered
//! anyway. Knows no tokens; the scheduler does not know of it.

use proto::cluster as wire;
use scheduler::RequestOutput;
use std::collections::{HashMap, VecDeque};
use types::{Request, RequestId, Step, StepId};

#[derive(Default)]
pub(crate) struct PrefillProgress {
    /// The watched requests that have no token yet, with how much of each was in the prefix cache when it began.
    watched: HashMap<RequestId, u32>,
    /// For each step in flight that computes some of them: where it ends in each.
    steps: VecDeque<(StepId, Vec<(RequestId, u32)>)>,
}

impl PrefillProgress {
    pub fn request_accepted(&mut self, id: RequestId) {
        self.watched.insert(id, 0);
    }

    /// It was accepted, and is refused after all.
    pub fn request_retracted(&mut self, id: RequestId) {
        self.watched.remove(&id);
    }

    /// Returns the cached part of the requests that begin with this step.
    pub fn step_planned(&mut self, step: &Step) -> Vec<wire::Output> {
        if self.watched.is_empty() {
            return Vec::new();
        }
        let slices = || step.slices.iter().filter(|slice| self.watched.contains_key(&slice.id));
        let ends: Vec<_> = slices().map(|slice| (slice.id, slice.range.end)).collect();
        let is_start = |id: RequestId| step.starts.iter().any(|start: &Request| start.id == id);
        let begun: Vec<_> = slices().filter(|slice| is_start(slice.id)).map(|of| (of.id, of.range.start)).collect();
        if !ends.is_empty() {
            self.steps.push_back((step.id, ends));
        }
        self.watched.extend(begun.iter().copied());
        begun.into_iter().map(|(id, n_cached)| progress_output(id, n_cached, n_cached)).collect()
    }

    /// Returns the progress once this step was answered.
    pub fn step_done(&mut self, step: StepId) -> Vec<wire::Output> {
        let mut all = Vec::new();
        while let Some((_, ends)) = self.steps.pop_front_if(|(first, _)| *first <= step) {
            let known =
                ends.into_iter().filter_map(|(id, end)| Some(progress_output(id, end, *self.watched.get(&id)?)));
            all.extend(known);
        }
        all
    }

    /// Ends the watch: the first token shows that all of the prompt is computed.
    pub fn apply_output(&mut self, output: &RequestOutput) {
        if output.n_tokens > 0 || output.finish.is_some() {
            self.watched.remove(&output.id);
        }
    }

    /// The steps in flight will not be answered, and the next epoch counts its steps anew.
    pub fn epoch_ended(&mut self) {
        self.steps.clear();
    }
}

fn progress_output(id: RequestId, computed: u32, cached_tokens: u32) -> wire::Output {
    wire::Output { id: id.0, computed: Some(computed), cached_tokens, ..wire::Output::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Finish, Slice, Want};

    const ID: RequestId = RequestId(1);

    fn step(id: u64, range: std::ops::Range<u32>, starts: bool) -> Step {
        let starts = if starts { vec![Request { id: ID, ..Request::default() }] } else { Vec::new() };
        Step { id: StepId(id), starts, slices: vec![Slice::new(ID, range, Want::Nothing)], ..Step::default() }
    }

    fn numbers(outputs: Vec<wire::Output>) -> Vec<(u32, u32)> {
        outputs.into_iter().map(|output| (output.computed.unwrap(), output.cached_tokens)).collect()
    }

    #[test]
    fn prompt_progress_is_reported_at_start_and_per_step() {
        let mut progress = PrefillProgress::default();
        assert_eq!(numbers(progress.step_planned(&step(1, 0..8, true))), []);
        progress.request_accepted(ID);
        assert_eq!(numbers(progress.step_planned(&step(2, 16..64, true))), [(16, 16)]);
        assert_eq!(numbers(progress.step_planned(&step(3, 64..90, false))), []);
        assert_eq!(numbers(progress.step_done(StepId(2))), [(64, 16)]);
        assert_eq!(numbers(progress.step_done(StepId(3))), [(90, 16)]);
        progress.apply_output(&RequestOutput { id: ID, n_tokens: 1, ..RequestOutput::default() });
        assert_eq!(numbers(progress.step_planned(&step(4, 90..91, false))), []);
        assert!(progress.steps.is_empty() && progress.watched.is_empty());
    }

    #[test]
    fn lost_or_ended_requests_report_no_progress() {
        let mut progress = PrefillProgress::default();
        progress.request_accepted(ID);
        progress.step_planned(&step(1, 0..64, true));
        progress.epoch_ended();
        assert_eq!(numbers(progress.step_done(StepId(1))), []);
        progress.step_planned(&step(1, 0..64, true));
        progress.apply_output(&RequestOutput { id: ID, finish: Some(Finish::Cancelled), ..RequestOutput::default() });
        assert_eq!(numbers(progress.step_done(StepId(1))), []);
        progress.request_accepted(ID);
        progress.request_retracted(ID);
        assert!(progress.watched.is_empty());
    }
}
