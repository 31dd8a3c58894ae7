//! Turns tokens into text as they come. Knows only bytes and where a character ends.

use crate::tokenizer::Tokenizer;
use std::sync::Arc;
use types::Token;

/// The text of one answer. `pending` is an incomplete character: at most three bytes between pushes.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Control tokens that are text all the same.
    shown: Arc<[Token]>,
    pending: Vec<u8>,
    text: String,
}

impl Detokenizer {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> Detokenizer {
        Detokenizer { tokenizer, skip_special, shown: Arc::from([]), pending: Vec::new(), text: String::new() }
    }

    /// The same with these control tokens spelled out.
    pub fn with_visible_tokens(self, shown: Arc<[Token]>) -> Detokenizer {
        Detokenizer { shown, ..self }
    }

    /// Returns the characters that this token completes. Only invalid bytes become U+FFFD, and all pushes together
    /// equal what `decode` gives.
    pub fn push(&mut self, token: Token) -> &str {
        self.text.clear();
        if !self.is_hidden(token) {
            self.pending.extend_from_slice(self.tokenizer.token_bytes(token));
            self.take_whole_characters();
        }
        &self.text
    }

    /// Returns the rest when no token follows: nothing, or one U+FFFD for an incomplete character.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        &self.text
    }

    fn is_hidden(&self, token: Token) -> bool {
        self.skip_special && self.tokenizer.is_special(token) && !self.shown.contains(&token)
    }

    fn take_whole_characters(&mut self) {
        let mut at = 0;
        for chunk in self.pending.utf8_chunks() {
            self.text.push_str(chunk.valid());
            at += chunk.valid().len();
            let invalid = chunk.invalid();
            let last = at + invalid.len() == self.pending.len();
            if invalid.is_empty() || (last && may_go_on(invalid)) {
                break;
            }
            self.text.push(char::REPLACEMENT_CHARACTER);
            at += invalid.len();
        }
        self.pending.drain(..at);
    }
}

/// Whether the bytes are an incomplete character that may go on.
fn may_go_on(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
