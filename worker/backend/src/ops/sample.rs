//! Draws from logits.

use super::Memory;
use types::{Sampling, Token, TokenOut};

/// One row's draw: everything that it may depend on, besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub sampling: &'a Sampling,
    /// The log up to the token to be drawn: prompt, then output.
    pub prompt: &'a [Token],
    pub output: &'a [Token],
    /// Set where nothing is drawn: the row's token is known, and its logprob is requested.
    pub score: Option<ScoreRequest>,
    pub mask: DrawMask<'a>,
}

/// The tokens that a grammar allows for a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawMask<'a> {
    /// There is no grammar.
    Open,
    /// A bit for each token, the lowest bit of the first word for token 0. Tokens behind the last word are not allowed.
    Of(&'a [u32]),
    /// Not known yet: nothing is drawn.
    Late,
}

impl DrawMask<'_> {
    /// The token that is allowed, if it is the only one.
    pub fn only(self) -> Option<Token> {
        let DrawMask::Of(words) = self else { return None };
        let mut some = words.iter().zip(0u32..).filter(|(word, _)| **word != 0);
        let (word, at) = some.next()?;
        (word.is_power_of_two() && some.next().is_none()).then(|| at * 32 + word.trailing_zeros())
    }
}

/// Why a row has no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawError {
    /// It holds a NaN or +infinity, or no number at all.
    NotNumbers,
    /// The mask and bans leave no token.
    NothingLeft,
    /// Its mask is not known yet.
    Late,
}

#[derive(Clone, Copy, Debug)]
pub struct ScoreRequest {
    pub token: Token,
    /// How many of the most likely tokens are returned beside it.
    pub n_top: u8,
}

impl Draw<'_> {
    /// The drawn token's position in the whole log. It is part of the noise, so a replay draws the same token.
    pub fn position(&self) -> u32 {
        (self.prompt.len() + self.output.len()) as u32
    }

    /// Tokens generated so far: stop tokens are not drawn before `tokens_min`.
    pub fn n_output(&self) -> u32 {
        self.output.len() as u32
    }
}

pub trait Sample: Memory {
    /// Draws one token from each row of logits into `out`, which is cleared first. logits: [draws.len(), n_vocab]
    fn draw(&self, logits: &Self::Buffer, draws: &[Draw<'_>], out: &mut Vec<Result<TokenOut, DrawError>>);

    /// Whether the device can answer this draw without the host, whatever the logits are.
    fn can_draw_alone(&self, _draw: &Draw<'_>, _n_vocab: usize) -> bool {
        false
    }

    /// Begins the draws, if the device can answer all of them. Before the answers are read one more pass and its draws
    /// may begin, whose rows may use these tokens (`Rows::drawn`).
    fn begin_draws(&self, _logits: &Self::Buffer, _draws: &[Draw<'_>]) -> Option<DrawsInFlight> {
        None
    }

    /// Whether the answers are ready.
    fn are_drawn(&self, _drawing: &DrawsInFlight) -> bool {
        true
    }

    /// Waits for the answers, which are those that `draw` would give.
    fn collect_draws(&self, _drawing: &DrawsInFlight, draws: &[Draw<'_>], out: &mut Vec<Result<TokenOut, DrawError>>) {
        out.clear();
        out.resize_with(draws.len(), || Err(DrawError::NotNumbers));
    }
}

/// Draws in progress, with the index of their result buffer, one of two.
#[derive(Debug)]
pub struct DrawsInFlight(pub(crate) usize);
