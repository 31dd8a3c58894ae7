//! Runs a rank's steps. Has no knowledge of streams or threads: the session calls it on one thread that it owns.

mod draft_counts;
mod draft_model;
pub(crate) mod guesses;
pub mod kv_commit;
pub(crate) mod masks;
pub mod model_loader;
mod model_part;
pub mod model_runner;
mod mtp;
mod refused;
pub mod sequences;
pub mod sim;

use crate::tier::TierReports;
use backend::{Draw, PassStats};
use collective::AbortHandle;
use kv_commit::KvPoolMemory;
use std::pin::Pin;
use std::time::Duration;
use types::{Rank, Step, StepDone, Unsupported};

/// Runs the steps of one epoch, in order. `sim::SimRunner` has no model; the model's runner has one.
pub trait Runner: Send {
    /// Applies the step (ends, starts, slices, pass) and leaves one `SliceDone` per slice. The caller sets the id and
    /// epoch of `done`, which still has the slices of the step before; they are overwritten, so that their memory is
    /// kept.
    ///
    ///
    /// A rank that does not sample leaves `done` unused, because no caller reads it.
    ///
    ///
    /// An error means that this rank cannot continue in this epoch. A failure of one request alone is
    /// `SliceDone::failed`.
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError>;

    /// `run` for a runner that may begin the next step while its device computes this one. The next call of `run_with`
    /// must be for that step, unless the runner is dropped.
    fn run_with(
        &mut self,
        step: &Step,
        _upcoming: &mut dyn UpcomingSteps,
        done: &mut StepDone,
    ) -> Result<(), RunError> {
        self.run(step, done)
    }

    /// Returns the remaining modelled time of a step that `run` has applied; only a task can wait for it. A runner with
    /// a model has done all its waiting in `run`.
    fn remaining_wait(&mut self) -> Option<Rest<'_>> {
        None
    }

    /// Returns the handle with which another thread ends a wait for other ranks in `run`. A runner that wraps another
    /// one forwards this method and those below.
    fn abort_handle(&self) -> Option<AbortHandle> {
        None
    }

    /// Returns the commit of its KV cache, once. None if all of its memory is committed.
    fn take_kv_memory(&mut self) -> Option<KvPoolMemory> {
        None
    }

    /// Starts the reports of the tier behind its pools. False if it has none.
    fn start_tier(&mut self, _reports: TierReports) -> bool {
        false
    }

    /// Returns how many of the device's passes were plain, recorded, replayed or refused.
    fn pass_stats(&self) -> PassStats {
        PassStats::default()
    }

    /// Returns the total time for which its steps waited for other ranks.
    fn total_wait(&self) -> Duration {
        Duration::ZERO
    }
}

impl<R: Runner + ?Sized> Runner for Box<R> {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        (**self).run(step, done)
    }

    fn run_with(&mut self, step: &Step, upcoming: &mut dyn UpcomingSteps, done: &mut StepDone) -> Result<(), RunError> {
        (**self).run_with(step, upcoming, done)
    }

    fn remaining_wait(&mut self) -> Option<Rest<'_>> {
        (**self).remaining_wait()
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        (**self).abort_handle()
    }

    fn take_kv_memory(&mut self) -> Option<KvPoolMemory> {
        (**self).take_kv_memory()
    }

    fn start_tier(&mut self, reports: TierReports) -> bool {
        (**self).start_tier(reports)
    }

    fn pass_stats(&self) -> PassStats {
        (**self).pass_stats()
    }

    fn total_wait(&self) -> Duration {
        (**self).total_wait()
    }
}

/// The steps that arrive while a step runs.
pub trait UpcomingSteps {
    /// The next step, if it has arrived. It stays in the queue until it is run.
    fn next(&mut self) -> Option<&Step>;
}

pub type Rest<'a> = Pin<Box<dyn Future<Output = Result<(), RunError>> + Send + 'a>>;

/// Why a step could not run. It ends the rank's part in the epoch.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The step contradicts earlier ones: the coordinator and this rank no longer agree.
    #[error("step {step} breaks the protocol: {what}")]
    Protocol { step: u64, what: String },
    #[error("the pass failed: {0}")]
    Pass(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the ranks cannot exchange data: {0}")]
    Collective(#[from] collective::Error),
}

impl RunError {
    /// Returns the rank to blame, if it is another rank.
    pub fn guilty(&self) -> Option<Rank> {
        match self {
            RunError::Collective(error) => error.rank(),
            RunError::Unsupported(_) | RunError::Protocol { .. } | RunError::Pass(_) => None,
        }
    }
}

/// Returns an empty vector with the same memory for draws of another lifetime: collecting in place keeps the
/// allocation.
fn reuse_allocation<'a>(mut draws: Vec<Draw<'_>>) -> Vec<Draw<'a>> {
    draws.clear();
    draws.into_iter().map(|_| unreachable!("it is empty")).collect()
}
