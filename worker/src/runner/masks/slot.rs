//! What the runner and the threads share of one request: the drawn tokens that its grammar has not seen, and the mask
//! for the next. Knows no queue.

use crate::load::vocabulary::LazyVocabulary;
use grammar::{Matcher, Stuck};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use types::{Failure, Grammar, GrammarFault, Token};

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
    failed: Option<Failure>,
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
    /// The tokens that it is at. It goes to and fro with the slot's, so that neither side allocates one.
    reading: VecDeque<Token>,
}

/// Tokens that may be drawn while one mask is made, without an allocation.
const UNSEEN_ROOM: usize = 16;

/// What `take` found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Made {
    Mask,
    Nothing,
    Failed(Failure),
}

/// What a thread is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// An answer begins whose grammar is to be compiled, or whose log to be read.
    Begins,
    /// One mask.
    GoesOn,
}

impl Slot {
    /// For a request that begins with this output.
    pub fn new(grammar: Grammar, output: &[Token]) -> Slot {
        let mut unseen = VecDeque::with_capacity(output.len().max(UNSEEN_ROOM));
        unseen.extend(output);
        let reading = VecDeque::with_capacity(UNSEEN_ROOM);
        let follower = Follower { grammar, matcher: None, n_seen: 0, mask: grammar::Mask::default(), reading };
        let state = State {
            unseen,
            follower: Some(follower),
            words: Vec::new(),
            of: None,
            failed: None,
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

    pub fn fail(&self, fault: GrammarFault) {
        self.state().failed = Some(Failure::Grammar(fault));
        self.made.notify_all();
    }

    /// What a thread has to do here that none does; if there is something, one is to come.
    pub fn wants_a_thread(&self) -> Option<Work> {
        let mut state = self.state();
        let has_work = !state.unseen.is_empty() || state.of.is_none();
        if !has_work || state.is_seen_to || state.is_over || state.failed.is_some() {
            return None;
        }
        state.is_seen_to = true;
        Some(if state.of.is_none() { Work::Begins } else { Work::GoesOn })
    }

    /// No thread comes after all.
    pub fn is_left(&self) {
        self.state().is_seen_to = false;
    }

    /// Swaps the mask for the draw `n_output` into `words`, if it is there by `until`.
    pub fn take(&self, n_output: u32, until: Instant, words: &mut Vec<u32>) -> Made {
        let mut state = self.state();
        loop {
            if let Some(failure) = state.failed {
                return Made::Failed(failure);
            }
            if state.is_over {
                return Made::Failed(Failure::Grammar(GrammarFault::Broken));
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
    pub fn follow(&self, vocabulary: &LazyVocabulary) -> bool {
        let mut state = self.state();
        let Some(mut follower) = state.follower.take().filter(|_| !state.is_over) else { return false };
        std::mem::swap(&mut state.unseen, &mut follower.reading);
        let mut words = std::mem::take(&mut state.words);
        drop(state);
        let made = follower.follow(vocabulary, &mut words);
        let mut state = self.state();
        state.words = words;
        match made {
            Ok(()) => state.of = Some(follower.n_seen),
            Err(stuck) => {
                let position = follower.n_seen;
                tracing::warn!(%stuck, position, "a grammar cannot be followed: its request ends");
                state.failed = Some(failure(&stuck));
            }
        }
        let goes_on = !state.unseen.is_empty() && state.failed.is_none() && !state.is_over;
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
    fn follow(&mut self, vocabulary: &LazyVocabulary, words: &mut Vec<u32>) -> Result<(), Stuck> {
        let matcher = match &mut self.matcher {
            Some(matcher) => matcher,
            none => none.insert(vocabulary.matcher(&self.grammar)?),
        };
        for token in self.reading.drain(..) {
            self.n_seen += 1;
            // Behind its end an answer goes on with end tokens, where the request does not stop at them.
            if !(matcher.is_ended() && matcher.ends().contains(&token)) {
                matcher.accept(token)?;
            }
        }
        words.clear();
        if matcher.is_ended() {
            words.resize(matcher.n_vocab().div_ceil(32), 0);
            matcher.ends().iter().for_each(|end| words[*end as usize / 32] |= 1 << (end % 32));
        } else {
            matcher.mask(&mut self.mask)?;
            words.extend_from_slice(self.mask.words());
        }
        Ok(())
    }
}

fn failure(stuck: &Stuck) -> Failure {
    match stuck {
        Stuck::NoToken => Failure::NoToken,
        Stuck::TooComplex(_) => Failure::Grammar(GrammarFault::TooComplex),
        Stuck::Grammar(_) | Stuck::Token(_) | Stuck::Rewind { .. } | Stuck::Engine(_) => {
            Failure::Grammar(GrammarFault::Broken)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_says_whose_fault_it_is() {
        let cases = [
            (Stuck::TooComplex("items".into()), Failure::Grammar(GrammarFault::TooComplex)),
            (Stuck::Token(5), Failure::Grammar(GrammarFault::Broken)),
            (Stuck::Grammar("no rules".into()), Failure::Grammar(GrammarFault::Broken)),
            (Stuck::NoToken, Failure::NoToken),
        ];
        for (stuck, expected) in cases {
            assert_eq!(failure(&stuck), expected, "{stuck}");
        }
    }
}
