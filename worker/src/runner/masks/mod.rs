//! The masks of requests with a grammar, on the sampling rank: threads follow each grammar beside the passes, and a
//! step's draws take the finished masks. Works on requests and tokens; has no knowledge of logits, blocks or other
//! ranks.
//!
//! ```text
//! step     start ─────────┐  draw 0 ── drawn ──┐  draw 1
//! threads                 └ compile, mask 0     └ mask 1
//! ```
//!
//! As soon as a token is drawn, a thread makes the mask for the next one, while the next pass runs. A draw waits a
//! short time for a late mask; after that its slice draws nothing and runs again. A slice with drafts has a mask for
//! each row that draws. If the mask behind a draft is late, or the draft is not allowed, the slice draws only what is
//! before it.

mod follower;
mod run;
mod slot;
mod threads;

use crate::load::vocabulary::LazyVocabulary;
use backend::DrawMask;
use run::MaskSeries;
use slot::{MaskOutcome, MaskSlot};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::metrics;
use threads::MaskThreads;
use types::{Failure, Goal, GrammarFault, Request, RequestId, Step, Token};

/// The threads and time limits of masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskConfig {
    /// Threads that follow grammars. All but one may compile at a time, so that a compilation delays no other request's
    /// masks.
    pub threads: usize,
    /// How long all draws of a step together wait for late masks.
    pub wait_max: Duration,
    /// A request whose mask is later than this ends, because its grammar cannot be followed.
    pub late_max: Duration,
    /// Delays every mask, so that tests have late ones.
    pub delay: Duration,
}

impl Default for MaskConfig {
    fn default() -> Self {
        let (wait_max, late_max) = (Duration::from_millis(2), Duration::from_secs(30));
        MaskConfig { threads: 2, wait_max, late_max, delay: Duration::ZERO }
    }
}

pub struct GrammarMasks {
    config: MaskConfig,
    vocabulary: Arc<LazyVocabulary>,
    /// None until the first request with a grammar.
    threads: Option<MaskThreads>,
    running_max: usize,
    /// The most tokens guessed behind a log.
    n_guess_max: usize,
    live: HashMap<RequestId, MaskedRequest>,
    /// When the present step's draws stop waiting.
    wait_until: Option<Instant>,
}

/// A request with a grammar.
struct MaskedRequest {
    slot: Arc<MaskSlot>,
    /// The masks of a slice's draws. Their memory moves between this and the slot.
    run: MaskSeries,
    /// The time since when a draw waits for its mask.
    late_since: Option<Instant>,
}

/// The result of a search for a draw's mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskStatus {
    Ready,
    Late,
    Failed(Failure),
}

impl GrammarMasks {
    pub fn new(
        config: MaskConfig,
        vocabulary: Arc<LazyVocabulary>,
        running_max: usize,
        n_guess_max: usize,
    ) -> GrammarMasks {
        let live = HashMap::with_capacity(running_max);
        GrammarMasks { config, vocabulary, threads: None, running_max, n_guess_max, live, wait_until: None }
    }

    /// Applies the ends and starts of a step.
    pub fn begin(&mut self, step: &Step) {
        let n_before = self.live.len();
        if !self.live.is_empty() {
            let restarts = step.starts.iter().map(|request| request.id);
            step.ends.iter().copied().chain(restarts).for_each(|id| self.end(id));
        }
        let draws = |request: &&Request| request.goal != Goal::Pool;
        step.starts.iter().filter(draws).for_each(|request| self.start(request));
        if self.live.len() != n_before {
            metrics::grammars_running(self.live.len());
        }
    }

    fn start(&mut self, request: &Request) {
        let Some(grammar) = &request.grammar else { return };
        let slot = Arc::new(MaskSlot::new(grammar.clone(), &request.output, self.n_guess_max));
        let live = MaskedRequest { slot, run: MaskSeries::with_room(self.n_guess_max), late_since: None };
        if self.threads.is_none() {
            let started = MaskThreads::start(self.config, self.vocabulary.clone(), 2 * self.running_max);
            self.threads = started.inspect_err(|error| tracing::error!(%error, "no thread for masks")).ok();
        }
        match &self.threads {
            Some(threads) => threads.enqueue(&live.slot),
            None => live.slot.fail(GrammarFault::Broken),
        }
        self.live.insert(request.id, live);
    }

    fn end(&mut self, id: RequestId) {
        if let Some(live) = self.live.remove(&id) {
            live.slot.end();
        }
    }

    /// Has masks made for the drafts of a step that has begun, behind a log whose next draw is `n_output`.
    pub fn request_draft_masks(&self, id: RequestId, n_output: u32, drafts: &[Token]) {
        if let (Some(live), Some(threads)) = (self.live.get(&id), &self.threads) {
            live.slot.set_drafts(n_output, drafts);
            threads.enqueue(&live.slot);
        }
    }

    /// Called before a step's draws look for their masks.
    pub fn begin_draws(&mut self) {
        self.wait_until = None;
    }

    /// Takes the masks for a request's next draws, behind an output of `n_output` tokens. `may_be_late` is false if the
    /// slice cannot run again: the wait may then last for `late_max`.
    pub fn find(&mut self, id: RequestId, n_output: u32, may_be_late: bool) -> MaskStatus {
        let MaskConfig { wait_max, late_max, .. } = self.config;
        let Some(live) = self.live.get_mut(&id) else {
            return MaskStatus::Failed(Failure::Grammar(GrammarFault::Broken));
        };
        if live.run.is_of(n_output) {
            return MaskStatus::Ready;
        }
        if let Some(threads) = &self.threads {
            threads.enqueue(&live.slot);
        }
        let until = match may_be_late {
            true => *self.wait_until.get_or_insert_with(|| Instant::now() + wait_max),
            false => Instant::now() + late_max,
        };
        match live.slot.take(n_output, until, &mut live.run) {
            MaskOutcome::Mask => {
                live.late_since = None;
                MaskStatus::Ready
            }
            MaskOutcome::Nothing
                if live.late_since.get_or_insert_with(Instant::now).elapsed() < late_max && may_be_late =>
            {
                MaskStatus::Late
            }
            MaskOutcome::Nothing => {
                live.slot.end();
                MaskStatus::Failed(Failure::Grammar(GrammarFault::Late))
            }
            MaskOutcome::Failed(failure) => {
                live.slot.end();
                MaskStatus::Failed(failure)
            }
        }
    }

    /// Returns the found mask of this request's draw behind `n_drafts` drafts.
    pub fn mask_of(&self, id: RequestId, n_drafts: usize) -> DrawMask<'_> {
        let live = self.live.get(&id);
        live.and_then(|live| live.run.mask_after(n_drafts)).map_or(DrawMask::Late, DrawMask::Of)
    }

    /// Adds drawn tokens, so that a thread can make the mask behind them.
    pub fn push_drawn(&self, id: RequestId, tokens: impl Iterator<Item = Token>) {
        if let (Some(live), Some(threads)) = (self.live.get(&id), &self.threads) {
            live.slot.push(tokens);
            threads.enqueue(&live.slot);
        }
    }

    /// Adds to `out` the tokens that must follow this output, because its grammar allows only one text.
    pub fn add_forced_tokens(&self, id: RequestId, output: &[Token], out: &mut Vec<Token>) {
        if let Some(live) = self.live.get(&id) {
            live.slot.add_forced_tokens(output, out);
        }
    }
}

impl Drop for GrammarMasks {
    fn drop(&mut self) {
        self.live.values().for_each(|live| live.slot.end());
        if !self.live.is_empty() {
            metrics::grammars_running(0);
        }
    }
}
