//! How the next token is drawn. All of it is data: the same values give the same draw anywhere.

use crate::{Token, Tokens};
use alloc::vec::Vec;
use core::fmt::{self, Display, Formatter};

/// A field at its default changes nothing. The order in which they are applied is documented beside the sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Zero is greedy: the largest logit, ties to the lower id.
    pub temperature: f32,
    /// Keep the k largest; zero keeps all.
    pub top_k: u32,
    /// Keep the fewest tokens that together reach this probability; one keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the largest probability; zero keeps all.
    pub min_p: f32,
    /// Keep the tokens whose surprise is closest to the expected one and that together reach this probability; one
    /// keeps all.
    pub typical_p: f32,
    /// Keep logits at most this many standard deviations below the largest; zero keeps all.
    pub top_n_sigma: f32,
    pub xtc: Xtc,
    pub penalties: Penalties,
    pub dry: Dry,
    /// Values that are added to logits.
    pub bias: Vec<(Token, f32)>,
    /// If not empty, only these tokens are drawn.
    pub allowed: Tokens,
    /// Sequences that the output may not contain.
    pub bad_words: Vec<Tokens>,
    pub seed: u64,
    /// Which of `n` choices of one prompt this is; part of the draw.
    pub choice: u32,
    /// Tokens to generate at most, counted from the end of the prompt, so that a replay counts alike.
    pub tokens_max: u32,
    /// Stop tokens are not drawn before this many tokens were generated.
    pub tokens_min: u32,
    /// Generation ends with one of these, which is part of the output. The model's own end tokens are among them unless
    /// the client excludes them.
    pub stop: Tokens,
    /// Requests the logprob of the drawn token and of this many of the most likely ones beside it.
    pub logprobs: Option<u8>,
    /// If not empty, the requested logprobs are those of the drawn token and these, and not of the most likely ones.
    pub logprob_token_ids: Tokens,
}

/// Exclude top choices: with `probability`, drops all but the least likely of the tokens that reach `threshold`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xtc {
    /// Zero: never.
    pub probability: f32,
    pub threshold: f32,
}

/// Penalties for tokens that the log already has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Subtracted once from each token that the output has.
    pub presence: f32,
    /// Subtracted as often as the output has the token.
    pub frequency: f32,
    /// Divides the positive logits of tokens in the prompt or output, and multiplies the negative ones; one changes
    /// nothing.
    pub repetition: f32,
    /// Where it is not zero, all three look at the last so many tokens of prompt and output, and at nothing else.
    pub window: u32,
}

/// Don't repeat yourself: a token that would make a repetition of the log longer loses
/// `multiplier * base ^ (length - length_allowed)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Zero: never.
    pub multiplier: f32,
    pub base: f32,
    /// The shortest repetition that is penalised.
    pub length_allowed: u32,
    /// No repetition reaches across one of these.
    pub breakers: Vec<Tokens>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc: Xtc::default(),
            penalties: Penalties::default(),
            dry: Dry::default(),
            bias: Vec::new(),
            allowed: Tokens::new(),
            bad_words: Vec::new(),
            seed: 0,
            choice: 0,
            tokens_max: 16,
            tokens_min: 0,
            stop: Tokens::new(),
            logprobs: None,
            logprob_token_ids: Tokens::new(),
        }
    }
}

impl Default for Xtc {
    fn default() -> Self {
        Xtc { probability: 0.0, threshold: 0.1 }
    }
}

impl Default for Penalties {
    fn default() -> Self {
        Penalties { presence: 0.0, frequency: 0.0, repetition: 1.0, window: 0 }
    }
}

impl Default for Dry {
    fn default() -> Self {
        Dry { multiplier: 0.0, base: 1.75, length_allowed: 2, breakers: Vec::new() }
    }
}

/// The numbers that a parameter may be. NaN is never one of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NumberRange {
    least: f32,
    most: f32,
    excludes_least: bool,
}

impl NumberRange {
    const fn new(least: f32, most: f32) -> NumberRange {
        NumberRange { least, most, excludes_least: false }
    }

    const fn above(least: f32, most: f32) -> NumberRange {
        NumberRange { least, most, excludes_least: true }
    }

    /// Returns the range that includes its least number too.
    pub const fn with_least(self) -> NumberRange {
        NumberRange { excludes_least: false, ..self }
    }

    pub fn contains(&self, number: f32) -> bool {
        (self.least..=self.most).contains(&number) && !(self.excludes_least && number == self.least)
    }
}

impl Display for NumberRange {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let NumberRange { least, most, excludes_least } = self;
        match excludes_least {
            false => write!(out, "{least} to {most}"),
            true => write!(out, "above {least} and at most {most}"),
        }
    }
}

impl Sampling {
    pub const TEMPERATURE: NumberRange = NumberRange::new(0.0, 2.0);
    pub const TOP_P: NumberRange = NumberRange::above(0.0, 1.0);
    pub const MIN_P: NumberRange = NumberRange::new(0.0, 1.0);
    pub const TYPICAL_P: NumberRange = NumberRange::above(0.0, 1.0);
    pub const TOP_N_SIGMA: NumberRange = NumberRange::new(0.0, 1000.0);
    pub const BIAS: NumberRange = NumberRange::new(-100.0, 100.0);
}

impl Xtc {
    pub const PROBABILITY: NumberRange = NumberRange::new(0.0, 1.0);
    pub const THRESHOLD: NumberRange = NumberRange::new(0.0, 1.0);
}

impl Penalties {
    pub const PRESENCE: NumberRange = NumberRange::new(-2.0, 2.0);
    pub const FREQUENCY: NumberRange = NumberRange::new(-2.0, 2.0);
    pub const REPETITION: NumberRange = NumberRange::new(0.01, 100.0);
}

impl Dry {
    pub const MULTIPLIER: NumberRange = NumberRange::new(0.0, 100.0);
    pub const BASE: NumberRange = NumberRange::new(1.0, 100.0);
}

/// The most bytes that an entry of a list takes in a frame: a number of 32 bits and its prefix.
pub(crate) const TOKEN_BYTES: usize = 5;
const BIAS_BYTES: usize = 16;
const RUN_BYTES: usize = 32;

impl Sampling {
    /// The most bytes that the lists take in a frame, and about as much in memory. A client chooses their length.
    pub fn lists_bytes(&self) -> usize {
        let runs = self.bad_words.iter().chain(&self.dry.breakers);
        let in_runs: usize = runs.map(|run| RUN_BYTES + run.len() * TOKEN_BYTES).sum();
        in_runs
            + self.bias.len() * BIAS_BYTES
            + (self.allowed.len() + self.stop.len() + self.logprob_token_ids.len()) * TOKEN_BYTES
    }

    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    pub fn is_stop(&self, token: Token) -> bool {
        self.stop.contains(&token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_range_has_its_ends_and_no_nan() {
        let check = |range: NumberRange, text: &str, inside: &[f32], outside: &[f32]| {
            assert_eq!(range.to_string(), text);
            assert!(inside.iter().all(|number| range.contains(*number)), "{text}");
            assert!(outside.iter().chain(&[f32::NAN, f32::INFINITY]).all(|number| !range.contains(*number)), "{text}");
        };
        check(Sampling::TEMPERATURE, "0 to 2", &[0.0, 2.0], &[-0.1, 2.1]);
        check(Penalties::REPETITION, "0.01 to 100", &[0.01, 100.0], &[0.0]);
        check(Sampling::TYPICAL_P, "above 0 and at most 1", &[f32::MIN_POSITIVE, 1.0], &[0.0, 1.1]);
        check(Sampling::TOP_P.with_least(), "0 to 1", &[0.0, 1.0], &[-0.1, 1.1]);
    }
}
