//! A rank's place in a blueprint: what the rank is to hold, what it takes to become able to run steps there, and why it
//! cannot. Knows nothing of streams or threads: the session calls both traits on one thread that it owns.

use crate::load::fetch::FetchError;
use crate::runner::Runner;
use collective::{CancelFlag, MeshTimeouts};
use std::path::PathBuf;
use types::{Activations, Epoch, KvDtype, Layout, Mode, PieceRun, PolicyDigest, Rank, Unsupported};

/// Makes a runner for a place in a blueprint. Called again for every epoch that the worker lives to see, so what is
/// costly (packed weights) may be kept from one load to the next.
pub trait Load: Send {
    /// Everything but the other ranks: nobody waits for another's reading. When `cancel` is raised, the place is over,
    /// and what takes long is broken off, with whatever error.
    fn load(&mut self, assignment: &Assignment, cancel: &CancelFlag) -> Result<(Box<dyn Loaded>, Ready), LoadError>;

    /// The bytes that were loaded last are refused: copies that were made for it are not believed again.
    fn distrust(&mut self) {}
}

/// A place that is loaded, and whose rank has not met the others.
pub trait Loaded: Send {
    /// Called when all ranks have loaded, so that all of them come at about the same time.
    fn meet(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError>;
}

/// A runner that needs no others has met them.
impl<R: Runner + 'static> Loaded for R {
    fn meet(self: Box<Self>, _: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        Ok(self)
    }
}

/// A rank's place, and what it is to hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    pub epoch: Epoch,
    pub rank: Rank,
    /// The whole grid.
    pub layout: Layout,
    /// Where each rank's collective listens, by rank; empty for a rank alone.
    pub mesh_addresses: Vec<String>,
    pub mesh_secret: MeshSecret,
    /// Where this machine finds the model's file or folder.
    pub model_path: PathBuf,
    pub activations: Activations,
    pub kv_dtype: KvDtype,
    pub mode: Mode,
    /// Blocks of each cache group's pool, the same on all ranks; ids run from zero.
    pub n_blocks: Vec<u32>,
    /// Memory for the KV cache of this rank: what it keeps of the pools must fit.
    pub kv_bytes: u64,
    pub context: u32,
    pub batch_tokens_max: u32,
    pub running_max: u32,
    /// For the ranks to meet, and for one operation among them.
    pub timeouts: MeshTimeouts,
    /// The policy that the replica means, by the model's fingerprint, where that is known. A worker that holds this
    /// part of such a model keeps it.
    pub policy: Option<PolicyDigest>,
    /// The number of this reading of the model: a worker reads again what it has read under another number.
    pub reading: u32,
    /// Blocks of the KV cache are cleared when they are let go, before anybody has them again.
    pub zero_kv: bool,
}

/// With which the ranks of an epoch prove to each other that they belong to it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct MeshSecret(pub [u8; 32]);

impl std::fmt::Debug for MeshSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MeshSecret(..)")
    }
}

/// What a rank found when it had loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// By the model's fingerprint.
    pub policy: PolicyDigest,
    pub weight_bytes: u64,
    /// The bytes that it holds; none without a model.
    pub weights: Vec<PieceRun>,
    /// Why it has not read the model again though it was to, and goes on with what it had.
    pub unread: Option<String>,
}

/// Why a place could not be taken.
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
    #[error("the ranks do not come together: {0}")]
    Collective(#[from] collective::Error),
    #[error("{path} cannot be fetched: {source}", path = path.display())]
    Fetch { path: PathBuf, source: FetchError },
}

impl LoadError {
    /// The rank that is to blame, if it is another.
    pub fn guilty(&self) -> Option<Rank> {
        match self {
            LoadError::Collective(error) => error.rank(),
            LoadError::Unsupported(_)
            | LoadError::Model { .. }
            | LoadError::Changed(_)
            | LoadError::Memory { .. }
            | LoadError::Fetch { .. } => None,
        }
    }
}
