//! The values that spans and metrics have in common: a request's input and output tokens, and the system's name.

/// The system's name in OpenTelemetry's conventions.
pub(crate) const PROVIDER: &str = "lockstep";

/// The number of tokens that a request read and wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    pub n_prompt: u64,
    pub n_cached: u64,
    pub n_output: u64,
}
