//! A replica's condition by its own reports: whether it computes the requests of this router, and whether they had
//! better move to another replica. Knows no requests.

use proto::cluster as wire;
use proto::cluster::state::Phase;
use std::time::Duration;
use tokio::time::Instant;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReplicaCondition {
    /// Its ranks take steps.
    Serves,
    /// It finishes its requests, and takes no new ones.
    Drains,
    /// Its ranks are being placed. Its requests wait there for a while.
    Recovers { since: Instant },
    /// There are no machines for its ranks, or placing them takes too long: its requests move as soon as another
    /// replica can continue them.
    Stranded { since: Instant, why: String },
}

impl ReplicaCondition {
    /// The condition after a state that the replica reported.
    pub fn after_state(&self, state: &wire::State, now: Instant, recovery_max: Duration) -> ReplicaCondition {
        let since = self.since().unwrap_or(now);
        match (state.phase(), &state.unplaced) {
            (_, Some(unplaced)) => {
                ReplicaCondition::Stranded { since, why: format!("its ranks cannot be placed: {}", unplaced.why) }
            }
            (Phase::Draining, None) => ReplicaCondition::Drains,
            (Phase::Recovering | Phase::Loading, None) => {
                ReplicaCondition::Recovers { since }.at_time(now, recovery_max)
            }
            (Phase::Ready | Phase::Unspecified, None) => ReplicaCondition::Serves,
        }
    }

    /// The condition at a later moment.
    pub fn at_time(self, now: Instant, recovery_max: Duration) -> ReplicaCondition {
        match self {
            ReplicaCondition::Recovers { since } if since + recovery_max <= now => {
                ReplicaCondition::Stranded { since, why: "it has been without its ranks for too long".into() }
            }
            same => same,
        }
    }

    /// When the condition changes by itself.
    pub fn due(&self, recovery_max: Duration) -> Option<Instant> {
        match self {
            ReplicaCondition::Recovers { since } => Some(*since + recovery_max),
            ReplicaCondition::Serves | ReplicaCondition::Drains | ReplicaCondition::Stranded { .. } => None,
        }
    }

    pub fn is_stranded(&self) -> bool {
        matches!(self, ReplicaCondition::Stranded { .. })
    }

    /// Whether the replica computes the requests that it has.
    pub fn computes(&self) -> bool {
        matches!(self, ReplicaCondition::Serves | ReplicaCondition::Drains)
    }

    /// Why its requests do not advance there.
    pub fn why(&self) -> Option<&str> {
        match self {
            ReplicaCondition::Serves => None,
            ReplicaCondition::Drains => Some("it is draining"),
            ReplicaCondition::Recovers { .. } => Some("its ranks are recovering"),
            ReplicaCondition::Stranded { why, .. } => Some(why),
        }
    }

    fn since(&self) -> Option<Instant> {
        match self {
            ReplicaCondition::Serves | ReplicaCondition::Drains => None,
            ReplicaCondition::Recovers { since } | ReplicaCondition::Stranded { since, .. } => Some(*since),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_unplaced_replica_is_stranded_at_once_and_a_recovering_one_after_a_while() {
        let (now, max) = (Instant::now(), 10 * SECOND);
        let state = |phase: Phase| wire::State { phase: phase.into(), ..wire::State::default() };
        let recovers = ReplicaCondition::Serves.after_state(&state(Phase::Recovering), now, max);
        assert_eq!((&recovers, recovers.due(max)), (&ReplicaCondition::Recovers { since: now }, Some(now + max)));
        assert_eq!(recovers.clone().at_time(now + max - SECOND, max), recovers);
        assert!(recovers.clone().at_time(now + max, max).is_stranded());
        let unplaced = Some(wire::Unplaced { why: "too few".into(), micros: 0 });
        for phase in [Phase::Recovering, Phase::Draining] {
            let stranded =
                recovers.after_state(&wire::State { unplaced: unplaced.clone(), ..state(phase) }, now + SECOND, max);
            assert!(
                stranded.is_stranded() && stranded.why().unwrap().contains("too few") && stranded.due(max).is_none()
            );
            // Its ranks are being placed again: requests wait as before, unless that time is over.
            let placing = state(Phase::Recovering);
            assert_eq!(stranded.after_state(&placing, now + 2 * SECOND, max), recovers);
            assert!(stranded.after_state(&placing, now + max, max).is_stranded());
            assert_eq!(stranded.after_state(&state(Phase::Ready), now + max, max), ReplicaCondition::Serves);
        }
        let drains = recovers.after_state(&state(Phase::Draining), now, max);
        assert!(drains == ReplicaCondition::Drains && drains.computes() && !recovers.computes());
    }
}
