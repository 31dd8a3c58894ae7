//! When each request was accepted, was first computed and had its first token, and how often it was preempted: for the
//! histograms of its end. Knows how many tokens there are, and none of them.

use scheduler::RequestOutput;
use std::collections::HashMap;
use std::time::Duration;
use telemetry::metrics::RequestDurations;
use types::{Micros, RequestId, Step};

#[derive(Default)]
pub(crate) struct RequestTimes(HashMap<RequestId, RequestTimeline>);

struct RequestTimeline {
    taken: Micros,
    n_prompt: u32,
    n_preemptions: u32,
    /// Whether ranks were lost since it was last computed: it starts again, and was not preempted.
    is_lost: bool,
    /// When the first step went out that computes some of it.
    began: Option<Micros>,
    first_token: Option<Micros>,
}

impl RequestTimes {
    pub fn request_accepted(&mut self, id: RequestId, n_prompt: usize, now: Micros) {
        let n_prompt = u32::try_from(n_prompt).unwrap_or(u32::MAX);
        let passed =
            RequestTimeline { taken: now, n_prompt, n_preemptions: 0, is_lost: false, began: None, first_token: None };
        self.0.insert(id, passed);
    }

    /// A request that was preempted starts again, and began before.
    pub fn step_planned(&mut self, step: &Step, now: Micros) {
        for start in &step.starts {
            if let Some(passed) = self.0.get_mut(&start.id) {
                let is_lost = std::mem::take(&mut passed.is_lost);
                passed.n_preemptions += u32::from(passed.began.is_some() && !is_lost);
                passed.began.get_or_insert(now);
            }
        }
    }

    /// Ranks were lost: all requests start again.
    pub fn epoch_ended(&mut self) {
        self.0.values_mut().for_each(|passed| passed.is_lost = true);
    }

    /// The tokens that an output brings: those drawn, and the prompt with the first of them.
    pub fn n_tokens(&self, output: &RequestOutput) -> u64 {
        let is_first = |passed: &&RequestTimeline| output.n_tokens > 0 && passed.first_token.is_none();
        let n_prompt = self.0.get(&output.id).filter(is_first).map_or(0, |passed| passed.n_prompt);
        u64::from(output.n_tokens) + u64::from(n_prompt)
    }

    /// It was accepted, and is refused after all.
    pub fn request_retracted(&mut self, id: RequestId) {
        self.0.remove(&id);
    }

    /// Returns the durations of a request that has ended and had a token.
    pub fn apply_output(&mut self, output: &RequestOutput, now: Micros) -> Option<RequestDurations> {
        let passed = self.0.get_mut(&output.id)?;
        if output.n_tokens > 0 {
            passed.first_token.get_or_insert(now);
        }
        output.finish?;
        let passed = self.0.remove(&output.id)?;
        let (began, first) = (passed.began?, passed.first_token?);
        let between = |from: Micros, to: Micros| Duration::from_micros(to.since(from).0);
        Some(RequestDurations {
            queue: between(passed.taken, began),
            prefill: between(began, first),
            decode: between(first, now),
            n_preemptions: passed.n_preemptions,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Finish, Request};

    fn output(n_tokens: u32, finish: Option<Finish>) -> RequestOutput {
        RequestOutput { id: RequestId(1), n_tokens, finish, ..RequestOutput::default() }
    }

    fn start() -> Step {
        Step { starts: vec![Request { id: RequestId(1), ..Request::default() }], ..Step::default() }
    }

    #[test]
    fn a_request_s_time_is_divided_where_it_is_first_computed_and_has_its_first_token() {
        let mut times = RequestTimes::default();
        times.request_accepted(RequestId(1), 9, Micros(10));
        times.step_planned(&Step::default(), Micros(11));
        times.step_planned(&start(), Micros(15));
        assert_eq!(times.n_tokens(&output(1, None)), 10);
        assert_eq!(times.apply_output(&output(1, None), Micros(22)), None);
        assert_eq!(times.n_tokens(&output(2, None)), 2);
        // It is preempted and starts again; and once more, as ranks were lost.
        times.step_planned(&start(), Micros(30));
        times.epoch_ended();
        times.step_planned(&start(), Micros(30));
        assert_eq!(times.apply_output(&output(1, None), Micros(31)), None);
        let micros = Duration::from_micros;
        let (queue, prefill, decode) = (micros(5), micros(7), micros(18));
        let whole = RequestDurations { queue, prefill, decode, n_preemptions: 1 };
        assert_eq!(times.apply_output(&output(1, Some(Finish::Stop)), Micros(40)), Some(whole));
        assert!(times.0.is_empty());
    }

    #[test]
    fn request_without_output_leaves_nothing() {
        for ends in [true, false] {
            let mut times = RequestTimes::default();
            times.request_accepted(RequestId(1), 9, Micros(1));
            if ends {
                assert_eq!(times.apply_output(&output(0, Some(Finish::Cancelled)), Micros(2)), None);
            } else {
                times.request_retracted(RequestId(1));
            }
            assert!(times.0.is_empty());
        }
    }
}
