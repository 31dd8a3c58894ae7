//! Guesses of the tokens behind a sequence's log, on the rank that samples. A guess may be wrong: it costs time, and
//! changes no token. Knows logs; nothing of models, blocks or steps.

mod ngrams;

use ngrams::NgramIndex;
use std::sync::Arc;
use types::{DRAFT_ROWS_MAX, NgramLimits, Token};

/// The most tokens that are guessed in one step: more than it can verify, so that many sequences have some.
const GUESSES_PER_STEP_MAX: usize = 8 * DRAFT_ROWS_MAX as usize;

/// How tokens are guessed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuessConfig {
    pub source: GuessSource,
    /// The most tokens that are guessed at a time.
    pub n_max: u16,
}

/// What guesses are taken from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GuessSource {
    /// Nothing is guessed.
    #[default]
    Off,
    /// What followed the last tokens when they stood in the log before.
    Ngrams(NgramLimits),
    /// Known answers, for tests.
    Recalled(Arc<Recalled>),
}

/// Whole logs that will be drawn, guessed with mistakes.
#[derive(Debug, PartialEq, Eq)]
pub struct Recalled {
    pub logs: Vec<Vec<Token>>,
    /// How many of a hundred guesses are wrong.
    pub wrong: u64,
}

impl GuessSource {
    /// Its label in metrics.
    pub(super) fn name(&self) -> &'static str {
        match self {
            GuessSource::Off => "off",
            GuessSource::Ngrams(_) => "ngram",
            GuessSource::Recalled(_) => "recalled",
        }
    }
}

impl GuessConfig {
    /// The most tokens that are guessed for one of `n_draws` logs that a step draws behind: what a step can verify is
    /// limited, and so is a message of what was guessed.
    pub(super) fn n_max_among(&self, n_draws: usize) -> usize {
        let n_max = if self.source == GuessSource::Off { 0 } else { usize::from(self.n_max) };
        n_max.min(DRAFT_ROWS_MAX as usize).min(GUESSES_PER_STEP_MAX / n_draws.max(1))
    }

    /// The most tokens that are guessed in one step.
    pub(super) fn n_max_in_step(&self) -> usize {
        if self.source == GuessSource::Off { 0 } else { GUESSES_PER_STEP_MAX }
    }
}

/// One sequence's guesses. Its memory is allocated when a sequence begins.
#[derive(Debug, Default)]
pub(super) struct Guesses {
    source: GuessSource,
    ngrams: NgramIndex,
    /// The tokens that are guessed behind the log.
    pub tokens: Vec<Token>,
    /// Those that must follow it, as far as that is known.
    way: Vec<Token>,
}

impl Guesses {
    /// For a log that may have `n_tokens_max` tokens. None are guessed where `may_guess` is false.
    pub fn restart(&mut self, config: &GuessConfig, may_guess: bool, n_tokens_max: usize) {
        self.tokens.clear();
        let n_max = usize::from(config.n_max).min(DRAFT_ROWS_MAX as usize);
        self.tokens.reserve(n_max);
        self.way.clear();
        self.way.reserve(n_max);
        self.source = if may_guess { config.source.clone() } else { GuessSource::Off };
        if let GuessSource::Ngrams(limits) = self.source {
            self.ngrams.restart(limits, n_tokens_max);
        }
    }

    /// How many of the drawn tokens, the first ones, had been guessed.
    pub fn n_hit(&self, drawn: impl Iterator<Item = Token>) -> u16 {
        self.tokens.iter().zip(drawn).take_while(|(guess, drawn)| *guess == drawn).count() as u16
    }

    /// Guesses at most `n_max` tokens behind `log`, which has grown since the last call. `only_way` adds those that
    /// must follow it, where that is known.
    pub fn guess(&mut self, log: &[Token], n_max: usize, only_way: impl FnOnce(&mut Vec<Token>)) {
        self.tokens.clear();
        match &self.source {
            GuessSource::Off => {}
            GuessSource::Ngrams(_) => {
                self.ngrams.extend(log);
                self.ngrams.guess(log, n_max, &mut self.tokens);
                self.way.clear();
                only_way(&mut self.way);
                self.way.truncate(n_max);
                if !self.tokens.starts_with(&self.way) {
                    std::mem::swap(&mut self.tokens, &mut self.way);
                }
            }
            GuessSource::Recalled(recalled) => recalled.guess(log, n_max, &mut self.tokens),
        }
    }
}

/// A token that is in every vocabulary that has this one.
fn another(token: Token) -> Token {
    token.checked_sub(1).unwrap_or(1)
}

impl Recalled {
    fn guess(&self, log: &[Token], n_max: usize, out: &mut Vec<Token>) {
        let whole = self.logs.iter().filter(|whole| whole.starts_with(log)).max_by_key(|whole| whole.len());
        let rest = whole.map_or(&[][..], |whole| &whole[log.len()..]);
        let positions = log.len() as u64..;
        // Some are short, and a wrong token is any other.
        let n = n_max.saturating_sub(log.len() % 3);
        let is_wrong = |position: u64| position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0xffff < self.wrong * 655;
        let tokens = rest.iter().zip(positions);
        out.extend(tokens.take(n).map(|(token, position)| if is_wrong(position) { another(*token) } else { *token }));
    }
}
