//! The workers of a replica, and the phase of its placement on them. Handles the workers' events and finds lost ones.
//! Knows no requests: a method returns what the replica must do next, and the replica does it.
//!
//! Workers join, and ranks become ready (`readiness`); some are lost (`losses`); the replica is placed (`placing`) on
//! the grid that is best now (`grids`). An epoch's data is in the `phase` and is dropped with it.

pub(crate) mod endings;
mod grids;
pub(crate) mod joined;
mod losses;
mod phase;
mod placing;
mod readiness;
mod readings;
mod speed;
mod tier;

use crate::members::kv_target::KvNeeds;
use crate::members::unreachable::ExcludedWorker;
use crate::members::workers::JoinedWorkers;
use crate::placement::ShortenedContext;
use crate::{Config, WorkerId};
use bytes::Bytes;
use endings::{EpochEnding, LossQueue, Successor, WorkerDismissalCause};
use grids::GridChooser;
use joined::ServedWeights;
use phase::{Phase, Placement};
use proto::cluster as wire;
use readings::WeightReadings;
use scheduler::Counters;
use speed::Performance;
use std::sync::Arc;
use std::time::Duration;
use telemetry::metrics::{self, ReplicaLabel};
use tonic::Status;
use types::{Epoch, FetchDone, Grid, Micros, PageKey, PolicyDigest, Rank, StepDone};

pub(crate) struct Deployment {
    config: Arc<Config>,
    /// The label of its metrics.
    of: ReplicaLabel,
    /// Grows when a placement begins and when it ends.
    epoch: Epoch,
    members: JoinedWorkers,
    grids: GridChooser,
    phase: Phase,
    /// The hashes of the bytes that the ranks have read.
    readings: WeightReadings,
    /// The number of reloads so far.
    reading: u32,
    performance: Performance,
    /// Empty between events.
    losses: LossQueue,
    /// Whether routers do not have its state yet.
    is_changed: bool,
}

/// What the replica must do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transition {
    /// All ranks are ready.
    BeginEpoch,
    EndEpoch(EpochEnding),
    /// Place the replica, if it has no placement and one is possible.
    Place,
    /// End the epoch, and place the replica anew.
    Restart(EpochEnding),
}

impl Deployment {
    pub fn new(config: Arc<Config>, of: ReplicaLabel, epoch: Epoch) -> Deployment {
        Deployment {
            of,
            epoch,
            members: JoinedWorkers::default(),
            grids: GridChooser::new(config.policy.grid),
            phase: Phase::default(),
            readings: WeightReadings::default(),
            reading: 0,
            performance: Performance::default(),
            losses: LossQueue::default(),
            is_changed: false,
            config,
        }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub fn is_serving(&self) -> bool {
        self.phase.serving().is_some()
    }

    /// The grid in force, or else the requested one.
    pub fn grid(&self) -> Grid {
        self.phase.blueprint().map_or(self.grids.requested(), |blueprint| blueprint.grid)
    }

    /// The number of ranks that serve.
    pub fn n_ranks_ready(&self) -> usize {
        self.phase.serving().map_or(0, |serving| serving.placement.blueprint.shards.len())
    }

    /// The worker that now holds a rank.
    pub fn successor(&self, rank: u16) -> Option<Successor> {
        let shard = self.phase.blueprint()?.shards.iter().find(|shard| shard.rank.0 == rank)?;
        Some(Successor { host: shard.host.clone(), pid: self.members.pid(shard.worker) })
    }

    /// The weights, once they have been served.
    pub fn weights(&self) -> Result<ServedWeights, Status> {
        let served = self.readings.served().cloned();
        served.ok_or_else(|| Status::unavailable("the replica has not served yet"))
    }

    /// The served policy or, if none was served, the one configured for this worker's device.
    fn expected_policy(&self, worker: WorkerId) -> Option<PolicyDigest> {
        let configured = || self.members.device(worker).and_then(|device| self.config.digest_on(device));
        self.readings.expected_policy().or_else(configured)
    }

    pub fn leave_all(&mut self, reason: &str) {
        self.members.leave_all(reason);
    }

    // -- steps

    /// Sends a step of this much work to all ranks. False: one of them does not read its steps, and is lost.
    /// `is_first`: no other step is in flight.
    pub fn send_step(&mut self, step: &Bytes, work: u64, is_first: bool, now: Micros) -> bool {
        let Some(serving) = self.phase.serving_mut() else { return false };
        serving.step_sent(work, is_first, now);
        let sent = self.members.send_step(&serving.placement.ranks, step);
        sent.map_err(|worker| self.losses.report_deaf(worker, "steps")).is_ok()
    }

    pub fn mark_alive(&mut self, worker: WorkerId) {
        self.members.mark_alive(worker);
    }

    /// Only the rank that samples answers steps.
    pub fn is_sampler(&self, worker: WorkerId) -> bool {
        self.phase.placement().is_some_and(|placement| {
            let sampler = placement.blueprint.grid.sampler();
            placement.ranks.is_ready(worker) && placement.ranks.rank(worker) == Some(sampler)
        })
    }

    pub fn refuse_answer(&mut self, worker: WorkerId, why: String) {
        self.losses.report(worker, WorkerDismissalCause::Wrong, Status::invalid_argument(why));
    }

    /// How long the step took that is answered now. With several stages the rank that samples knows only its own part,
    /// and the time since the answer before is that of the slowest stage.
    pub fn duration(&self, done: &StepDone, now: Micros) -> Micros {
        match self.phase.serving() {
            Some(serving) if serving.placement.blueprint.grid.pp > 1 => serving.awaited(now),
            _ => Micros(done.micros.into()),
        }
    }

    pub fn record_answer(&mut self, done: &StepDone, now: Micros) {
        let Some(serving) = self.phase.serving_mut() else { return };
        let n_tokens = done.slices.iter().map(|slice| slice.tokens.len() as u64).sum();
        let in_flight_since = serving.step_answered(now);
        self.performance.measured.record_answer(done.slices.len(), n_tokens, in_flight_since, now);
        metrics::step(&self.of, Duration::from_micros(done.micros.into()));
    }

    // -- the disks behind the pools

    /// A rank has ended a fetch. Returns the answer of all ranks, once there is one.
    pub fn pages_fetched(&mut self, worker: WorkerId, done: FetchDone) -> Option<FetchDone> {
        self.members.mark_alive(worker);
        let Placement { blueprint, tier, .. } = &mut self.phase.serving_mut()?.placement;
        if done.epoch != self.epoch {
            return None;
        }
        tier.record_fetched(worker, done, blueprint.shards.len())
    }

    /// Keeps the names of a rank's pages until they are taken.
    pub fn pages_kept(&mut self, worker: WorkerId, pages: &wire::PagesKept) {
        self.members.mark_alive(worker);
        let of = Epoch { incarnation: pages.epoch_incarnation, n: pages.epoch_n };
        if let Some(placement) = self.phase.placement_mut().filter(|_| of == self.epoch) {
            placement.tier.record_kept(pages);
        }
    }

    /// The names that were reported since the last call, once the replica serves.
    pub fn take_kept_pages(&mut self) -> Vec<PageKey> {
        self.phase.serving_mut().map(|serving| serving.placement.tier.take_kept()).unwrap_or_default()
    }

    // -- the memory of KV caches

    /// The parts of the last target, if any rank grows.
    pub fn kv_target_parts(&self) -> Option<u32> {
        self.phase.serving()?.kv_target().map(|target| target.parts())
    }

    pub fn raise_kv_target(&mut self, parts: u32) {
        let Some(serving) = self.phase.serving_mut() else { return };
        serving.raise_kv_target(parts);
        self.send_kv_target();
    }

    /// Lowers the target of ranks that hold more than is needed, if that is due. Returns the parts that remain, which
    /// requests must be limited to before the target is sent.
    pub fn lower_kv_target(&mut self, needs: KvNeeds, now: Micros) -> Option<u32> {
        self.phase.serving_mut()?.lower_kv_target(needs, now, &self.config.waits)
    }

    /// Sends the target to ranks that grow.
    pub fn send_kv_target(&mut self) {
        let Some(serving) = self.phase.serving() else { return };
        let Some(target) = serving.kv_target() else { return };
        if let Err(worker) = self.members.send_kv_target(&serving.placement.ranks, target.frame(self.epoch)) {
            self.losses.report_deaf(worker, "frames");
        }
    }

    // -- reports

    /// Whether its state has changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// Its part of the replica's state. `planned` are the scheduler's counters.
    pub fn state(&self, planned: &Counters, now: Micros) -> wire::State {
        let ranks = self.phase.placement().map_or_else(Vec::new, |placement| {
            self.members.states(&placement.blueprint, &placement.ranks, |rank| self.phase.is_slow(rank))
        });
        let (blueprint, requested, grid) = (self.phase.blueprint(), self.grids.requested(), self.grid());
        let prediction = self.performance.predicted.filter(|_| blueprint.is_some());
        wire::State {
            epoch_incarnation: self.epoch.incarnation,
            epoch_n: self.epoch.n,
            ranks,
            n_spares: self.members.n_spares(self.phase.ranks()) as u32,
            prediction: prediction.map(|prediction| {
                Box::new(wire::Prediction {
                    tokens_per_s_low: prediction.low,
                    tokens_per_s_high: prediction.high,
                    bottleneck: prediction.bottleneck.to_string(),
                })
            }),
            actual: Some(self.performance.measured.report(planned)),
            tp: grid.tp.into(),
            pp: grid.pp.into(),
            apart: self.unreachable_workers(now),
            requested_tp: requested.tp.into(),
            requested_pp: requested.pp.into(),
            unplaced: self.phase.unplaced(now),
            shortened: blueprint.and_then(|blueprint| blueprint.shortened.as_ref()).map(shortened),
            protocol: self.protocol(),
            ..wire::State::default()
        }
    }

    /// The newest protocol that this coordinator and all ranks speak. Until they are placed, no rank limits it.
    fn protocol(&self) -> u32 {
        let own = self.config.speaks.protocols.map_or(proto::OLDEST, |protocols| protocols.newest);
        let of_ranks = self.phase.ranks().and_then(|ranks| self.members.protocol(ranks.workers()));
        of_ranks.map_or(own, |of_ranks| of_ranks.min(own))
    }

    fn unreachable_workers(&self, now: Micros) -> Vec<wire::Apart> {
        let apart = |(worker, out): (WorkerId, &ExcludedWorker)| wire::Apart {
            host: self.members.host(worker).to_owned(),
            address: self.members.mesh_address(worker),
            other_host: self.members.host(out.from).to_owned(),
            other_address: self.members.mesh_address(out.from),
            why: out.why.clone(),
            micros: out.until.since(now).0,
        };
        self.members.excluded(now).map(apart).collect()
    }

    /// How each rank spent its time since the last call, and how much of it was a bubble. Call about once a second.
    pub fn measure_ranks(&mut self, now: Micros) -> Vec<(Rank, wire::RankTimes)> {
        let in_flight = self.performance.measured.in_flight_micros();
        let Some(ranks) = self.phase.ranks() else { return Vec::new() };
        let times = self.members.close_time_windows(ranks, now, in_flight);
        for (rank, times) in &times {
            metrics::bubble(&self.of, rank.0, times.in_flight_micros.saturating_sub(times.compute_micros));
            metrics::rank_slow(&self.of, rank.0, self.phase.is_slow(*rank));
        }
        times
    }

    /// A slow rank is named and stays: dismissing it would cost more.
    pub fn report_slow_ranks(&mut self, times: &[(Rank, wire::RankTimes)]) {
        let Some(serving) = self.phase.serving_mut() else { return };
        for change in serving.compare_times(times) {
            let (rank, micros, others_micros) = (change.rank, change.micros, change.others_micros);
            let shards = &serving.placement.blueprint.shards;
            let host = shards.iter().find(|shard| shard.rank == rank).map_or("", |shard| &shard.host);
            let word = if change.is_slow { "a rank is slow" } else { "a rank is no longer slow" };
            tracing::warn!(rank = rank.0, host, micros, others_micros, "{word}");
            metrics::rank_slow(&self.of, rank.0, change.is_slow);
            self.is_changed = true;
        }
    }

    /// Call about once a second.
    pub fn log_speed_if_due(&mut self, planned: &Counters, now: Micros) {
        self.performance.log_if_due(planned, now);
    }

    pub fn log_speed(&self, planned: &Counters) {
        self.performance.log(planned);
    }

    /// Ranks that have not read the model again in spite of a reload.
    pub fn reload_failures(&self) -> Vec<wire::Unread> {
        self.phase.ranks().map_or_else(Vec::new, |ranks| self.members.reload_failures(ranks))
    }
}

fn shortened(shortened: &ShortenedContext) -> wire::Shortened {
    wire::Shortened { requested: shortened.requested, has: shortened.has, why: shortened.why.to_string() }
}
