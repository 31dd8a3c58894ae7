//! Workers that join, and ranks that become ready.

use super::endings::WorkerDismissalCause;
use super::{Deployment, Transition};
use crate::WorkerId;
use crate::config::DigestInputs;
use crate::epoch_start::EpochStart;
use crate::event::ModelOnDisk;
use crate::members::ranks::{RankFacts, RankHolders, Readiness};
use crate::outbound::Outbound;
use proto::cluster as wire;
use proto::since;
use telemetry::metrics;
use tonic::Status;
use types::{DeviceClass, Epoch, Grid, Micros, PolicyDigest};

impl Deployment {
    pub fn worker_joined(
        &mut self,
        worker: WorkerId,
        (hello, protocol): (wire::WorkerHello, u32),
        frames: Outbound<wire::RankFrame>,
        now: Micros,
    ) -> Option<Transition> {
        if !self.members.join(worker, (hello, protocol), frames, now) {
            return None;
        }
        self.phase.crowd_changed();
        if self.members.excluded(now).next().is_some() {
            // It may take the place of a worker that is left out.
            self.phase.trust_again();
        }
        Some(Transition::Place)
    }

    /// Returns the part of the KV caches that every serving rank has memory for, if the heartbeat reports memory.
    pub fn heartbeat(&mut self, worker: WorkerId, beat: &wire::Heartbeat) -> Option<u32> {
        let since = self.members.beat(worker, beat)?;
        if let Some(rank) = self.phase.rank(worker) {
            metrics::rank(&self.of, rank.0, since.compute_micros, since.wait_micros, since.idle_micros);
        }
        let kv = beat.kv?;
        if !self.config.speaks.knows(since::KV_PARTS) {
            self.refuse_unknown_parts(worker);
            return None;
        }
        let of = Epoch { incarnation: kv.epoch_incarnation, n: kv.epoch_n };
        if of != self.epoch {
            return None;
        }
        let ranks = &mut self.phase.placement_mut()?.ranks;
        ranks.record_kv_committed(worker, kv.parts, kv.target);
        let parts = ranks.kv_parts();
        self.is_serving().then_some(parts)
    }

    /// A build before that number would ignore these parts and use memory that is not there: the rank should not have
    /// sent them.
    fn refuse_unknown_parts(&mut self, worker: WorkerId) {
        let why = "the rank reports a part of its KV cache, which this build does not support";
        self.losses.report(worker, WorkerDismissalCause::Wrong, Status::invalid_argument(why));
    }

    /// Ranks are sent `Meet` when all have loaded: none waits in a collective for one that still reads.
    pub fn rank_loaded(&mut self, worker: WorkerId, loaded: &wire::Loaded, now: Micros) {
        self.members.mark_alive(worker);
        let of = Epoch { incarnation: loaded.epoch_incarnation, n: loaded.epoch_n };
        let readiness = self.phase.ranks().and_then(|ranks| ranks.readiness(worker));
        if of != self.epoch || !matches!(readiness, Some(Readiness::Loading { .. })) {
            return;
        }
        let Some(rank) = self.phase.rank(worker) else { return };
        let has_model = self.config.policy_digest.is_some();
        let facts = self.check_loaded(worker, loaded);
        let facts = match facts.and_then(|facts| self.readings.accept(rank, loaded, has_model).map(|()| facts)) {
            Ok(facts) => facts,
            Err(why) => return self.refuse_loaded(worker, why, now),
        };
        let Some(placement) = self.phase.placing_mut() else { return };
        placement.ranks.record_loaded(worker, facts, &loaded.unread);
        self.members.clear_suspicion(worker);
        self.is_changed = true;
        if placement.ranks.all_loaded() {
            self.start_meeting(now);
        }
    }

    /// All have loaded. They meet if they have read the same bytes; otherwise the distrusted ones are lost, with the
    /// name of the weight.
    fn start_meeting(&mut self, now: Micros) {
        let Some(placement) = self.phase.placing_mut() else { return };
        if let Err(why) = self.readings.join() {
            let shards = placement.blueprint.shards.iter().filter(|shard| why.ranks().contains(&shard.rank));
            for worker in shards.map(|shard| shard.worker).collect::<Vec<WorkerId>>() {
                // Of all reasons to refuse a rank, only this one shows that its files are bad.
                self.refuse_loaded(worker, Status::data_loss(why.to_string()), now);
            }
            return;
        }
        let meet = wire::Meet { epoch_incarnation: self.epoch.incarnation, epoch_n: self.epoch.n };
        if let Err(worker) = self.members.meet(&mut placement.ranks, meet, now) {
            self.losses.report_deaf(worker, "frames");
        }
    }

    /// Refuses a rank that has loaded other weights than the replica serves: workers on its host are taken last.
    fn refuse_loaded(&mut self, worker: WorkerId, why: Status, now: Micros) {
        self.members.distrust(worker, now, &self.config.waits);
        self.losses.report(worker, WorkerDismissalCause::Wrong, why);
    }

    /// All ranks of an epoch have one policy: the configured one, or else that of the first rank that loaded. It covers
    /// version, model and numerics; the bytes that were read are compared when all have loaded.
    fn check_loaded(&self, worker: WorkerId, loaded: &wire::Loaded) -> Result<RankFacts, Status> {
        let policy =
            proto::policy_digest(&loaded.policy_digest).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let loaded_before = || self.phase.ranks().and_then(RankHolders::policy);
        let ours = self.expected_policy(worker).or_else(loaded_before);
        if let Some(ours) = ours.filter(|ours| *ours != policy) {
            return Err(Status::failed_precondition(format!(
                "this rank computes under {policy}, the replica under {ours}: its model, numerics or GPU architecture \
                 differs"
            )));
        }
        Ok(RankFacts { policy, weight_bytes: loaded.weight_bytes })
    }

    pub fn rank_ready(&mut self, worker: WorkerId, ready: &wire::Ready) -> Option<Transition> {
        self.members.mark_alive(worker);
        let of = Epoch { incarnation: ready.epoch_incarnation, n: ready.epoch_n };
        if of != self.epoch {
            return None;
        }
        if ready.kv_parts.is_some() && !self.config.speaks.knows(since::KV_PARTS) {
            self.refuse_unknown_parts(worker);
            return None;
        }
        self.is_changed = true;
        let placement = self.phase.placing_mut()?;
        placement.tier.record_ready(ready.kv_tier);
        let ranks = &mut placement.ranks;
        ranks.record_ready(worker, self.members.steps_done(worker));
        ranks.record_kv_start(worker, ready.kv_parts, ready.kv_grows);
        ranks.all_ready().then_some(Transition::BeginEpoch)
    }

    /// The ranks have met. Returns what the requests must know of them.
    pub fn epoch_start(&mut self) -> Option<EpochStart<'_>> {
        let placement = self.phase.placing()?;
        let meant = placement.ranks.policy()?;
        self.members.record_met(&placement.ranks);
        Some(EpochStart {
            epoch: placement.epoch,
            blueprint: &placement.blueprint,
            protocol: self.members.protocol(placement.ranks.workers()).unwrap_or(proto::OLDEST),
            meant,
            policy: self.readings.serve(meant),
            kv_parts: placement.ranks.kv_parts(),
            has_tier: placement.tier.has_all(placement.blueprint.shards.len()),
        })
    }

    /// Begins to serve, or goes on serving, with ranks that are all ready.
    pub fn serve(&mut self, now: Micros) {
        let Some(placement) = self.phase.placing() else { return };
        let (epoch, blueprint) = (placement.epoch, &placement.blueprint);
        let (Grid { tp, pp }, n_ranks, n_blocks) = (blueprint.grid, blueprint.shards.len(), blueprint.n_blocks());
        tracing::info!(%epoch, tp, pp, n_ranks, ?n_blocks, "the replica is ready");
        self.phase = std::mem::take(&mut self.phase).into_serving(now);
        self.grids.record_ready();
        self.is_changed = true;
    }

    /// Streams move only to an equal policy, so a reload may not change the model. `served` is the present policy.
    pub fn check_same_model(&self, served: PolicyDigest, model: &ModelOnDisk) -> Result<(), Status> {
        let device = self.members.first_device().unwrap_or_else(|| DeviceClass::Cpu.into());
        let of = DigestInputs { weights: model.fingerprint, mode: self.config.mode() };
        let found = self.readings.policy_of(self.config.digest_of(&device, of), &model.runs);
        // The simulator computes under a policy that no file determines.
        if device.class() == DeviceClass::Sim || found == served {
            return Ok(());
        }
        let path = self.config.model_path.display();
        let differs = self.readings.differs(&model.runs);
        let weight = differs.map(|weight| format!(" (the weight {weight} differs)")).unwrap_or_default();
        Err(Status::failed_precondition(format!(
            "{path} is another model now{weight}: its policy is {found}, this replica's {served}, and streams cannot \
             go over. Nothing has changed: start another replica with the new model, and end this one when that is \
             ready"
        )))
    }
}
