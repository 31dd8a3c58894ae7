//! How the next token is drawn. All of it is data: the same values give the same draw anywhere.

use crate::{Token, Tokens};

#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Zero is greedy: the largest logit, ties to the lower id.
    pub temperature: f32,
    /// Keep the k largest; zero keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities reach this; one keeps all.
    pub top_p: f32,
    /// Keep what is at least this fraction of the largest probability; zero keeps all.
    pub min_p: f32,
    pub seed: u64,
    /// Which of `n` choices of one prompt this is; part of the draw.
    pub choice: u32,
    /// Tokens to generate at most, counted from the end of the prompt, so that a replay counts alike.
    pub tokens_max: u32,
    /// Stop tokens are not drawn before so many were generated.
    pub tokens_min: u32,
    /// Generation ends with one of these, which is part of the output. The model's own end tokens are among them
    /// unless the client asked to ignore them.
    pub stop: Tokens,
    /// The logprob of the drawn token, and of so many of the most likely beside it.
    pub logprobs: Option<u8>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            tokens_max: 16,
            tokens_min: 0,
            stop: Tokens::new(),
            logprobs: None,
        }
    }
}

impl Sampling {
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    pub fn is_stop(&self, token: Token) -> bool {
        self.stop.contains(&token)
    }
}
