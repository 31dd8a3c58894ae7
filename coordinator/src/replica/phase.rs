//! The phase of a replica, and the state that belongs to it: an epoch's state is dropped with its phase. Knows no
//! requests; the caller passes the time.

use crate::config::micros;
use crate::members::kv_target::KvTarget;
use crate::members::patience::StepTimes;
use crate::members::ranks::RankHolders;
use crate::members::slow::SlownessDetector;
use crate::placement::{Blueprint, Unplaceable, UnplaceableReason};
use crate::{Timings, WorkerId};
use proto::cluster as wire;
use types::{Epoch, Micros, Rank};

pub(crate) enum Phase {
    /// No worker holds a rank.
    Waiting(PlacementWait),
    /// Ranks load their parts of the model, and then meet.
    Placing(Placement),
    /// All ranks are ready.
    Serving(ServingPhase),
}

/// Waits for workers, or for a time.
#[derive(Default)]
pub(crate) struct PlacementWait {
    /// No placement before this, because the ranks did not reach each other.
    not_before: Option<Micros>,
    /// When to try again although no worker has come or gone.
    try_at: Option<Micros>,
    /// Whether the next grid is one that the replica grows to.
    pub is_growing: bool,
    /// Present while no grid fits these workers.
    unplaced: Option<UnplacedState>,
}

/// Why there is no grid, and since when.
struct UnplacedState {
    why: Unplaceable,
    since: Micros,
}

/// An epoch's blueprint, and the workers that carry it out.
pub(crate) struct Placement {
    pub epoch: Epoch,
    pub blueprint: Blueprint,
    pub ranks: RankHolders,
    /// Whether the replica grew to this grid.
    pub is_grown: bool,
}

pub(crate) struct ServingPhase {
    pub placement: Placement,
    since: Micros,
    /// Since when a grid with more ranks has been possible.
    wider_since: Option<Micros>,
    /// Since when the oldest step in flight has been awaited.
    pub step_since: Micros,
    pub patience: StepTimes,
    pub slowness: SlownessDetector,
    pub kv: KvTarget,
}

impl Default for Phase {
    fn default() -> Phase {
        Phase::Waiting(PlacementWait::default())
    }
}

impl Phase {
    pub fn placement(&self) -> Option<&Placement> {
        match self {
            Phase::Waiting(_) => None,
            Phase::Placing(placement) | Phase::Serving(ServingPhase { placement, .. }) => Some(placement),
        }
    }

    pub fn placement_mut(&mut self) -> Option<&mut Placement> {
        match self {
            Phase::Waiting(_) => None,
            Phase::Placing(placement) | Phase::Serving(ServingPhase { placement, .. }) => Some(placement),
        }
    }

    pub fn serving(&self) -> Option<&ServingPhase> {
        match self {
            Phase::Serving(serving) => Some(serving),
            Phase::Waiting(_) | Phase::Placing(_) => None,
        }
    }

    pub fn ranks(&self) -> Option<&RankHolders> {
        self.placement().map(|placement| &placement.ranks)
    }

    pub fn blueprint(&self) -> Option<&Blueprint> {
        self.placement().map(|placement| &placement.blueprint)
    }

    /// The rank that a worker holds.
    pub fn rank(&self, worker: WorkerId) -> Option<Rank> {
        self.ranks()?.rank(worker)
    }

    pub fn is_slow(&self, rank: Rank) -> bool {
        self.serving().is_some_and(|serving| serving.slowness.is_slow(rank))
    }

    /// How long it has served in this epoch.
    pub fn served_micros(&self, now: Micros) -> u64 {
        self.serving().map_or(0, |serving| now.since(serving.since).0)
    }

    /// A worker came or went: the possible grids are searched anew.
    pub fn crowd_changed(&mut self) {
        if let Phase::Serving(serving) = self {
            serving.wider_since = None;
        }
    }

    /// The worker that the others did not reach is gone: the next placement need not wait.
    pub fn trust_again(&mut self) {
        if let Phase::Waiting(waiting) = self {
            waiting.not_before = None;
        }
    }

    /// Ends the epoch. If the replica was waiting already, the facts about that wait are kept.
    pub fn into_waiting(self, not_before: Option<Micros>, try_at: Micros) -> Phase {
        let before = match self {
            Phase::Waiting(before) => before,
            Phase::Placing(_) | Phase::Serving(_) => PlacementWait::default(),
        };
        Phase::Waiting(PlacementWait {
            not_before: not_before.or(before.not_before),
            try_at: Some(try_at),
            is_growing: false,
            unplaced: before.unplaced,
        })
    }
}

impl PlacementWait {
    pub fn is_due(&self, now: Micros) -> bool {
        [self.not_before, self.try_at].into_iter().flatten().any(|at| now >= at)
    }

    /// False: the wait is over, and is cleared.
    pub fn must_wait(&mut self, now: Micros) -> bool {
        let must_wait = self.not_before.is_some_and(|not_before| now < not_before);
        if !must_wait {
            self.not_before = None;
            self.try_at = self.try_at.filter(|at| now < *at);
        }
        must_wait
    }

    /// Tries again at this time, or earlier if that was due already.
    pub fn try_again_at(&mut self, at: Option<Micros>) {
        self.try_at = [self.try_at, at].into_iter().flatten().min();
    }

    /// Records that there is no grid now. True if the reason is new, and was logged.
    pub fn record_unplaceable(&mut self, now: Micros, why: Unplaceable, n_workers: usize) -> bool {
        if self.unplaced.as_ref().is_some_and(|unplaced| unplaced.why == why) {
            return false;
        }
        match why.why {
            UnplaceableReason::TooFew { .. } => tracing::info!(%why, "the replica waits for workers"),
            _ => tracing::warn!(%why, n_workers, "the replica cannot be placed"),
        }
        let since = self.unplaced.as_ref().map_or(now, |unplaced| unplaced.since);
        self.unplaced = Some(UnplacedState { why, since });
        true
    }

    /// Records that there is a grid, though placing may have to wait. True if there was none before.
    pub fn record_placeable(&mut self) -> bool {
        self.unplaced.take().is_some()
    }

    /// Returns the state for the routers, which may have other replicas to turn to.
    pub fn unplaced(&self, now: Micros) -> Option<wire::Unplaced> {
        let UnplacedState { why, since } = self.unplaced.as_ref()?;
        Some(wire::Unplaced { why: why.to_string(), micros: now.since(*since).0 })
    }
}

impl ServingPhase {
    pub fn begin(placement: Placement, now: Micros) -> ServingPhase {
        let kv = KvTarget::new(placement.ranks.kv_parts());
        let (patience, slowness) = (StepTimes::starting(now), SlownessDetector::default());
        ServingPhase { placement, since: now, wider_since: None, step_since: now, patience, slowness, kv }
    }

    /// Whether more ranks have been possible for long enough to be trusted; the wait grows with `n_relapses`.
    pub fn is_wider_for_long(&mut self, now: Micros, waits: &Timings, n_relapses: u32) -> bool {
        let since = *self.wider_since.get_or_insert(now);
        now.since(since).0 >= micros(waits.regrow_after) << n_relapses
    }
}
