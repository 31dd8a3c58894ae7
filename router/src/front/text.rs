//! Turns tokens into text that can be shown: whole characters only, and nothing of a stop string. Knows nothing of
//! requests.

use crate::front::stop::{Filter, Stops};
use checkpoint::{Detokenizer, Tokenizer};
use std::sync::Arc;
use types::Token;

/// The text of one choice as it grows.
pub struct Assembly {
    detokenizer: Detokenizer,
    filter: Filter,
    /// How many tokens at the beginning cannot complete a stop string.
    n_unstoppable: u32,
    n_tokens: u32,
}

impl Assembly {
    pub fn new(tokenizer: &Tokenizer, stops: Arc<Stops>, tokens_min: u32, show_special: bool) -> Assembly {
        let detokenizer = if show_special { tokenizer.stream_with_special() } else { tokenizer.stream() };
        Assembly { detokenizer, filter: Filter::new(stops), n_unstoppable: tokens_min, n_tokens: 0 }
    }

    /// How many tokens count: all up to and including the one that completed a stop string.
    pub fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    /// Appends to `text` what this token allows to be shown. Returns the index of a stop string that it completed: then
    /// the text is over.
    pub fn push(&mut self, token: Token, text: &mut String) -> Option<usize> {
        self.n_tokens += 1;
        let piece = self.detokenizer.push(token);
        if self.n_tokens <= self.n_unstoppable {
            text.push_str(piece);
            return None;
        }
        self.filter.push(piece, text)
    }

    /// Counts the token that ends the text, which is not part of it.
    pub fn push_stop_token(&mut self) {
        self.n_tokens += 1;
    }

    /// Ends the text. A character that was cut off is shown as a replacement character, and may still complete a stop
    /// string.
    pub fn finish(&mut self, text: &mut String) -> Option<usize> {
        let stop = self.filter.push(self.detokenizer.finish(), text);
        self.filter.finish(text);
        stop
    }
}
