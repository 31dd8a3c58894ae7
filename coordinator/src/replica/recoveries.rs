//! The pauses of a replica: from the end of an epoch until it serves again. Lists the ranks that were lost last, for
//! display: which, why, how long the replica paused, and which workers hold them since.

use crate::deployment::endings::{EpochEnding, RankLoss, Successor, WorkerDismissalCause};
use proto::cluster as wire;
use std::collections::VecDeque;
use std::time::Duration;
use telemetry::metrics::{self, ReplicaLabel};
use telemetry::spans::{self, TracedSpan};
use types::{Epoch, Grid, Micros};

/// The most entries; the oldest are forgotten first.
const LOST_MAX: usize = 16;

pub(crate) struct Recoveries {
    /// The label of its metrics.
    of: ReplicaLabel,
    /// Present if the replica has served and does not now.
    pending: Option<Recovery>,
    lost: LostRanks,
}

/// The time from the end of an epoch until the replica serves again.
struct Recovery {
    since: Micros,
    /// The cause of the first epoch that ended, if several did.
    why: EpochEnding,
    /// The rank that was lost first, and its host.
    lost: Option<(u16, String)>,
    tokens_requeued_before: u64,
    span: TracedSpan,
}

/// The cost of a recovery.
#[derive(Clone, Copy, Default)]
pub(crate) struct RecoveryCost {
    pub took: Duration,
    pub n_replayed: u64,
}

#[derive(Default)]
struct LostRanks(VecDeque<LostRank>);

struct LostRank {
    at: Micros,
    loss: RankLoss,
    recovered: Option<(RecoveryCost, Successor)>,
}

impl Recoveries {
    pub fn new(of: ReplicaLabel) -> Recoveries {
        Recoveries { of, pending: None, lost: LostRanks::default() }
    }

    /// A replica that has served ends an epoch. `tokens_requeued` is the total count so far.
    pub fn epoch_ended(&mut self, ended: Epoch, why: EpochEnding, tokens_requeued: u64, now: Micros) {
        self.pending.get_or_insert_with(|| Recovery::begin(ended, why, tokens_requeued, now));
    }

    /// Records a lost rank, perhaps only after its epoch had ended in doubt.
    pub fn rank_lost(&mut self, loss: RankLoss, now: Micros) {
        if let Some(recovery) = &mut self.pending {
            recovery.record_lost_rank(loss.cause, loss.rank, loss.host.clone());
        }
        self.lost.record_loss(loss, now);
    }

    /// The replica serves on this grid: again, at the returned cost, or for the first time. Then no request waited
    /// because of earlier losses.
    pub fn served(
        &mut self,
        grid: Grid,
        tokens_requeued: u64,
        now: Micros,
        successor: impl Fn(u16) -> Option<Successor>,
    ) -> Option<RecoveryCost> {
        let cost = self.pending.take().map(|recovery| recovery.end(&self.of, grid, tokens_requeued, now));
        self.lost.record_recovery(cost.unwrap_or_default(), successor);
        cost
    }

    pub fn report(&self, now: Micros) -> Vec<wire::LostRank> {
        self.lost.report(now)
    }
}

impl Recovery {
    /// Begins when an epoch ends. `tokens_requeued` is the total count so far.
    fn begin(ended: Epoch, why: EpochEnding, tokens_requeued: u64, now: Micros) -> Recovery {
        let span = spans::recovery(ended.n);
        Recovery { since: now, why, lost: None, tokens_requeued_before: tokens_requeued, span }
    }

    /// Records the lost rank, perhaps only after its epoch had ended in doubt.
    fn record_lost_rank(&mut self, cause: WorkerDismissalCause, rank: u16, host: String) {
        if self.why == EpochEnding::Doubt {
            self.why = EpochEnding::Lost(cause);
        }
        self.lost.get_or_insert((rank, host));
    }

    /// Ends when the replica serves again, on this grid.
    fn end(self, of: &ReplicaLabel, grid: Grid, tokens_requeued: u64, now: Micros) -> RecoveryCost {
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

impl LostRanks {
    fn record_loss(&mut self, loss: RankLoss, at: Micros) {
        if self.0.len() >= LOST_MAX {
            self.0.pop_front();
        }
        self.0.push_back(LostRank { at, loss, recovered: None });
    }

    /// Records that the replica serves again: every rank that was lost by then has a successor, or none.
    fn record_recovery(&mut self, recovered: RecoveryCost, successor: impl Fn(u16) -> Option<Successor>) {
        for lost in self.0.iter_mut().filter(|lost| lost.recovered.is_none()) {
            lost.recovered = Some((recovered, successor(lost.loss.rank).unwrap_or_default()));
        }
    }

    fn report(&self, now: Micros) -> Vec<wire::LostRank> {
        let to_wire = |lost: &LostRank| {
            let (recovered, successor) = lost.recovered.clone().unzip();
            let successor = successor.unwrap_or_default();
            wire::LostRank {
                rank: lost.loss.rank.into(),
                host: lost.loss.host.clone(),
                pid: lost.loss.pid,
                cause: lost.loss.cause.label().into(),
                why: lost.loss.why.clone(),
                micros_ago: now.since(lost.at).0,
                pause_micros: recovered.map(|of| of.took.as_micros() as u64),
                tokens_replayed: recovered.map_or(0, |of| of.n_replayed),
                successor_host: successor.host,
                successor_pid: successor.pid,
            }
        };
        self.0.iter().map(to_wire).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_losses_are_reported_with_their_cost() {
        let loss = |rank, cause| RankLoss { rank, host: "here".into(), pid: 7, cause, why: "why".into() };
        let mut lost = LostRanks::default();
        for rank in 0..20 {
            lost.record_loss(loss(rank, WorkerDismissalCause::Silent), Micros(10));
        }
        let reported = lost.report(Micros(30));
        assert_eq!((reported.len(), reported[0].rank, reported[0].micros_ago), (LOST_MAX, 4, 20));
        assert_eq!((&*reported[0].cause, reported[0].pause_micros), ("silent", None));
        lost.record_recovery(RecoveryCost { took: Duration::from_micros(5), n_replayed: 3 }, |rank| {
            (rank > 15).then(|| Successor { host: "new".into(), pid: 9 })
        });
        lost.record_loss(loss(1, WorkerDismissalCause::Gone), Micros(40));
        let reported = lost.report(Micros(40));
        let paused: Vec<_> = reported.iter().rev().take(2).map(|of| (of.pause_micros, of.tokens_replayed)).collect();
        assert_eq!(paused, [(None, 0), (Some(5), 3)]);
        assert!(reported[0].successor_host.is_empty(), "the grid no longer has this rank");
        assert_eq!((&*reported[14].successor_host, reported[14].successor_pid), ("new", 9));
    }
}
