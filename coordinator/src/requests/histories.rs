//! What is measured and shown of each request and step: durations, spans, passages, progress. Knows no routers; the
//! caller passes the time.

use super::pace::CompletionRate;
use super::passages::Passages;
use super::progress::PrefillProgress;
use super::times::RequestTimes;
use super::traces::{SubmittedRequest, Traces};
use proto::cluster as wire;
use scheduler::RequestOutput;
use telemetry::metrics::{self, QueueLimit, ReplicaLabel};
use types::{Finish, Micros, RequestId, Step, StepId};

pub(crate) struct RequestHistories {
    /// The label of its metrics.
    of: ReplicaLabel,
    pace: CompletionRate,
    traces: Traces,
    times: RequestTimes,
    passages: Passages,
    progress: PrefillProgress,
}

pub(crate) struct AcceptedRequest {
    pub id: RequestId,
    pub n_prompt: usize,
    /// Whether it may use cached blocks.
    pub looks_up: bool,
    /// Whether its client watches the progress of its prompt.
    pub is_watched: bool,
    /// Present if its span is recorded.
    pub traced: Option<SubmittedRequest>,
}

impl RequestHistories {
    pub fn new(of: ReplicaLabel) -> RequestHistories {
        RequestHistories {
            of,
            pace: CompletionRate::default(),
            traces: Traces::default(),
            times: RequestTimes::default(),
            passages: Passages::default(),
            progress: PrefillProgress::default(),
        }
    }

    pub fn request_accepted(&mut self, accepted: AcceptedRequest, now: Micros) {
        let AcceptedRequest { id, n_prompt, looks_up, is_watched, traced } = accepted;
        if let Some(submitted) = traced {
            self.traces.request_accepted(submitted, now);
        }
        self.times.request_accepted(id, n_prompt, now);
        self.passages.request_accepted(id);
        if is_watched {
            self.progress.request_accepted(id);
        }
        metrics::taken(&self.of, n_prompt, looks_up);
    }

    /// It was accepted, and is refused after all.
    pub fn request_retracted(&mut self, id: RequestId) {
        self.traces.request_retracted(id);
        self.times.request_retracted(id);
        self.passages.request_retracted(id);
        self.progress.request_retracted(id);
        metrics::admission_rejected(Some(&self.of), QueueLimit::Requests);
    }

    /// When a refused request may be sent again.
    pub fn retry_after_ms(&self, n_waiting: u32) -> u32 {
        self.pace.retry_after_ms(n_waiting)
    }

    /// Returns the progress of watched requests, and the trace context for the ranks.
    pub fn step_planned(&mut self, step: &Step, now: Micros) -> (Vec<wire::Output>, String) {
        self.times.step_planned(step, now);
        self.passages.step_planned(step, now);
        let progress = self.progress.step_planned(step);
        let n_positions = step.slices.iter().map(|slice| u64::from(slice.range.end - slice.range.start)).sum();
        metrics::step_planned(&self.of, step.slices.len(), n_positions);
        (progress, self.traces.step_planned(step))
    }

    /// A step is answered with these outputs. Returns the progress of watched requests.
    pub fn step_done(&mut self, step: StepId, outputs: &[RequestOutput]) -> Vec<wire::Output> {
        self.traces.step_done(step);
        let progress = self.progress.step_done(step);
        metrics::step_answered(&self.of, outputs.iter().map(|output| self.times.n_tokens(output)).sum());
        progress
    }

    /// Ranks were lost, with the steps in flight.
    pub fn epoch_ended(&mut self, now: Micros) {
        self.traces.epoch_ended();
        self.passages.epoch_ended(now);
        self.progress.epoch_ended();
        self.times.epoch_ended();
    }

    /// A request has an output. Returns its events since the last one.
    pub fn apply_output(&mut self, output: &RequestOutput, now: Micros) -> Vec<wire::Passage> {
        self.traces.apply_output(output, output.finish.map(finish_label), now);
        if let Some(took) = self.times.apply_output(output, now) {
            metrics::request_durations(&self.of, &took);
        }
        if let Some(finish) = output.finish {
            self.pace.ended(now);
            metrics::finished(&self.of, finish_label(finish));
            output.reuse.ended.iter().for_each(|ended| metrics::reuse_ended(&self.of, ended.name()));
        }
        self.progress.apply_output(output);
        self.passages.take_passages(output, now)
    }
}

/// The label in vLLM's words for `finished_reason`, where it has them.
fn finish_label(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "abort",
        Finish::Deadline => "deadline",
        Finish::Failed | Finish::Outgrown | Finish::NoToken | Finish::Grammar(_) => "error",
    }
}
