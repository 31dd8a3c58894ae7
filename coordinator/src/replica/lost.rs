//! The ranks that were lost last, for display: which, why, how long the replica paused, and which workers hold them
//! since.

use super::endings::{RecoveryCost, WorkerDismissalCause};
use proto::cluster as wire;
use std::collections::VecDeque;
use types::Micros;

/// The most entries; the oldest are forgotten first.
const LOST_MAX: usize = 16;

#[derive(Default)]
pub(crate) struct LostRanks(VecDeque<LostRank>);

struct LostRank {
    at: Micros,
    rank: u16,
    host: String,
    pid: u32,
    cause: WorkerDismissalCause,
    why: String,
    recovered: Option<(RecoveryCost, Successor)>,
}

/// Empty where the grid has no such rank any more.
#[derive(Clone, Default)]
pub(crate) struct Successor {
    pub host: String,
    pub pid: u32,
}

impl LostRanks {
    pub fn record_loss(
        &mut self,
        at: Micros,
        rank: u16,
        (host, pid): (String, u32),
        cause: WorkerDismissalCause,
        why: String,
    ) {
        if self.0.len() >= LOST_MAX {
            self.0.pop_front();
        }
        self.0.push_back(LostRank { at, rank, host, pid, cause, why, recovered: None });
    }

    /// Records that the replica serves again: every rank that was lost by then has a successor, or none.
    pub fn record_recovery(&mut self, recovered: RecoveryCost, successor: impl Fn(u16) -> Option<Successor>) {
        for lost in self.0.iter_mut().filter(|lost| lost.recovered.is_none()) {
            lost.recovered = Some((recovered, successor(lost.rank).unwrap_or_default()));
        }
    }

    pub fn report(&self, now: Micros) -> Vec<wire::LostRank> {
        let to_wire = |lost: &LostRank| {
            let (recovered, successor) = lost.recovered.clone().unzip();
            let successor = successor.unwrap_or_default();
            wire::LostRank {
                rank: lost.rank.into(),
                host: lost.host.clone(),
                pid: lost.pid,
                cause: lost.cause.label().into(),
                why: lost.why.clone(),
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
    use std::time::Duration;

    #[test]
    fn last_losses_are_reported_with_their_cost() {
        let mut lost = LostRanks::default();
        for rank in 0..20 {
            lost.record_loss(Micros(10), rank, ("here".into(), 7), WorkerDismissalCause::Silent, "why".into());
        }
        let reported = lost.report(Micros(30));
        assert_eq!((reported.len(), reported[0].rank, reported[0].micros_ago), (LOST_MAX, 4, 20));
        assert_eq!((&*reported[0].cause, reported[0].pause_micros), ("silent", None));
        lost.record_recovery(RecoveryCost { took: Duration::from_micros(5), n_replayed: 3 }, |rank| {
            (rank > 15).then(|| Successor { host: "new".into(), pid: 9 })
        });
        lost.record_loss(Micros(40), 1, ("there".into(), 8), WorkerDismissalCause::Gone, String::new());
        let reported = lost.report(Micros(40));
        let paused: Vec<_> = reported.iter().rev().take(2).map(|of| (of.pause_micros, of.tokens_replayed)).collect();
        assert_eq!(paused, [(None, 0), (Some(5), 3)]);
        assert!(reported[0].successor_host.is_empty(), "the grid no longer has this rank");
        assert_eq!((&*reported[14].successor_host, reported[14].successor_pid), ("new", 9));
    }
}
