//! The events of each request on its way through the replica, for display. They are sent with its next output, so that
//! they cost no frame. Knows no tokens.

use proto::cluster as wire;
use proto::cluster::passage::Kind;
use scheduler::RequestOutput;
use std::collections::HashMap;
use std::ops::Range;
use types::{Micros, RequestId, Slice, Step, Want};

/// The most events of one request that wait to be sent. Further chunks are merged into one.
const PENDING_MAX: usize = 64;

#[derive(Default)]
pub(crate) struct Passages(HashMap<RequestId, RequestPassages>);

#[derive(Default)]
struct RequestPassages {
    /// Whether ranks hold it.
    is_held: bool,
    pending: Vec<PendingPassage>,
}

struct PendingPassage {
    kind: Kind,
    at: Micros,
    range: Range<u32>,
}

impl Passages {
    pub fn request_accepted(&mut self, id: RequestId) {
        self.0.insert(id, RequestPassages::default());
    }

    /// It was accepted, and is refused after all.
    pub fn request_retracted(&mut self, id: RequestId) {
        self.0.remove(&id);
    }

    pub fn step_planned(&mut self, step: &Step, now: Micros) {
        // A request that has ended is unknown here, so the ranks forget this one to make room for others.
        for id in &step.ends {
            if let Some(passing) = self.0.get_mut(id) {
                passing.is_held = false;
                passing.record(Kind::Preempted, now, 0..0);
            }
        }
        for start in &step.starts {
            let Some(passing) = self.0.get_mut(&start.id) else { continue };
            let n_cached = step.slices.iter().find(|slice| slice.id == start.id).map_or(0, |slice| slice.range.start);
            passing.is_held = true;
            passing.record(Kind::Started, now, n_cached..n_cached);
        }
        for slice in step.slices.iter().filter(|slice| is_chunk(slice)) {
            if let Some(passing) = self.0.get_mut(&slice.id) {
                passing.record(Kind::Chunk, now, slice.range.clone());
            }
        }
    }

    /// Records that the ranks are gone, with all that they held.
    pub fn epoch_ended(&mut self, now: Micros) {
        for passing in self.0.values_mut().filter(|passing| passing.is_held) {
            passing.is_held = false;
            passing.record(Kind::Lost, now, 0..0);
        }
    }

    /// Returns its events since its last output.
    pub fn take_passages(&mut self, output: &RequestOutput, now: Micros) -> Vec<wire::Passage> {
        let Some(passing) = self.0.get_mut(&output.id) else { return Vec::new() };
        let pending = std::mem::take(&mut passing.pending);
        if output.finish.is_some() {
            self.0.remove(&output.id);
        }
        let passage = |of: PendingPassage| wire::Passage {
            kind: of.kind.into(),
            micros_ago: now.since(of.at).0,
            start: of.range.start,
            end: of.range.end,
        };
        pending.into_iter().map(passage).collect()
    }
}

impl RequestPassages {
    fn record(&mut self, kind: Kind, at: Micros, range: Range<u32>) {
        let is_full = self.pending.len() >= PENDING_MAX;
        match self.pending.last_mut() {
            Some(last) if is_full => {
                if (last.kind, kind) == (Kind::Chunk, Kind::Chunk) {
                    last.range.end = range.end;
                } else {
                    *last = PendingPassage { kind, at, range };
                }
            }
            _ => self.pending.push(PendingPassage { kind, at, range }),
        }
    }
}

/// A slice that does more than draw the next token.
fn is_chunk(slice: &Slice) -> bool {
    slice.want == Want::Nothing || slice.range.len() > 1 + usize::from(slice.n_draft)
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Finish, Request};

    const ID: RequestId = RequestId(1);

    fn output(n_tokens: u32, finish: Option<Finish>) -> RequestOutput {
        RequestOutput { id: ID, n_tokens, finish, ..RequestOutput::default() }
    }

    fn start(range: Range<u32>, want: Want) -> Step {
        Step { starts: vec![Request { id: ID, ..Request::default() }], ..slice(range, want) }
    }

    fn slice(range: Range<u32>, want: Want) -> Step {
        Step { slices: vec![Slice::new(ID, range, want)], ..Step::default() }
    }

    fn reported_passages(passages: &mut Passages, finish: Option<Finish>) -> Vec<(Kind, u64, u32, u32)> {
        let reported = passages.take_passages(&output(1, finish), Micros(100));
        reported.iter().map(|of| (of.kind(), of.micros_ago, of.start, of.end)).collect()
    }

    #[test]
    fn preemption_and_loss_are_reported_in_order() {
        let mut passages = Passages::default();
        passages.request_accepted(ID);
        passages.step_planned(&start(16..80, Want::Nothing), Micros(10));
        passages.step_planned(&slice(80..90, Want::Last), Micros(20));
        let began = [(Kind::Started, 90, 16, 16), (Kind::Chunk, 90, 16, 80), (Kind::Chunk, 80, 80, 90)];
        assert_eq!(reported_passages(&mut passages, None), began);
        // A token alone is not reported.
        passages.step_planned(&slice(90..91, Want::Last), Micros(30));
        assert_eq!(reported_passages(&mut passages, None), []);
        passages.step_planned(&Step { ends: vec![ID], ..Step::default() }, Micros(40));
        // It waits, and so has nothing to lose.
        passages.epoch_ended(Micros(45));
        passages.step_planned(&start(0..91, Want::Last), Micros(50));
        passages.epoch_ended(Micros(60));
        passages.step_planned(&start(0..91, Want::Last), Micros(70));
        let history = reported_passages(&mut passages, Some(Finish::Stop));
        let kinds: Vec<Kind> = history.iter().map(|of| of.0).collect();
        use Kind::{Chunk, Lost, Preempted, Started};
        assert_eq!(kinds, [Preempted, Started, Chunk, Lost, Started, Chunk]);
        assert!(passages.0.is_empty());
    }

    #[test]
    fn pending_passages_are_bounded() {
        let mut passages = Passages::default();
        passages.request_accepted(ID);
        for at in 0..1000 {
            passages.step_planned(&slice(at * 10..at * 10 + 10, Want::Nothing), Micros(1));
        }
        let reported = reported_passages(&mut passages, None);
        assert_eq!((reported.len(), reported[PENDING_MAX - 1].3), (PENDING_MAX, 10_000));
        passages.request_retracted(ID);
        assert!(passages.0.is_empty());
    }
}
