//! A grammar, and the position of one output in it. Has no knowledge of the draws that take its masks, except whether
//! they need more.
//!
//! ```text
//! [.. log ..] mask · token · mask · token · mask     and back to the log
//! ```
//!
//! It looks ahead behind the log: along the drafts that a step verifies, or where the grammar allows only one text. A
//! branch of the matcher reads those tokens, so that the log's next token finds the matcher at the log's end.

use crate::load::vocabulary::LazyVocabulary;
use grammar::{Matcher, MatcherError, TokenMask};
use std::collections::VecDeque;
use types::{Grammar, Token};

pub(super) struct GrammarFollower {
    grammar: Grammar,
    matcher: Option<Matcher>,
    /// The tokens of the log that the grammar has accepted.
    seen: Vec<Token>,
    mask: TokenMask,
    /// The tokens of the log that the grammar has not accepted yet.
    pub unseen: VecDeque<Token>,
    /// The drafts along which it looks ahead.
    pub drafts: Vec<Token>,
}

/// Room for the tokens drawn while one mask is made, so that nothing is allocated.
pub(super) const UNSEEN_ROOM: usize = 2 * types::DRAFT_ROWS_MAX as usize;

impl GrammarFollower {
    pub fn new(grammar: Grammar) -> GrammarFollower {
        GrammarFollower {
            grammar,
            matcher: None,
            seen: Vec::new(),
            mask: TokenMask::default(),
            unseen: VecDeque::with_capacity(UNSEEN_ROOM),
            drafts: Vec::with_capacity(UNSEEN_ROOM),
        }
    }

    /// Returns the number of the draw behind the log.
    pub fn n_seen(&self) -> u32 {
        self.seen.len() as u32
    }

    /// Returns whether the mask for the draw behind the log is missing: the log has grown, or no mask has been made
    /// yet.
    pub fn is_behind(&self) -> bool {
        self.matcher.is_none() || !self.unseen.is_empty()
    }

    /// Accepts the new tokens of the log, and makes the mask for the draw behind them.
    pub fn catch_up(&mut self, vocabulary: &LazyVocabulary) -> Result<(), MatcherError> {
        let matcher = match &mut self.matcher {
            Some(matcher) => matcher,
            none => none.insert(vocabulary.matcher(&self.grammar)?),
        };
        while let Some(token) = self.unseen.pop_front() {
            self.seen.push(token);
            // Behind its end an answer continues with end tokens, if the request does not stop at them.
            if !(matcher.is_ended() && matcher.end_tokens().contains(&token)) {
                matcher.accept(token)?;
            }
        }
        if matcher.is_ended() {
            self.mask.allow_only_these(matcher.end_tokens(), matcher.n_vocab());
            return Ok(());
        }
        matcher.fill_mask(&mut self.mask)
    }

    /// Returns the newest mask.
    pub fn mask(&self) -> &[u32] {
        self.mask.words()
    }

    /// Makes a mask behind each draft, as far as the grammar allows them. `takes` receives each mask, and returns
    /// whether it needs more.
    pub fn follow_drafts(&mut self, takes: impl FnMut(Token, &[u32]) -> bool) {
        let drafts = std::mem::take(&mut self.drafts);
        self.look_ahead(|_, _, n| drafts.get(n).copied(), takes);
        self.drafts = drafts;
    }

    /// Makes a mask behind each token of the only text that can follow, at most `n_max`. Call it after `catch_up`.
    pub fn follow_forced_tokens(&mut self, n_max: usize, takes: impl FnMut(Token, &[u32]) -> bool) {
        self.look_ahead(|matcher, mask, n| if n < n_max { matcher.single_continuation(mask) } else { None }, takes);
    }

    fn look_ahead(
        &mut self,
        next: impl Fn(&Matcher, &TokenMask, usize) -> Option<Token>,
        mut takes: impl FnMut(Token, &[u32]) -> bool,
    ) {
        // An end is an answer's last token: no draw follows an end that was not drawn itself.
        let next = |matcher: &Matcher, mask: &TokenMask, n_taken: usize| {
            next(matcher, mask, n_taken).filter(|token| !matcher.end_tokens().contains(token))
        };
        let Some(matcher) = &self.matcher else { return };
        let Some(mut token) = next(matcher, &self.mask, 0) else { return };
        let Some(mut branch) = matcher.branch() else { return };
        for n_taken in 1.. {
            match branch.accept(token).and_then(|()| branch.fill_mask(&mut self.mask)) {
                Ok(()) if takes(token, self.mask.words()) => {}
                Ok(()) | Err(MatcherError::Token(_)) => return,
                Err(_) => return self.restart(),
            }
            let Some(another) = next(&branch, &self.mask, n_taken) else { return };
            token = another;
        }
    }

    /// An error behind the log does not affect the log: the grammar reads it again, with tables of its own.
    fn restart(&mut self) {
        self.matcher = None;
        self.unseen.extend(self.seen.drain(..));
    }
}
