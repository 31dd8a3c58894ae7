//! The masks of requests with a grammar, on the rank that samples: threads follow each grammar beside the passes, and a
//! step's draws take what is ready. Knows requests and tokens; nothing of logits, blocks or other ranks.
//!
//! ```text
//! step     start ─────────┐  draw 0 ── drawn ──┐  draw 1
//! threads                 └ compile, mask 0     └ mask 1
//! ```
//!
//! A mask for the next token is made as soon as this one is drawn, while the next pass runs. One that is not ready then
//! is waited for a little, and else its slice draws nothing and runs again. A slice with drafts has a mask for each row
//! that draws; where one behind a draft is not ready, or its draft is not allowed, the slice draws what is before it.

mod follower;
mod run;
mod slot;
mod threads;

use crate::load::vocabulary::LazyVocabulary;
use backend::DrawMask;
use run::MaskRun;
use slot::{Made, Slot};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::metrics;
use threads::Threads;
use types::{Failure, Goal, GrammarFault, Request, RequestId, Step, Token};

/// How masks are made and waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskConfig {
    /// Threads that follow grammars. All but one may compile at a time, so that this holds up nobody else's masks.
    pub threads: usize,
    /// How long all draws of a step together wait for masks that are not ready.
    pub wait_max: Duration,
    /// A request whose mask is not ready by then ends: its grammar cannot be followed.
    pub late_max: Duration,
    /// Added to the making of every mask, so that tests have late ones.
    pub delay: Duration,
}

impl Default for MaskConfig {
    fn default() -> Self {
        let (wait_max, late_max) = (Duration::from_millis(2), Duration::from_secs(30));
        MaskConfig { threads: 2, wait_max, late_max, delay: Duration::ZERO }
    }
}

pub struct Masks {
    config: MaskConfig,
    vocabulary: Arc<LazyVocabulary>,
    /// None until the first grammar.
    threads: Option<Threads>,
    running_max: usize,
    /// The most tokens that are guessed behind a log.
    n_guess_max: usize,
    live: HashMap<RequestId, Live>,
    /// When the present step's draws cease to wait.
    wait_until: Option<Instant>,
}

/// A request with a grammar.
struct Live {
    slot: Arc<Slot>,
    /// The masks of a slice's draws. Their memory goes to and fro.
    run: MaskRun,
    /// Since when a draw waits for its mask.
    late_since: Option<Instant>,
}

/// What a draw finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Ready,
    Late,
    Failed(Failure),
}

impl Masks {
    pub fn new(config: MaskConfig, vocabulary: Arc<LazyVocabulary>, running_max: usize, n_guess_max: usize) -> Masks {
        let live = HashMap::with_capacity(running_max);
        Masks { config, vocabulary, threads: None, running_max, n_guess_max, live, wait_until: None }
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
        let slot = Arc::new(Slot::new(grammar.clone(), &request.output, self.n_guess_max));
        let live = Live { slot, run: MaskRun::with_room(self.n_guess_max), late_since: None };
        if self.threads.is_none() {
            let started = Threads::start(self.config, self.vocabulary.clone(), 2 * self.running_max);
            self.threads = started.inspect_err(|error| tracing::error!(%error, "no thread for masks")).ok();
        }
        match &self.threads {
            Some(threads) => threads.see_to(&live.slot),
            None => live.slot.fail(GrammarFault::Broken),
        }
        self.live.insert(request.id, live);
    }

    fn end(&mut self, id: RequestId) {
        if let Some(live) = self.live.remove(&id) {
            live.slot.end();
        }
    }

    /// A step that has begun verifies these drafts behind a log whose next draw is `n_output`.
    pub fn draft(&self, id: RequestId, n_output: u32, drafts: &[Token]) {
        if let (Some(live), Some(threads)) = (self.live.get(&id), &self.threads) {
            live.slot.draft(n_output, drafts);
            threads.see_to(&live.slot);
        }
    }

    /// A step's draws are about to ask for their masks.
    pub fn begin_draws(&mut self) {
        self.wait_until = None;
    }

    /// Takes the masks for a request's next draws, the output having `n_output` tokens. `may_be_late` is false where
    /// the slice cannot run again: then the wait is as long as any.
    pub fn find(&mut self, id: RequestId, n_output: u32, may_be_late: bool) -> Found {
        let MaskConfig { wait_max, late_max, .. } = self.config;
        let Some(live) = self.live.get_mut(&id) else {
            return Found::Failed(Failure::Grammar(GrammarFault::Broken));
        };
        if live.run.is_of(n_output) {
            return Found::Ready;
        }
        if let Some(threads) = &self.threads {
            threads.see_to(&live.slot);
        }
        let until = match may_be_late {
            true => *self.wait_until.get_or_insert_with(|| Instant::now() + wait_max),
            false => Instant::now() + late_max,
        };
        match live.slot.take(n_output, until, &mut live.run) {
            Made::Mask => {
                live.late_since = None;
                Found::Ready
            }
            Made::Nothing if live.late_since.get_or_insert_with(Instant::now).elapsed() < late_max && may_be_late => {
                Found::Late
            }
            Made::Nothing => {
                live.slot.end();
                Found::Failed(Failure::Grammar(GrammarFault::Late))
            }
            Made::Failed(failure) => {
                live.slot.end();
                Found::Failed(failure)
            }
        }
    }

    /// The mask that was found for this request's draw behind `n_drafts` drafts.
    pub fn of(&self, id: RequestId, n_drafts: usize) -> DrawMask<'_> {
        let live = self.live.get(&id);
        live.and_then(|live| live.run.behind(n_drafts)).map_or(DrawMask::Late, DrawMask::Of)
    }

    /// Tokens were drawn: the mask behind them can be made.
    pub fn drawn(&self, id: RequestId, tokens: impl Iterator<Item = Token>) {
        if let (Some(live), Some(threads)) = (self.live.get(&id), &self.threads) {
            live.slot.push(tokens);
            threads.see_to(&live.slot);
        }
    }

    /// Adds to `out` what is known to follow this output, because its grammar leaves one text.
    pub fn only_way(&self, id: RequestId, output: &[Token], out: &mut Vec<Token>) {
        if let Some(live) = self.live.get(&id) {
            live.slot.only_way(output, out);
        }
    }
}

impl Drop for Masks {
    fn drop(&mut self) {
        self.live.values().for_each(|live| live.slot.end());
        if !self.live.is_empty() {
            metrics::grammars_running(0);
        }
    }
}
