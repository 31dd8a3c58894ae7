//! Sampling parameters: checks the client's, and fills in the model's defaults for the rest. Words become tokens here,
//! because replicas know no text.

use crate::config::RouterLimits;
use crate::front::parameters::NUMBERS;
use crate::front::sampling_defaults::default_sampling;
use crate::front::stop::Stops;
use crate::refusal::Refusal;
use crate::replicas::models::text::ModelText;
use proto::v1;
use std::fmt::Display;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use types::{Dry, Goal, Penalties, Request, Sampling, Tokens};

/// The strings at which repetitions end, unless the request gives others.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// How a request's tokens become text.
#[derive(Clone)]
pub struct AnswerTextSettings {
    pub stops: Arc<Stops>,
    /// Whether special tokens are part of the text.
    pub show_special: bool,
    /// The model's own end tokens, where answers end at them.
    pub own_ends: Tokens,
}

impl ModelText {
    /// Returns a request with its sampling and its goal, as far as they do not depend on a prompt, and how it becomes
    /// text.
    pub(crate) fn sampling(
        &self,
        requested: v1::Sampling,
        limits: &RouterLimits,
    ) -> Result<(Request, AnswerTextSettings), Refusal> {
        let tokens_max = requested.max_tokens.unwrap_or(u32::MAX);
        check("max_tokens", tokens_max, tokens_max > 0, "at least 1")?;
        check("min_tokens", requested.min_tokens, requested.min_tokens <= tokens_max, "at most max_tokens")?;
        self.check_ids("stop_token_ids", &requested.stop_token_ids)?;
        self.check_ids("allowed_token_ids", &requested.allowed_token_ids)?;
        self.check_logprob_ids(&requested, limits)?;
        let stops = stops(&requested, limits)?;
        let numbers = self.numbers(&requested)?;
        let sampling = Sampling {
            dry: self.dry(numbers.dry, requested.dry.as_ref(), limits)?,
            bias: self.bias(&requested)?,
            bad_words: self.words("bad_words", &requested.bad_words, limits)?,
            seed: requested.seed.unwrap_or_else(random_seed),
            tokens_max,
            tokens_min: requested.min_tokens,
            logprobs: n_logprobs("logprobs", requested.logprobs, limits)?,
            logprob_token_ids: sorted_unique(requested.logprob_token_ids.clone()),
            ..numbers
        };
        let goal = match n_logprobs("prompt_logprobs", requested.prompt_logprobs, limits)? {
            Some(top_n) => Goal::Score { top_n },
            None => Goal::Generate,
        };
        let own_ends = if requested.ignore_eos { Tokens::new() } else { self.spec.eos.clone() };
        let stop = sorted_unique([requested.stop_token_ids.as_slice(), &own_ends].concat());
        let sampling = Sampling { stop, allowed: sorted_unique(requested.allowed_token_ids), ..sampling };
        let cache_bypass = goal != Goal::Generate;
        let predicted = self.predicted(&requested.prediction)?;
        let request = Request { sampling, goal, cache_bypass, predicted, ..Request::default() };
        Ok((request, AnswerTextSettings { stops, show_special: requested.show_special, own_ends }))
    }

    /// Each token with a requested logprob costs as much as one of the most likely ones.
    fn check_logprob_ids(&self, requested: &v1::Sampling, limits: &RouterLimits) -> Result<(), Refusal> {
        const FIELD: &str = "logprob_token_ids";
        let (ids, ids_max) = (&requested.logprob_token_ids, limits.logprobs_max as usize);
        if !ids.is_empty() && requested.logprobs.is_none() {
            return Err(Refusal::invalid(FIELD, "needs `logprobs`"));
        }
        check(FIELD, ids.len(), ids.len() <= ids_max, format!("at most {ids_max} tokens"))?;
        self.check_ids(FIELD, ids)
    }

    /// Returns the numbers of a request, each within its range: the client's, or else the defaults.
    fn numbers(&self, requested: &v1::Sampling) -> Result<Sampling, Refusal> {
        let mut sampling = default_sampling(requested.defaults, &self.defaults, &self.card);
        for parameter in NUMBERS {
            let number = (parameter.requested)(requested).unwrap_or_else(|| (parameter.get)(&sampling));
            match parameter.missed_range(number) {
                Some(range) => {
                    return Err(Refusal::invalid(parameter.name, format!("must be {range}, got {number}")));
                }
                None => (parameter.set)(&mut sampling, number),
            }
        }
        // A zero mass leaves the likeliest token, as any small mass does.
        sampling.top_p = sampling.top_p.max(f32::MIN_POSITIVE);
        let penalties = &mut sampling.penalties;
        let window = requested.penalty_window.unwrap_or(penalties.window);
        // If nothing is penalised, no window changes anything, and equal requests stay equal.
        penalties.window = 0;
        if *penalties != Penalties::default() {
            penalties.window = window;
        }
        Ok(sampling)
    }

    /// Returns the parameters without those that have no effect, and the sequences at which repetitions end.
    fn dry(&self, numbers: Dry, requested: Option<&v1::Dry>, limits: &RouterLimits) -> Result<Dry, Refusal> {
        if numbers.multiplier == 0.0 {
            return Ok(Dry::default());
        }
        let own = BREAKERS.map(str::to_owned);
        let breakers = requested.map_or(&[][..], |dry| &dry.sequence_breakers);
        let breakers = if breakers.is_empty() { &own } else { breakers };
        Ok(Dry { breakers: self.words("dry_sequence_breakers", breakers, limits)?, ..numbers })
    }

    /// Returns the bias sorted by token, so that equal requests are equal.
    fn bias(&self, requested: &v1::Sampling) -> Result<Vec<(u32, f32)>, Refusal> {
        let mut all: Vec<(u32, f32)> = requested.logit_bias.iter().map(|(token, bias)| (*token, *bias)).collect();
        all.sort_unstable_by_key(|(token, _)| *token);
        let tokens: Tokens = all.iter().map(|(token, _)| *token).collect();
        self.check_ids("logit_bias", &tokens)?;
        let range = Sampling::BIAS;
        match all.iter().find(|(_, bias)| !range.contains(*bias)) {
            Some((token, bias)) => {
                Err(Refusal::invalid("logit_bias", format!("must be {range}, got {bias} for {token}")))
            }
            None => Ok(all),
        }
    }

    /// Returns each word's tokens at the start of a text, and also after a space if the first token differs there.
    fn words(&self, field: &'static str, words: &[String], limits: &RouterLimits) -> Result<Vec<Tokens>, Refusal> {
        check_many(field, words, limits)?;
        let mut runs = Vec::new();
        for word in words {
            let first = self.word(field, word)?;
            let spaced = self.word(field, &format!(" {}", word.trim_start()))?;
            let is_another = spaced.len() == first.len() && spaced.first() != first.first();
            runs.push(first);
            runs.extend(is_another.then_some(spaced));
        }
        Ok(runs)
    }

    fn predicted(&self, text: &str) -> Result<Tokens, Refusal> {
        let tokens = self.tokenizer.encode(text, false);
        tokens.map_err(|error| Refusal::invalid("prediction", format!("cannot be tokenized: {error}")))
    }

    fn word(&self, field: &'static str, word: &str) -> Result<Tokens, Refusal> {
        let tokens = self.tokenizer.encode(word, false);
        let tokens = tokens.map_err(|error| Refusal::invalid(field, format!("cannot be tokenized: {error}")))?;
        if tokens.is_empty() { Err(Refusal::invalid(field, "a word has no token")) } else { Ok(tokens) }
    }
}

/// Removes duplicates: a list is no longer than the vocabulary, however often a client repeats itself.
pub(super) fn sorted_unique(mut tokens: Tokens) -> Tokens {
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Returns the cost of reading it, in bytes of text: each word is a text of its own, and each byte of a stop string is
/// a state of the automaton.
pub fn work(requested: &v1::Sampling) -> usize {
    const WORD_BYTES: usize = 256;
    const STATE_BYTES: usize = 8;
    let breakers = requested.dry.iter().flat_map(|dry| &dry.sequence_breakers);
    let words = requested.bad_words.iter().chain(breakers).map(|word| WORD_BYTES + word.len());
    let stops = requested.stop.iter().map(|stop| STATE_BYTES * stop.len());
    words.chain(stops).chain([requested.prediction.len()]).sum()
}

/// How many likely tokens are reported beside each, if any.
fn n_logprobs(field: &'static str, n: Option<u32>, limits: &RouterLimits) -> Result<Option<u8>, Refusal> {
    let Some(n) = n else { return Ok(None) };
    check(field, n, n <= limits.logprobs_max, format!("at most {}", limits.logprobs_max))?;
    Ok(u8::try_from(n).ok())
}

fn stops(requested: &v1::Sampling, limits: &RouterLimits) -> Result<Arc<Stops>, Refusal> {
    check_many("stop", &requested.stop, limits)?;
    Ok(Arc::new(Stops::new(requested.stop.clone()).included(requested.include_stop)))
}

fn check_many(field: &'static str, strings: &[String], limits: &RouterLimits) -> Result<(), Refusal> {
    let (n, n_bytes) = (strings.len(), strings.iter().map(String::len).sum::<usize>());
    check(field, n, n <= limits.stop_strings_max, format!("at most {} strings", limits.stop_strings_max))?;
    check(field, n_bytes, n_bytes <= limits.stop_bytes_max, format!("at most {} bytes", limits.stop_bytes_max))?;
    if strings.iter().any(String::is_empty) {
        return Err(Refusal::invalid(field, "must not contain an empty string"));
    }
    Ok(())
}

/// Checks a value. NaN is in no range.
pub(super) fn check(field: &'static str, value: impl Display, holds: bool, must: impl Display) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::invalid(field, format!("must be {must}, got {value}"))) }
}

/// A random number below 2^53, so that a client in any language can send it back unchanged.
pub fn random_seed() -> u64 {
    // The standard library's only source of random bits: keys from the system, different for each.
    RandomState::new().hash_one(std::time::Instant::now()) >> 11
}

pub fn random_nonce() -> u32 {
    random_seed() as u32
}
