//! A rank's place in a blueprint: what the rank must hold, how it gets ready to run steps, and why it cannot. Has no
//! knowledge of streams or threads: the session calls both traits on one thread that it owns.

use crate::load::fetch::FetchError;
use crate::runner::Runner;
use crate::runner::guesses::GuessConfig;
use crate::runner::kv_commit::KvShortage;
use collective::{CancelFlag, MeshTimeouts};
use std::path::PathBuf;
use types::{Activations, Epoch, KvDtype, Layout, NumericsMode, PieceRun, PolicyDigest, Rank, Unsupported};

/// Loads a runner for an assignment. It is called again for every epoch of the worker's life, so it may keep costly
/// results (packed weights) from one load to the next.
pub trait Load: Send {
    /// Loads everything that does not need the other ranks, so no rank waits for another rank's reading. If `cancel` is
    /// set, the assignment has ended, and long work stops with any error.
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError>;

    /// Reports that the bytes loaded last were rejected: copies that were made for this load are not trusted again.
    fn reject_last_load(&mut self) {}

    /// Returns whether the loader has everything that this assignment needs, so that a load reads no file.
    fn holds(&self, _: &Assignment) -> bool {
        false
    }
}

/// A loaded assignment whose rank has not met the others.
pub trait LoadedModel: Send {
    /// Called once all ranks have loaded, so that they meet at about the same time.
    fn join_peers(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError>;
}

/// A runner without other ranks has nothing to do in `meet`.
impl<R: Runner + 'static> LoadedModel for R {
    fn join_peers(self: Box<Self>, _: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        Ok(self)
    }
}

/// A rank's place in the grid, and the model that it loads.
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
    pub mode: NumericsMode,
    /// Number of blocks in each cache group's pool, the same on all ranks; ids start at zero.
    pub n_blocks: Vec<u32>,
    /// Memory for this rank's KV cache. The rank's share of the pools must fit into it.
    pub kv_bytes: u64,
    pub context: u32,
    pub batch_tokens_max: u32,
    pub running_max: u32,
    /// Limits for the meeting, and for one collective operation.
    pub timeouts: MeshTimeouts,
    /// The replica's numeric policy, by the model's fingerprint, where it is known. A worker that already holds this
    /// part of such a model keeps it.
    pub policy: Option<PolicyDigest>,
    /// The number of this reading of the model. A worker that read its weights under another number reads them again.
    pub reading: u32,
    /// Whether freed blocks of the KV cache are cleared before another sequence gets them.
    pub zero_kv: bool,
    /// How the sampling rank guesses the next tokens of its answers.
    pub guesses: GuessConfig,
}

#[cfg(test)]
impl Assignment {
    /// A whole model on one rank, without any block.
    pub fn solo(model_path: PathBuf, n_layers: u32) -> Assignment {
        Assignment {
            epoch: Epoch::default(),
            rank: Rank(0),
            layout: Layout::solo(n_layers),
            mesh_addresses: vec![],
            mesh_secret: MeshSecret::default(),
            model_path,
            activations: Activations::Int8,
            kv_dtype: KvDtype::F16,
            mode: NumericsMode::Lockstep,
            n_blocks: vec![],
            kv_bytes: 0,
            context: 400,
            batch_tokens_max: 512,
            running_max: 4,
            timeouts: MeshTimeouts::default(),
            policy: None,
            reading: 0,
            zero_kv: false,
            guesses: GuessConfig::default(),
        }
    }
}

/// The secret by which the ranks of an epoch prove to each other that they belong to it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct MeshSecret(pub [u8; 32]);

impl std::fmt::Debug for MeshSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MeshSecret(..)")
    }
}

/// What a rank reports when it has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyReport {
    /// The policy, by the model's fingerprint.
    pub policy: PolicyDigest,
    pub weight_bytes: u64,
    /// Hashes of the bytes that the rank holds; empty without a model.
    pub weights: Vec<PieceRun>,
    /// Why the rank keeps its old weights although the assignment required a new reading.
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
    #[error("{what} needs {needed} bytes, but {available} are available")]
    Memory { what: &'static str, needed: u64, available: u64 },
    /// The machine does not provide the memory that was planned for the KV cache.
    #[error(transparent)]
    Kv(#[from] KvShortage),
    #[error("the ranks cannot connect: {0}")]
    Collective(#[from] collective::Error),
    #[error("{path} cannot be fetched: {source}", path = path.display())]
    Fetch { path: PathBuf, source: FetchError },
}

impl LoadError {
    /// Returns the rank to blame, if it is another rank.
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
