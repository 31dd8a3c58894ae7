//! The loop's part that lays the replica out: when, on which grid, and what is sent to each rank.

use super::Replica;
use super::endings::{EpochEnding, WorkerDismissalCause};
use super::grids::GridRequirements;
use super::phase::{Phase, Placement};
use crate::config::micros;
use crate::members::ranks::RankHolders;
use crate::placement::{Blueprint, Machine, Shard, predict};
use proto::cluster as wire;
use std::time::Duration;
use tonic::Status;
use types::{Grid, Micros};

pub(super) const UNREAD: &str = "this rank does not read its frames";

impl Replica {
    pub(super) fn grid_requirements(&self) -> GridRequirements<'_> {
        GridRequirements { config: &self.config, promised: self.requests.promised_context() }
    }

    pub(super) fn place_if_due(&mut self, now: Micros) {
        if matches!(&self.phase, Phase::Waiting(waiting) if waiting.is_due(now)) {
            self.place();
        }
    }

    /// Lays the replica out, if it has no layout and one is possible.
    pub(super) fn place(&mut self) {
        let now = self.now();
        let Phase::Waiting(waiting) = &mut self.phase else { return };
        let must_wait = waiting.must_wait(now);
        let candidates = self.members.candidates(now);
        let requirements = GridRequirements { config: &self.config, promised: self.requests.promised_context() };
        match self.grids.choose(requirements, &self.members, &candidates, now) {
            Ok(_) if must_wait => self.state_changed |= waiting.record_placeable(),
            Ok(blueprint) => {
                let is_grown = waiting.is_growing;
                self.predict(candidates.all(), &blueprint);
                self.assign(blueprint, is_grown);
            }
            Err(why) => {
                self.state_changed |= waiting.record_unplaceable(now, why, candidates.all().len());
                // By then a worker that is left out may have another attempt, or fewer ranks are acceptable.
                let chances = [self.members.next_chance(now), self.grids.next_chance(now)];
                waiting.try_again_at(chances.into_iter().flatten().min());
            }
        }
    }

    fn predict(&mut self, inventory: &[Machine], blueprint: &Blueprint) {
        let policy = self.grid_requirements().policy_on(blueprint.grid);
        self.performance.placed(predict(inventory, &self.config.shape, &policy, blueprint).ok());
    }

    fn assign(&mut self, blueprint: Blueprint, is_grown: bool) {
        let now = self.now();
        self.epoch.n += 1;
        let (Blueprint { grid, context, .. }, n_blocks) = (&blueprint, blueprint.n_blocks());
        let (epoch, kv_dtype) = (self.epoch, self.config.policy.kv_dtype);
        tracing::info!(%epoch, tp = grid.tp, pp = grid.pp, context, ?n_blocks, %kv_dtype, "placing the replica");
        if let Some(shortened) = &blueprint.shortened {
            tracing::warn!(requested = shortened.requested, has = shortened.has, "{shortened}");
        }
        self.state_changed = true;
        self.grids.begun(&blueprint);
        self.readings.begin(*grid);
        let mut ranks = RankHolders::default();
        for shard in &blueprint.shards {
            ranks.assign(shard.worker, shard.rank, now);
            if !self.members.assign(shard.worker, self.assignment(&blueprint, shard)) {
                self.report_loss(shard.worker, WorkerDismissalCause::Deaf, Status::resource_exhausted(UNREAD));
                break;
            }
        }
        self.phase = Phase::Placing(Placement { epoch: self.epoch, blueprint, ranks, is_grown });
    }

    fn assignment(&self, blueprint: &Blueprint, shard: &Shard) -> wire::Assign {
        let (policy, waits) = (&self.config.policy, &self.config.waits);
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let is_alone = blueprint.shards.len() == 1;
        let protocol = self.members.protocol(blueprint.shards.iter().map(|shard| shard.worker));
        let may_guess = protocol.is_some_and(|protocol| protocol >= proto::since::GUESSES);
        let mesh_addresses = blueprint.shards.iter().map(|shard| self.members.mesh_address(shard.worker));
        wire::Assign {
            epoch_incarnation: self.epoch.incarnation,
            epoch_n: self.epoch.n,
            rank: shard.rank.0.into(),
            stages: blueprint.layout.stages().iter().map(wire::Stage::from).collect(),
            mesh_addresses: mesh_addresses.filter(|_| !is_alone).collect(),
            mesh_secret: if is_alone { Vec::new() } else { self.config.mesh_secret(self.epoch).to_vec() },
            model_path: self.config.model_path.to_string_lossy().into_owned(),
            activations: policy.activations.to_string(),
            kv_dtype: policy.kv_dtype.to_string(),
            n_blocks: blueprint.n_blocks(),
            kv_bytes: shard.kv_bytes,
            // The promised context, even if the pools hold less: the angles of scaled RoPE depend on it.
            context: self.requests.promised_context().unwrap_or(blueprint.context),
            batch_tokens_max: self.config.limits.batch_tokens_max,
            running_max: policy.running_max,
            meet_max_millis: millis(waits.meet_max),
            exchange_max_millis: millis(waits.exchange_max),
            policy_digest: self.expected_policy(shard.worker).map_or_else(Vec::new, |policy| policy.0.to_vec()),
            reading: self.changes.reading,
            zero_kv: self.config.zero_kv,
            numerics: self.config.mode().to_string(),
            guesses: self.config.limits.guesses().filter(|_| may_guess),
            sends_kv_target: true,
            // Each worker's own, which is set where its stream is known.
            protocol: 0,
        }
    }

    /// Whether another replica's streams may depend on this one, which then makes no optional change. Either it has
    /// taken some over not long ago, or the other replicas are there and none of them serves.
    fn is_needed(&self, now: Micros) -> bool {
        let hold = micros(self.config.waits.takeover_hold);
        let has_taken_over = self.requests.last_takeover().is_some_and(|at| now.since(at).0 < hold);
        let others = self.others.count();
        has_taken_over || (others.n > 0 && others.n_ready == 0)
    }

    /// Call about once a second. If the replica runs on a smaller grid and more ranks have been there for long enough,
    /// it is spread over them.
    pub(super) fn grow_if_due(&mut self, now: Micros) {
        let requirements = GridRequirements { config: &self.config, promised: self.requests.promised_context() };
        let Phase::Serving(serving) = &mut self.phase else { return };
        let blueprint = &serving.placement.blueprint;
        let is_whole = blueprint.grid == self.grids.requested && requirements.promised == Some(blueprint.context);
        if is_whole || self.draining_since.is_some() {
            return;
        }
        let grid = blueprint.grid;
        let has_spares = self.members.n_spares(Some(&serving.placement.ranks)) > 0;
        let wider = || self.grids.wider_than(blueprint, requirements, self.members.candidates(now).all());
        let Some(wider) = has_spares.then(wider).flatten() else { return self.phase.crowd_changed() };
        let is_due = serving.is_wider_for_long(now, &self.config.waits, self.grids.n_relapses);
        if is_due && !self.is_needed(now) {
            let (from_tp, from_pp, Grid { tp, pp, .. }) = (grid.tp, grid.pp, wider);
            tracing::info!(from_tp, from_pp, tp, pp, "workers have joined: moving to a larger grid");
            self.end_epoch(EpochEnding::Requested);
            if let Phase::Waiting(waiting) = &mut self.phase {
                waiting.is_growing = true;
            }
            self.place();
        }
    }
}
