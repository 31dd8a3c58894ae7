//! How tokens are drawn, to the wire and back: each number within its range. Knows nothing of the sender.

use crate::cluster as wire;
use crate::malformed::{Malformed, check_number, out_of_range};
use types::{Dry, Penalties, Sampling, Tokens, Xtc};

impl From<&Sampling> for wire::Sampling {
    fn from(sampling: &Sampling) -> Self {
        wire::Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            choice: sampling.choice,
            tokens_max: sampling.tokens_max,
            tokens_min: sampling.tokens_min,
            stop: sampling.stop.clone(),
            logprobs: sampling.logprobs.map(u32::from),
            typical_p: (sampling.typical_p != 1.0).then_some(sampling.typical_p),
            top_n_sigma: sampling.top_n_sigma,
            xtc: (sampling.xtc != Xtc::default()).then(|| sampling.xtc.into()),
            penalties: (sampling.penalties != Penalties::default()).then(|| sampling.penalties.into()),
            dry: (sampling.dry != Dry::default()).then(|| (&sampling.dry).into()),
            bias_tokens: sampling.bias.iter().map(|(token, _)| *token).collect(),
            bias: sampling.bias.iter().map(|(_, bias)| *bias).collect(),
            allowed: sampling.allowed.clone(),
            logprob_token_ids: sampling.logprob_token_ids.clone(),
            bad_words: runs_to_wire(&sampling.bad_words),
        }
    }
}

impl TryFrom<wire::Sampling> for Sampling {
    type Error = Malformed;

    fn try_from(sampling: wire::Sampling) -> Result<Self, Malformed> {
        check_number("sampling.temperature", sampling.temperature, Sampling::TEMPERATURE)?;
        check_number("sampling.top_p", sampling.top_p, Sampling::TOP_P)?;
        check_number("sampling.min_p", sampling.min_p, Sampling::MIN_P)?;
        let typical_p = sampling.typical_p.unwrap_or(1.0);
        check_number("sampling.typical_p", typical_p, Sampling::TYPICAL_P)?;
        check_number("sampling.top_n_sigma", sampling.top_n_sigma, Sampling::TOP_N_SIGMA)?;
        let logprobs = match sampling.logprobs {
            Some(n) => Some(u8::try_from(n).map_err(|_| out_of_range("sampling.logprobs", n))?),
            None => None,
        };
        Ok(Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            choice: sampling.choice,
            tokens_max: sampling.tokens_max,
            tokens_min: sampling.tokens_min,
            stop: sampling.stop,
            logprobs,
            typical_p,
            top_n_sigma: sampling.top_n_sigma,
            xtc: sampling.xtc.map_or(Ok(Xtc::default()), Xtc::try_from)?,
            penalties: sampling.penalties.map_or(Ok(Penalties::default()), Penalties::try_from)?,
            dry: sampling.dry.map_or(Ok(Dry::default()), Dry::try_from)?,
            bias: bias_from_wire(sampling.bias_tokens, sampling.bias)?,
            allowed: sampling.allowed,
            logprob_token_ids: sampling.logprob_token_ids,
            bad_words: runs_from_wire("sampling.bad_words", sampling.bad_words)?,
        })
    }
}

impl From<Xtc> for wire::Xtc {
    fn from(xtc: Xtc) -> Self {
        wire::Xtc { probability: xtc.probability, threshold: xtc.threshold }
    }
}

impl TryFrom<wire::Xtc> for Xtc {
    type Error = Malformed;

    fn try_from(xtc: wire::Xtc) -> Result<Self, Malformed> {
        check_number("xtc.probability", xtc.probability, Xtc::PROBABILITY)?;
        check_number("xtc.threshold", xtc.threshold, Xtc::THRESHOLD)?;
        Ok(Xtc { probability: xtc.probability, threshold: xtc.threshold })
    }
}

impl From<Penalties> for wire::Penalties {
    fn from(penalties: Penalties) -> Self {
        let Penalties { presence, frequency, repetition, window } = penalties;
        wire::Penalties { presence, frequency, repetition, window }
    }
}

impl TryFrom<wire::Penalties> for Penalties {
    type Error = Malformed;

    fn try_from(penalties: wire::Penalties) -> Result<Self, Malformed> {
        let wire::Penalties { presence, frequency, repetition, window } = penalties;
        check_number("penalties.presence", presence, Penalties::PRESENCE)?;
        check_number("penalties.frequency", frequency, Penalties::FREQUENCY)?;
        check_number("penalties.repetition", repetition, Penalties::REPETITION)?;
        Ok(Penalties { presence, frequency, repetition, window })
    }
}

impl From<&Dry> for wire::Dry {
    fn from(dry: &Dry) -> Self {
        wire::Dry {
            multiplier: dry.multiplier,
            base: dry.base,
            length_allowed: dry.length_allowed,
            breakers: runs_to_wire(&dry.breakers),
        }
    }
}

impl TryFrom<wire::Dry> for Dry {
    type Error = Malformed;

    fn try_from(dry: wire::Dry) -> Result<Self, Malformed> {
        check_number("dry.multiplier", dry.multiplier, Dry::MULTIPLIER)?;
        check_number("dry.base", dry.base, Dry::BASE)?;
        Ok(Dry {
            multiplier: dry.multiplier,
            base: dry.base,
            length_allowed: dry.length_allowed,
            breakers: runs_from_wire("dry.breakers", dry.breakers)?,
        })
    }
}

fn bias_from_wire(tokens: Tokens, bias: Vec<f32>) -> Result<Vec<(u32, f32)>, Malformed> {
    if tokens.len() != bias.len() {
        return Err(out_of_range("sampling.bias", bias.len()));
    }
    bias.iter().try_for_each(|bias| check_number("sampling.bias", *bias, Sampling::BIAS))?;
    Ok(tokens.into_iter().zip(bias).collect())
}

fn runs_to_wire(runs: &[Tokens]) -> Vec<wire::TokenRun> {
    runs.iter().map(|tokens| wire::TokenRun { tokens: tokens.clone() }).collect()
}

/// Refuses an empty run, which would match everywhere.
fn runs_from_wire(field: &'static str, runs: Vec<wire::TokenRun>) -> Result<Vec<Tokens>, Malformed> {
    let run = |run: wire::TokenRun| if run.tokens.is_empty() { Err(out_of_range(field, 0)) } else { Ok(run.tokens) };
    runs.into_iter().map(run).collect()
}
