//! Guesses of the tokens behind a sequence's log, on the sampling rank. A wrong guess costs time, and changes no token.
//! Works on logs; has no knowledge of models, blocks or steps.

mod expected;
mod ngrams;
mod recent;
mod times;
mod worth;

pub(super) use recent::RecentAnswers;
pub use times::LearnedDraftCost;
pub use worth::DraftCost;

use expected::ExpectedTokens;
use ngrams::NgramIndex;
use std::path::PathBuf;
use std::sync::Arc;
use types::{CacheOwner, DRAFT_ROWS_MAX, NgramLimits, Request, RequestId, Token};
use worth::{AcceptanceRate, DraftBackoff};

/// The most tokens guessed in one step: more than a step can verify, so that many sequences get some.
const GUESSES_PER_STEP_MAX: usize = 8 * DRAFT_ROWS_MAX as usize;

/// How tokens are guessed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuessConfig {
    pub source: GuessSource,
    /// The most tokens guessed at a time.
    pub n_max: u16,
    /// A smaller model that guesses where the source has no guess, or a worse one.
    pub draft_model: Option<DraftModelConfig>,
    /// The model's own layer that predicts one token further guesses like a draft model.
    pub mtp: Option<MtpConfig>,
}

/// A smaller model of the same vocabulary, held whole by the sampling rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftModelConfig {
    pub path: PathBuf,
    /// Memory for its KV cache.
    pub kv_bytes: u64,
    /// The costs from which the number of guesses follows. None: always as many guesses as allowed.
    pub cost: Option<DraftCost>,
    /// Whether the costs give way to measured ones.
    pub learns_cost: bool,
}

/// The layer of the model that predicts one token further, held whole by the sampling rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtpConfig {
    /// Memory for its KV cache.
    pub kv_bytes: u64,
    /// The costs from which the number of guesses follows. None: always as many guesses as allowed.
    pub cost: Option<DraftCost>,
    /// Whether the costs give way to measured ones.
    pub learns_cost: bool,
}

/// The origin of the guesses behind a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Guesser {
    #[default]
    Source,
    /// A grammar that allows only one continuation.
    Grammar,
    DraftModel,
    Mtp,
}

/// The source of guesses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GuessSource {
    /// No guesses.
    #[default]
    Off,
    /// The tokens that followed an earlier occurrence of the last tokens, in the log or in what the client expects.
    Ngrams(NgramLimits),
    /// Known answers, for tests.
    Recalled(Arc<RecalledLogs>),
}

/// Complete logs that will be drawn; some guesses from them are wrong on purpose.
#[derive(Debug, PartialEq, Eq)]
pub struct RecalledLogs {
    pub logs: Vec<Vec<Token>>,
    /// How many of a hundred guesses are wrong.
    pub wrong: u64,
}

impl GuessSource {
    /// Returns the source's label in metrics.
    pub(super) fn name(&self) -> &'static str {
        match self {
            GuessSource::Off => "off",
            GuessSource::Ngrams(_) => "ngram",
            GuessSource::Recalled(_) => "recalled",
        }
    }
}

impl GuessConfig {
    /// Returns the most tokens to guess for one of `n_draws` logs that a step draws behind: both the rows that a step
    /// can verify and the message of guesses are limited.
    pub(super) fn n_max_among(&self, n_draws: usize) -> usize {
        let n_max = if self.is_off() { 0 } else { usize::from(self.n_max) };
        n_max.min(DRAFT_ROWS_MAX as usize).min(GUESSES_PER_STEP_MAX / n_draws.max(1))
    }

    /// Returns the most tokens to guess in one step.
    pub(super) fn n_max_in_step(&self) -> usize {
        if self.is_off() { 0 } else { GUESSES_PER_STEP_MAX }
    }

    fn is_off(&self) -> bool {
        self.source == GuessSource::Off && !self.has_model()
    }

    fn has_model(&self) -> bool {
        self.draft_model.is_some() || self.mtp.is_some()
    }

    /// Switches all guessers off.
    pub(super) fn switch_off(&mut self) {
        (self.source, self.draft_model, self.mtp) = (GuessSource::Off, None, None);
    }

    /// Returns the guesser's label in metrics.
    pub(super) fn name_of(&self, guesser: Guesser) -> &'static str {
        match guesser {
            Guesser::Source => self.source.name(),
            Guesser::Grammar => "grammar",
            Guesser::DraftModel => "draft_model",
            Guesser::Mtp => "mtp",
        }
    }
}

/// A sequence for which a draft model is to guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuessRequest {
    pub id: RequestId,
    /// The most tokens to guess.
    pub n_max: usize,
}

/// One sequence's guesses. Their memory is allocated when the sequence begins.
#[derive(Debug, Default)]
pub(super) struct SequenceGuesses {
    source: GuessSource,
    ngrams: NgramIndex,
    expected: ExpectedTokens,
    /// The client that may find this answer among its recent ones.
    pub owner: Option<CacheOwner>,
    /// The tokens guessed behind the log.
    pub tokens: Vec<Token>,
    pub guesser: Guesser,
    /// The tokens that must follow the log, as far as they are known; or the guesses that lost against the draft
    /// model's.
    others: Vec<Token>,
    /// Whether `others` are the source's guesses.
    is_outdone: bool,
    of_source: AcceptanceRate,
    of_model: AcceptanceRate,
    /// None where no draft model guesses.
    pauses: Option<DraftBackoff>,
}

/// How one sequence may guess.
#[derive(Clone, Copy)]
pub(super) struct GuessRules<'a> {
    pub config: &'a GuessConfig,
    /// False for a sequence that guesses nothing.
    pub may_guess: bool,
    /// None where no answer may outlive its request.
    pub recent: Option<&'a RecentAnswers>,
}

impl SequenceGuesses {
    /// Restarts for a log of up to `n_tokens_max` tokens.
    pub fn restart(&mut self, rules: &GuessRules<'_>, request: &Request, n_tokens_max: usize) {
        let GuessRules { config, may_guess, recent } = *rules;
        let n_max = usize::from(config.n_max).min(DRAFT_ROWS_MAX as usize);
        for tokens in [&mut self.tokens, &mut self.others] {
            tokens.clear();
            tokens.reserve(n_max);
        }
        (self.guesser, self.is_outdone) = (Guesser::Source, false);
        (self.of_source, self.of_model) = (AcceptanceRate::of_source(), AcceptanceRate::of_model());
        self.source = if may_guess { config.source.clone() } else { GuessSource::Off };
        self.pauses = (may_guess && config.has_model()).then(DraftBackoff::default);
        self.owner = None;
        if let GuessSource::Ngrams(limits) = self.source {
            self.owner = recent.and_then(|_| recent::owner_of(request));
            let recent = recent.map_or(&[][..], |recent| recent.of(self.owner));
            self.ngrams.restart(limits, self.expected.restart(request, recent, n_tokens_max));
        }
    }

    /// Returns how many of the first drawn tokens were guessed, and notes it for their guesser.
    pub fn n_hit(&mut self, drawn: impl Iterator<Item = Token> + Clone) -> u16 {
        let n_drawn = drawn.clone().count();
        let hits =
            |tokens: &[Token]| tokens.iter().zip(drawn.clone()).take_while(|(guess, drawn)| *guess == drawn).count();
        let n_hit = hits(&self.tokens);
        let n_tried = self.tokens.len().min(n_drawn);
        match self.guesser {
            Guesser::Source => self.of_source.note(n_tried, n_hit),
            Guesser::Grammar => {}
            Guesser::DraftModel | Guesser::Mtp => self.of_model.note(n_tried, n_hit),
        }
        if std::mem::take(&mut self.is_outdone) {
            self.of_source.note(self.others.len().min(n_drawn), hits(&self.others));
        }
        n_hit as u16
    }

    /// Guesses at most `n_max` tokens behind `log`, which has grown since the last call. `only_way` adds the tokens
    /// that must follow the log, where they are known.
    pub fn guess(&mut self, log: &[Token], n_max: usize, only_way: impl FnOnce(&mut Vec<Token>)) {
        self.tokens.clear();
        (self.guesser, self.is_outdone) = (Guesser::Source, false);
        match &self.source {
            GuessSource::Off if self.pauses.is_none() => return,
            GuessSource::Off => {}
            GuessSource::Ngrams(_) => {
                let known = self.expected.joined_with(log);
                self.ngrams.extend(known);
                self.ngrams.guess(known, n_max, &mut self.tokens);
                let expected = self.expected.next(log);
                if !expected.is_empty() {
                    self.tokens.clear();
                    self.tokens.extend(expected.iter().take(n_max));
                }
            }
            GuessSource::Recalled(recalled) => return recalled.guess(log, n_max, &mut self.tokens),
        }
        self.others.clear();
        only_way(&mut self.others);
        self.others.truncate(n_max);
        if !self.tokens.starts_with(&self.others) {
            std::mem::swap(&mut self.tokens, &mut self.others);
            (self.guesser, self.is_outdone) = (Guesser::Grammar, true);
        }
    }

    /// Returns how many tokens the draft model should guess, at most `n_max`, in a step that draws behind `n_draws`
    /// logs. Returns zero if the present guesses hold more often.
    pub fn n_model_guesses(&mut self, cost: Option<DraftCost>, n_max: usize, n_draws: usize) -> usize {
        let Some(pauses) = &mut self.pauses else { return 0 };
        let is_guessed = match self.guesser {
            Guesser::Grammar | Guesser::DraftModel | Guesser::Mtp => true,
            Guesser::Source => !self.tokens.is_empty() && self.of_source >= self.of_model,
        };
        if is_guessed { 0 } else { pauses.n_worth(cost, self.of_model, n_max, n_draws) }
    }

    /// Takes the guesses of a model.
    pub fn set_model_guesses(&mut self, guessed: &[Token], by: Guesser) {
        if !guessed.is_empty() {
            std::mem::swap(&mut self.tokens, &mut self.others);
            self.tokens.clear();
            self.tokens.extend_from_slice(guessed);
            (self.guesser, self.is_outdone) = (by, true);
        }
    }
}

/// Returns another token that is in every vocabulary that has this one.
fn another(token: Token) -> Token {
    token.checked_sub(1).unwrap_or(1)
}

impl RecalledLogs {
    fn guess(&self, log: &[Token], n_max: usize, out: &mut Vec<Token>) {
        let whole = self.logs.iter().filter(|whole| whole.starts_with(log)).max_by_key(|whole| whole.len());
        let rest = whole.map_or(&[][..], |whole| &whole[log.len()..]);
        let positions = log.len() as u64..;
        // Some guesses are short, and a wrong token is any other token.
        let n = n_max.saturating_sub(log.len() % 3);
        let is_wrong = |position: u64| position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0xffff < self.wrong * 655;
        let tokens = rest.iter().zip(positions);
        out.extend(tokens.take(n).map(|(token, position)| if is_wrong(position) { another(*token) } else { *token }));
    }
}
