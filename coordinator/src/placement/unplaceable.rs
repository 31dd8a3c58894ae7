//! Why there is no blueprint, with the figures.

use std::fmt;
use types::{BLOCK_TOKENS, Grid, Unsupported};

/// Each stage has a step of its own in flight, and a worker's queue holds no more of them.
pub const STAGES_MAX: u16 = 16;

/// Why there is no blueprint, and what would be possible instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unplaceable {
    pub why: Why,
    /// The grid nearest to the one asked for that these machines could serve.
    pub nearest: Option<Grid>,
}

/// Why there is no blueprint, with the figures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    #[error("tp {tp} x pp {pp} is no grid: both must be at least 1")]
    NoGrid { tp: u16, pp: u16 },
    #[error("tp {tp} x pp {pp} needs {needed} workers, {there} are there")]
    TooFew { tp: u16, pp: u16, needed: usize, there: usize },
    #[error("tp {tp} is more than the model can be cut into: its attention has {n_leaves} runs of heads")]
    Heads { tp: u16, n_leaves: u32 },
    #[error("pp {pp} is more than the model has layers: {n_layers}")]
    Layers { pp: u16, n_layers: u32 },
    #[error("pp {pp} is more than {STAGES_MAX} stages: each has a step of its own under way, and ranks queue no more")]
    Stages { pp: u16 },
    #[error("a context of {asked} was asked for, the model was made for {model}: ask for at most that")]
    Context { asked: u32, model: u32 },
    #[error(
        "{host} has {available} bytes, the weights of rank {rank} need {needed}{}: \
         use a larger machine, more ranks or a smaller quantization",
        altogether(.all_needed, .all_available)
    )]
    Weights { rank: u16, host: String, needed: u64, available: u64, all_needed: u64, all_available: u64 },
    #[error(
        "{host} has {available} bytes beside {weights} of weights, the KV cache of rank {rank} is to have {needed}: \
         ask for less KV memory"
    )]
    KvMemory { rank: u16, host: String, weights: u64, needed: u64, available: u64 },
    #[error(
        "a context of {context} needs {needed} bytes of KV on rank {rank} (at most {block_bytes} per {BLOCK_TOKENS} \
         tokens), {available} are there: ask for a shorter context or more KV memory"
    )]
    Kv { rank: u16, context: u32, block_bytes: u64, needed: u64, available: u64 },
}

fn altogether(needed: &u64, available: &u64) -> String {
    format!(" (all ranks need {needed}, their machines have {available})")
}

impl fmt::Display for Unplaceable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)?;
        match (self.nearest, &self.why) {
            (Some(Grid { tp, pp, .. }), _) => write!(f, "; the nearest grid that fits is tp {tp} x pp {pp}"),
            (None, Why::Unsupported(_) | Why::Context { .. }) => Ok(()),
            (None, _) => write!(f, "; no other grid fits either"),
        }
    }
}

impl std::error::Error for Unplaceable {}
