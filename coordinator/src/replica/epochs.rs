//! The loop's part that ends epochs and begins them. An epoch that ends is dropped with its phase. Its ranks are
//! released, and its requests wait for the next one.

use super::Replica;
use super::endings::{EpochEnding, Recovery, RecoveryCost};
use super::lost::Successor;
use super::phase::{Phase, ServingPhase};
use crate::Error;
use crate::placement::Shard;
use std::time::Duration;
use telemetry::metrics;
use types::Grid;

impl Replica {
    /// Called also if no epoch is under way: the pending placement begins anew.
    pub(super) fn end_epoch(&mut self, why: EpochEnding) {
        let now = self.now();
        if self.requests.has_served() && self.recovery.is_none() {
            self.recovery = Some(Recovery::begin(self.epoch, why, self.requests.stats().tokens_requeued, now));
        }
        let waits = &self.config.waits;
        let in_doubt = why == EpochEnding::Doubt;
        let not_before = in_doubt.then(|| self.grids.record_doubt(self.phase.served_micros(now), now, waits));
        let try_at = self.grids.record_ended(&self.phase, why, now, waits);
        let ended = std::mem::take(&mut self.phase);
        if let Some(ranks) = ended.ranks() {
            self.members.release(ranks);
        }
        for rank in ended.serving().map_or_else(Vec::new, |serving| serving.slowness.slow_ranks()) {
            metrics::rank_slow(&self.of, rank.0, false);
        }
        self.phase = ended.into_waiting(not_before, try_at);
        self.epoch.n += 1;
        self.state_changed = true;
        self.requests.epoch_ended(self.epoch, why.loss(), now);
    }

    /// Begins to serve, or goes on serving, once all ranks are ready.
    pub(super) fn begin_epoch(&mut self) -> Result<(), Error> {
        let now = self.now();
        let Phase::Placing(placement) = &self.phase else { return Ok(()) };
        let Some(meant) = placement.ranks.policy() else { return Ok(()) };
        let (grid, epoch, blueprint) = (placement.blueprint.grid, placement.epoch, &placement.blueprint);
        self.members.record_met(&placement.ranks);
        let policy = self.requests.policy().unwrap_or_else(|| self.readings.serve(meant));
        let kv_parts = placement.ranks.kv_parts();
        let protocol = self.members.protocol(placement.ranks.workers()).unwrap_or(proto::OLDEST);
        self.requests.epoch_begins((&self.config, blueprint, protocol), [meant, policy], epoch, now)?;
        self.requests.kv_committed(kv_parts);
        let (Grid { tp, pp, .. }, n_ranks, n_blocks) = (grid, blueprint.shards.len(), blueprint.n_blocks());
        tracing::info!(%epoch, tp, pp, n_ranks, ?n_blocks, "the replica is ready");
        self.phase = match std::mem::take(&mut self.phase) {
            Phase::Placing(placement) => Phase::Serving(ServingPhase::begin(placement, now)),
            other => other,
        };
        self.grids.record_ready();
        self.state_changed = true;
        self.recovered(grid);
        self.requests.welcome(now);
        Ok(())
    }

    /// The replica serves again.
    fn recovered(&mut self, grid: Grid) {
        let Some(recovery) = self.recovery.take() else {
            // It serves for the first time: no request waited because of earlier losses.
            return self.report_successors(RecoveryCost { took: Duration::ZERO, n_replayed: 0 });
        };
        let recovered = recovery.end(&self.of, grid, self.requests.stats().tokens_requeued, self.now());
        self.report_successors(recovered);
        self.answer_operators(grid, recovered);
    }

    fn report_successors(&mut self, recovered: RecoveryCost) {
        let (shards, members) = (self.phase.blueprint().map_or(&[][..], |blueprint| &blueprint.shards), &self.members);
        let successor = |shard: &Shard| Successor { host: shard.host.clone(), pid: members.pid(shard.worker) };
        self.lost.record_recovery(recovered, |rank| shards.iter().find(|shard| shard.rank.0 == rank).map(successor));
    }
}
