//! Places the replica: when, on which grid, and what is sent to each rank. An epoch ends here.

use super::endings::EpochEnding;
use super::grids::GridRequirements;
use super::phase::{Phase, Placement};
use super::tier::RankTiers;
use super::{Deployment, Transition};
use crate::members::ranks::RankHolders;
use crate::placement::{Blueprint, Shard, Unplaceable, plan, predict};
use proto::cluster as wire;
use std::time::Duration;
use telemetry::metrics;
use types::{Epoch, Grid, Micros};

impl Deployment {
    /// An operator requests this grid.
    pub fn request_grid(&mut self, grid: Grid) {
        self.grids.request(grid);
    }

    /// From the next placement on, ranks read the model again.
    pub fn request_reload(&mut self) {
        self.reading += 1;
    }

    /// The layout on this grid of the workers that are here.
    pub fn plan_on(&self, grid: Grid, promised: Option<u32>, now: Micros) -> Result<Blueprint, Unplaceable> {
        let policy = GridRequirements { config: &self.config, promised }.policy_on(grid);
        plan(self.members.candidates(now).all(), &self.config.shape, &policy, None)
    }

    pub fn is_placement_due(&self, now: Micros) -> bool {
        matches!(&self.phase, Phase::Waiting(waiting) if waiting.is_due(now))
    }

    /// Places the replica, if it has no placement and one is possible. `promised` is the context that routers rely on.
    pub fn place(&mut self, promised: Option<u32>, now: Micros) {
        let Phase::Waiting(waiting) = &mut self.phase else { return };
        let must_wait = waiting.must_wait(now);
        let candidates = self.members.candidates(now);
        let requirements = GridRequirements { config: &self.config, promised };
        match self.grids.choose(requirements, &self.members, &candidates, now) {
            Ok(_) if must_wait => self.is_changed |= waiting.record_placeable(),
            Ok(blueprint) => {
                let is_grown = waiting.is_growing();
                let policy = requirements.policy_on(blueprint.grid);
                let predicted = predict(candidates.all(), &self.config.shape, &policy, &blueprint);
                self.performance.placed(predicted.ok());
                self.assign(blueprint, is_grown, promised, now);
            }
            Err(why) => {
                self.is_changed |= waiting.record_unplaceable(now, why, candidates.all().len());
                // By then a worker that is left out may have another attempt, or fewer ranks are acceptable.
                let chances = [self.members.next_chance(now), self.grids.next_chance(now)];
                waiting.try_again_at(chances.into_iter().flatten().min());
            }
        }
    }

    fn assign(&mut self, blueprint: Blueprint, is_grown: bool, promised: Option<u32>, now: Micros) {
        self.epoch.n += 1;
        let (Blueprint { grid, context, .. }, n_blocks) = (&blueprint, blueprint.n_blocks());
        let (epoch, kv_dtype) = (self.epoch, self.config.policy.kv_dtype);
        tracing::info!(%epoch, tp = grid.tp, pp = grid.pp, context, ?n_blocks, %kv_dtype, "placing the replica");
        if let Some(shortened) = &blueprint.shortened {
            tracing::warn!(requested = shortened.requested, has = shortened.has, "{shortened}");
        }
        self.is_changed = true;
        self.grids.begun(&blueprint);
        self.readings.begin(*grid);
        let mut ranks = RankHolders::default();
        for shard in &blueprint.shards {
            ranks.assign(shard.worker, shard.rank, now);
            let assignment = self.assignment(&blueprint, shard, promised.unwrap_or(*context));
            if !self.members.assign(shard.worker, assignment) {
                self.losses.report_deaf(shard.worker, "frames");
                break;
            }
        }
        self.phase = Phase::Placing(Placement { epoch, blueprint, ranks, tier: RankTiers::default(), is_grown });
    }

    /// `context` is the promised one, even if the pools hold less: the angles of scaled RoPE depend on it.
    fn assignment(&self, blueprint: &Blueprint, shard: &Shard, context: u32) -> wire::Assign {
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
            context,
            batch_tokens_max: self.config.batch_tokens_max(),
            running_max: policy.running_max,
            meet_max_millis: millis(waits.meet_max),
            exchange_max_millis: millis(waits.exchange_max),
            policy_digest: self.expected_policy(shard.worker).map_or_else(Vec::new, |policy| policy.0.to_vec()),
            reading: self.reading,
            zero_kv: self.config.zero_kv,
            numerics: self.config.mode().to_string(),
            guesses: self.config.limits.guesses().filter(|_| may_guess),
            sends_kv_target: true,
            // Each worker's own, which is set where its stream is known.
            protocol: 0,
        }
    }

    /// Ends the epoch and releases its ranks. Returns the epoch that follows, which has no ranks yet. Called also if no
    /// epoch is under way: the pending placement begins anew.
    pub fn end_epoch(&mut self, why: EpochEnding, now: Micros) -> Epoch {
        let waits = &self.config.waits;
        let in_doubt = why == EpochEnding::Doubt;
        let not_before = in_doubt.then(|| self.grids.record_doubt(self.phase.served_micros(now), now, waits));
        let try_at = self.grids.record_ended(&self.phase, why, now, waits);
        let ended = std::mem::take(&mut self.phase);
        if let Some(ranks) = ended.ranks() {
            self.members.release(ranks);
        }
        for rank in ended.serving().map_or_else(Vec::new, |serving| serving.slow_ranks()) {
            metrics::rank_slow(&self.of, rank.0, false);
        }
        self.phase = ended.into_waiting(not_before, try_at, why == EpochEnding::Growth);
        self.epoch.n += 1;
        self.is_changed = true;
        self.epoch
    }

    /// Call about once a second. If the replica runs on a smaller grid and more ranks have been there for long enough,
    /// it is spread over them, unless it `is_needed` as it is.
    pub fn grow_if_due(&mut self, promised: Option<u32>, is_needed: bool, now: Micros) -> Option<Transition> {
        let requirements = GridRequirements { config: &self.config, promised };
        let serving = self.phase.serving_mut()?;
        let blueprint = &serving.placement.blueprint;
        let grid = blueprint.grid;
        if grid == self.grids.requested() && promised == Some(blueprint.context) {
            return None;
        }
        let has_spares = self.members.n_spares(Some(&serving.placement.ranks)) > 0;
        let wider = || self.grids.wider_than(blueprint, requirements, self.members.candidates(now).all());
        let Some(wider) = has_spares.then(wider).flatten() else {
            self.phase.crowd_changed();
            return None;
        };
        let is_due = serving.is_wider_for_long(now, &self.config.waits, self.grids.n_relapses());
        if !is_due || is_needed {
            return None;
        }
        let (from_tp, from_pp, Grid { tp, pp }) = (grid.tp, grid.pp, wider);
        tracing::info!(from_tp, from_pp, tp, pp, "workers have joined: moving to a larger grid");
        Some(Transition::Restart(EpochEnding::Growth))
    }
}
