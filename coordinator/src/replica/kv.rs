//! The loop's part for the memory of KV caches: only blocks that every rank has memory for are used, and ranks that
//! grow are sent how much they should have.

use super::Replica;
use super::endings::WorkerDismissalCause;
use super::phase::Phase;
use super::place::UNREAD;
use crate::WorkerId;
use crate::config::micros;
use crate::members::kv_target::{AHEAD, AHEAD_MIN, KvNeeds};
use proto::cluster as wire;
use tonic::Status;
use types::{Epoch, Micros};

impl Replica {
    pub(super) fn kv_committed(&mut self, worker: WorkerId, kv: wire::KvCommitted) {
        let of = Epoch { incarnation: kv.epoch_incarnation, n: kv.epoch_n };
        if of != self.epoch {
            return;
        }
        let Some(placement) = self.phase.placement_mut() else { return };
        placement.ranks.record_kv_committed(worker, kv.parts, kv.target);
        let parts = placement.ranks.kv_parts();
        if self.phase.serving().is_some() {
            self.requests.kv_committed(parts);
        }
    }

    /// Has ranks that grow commit what requests will soon need.
    pub(super) fn grow_kv(&mut self) {
        let Phase::Serving(serving) = &mut self.phase else { return };
        if serving.placement.ranks.some_grow() && self.requests.kv_target(AHEAD_MIN) > serving.kv.parts() {
            serving.kv.set(self.requests.kv_target(AHEAD));
            self.send_kv_target();
        }
    }

    /// Has them give back what has held no block for a while. The blocks are taken from the pools first.
    pub(super) fn shrink_kv(&mut self, now: Micros) {
        let Phase::Serving(serving) = &mut self.phase else { return };
        let ranks = &mut serving.placement.ranks;
        if !ranks.some_grow() {
            return;
        }
        let (target, spare) = (self.requests.kv_target(AHEAD), self.requests.kv_target(2 * AHEAD));
        let needs = KvNeeds { target, spare, held: self.requests.kv_held() };
        let Some(parts) = serving.kv.lower(needs, now, micros(self.config.waits.kv_release_after)) else { return };
        serving.kv.set(parts);
        ranks.record_kv_lowered(parts, serving.kv.n());
        self.requests.kv_committed(ranks.kv_parts());
        self.send_kv_target();
    }

    fn send_kv_target(&mut self) {
        let Phase::Serving(serving) = &self.phase else { return };
        let target = serving.kv.frame(self.epoch);
        if let Err(worker) = self.members.send_kv_target(&serving.placement.ranks, target) {
            self.report_loss(worker, WorkerDismissalCause::Deaf, Status::resource_exhausted(UNREAD));
        }
    }
}
