//! Text to token ids and back. Knows nothing of models or chats.
//!
//! The `tokenizers` crate encodes. Decoding is a table of each token's bytes: a token costs a copy, whatever came
//! before it.

mod charsmap;
mod detokenizer;
mod folder;
mod from_gguf;
mod from_json;
mod parts;
mod pieces;
mod places;
mod ranks;
mod recipes;
mod scores;
mod table;
mod tekken;
mod tiktoken;
mod to_json;
mod unigram;
mod word_piece;

pub use detokenizer::Detokenizer;
pub(crate) use folder::json_of_folder;
pub(crate) use from_gguf::KIND_CONTROL;
pub use table::TokenTable;
pub(crate) use to_json::json_of_gguf;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use parts::TokenizerParts;
use std::path::Path;
use std::sync::Arc;
use tokenizers::pipeline::{EncodeOptions, Override, PipelineToken};
use types::{Token, Tokens};

/// Longer texts are refused: no context holds them, and their offsets are 32 bits wide.
pub const TEXT_BYTES_MAX: usize = 64 << 20;

/// The tokens before, between and after the texts of a pair.
pub struct PairFrame {
    before: Tokens,
    between: Tokens,
    after: Tokens,
    /// Whether the model distinguishes the two texts.
    has_kinds: bool,
}

impl PairFrame {
    pub fn n_tokens(&self) -> usize {
        self.before.len() + self.between.len() + self.after.len()
    }

    /// Returns the tokens of a pair, and where the second text begins; 0 where the model does not distinguish the two.
    pub fn around(&self, first: &[Token], second: &[Token]) -> (Tokens, u32) {
        let begins = (self.before.len() + first.len() + self.between.len()) as u32;
        let ids = [&self.before, first, &self.between, second, &self.after].concat();
        (ids, if self.has_kinds { begins } else { 0 })
    }
}

/// Cheap to clone; all clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer(Arc<TokenizerParts>);

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    #[cfg(test)]
    pub(crate) fn from_file(path: &Path) -> Result<Tokenizer> {
        Tokenizer::new(from_json::read_parts(path)?)
    }

    /// Reads the tokenizer of a model's folder.
    pub(crate) fn from_folder(folder: &Path) -> Result<Tokenizer> {
        Tokenizer::new(folder::read_parts(folder)?)
    }

    pub(crate) fn from_gguf(gguf: &Gguf, bytes: &[u8], path: &Path) -> Result<Tokenizer> {
        Tokenizer::new(from_gguf::read_parts(gguf, bytes, path)?)
    }

    fn new(parts: TokenizerParts) -> Result<Tokenizer> {
        let tokenizer = Tokenizer(Arc::new(parts));
        // A part that cannot run fails here, and not at the first client.
        tokenizer.encode("It's 2026, naïve  😀\n", true)?;
        Ok(tokenizer)
    }

    /// The ids of a text. Control tokens that are spelled out in it are recognised; `add_special` adds what the model
    /// expects around a text (not around a rendered chat, whose template has done that).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Tokens> {
        Ok(self.encode_framed(text, add_special)?.0)
    }

    /// Returns the ids of a text, as `encode` does, and how many of them were added before and after it.
    pub fn encode_framed(&self, text: &str, add_special: bool) -> Result<(Tokens, [usize; 2])> {
        if text.len() > TEXT_BYTES_MAX {
            let n = text.len();
            return Err(Error::Tokenizer(format!("a text of {n} bytes is longer than {TEXT_BYTES_MAX}")));
        }
        let options = EncodeOptions {
            add_special_tokens: add_special,
            encode_special_tokens: false,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let mut ids = Vec::new();
        self.0.pipeline.encode_into(text, &options, &mut ids).map_err(|error| Error::Tokenizer(error.to_string()))?;
        // A byte that the vocabulary lacks has an id behind the last.
        let ids: Tokens =
            PipelineToken::cast_slice(&ids).iter().copied().filter(|id| (*id as usize) < self.n_vocab()).collect();
        let (mut before, after): (&[Token], &[Token]) =
            if add_special { (&self.0.before, &self.0.after) } else { (&[], &[]) };
        // A text that begins with it already does not get another.
        if ids.starts_with(before) {
            before = &[];
        }
        let single = &self.0.pipeline.get_post_processor().single;
        let frame = match add_special {
            true => [before.len() + single.prefix.len(), single.suffix.len() + after.len()],
            false => [0, 0],
        };
        Ok(([before, &ids, after].concat(), frame))
    }

    /// The tokens that stand around a pair of texts, as a model reads them that judges both.
    pub fn pair_frame(&self) -> PairFrame {
        let pair = &self.0.pipeline.get_post_processor().pair;
        let ids = |run: &[(PipelineToken, u8)]| -> Tokens {
            let tokens: Vec<PipelineToken> = run.iter().map(|(token, _)| *token).collect();
            PipelineToken::cast_slice(&tokens).to_vec()
        };
        let is_of_file = pair.n_special() > 0;
        let [before, between, after] = match is_of_file {
            true => [ids(&pair.prefix), ids(&pair.infix), ids(&pair.suffix)],
            // What ends a text stands between two; of some models twice.
            false if self.0.doubles_end => [self.0.before.clone(), self.0.after.repeat(2), self.0.after.clone()],
            false => [self.0.before.clone(), self.0.after.clone(), self.0.after.clone()],
        };
        let has_kinds = if is_of_file { pair.b_type_id == Some(1) } else { !self.0.doubles_end };
        PairFrame { before, between, after, has_kinds }
    }

    /// The largest id plus one.
    pub fn n_vocab(&self) -> usize {
        self.0.pieces.len()
    }

    /// The bytes that a token adds to a text, perhaps part of a character. Empty for an unknown id.
    pub fn token_bytes(&self, id: Token) -> &[u8] {
        self.0.pieces.bytes(id)
    }

    /// A token as its vocabulary writes it, such as `Ġthe`. Empty for an unknown id.
    pub fn token_spelled(&self, id: Token) -> String {
        self.0.pieces.spelled(id)
    }

    /// Whether it is a control token, which is no part of the visible text.
    pub fn is_special(&self, id: Token) -> bool {
        self.0.pieces.is_special(id)
    }

    /// The id of a control token or another that is matched whole.
    pub fn added_token(&self, text: &str) -> Option<Token> {
        self.0.pipeline.get_added_vocabulary().token_to_id(text)
    }

    /// The text of a whole answer. Invalid bytes become U+FFFD.
    pub fn decode(&self, tokens: &[Token], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for token in tokens {
            if !(skip_special && self.is_special(*token)) {
                bytes.extend_from_slice(self.token_bytes(*token));
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The text of an answer as it comes, without control tokens.
    pub fn stream(&self) -> Detokenizer {
        Detokenizer::new(self.clone(), true)
    }

    /// The text of an answer as it comes, with control tokens spelled out.
    pub fn stream_with_special(&self) -> Detokenizer {
        Detokenizer::new(self.clone(), false)
    }
}

/// The spelling of each byte in a byte-level vocabulary.
#[cfg(test)]
pub(crate) fn test_alphabet() -> Vec<String> {
    pieces::missing_bytes(|_| false)
}

#[cfg(test)]
mod tests;
