//! The state of one request that the runner and the threads share: the drawn tokens that the grammar lacks, the drafts
//! that a step verifies, and the masks behind both. Has no knowledge of queues.

use crate::load::vocabulary::LazyVocabulary;
use crate::runner::masks::follower::{GrammarFollower, UNSEEN_ROOM};
use crate::runner::masks::run::MaskSeries;
use grammar::MatcherError;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use types::{Failure, Grammar, GrammarFault, Token};

pub(super) struct MaskSlot {
    state: Mutex<SlotState>,
    /// Notified when the state has changed.
    made: Condvar,
    /// The most tokens guessed behind a log.
    n_guess_max: usize,
}

struct SlotState {
    /// Drawn tokens that the grammar has not accepted yet.
    unseen: VecDeque<Token>,
    /// Absent while a thread works with it.
    follower: Option<GrammarFollower>,
    /// The masks that no draw has taken.
    run: MaskSeries,
    /// Whether a mask was made before.
    has_begun: bool,
    drafts: Drafts,
    way: ForcedTokens,
    failed: Option<Failure>,
    /// Whether the slot is in the threads' queue, or a thread works on it.
    is_seen_to: bool,
    /// Whether its request has ended.
    is_over: bool,
}

/// The drafts that a step verifies, and for which masks are needed.
#[derive(Default)]
struct Drafts {
    /// The number of the draw that the first draft stands for.
    of: u32,
    tokens: Vec<Token>,
    /// Whether their masks are still to be made.
    are_pending: bool,
}

/// The tokens of the only text that can follow, and the number of the draw that the first of them stands for.
#[derive(Default)]
struct ForcedTokens {
    of: u32,
    tokens: Vec<Token>,
}

/// The result of `take`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MaskOutcome {
    Mask,
    Nothing,
    Failed(Failure),
}

/// The work for a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotWork {
    /// A new answer: compile its grammar, or read its log.
    Begins,
    /// Masks of an answer that has begun.
    GoesOn,
}

impl SlotState {
    fn has_work(&self) -> bool {
        !self.unseen.is_empty() || !self.has_begun || self.drafts.are_pending
    }

    fn is_live(&self) -> bool {
        self.failed.is_none() && !self.is_over
    }
}

impl MaskSlot {
    /// Creates the slot of a request that begins with this output. At most `n_guess_max` tokens are guessed behind its
    /// log.
    pub fn new(grammar: Grammar, output: &[Token], n_guess_max: usize) -> MaskSlot {
        let mut unseen = VecDeque::with_capacity(output.len().max(UNSEEN_ROOM));
        unseen.extend(output);
        let room = || Vec::with_capacity(n_guess_max);
        let state = SlotState {
            unseen,
            follower: Some(GrammarFollower::new(grammar)),
            run: MaskSeries::with_room(n_guess_max),
            has_begun: false,
            drafts: Drafts { tokens: room(), ..Drafts::default() },
            way: ForcedTokens { tokens: room(), ..ForcedTokens::default() },
            failed: None,
            is_seen_to: false,
            is_over: false,
        };
        MaskSlot { state: Mutex::new(state), made: Condvar::new(), n_guess_max }
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, tokens: impl Iterator<Item = Token>) {
        let mut state = self.state();
        state.unseen.extend(tokens);
        state.drafts.are_pending = false;
    }

    /// Adds the drafts that a step verifies behind the log, whose next draw is `n_output`.
    pub fn set_drafts(&self, n_output: u32, tokens: &[Token]) {
        let mut state = self.state();
        let are_made = state.run.is_of(n_output) && state.run.n_matching(tokens) == tokens.len();
        let drafts = &mut state.drafts;
        drafts.tokens.clear();
        drafts.tokens.extend_from_slice(tokens);
        (drafts.of, drafts.are_pending) = (n_output, !are_made);
    }

    /// Adds the tokens that must follow this output, as far as they are known.
    pub fn add_forced_tokens(&self, output: &[Token], out: &mut Vec<Token>) {
        let state = self.state();
        let since = output.get(state.way.of as usize..).unwrap_or_default();
        if state.way.of as usize <= output.len() && state.way.tokens.starts_with(since) {
            out.extend_from_slice(&state.way.tokens[since.len()..]);
        }
    }

    pub fn end(&self) {
        let mut state = self.state();
        state.is_over = true;
        // A thread that works with the follower drops it itself.
        state.follower = None;
    }

    pub fn fail(&self, fault: GrammarFault) {
        self.state().failed = Some(Failure::Grammar(fault));
        self.made.notify_all();
    }

    /// Returns the work that no thread does yet; the caller must then send a thread.
    pub fn claim_work(&self) -> Option<SlotWork> {
        let mut state = self.state();
        if !state.has_work() || !state.is_live() || state.is_seen_to {
            return None;
        }
        state.is_seen_to = true;
        Some(if state.has_begun { SlotWork::GoesOn } else { SlotWork::Begins })
    }

    /// Called if no thread comes after all.
    pub fn release_work(&self) {
        self.state().is_seen_to = false;
    }

    /// Swaps the mask for the draw `n_output` into `taken` if it is ready by `until`, with the masks behind drafts that
    /// are ready by then.
    pub fn take(&self, n_output: u32, until: Instant, taken: &mut MaskSeries) -> MaskOutcome {
        let mut state = self.state();
        loop {
            if let Some(failure) = state.failed {
                return MaskOutcome::Failed(failure);
            }
            if state.is_over {
                return MaskOutcome::Failed(Failure::Grammar(GrammarFault::Broken));
            }
            let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
            let has_mask = state.run.is_of(n_output);
            match left {
                Some(left) if !has_mask || state.drafts.are_pending => {
                    state = self.made.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                }
                _ if has_mask => {
                    std::mem::swap(&mut state.run, taken);
                    state.run.forget();
                    let drafts = if state.drafts.of == n_output { &state.drafts.tokens[..] } else { &[] };
                    taken.cut(taken.n_matching(drafts));
                    state.drafts.are_pending = false;
                    return MaskOutcome::Mask;
                }
                _ => return MaskOutcome::Nothing,
            }
        }
    }

    /// Called on a thread: brings the grammar up to the last drawn token, makes the next mask, and the required ones
    /// behind it. Returns whether there is more to do.
    pub fn make_masks(&self, vocabulary: &LazyVocabulary) -> bool {
        let mut state = self.state();
        let Some(mut follower) = state.follower.take().filter(|_| !state.is_over) else { return false };
        follower.unseen.extend(state.unseen.drain(..));
        drop(state);
        let is_behind = follower.is_behind();
        let caught_up = if is_behind { follower.catch_up(vocabulary) } else { Ok(()) };
        match caught_up {
            Ok(()) => self.look_ahead(&mut follower, is_behind),
            Err(stuck) => {
                let position = follower.n_seen();
                tracing::warn!(%stuck, position, "a grammar failed: its request ends");
                self.state().failed = Some(failure(&stuck));
            }
        }
        let mut state = self.state();
        let goes_on = state.has_work() && state.is_live();
        state.is_seen_to = goes_on;
        if !state.is_over {
            state.follower = Some(follower);
        }
        drop(state);
        self.made.notify_all();
        goes_on
    }

    /// Publishes the mask behind the log if it `is_new`. Then makes the masks behind drafts, or finds the tokens that
    /// must follow.
    fn look_ahead(&self, follower: &mut GrammarFollower, is_new: bool) {
        let of = follower.n_seen();
        let mut state = self.state();
        if is_new {
            state.run.begin(of, follower.mask());
            state.has_begun = true;
            state.way.tokens.clear();
            state.way.of = of;
        }
        let has_drafts = state.drafts.are_pending && state.drafts.of == of;
        if has_drafts {
            follower.drafts.clear();
            follower.drafts.extend_from_slice(&state.drafts.tokens);
            state.run.cut(0);
        } else {
            // The drafts may be behind tokens that the grammar has not accepted yet.
            state.drafts.are_pending &= !state.unseen.is_empty();
        }
        drop(state);
        self.made.notify_all();
        if has_drafts {
            follower.follow_drafts(|token, words| self.add_mask(of, token, words, false));
            let mut state = self.state();
            state.drafts.are_pending &= state.drafts.tokens != follower.drafts || state.drafts.of != of;
        } else if is_new {
            follower.follow_forced_tokens(self.n_guess_max, |token, words| self.add_mask(of, token, words, true));
        }
    }

    /// Adds a mask behind the draw `of`. Returns whether another one is needed.
    fn add_mask(&self, of: u32, token: Token, words: &[u32], is_way: bool) -> bool {
        let mut state = self.state();
        if is_way {
            state.way.tokens.push(token);
        }
        let is_awaited = state.run.is_of(of);
        if is_awaited {
            state.run.push(token, words);
        }
        state.is_live() && state.unseen.is_empty() && if is_way { !state.drafts.are_pending } else { is_awaited }
    }
}

fn failure(stuck: &MatcherError) -> Failure {
    match stuck {
        MatcherError::NoToken => Failure::NoToken,
        MatcherError::TooComplex(_) => Failure::Grammar(GrammarFault::TooComplex),
        MatcherError::Grammar(_) | MatcherError::Token(_) | MatcherError::Engine(_) => {
            Failure::Grammar(GrammarFault::Broken)
        }
    }
}

#[cfg(test)]
mod tests;
