//! What the runner and the threads share of one request: the drawn tokens that its grammar has not seen, and the mask
//! for the next. Knows no queue.

use crate::load::vocabulary::LazyVocabulary;
use grammar::{GrammarLimits, Matcher};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use types::{Grammar, Token};

pub(super) struct Slot {
    state: Mutex<State>,
    /// The state has changed.
    made: Condvar,
}

struct State {
    /// Drawn, and not seen by the grammar.
    unseen: VecDeque<Token>,
    /// Absent while a thread works with it.
    follower: Option<Follower>,
    /// The mask for the draw with this number.
    words: Vec<u32>,
    of: Option<u32>,
    has_failed: bool,
    /// It stands in the threads' queue, or one of them works on it.
    is_seen_to: bool,
    /// Nobody wants its masks any more.
    is_over: bool,
}

/// A grammar, and how far the output is in it.
pub(super) struct Follower {
    grammar: Grammar,
    matcher: Option<Matcher>,
    n_seen: u32,
    mask: grammar::Mask,
}

/// What `take` found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Made {
    Mask,
    Nothing,
    Failed,
}

impl Slot {
    /// For a request that begins with this output.
    pub fn new(grammar: Grammar, output: &[Token]) -> Slot {
        let follower = Follower { grammar, matcher: None, n_seen: 0, mask: grammar::Mask::default() };
        let state = State {
            unseen: output.iter().copied().collect(),
            follower: Some(follower),
            words: Vec::new(),
            of: None,
            has_failed: false,
            is_seen_to: false,
            is_over: false,
        };
        Slot { state: Mutex::new(state), made: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, token: Token) {
        self.state().unseen.push_back(token);
    }

    pub fn end(&self) {
        let mut state = self.state();
        state.is_over = true;
        // What a thread works with it drops itself.
        state.follower = None;
    }

    pub fn fail(&self) {
        self.state().has_failed = true;
        self.made.notify_all();
    }

    /// Whether a thread has something to do here that none does; if so, one is to come.
    pub fn wants_a_thread(&self) -> bool {
        let mut state = self.state();
        let has_work = !state.unseen.is_empty() || state.of.is_none();
        let wants = has_work && !state.is_seen_to && !state.is_over && !state.has_failed;
        state.is_seen_to |= wants;
        wants
    }

    /// No thread comes after all.
    pub fn is_left(&self) {
        self.state().is_seen_to = false;
    }

    /// Swaps the mask for the draw `n_output` into `words`, if it is there by `until`.
    pub fn take(&self, n_output: u32, until: Instant, words: &mut Vec<u32>) -> Made {
        let mut state = self.state();
        loop {
            if state.has_failed || state.is_over {
                return Made::Failed;
            }
            if state.of == Some(n_output) {
                std::mem::swap(&mut state.words, words);
                return Made::Mask;
            }
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return Made::Nothing;
            };
            state = self.made.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// On a thread: brings the grammar up to the last drawn token, and makes the mask for the next. Whether there is
    /// more to do.
    pub fn follow(&self, vocabulary: &LazyVocabulary, limits: &GrammarLimits) -> bool {
        let mut state = self.state();
        let Some(mut follower) = state.follower.take().filter(|_| !state.is_over) else { return false };
        let (mut unseen, mut words) = (std::mem::take(&mut state.unseen), std::mem::take(&mut state.words));
        drop(state);
        let made = follower.follow(&mut unseen, vocabulary, limits, &mut words);
        let mut state = self.state();
        state.words = words;
        match made {
            Ok(()) => state.of = Some(follower.n_seen),
            Err(why) => {
                tracing::warn!(why, position = follower.n_seen, "a grammar cannot be followed: its request ends");
                state.has_failed = true;
            }
        }
        let has_more = !state.unseen.is_empty();
        if !has_more {
            // Its memory is used again.
            state.unseen = unseen;
        }
        let goes_on = has_more && !state.has_failed && !state.is_over;
        state.is_seen_to = goes_on;
        if !state.is_over {
            state.follower = Some(follower);
        }
        drop(state);
        self.made.notify_all();
        goes_on
    }
}

impl Follower {
    /// Takes the tokens, and writes the mask for the draw after them.
    fn follow(
        &mut self,
        unseen: &mut VecDeque<Token>,
        vocabulary: &LazyVocabulary,
        limits: &GrammarLimits,
        words: &mut Vec<u32>,
    ) -> Result<(), String> {
        let vocabulary = vocabulary.get()?;
        if self.matcher.is_none() {
            let matcher = Matcher::new(&vocabulary, &self.grammar, limits);
            self.matcher = Some(matcher.map_err(|stuck| stuck.to_string())?);
        }
        let Some(matcher) = &mut self.matcher else { return Ok(()) };
        for token in unseen.drain(..) {
            self.n_seen += 1;
            // Behind its end an answer goes on with end tokens, where the request does not stop at them.
            if !(matcher.is_ended() && vocabulary.ends().contains(&token)) {
                matcher.accept(token).map_err(|stuck| stuck.to_string())?;
            }
        }
        words.clear();
        if matcher.is_ended() {
            words.resize(vocabulary.n_vocab().div_ceil(32), 0);
            vocabulary.ends().iter().for_each(|end| words[*end as usize / 32] |= 1 << (end % 32));
        } else {
            matcher.mask(&mut self.mask).map_err(|stuck| stuck.to_string())?;
            words.extend_from_slice(self.mask.words());
        }
        Ok(())
    }
}
