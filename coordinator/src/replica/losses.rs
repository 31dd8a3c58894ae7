//! The loop's part that finds and dismisses lost workers: those that are silent, late or hung, and those that their
//! peers blame.

use super::Replica;
use super::endings::{EpochEnding, LostWorker, WorkerDismissalCause};
use super::phase::Phase;
use crate::WorkerId;
use crate::config::micros;
use crate::members::hangs;
use crate::members::ranks::{Readiness, ReadyTimeouts};
use crate::members::unreachable::MissedPeer;
use crate::members::workers::DismissedWorker;
use proto::cluster as wire;
use std::time::Duration;
use telemetry::metrics;
use tonic::{Code, Status};
use types::{Epoch, Micros};

/// Replaces the message of a broken connection, which does not help operators.
fn readable_reason(why: Status) -> Status {
    match why.code() {
        Code::Unknown => {
            tracing::debug!(cause = why.message(), "a worker's connection broke");
            Status::new(why.code(), "its connection closed unexpectedly: was it killed, or did it crash?")
        }
        _ => why,
    }
}

impl Replica {
    /// A worker is gone, or is to be dismissed. The loop dismisses it after the event at hand.
    pub(super) fn report_loss(&mut self, worker: WorkerId, cause: WorkerDismissalCause, why: Status) {
        self.losses.push_back(LostWorker { worker, cause, why });
    }

    pub(super) fn worker_gone(&mut self, worker: WorkerId, why: Status) {
        self.report_loss(worker, WorkerDismissalCause::of(&why), readable_reason(why));
    }

    // -- looks, once per beat

    pub(super) fn drop_silent_workers(&mut self, _: Micros) {
        for worker in self.members.find_silent(self.config.waits.beats_missed_max) {
            let why = Status::deadline_exceeded("this rank sent no frame for too long");
            self.report_loss(worker, WorkerDismissalCause::Silent, why);
        }
    }

    pub(super) fn drop_late_ranks(&mut self, now: Micros) {
        let waits = &self.config.waits;
        let allowed = ReadyTimeouts {
            load_micros: micros(waits.load_max),
            // The ranks give up first, and report the peer that did not answer.
            meet_micros: micros(waits.meet_max + waits.hello_max),
        };
        let Some(ranks) = self.phase.ranks() else { return };
        for (worker, at) in ranks.overdue(now, allowed) {
            self.report_loss(
                worker,
                WorkerDismissalCause::Late,
                Status::deadline_exceeded(format!("this rank took too long {at}")),
            );
        }
    }

    pub(super) fn drop_stalled_ranks(&mut self, now: Micros) {
        let Some(ranks) = self.phase.ranks() else { return };
        for (worker, why) in self.members.stuck_suspects(ranks, now, micros(self.config.waits.suspect_max)) {
            let why = Status::deadline_exceeded(format!("this rank sends heartbeats but does not compute: {why}"));
            self.report_loss(worker, WorkerDismissalCause::Hung, why);
        }
    }

    /// Called when a step takes too long. A single suspect is dismissed. Several suspects all stay; one of them is lost
    /// later if its computing thread does not move once it has a rank again.
    pub(super) fn drop_hung_rank(&mut self, now: Micros) {
        let Phase::Serving(serving) = &mut self.phase else { return };
        serving.patience.tick(now, micros(self.config.waits.beat_every));
        if !serving.patience.is_over(&self.config.waits) {
            return;
        }
        let seconds = Duration::from_micros(serving.patience.awaited_micros()).as_secs_f64();
        let (ranks, grid) = (&serving.placement.ranks, serving.placement.blueprint.grid);
        let suspects = hangs::hang_suspects(&self.members.reports(ranks, grid.sampler()));
        match suspects[..] {
            [worker] => {
                let why = format!("this rank has not answered its step for {seconds:.1} s");
                self.report_loss(worker, WorkerDismissalCause::Hung, Status::deadline_exceeded(why));
            }
            _ => {
                tracing::warn!(?suspects, seconds, "a step is not answered, and no single rank is suspect");
                for worker in suspects {
                    let why = format!("a step was not answered for {seconds:.1} s");
                    self.members.mark_suspect(worker, ranks.rank(worker), why);
                }
                self.end_epoch(EpochEnding::Doubt);
            }
        }
    }

    // -- reports of workers

    /// Handles a worker that was signalled to end: its rank goes to another at once, and nothing is lost but time.
    pub(super) fn worker_leaves(&mut self, worker: WorkerId) {
        let rank = self.phase.rank(worker);
        let why = Status::cancelled("this worker leaves, and another worker takes its rank");
        let Some(DismissedWorker { host, .. }) = self.members.dismiss(worker, why) else { return };
        tracing::info!(%worker, rank = rank.map(|rank| rank.0), host, "a worker leaves");
        self.phase.crowd_changed();
        if rank.is_some() {
            self.end_epoch(EpochEnding::Left);
        }
        self.place();
    }

    /// Handles the report that a rank cannot go on. If it names a peer, it stays, and the peer is suspected.
    pub(super) fn rank_failed(&mut self, worker: WorkerId, failed: &wire::Failed) {
        self.members.mark_alive(worker);
        let of = Epoch { incarnation: failed.epoch_incarnation, n: failed.epoch_n };
        let own_fault = || Status::aborted(format!("the rank failed: {}", failed.message));
        let cause =
            if failed.spoilt_weight.is_empty() { WorkerDismissalCause::Failed } else { WorkerDismissalCause::Memory };
        let Some(rank) = failed.guilty_rank else { return self.report_loss(worker, cause, own_fault()) };
        if of != self.epoch {
            // It belongs to an epoch that has ended: one report of its end was enough.
            return;
        }
        let mut shards = self.phase.blueprint().into_iter().flat_map(|blueprint| &blueprint.shards);
        let blamed = shards.find(|shard| u32::from(shard.rank.0) == rank).map(|shard| shard.worker);
        match blamed {
            Some(blamed) if blamed != worker => self.blame(worker, blamed, rank, &failed.message),
            _ => self.report_loss(worker, WorkerDismissalCause::Failed, own_fault()),
        }
    }

    /// The epoch ends and no worker is dismissed: a dead one shows by its stream, a stopped one by its silence, and a
    /// hung one by a counter that does not move.
    fn blame(&mut self, reporter: WorkerId, blamed: WorkerId, rank: u32, message: &str) {
        let (host, of) = (self.members.host(blamed).to_owned(), self.members.host(reporter).to_owned());
        let by = self.phase.rank(reporter).map(|rank| rank.0);
        tracing::warn!(worker = %blamed, rank, host, cause = message, by, by_host = of, "a rank is blamed by a peer");
        let readiness = self.phase.ranks().and_then(|ranks| ranks.readiness(reporter));
        if let Some(Readiness::Meeting { .. }) = readiness {
            let miss = MissedPeer { by: reporter, of: blamed, why: message.to_owned() };
            if self.members.record_miss(miss, self.now(), micros(self.config.waits.apart_min)) {
                self.phase.crowd_changed();
            }
        }
        self.members.mark_suspect(blamed, self.phase.rank(blamed), format!("{of} reports: {message}"));
        self.end_epoch(EpochEnding::Doubt);
    }

    // -- consequences

    /// Dismisses a worker. If it held a rank, the epoch ends.
    pub(super) fn lose(&mut self, LostWorker { worker, cause, why }: LostWorker) {
        let message = why.message().to_owned();
        let (held, was_suspect) = (self.phase.rank(worker), self.members.is_suspect(worker));
        let Some(DismissedWorker { blamed_as, host, pid }) = self.members.dismiss(worker, why) else { return };
        // Its peers may have noticed first: then its epoch has ended, and it no longer has a rank.
        let rank = held.or(blamed_as).map(|rank| rank.0);
        tracing::warn!(%worker, rank, host, kind = cause.label(), cause = message, "a worker is lost");
        if was_suspect {
            // It was the one that hung: the ranks that named it need not wait.
            self.phase.trust_again();
        }
        self.phase.crowd_changed();
        if let Some(rank) = rank {
            metrics::rank_lost(&self.of, rank, cause.label());
            self.lost.record_loss(self.now(), rank, (host.clone(), pid), cause, message);
            self.state_changed = true;
            if held.is_some() {
                self.end_epoch(EpochEnding::Lost(cause));
            }
            if let Some(recovery) = &mut self.recovery {
                recovery.record_lost_rank(cause, rank, host);
            }
        }
        self.place();
    }
}
