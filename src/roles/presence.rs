//! Whether this process's rank has met the other ranks of its replica and its assignment has not ended. Has no
//! knowledge of what a rank computes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use types::{Step, StepDone};
use worker::tier::TierReports;
use worker::{
    AbortHandle, Assignment, CancelFlag, KvPoolMemory, Load, LoadError, LoadedModel, PassStats, ReadyReport, Rest,
    RunError, Runner, UpcomingSteps,
};

/// The flag of the current assignment. It shows the assignment's end immediately, even if the computing thread is busy.
#[derive(Clone, Default)]
pub struct RankPresence(Arc<Mutex<Option<CancelFlag>>>);

impl RankPresence {
    pub fn is_present(&self) -> bool {
        self.lock().as_ref().is_some_and(|cancel| !cancel.is_cancelled())
    }

    fn lock(&self) -> MutexGuard<'_, Option<CancelFlag>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A loader whose ranks record their presence.
pub struct PresenceLoader {
    pub loader: Box<dyn Load>,
    pub presence: RankPresence,
}

impl Load for PresenceLoader {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let (loaded, ready) = self.loader.load(assignment, cancel)?;
        Ok((Box::new(PresenceModel { loaded, presence: self.presence.clone() }), ready))
    }

    fn reject_last_load(&mut self) {
        self.loader.reject_last_load();
    }

    fn holds(&self, assignment: &Assignment) -> bool {
        self.loader.holds(assignment)
    }
}

struct PresenceModel {
    loaded: Box<dyn LoadedModel>,
    presence: RankPresence,
}

impl LoadedModel for PresenceModel {
    fn join_peers(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        let runner = self.loaded.join_peers(cancel)?;
        *self.presence.lock() = Some(cancel.clone());
        Ok(Box::new(PresenceClearingRunner { runner, presence: self.presence }))
    }
}

struct PresenceClearingRunner {
    runner: Box<dyn Runner>,
    presence: RankPresence,
}

impl Drop for PresenceClearingRunner {
    fn drop(&mut self) {
        *self.presence.lock() = None;
    }
}

impl Runner for PresenceClearingRunner {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        self.runner.run(step, done)
    }

    fn run_with(&mut self, step: &Step, upcoming: &mut dyn UpcomingSteps, done: &mut StepDone) -> Result<(), RunError> {
        self.runner.run_with(step, upcoming, done)
    }

    fn remaining_wait(&mut self) -> Option<Rest<'_>> {
        self.runner.remaining_wait()
    }

    fn abort_handle(&self) -> Option<AbortHandle> {
        self.runner.abort_handle()
    }

    fn take_kv_memory(&mut self) -> Option<KvPoolMemory> {
        self.runner.take_kv_memory()
    }

    fn start_tier(&mut self, reports: TierReports) -> bool {
        self.runner.start_tier(reports)
    }

    fn pass_stats(&self) -> PassStats {
        self.runner.pass_stats()
    }

    fn total_wait(&self) -> Duration {
        self.runner.total_wait()
    }
}
