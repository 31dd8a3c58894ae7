//! What a rank does with a step. Knows nothing of streams or threads: the session calls it on one thread that it owns.

pub mod model_loader;
mod model_part;
pub mod model_runner;
mod refused;
pub mod sequences;
pub mod sim;

use backend::Repeats;
use collective::AbortHandle;
use std::pin::Pin;
use std::time::Duration;
use types::{Rank, Step, StepDone, Unsupported};

/// Executes steps of one epoch, in order. `sim::SimRunner` has no model; the model's runner has one.
pub trait Runner: Send {
    /// Applies the step (ends, starts, slices, pass) and leaves one `SliceDone` per slice. `done` is handed in with its
    /// id and epoch set and the slices of the step before it, to be overwritten, so that their memory is kept.
    ///
    /// A rank that does not sample has nothing to answer: nobody reads its `done`.
    ///
    /// An error is the rank's: it cannot go on in this epoch. What fails for one request alone is `SliceDone::failed`.
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError>;

    /// `run`, by a runner that may begin the step that comes next while its device computes this one. What was begun so
    /// is the next that it is given, or the runner is dropped.
    fn run_with(&mut self, step: &Step, _upcoming: &mut dyn Upcoming, done: &mut StepDone) -> Result<(), RunError> {
        self.run(step, done)
    }

    /// What a step that `run` has applied still waits for, where its time is modelled: only a task can wait so. A
    /// runner with a model has done all its waiting in `run`.
    fn rest(&mut self) -> Option<Rest<'_>> {
        None
    }

    /// With which another thread ends what `run` waits for, if it waits for other ranks. A runner around another passes
    /// this on, and what is below.
    fn abort_handle(&self) -> Option<AbortHandle> {
        None
    }

    /// What became of its device's passes.
    fn repeats(&self) -> Repeats {
        Repeats::default()
    }

    /// How long all its steps together have waited for other ranks.
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

/// What arrives while a step runs.
pub trait Upcoming {
    /// The step that comes next, if it is here. It stays until it is run.
    fn next(&mut self) -> Option<&Step>;
}

pub type Rest<'a> = Pin<Box<dyn Future<Output = Result<(), RunError>> + Send + 'a>>;

/// Why a step could not be run. Ends the rank's part in the epoch.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The step contradicts what came before it: the coordinator and this rank no longer agree.
    #[error("step {step} breaks the protocol: {what}")]
    Protocol { step: u64, what: String },
    #[error("the pass failed: {0}")]
    Pass(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the ranks do not work together: {0}")]
    Collective(#[from] collective::Error),
}

impl RunError {
    /// The rank that is to blame, if it is another.
    pub fn guilty(&self) -> Option<Rank> {
        match self {
            RunError::Collective(error) => error.rank(),
            RunError::Unsupported(_) | RunError::Protocol { .. } | RunError::Pass(_) => None,
        }
    }
}
