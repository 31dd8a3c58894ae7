//! The loop, and what it owns: the planner, the workers, the routers. Everything that happens comes as an event;
//! nothing here waits for a peer.

use crate::event::{Event, WorkerId};
use crate::members::{Facts, Members, Role};
use crate::placement::{Blueprint, Policy, plan};
use crate::routers::Routers;
use crate::steps::Pace;
use crate::{Config, Error};
use proto::cluster as wire;
use proto::cluster::state::Phase;
use scheduler::{Output, Scheduler, Stats};
use std::time::Duration;
use telemetry::metrics;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::{Epoch, Layout, Micros, PolicyDigest, RequestId, Step};

/// Events taken before steps are planned and outputs sent: enough to share their cost, too few to delay them.
const EVENTS_PER_TURN_MAX: usize = 256;

pub(crate) struct Replica {
    pub(crate) config: Config,
    began: Instant,
    /// Grows when a placement begins and when it ends.
    pub(crate) epoch: Epoch,
    pub(crate) members: Members,
    pub(crate) routers: Routers,
    /// Present while every rank has been given its place.
    blueprint: Option<Blueprint>,
    /// Present from the first time that all ranks were ready.
    pub(crate) serving: Option<Serving>,
    /// All ranks of the blueprint are ready.
    pub(crate) is_ready: bool,
    draining_since: Option<Micros>,
    state_sent: Micros,
    state_changed: bool,
    /// Since when the oldest step in flight has been awaited.
    pub(crate) step_since: Micros,
    pub(crate) pace: Pace,
    /// Filled again and again; kept for its memory.
    pub(crate) step: Step,
    /// Empty between calls; kept for its memory.
    pub(crate) outputs: Vec<Output>,
}

/// What is settled when the replica serves for the first time, and outlives its workers.
pub(crate) struct Serving {
    pub scheduler: Scheduler,
    policy: PolicyDigest,
}

impl Replica {
    pub fn new(config: Config, epoch: Epoch) -> Replica {
        Replica {
            config,
            began: Instant::now(),
            epoch,
            members: Members::default(),
            routers: Routers::default(),
            blueprint: None,
            serving: None,
            is_ready: false,
            draining_since: None,
            state_sent: Micros(0),
            state_changed: false,
            step_since: Micros(0),
            pace: Pace::default(),
            step: Step::default(),
            outputs: Vec::new(),
        }
    }

    /// Takes events until it has drained.
    pub async fn run(mut self, mut queue: mpsc::Receiver<Event>, shutdown: CancellationToken) -> Result<(), Error> {
        let mut ticks = interval(self.config.waits.beat_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.is_over() && !self.is_too_late() {
            let event = tokio::select! {
                event = queue.recv() => event.unwrap_or(Event::Drain),
                _ = ticks.tick() => Event::Tick,
                () = shutdown.cancelled(), if self.draining_since.is_none() => Event::Drain,
            };
            self.turn(event, &mut queue)?;
        }
        self.check_when_idle();
        self.members.leave_all("the coordinator has drained");
        self.routers.close_all(&Status::unavailable("the coordinator has drained"));
        Ok(())
    }

    /// An event, what else is there already, and what follows from them.
    fn turn(&mut self, event: Event, queue: &mut mpsc::Receiver<Event>) -> Result<(), Error> {
        // The tick comes last: a beat that is in the queue has not been missed.
        let (first, last) = match event {
            Event::Tick => (None, Some(Event::Tick)),
            other => (Some(other), None),
        };
        let ready = std::iter::from_fn(|| queue.try_recv().ok()).take(EVENTS_PER_TURN_MAX);
        for event in first.into_iter().chain(ready).chain(last) {
            self.handle(event)?;
        }
        self.plan_steps();
        self.tell_routers();
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::RouterAttached { router, frames } => self.router_attached(router, frames),
            Event::Submit { router, request } => self.submit(router, request),
            Event::Cancel { router, id, stopped } => self.cancel_for(router, id, stopped),
            Event::RouterGone { router, why } => self.router_gone(router, why),
            Event::WorkerJoined { worker, hello, frames } => {
                tracing::info!(%worker, host = hello.host, pid = hello.pid, device = hello.device, "a worker joins");
                self.members.join(worker, hello, frames);
                self.place();
            }
            Event::RankReady { worker, ready } => self.rank_ready(worker, &ready)?,
            Event::StepDone { worker, done } => self.step_done(worker, done),
            Event::Heartbeat { worker, beat } => self.heartbeat(worker, &beat),
            Event::RankLost { worker, why } => self.lose(worker, why),
            Event::Tick => self.tick(),
            Event::Drain => self.drain(),
        }
        Ok(())
    }

    pub(crate) fn now(&self) -> Micros {
        Micros(self.began.elapsed().as_micros() as u64)
    }

    fn is_over(&self) -> bool {
        let is_idle = self.serving.as_ref().is_none_or(|serving| serving.scheduler.is_idle());
        self.draining_since.is_some() && is_idle
    }

    /// What was cancelled ends when its step is answered; a rank that hangs answers none.
    fn is_too_late(&self) -> bool {
        let max = micros(self.config.waits.drain_max + self.config.waits.close_max);
        self.draining_since.is_some_and(|since| self.now().since(since).0 > max)
    }

    fn drain(&mut self) {
        tracing::info!("draining");
        let now = self.now();
        self.draining_since.get_or_insert(now);
        self.state_changed = true;
        if let Some(serving) = &mut self.serving {
            serving.scheduler.drain();
        }
    }

    // -- time

    fn tick(&mut self) {
        let now = self.now();
        self.dismiss_the_silent(now);
        if let Some(serving) = &mut self.serving {
            serving.scheduler.expire(now, &mut self.outputs);
            self.outputs_without_step();
        }
        self.check_when_idle();
        // A coordinator that drains will not be there for a router that comes back.
        let grace = if self.draining_since.is_some() { 0 } else { micros(self.config.waits.router_grace) };
        let forsaken = self.routers.forsaken(now, grace);
        self.cancel_all(forsaken);
        if self.draining_since.is_some_and(|since| now.since(since).0 > micros(self.config.waits.drain_max)) {
            self.cancel_everything();
        }
        if now.since(self.state_sent).0 >= micros(self.config.waits.state_every) {
            self.state_changed = true;
        }
    }

    /// Whenever nothing runs, nothing may be held.
    fn check_when_idle(&self) {
        let idle = self.serving.as_ref().filter(|serving| serving.scheduler.is_idle());
        if let Some(serving) = idle.filter(|_| cfg!(debug_assertions)) {
            serving.scheduler.check();
            assert_eq!(serving.scheduler.stats().blocks_used, 0, "an idle replica holds no block");
        }
    }

    fn dismiss_the_silent(&mut self, now: Micros) {
        for worker in self.members.silent(self.config.waits.beats_missed_max) {
            self.lose(worker, Status::deadline_exceeded("this rank was not heard of for too long"));
        }
        for worker in self.members.overdue(now, micros(self.config.waits.load_max)) {
            self.lose(worker, Status::deadline_exceeded("this rank took too long to load"));
        }
        if let Some(worker) = self.stuck(now) {
            self.lose(worker, Status::deadline_exceeded("this rank does not answer its step"));
        }
    }

    /// The rank that owes an answer to a step for too long.
    fn stuck(&self, now: Micros) -> Option<WorkerId> {
        let is_awaited = self.serving.as_ref().is_some_and(|serving| serving.scheduler.stats().n_steps_in_flight > 0);
        let is_late = now.since(self.step_since).0 > micros(self.config.waits.step_max);
        let sampler = self.config.policy.grid.sampler();
        let shards = self.blueprint.iter().flat_map(|blueprint| &blueprint.shards);
        let late = shards.filter(|shard| shard.rank == sampler).map(|shard| shard.worker).next();
        late.filter(|_| self.is_ready && is_awaited && is_late)
    }

    // -- workers

    fn heartbeat(&mut self, worker: WorkerId, beat: &wire::Heartbeat) {
        let Some(since) = self.members.beat(worker, beat) else { return };
        if let Some(rank) = self.members.role(worker).and_then(Role::rank) {
            metrics::rank(rank.0, since.compute_micros, since.idle_micros);
        }
    }

    /// Lays the replica out, if it is not and can be.
    fn place(&mut self) {
        if self.blueprint.is_some() {
            return;
        }
        let (inventory, policy) = (self.members.inventory(), self.policy_in_force());
        match plan(&inventory, &self.config.shape, &policy, None) {
            Ok(blueprint) => self.assign(blueprint),
            Err(why) => tracing::warn!(%why, n_workers = inventory.len(), "the replica cannot be placed"),
        }
    }

    /// Once it serves, the context is a promise to those who were welcomed.
    fn policy_in_force(&self) -> Policy {
        let promised = self.serving.as_ref().map(|serving| serving.scheduler.config().context_max);
        Policy { context: promised.or(self.config.policy.context), ..self.config.policy.clone() }
    }

    fn assign(&mut self, blueprint: Blueprint) {
        let now = self.now();
        self.epoch.n += 1;
        let Blueprint { context, n_blocks, .. } = blueprint;
        tracing::info!(epoch = %self.epoch, context, n_blocks, "placing the replica");
        self.state_changed = true;
        let shards = blueprint.shards.clone();
        self.blueprint = Some(blueprint);
        for shard in shards {
            let assign = self.assignment(&shard);
            if !self.members.assign(shard.worker, shard.rank, assign, now) {
                return self.lose(shard.worker, Status::resource_exhausted("this rank leaves its frames unread"));
            }
        }
    }

    fn assignment(&self, shard: &crate::placement::Shard) -> wire::Assign {
        let policy = &self.config.policy;
        wire::Assign {
            epoch_incarnation: self.epoch.incarnation,
            epoch_n: self.epoch.n,
            rank: shard.rank.0.into(),
            stages: Layout::solo(self.config.shape.n_layers).stages().iter().map(wire::Stage::from).collect(),
            mesh_addresses: Vec::new(),
            mesh_secret: Vec::new(),
            model_path: self.config.model_path.to_string_lossy().into_owned(),
            activations: policy.activations.clone(),
            kv_dtype: policy.kv_dtype.clone(),
            kv_bytes: shard.kv_bytes,
            context: self.blueprint.as_ref().map_or(0, |blueprint| blueprint.context),
            batch_tokens_max: self.config.limits.batch_tokens_max,
            running_max: policy.running_max,
        }
    }

    fn rank_ready(&mut self, worker: WorkerId, ready: &wire::Ready) -> Result<(), Error> {
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
        let facts = self.blueprint.as_ref().and_then(|blueprint| self.members.all_ready(blueprint));
        facts.map_or(Ok(()), |facts| self.begin(&facts))
    }

    /// A stream moves only to an equal digest.
    fn accept(&self, ready: &wire::Ready) -> Result<Facts, Status> {
        let policy = proto::policy_digest(&ready.policy_digest).map_err(|e| Status::invalid_argument(e.to_string()))?;
        if let Some(ours) = self.serving.as_ref().map(|serving| serving.policy).filter(|ours| *ours != policy) {
            return Err(Status::failed_precondition(format!(
                "this rank computes under {policy}, the replica under {ours}"
            )));
        }
        match ready.n_blocks {
            0 => Err(Status::resource_exhausted("this rank has no room for a single KV block")),
            n_blocks => Ok(Facts { policy, n_blocks }),
        }
    }

    /// All ranks are ready: serve, or go on serving.
    fn begin(&mut self, facts: &[Facts]) -> Result<(), Error> {
        let (Some(blueprint), Some(first)) = (&self.blueprint, facts.first()) else { return Ok(()) };
        let held = facts.iter().map(|facts| facts.n_blocks).min().unwrap_or(0);
        let n_blocks = blueprint.n_blocks.min(held);
        match &mut self.serving {
            Some(serving) => serving.scheduler.requeue_into(self.epoch, n_blocks, &mut self.outputs),
            None => {
                let config = self.config.scheduler(blueprint.context, n_blocks, first.policy);
                let mut scheduler = Scheduler::new(config, self.epoch)?;
                if self.draining_since.is_some() {
                    scheduler.drain();
                }
                self.serving = Some(Serving { scheduler, policy: first.policy });
            }
        }
        self.outputs_without_step();
        self.is_ready = true;
        self.state_changed = true;
        tracing::info!(epoch = %self.epoch, n_blocks, "the replica is ready");
        self.welcome();
        Ok(())
    }

    /// A worker is gone, or is told to go. If it held a rank the epoch ends: all that ran waits, in an epoch without
    /// workers, for the next placement.
    pub(crate) fn lose(&mut self, worker: WorkerId, why: Status) {
        let message = why.message().to_owned();
        let Some(role) = self.members.dismiss(worker, why) else { return };
        tracing::warn!(%worker, rank = role.rank().map(|rank| rank.0), why = message, "a worker is lost");
        if role.rank().is_none() {
            return;
        }
        metrics::rank_lost();
        self.epoch.n += 1;
        self.blueprint = None;
        self.is_ready = false;
        self.state_changed = true;
        self.members.release_all();
        if let Some(serving) = &mut self.serving {
            serving.scheduler.requeue_all(self.epoch, &mut self.outputs);
            self.outputs_without_step();
        }
        self.place();
    }

    // -- routers

    fn router_attached(&mut self, router: u32, frames: crate::outbound::Outbound<wire::ReplicaFrame>) {
        tracing::info!(router, "a router attaches");
        self.routers.attach(router, frames);
        if self.serving.is_some() {
            self.welcome();
        }
        self.state_changed = true;
    }

    /// Its requests go on for a grace: a router that was only cut off may be replaced by then.
    fn router_gone(&mut self, router: u32, why: Status) {
        tracing::info!(router, why = why.message(), "a router is gone");
        let now = self.now();
        self.routers.gone(router, why, now);
    }

    fn welcome(&mut self) {
        let Some(serving) = &self.serving else { return };
        let welcome = |router| wire::Welcome {
            version: proto::VERSION.into(),
            router,
            replica: self.config.replica.clone(),
            model: self.config.model.clone(),
            context: serving.scheduler.config().context_max,
            policy_digest: serving.policy.0.to_vec(),
            vocab: self.config.shape.vocab,
            incarnation: self.epoch.incarnation,
        };
        let lost = self.routers.welcome(welcome);
        self.cancel_all(lost);
    }

    fn tell_routers(&mut self) {
        let lost = self.routers.flush();
        self.cancel_all(lost);
        if !std::mem::take(&mut self.state_changed) {
            return;
        }
        self.state_sent = self.now();
        let state = self.state();
        let lost = self.routers.broadcast(&state);
        self.cancel_all(lost);
    }

    fn phase(&self) -> Phase {
        match (&self.draining_since, &self.serving, self.is_ready) {
            (Some(_), _, _) => Phase::Draining,
            (None, None, _) => Phase::Loading,
            (None, Some(_), true) => Phase::Ready,
            (None, Some(_), false) => Phase::Recovering,
        }
    }

    fn state(&self) -> wire::State {
        let stats = self.serving.as_ref().map(|serving| serving.scheduler.stats()).unwrap_or_default();
        let ranks = self.members.states(self.blueprint.as_ref());
        self.measure(&stats, if self.is_ready { ranks.len() as u32 } else { 0 });
        wire::State {
            phase: self.phase().into(),
            epoch_incarnation: self.epoch.incarnation,
            epoch_n: self.epoch.n,
            n_waiting: stats.n_waiting,
            n_running: stats.n_running,
            blocks_used: stats.blocks_used,
            blocks_total: stats.blocks_total,
            ranks,
        }
    }

    fn measure(&self, stats: &Stats, n_ranks_ready: u32) {
        metrics::epoch(self.epoch.n, n_ranks_ready);
        metrics::load(stats.n_running, stats.n_waiting, stats.blocks_used, stats.blocks_total);
        metrics::planned(metrics::Planned {
            steps: stats.steps,
            preemptions: stats.preemptions,
            tokens_out: stats.tokens_drawn,
            tokens_discarded: stats.tokens_discarded,
            prefix_hit_tokens: stats.prefix_hit_tokens,
        });
    }

    pub(crate) fn cancel_all(&mut self, ids: Vec<RequestId>) {
        let Some(serving) = &mut self.serving else { return };
        for id in ids {
            serving.scheduler.cancel(id, &mut self.outputs);
        }
        self.outputs_without_step();
    }

    fn cancel_everything(&mut self) {
        let all = self.routers.all_live();
        self.cancel_all(all);
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
