//! Routers that attach and leave, and the frames for each about the replica: a welcome, its state, and several times a
//! second a beat with its load and the names that its cache has gained and lost.

use super::LiveRequests;
use crate::outbound::Outbound;
use proto::cluster as wire;
use tonic::Status;
use types::{Micros, RequestId};

impl LiveRequests {
    /// Attaches a router. One that was here under a former number claims its requests under its new one.
    pub fn attach(
        &mut self,
        router: u32,
        (former, protocol): (Option<wire::FormerNumber>, u32),
        frames: Outbound<wire::ReplicaFrame>,
        now: Micros,
    ) {
        let is_ours = |former: &wire::FormerNumber| former.incarnation == self.welcome.incarnation;
        let former = former.filter(is_ours).map(|former| former.router);
        tracing::info!(router, former, "a router attaches");
        if let Some(former) = former {
            let forsaken = self.routers.forget(former);
            self.cancel_all(forsaken, now);
        }
        self.routers.attach(router, protocol, frames);
        if self.has_served() {
            self.welcome(now);
        }
    }

    /// Keeps the requests of a router that is gone for a grace period: a router that was only cut off may come back by
    /// then.
    pub fn router_gone(&mut self, router: u32, why: Status, now: Micros) {
        tracing::info!(router, why = why.message(), "a router has disconnected");
        self.routers.gone(router, why, now);
    }

    /// The router has missed names of cached blocks.
    pub fn resend_names_to(&mut self, router: u32) {
        self.routers.resend_names_to(router);
    }

    /// Ends requests whose routers have been gone for longer than the grace period.
    pub fn cancel_abandoned(&mut self, grace_micros: u64, now: Micros) {
        let forsaken = self.routers.abandoned_requests(now, grace_micros);
        self.cancel_all(forsaken, now);
    }

    /// Welcomes every router that was not welcomed yet.
    pub fn welcome(&mut self, now: Micros) {
        let welcome = &self.welcome;
        let lost = self.routers.welcome(|router| wire::Welcome { router, ..welcome.clone() });
        self.cancel_all(lost, now);
    }

    /// Sends each router one frame with its outputs.
    pub fn flush(&mut self, now: Micros) {
        let lost = self.routers.flush();
        self.cancel_all(lost, now);
    }

    pub fn broadcast_state(&mut self, state: &wire::State, now: Micros) {
        let lost = self.routers.broadcast(state);
        self.cancel_all(lost, now);
    }

    pub fn beat(&mut self, now: Micros) {
        let Some(planner) = &mut self.planner else { return };
        let is_known = planner.scheduler.name_changes(&mut self.name_changes.raw);
        self.name_changes.fold();
        if !is_known {
            self.routers.resend_names_to_all();
        }
        let scheduler = &planner.scheduler;
        let stats = scheduler.stats();
        let load = wire::Load {
            n_waiting: stats.n_waiting,
            n_running: stats.n_running,
            backlog_tokens: scheduler.backlog_tokens(),
            running_tokens: scheduler.running_tokens(),
            blocks_used: stats.blocks_used,
            blocks_total: stats.blocks_total,
        };
        let lost = self.routers.beat(load, &self.name_changes, |blocks, names| scheduler.append_names(blocks, names));
        self.cancel_all(lost, now);
    }

    pub fn all_live(&self) -> Vec<RequestId> {
        self.routers.all_live()
    }

    pub fn close_all(&mut self, why: &Status) {
        self.routers.close_all(why);
    }
}
