//! Why workers are dismissed and why epochs end; the queue of lost workers.

use crate::WorkerId;
use scheduler::WorkerLoss;
use std::collections::VecDeque;
use tonic::{Code, Status};

/// A worker that is gone, or is to be dismissed.
#[derive(Debug)]
pub(crate) struct LostWorker {
    pub worker: WorkerId,
    pub cause: WorkerDismissalCause,
    pub why: Status,
}

/// Lost workers, which are dismissed one after the other, after the event that found them. Each look at the workers
/// adds at most one entry per worker.
#[derive(Default)]
pub(crate) struct LossQueue(VecDeque<LostWorker>);

impl LossQueue {
    pub fn report(&mut self, worker: WorkerId, cause: WorkerDismissalCause, why: Status) {
        self.0.push_back(LostWorker { worker, cause, why });
    }

    /// Reports a worker whose queue has no room for these frames.
    pub fn report_deaf(&mut self, worker: WorkerId, unread: &str) {
        let why = Status::resource_exhausted(format!("this rank does not read its {unread}"));
        self.report(worker, WorkerDismissalCause::Deaf, why);
    }

    pub fn take_first(&mut self) -> Option<LostWorker> {
        self.0.pop_front()
    }
}

/// A rank that was lost with its worker.
pub(crate) struct RankLoss {
    pub rank: u16,
    pub host: String,
    pub pid: u32,
    pub cause: WorkerDismissalCause,
    pub why: String,
}

/// The worker that holds a lost rank again. Empty where the grid has no such rank any more.
#[derive(Clone, Default)]
pub(crate) struct Successor {
    pub host: String,
    pub pid: u32,
}

/// Why a worker is dismissed. The set is closed: it is a label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkerDismissalCause {
    /// Its stream ended.
    Gone,
    /// It missed heartbeats.
    Silent,
    /// It sends heartbeats, and does not compute.
    Hung,
    /// It took too long to become ready.
    Late,
    /// It reported a failure.
    Failed,
    /// It found its weights changed in memory.
    Memory,
    /// It sent an invalid frame, or computes under another policy.
    Wrong,
    /// It leaves its frames unread.
    Deaf,
}

impl WorkerDismissalCause {
    pub fn label(self) -> &'static str {
        match self {
            WorkerDismissalCause::Gone => "gone",
            WorkerDismissalCause::Silent => "silent",
            WorkerDismissalCause::Hung => "hung",
            WorkerDismissalCause::Late => "late",
            WorkerDismissalCause::Failed => "failed",
            WorkerDismissalCause::Memory => "memory",
            WorkerDismissalCause::Wrong => "wrong",
            WorkerDismissalCause::Deaf => "deaf",
        }
    }

    /// The cause when a stream ended with this status.
    pub fn of(why: &Status) -> WorkerDismissalCause {
        if why.code() == Code::InvalidArgument { WorkerDismissalCause::Wrong } else { WorkerDismissalCause::Gone }
    }
}

/// Why an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EpochEnding {
    Lost(WorkerDismissalCause),
    /// Ranks blame each other, or one of several hangs: no worker is dismissed.
    Doubt,
    /// An operator requires a change.
    Requested,
    /// Workers have arrived, and the replica moves to a larger grid.
    Growth,
    /// A worker was signalled to end, and reported it.
    Left,
}

impl EpochEnding {
    pub fn label(self) -> &'static str {
        match self {
            EpochEnding::Lost(cause) => cause.label(),
            EpochEnding::Doubt => "doubt",
            EpochEnding::Requested | EpochEnding::Growth => "requested",
            EpochEnding::Left => "left",
        }
    }

    /// True if nothing has failed: no worker is blamed, and no rank is kept free for one.
    pub fn is_meant(self) -> bool {
        matches!(self, EpochEnding::Requested | EpochEnding::Growth | EpochEnding::Left)
    }

    /// How the scheduler is to treat the requests of the lost step.
    pub fn loss(self) -> WorkerLoss {
        match self {
            // No request is to blame for a memory fault.
            EpochEnding::Requested
            | EpochEnding::Growth
            | EpochEnding::Left
            | EpochEnding::Lost(WorkerDismissalCause::Memory) => WorkerLoss::Planned,
            EpochEnding::Lost(WorkerDismissalCause::Failed) => WorkerLoss::Reported,
            EpochEnding::Lost(_) | EpochEnding::Doubt => WorkerLoss::Unexplained,
        }
    }
}
