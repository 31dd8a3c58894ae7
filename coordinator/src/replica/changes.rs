//! The loop's part that carries out an operator's changes while the replica serves: another grid, or the model read
//! again. A change is refused before it has any effect, or ends the epoch without blame.

use super::Replica;
use super::endings::{EpochEnding, RecoveryCost};
use crate::Error;
use crate::config::{DigestInputs, micros};
use crate::event::{ModelOnDisk, Reply};
use crate::placement::{Unplaceable, plan};
use proto::cluster as wire;
use std::time::Duration;
use tonic::Status;
use types::{DeviceClass, Grid};

/// Operators that have requested a change and wait for the replica to serve again.
#[derive(Default)]
pub(crate) struct PendingChanges {
    scale: Option<Reply<wire::ScaleReply>>,
    reload: Option<Reply<wire::ReloadReply>>,
    /// The number of reloads so far.
    pub reading: u32,
}

impl Replica {
    pub(super) fn scale(&mut self, grid: Grid, reply: Reply<wire::ScaleReply>) {
        let in_force = self.phase.serving().map(|serving| serving.placement.blueprint.grid);
        if in_force == Some(grid) && self.draining_since.is_none() {
            self.grids.requested = grid;
            return send_reply(reply, Ok(scale_reply(grid, Duration::ZERO, 0)));
        }
        if let Err(refused) = self.may_scale(grid) {
            return send_reply(reply, Err(refused));
        }
        let Grid { tp, pp, .. } = grid;
        tracing::info!(tp, pp, "another grid is requested");
        self.grids.requested = grid;
        if let Some(before) = self.changes.scale.replace(reply) {
            send_reply(
                before,
                Err(Status::aborted(format!("a later request for tp {tp} x pp {pp} replaced this one"))),
            );
        }
        self.change();
    }

    fn may_scale(&self, grid: Grid) -> Result<(), Status> {
        let unplaceable = |why: Unplaceable| Status::failed_precondition(why.to_string());
        self.may_change()?;
        let Some(served) = self.requests.policy() else { return Ok(()) };
        let (policy, candidates) = (self.grid_requirements().policy_on(grid), self.members.candidates(self.now()));
        let blueprint = plan(candidates.all(), &self.config.shape, &policy, None).map_err(unplaceable)?;
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
    pub(super) fn reload(&mut self, found: &ModelOnDisk, reply: Reply<wire::ReloadReply>) {
        if let Err(refused) = self.may_reload(found) {
            return send_reply(reply, Err(refused));
        }
        tracing::info!("reloading the model");
        self.changes.reading += 1;
        if let Some(before) = self.changes.reload.replace(reply) {
            send_reply(before, Err(Status::aborted("a later reload request replaced this one")));
        }
        self.change();
    }

    /// Streams move only to an equal policy, so a reload may not change the model.
    fn may_reload(&self, model: &ModelOnDisk) -> Result<(), Status> {
        self.may_change()?;
        let Some(ours) = self.requests.policy() else { return Ok(()) };
        let device = self.members.first_device().unwrap_or_else(|| DeviceClass::Cpu.into());
        let of = DigestInputs { weights: model.fingerprint, mode: self.config.mode() };
        let found = self.readings.policy_of(self.config.digest_of(&device, of), &model.runs);
        // The simulator computes under a policy that no file determines.
        if device.class() == DeviceClass::Sim || found == ours {
            return Ok(());
        }
        let path = self.config.model_path.display();
        let differs = self.readings.differs(&model.runs);
        let weight = differs.map(|weight| format!(" (the weight {weight} differs)")).unwrap_or_default();
        Err(Status::failed_precondition(format!(
            "{path} is another model now{weight}: its policy is {found}, this replica's {ours}, and streams cannot go \
             over. Nothing has changed: start another replica with the new model, and end this one when that is ready"
        )))
    }

    fn change(&mut self) {
        self.end_epoch(EpochEnding::Requested);
        self.place();
    }

    /// Answers the waiting operators once the replica serves again.
    pub(super) fn answer_operators(&mut self, grid: Grid, RecoveryCost { took, n_replayed }: RecoveryCost) {
        if let Some(reply) = self.changes.scale.take() {
            send_reply(reply, Ok(scale_reply(grid, took, n_replayed)));
        }
        if let Some(reply) = self.changes.reload.take() {
            let (micros, ranks) = (micros(took), u32::from(grid.n_ranks()));
            let unread = self.phase.ranks().map_or_else(Vec::new, |ranks| self.members.reload_failures(ranks));
            send_reply(reply, Ok(wire::ReloadReply { micros, tokens_replayed: n_replayed, ranks, unread }));
        }
    }
}

/// Sends an answer. An operator that has left needs none.
fn send_reply<T>(reply: Reply<T>, answer: Result<T, Status>) {
    let _gone = reply.send(answer);
}

fn scale_reply(grid: Grid, took: Duration, tokens_replayed: u64) -> wire::ScaleReply {
    wire::ScaleReply { tp: grid.tp.into(), pp: grid.pp.into(), micros: micros(took), tokens_replayed }
}
