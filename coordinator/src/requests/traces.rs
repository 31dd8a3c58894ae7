//! The spans of a replica's sequences and of the steps in flight. Empty if spans are not recorded.

use proto::cluster as wire;
use scheduler::RequestOutput;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use telemetry::spans::{self, SequenceSteps, TracedSpan};
use types::{Micros, PrefixReuse, RequestId, Step, StepId};

#[derive(Default)]
pub(crate) struct Traces {
    sequences: HashMap<RequestId, TracedSequence>,
    /// In the order of their ids. A step whose ranks were lost ends with the next that is answered.
    steps: VecDeque<(StepId, TracedSpan)>,
}

struct TracedSequence {
    span: TracedSpan,
    /// Present until its first slice in a step.
    queued: Option<TracedSpan>,
    submitted: Micros,
    steps: SequenceSteps,
    is_started: bool,
}

/// The data of a request before the scheduler accepts it.
pub(crate) struct SubmittedRequest {
    id: RequestId,
    span: TracedSpan,
}

/// None if its span is not recorded.
pub(crate) fn submitted(request: &wire::Request) -> Option<SubmittedRequest> {
    let (n_prompt, n_output) = (request.prompt.len() as u64, request.output.len() as u64);
    let span = spans::sequence(&request.traceparent, &request.tracestate, request.id, n_prompt, n_output);
    span.is_recorded().then_some(SubmittedRequest { id: RequestId(request.id), span })
}

impl Traces {
    pub fn request_accepted(&mut self, submitted: SubmittedRequest, now: Micros) {
        let SubmittedRequest { id, span } = submitted;
        let queued = Some(span.queue_span());
        let steps = SequenceSteps::default();
        self.sequences.insert(id, TracedSequence { span, queued, submitted: now, steps, is_started: false });
    }

    /// A step goes out. Returns the trace context of its span for the ranks.
    pub fn step_planned(&mut self, step: &Step) -> String {
        if !self.sequences.is_empty() {
            for slice in &step.slices {
                if let Some(sequence) = self.sequences.get_mut(&slice.id) {
                    sequence.steps.n += 1;
                    sequence.queued = None;
                }
            }
        }
        let n_positions = step.slices.iter().map(|slice| u64::from(slice.range.end - slice.range.start)).sum();
        let span = spans::step(step.id.0, step.epoch.n, step.slices.len() as u64, n_positions);
        if !span.is_recorded() {
            return String::new();
        }
        for sequence in step.slices.iter().filter_map(|slice| self.sequences.get(&slice.id)) {
            span.link(&sequence.span);
        }
        let traceparent = span.trace_headers().parent;
        self.steps.push_back((step.id, span));
        traceparent
    }

    /// The steps in flight will not be answered, and the next epoch counts its steps anew.
    pub fn epoch_ended(&mut self) {
        self.steps.clear();
    }

    pub fn step_done(&mut self, id: StepId) {
        while self.steps.front().is_some_and(|(first, _)| *first <= id) {
            self.steps.pop_front();
        }
    }

    /// It was accepted, and is refused after all.
    pub fn request_retracted(&mut self, id: RequestId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            sequence.span.sequence_ended("refused", sequence.steps);
        }
    }

    pub fn apply_output(&mut self, output: &RequestOutput, finish: Option<&'static str>, now: Micros) {
        let Some(sequence) = self.sequences.get_mut(&output.id) else { return };
        if output.n_tokens > 0 && !std::mem::replace(&mut sequence.is_started, true) {
            let after = Duration::from_micros(now.since(sequence.submitted).0);
            sequence.span.sequence_started(after, output.n_cached.into());
            let PrefixReuse { ended, position, .. } = output.reuse;
            ended.iter().for_each(|ended| sequence.span.reuse_ended(ended.name(), position.into()));
        }
        sequence.steps.drafts_accepted += u64::from(output.drafts_accepted);
        sequence.steps.drafts_rejected += u64::from(output.drafts_rejected);
        if let Some(finish) = finish {
            sequence.span.sequence_ended(finish, sequence.steps);
            self.sequences.remove(&output.id);
        }
    }
}
