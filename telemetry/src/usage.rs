//! What spans and metrics say alike of a request: how much it read and wrote, and who answered it.

/// The system's name in OpenTelemetry's conventions.
pub(crate) const PROVIDER: &str = "lockstep";

/// How many tokens a request read and wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    pub n_prompt: u64,
    pub n_cached: u64,
    pub n_output: u64,
}
