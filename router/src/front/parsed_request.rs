//! A request as a face has parsed it, in the terms of `lockstep.v1`. Knows no face and no replica.

use crate::config::RouterLimits;
use crate::front::grammars;
use crate::front::resume::Resume;
use crate::front::sampling::{AnswerTextSettings, check, random_seed, sorted_unique, work};
use crate::front::stop::Stops;
use crate::front::structure;
use crate::refusal::Refusal;
use crate::replicas::models::text::ModelText;
use crate::replicas::models::truncation::Truncation;
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use types::{CacheHint, CacheSalt, Goal, Request, Sampling, TenantId, Tokens};

/// What a client says about the replica that shall get its request. It changes no answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaPreference {
    /// Requests with the same session belong together.
    pub session: Option<u64>,
    /// A hash of a replica's name: another one gets the request, if one could serve it as soon.
    pub apart_from: Option<u64>,
}

/// A request as a face has parsed it.
pub struct ParsedRequest {
    /// The model's name; empty for the first that is served.
    pub model: String,
    /// Each prompt gets `n_choices` answers.
    pub prompts: Vec<Input>,
    pub n_choices: u32,
    pub first_choice: u32,
    pub purpose: Purpose,
    /// How to cut prompts that are too long. None: they are refused.
    pub truncation: Option<Truncation>,
    /// Whether the tokens that the model expects around a text are added. None: to plain texts, and not to chats.
    pub adds_special: Option<bool>,
    /// The reply repeats the prompts' texts.
    pub echo: bool,
    /// The client watches how far its prompts are.
    pub needs_progress: bool,
    /// Each answer comes with a certificate.
    pub certificate: bool,
    pub priority: i32,
    pub cache_salt: CacheSalt,
    pub cache_hint: CacheHint,
    pub deadline: Option<Instant>,
    pub tenant: TenantId,
    pub placement: ReplicaPreference,
    /// The stream to resume, and how much of it the client has.
    pub resume: Option<Resume>,
    pub body: BodyPermit,
}

/// The memory that a request's text holds until it has become tokens. One permit covers all of its bytes, in however
/// many pieces they came.
pub type BodyPermit = Option<OwnedSemaphorePermit>;

impl Default for ParsedRequest {
    /// Returns a request for one answer to no prompt, with the model's defaults.
    fn default() -> ParsedRequest {
        ParsedRequest {
            model: String::new(),
            prompts: Vec::new(),
            n_choices: 1,
            first_choice: 0,
            purpose: Purpose::Generate(Box::default()),
            truncation: None,
            adds_special: None,
            echo: false,
            needs_progress: false,
            certificate: false,
            priority: 0,
            cache_salt: CacheSalt::default(),
            cache_hint: CacheHint::None,
            deadline: None,
            tenant: TenantId::default(),
            placement: ReplicaPreference::default(),
            resume: None,
            body: None,
        }
    }
}

pub enum Purpose {
    Generate(Box<v1::Sampling>),
    Pool,
    /// One greedy token, with the logprobs of these.
    Read(Tokens),
}

impl Purpose {
    /// Returns the key that decides which of several versions answers: the same for all requests of a session, or else
    /// for all with the same seed. A request without a seed gets one here: `default`, or a random one. Embeddings of
    /// two versions cannot be compared, so all of a tenant's have one key.
    pub(super) fn key(&mut self, session: Option<u64>, tenant: TenantId, default: Option<u64>) -> u64 {
        match self {
            Purpose::Generate(sampling) => {
                let seed = *sampling.seed.get_or_insert_with(|| default.unwrap_or_else(random_seed));
                session.unwrap_or(seed)
            }
            Purpose::Pool | Purpose::Read(_) => tenant.0,
        }
    }

    /// Refuses what exceeds a limit for every model, before any work is done for it.
    pub(super) fn check_sizes(&self, limits: &RouterLimits) -> Result<(), Refusal> {
        let Purpose::Generate(sampling) = self else { return Ok(()) };
        let (n_biased, most) = (sampling.logit_bias.len(), limits.logit_bias_max);
        check("logit_bias", n_biased, n_biased <= most, format!("at most {most} tokens"))?;
        let n_bytes = sampling.structure.as_ref().map_or(0, structure::n_bytes);
        limits.grammar.check_bytes(n_bytes).map_err(|refused| grammars::refusal(&refused))
    }

    /// Takes the structure out of the request: what the answer must be.
    pub(super) fn take_structure(&mut self) -> Option<v1::Structure> {
        match self {
            Purpose::Generate(sampling) => sampling.structure.take(),
            Purpose::Pool | Purpose::Read(_) => None,
        }
    }

    /// Returns the cost of reading the request, in bytes of text.
    pub(super) fn work(&self) -> usize {
        match self {
            Purpose::Generate(sampling) => work(sampling),
            Purpose::Pool | Purpose::Read(_) => 0,
        }
    }

    /// Checks the sampling and fills in the model's defaults. Returns a request without its prompt, and how its answer
    /// becomes text. `seed` is that of a resumed stream.
    pub(super) fn read(
        self,
        of: &ModelText,
        seed: Option<u64>,
        limits: &RouterLimits,
    ) -> Result<(Request, AnswerTextSettings), Refusal> {
        match self {
            Purpose::Generate(mut sampling) => {
                of.check_generates()?;
                sampling.seed = sampling.seed.or(seed);
                of.sampling(*sampling, limits)
            }
            Purpose::Pool => {
                let sampling = Sampling { tokens_max: 1, ..Sampling::default() };
                let request = Request { sampling, goal: Goal::Pool, cache_bypass: true, ..Request::default() };
                Ok((request, no_text()))
            }
            Purpose::Read(tokens) => {
                of.check_generates()?;
                let sampling = Sampling {
                    tokens_max: 1,
                    temperature: 0.0,
                    logprobs: Some(0),
                    logprob_token_ids: sorted_unique(tokens),
                    ..Sampling::default()
                };
                Ok((Request { sampling, ..Request::default() }, no_text()))
            }
        }
    }
}

/// The settings of an answer whose text no client gets.
fn no_text() -> AnswerTextSettings {
    AnswerTextSettings { stops: Arc::new(Stops::new(Vec::new())), show_special: true, own_ends: Tokens::new() }
}

/// Reads a hint for the prefix cache.
pub fn cache_hint(text: &str) -> Result<CacheHint, Refusal> {
    match text {
        "retain" => Ok(CacheHint::Retain),
        "demote" => Ok(CacheHint::Demote),
        other => Err(Refusal::invalid("cache_hint", format!("must be `retain` or `demote`, got `{other}`"))),
    }
}

/// The most bytes of a cache salt.
const CACHE_SALT_BYTES_MAX: usize = 1024;

/// Reads a salt for the prefix cache: only requests with the same one share cached blocks.
pub fn cache_salt(text: &str) -> Result<CacheSalt, Refusal> {
    match text.len() {
        1..=CACHE_SALT_BYTES_MAX => Ok(CacheSalt::of(text)),
        _ => Err(Refusal::invalid("cache_salt", format!("must have 1 to {CACHE_SALT_BYTES_MAX} bytes"))),
    }
}

/// Returns a deadline this many milliseconds from now; zero means none.
pub fn deadline_after(millis: u32) -> Option<Instant> {
    (millis > 0).then(|| Instant::now() + Duration::from_millis(millis.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::v1::structure::Form;

    #[test]
    fn sizes_are_refused_without_a_model() {
        let limits = RouterLimits { logit_bias_max: 2, ..RouterLimits::default() };
        let refused = |sampling: v1::Sampling| {
            let refusal = Purpose::Generate(Box::new(sampling)).check_sizes(&limits).err();
            refusal.map(|refusal| refusal.to_string())
        };
        let biased = |n: u32| v1::Sampling { logit_bias: (0..n).map(|id| (id, 1.0)).collect(), ..Default::default() };
        assert_eq!((refused(biased(2)), Purpose::Pool.check_sizes(&limits)), (None, Ok(())));
        assert_eq!(refused(biased(3)).unwrap(), "logit_bias: must be at most 2 tokens, got 3");
        let lark = |n: usize| {
            let structure = v1::Structure { form: Some(Form::Lark("x".repeat(n))) };
            v1::Sampling { structure: Some(structure), ..Default::default() }
        };
        let most = limits.grammar.bytes_max;
        assert_eq!(refused(lark(most)), None);
        assert!(refused(lark(most + 1)).unwrap().starts_with("structure: a grammar of 1048577 bytes"));
    }
}
