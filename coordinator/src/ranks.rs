//! The loop's part that deals with workers: who joins, who holds which rank, and when an epoch begins.

use crate::event::WorkerId;
use crate::losses::Cause;
use crate::members::{Facts, NotTaken, Role};
use crate::outbound::Outbound;
use crate::placement::{Blueprint, Machine, Shard, predict};
use crate::replica::{Replica, Serving};
use crate::{Error, pace::Speed};
use proto::cluster as wire;
use scheduler::{Loss, Scheduler};
use std::time::Duration;
use telemetry::metrics;
use tonic::Status;
use types::{Epoch, Grid, Micros, PolicyDigest, Rank};

const UNREAD: &str = "this rank leaves its frames unread";

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
            Err(why) => return self.log_refused(worker, &host, pid, &why),
        }
        self.placing.crowd_changed();
        if self.strangers.out(self.now()).next().is_some() {
            // It may take the place of one that is left out.
            self.placing.trust_again();
        }
        self.place();
    }

    /// It may come again at once, as often as it likes.
    fn log_refused(&mut self, worker: WorkerId, host: &str, pid: u32, why: &NotTaken) {
        let now = self.now();
        let by = match why {
            NotTaken::SamePlace(other) => Some(*other),
            NotTaken::Unknown(_) => None,
        };
        let Some(unsaid) = self.refusals.admit(by, 1, &worker, now) else { return };
        let unsaid = unsaid.count();
        match why {
            NotTaken::SamePlace(other) => {
                tracing::warn!(%worker, host, pid, %other, unsaid, "refused: its mesh address is another worker's");
            }
            NotTaken::Unknown(why) => {
                tracing::warn!(%worker, host, pid, %why, unsaid, "refused: nobody knows what it computes on");
            }
        }
    }

    pub(crate) fn heartbeat(&mut self, worker: WorkerId, beat: &wire::Heartbeat) {
        let Some(since) = self.members.beat(worker, beat) else { return };
        if let Some(rank) = self.members.role(worker).and_then(Role::rank) {
            metrics::rank(&self.of, rank.0, since.compute_micros, since.wait_micros, since.idle_micros);
        }
    }

    // -- an epoch begins

    pub(crate) fn place_if_due(&mut self, now: Micros) {
        if self.placing.is_due(now) {
            self.place();
        }
    }

    /// Lays the replica out, if it is not and can be.
    pub(crate) fn place(&mut self) {
        let now = self.now();
        if self.blueprint.is_some() {
            return;
        }
        let must_wait = self.placing.must_wait(now);
        let inventory = self.candidates(now);
        match self.choose(now, &inventory) {
            Ok(_) if must_wait => self.state_changed |= self.placing.can(),
            Ok(blueprint) => {
                self.predict(&inventory, &blueprint);
                self.assign(blueprint);
            }
            Err(why) => {
                self.state_changed |= self.placing.cannot(now, why, inventory.len());
                // Who is left out may have another chance by then.
                let next = self.strangers.out(now).map(|(_, out)| out.until).min();
                self.placing.try_again_at(next);
            }
        }
    }

    fn predict(&mut self, inventory: &[Machine], blueprint: &Blueprint) {
        let policy = self.policy_on(blueprint.grid);
        self.prediction = predict(inventory, &self.config.shape, &policy, blueprint).ok();
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
        if let Some(shortened) = &blueprint.shortened {
            tracing::warn!(asked = shortened.asked, has = shortened.has, "{shortened}");
        }
        self.state_changed = true;
        let assigns: Vec<wire::Assign> =
            blueprint.shards.iter().map(|shard| self.assignment(&blueprint, shard)).collect();
        let workers: Vec<(WorkerId, Rank)> = blueprint.shards.iter().map(|shard| (shard.worker, shard.rank)).collect();
        self.placing.begun(&blueprint);
        self.readings.begin();
        self.blueprint = Some(blueprint);
        for ((worker, rank), assign) in workers.into_iter().zip(assigns) {
            if !self.members.assign(worker, rank, assign, now) {
                return self.lose(worker, Cause::Deaf, Status::resource_exhausted(UNREAD));
            }
        }
    }

    fn assignment(&self, blueprint: &Blueprint, shard: &Shard) -> wire::Assign {
        let (policy, waits) = (&self.config.policy, &self.config.waits);
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
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
            activations: policy.activations.to_string(),
            kv_dtype: policy.kv_dtype.to_string(),
            n_blocks: blueprint.n_blocks(),
            kv_bytes: shard.kv_bytes,
            // The one that was promised, also where the pools hold less: the angles of long ropes depend on it.
            context: self.promised().unwrap_or(blueprint.context),
            batch_tokens_max: self.config.limits.batch_tokens_max,
            running_max: policy.running_max,
            meet_max_millis: millis(waits.meet_max),
            exchange_max_millis: millis(waits.exchange_max),
            policy_digest: self.policy_meant(shard.worker).map_or_else(Vec::new, |policy| policy.0.to_vec()),
            reading: self.changes.reading,
            zero_kv: self.config.zero_kv,
            numerics: self.config.mode().to_string(),
        }
    }

    /// The word to meet goes out when all have loaded: nobody waits among the others for one that still reads.
    pub(crate) fn rank_loaded(&mut self, worker: WorkerId, loaded: &wire::Loaded) {
        self.members.heard(worker);
        let of = Epoch { incarnation: loaded.epoch_incarnation, n: loaded.epoch_n };
        let Some(Role::Loading { rank, .. }) = self.members.role(worker) else { return };
        if of != self.epoch {
            return;
        }
        match self.accept(worker, loaded).and_then(|facts| self.hear_readings(rank, loaded).map(|()| facts)) {
            Ok(facts) => self.members.loaded(worker, rank, facts, &loaded.unread),
            Err(why) => return self.lose(worker, Cause::Wrong, why),
        }
        self.state_changed = true;
        let are_all_here = self.blueprint.as_ref().is_some_and(|blueprint| self.members.all_loaded(blueprint));
        if are_all_here && self.have_read_the_same() {
            let meet = wire::Meet { epoch_incarnation: self.epoch.incarnation, epoch_n: self.epoch.n };
            let now = self.now();
            if let Err(worker) = self.members.meet(meet, now) {
                self.lose(worker, Cause::Deaf, Status::resource_exhausted(UNREAD));
            }
        }
    }

    pub(crate) fn rank_ready(&mut self, worker: WorkerId, ready: &wire::Ready) -> Result<(), Error> {
        self.members.heard(worker);
        let of = Epoch { incarnation: ready.epoch_incarnation, n: ready.epoch_n };
        if of != self.epoch {
            return Ok(());
        }
        self.members.ready(worker);
        self.state_changed = true;
        let facts = self.blueprint.as_ref().and_then(|blueprint| self.members.all_ready(blueprint));
        facts.filter(|_| !self.is_ready).map_or(Ok(()), |facts| self.begin(&facts))
    }

    /// All ranks of an epoch mean one policy: the configured one or, where there is none, that of the first that had
    /// loaded. It names version, model and numerics; which bytes they have read is looked at when all have.
    fn accept(&self, worker: WorkerId, loaded: &wire::Loaded) -> Result<Facts, Status> {
        let policy =
            proto::policy_digest(&loaded.policy_digest).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let ours = self.policy_meant(worker).or_else(|| self.members.policy());
        if let Some(ours) = ours.filter(|ours| *ours != policy) {
            return Err(Status::failed_precondition(format!(
                "this rank computes under {policy}, the replica under {ours}: another model, or other numerics \
                 (a GPU's architecture is among them)"
            )));
        }
        Ok(Facts { policy, weight_bytes: loaded.weight_bytes })
    }

    /// What is meant by what has been served or, where nothing was, what was configured for this worker's device.
    fn policy_meant(&self, worker: WorkerId) -> Option<PolicyDigest> {
        let configured = || self.members.device(worker).and_then(|device| self.config.digest_on(device));
        self.readings.meant().or_else(configured)
    }

    /// All ranks are ready: serve, or go on serving.
    fn begin(&mut self, facts: &[Facts]) -> Result<(), Error> {
        let (Some(blueprint), Some(first)) = (&self.blueprint, facts.first()) else { return Ok(()) };
        let (grid, n_blocks) = (blueprint.grid, blueprint.n_blocks());
        self.strangers.met(blueprint.shards.iter().map(|shard| shard.worker));
        match &mut self.serving {
            Some(serving) => {
                serving.scheduler.reshape(grid.pp.into(), self.config.steps_in_flight_max(grid))?;
                serving.scheduler.narrow(blueprint.context);
                serving.scheduler.requeue_into(self.epoch, &n_blocks, Loss::Planned, &mut self.outputs);
            }
            None => {
                let policy = self.readings.serve(first.policy);
                let mut scheduler = Scheduler::new(self.config.scheduler(blueprint, policy), self.epoch)?;
                if self.draining_since.is_some() {
                    scheduler.drain();
                }
                self.serving = Some(Serving { scheduler, policy });
            }
        }
        self.outputs_without_step();
        self.is_ready = true;
        let now = self.now();
        self.placing.ready(now);
        self.state_changed = true;
        let (Grid { tp, pp, .. }, epoch) = (grid, self.epoch);
        tracing::info!(%epoch, tp, pp, n_ranks = facts.len(), ?n_blocks, "the replica is ready");
        self.recovered(grid);
        self.welcome();
        Ok(())
    }
}
