//! When each request was accepted, was first computed and had its first token: for the histograms of its end. Knows no
//! tokens.

use scheduler::Output;
use std::collections::HashMap;
use std::time::Duration;
use telemetry::metrics::RequestDurations;
use types::{Micros, RequestId, Step};

#[derive(Default)]
pub(crate) struct RequestTimes(HashMap<RequestId, Passed>);

struct Passed {
    taken: Micros,
    /// When the first step went out that computes some of it.
    began: Option<Micros>,
    first_token: Option<Micros>,
}

impl RequestTimes {
    pub fn taken(&mut self, id: RequestId, now: Micros) {
        self.0.insert(id, Passed { taken: now, began: None, first_token: None });
    }

    /// A request that was preempted starts again, and began before.
    pub fn planned(&mut self, step: &Step, now: Micros) {
        for start in &step.starts {
            if let Some(passed) = self.0.get_mut(&start.id) {
                passed.began.get_or_insert(now);
            }
        }
    }

    /// It was accepted, and is refused after all.
    pub fn given_back(&mut self, id: RequestId) {
        self.0.remove(&id);
    }

    /// What a request took that has ended and had a token.
    pub fn told(&mut self, output: &Output, now: Micros) -> Option<RequestDurations> {
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
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Finish, Request};

    fn output(n_tokens: u32, finish: Option<Finish>) -> Output {
        Output { id: RequestId(1), n_tokens, finish, ..Output::default() }
    }

    fn start() -> Step {
        Step { starts: vec![Request { id: RequestId(1), ..Request::default() }], ..Step::default() }
    }

    #[test]
    fn a_request_s_time_is_divided_where_it_is_first_computed_and_has_its_first_token() {
        let mut times = RequestTimes::default();
        times.taken(RequestId(1), Micros(10));
        times.planned(&Step::default(), Micros(11));
        times.planned(&start(), Micros(15));
        assert_eq!(times.told(&output(1, None), Micros(22)), None);
        // It is preempted and starts again.
        times.planned(&start(), Micros(30));
        assert_eq!(times.told(&output(1, None), Micros(31)), None);
        let micros = Duration::from_micros;
        let whole = RequestDurations { queue: micros(5), prefill: micros(7), decode: micros(18) };
        assert_eq!(times.told(&output(1, Some(Finish::Stop)), Micros(40)), Some(whole));
        assert!(times.0.is_empty());
    }

    #[test]
    fn a_request_that_said_nothing_leaves_nothing() {
        for ends in [true, false] {
            let mut times = RequestTimes::default();
            times.taken(RequestId(1), Micros(1));
            if ends {
                assert_eq!(times.told(&output(0, Some(Finish::Cancelled)), Micros(2)), None);
            } else {
                times.given_back(RequestId(1));
            }
            assert!(times.0.is_empty());
        }
    }
}
