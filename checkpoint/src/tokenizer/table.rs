//! The bytes of each token, without text: what masks over a vocabulary are made of. It neither encodes nor decodes.

use crate::tokenizer::Tokenizer;
use types::Token;

/// A model's tokens as bytes.
pub struct TokenTable(Tokenizer);

impl TokenTable {
    pub fn new(tokenizer: Tokenizer) -> TokenTable {
        TokenTable(tokenizer)
    }

    /// The bytes of token 0, 1, .., and whether it is a control token, which is no part of the visible text.
    pub fn tokens(&self) -> impl Iterator<Item = (&[u8], bool)> {
        let n_vocab = self.0.n_vocab() as Token;
        (0..n_vocab).map(|id| (self.0.token_bytes(id), self.0.is_special(id)))
    }
}
