//! The traits of a rank: loading an assignment, and running its steps. Knows nothing of streams or threads: the session
//! calls both traits on one thread that it owns.

mod let_go;
pub mod model_runner;
mod refused;
pub mod sequences;
pub mod sim;

use crate::load::fetch::FetchError;
use backend::Repeats;
use collective::{AbortHandle, CancelFlag, Timeouts};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;
use types::{Activations, Epoch, KvDtype, Layout, Mode, PieceRun, PolicyDigest, Rank, Step, StepDone, Unsupported};

/// Executes steps of one epoch, in order. `sim::SimRunner` has no model; the model's runner has one.
pub trait Runner: Send {
    /// Applies the step (ends, starts, slices, pass) and leaves one `SliceDone` per slice. `done` is handed in with its
    /// id and epoch set and the slices of the step before it, to be overwritten, so that their memory is kept.
    ///
    /// A rank that does not sample leaves `done` unused: nobody reads it.
    ///
    /// An error means that this rank cannot go on in this epoch. A failure of one request alone is `SliceDone::failed`.
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError>;

    /// `run` for a runner that may begin the next step while its device computes this one. A step begun this way is the
    /// next one given to it, or the runner is dropped.
    fn run_with(&mut self, step: &Step, _upcoming: &mut dyn Upcoming, done: &mut StepDone) -> Result<(), RunError> {
        self.run(step, done)
    }

    /// The remaining modelled time of a step that `run` has applied, which only a task can wait out. A runner with a
    /// model has done all its waiting in `run`.
    fn rest(&mut self) -> Option<Rest<'_>> {
        None
    }

    /// The handle with which another thread ends a wait for other ranks in `run`. A runner that wraps another passes
    /// this and the methods below on.
    fn abort_handle(&self) -> Option<AbortHandle> {
        None
    }

    /// Counts of the device's passes: plain, recorded, replayed, refused.
    fn repeats(&self) -> Repeats {
        Repeats::default()
    }

    /// The time that all its steps together have waited for other ranks.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }
}

impl<R: Runner + ?Sized> Runner for Box<R> {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        (**self).run(step, done)
    }

    fn run_with(&mut self, step: &Step, upcoming: &mut dyn Upcoming, done: &mut StepDone) -> Result<(), RunError> {
        (**self).run_with(step, upcoming, done)
    }

    fn rest(&mut self) -> Option<Rest<'_>> {
        (**self).rest()
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        (**self).abort_handle()
    }

    fn repeats(&self) -> Repeats {
        (**self).repeats()
    }

    fn waited(&self) -> Duration {
        (**self).waited()
    }
}

/// The steps that arrive while a step runs.
pub trait Upcoming {
    /// The next step, if it has arrived. It stays in the queue until it is run.
    fn next(&mut self) -> Option<&Step>;
}

pub type Rest<'a> = Pin<Box<dyn Future<Output = Result<(), RunError>> + Send + 'a>>;

/// Loads a runner for an assignment. Called again for every epoch that the worker lives through, so costly results
/// (packed weights) may be kept from one load to the next.
pub trait Load: Send {
    /// Loads everything that does not need the other ranks, so none waits for another's reading. When `cancel` is set
    /// the assignment has ended, and long work is broken off with any error.
    fn load(&mut self, assignment: &Assignment, cancel: &CancelFlag) -> Result<(Box<dyn Loaded>, Ready), LoadError>;
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
    pub timeouts: Timeouts,
    /// The replica's policy, by the model's fingerprint, where it is known. A worker that already holds this part of
    /// such a model keeps it.
    pub policy: Option<PolicyDigest>,
    /// The number of this reading of the model. A worker whose weights were read under another number reads again.
    pub reading: u32,
    /// Whether freed blocks of the KV cache are cleared before another sequence gets them.
    pub zero_kv: bool,
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

/// Why a step could not be run. It ends the rank's part in the epoch.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The step contradicts earlier ones: the coordinator and this rank no longer agree.
    #[error("step {step} breaks the protocol: {what}")]
    Protocol { step: u64, what: String },
    #[error("the pass failed: {0}")]
    Pass(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the ranks do not work together: {0}")]
    Collective(#[from] collective::Error),
}

impl RunError {
    /// The rank to blame, if it is another.
    pub fn guilty(&self) -> Option<Rank> {
        match self {
            RunError::Collective(error) => error.rank(),
            RunError::Unsupported(_) | RunError::Protocol { .. } | RunError::Pass(_) => None,
        }
    }
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
            | LoadError::Fetch { .. } => None,
        }
    }
}
