//! The loop, and what it owns: the planner, the workers, the routers. Everything that happens comes as an event;
//! nothing here waits for a peer.

use crate::beats::NameChanges;
use crate::changes::Changes;
use crate::event::{Event, WorkerId};
use crate::grids::Placing;
use crate::losses::{Cause, Recovery};
use crate::members::Members;
use crate::outbound::Outbound;
use crate::pace::{Pace, Speed};
use crate::patience::Patience;
use crate::placement::{Blueprint, Prediction};
use crate::routers::Routers;
use crate::serve::Told;
use crate::slow::Slowness;
use crate::strangers::Strangers;
use crate::traces::Traces;
use crate::weights::Readings;
use crate::{Config, Error};
use ::wire::rate_limit::RateLimit;
use proto::cluster as wire;
use scheduler::{Output, Scheduler};
use std::time::Duration;
use telemetry::metrics::{Cache, ReplicaLabel};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::{Epoch, Micros, PolicyDigest, RequestId, Step};

/// Events taken before steps are planned and outputs sent: enough to share their cost, too few to delay them.
const EVENTS_PER_TURN_MAX: usize = 256;

pub(crate) struct Replica {
    pub(crate) config: Config,
    /// In its metrics.
    pub(crate) of: ReplicaLabel,
    /// For the store.
    pub(crate) tell: watch::Sender<Told>,
    began: Instant,
    /// Grows when a placement begins and when it ends.
    pub(crate) epoch: Epoch,
    pub(crate) members: Members,
    /// Which bytes the ranks have read.
    pub(crate) readings: Readings,
    pub(crate) routers: Routers,
    /// Present while every rank has been given its place.
    pub(crate) blueprint: Option<Blueprint>,
    pub(crate) placing: Placing,
    pub(crate) strangers: Strangers,
    /// Of workers that say they are where this one is; those whose device nobody knows share one.
    pub(crate) refusals: RateLimit<Option<WorkerId>>,
    /// Present while the replica has served and does not.
    pub(crate) recovery: Option<Recovery>,
    pub(crate) changes: Changes,
    pub(crate) patience: Patience,
    pub(crate) slowness: Slowness,
    pub(crate) prediction: Option<Prediction>,
    /// Present from the first time that all ranks were ready.
    pub(crate) serving: Option<Serving>,
    /// All ranks of the blueprint are ready.
    pub(crate) is_ready: bool,
    pub(crate) draining_since: Option<Micros>,
    state_sent: Micros,
    pub(crate) state_changed: bool,
    pub(crate) looked: Micros,
    pub(crate) speed_told: Micros,
    /// Since when the oldest step in flight has been awaited.
    pub(crate) step_since: Micros,
    pub(crate) pace: Pace,
    pub(crate) speed: Speed,
    pub(crate) traces: Traces,
    /// As the metrics tell it.
    pub(crate) cache: Option<Cache>,
    /// Filled again and again; kept for its memory.
    pub(crate) step: Step,
    /// Empty between calls; kept for its memory.
    pub(crate) outputs: Vec<Output>,
    /// Of the cache's names, since the last beat.
    pub(crate) name_changes: NameChanges,
}

/// What is settled when the replica serves for the first time, and outlives its workers.
pub(crate) struct Serving {
    pub scheduler: Scheduler,
    /// Over the bytes that the ranks have read.
    pub policy: PolicyDigest,
}

impl Replica {
    pub fn new(config: Config, epoch: Epoch, tell: watch::Sender<Told>) -> Replica {
        Replica {
            tell,
            of: ReplicaLabel::replica(&config.replica),
            placing: Placing::new(config.policy.grid),
            strangers: Strangers::default(),
            refusals: RateLimit::default(),
            config,
            began: Instant::now(),
            epoch,
            members: Members::default(),
            readings: Readings::default(),
            routers: Routers::default(),
            blueprint: None,
            recovery: None,
            changes: Changes::default(),
            patience: Patience::default(),
            slowness: Slowness::default(),
            prediction: None,
            serving: None,
            is_ready: false,
            draining_since: None,
            state_sent: Micros(0),
            state_changed: false,
            looked: Micros(0),
            speed_told: Micros(0),
            step_since: Micros(0),
            pace: Pace::default(),
            speed: Speed::default(),
            traces: Traces::default(),
            cache: None,
            step: Step::default(),
            outputs: Vec::new(),
            name_changes: NameChanges::default(),
        }
    }

    /// Takes events until it has drained.
    pub async fn run(mut self, mut queue: mpsc::Receiver<Event>, shutdown: CancellationToken) -> Result<(), Error> {
        let mut ticks = interval(self.config.waits.beat_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.is_over() && !self.is_too_late() {
            // In a fixed order, so that the same arrivals give the same frames. The queue comes last: it may never be
            // empty.
            let event = tokio::select! {
                biased;
                () = shutdown.cancelled(), if self.draining_since.is_none() => Event::Drain,
                _ = ticks.tick() => Event::Tick,
                event = queue.recv() => event.unwrap_or(Event::Drain),
            };
            self.turn(event, &mut queue)?;
        }
        self.check_when_idle();
        let n_left = self.routers.all_live().len();
        tracing::info!(n_left, "drained: what is left is for the routers to go on with elsewhere");
        self.tell_speed();
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
            Event::RouterAttached { router, former, frames } => self.router_attached(router, former, frames),
            Event::Submit { router, request } => drop(self.submit(router, *request)),
            Event::Adopt { router, of, request, n_had } => self.adopt(router, of, *request, n_had),
            Event::Cancel { router, id, stopped } => self.cancel_for(router, id, stopped),
            Event::Recite { router } => self.routers.recite_to(router),
            Event::RouterGone { router, why } => self.router_gone(router, why),
            Event::WorkerJoined { worker, hello, frames } => self.worker_joined(worker, hello, frames),
            Event::RankLoaded { worker, loaded } => self.rank_loaded(worker, &loaded),
            Event::RankReady { worker, ready } => self.rank_ready(worker, &ready)?,
            Event::StepDone { worker, done } => self.step_done(worker, done),
            Event::Heartbeat { worker, beat } => self.heartbeat(worker, &beat),
            Event::RankFailed { worker, failed } => self.rank_failed(worker, &failed),
            Event::WorkerLeaves { worker } => self.worker_leaves(worker),
            Event::RankLost { worker, why } => self.lose(worker, Cause::of(&why), why),
            Event::Scale { grid, reply } => self.scale(grid, reply),
            Event::Reload { found, reply } => self.reload(&found, reply),
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

    /// What still runs is left to the routers: their streams end without a word of their requests, so that they may
    /// go on with them elsewhere.
    fn is_too_late(&self) -> bool {
        let max = micros(self.config.waits.drain_max);
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
        self.dismiss_the_overdue(now);
        self.place_if_due(now);
        if let Some(serving) = &mut self.serving {
            serving.scheduler.expire(now, &mut self.outputs);
            self.outputs_without_step();
        }
        self.check_when_idle();
        // A coordinator that drains will not be there for a router that comes back.
        let grace = if self.draining_since.is_some() { 0 } else { micros(self.config.waits.router_grace) };
        let forsaken = self.routers.forsaken(now, grace);
        self.cancel_all(forsaken);
        if now.since(self.state_sent).0 >= micros(self.config.waits.state_every) {
            self.state_changed = true;
        }
        self.look(now);
        self.beat();
    }

    /// Whenever nothing runs, nothing may be held.
    fn check_when_idle(&self) {
        let idle = self.serving.as_ref().filter(|serving| serving.scheduler.is_idle());
        if let Some(serving) = idle.filter(|_| cfg!(debug_assertions)) {
            serving.scheduler.check();
            assert_eq!(serving.scheduler.stats().blocks_used, 0, "an idle replica holds no block");
        }
    }

    // -- routers

    fn router_attached(
        &mut self,
        router: u32,
        former: Option<wire::FormerNumber>,
        frames: Outbound<wire::ReplicaFrame>,
    ) {
        let former = former.filter(|former| former.incarnation == self.epoch.incarnation).map(|former| former.router);
        tracing::info!(router, former, "a router attaches");
        if let Some(former) = former {
            // It brings what it still wants under its new number.
            let forsaken = self.routers.forget(former);
            self.cancel_all(forsaken);
        }
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

    pub(crate) fn welcome(&mut self) {
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
            salt: self.config.salt.to_vec(),
            beat_millis: u32::try_from(self.config.waits.beat_every.as_millis()).unwrap_or(0),
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

    pub(crate) fn cancel_all(&mut self, ids: Vec<RequestId>) {
        let Some(serving) = &mut self.serving else { return };
        for id in ids {
            serving.scheduler.cancel(id, &mut self.outputs);
        }
        self.outputs_without_step();
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
