//! The phase of a replica, and the state that belongs to it: an epoch's state is dropped with its phase. Knows no
//! requests; the caller passes the time.

use crate::config::micros;
use crate::deployment::tier::RankTiers;
use crate::members::kv_target::{KvNeeds, KvTarget};
use crate::members::patience::StepTimes;
use crate::members::ranks::RankHolders;
use crate::members::slow::{RankTime, SlownessChange, SlownessDetector};
use crate::placement::{Blueprint, Unplaceable, UnplaceableReason};
use crate::{Timings, WorkerId};
use proto::cluster as wire;
use std::time::Duration;
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
    is_growing: bool,
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
    /// What ranks report of the disks behind their pools.
    pub tier: RankTiers,
    /// Whether the replica grew to this grid.
    pub is_grown: bool,
}

pub(crate) struct ServingPhase {
    pub placement: Placement,
    since: Micros,
    /// Since when a grid with more ranks has been possible.
    wider_since: Option<Micros>,
    /// Since when the oldest step in flight has been awaited.
    step_since: Micros,
    patience: StepTimes,
    slowness: SlownessDetector,
    kv: KvTarget,
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

    /// The placement whose ranks are not all ready.
    pub fn placing(&self) -> Option<&Placement> {
        match self {
            Phase::Placing(placement) => Some(placement),
            Phase::Waiting(_) | Phase::Serving(_) => None,
        }
    }

    pub fn placing_mut(&mut self) -> Option<&mut Placement> {
        match self {
            Phase::Placing(placement) => Some(placement),
            Phase::Waiting(_) | Phase::Serving(_) => None,
        }
    }

    pub fn serving(&self) -> Option<&ServingPhase> {
        match self {
            Phase::Serving(serving) => Some(serving),
            Phase::Waiting(_) | Phase::Placing(_) => None,
        }
    }

    pub fn serving_mut(&mut self) -> Option<&mut ServingPhase> {
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

    /// Why and since when there is no grid, for routers that may have other replicas to turn to.
    pub fn unplaced(&self, now: Micros) -> Option<wire::Unplaced> {
        let Phase::Waiting(PlacementWait { unplaced: Some(UnplacedState { why, since }), .. }) = self else {
            return None;
        };
        Some(wire::Unplaced { why: why.to_string(), micros: now.since(*since).0 })
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

    /// All ranks of the placement are ready.
    pub fn into_serving(self, now: Micros) -> Phase {
        match self {
            Phase::Placing(placement) => Phase::Serving(ServingPhase::begin(placement, now)),
            other => other,
        }
    }

    /// Ends the epoch. If the replica was waiting already, the facts about that wait are kept.
    pub fn into_waiting(self, not_before: Option<Micros>, try_at: Micros, is_growing: bool) -> Phase {
        let before = match self {
            Phase::Waiting(before) => before,
            Phase::Placing(_) | Phase::Serving(_) => PlacementWait::default(),
        };
        Phase::Waiting(PlacementWait {
            not_before: not_before.or(before.not_before),
            try_at: Some(try_at),
            is_growing,
            unplaced: before.unplaced,
        })
    }
}

impl Placement {
    /// The worker that holds a rank of this number.
    pub fn holder(&self, rank: u32) -> Option<WorkerId> {
        let shard = self.blueprint.shards.iter().find(|shard| u32::from(shard.rank.0) == rank)?;
        Some(shard.worker)
    }
}

impl PlacementWait {
    pub fn is_growing(&self) -> bool {
        self.is_growing
    }

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
}

impl ServingPhase {
    fn begin(placement: Placement, now: Micros) -> ServingPhase {
        let kv = KvTarget::new(placement.ranks.kv_parts());
        let (patience, slowness) = (StepTimes::starting(now), SlownessDetector::default());
        ServingPhase { placement, since: now, wider_since: None, step_since: now, patience, slowness, kv }
    }

    /// Whether more ranks have been possible for long enough to be trusted; the wait grows with `n_relapses`.
    pub fn is_wider_for_long(&mut self, now: Micros, waits: &Timings, n_relapses: u32) -> bool {
        let since = *self.wider_since.get_or_insert(now);
        now.since(since).0 >= micros(waits.regrow_after) << n_relapses
    }

    /// A step of this much work is sent. `is_first`: no other is in flight.
    pub fn step_sent(&mut self, work: u64, is_first: bool, now: Micros) {
        if is_first {
            self.step_since = now;
        }
        self.patience.sent(work);
    }

    /// How long the oldest step in flight has been awaited: since it was sent, or since the answer before it.
    pub fn awaited(&self, now: Micros) -> Micros {
        now.since(self.step_since)
    }

    /// The oldest step is answered. Returns since when it was awaited: from the answer before it, if that came while
    /// the step was in flight.
    pub fn step_answered(&mut self, now: Micros) -> Micros {
        self.patience.record_answer(self.awaited(now).0);
        std::mem::replace(&mut self.step_since, now)
    }

    /// Call once per beat. Returns how long a step has been awaited, if that is longer than it may take.
    pub fn overdue_step(&mut self, now: Micros, waits: &Timings) -> Option<Duration> {
        self.patience.tick(now, micros(waits.beat_every));
        self.patience.is_over(waits).then(|| Duration::from_micros(self.patience.awaited_micros()))
    }

    pub fn slow_ranks(&self) -> Vec<Rank> {
        self.slowness.slow_ranks()
    }

    /// Returns the ranks that have become slow, or are slow no longer, by the times that each spent.
    pub fn compare_times(&mut self, times: &[(Rank, wire::RankTimes)]) -> Vec<SlownessChange> {
        let grid = self.placement.blueprint.grid;
        let time = |(rank, times): &(Rank, wire::RankTimes)| RankTime {
            rank: *rank,
            stage: grid.place(*rank).stage,
            n_steps: times.steps,
            compute_micros: times.compute_micros,
        };
        let times: Vec<RankTime> = times.iter().map(time).collect();
        self.slowness.look(&times)
    }

    /// The last target for the memory of KV caches, if any rank grows.
    pub fn kv_target(&self) -> Option<&KvTarget> {
        self.placement.ranks.some_grow().then_some(&self.kv)
    }

    pub fn raise_kv_target(&mut self, parts: u32) {
        self.kv.set(parts);
    }

    /// Lowers the target if that is due. Returns the memory that every rank is left with.
    pub fn lower_kv_target(&mut self, needs: KvNeeds, now: Micros, waits: &Timings) -> Option<u32> {
        let parts = self.kv.lower(needs, now, micros(waits.kv_release_after))?;
        self.kv.set(parts);
        self.placement.ranks.record_kv_lowered(parts, self.kv.n());
        Some(self.placement.ranks.kv_parts())
    }
}
