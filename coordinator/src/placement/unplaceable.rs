//! Why there is no blueprint, with the figures.

use std::fmt;
use types::{BLOCK_TOKENS, Grid, Unsupported};

/// Each stage has a step of its own in flight, and a worker's queue holds no more of them.
pub const STAGES_MAX: u16 = 16;

/// Why there is no blueprint, and what would be possible instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unplaceable {
    pub why: UnplaceableReason,
    /// The nearest grid to the configured one that these machines could serve.
    pub nearest: Option<Grid>,
}

/// Why there is no blueprint, with the figures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnplaceableReason {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    #[error("tp {tp} x pp {pp} is not a grid: both must be at least 1")]
    NoGrid { tp: u16, pp: u16 },
    #[error(
        "tp {tp} x pp {pp} needs {needed} workers, but {there} {} available",
        if *there == 1 { "is" } else { "are" }
    )]
    TooFew { tp: u16, pp: u16, needed: usize, there: usize },
    #[error("tp {tp} x pp {pp} needs {needed} workers of one kind, but the available ones differ: {kinds}")]
    Kinds { tp: u16, pp: u16, needed: usize, kinds: String },
    #[error("the model cannot be split into tp {tp}: its attention has {n_leaves} runs of heads")]
    Heads { tp: u16, n_leaves: u32 },
    #[error("pp {pp} exceeds the model's {n_layers} layers")]
    Layers { pp: u16, n_layers: u32 },
    #[error("the model cannot be split into pp {pp}: layers that belong together leave at most {n_stages} stages")]
    Joined { pp: u16, n_stages: u32 },
    #[error("pp {pp} exceeds the limit of {STAGES_MAX} stages: a rank queues one step per stage, and no more")]
    Stages { pp: u16 },
    #[error("the requested context of {requested} exceeds the model's {model}: set at most {model}")]
    Context { requested: u32, model: u32 },
    #[error(
        "{host} has {}, but the weights of rank {rank} need {}{}: \
         use a larger machine, more ranks or a smaller quantization",
        HumanBytes(*.available), HumanBytes(*.needed), describe_total(.all_needed, .all_available)
    )]
    Weights { rank: u16, host: String, needed: u64, available: u64, all_needed: u64, all_available: u64 },
    #[error(
        "--kv-memory {} does not fit: {host} has {} left beside {} of weights of rank {rank}",
        HumanBytes(*.needed), HumanBytes(*.available), HumanBytes(*.weights)
    )]
    KvMemory { rank: u16, host: String, weights: u64, needed: u64, available: u64 },
    #[error(
        "a context of {context} needs {} of KV on rank {rank} (at most {} per {BLOCK_TOKENS} tokens), but {} is \
         available: set a shorter context (--context) or more KV memory (--kv-memory)",
        HumanBytes(*.needed), HumanBytes(*.block_bytes), HumanBytes(*.available)
    )]
    Kv { rank: u16, context: u32, block_bytes: u64, needed: u64, available: u64 },
}

fn describe_total(needed: &u64, available: &u64) -> String {
    format!(" (all ranks together need {}, and their machines have {})", HumanBytes(*needed), HumanBytes(*available))
}

/// Bytes as a person reads them: free memory is rounded down, so that it never looks like enough.
struct HumanBytes(u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        match UNITS.into_iter().find(|(shift, _)| self.0 >> shift > 0) {
            None => write!(f, "{} B", self.0),
            Some((shift, unit)) if self.0 >> shift >= 100 => write!(f, "{} {unit}", self.0 >> shift),
            Some((shift, unit)) => {
                let tenths = (u128::from(self.0) * 10) >> shift;
                write!(f, "{}.{} {unit}", tenths / 10, tenths % 10)
            }
        }
    }
}

impl fmt::Display for Unplaceable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)?;
        match (self.nearest, &self.why) {
            (Some(Grid { tp, pp }), _) => write!(f, "; the nearest grid that fits is tp {tp} x pp {pp}"),
            (None, UnplaceableReason::Unsupported(_) | UnplaceableReason::Context { .. }) => Ok(()),
            (None, _) => write!(f, "; no other grid fits either"),
        }
    }
}

impl std::error::Error for Unplaceable {}
