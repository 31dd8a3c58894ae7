//! The loop's part that takes an operator's changes while the replica serves: another grid, or the model read again. A
//! change is refused before it has any effect, or ends the epoch without blame.

use super::Replica;
use super::recoveries::RecoveryCost;
use crate::Error;
use crate::config::micros;
use crate::deployment::Transition;
use crate::deployment::endings::EpochEnding;
use crate::event::{ModelOnDisk, Reply};
use crate::placement::Unplaceable;
use proto::cluster as wire;
use std::time::Duration;
use tonic::Status;
use types::{Grid, Micros};

/// Operators that have requested a change and wait for the replica to serve again.
#[derive(Default)]
pub(crate) struct PendingChanges {
    scale: Option<Reply<wire::ScaleReply>>,
    reload: Option<Reply<wire::ReloadReply>>,
}

impl PendingChanges {
    /// Keeps the reply for a change to this grid. It replaces an earlier one.
    fn scale(&mut self, Grid { tp, pp }: Grid, reply: Reply<wire::ScaleReply>) {
        if let Some(before) = self.scale.replace(reply) {
            let why = format!("a later request for tp {tp} x pp {pp} replaced this one");
            send_reply(before, Err(Status::aborted(why)));
        }
    }

    /// Keeps the reply for a reload. It replaces an earlier one.
    fn reload(&mut self, reply: Reply<wire::ReloadReply>) {
        if let Some(before) = self.reload.replace(reply) {
            send_reply(before, Err(Status::aborted("a later reload request replaced this one")));
        }
    }

    /// Answers the waiting operators once the replica serves again. `unread` are the ranks that have not read the model
    /// again.
    pub fn answer(&mut self, grid: Grid, RecoveryCost { took, n_replayed }: RecoveryCost, unread: Vec<wire::Unread>) {
        if let Some(reply) = self.scale.take() {
            send_reply(reply, Ok(scale_reply(grid, took, n_replayed)));
        }
        if let Some(reply) = self.reload.take() {
            let (micros, ranks) = (micros(took), u32::from(grid.n_ranks()));
            send_reply(reply, Ok(wire::ReloadReply { micros, tokens_replayed: n_replayed, ranks, unread }));
        }
    }
}

impl Replica {
    pub(super) fn scale(&mut self, grid: Grid, reply: Reply<wire::ScaleReply>, now: Micros) -> Option<Transition> {
        if self.deployment.is_serving() && self.deployment.grid() == grid && self.draining_since.is_none() {
            self.deployment.request_grid(grid);
            send_reply(reply, Ok(scale_reply(grid, Duration::ZERO, 0)));
            return None;
        }
        if let Err(refused) = self.may_scale(grid, now) {
            send_reply(reply, Err(refused));
            return None;
        }
        tracing::info!(tp = grid.tp, pp = grid.pp, "another grid is requested");
        self.deployment.request_grid(grid);
        self.changes.scale(grid, reply);
        Some(Transition::Restart(EpochEnding::Requested))
    }

    fn may_scale(&self, grid: Grid, now: Micros) -> Result<(), Status> {
        let unplaceable = |why: Unplaceable| Status::failed_precondition(why.to_string());
        self.may_change()?;
        let Some(served) = self.requests.policy() else { return Ok(()) };
        let promised = self.requests.promised_context();
        let blueprint = self.deployment.plan_on(grid, promised, now).map_err(unplaceable)?;
        let planner = self.config.scheduler(&blueprint, served);
        planner.supported().map_err(|error| Status::failed_precondition(Error::from(error).to_string()))
    }

    fn may_change(&self) -> Result<(), Status> {
        match (self.draining_since, self.requests.has_served()) {
            (Some(_), _) => Err(Status::unavailable("the coordinator is draining")),
            (None, false) => Err(Status::unavailable("the replica has not served yet: it is loading")),
            (None, true) => Ok(()),
        }
    }

    /// `found` is the present content of the model's path.
    pub(super) fn reload(&mut self, found: &ModelOnDisk, reply: Reply<wire::ReloadReply>) -> Option<Transition> {
        if let Err(refused) = self.may_reload(found) {
            send_reply(reply, Err(refused));
            return None;
        }
        tracing::info!("reloading the model");
        self.deployment.request_reload();
        self.changes.reload(reply);
        Some(Transition::Restart(EpochEnding::Requested))
    }

    fn may_reload(&self, found: &ModelOnDisk) -> Result<(), Status> {
        self.may_change()?;
        self.requests.policy().map_or(Ok(()), |served| self.deployment.check_same_model(served, found))
    }
}

/// Sends an answer. An operator that has left needs none.
pub(super) fn send_reply<T>(reply: Reply<T>, answer: Result<T, Status>) {
    let _gone = reply.send(answer);
}

fn scale_reply(grid: Grid, took: Duration, tokens_replayed: u64) -> wire::ScaleReply {
    wire::ScaleReply { tp: grid.tp.into(), pp: grid.pp.into(), micros: micros(took), tokens_replayed }
}
