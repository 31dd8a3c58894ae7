//! A rank's place in a blueprint: what the rank is to hold, what it takes to become able to run steps there, and why it
//! cannot. Knows nothing of streams or threads: the session calls both traits on one thread that it owns.

use crate::load::fetch::FetchError;
use crate::runner::Runner;
use crate::runner::guesses::GuessConfig;
use crate::runner::kv_commit::KvShort;
use collective::{CancelFlag, MeshTimeouts};
use std::path::PathBuf;
use types::{Activations, Epoch, KvDtype, Layout, Mode, PieceRun, PolicyDigest, Rank, Unsupported};

/// Loads a runner for an assignment. Called again for every epoch that the worker lives through, so costly results
/// (packed weights) may be kept from one load to the next.
pub trait Load: Send {
    /// Loads everything that does not need the other ranks, so none waits for another's reading. When `cancel` is set
    /// the assignment has ended, and long work is broken off with any error.
    fn load(&mut self, assignment: &Assignment, cancel: &CancelFlag) -> Result<(Box<dyn Loaded>, Ready), LoadError>;

    /// The bytes that were loaded last are refused: copies that were made for it are not believed again.
    fn distrust(&mut self) {}

    /// Whether it has what this assignment needs, and would read no file for it.
    fn holds(&self, _: &Assignment) -> bool {
        false
    }
}

/// A loaded assignment whose rank has not met the others.
pub trait Loaded: Send {
    /// Called once all ranks have loaded, so that they meet at about the same time.
    fn meet(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError>;
}

/// A runner that needs no other ranks has nothing to do in `meet`.
impl<R: Runner + 'static> Loaded for R {
    fn meet(self: Box<Self>, _: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        Ok(self)
    }
}

/// A rank's place in the grid, and what it is to load.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    pub epoch: Epoch,
    pub rank: Rank,
    /// The whole grid.
    pub layout: Layout,
    /// The address of each rank's collective, by rank; empty for a rank alone.
    pub mesh_addresses: Vec<String>,
    pub mesh_secret: MeshSecret,
    /// The path of the model's file or folder on this machine.
    pub model_path: PathBuf,
    pub activations: Activations,
    pub kv_dtype: KvDtype,
    pub mode: Mode,
    /// Number of blocks in each cache group's pool, the same on all ranks; ids start at zero.
    pub n_blocks: Vec<u32>,
    /// Memory for this rank's KV cache: its share of the pools must fit.
    pub kv_bytes: u64,
    pub context: u32,
    pub batch_tokens_max: u32,
    pub running_max: u32,
    /// Limits for meeting, and for one collective operation.
    pub timeouts: MeshTimeouts,
    /// The replica's policy, by the model's fingerprint, where it is known. A worker that already holds this part of
    /// such a model keeps it.
    pub policy: Option<PolicyDigest>,
    /// The number of this reading of the model. A worker whose weights were read under another number reads again.
    pub reading: u32,
    /// Whether freed blocks of the KV cache are cleared before another sequence gets them.
    pub zero_kv: bool,
    /// How the rank that samples guesses what its answers go on with.
    pub guesses: GuessConfig,
}

/// The secret with which the ranks of an epoch prove to each other that they belong to it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct MeshSecret(pub [u8; 32]);

impl std::fmt::Debug for MeshSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MeshSecret(..)")
    }
}

/// What a rank reports when it has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The policy, by the model's fingerprint.
    pub policy: PolicyDigest,
    pub weight_bytes: u64,
    /// Hashes of the bytes that it holds; none without a model.
    pub weights: Vec<PieceRun>,
    /// Why it goes on with its old weights although it was told to read the model again.
    pub unread: Option<String>,
}

/// Why an assignment could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    #[error("{path} cannot be loaded: {source}", path = path.display())]
    Model { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    /// A file of the model was cut short, written to or replaced while it was read.
    #[error(transparent)]
    Changed(checkpoint::Error),
    #[error("{what} needs {needed} bytes, {available} are there")]
    Memory { what: &'static str, needed: u64, available: u64 },
    /// The machine does not give the memory that was planned for the KV cache.
    #[error(transparent)]
    Kv(#[from] KvShort),
    #[error("the ranks do not come together: {0}")]
    Collective(#[from] collective::Error),
    #[error("{path} cannot be fetched: {source}", path = path.display())]
    Fetch { path: PathBuf, source: FetchError },
}

impl LoadError {
    /// The rank to blame, if it is another.
    pub fn guilty(&self) -> Option<Rank> {
        match self {
            LoadError::Collective(error) => error.rank(),
            LoadError::Unsupported(_)
            | LoadError::Model { .. }
            | LoadError::Changed(_)
            | LoadError::Memory { .. }
            | LoadError::Kv(_)
            | LoadError::Fetch { .. } => None,
        }
    }
}
