//! The loop's part that ends epochs: who is lost, who is to blame, and what a recovery took.

use crate::event::WorkerId;
use crate::members::hangs;
use crate::members::unreachable::Miss;
use crate::members::workers::{Allowed, Dismissed, Role};
use crate::replica::{Replica, micros};
use proto::cluster as wire;
use scheduler::Loss;
use std::time::Duration;
use telemetry::metrics;
use telemetry::spans::{self, Traced};
use tonic::{Code, Status};
use types::{Epoch, Grid, Micros};

/// Why a worker is let go. The set is closed: it is a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Its stream ended.
    Gone,
    /// It was not heard of.
    Silent,
    /// It is heard of, and does not compute.
    Hung,
    /// It took too long to become ready.
    Late,
    /// It said so.
    Failed,
    /// It said what cannot be meant, or computes under another policy.
    Wrong,
    /// It leaves its frames unread.
    Deaf,
}

impl Cause {
    pub fn label(self) -> &'static str {
        match self {
            Cause::Gone => "gone",
            Cause::Silent => "silent",
            Cause::Hung => "hung",
            Cause::Late => "late",
            Cause::Failed => "failed",
            Cause::Wrong => "wrong",
            Cause::Deaf => "deaf",
        }
    }

    /// Of a stream that ended.
    pub fn of(why: &Status) -> Cause {
        if why.code() == Code::InvalidArgument { Cause::Wrong } else { Cause::Gone }
    }
}

/// Why an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Lost(Cause),
    /// Ranks blame each other, or one of several hangs: nobody is let go.
    Doubt,
    /// An operator, or workers that have come, want a change.
    Wanted,
    /// A worker was told to end, and said so.
    Left,
}

impl Ending {
    fn label(self) -> &'static str {
        match self {
            Ending::Lost(cause) => cause.label(),
            Ending::Doubt => "doubt",
            Ending::Wanted => "wanted",
            Ending::Left => "left",
        }
    }

    /// Nothing has failed: nobody is accused, and no place is kept for anybody.
    pub fn is_meant(self) -> bool {
        matches!(self, Ending::Wanted | Ending::Left)
    }

    /// What it says of the requests that were in the lost step.
    fn loss(self) -> Loss {
        match self {
            Ending::Wanted | Ending::Left => Loss::Planned,
            Ending::Lost(Cause::Failed) => Loss::Reported,
            Ending::Lost(_) | Ending::Doubt => Loss::Unexplained,
        }
    }
}

/// From the end of an epoch until the replica serves again.
pub(crate) struct Recovery {
    since: Micros,
    /// Of the first epoch that ended, if several did.
    why: Ending,
    /// The rank that was lost first, and its host.
    lost: Option<(u16, String)>,
    tokens_requeued_before: u64,
    span: Traced,
}

impl Recovery {
    /// A rank is lost, as which nobody may have known when the epoch ended.
    fn found(&mut self, cause: Cause, rank: u16, host: String) {
        if self.why == Ending::Doubt {
            self.why = Ending::Lost(cause);
        }
        self.lost.get_or_insert((rank, host));
    }
}

impl Replica {
    pub(crate) fn dismiss_the_overdue(&mut self, now: Micros) {
        let waits = &self.config.waits;
        let allowed = Allowed {
            load_micros: micros(waits.load_max),
            // The ranks give up first, and say whom they missed.
            meet_micros: micros(waits.meet_max + waits.hello_max),
        };
        let (beats_missed_max, suspect_max) = (waits.beats_missed_max, micros(waits.suspect_max));
        for worker in self.members.silent(beats_missed_max) {
            let why = Status::deadline_exceeded("this rank was not heard of for too long");
            self.lose(worker, Cause::Silent, why);
        }
        for (worker, at) in self.members.overdue(now, allowed) {
            self.lose(worker, Cause::Late, Status::deadline_exceeded(format!("this rank took too long {at}")));
        }
        for (worker, why) in self.members.unmoved(now, suspect_max) {
            let why = Status::deadline_exceeded(format!("this rank beats and does not compute: {why}"));
            self.lose(worker, Cause::Hung, why);
        }
        self.dismiss_the_hung(now);
    }

    /// When a step is awaited for too long. One rank that is guilty is let go; of several of whom one is, all stay, and
    /// whose computing thread does not move once it has a place again is lost then.
    fn dismiss_the_hung(&mut self, now: Micros) {
        self.patience.tick(now, micros(self.config.waits.beat_every));
        let Some(blueprint) = self.blueprint.as_ref().filter(|_| self.is_ready) else { return };
        if !self.patience.is_over(&self.config.waits) {
            return;
        }
        let seconds = Duration::from_micros(self.patience.awaited_micros()).as_secs_f64();
        let suspects = hangs::suspects(&self.members.testimonies(blueprint.grid.sampler()));
        match suspects[..] {
            [worker] => {
                let why = format!("this rank does not answer its step: it hangs since {seconds:.1} s");
                self.lose(worker, Cause::Hung, Status::deadline_exceeded(why));
            }
            _ => {
                tracing::warn!(
                    ?suspects,
                    seconds,
                    "a step is not answered, and the ranks do not show whose fault it is"
                );
                for worker in suspects {
                    self.members.suspect(worker, format!("a step was not answered for {seconds:.1} s"));
                }
                self.end_in_doubt();
            }
        }
    }

    /// A worker is gone, or is told to go. If it held a rank the epoch ends.
    pub(crate) fn lose(&mut self, worker: WorkerId, cause: Cause, why: Status) {
        let message = why.message().to_owned();
        let was_suspect = self.members.is_suspect(worker);
        let Some(Dismissed { role, blamed_as, host }) = self.members.dismiss(worker, why) else { return };
        self.strangers.forget(worker);
        // Its peers may have noticed first: then its epoch has ended, and it has a rank no more.
        let rank = role.rank().or(blamed_as).map(|rank| rank.0);
        tracing::warn!(%worker, rank, host, kind = cause.label(), cause = message, "a worker is lost");
        if was_suspect {
            // It was the guilty one: those who named it need not wait.
            self.placing.trust_again();
        }
        self.placing.crowd_changed();
        if let Some(rank) = rank {
            metrics::rank_lost(&self.of, rank, cause.label());
            if role.rank().is_some() {
                self.end_epoch(Ending::Lost(cause));
            }
            if let Some(recovery) = &mut self.recovery {
                recovery.found(cause, rank, host);
            }
        }
        self.place();
    }

    /// A worker was told to end and says so: its rank is another's at once, and nothing is lost but time.
    pub(crate) fn worker_leaves(&mut self, worker: WorkerId) {
        let why = Status::cancelled("this worker leaves, and its place is another's");
        let Some(Dismissed { role, host, .. }) = self.members.dismiss(worker, why) else { return };
        self.strangers.forget(worker);
        tracing::info!(%worker, rank = role.rank().map(|rank| rank.0), host, "a worker leaves");
        self.placing.crowd_changed();
        if role.rank().is_some() {
            self.end_epoch(Ending::Left);
        }
        self.place();
    }

    /// A rank cannot go on. If it names a peer, it stays, and its peer is suspected.
    pub(crate) fn rank_failed(&mut self, worker: WorkerId, failed: &wire::Failed) {
        self.members.heard(worker);
        let of = Epoch { incarnation: failed.epoch_incarnation, n: failed.epoch_n };
        let own_fault = || Status::aborted(format!("the rank failed: {}", failed.message));
        let Some(guilty) = failed.guilty_rank else { return self.lose(worker, Cause::Failed, own_fault()) };
        if of != self.epoch {
            // Of an epoch that has ended: one report of its end was enough.
            return;
        }
        let shards = self.blueprint.iter().flat_map(|blueprint| &blueprint.shards);
        let blamed = shards.filter(|shard| u32::from(shard.rank.0) == guilty).map(|shard| shard.worker).next();
        match blamed {
            Some(blamed) if blamed != worker => self.blame(worker, blamed, guilty, &failed.message),
            _ => self.lose(worker, Cause::Failed, own_fault()),
        }
    }

    /// The epoch ends and nobody is dismissed: whoever is dead says so by its stream, whoever is stopped by its
    /// silence, and whoever hangs by a counter that does not move.
    fn blame(&mut self, reporter: WorkerId, blamed: WorkerId, rank: u32, message: &str) {
        let (host, of) = (self.members.host(blamed).to_owned(), self.members.host(reporter).to_owned());
        let by = self.members.role(reporter).and_then(Role::rank).map(|rank| rank.0);
        tracing::warn!(worker = %blamed, rank, host, cause = message, by, by_host = of, "a rank is blamed by a peer");
        if matches!(self.members.role(reporter), Some(Role::Meeting { .. })) {
            self.missed(Miss { by: reporter, of: blamed, why: message.to_owned() });
        }
        self.members.suspect(blamed, format!("{of} says: {message}"));
        self.end_in_doubt();
    }

    /// Two ranks have loaded and did not meet. When that is so again and again, one of them is left out.
    fn missed(&mut self, miss: Miss) {
        let (now, out_min) = (self.now(), micros(self.config.waits.apart_min));
        let Some((worker, out)) = self.strangers.missed(miss, now, out_min) else { return };
        let (host, address) = (self.members.host(worker), self.members.mesh_address(worker));
        let (from, from_host) = (self.members.mesh_address(out.from), self.members.host(out.from));
        let (seconds, why) = (out.until.since(now).0 / 1_000_000, &out.why);
        tracing::warn!(
            %worker, host, address, other = %out.from, other_host = from_host, other_address = from, seconds, why,
            "two workers do not reach each other: the first is left out"
        );
        self.placing.crowd_changed();
    }

    /// Two that do not reach each other are both well, so that the next placement waits, each time longer.
    fn end_in_doubt(&mut self) {
        let now = self.now();
        self.placing.doubt(now, &self.config.waits);
        self.end_epoch(Ending::Doubt);
    }

    /// All that ran waits, in an epoch without workers, for the next placement. The workers stay, and end what they do
    /// for this one.
    pub(crate) fn end_epoch(&mut self, why: Ending) {
        let now = self.now();
        self.begin_recovery(now, why);
        self.placing.ended(now, why, &self.config.waits);
        self.epoch.n += 1;
        self.blueprint = None;
        self.is_ready = false;
        self.state_changed = true;
        self.members.release_all();
        self.traces.epoch_ended();
        self.patience.epoch_ended();
        for rank in self.slowness.clear() {
            metrics::rank_slow(&self.of, rank.0, false);
        }
        if let Some(serving) = &mut self.serving {
            serving.scheduler.requeue_all(self.epoch, why.loss(), &mut self.outputs);
            self.outputs_without_step();
        }
    }

    fn begin_recovery(&mut self, now: Micros, why: Ending) {
        let Some(serving) = self.serving.as_ref().filter(|_| self.recovery.is_none()) else { return };
        self.recovery = Some(Recovery {
            since: now,
            why,
            lost: None,
            tokens_requeued_before: serving.scheduler.stats().tokens_requeued,
            span: spans::recovery(self.epoch.n),
        });
    }

    /// The replica serves again.
    pub(crate) fn recovered(&mut self, grid: Grid) {
        let (Some(recovery), Some(serving)) = (self.recovery.take(), &self.serving) else { return };
        let took = Duration::from_micros(self.now().since(recovery.since).0);
        let n_replayed = serving.scheduler.stats().tokens_requeued - recovery.tokens_requeued_before;
        let (cause, millis) = (recovery.why.label(), took.as_millis() as u64);
        let lost = recovery.lost.as_ref().map(|(rank, host)| (*rank, &**host));
        recovery.span.recovered_from(cause, lost);
        recovery.span.recovered_on(grid.tp, grid.pp, n_replayed);
        metrics::recovered(&self.of, cause, took, n_replayed);
        recovery.span.tell(|| tracing::info!(cause, millis, tokens_replayed = n_replayed, "the replica goes on"));
        self.changed(grid, took, n_replayed);
    }
}
