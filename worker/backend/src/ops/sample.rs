//! Draws from logits.

use super::Memory;
use types::{Sampling, Token, TokenOut};

/// One row's draw: all that it may depend on besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub sampling: &'a Sampling,
    /// The log before the token that is drawn.
    pub prompt: &'a [Token],
    pub output: &'a [Token],
    /// Nothing is drawn: the row's token is known, and its logprob is asked for.
    pub score: Option<Score>,
}

#[derive(Clone, Copy, Debug)]
pub struct Score {
    pub token: Token,
    /// How many of the most likely are told beside it.
    pub n_top: u8,
}

impl Draw<'_> {
    /// Of the token that is drawn, in the whole log: part of the noise, so that a replay draws the same.
    pub fn position(&self) -> u32 {
        (self.prompt.len() + self.output.len()) as u32
    }

    /// Tokens generated so far: stop tokens are not drawn before `tokens_min`.
    pub fn n_output(&self) -> u32 {
        self.output.len() as u32
    }
}

pub trait Sample: Memory {
    /// Draws one token from each row of logits into `out` (cleared, and its memory reused). A row that holds no number
    /// draws nothing: `None`. logits: [draws.len(), n_vocab]
    fn draw(&self, logits: &Self::Buffer, draws: &[Draw<'_>], out: &mut Vec<Option<TokenOut>>);

    /// Whether the device comes to such a draw's answer without the host, whatever the logits are.
    fn draws_alone(&self, _draw: &Draw<'_>, _n_vocab: usize) -> bool {
        false
    }

    /// Begins to draw, where all draws are such. Before the answers are asked for one more pass may be begun, whose
    /// rows may have these tokens (`Rows::drawn`), and its draws.
    fn begin_draws(&self, _logits: &Self::Buffer, _draws: &[Draw<'_>]) -> Option<Drawing> {
        None
    }

    /// Whether the answers are there.
    fn are_drawn(&self, _drawing: &Drawing) -> bool {
        true
    }

    /// Waits for the answers, and gives what `draw` would have given.
    fn drawn(&self, _drawing: &Drawing, draws: &[Draw<'_>], out: &mut Vec<Option<TokenOut>>) {
        out.clear();
        out.resize_with(draws.len(), || None);
    }
}

/// Draws that were begun, and have their answers in one of two places.
#[derive(Debug)]
pub struct Drawing(pub(crate) usize);
