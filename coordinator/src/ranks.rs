//! The loop's part that deals with workers: who holds which rank, when an epoch begins, and why it ends.

use crate::event::WorkerId;
use crate::members::{Facts, Role};
use crate::outbound::Outbound;
use crate::placement::{Blueprint, Machine, Policy, Shard, Why, plan, predict};
use crate::replica::{Replica, Serving, micros};
use crate::{Error, pace::Speed};
use proto::cluster as wire;
use scheduler::{Loss, Scheduler};
use telemetry::metrics;
use tonic::Status;
use types::{Epoch, Micros, Rank};

/// What is remembered from one placement to the next.
#[derive(Default)]
pub(crate) struct Placing {
    /// The blueprint that was in force last: who held a rank keeps it.
    last: Option<Blueprint>,
    /// Not before, because the ranks did not reach each other.
    not_before: Option<Micros>,
    /// Epochs in a row that ended so.
    n_fruitless: u32,
    ready_since: Option<Micros>,
}

impl Replica {
    pub(crate) fn worker_joined(
        &mut self,
        worker: WorkerId,
        hello: wire::WorkerHello,
        frames: Outbound<wire::RankFrame>,
    ) {
        let (host, pid, device) = (hello.host.clone(), hello.pid, hello.device.clone());
        match self.members.join(worker, hello, frames) {
            Ok(()) => tracing::info!(%worker, host, pid, device, "a worker joins"),
            Err(other) => {
                return tracing::warn!(%worker, host, pid, %other, "refused: its mesh address is another worker's");
            }
        }
        self.place();
    }

    pub(crate) fn heartbeat(&mut self, worker: WorkerId, beat: &wire::Heartbeat) {
        let Some(since) = self.members.beat(worker, beat) else { return };
        if let Some(rank) = self.members.role(worker).and_then(Role::rank) {
            metrics::rank(&self.of, rank.0, since.compute_micros, since.wait_micros, since.idle_micros);
        }
    }

    // -- an epoch begins

    pub(crate) fn place_if_due(&mut self, now: Micros) {
        if self.placing.not_before.is_some_and(|not_before| now >= not_before) {
            self.place();
        }
    }

    /// Lays the replica out, if it is not and can be.
    pub(crate) fn place(&mut self) {
        let now = self.now();
        let must_wait = self.placing.not_before.is_some_and(|not_before| now < not_before);
        if self.blueprint.is_some() || must_wait {
            return;
        }
        self.placing.not_before = None;
        let (inventory, policy) = (self.members.inventory(), self.policy_in_force());
        let last = self.placing.last.as_ref().map(|last| self.without_suspects(last));
        match plan(&inventory, &self.config.shape, &policy, last.as_ref()) {
            Ok(blueprint) => {
                self.predict(&inventory, &policy, &blueprint);
                self.assign(blueprint);
            }
            Err(why) if matches!(why.why, Why::TooFew { .. }) => {
                tracing::info!(%why, "the replica waits for workers");
            }
            Err(why) => tracing::warn!(%why, n_workers = inventory.len(), "the replica cannot be placed"),
        }
    }

    /// A rank whose peers blame its worker is free for another.
    fn without_suspects(&self, blueprint: &Blueprint) -> Blueprint {
        let is_trusted = |shard: &&Shard| !self.members.is_suspect(shard.worker);
        let shards = blueprint.shards.iter().filter(is_trusted).cloned().collect();
        Blueprint { shards, ..blueprint.clone() }
    }

    /// Once it serves, the context is a promise to those who were welcomed.
    fn policy_in_force(&self) -> Policy {
        let promised = self.serving.as_ref().map(|serving| serving.scheduler.config().context_max);
        Policy { context: promised.or(self.config.policy.context), ..self.config.policy.clone() }
    }

    fn predict(&mut self, inventory: &[Machine], policy: &Policy, blueprint: &Blueprint) {
        self.prediction = predict(inventory, &self.config.shape, policy, blueprint).ok();
        self.speed = Speed::default();
        if let Some(prediction) = &self.prediction {
            tracing::info!(%prediction, "this layout should give");
        }
    }

    fn assign(&mut self, blueprint: Blueprint) {
        let now = self.now();
        self.epoch.n += 1;
        let (Blueprint { grid, context, .. }, n_blocks) = (&blueprint, blueprint.n_blocks());
        tracing::info!(epoch = %self.epoch, tp = grid.tp, pp = grid.pp, context, ?n_blocks, "placing the replica");
        self.state_changed = true;
        let assigns: Vec<wire::Assign> =
            blueprint.shards.iter().map(|shard| self.assignment(&blueprint, shard)).collect();
        let workers: Vec<(WorkerId, Rank)> = blueprint.shards.iter().map(|shard| (shard.worker, shard.rank)).collect();
        self.placing.last = Some(blueprint.clone());
        self.blueprint = Some(blueprint);
        for ((worker, rank), assign) in workers.into_iter().zip(assigns) {
            if !self.members.assign(worker, rank, assign, now) {
                return self.lose(worker, Status::resource_exhausted("this rank leaves its frames unread"));
            }
        }
    }

    fn assignment(&self, blueprint: &Blueprint, shard: &Shard) -> wire::Assign {
        let policy = &self.config.policy;
        let is_alone = blueprint.shards.len() == 1;
        let mesh_addresses = blueprint.shards.iter().map(|shard| self.members.mesh_address(shard.worker));
        wire::Assign {
            epoch_incarnation: self.epoch.incarnation,
            epoch_n: self.epoch.n,
            rank: shard.rank.0.into(),
            stages: blueprint.layout.stages().iter().map(wire::Stage::from).collect(),
            mesh_addresses: mesh_addresses.filter(|_| !is_alone).collect(),
            mesh_secret: if is_alone { Vec::new() } else { self.config.mesh_secret(self.epoch).to_vec() },
            model_path: self.config.model_path.to_string_lossy().into_owned(),
            activations: policy.activations.clone(),
            kv_dtype: policy.kv_dtype.clone(),
            n_blocks: blueprint.n_blocks(),
            kv_bytes: shard.kv_bytes,
            context: blueprint.context,
            batch_tokens_max: self.config.limits.batch_tokens_max,
            running_max: policy.running_max,
        }
    }

    pub(crate) fn rank_ready(&mut self, worker: WorkerId, ready: &wire::Ready) -> Result<(), Error> {
        self.members.heard(worker);
        let of = Epoch { incarnation: ready.epoch_incarnation, n: ready.epoch_n };
        let Some(Role::Loading { rank, .. }) = self.members.role(worker) else { return Ok(()) };
        if of != self.epoch {
            return Ok(());
        }
        match self.accept(ready) {
            Ok(facts) => self.members.ready(worker, rank, facts),
            Err(why) => {
                self.lose(worker, why);
                return Ok(());
            }
        }
        self.state_changed = true;
        let facts = self.blueprint.as_ref().and_then(|blueprint| self.members.all_ready(blueprint));
        facts.map_or(Ok(()), |facts| self.begin(&facts))
    }

    /// A stream moves only to an equal digest, and all ranks of an epoch have one: the configured one or, where there
    /// is none, that of the first that was ready. It names version, model, weights and numerics.
    fn accept(&self, ready: &wire::Ready) -> Result<Facts, Status> {
        let policy = proto::policy_digest(&ready.policy_digest).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let served = || self.serving.as_ref().map(|serving| serving.policy);
        let ours = self.config.policy_digest.or_else(served).or_else(|| self.members.policy());
        if let Some(ours) = ours.filter(|ours| *ours != policy) {
            return Err(Status::failed_precondition(format!(
                "this rank computes under {policy}, the replica under {ours}: another model, or other numerics"
            )));
        }
        Ok(Facts { policy, weight_bytes: ready.weight_bytes })
    }

    /// All ranks are ready: serve, or go on serving.
    fn begin(&mut self, facts: &[Facts]) -> Result<(), Error> {
        let (Some(blueprint), Some(first)) = (&self.blueprint, facts.first()) else { return Ok(()) };
        let n_blocks = blueprint.n_blocks();
        match &mut self.serving {
            Some(serving) => serving.scheduler.requeue_into(self.epoch, &n_blocks, Loss::Planned, &mut self.outputs),
            None => {
                let config = self.config.scheduler(blueprint.context, n_blocks.clone(), first.policy);
                let mut scheduler = Scheduler::new(config, self.epoch)?;
                if self.draining_since.is_some() {
                    scheduler.drain();
                }
                self.serving = Some(Serving { scheduler, policy: first.policy });
            }
        }
        self.outputs_without_step();
        self.is_ready = true;
        self.placing.ready_since = Some(self.now());
        self.state_changed = true;
        tracing::info!(epoch = %self.epoch, n_ranks = facts.len(), ?n_blocks, "the replica is ready");
        self.welcome();
        Ok(())
    }

    // -- an epoch ends

    /// A worker is gone, or is told to go. If it held a rank the epoch ends.
    pub(crate) fn lose(&mut self, worker: WorkerId, why: Status) {
        self.let_go(worker, why, Loss::Unexplained);
    }

    /// It says that it cannot go on.
    fn broken(&mut self, worker: WorkerId, message: &str) {
        self.let_go(worker, Status::aborted(format!("the rank failed: {message}")), Loss::Reported);
    }

    fn let_go(&mut self, worker: WorkerId, why: Status, loss: Loss) {
        let message = why.message().to_owned();
        let was_suspect = self.members.is_suspect(worker);
        let Some((role, host)) = self.members.dismiss(worker, why) else { return };
        let rank = role.rank().map(|rank| rank.0);
        tracing::warn!(%worker, rank, host, cause = message, "a worker is lost");
        if was_suspect {
            // It was the guilty one: those who named it need not wait.
            self.placing.not_before = None;
        }
        if rank.is_some() {
            metrics::rank_lost(&self.of);
            self.end_epoch(loss);
        }
        self.place();
    }

    /// A rank cannot go on. If it names a peer, it stays, and its peer is suspected.
    pub(crate) fn rank_failed(&mut self, worker: WorkerId, failed: &wire::Failed) {
        self.members.heard(worker);
        let of = Epoch { incarnation: failed.epoch_incarnation, n: failed.epoch_n };
        let Some(guilty) = failed.guilty_rank else { return self.broken(worker, &failed.message) };
        if of != self.epoch {
            // Of an epoch that has ended: one report of its end was enough.
            return;
        }
        let shards = self.blueprint.iter().flat_map(|blueprint| &blueprint.shards);
        let blamed = shards.filter(|shard| u32::from(shard.rank.0) == guilty).map(|shard| shard.worker).next();
        match blamed {
            Some(blamed) if blamed != worker => self.blame(worker, blamed, guilty, &failed.message),
            _ => self.broken(worker, &failed.message),
        }
    }

    /// The epoch ends and nobody is dismissed: whoever is dead says so by its stream, whoever is stopped by its
    /// silence, and whoever hangs by a counter that does not move. Two that do not reach each other are both well, so
    /// that the next placement waits, each time longer.
    fn blame(&mut self, reporter: WorkerId, blamed: WorkerId, rank: u32, message: &str) {
        let (host, of) = (self.members.host(blamed).to_owned(), self.members.host(reporter).to_owned());
        let by = self.members.role(reporter).and_then(Role::rank).map(|rank| rank.0);
        tracing::warn!(worker = %blamed, rank, host, cause = message, by, by_host = of, "a rank is blamed by a peer");
        self.members.suspect(blamed, format!("{of} says: {message}"));
        let now = self.now();
        let replace_max = micros(self.config.waits.replace_max);
        let lasted = self.placing.ready_since.map_or(0, |since| now.since(since).0);
        self.placing.n_fruitless = if lasted > replace_max { 0 } else { self.placing.n_fruitless + 1 };
        let doublings = self.placing.n_fruitless.saturating_sub(1).min(20);
        let wait = (micros(self.config.waits.replace_min) << doublings).min(replace_max);
        self.placing.not_before = Some(now.plus(wait));
        self.end_epoch(Loss::Unexplained);
    }

    /// All that ran waits, in an epoch without workers, for the next placement. The workers stay.
    fn end_epoch(&mut self, loss: Loss) {
        self.epoch.n += 1;
        self.blueprint = None;
        self.is_ready = false;
        self.placing.ready_since = None;
        self.state_changed = true;
        self.members.release_all();
        self.traces.epoch_ended();
        if let Some(serving) = &mut self.serving {
            serving.scheduler.requeue_all(self.epoch, loss, &mut self.outputs);
            self.outputs_without_step();
        }
    }
}
