//! A worker's loader and runner that also count the work that they receive. They see the steps themselves, so the
//! counts do not depend on other code. All ranks of a grid see the same steps; the one that samples counts.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use types::{Request, RequestId, Slice, SliceDone, Step, StepDone, Want};
use worker::tier::TierReports;
use worker::{
    AbortHandle, Assignment, CancelFlag, Load, LoadError, LoadedModel, ModelLoader, ReadyReport, RunError, Runner,
};

/// Counts over steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub loads: u32,
    pub steps: u32,
    /// The most requests held in one step.
    pub running_max: usize,
    /// The most requests that drew a token in one step.
    pub drawing_max: usize,
    /// Tokens of the longest slice, and the number of slices that were as long.
    pub slice_tokens_max: usize,
    pub n_longest: u32,
    /// Slices that did not reach the end of their log.
    pub chunks: u32,
    pub starts: u32,
    /// Repeated starts of requests, which means that they were preempted.
    pub restarts: u32,
    /// First starts with a cached beginning, and its length.
    pub hits: u32,
    pub hit_tokens: u32,
    /// Draws without a token, of requests that have not failed: they wait for a mask, or were planned behind a draw
    /// that waits.
    pub late: u32,
    /// Drafts that became tokens, and those that did not.
    pub drafts_accepted: u32,
    pub drafts_rejected: u32,
    /// Those among them of requests with a grammar.
    pub masked_drafts_accepted: u32,
    pub masked_drafts_rejected: u32,
    /// Pages that steps have stored behind the pools, and those that they have fetched from there.
    pub pages_stored: u32,
    pub pages_fetched: u32,
}

#[derive(Default)]
struct Notes {
    seen: Seen,
    known: BTreeSet<RequestId>,
    running: BTreeSet<RequestId>,
    with_grammar: BTreeSet<RequestId>,
    /// Requests started for the first time and still without a slice.
    fresh: BTreeSet<RequestId>,
}

impl Notes {
    fn write(&mut self, step: &Step) {
        self.seen.steps += 1;
        self.running.retain(|id| !step.ends.contains(id));
        step.starts.iter().for_each(|request| self.start(request));
        self.seen.running_max = self.seen.running_max.max(self.running.len());
        step.slices.iter().for_each(|slice| self.slice(slice));
        let drawing = step.slices.iter().filter(|slice| slice.want == Want::Last).count();
        self.seen.drawing_max = self.seen.drawing_max.max(drawing);
        self.seen.pages_stored += step.tier.stores.len() as u32;
        self.seen.pages_fetched += step.tier.fetches.iter().map(|fetch| fetch.pages.len() as u32).sum::<u32>();
    }

    fn start(&mut self, request: &Request) {
        self.seen.starts += 1;
        self.running.insert(request.id);
        if request.grammar.is_some() {
            self.with_grammar.insert(request.id);
        }
        if self.known.insert(request.id) {
            self.fresh.insert(request.id);
        } else {
            self.seen.restarts += 1;
        }
    }

    fn slice(&mut self, slice: &Slice) {
        if self.fresh.remove(&slice.id) && slice.range.start > 0 {
            self.seen.hits += 1;
            self.seen.hit_tokens += slice.range.start;
        }
        self.seen.chunks += u32::from(slice.want == Want::Nothing);
        let n_tokens = slice.range.len();
        if n_tokens > self.seen.slice_tokens_max {
            (self.seen.slice_tokens_max, self.seen.n_longest) = (n_tokens, 0);
        }
        self.seen.n_longest += u32::from(n_tokens == self.seen.slice_tokens_max);
    }
}

/// The test's side: reads the counts, and holds steps back.
#[derive(Clone, Default)]
pub struct Watch {
    notes: Arc<Mutex<Notes>>,
    closed: Arc<(Mutex<bool>, Condvar)>,
    /// Counts of steps after which the sampler reports a failure.
    breaks: Arc<Mutex<Vec<u32>>>,
}

impl Watch {
    pub fn around(&self, loader: ModelLoader) -> Box<dyn Load> {
        Box::new(WatchedLoader { loader, watch: self.clone() })
    }

    /// Holds back steps until `open`.
    pub fn close(&self) {
        *self.closed.0.lock().unwrap() = true;
    }

    pub fn open(&self) {
        *self.closed.0.lock().unwrap() = false;
        self.closed.1.notify_all();
    }

    /// The sampler fails when it is given its `n`th step from now.
    pub fn break_at(&self, n: u32) {
        self.breaks.lock().unwrap().push(self.notes.lock().unwrap().seen.steps + n);
    }

    fn breaks_now(&self) -> bool {
        let n = self.notes.lock().unwrap().seen.steps;
        self.breaks.lock().unwrap().extract_if(.., |at| *at <= n).count() > 0
    }

    fn pass(&self) {
        drop(self.closed.1.wait_while(self.closed.0.lock().unwrap(), |closed| *closed).unwrap());
    }

    pub fn take(&self) -> Seen {
        std::mem::take(&mut self.notes.lock().unwrap().seen)
    }
}

struct WatchedLoader {
    loader: ModelLoader,
    watch: Watch,
}

impl Load for WatchedLoader {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let writes = assignment.layout.part(assignment.rank).is_sampler();
        self.watch.notes.lock().unwrap().seen.loads += u32::from(writes);
        let (loaded, ready) = self.loader.load(assignment, cancel)?;
        Ok((Box::new(WatchedPlace { loaded, watch: self.watch.clone(), writes }), ready))
    }
}

struct WatchedPlace {
    loaded: Box<dyn LoadedModel>,
    watch: Watch,
    writes: bool,
}

impl LoadedModel for WatchedPlace {
    fn join_peers(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        let WatchedPlace { loaded, watch, writes } = *self;
        let runner = loaded.join_peers(cancel)?;
        Ok(Box::new(WatchedRunner { runner, watch, writes }))
    }
}

struct WatchedRunner {
    runner: Box<dyn Runner>,
    watch: Watch,
    writes: bool,
}

impl Runner for WatchedRunner {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        self.watch.pass();
        if self.writes {
            self.watch.notes.lock().unwrap().write(step);
            if self.watch.breaks_now() {
                return Err(RunError::Pass("a test has broken this rank".into()));
            }
        }
        self.runner.run(step, done)?;
        if self.writes {
            let is_late = |(slice, done): &(&Slice, &SliceDone)| {
                slice.want == Want::Last && done.tokens.is_empty() && done.failed.is_none()
            };
            let answers = || step.slices.iter().zip(&done.slices);
            let Notes { seen, with_grammar, .. } = &mut *self.watch.notes.lock().unwrap();
            seen.late += answers().filter(is_late).count() as u32;
            for (slice, done) in answers().filter(|(slice, _)| slice.n_draft > 0) {
                let n_accepted = done.tokens.len().saturating_sub(1) as u32;
                let n_rejected = u32::from(slice.n_draft) - n_accepted;
                seen.drafts_accepted += n_accepted;
                seen.drafts_rejected += n_rejected;
                if with_grammar.contains(&slice.id) {
                    seen.masked_drafts_accepted += n_accepted;
                    seen.masked_drafts_rejected += n_rejected;
                }
            }
        }
        Ok(())
    }

    fn start_tier(&mut self, reports: TierReports) -> bool {
        self.runner.start_tier(reports)
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        self.runner.abort_handle()
    }

    fn total_wait(&self) -> Duration {
        self.runner.total_wait()
    }
}
