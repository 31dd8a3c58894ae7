//! Why workers are dismissed, why epochs end, and what a recovery took.

use crate::WorkerId;
use scheduler::WorkerLoss;
use std::time::Duration;
use telemetry::metrics::{self, ReplicaLabel};
use telemetry::spans::{self, TracedSpan};
use tonic::{Code, Status};
use types::{Epoch, Grid, Micros};

/// A worker that is gone, or is to be dismissed.
#[derive(Debug)]
pub(crate) struct LostWorker {
    pub worker: WorkerId,
    pub cause: WorkerDismissalCause,
    pub why: Status,
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
    /// An operator, or the arrival of workers, requires a change.
    Requested,
    /// A worker was signalled to end, and reported it.
    Left,
}

impl EpochEnding {
    fn label(self) -> &'static str {
        match self {
            EpochEnding::Lost(cause) => cause.label(),
            EpochEnding::Doubt => "doubt",
            EpochEnding::Requested => "requested",
            EpochEnding::Left => "left",
        }
    }

    /// True if nothing has failed: no worker is blamed, and no rank is kept free for one.
    pub fn is_meant(self) -> bool {
        matches!(self, EpochEnding::Requested | EpochEnding::Left)
    }

    /// How the scheduler is to treat the requests of the lost step.
    pub fn loss(self) -> WorkerLoss {
        match self {
            // No request is to blame for a memory fault.
            EpochEnding::Requested | EpochEnding::Left | EpochEnding::Lost(WorkerDismissalCause::Memory) => {
                WorkerLoss::Planned
            }
            EpochEnding::Lost(WorkerDismissalCause::Failed) => WorkerLoss::Reported,
            EpochEnding::Lost(_) | EpochEnding::Doubt => WorkerLoss::Unexplained,
        }
    }
}

/// The time from the end of an epoch until the replica serves again.
pub(crate) struct Recovery {
    since: Micros,
    /// The cause of the first epoch that ended, if several did.
    why: EpochEnding,
    /// The rank that was lost first, and its host.
    lost: Option<(u16, String)>,
    tokens_requeued_before: u64,
    span: TracedSpan,
}

/// The cost of a recovery.
#[derive(Clone, Copy)]
pub(crate) struct RecoveryCost {
    pub took: Duration,
    pub n_replayed: u64,
}

impl Recovery {
    /// Begins when an epoch ends. `tokens_requeued` is the total count so far.
    pub fn begin(ended: Epoch, why: EpochEnding, tokens_requeued: u64, now: Micros) -> Recovery {
        let span = spans::recovery(ended.n);
        Recovery { since: now, why, lost: None, tokens_requeued_before: tokens_requeued, span }
    }

    /// Records the lost rank, perhaps only after its epoch had ended in doubt.
    pub fn record_lost_rank(&mut self, cause: WorkerDismissalCause, rank: u16, host: String) {
        if self.why == EpochEnding::Doubt {
            self.why = EpochEnding::Lost(cause);
        }
        self.lost.get_or_insert((rank, host));
    }

    /// Ends when the replica serves again, on this grid.
    pub fn end(self, of: &ReplicaLabel, grid: Grid, tokens_requeued: u64, now: Micros) -> RecoveryCost {
        let took = Duration::from_micros(now.since(self.since).0);
        let n_replayed = tokens_requeued - self.tokens_requeued_before;
        let (cause, millis) = (self.why.label(), took.as_millis() as u64);
        let lost = self.lost.as_ref().map(|(rank, host)| (*rank, &**host));
        self.span.record_recovery_cause(cause, lost);
        self.span.record_recovery_grid(grid.tp, grid.pp, n_replayed);
        metrics::recovered(of, cause, took, n_replayed);
        self.span
            .log_within(|| tracing::info!(cause, millis, tokens_replayed = n_replayed, "the replica serves again"));
        RecoveryCost { took, n_replayed }
    }
}
