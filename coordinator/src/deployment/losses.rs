//! Workers that are lost: those that are gone, silent, late or hung, and those that their peers blame.

use super::endings::{EpochEnding, LostWorker, RankLoss, WorkerDismissalCause};
use super::{Deployment, Transition};
use crate::WorkerId;
use crate::config::micros;
use crate::members::hangs;
use crate::members::ranks::{Readiness, ReadyTimeouts};
use crate::members::unreachable::MissedPeer;
use crate::members::workers::DismissedWorker;
use proto::cluster as wire;
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

impl Deployment {
    /// The next worker to dismiss.
    pub fn take_loss(&mut self) -> Option<LostWorker> {
        self.losses.take_first()
    }

    // -- looks, once per beat

    pub fn find_silent_workers(&mut self, _: Micros) {
        for worker in self.members.find_silent(self.config.waits.beats_missed_max) {
            let why = Status::deadline_exceeded("this rank sent no frame for too long");
            self.losses.report(worker, WorkerDismissalCause::Silent, why);
        }
    }

    pub fn find_late_ranks(&mut self, now: Micros) {
        let waits = &self.config.waits;
        let allowed = ReadyTimeouts {
            load_micros: micros(waits.load_max),
            // The ranks give up first, and report the peer that did not answer.
            meet_micros: micros(waits.meet_max + waits.hello_max),
        };
        let Some(ranks) = self.phase.ranks() else { return };
        for (worker, at) in ranks.overdue(now, allowed) {
            let why = Status::deadline_exceeded(format!("this rank took too long {at}"));
            self.losses.report(worker, WorkerDismissalCause::Late, why);
        }
    }

    pub fn find_stalled_ranks(&mut self, now: Micros) {
        let Some(ranks) = self.phase.ranks() else { return };
        for (worker, why) in self.members.stuck_suspects(ranks, now, micros(self.config.waits.suspect_max)) {
            let why = Status::deadline_exceeded(format!("this rank sends heartbeats but does not compute: {why}"));
            self.losses.report(worker, WorkerDismissalCause::Hung, why);
        }
    }

    /// Looks for the rank that hangs when a step takes too long. A single suspect is dismissed. Several suspects all
    /// stay; one of them is lost later if its computing thread does not move once it has a rank again.
    pub fn find_hung_rank(&mut self, now: Micros) -> Option<Transition> {
        let serving = self.phase.serving_mut()?;
        let seconds = serving.overdue_step(now, &self.config.waits)?.as_secs_f64();
        let (ranks, grid) = (&serving.placement.ranks, serving.placement.blueprint.grid);
        let suspects = hangs::hang_suspects(&self.members.reports(ranks, grid.sampler()));
        if let [worker] = suspects[..] {
            let why = format!("this rank has not answered its step for {seconds:.1} s");
            self.losses.report(worker, WorkerDismissalCause::Hung, Status::deadline_exceeded(why));
            return None;
        }
        tracing::warn!(?suspects, seconds, "a step is not answered, and no single rank is suspect");
        for worker in suspects {
            let why = format!("a step was not answered for {seconds:.1} s");
            self.members.mark_suspect(worker, ranks.rank(worker), why);
        }
        Some(Transition::EndEpoch(EpochEnding::Doubt))
    }

    // -- reports of workers

    pub fn worker_gone(&mut self, worker: WorkerId, why: Status) {
        self.losses.report(worker, WorkerDismissalCause::of(&why), readable_reason(why));
    }

    /// Handles a worker that was signalled to end: its rank goes to another at once, and nothing is lost but time.
    pub fn worker_leaves(&mut self, worker: WorkerId) -> Option<Transition> {
        let rank = self.phase.rank(worker);
        let why = Status::cancelled("this worker leaves, and another worker takes its rank");
        let DismissedWorker { host, .. } = self.members.dismiss(worker, why)?;
        tracing::info!(%worker, rank = rank.map(|rank| rank.0), host, "a worker leaves");
        self.phase.crowd_changed();
        Some(rank.map_or(Transition::Place, |_| Transition::Restart(EpochEnding::Left)))
    }

    /// Handles the report that a rank cannot go on. If it names a peer, it stays, and the peer is suspected.
    pub fn rank_failed(&mut self, worker: WorkerId, failed: &wire::Failed, now: Micros) -> Option<Transition> {
        self.members.mark_alive(worker);
        let of = Epoch { incarnation: failed.epoch_incarnation, n: failed.epoch_n };
        let own_fault = || Status::aborted(format!("the rank failed: {}", failed.message));
        let cause =
            if failed.spoilt_weight.is_empty() { WorkerDismissalCause::Failed } else { WorkerDismissalCause::Memory };
        let Some(rank) = failed.guilty_rank else {
            self.losses.report(worker, cause, own_fault());
            return None;
        };
        if of != self.epoch {
            // It belongs to an epoch that has ended: one report of its end was enough.
            return None;
        }
        let blamed = self.phase.placement().and_then(|placement| placement.holder(rank));
        let Some(blamed) = blamed.filter(|blamed| *blamed != worker) else {
            self.losses.report(worker, WorkerDismissalCause::Failed, own_fault());
            return None;
        };
        self.blame(worker, (blamed, rank), &failed.message, now);
        Some(Transition::EndEpoch(EpochEnding::Doubt))
    }

    /// No worker is dismissed: a dead one shows by its stream, a stopped one by its silence, and a hung one by a
    /// counter that does not move.
    fn blame(&mut self, reporter: WorkerId, (blamed, rank): (WorkerId, u32), message: &str, now: Micros) {
        let (host, of) = (self.members.host(blamed).to_owned(), self.members.host(reporter).to_owned());
        let by = self.phase.rank(reporter).map(|rank| rank.0);
        tracing::warn!(worker = %blamed, rank, host, cause = message, by, by_host = of, "a rank is blamed by a peer");
        let readiness = self.phase.ranks().and_then(|ranks| ranks.readiness(reporter));
        if let Some(Readiness::Meeting { .. }) = readiness {
            let miss = MissedPeer { by: reporter, of: blamed, why: message.to_owned() };
            if self.members.record_miss(miss, now, micros(self.config.waits.apart_min)) {
                self.phase.crowd_changed();
            }
        }
        self.members.mark_suspect(blamed, self.phase.rank(blamed), format!("{of} reports: {message}"));
    }

    /// Dismisses a worker. Returns the rank that is lost with it, if any, and what follows: the epoch ends if the
    /// worker held a rank.
    pub fn dismiss(&mut self, lost: LostWorker) -> Option<(Option<RankLoss>, Transition)> {
        let LostWorker { worker, cause, why: status } = lost;
        let why = status.message().to_owned();
        let (held, was_suspect) = (self.phase.rank(worker), self.members.is_suspect(worker));
        let DismissedWorker { blamed_as, host, pid } = self.members.dismiss(worker, status)?;
        // Its peers may have noticed first: then its epoch has ended, and it no longer has a rank.
        let rank = held.or(blamed_as).map(|rank| rank.0);
        tracing::warn!(%worker, rank, host, kind = cause.label(), cause = why, "a worker is lost");
        if was_suspect {
            // It was the one that hung: the ranks that named it need not wait.
            self.phase.trust_again();
        }
        self.phase.crowd_changed();
        if let Some(rank) = rank {
            metrics::rank_lost(&self.of, rank, cause.label());
            self.is_changed = true;
        }
        let next = held.map_or(Transition::Place, |_| Transition::Restart(EpochEnding::Lost(cause)));
        Some((rank.map(|rank| RankLoss { rank, host, pid, cause, why }), next))
    }
}
