//! The loop's part that does what an operator wants while the replica serves: another grid, or the model read again.
//! Each is refused before anything has changed, or is a change of epoch that nobody is accused of.

use crate::Error;
use crate::config::DigestOf;
use crate::library::FoundModel;
use crate::losses::Ending;
use crate::placement::{Unplaceable, plan};
use crate::replica::{Replica, micros};
use proto::cluster as wire;
use std::time::Duration;
use tokio::sync::oneshot;
use tonic::Status;
use types::{DeviceClass, Grid};

pub(crate) type Reply<T> = oneshot::Sender<Result<T, Status>>;

/// Who has asked and waits for the replica to serve again.
#[derive(Default)]
pub(crate) struct Changes {
    scale: Option<Reply<wire::ScaleReply>>,
    reload: Option<Reply<wire::ReloadReply>>,
    /// How often the model was to be read again.
    pub reading: u32,
}

impl Replica {
    pub(crate) fn scale(&mut self, grid: Grid, reply: Reply<wire::ScaleReply>) {
        let in_force = self.blueprint.as_ref().filter(|_| self.is_ready).map(|blueprint| blueprint.grid);
        if in_force == Some(grid) && self.draining_since.is_none() {
            self.placing.wanted = grid;
            return say(reply, Ok(scale_reply(grid, Duration::ZERO, 0)));
        }
        if let Err(refused) = self.may_scale(grid) {
            return say(reply, Err(refused));
        }
        let Grid { tp, pp, .. } = grid;
        tracing::info!(tp, pp, "another grid is asked for");
        self.placing.wanted = grid;
        if let Some(before) = self.changes.scale.replace(reply) {
            say(before, Err(Status::aborted(format!("then tp {tp} x pp {pp} was asked for"))));
        }
        self.change();
    }

    fn may_scale(&self, grid: Grid) -> Result<(), Status> {
        let unplaceable = |why: Unplaceable| Status::failed_precondition(why.to_string());
        self.may_change()?;
        let Some(serving) = &self.serving else { return Ok(()) };
        let policy = self.policy_on(grid);
        let blueprint = plan(&self.candidates(self.now()), &self.config.shape, &policy, None).map_err(unplaceable)?;
        let planner = self.config.scheduler(&blueprint, serving.policy);
        planner.supported().map_err(|error| Status::failed_precondition(Error::from(error).to_string()))
    }

    fn may_change(&self) -> Result<(), Status> {
        match (&self.draining_since, &self.serving) {
            (Some(_), _) => Err(Status::unavailable("the coordinator is draining")),
            (None, None) => Err(Status::unavailable("the replica has not served yet: it is loading")),
            (None, Some(_)) => Ok(()),
        }
    }

    /// `found` is what the model's path means now.
    pub(crate) fn reload(&mut self, found: &FoundModel, reply: Reply<wire::ReloadReply>) {
        if let Err(refused) = self.may_reload(found) {
            return say(reply, Err(refused));
        }
        tracing::info!("the model is to be read again");
        self.changes.reading += 1;
        if let Some(before) = self.changes.reload.replace(reply) {
            say(before, Err(Status::aborted("then the same was asked for again")));
        }
        self.change();
    }

    /// Streams move only to an equal policy: another model is another replica.
    fn may_reload(&self, model: &FoundModel) -> Result<(), Status> {
        self.may_change()?;
        let Some(serving) = &self.serving else { return Ok(()) };
        let first = self.members.inventory().into_iter().next();
        let device = first.map_or_else(|| DeviceClass::Cpu.into(), |machine| machine.device);
        let of = DigestOf { weights: model.fingerprint, mode: self.config.mode() };
        let found = self.readings.policy_of(self.config.digest_of(&device, of), &model.runs);
        // The simulation computes under a policy that no file gives.
        if device.class() == DeviceClass::Sim || found == serving.policy {
            return Ok(());
        }
        let (path, ours) = (self.config.model_path.display(), serving.policy);
        let differs = self.readings.differs(&model.runs);
        let weight = differs.map(|weight| format!(" (the weight {weight} differs)")).unwrap_or_default();
        Err(Status::failed_precondition(format!(
            "{path} is another model now{weight}: its policy is {found}, this replica's {ours}, and streams cannot go \
             over. Nothing has changed: start another replica with the new model, and end this one when that is ready"
        )))
    }

    fn change(&mut self) {
        self.end_epoch(Ending::Wanted);
        self.place();
    }

    /// The replica serves again: whoever asked hears what it has come to.
    pub(crate) fn changed(&mut self, grid: Grid, took: Duration, n_replayed: u64) {
        if let Some(reply) = self.changes.scale.take() {
            say(reply, Ok(scale_reply(grid, took, n_replayed)));
        }
        if let Some(reply) = self.changes.reload.take() {
            let (micros, ranks) = (micros(took), u32::from(grid.n_ranks()));
            say(
                reply,
                Ok(wire::ReloadReply { micros, tokens_replayed: n_replayed, ranks, unread: self.members.unread() }),
            );
        }
    }
}

/// Who asked and left needs no answer.
fn say<T>(reply: Reply<T>, answer: Result<T, Status>) {
    let _gone = reply.send(answer);
}

fn scale_reply(grid: Grid, took: Duration, tokens_replayed: u64) -> wire::ScaleReply {
    wire::ScaleReply { tp: grid.tp.into(), pp: grid.pp.into(), micros: micros(took), tokens_replayed }
}
