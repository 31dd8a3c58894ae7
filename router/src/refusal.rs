//! Why a request is not served, or not to its end, in the one type that all folders share. Knows neither HTTP nor gRPC;
//! each face words it differently.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;
use types::GrammarFault;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{field}: {message}")]
    Invalid { field: Cow<'static, str>, message: String },
    #[error(
        "the prompt has {n_prompt} tokens, which is too many for a context of {context}. Please reduce the length of \
         the input prompt"
    )]
    TooLong { n_prompt: usize, context: u32 },
    #[error("the prompt has {n_prompt} tokens, and the replica cannot hold the request: {message}")]
    TooLarge { n_prompt: usize, message: String },
    #[error("the request needs an API key: send `Authorization: Bearer KEY`")]
    NoKey,
    #[error("this server does not know the API key")]
    UnknownKey,
    #[error("the client's certificate has expired or is no longer accepted: connect again with a valid one")]
    CertificateEnded,
    #[error("this server does not serve the model `{model}`; {}", join_names(served))]
    NoModel { model: String, served: Vec<String> },
    #[error("too many requests are waiting; try again later")]
    Full { retry_after: Duration },
    #[error("this key's tenant has reached its limit of {limit}; try again in {} s", retry_after.as_secs())]
    Limited { limit: Limit, retry_after: Duration },
    #[error("the first token is expected in {} s, after the request's deadline; try again later", wait.as_secs())]
    TooLate { wait: Duration, retry_after: Duration },
    #[error("no replica is ready to serve{}", because(why))]
    NotReady { retry_after: Duration, why: String },
    #[error("the server is draining and accepts no new requests")]
    Draining { retry_after: Duration },
    #[error("the deadline has passed")]
    Deadline,
    #[error("the replica was lost, and no replica with the same tokens became available")]
    Lost,
    #[error(
        "the replica `{replica}` cannot continue the request: {why}; no replica with the same tokens became available \
         in {} s, the limit of --failover-max; try again later, or repair the replica",
        waited.as_secs_f32().round()
    )]
    Away { replica: String, why: String, waited: Duration, retry_after: Duration },
    #[error("the resume handle {0}")]
    NoResume(#[from] ResumeError),
    #[error(
        "the request lost its replica {times} times before its first token: as a possible cause, it is not retried"
    )]
    LostTooOften { times: u32 },
    #[error("the client read the stream too slowly: {unread} steps are unread")]
    SlowReader { unread: usize },
    #[error("the grammar and the request's other constraints allow no token at position {position} of the answer")]
    NoToken { position: u32 },
    #[error("the grammar cannot be applied from position {position} of the answer: {}", fault_text(*fault))]
    Grammar { position: u32, fault: GrammarFault },
    #[error("the request could not be computed: {message}")]
    Failed { message: String },
}

fn fault_text(fault: GrammarFault) -> &'static str {
    match fault {
        GrammarFault::Late => "the replica did not compute the token mask in time; try again later",
        GrammarFault::TooComplex => "it exceeds the limit on a grammar's work or memory",
        GrammarFault::Broken => "the model's tokens cannot continue it, or the grammar engine failed",
    }
}

/// Which limit refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Requests(u32),
    Tokens(u32),
    Concurrent(u32),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Requests(max) => write!(f, "{max} requests a minute"),
            Limit::Tokens(max) => write!(f, "{max} tokens a minute"),
            Limit::Concurrent(max) => write!(f, "{max} requests at once"),
        }
    }
}

/// Why a stream cannot be resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResumeError {
    #[error("is not a resume handle with positions")]
    Garbled,
    #[error("was not made by this cluster for this client, or was changed")]
    Forged,
    #[error("belongs to another request: repeat the original request with the same fields")]
    OtherRequest,
    #[error("belongs to a request with {expected} choices, but has positions of {got}")]
    OtherChoices { expected: usize, got: usize },
    #[error("belongs to another policy: no replica of this server produces the same tokens")]
    OtherPolicy,
    #[error("has position {position}, which is beyond the end of the stream at {end}")]
    Beyond { position: u32, end: u32 },
}

impl ResumeError {
    /// From a small closed set, for programs.
    pub fn label(self) -> &'static str {
        match self {
            ResumeError::Garbled => "resume_garbled",
            ResumeError::Forged => "resume_forged",
            ResumeError::OtherRequest | ResumeError::OtherChoices { .. } => "resume_other_request",
            ResumeError::OtherPolicy => "resume_other_policy",
            ResumeError::Beyond { .. } => "resume_beyond_end",
        }
    }
}

/// The reason behind a refusal; empty if none is known.
fn because(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}

fn join_names(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.as_slice() {
        [] => "it serves no model".into(),
        [one] => format!("it serves {one}"),
        [rest @ .., last] => format!("it serves {} and {last}", rest.join(", ")),
    }
}

/// Seconds, rounded up as milliseconds are: a client that comes too early is refused again.
pub fn whole_seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

pub fn whole_millis(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl Refusal {
    pub fn invalid(field: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Refusal {
        Refusal::Invalid { field: field.into(), message: message.into() }
    }

    pub fn failed(message: impl Into<String>) -> Refusal {
        Refusal::Failed { message: message.into() }
    }

    /// Returns the same refusal, with the field's name in one face.
    pub fn renamed(self, names: &[(&str, &'static str)]) -> Refusal {
        self.with_field(|field| names.iter().find(|(from, _)| *from == field).map(|(_, to)| Cow::Borrowed(*to)))
    }

    /// Returns the same refusal for a field with another name ending in one face.
    pub fn renamed_end(self, end: &str, to: &str) -> Refusal {
        self.with_field(|field| field.strip_suffix(end).map(|start| Cow::Owned(format!("{start}{to}"))))
    }

    /// Returns the same refusal with another name for its field, if `name` has one.
    fn with_field(self, name: impl FnOnce(&str) -> Option<Cow<'static, str>>) -> Refusal {
        match self {
            Refusal::Invalid { field, message } => Refusal::Invalid { field: name(&field).unwrap_or(field), message },
            other => other,
        }
    }

    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Refusal::Full { retry_after }
            | Refusal::Limited { retry_after, .. }
            | Refusal::TooLate { retry_after, .. }
            | Refusal::NotReady { retry_after, .. }
            | Refusal::Away { retry_after, .. }
            | Refusal::Draining { retry_after } => Some(*retry_after),
            _ => None,
        }
    }

    /// From a small closed set, for a metric's label.
    pub fn label(&self) -> &'static str {
        match self {
            Refusal::Invalid { .. } => "invalid",
            Refusal::TooLong { .. } | Refusal::TooLarge { .. } => "too_long",
            Refusal::NoKey | Refusal::UnknownKey => "no_key",
            Refusal::CertificateEnded => "certificate_ended",
            Refusal::NoModel { .. } => "no_model",
            Refusal::Full { .. } => "full",
            Refusal::Limited { .. } => "limited",
            Refusal::TooLate { .. } => "too_late",
            Refusal::NotReady { .. } => "not_ready",
            Refusal::Draining { .. } => "draining",
            Refusal::Deadline => "deadline",
            Refusal::Lost | Refusal::Away { .. } => "lost",
            Refusal::NoResume(_) => "no_resume",
            Refusal::LostTooOften { .. } => "lost_too_often",
            Refusal::SlowReader { .. } => "slow_reader",
            Refusal::NoToken { .. } => "no_token",
            Refusal::Grammar { .. } => "grammar",
            Refusal::Failed { .. } => "failed",
        }
    }
}
