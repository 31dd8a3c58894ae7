//! A grammar, and how far one output is in it. Of who takes its masks it knows whether more are wanted.
//!
//! ```text
//! [.. log ..] mask · token · mask · token · mask     and back to the log
//! ```
//!
//! Behind the log it looks ahead: along drafts that a step verifies, or where the grammar leaves one text. What it took
//! there it takes back, so that the next token of the log finds it where the log ends.

use crate::load::vocabulary::LazyVocabulary;
use grammar::{Mask, Matcher, Stuck};
use std::collections::VecDeque;
use types::{Grammar, Token};

pub(super) struct Follower {
    grammar: Grammar,
    matcher: Option<Matcher>,
    /// The tokens of the log that it has taken.
    seen: Vec<Token>,
    mask: Mask,
    /// The tokens of the log that it has not taken.
    pub unseen: VecDeque<Token>,
    /// The drafts that it looks along.
    pub drafts: Vec<Token>,
}

/// Tokens that may be drawn while one mask is made, without an allocation.
pub(super) const UNSEEN_ROOM: usize = 2 * types::DRAFT_ROWS_MAX as usize;

impl Follower {
    pub fn new(grammar: Grammar) -> Follower {
        Follower {
            grammar,
            matcher: None,
            seen: Vec::new(),
            mask: Mask::default(),
            unseen: VecDeque::with_capacity(UNSEEN_ROOM),
            drafts: Vec::with_capacity(UNSEEN_ROOM),
        }
    }

    /// The number of the draw behind the log.
    pub fn n_seen(&self) -> u32 {
        self.seen.len() as u32
    }

    /// Whether it has no mask for the draw behind the log: there is more of the log, or it has not begun.
    pub fn is_behind(&self) -> bool {
        self.matcher.is_none() || !self.unseen.is_empty()
    }

    /// Takes what it has not seen of the log, and makes the mask for the draw behind it.
    pub fn catch_up(&mut self, vocabulary: &LazyVocabulary) -> Result<(), Stuck> {
        let matcher = match &mut self.matcher {
            Some(matcher) => matcher,
            none => none.insert(vocabulary.matcher(&self.grammar)?),
        };
        while let Some(token) = self.unseen.pop_front() {
            self.seen.push(token);
            // Behind its end an answer goes on with end tokens, where the request does not stop at them.
            if !(matcher.is_ended() && matcher.ends().contains(&token)) {
                matcher.accept(token)?;
            }
        }
        if matcher.is_ended() {
            self.mask.leave_all(matcher.ends(), matcher.n_vocab());
            return Ok(());
        }
        matcher.mask(&mut self.mask)
    }

    /// The mask that was made last.
    pub fn words(&self) -> &[u32] {
        self.mask.words()
    }

    /// Makes a mask behind each draft, as far as the grammar allows them. `takes` is given each, and whether it wants
    /// more.
    pub fn follow_drafts(&mut self, takes: impl FnMut(Token, &[u32]) -> bool) {
        let drafts = std::mem::take(&mut self.drafts);
        self.look_ahead(|_, _, n| drafts.get(n).copied(), takes);
        self.drafts = drafts;
    }

    /// The same behind each token of the one text that can follow, at most `n_max`. It follows on `catch_up`.
    pub fn follow_only_way(&mut self, n_max: usize, takes: impl FnMut(Token, &[u32]) -> bool) {
        self.look_ahead(|matcher, mask, n| if n < n_max { matcher.only_way(mask) } else { None }, takes);
    }

    fn look_ahead(
        &mut self,
        next: impl Fn(&Matcher, &Mask, usize) -> Option<Token>,
        mut takes: impl FnMut(Token, &[u32]) -> bool,
    ) {
        let Some(matcher) = self.matcher.as_mut().filter(|matcher| matcher.goes_back()) else { return };
        let (mut n_taken, mut is_sound) = (0, true);
        // An end is the last token of an answer: nothing is drawn behind one that was not drawn itself.
        while let Some(token) = next(matcher, &self.mask, n_taken).filter(|token| !matcher.ends().contains(token)) {
            if let Err(stuck) = matcher.accept(token) {
                is_sound = matches!(stuck, Stuck::Token(_));
                break;
            }
            n_taken += 1;
            is_sound = matcher.mask(&mut self.mask).is_ok();
            if !is_sound || !takes(token, self.mask.words()) {
                break;
            }
        }
        if !is_sound || matcher.rewind(n_taken).is_err() {
            self.begin_again();
        }
    }

    /// What fails behind the log does not concern the log: it is read again.
    fn begin_again(&mut self) {
        self.matcher = None;
        self.unseen.extend(self.seen.drain(..));
    }
}
