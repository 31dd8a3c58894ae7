//! The loop's part for healthy workers: how they join, and how ranks become ready.

use super::Replica;
use super::endings::WorkerDismissalCause;
use super::phase::Phase;
use super::place::UNREAD;
use crate::members::ranks::{RankFacts, RankHolders, Readiness};
use crate::outbound::Outbound;
use crate::{Error, WorkerId};
use proto::cluster as wire;
use proto::since;
use telemetry::metrics;
use tonic::Status;
use types::{Epoch, Micros, PolicyDigest};

impl Replica {
    pub(super) fn worker_joined(
        &mut self,
        worker: WorkerId,
        hello: wire::WorkerHello,
        protocol: u32,
        frames: Outbound<wire::RankFrame>,
    ) {
        let now = self.now();
        if !self.members.join(worker, (hello, protocol), frames, now) {
            return;
        }
        self.phase.crowd_changed();
        if self.members.excluded(now).next().is_some() {
            // It may take the place of a worker that is left out.
            self.phase.trust_again();
        }
        self.place();
    }

    pub(super) fn heartbeat(&mut self, worker: WorkerId, beat: &wire::Heartbeat) {
        let Some(since) = self.members.beat(worker, beat) else { return };
        if let Some(rank) = self.phase.rank(worker) {
            metrics::rank(&self.of, rank.0, since.compute_micros, since.wait_micros, since.idle_micros);
        }
        match beat.kv {
            Some(_) if !self.knows_parts() => self.refuse_unknown_parts(worker),
            Some(kv) => self.kv_committed(worker, kv),
            None => {}
        }
    }

    fn knows_parts(&self) -> bool {
        self.config.speaks.knows(since::KV_PARTS)
    }

    /// A build before that number would ignore these parts and use memory that is not there: the rank should not have
    /// sent them.
    fn refuse_unknown_parts(&mut self, worker: WorkerId) {
        let why = "the rank reports a part of its KV cache, which this build does not support";
        self.report_loss(worker, WorkerDismissalCause::Wrong, Status::invalid_argument(why));
    }

    /// Ranks are sent `Meet` when all have loaded: none waits in a collective for one that still reads.
    pub(super) fn rank_loaded(&mut self, worker: WorkerId, loaded: &wire::Loaded) {
        self.members.mark_alive(worker);
        let of = Epoch { incarnation: loaded.epoch_incarnation, n: loaded.epoch_n };
        let readiness = self.phase.ranks().and_then(|ranks| ranks.readiness(worker));
        if of != self.epoch || !matches!(readiness, Some(Readiness::Loading { .. })) {
            return;
        }
        let Some(rank) = self.phase.rank(worker) else { return };
        let facts = match self
            .check_loaded(worker, loaded)
            .and_then(|facts| self.accept_readings(rank, loaded).map(|()| facts))
        {
            Ok(facts) => facts,
            Err(why) => return self.refuse_loaded(worker, why),
        };
        let now = self.now();
        let Phase::Placing(placement) = &mut self.phase else { return };
        placement.ranks.record_loaded(worker, facts, &loaded.unread);
        self.members.clear_suspicion(worker);
        self.state_changed = true;
        if placement.ranks.all_loaded() {
            self.start_meeting(now);
        }
    }

    /// All have loaded. They meet if they have read the same bytes; otherwise the distrusted ones are lost.
    fn start_meeting(&mut self, now: Micros) {
        if self.check_readings_agree() {
            let Phase::Placing(placement) = &mut self.phase else { return };
            let meet = wire::Meet { epoch_incarnation: self.epoch.incarnation, epoch_n: self.epoch.n };
            if let Err(worker) = self.members.meet(&mut placement.ranks, meet, now) {
                self.report_loss(worker, WorkerDismissalCause::Deaf, Status::resource_exhausted(UNREAD));
            }
        }
    }

    pub(super) fn rank_ready(&mut self, worker: WorkerId, ready: &wire::Ready) -> Result<(), Error> {
        self.members.mark_alive(worker);
        let of = Epoch { incarnation: ready.epoch_incarnation, n: ready.epoch_n };
        if of != self.epoch {
            return Ok(());
        }
        if ready.kv_parts.is_some() && !self.knows_parts() {
            self.refuse_unknown_parts(worker);
            return Ok(());
        }
        self.state_changed = true;
        let Phase::Placing(placement) = &mut self.phase else { return Ok(()) };
        placement.ranks.record_ready(worker, self.members.steps_done(worker));
        placement.ranks.record_kv_start(worker, ready.kv_parts, ready.kv_grows);
        if placement.ranks.all_ready() { self.begin_epoch() } else { Ok(()) }
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

    /// The served policy or, if none was served, the one configured for this worker's device.
    pub(super) fn expected_policy(&self, worker: WorkerId) -> Option<PolicyDigest> {
        let configured = || self.members.device(worker).and_then(|device| self.config.digest_on(device));
        self.readings.expected_policy().or_else(configured)
    }
}
