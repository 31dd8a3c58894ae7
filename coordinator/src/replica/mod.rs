//! The loop: takes events in order, passes each to the owner of its state, and carries out what follows. Nothing here
//! waits for a peer.
//!
//! The deployment has the workers and the phase, and knows no requests; `LiveRequests` knows no ranks. An event of a
//! worker may lead to a `Transition`, which the loop performs (`epochs`): an epoch ends, the replica is placed, an
//! epoch begins. Lost workers are queued, and the loop dismisses them one after the other. An operator's change
//! (`changes`) ends an epoch as a loss does. Steps, and the memory that they need, are sent in `steps`.

pub mod announcement;
mod changes;
mod epochs;
mod recoveries;
mod reports;
mod steps;

use crate::config::micros;
use crate::deployment::{Deployment, Transition};
use crate::event::Event;
use crate::requests::LiveRequests;
use crate::{Config, Error};
use announcement::Announcement;
use changes::{PendingChanges, send_reply};
use cluster::OtherReplicas;
use proto::cluster as wire;
use recoveries::Recoveries;
use reports::Reports;
use std::sync::Arc;
use telemetry::metrics::{CacheLabels, ReplicaLabel};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::{BLOCK_TOKENS, Epoch, Micros};

/// Events taken before steps are planned and outputs sent: enough to share their cost, too few to delay them.
const EVENTS_PER_TURN_MAX: usize = 256;

pub(crate) struct Replica {
    config: Arc<Config>,
    clock: Clock,
    deployment: Deployment,
    requests: LiveRequests,
    others: OtherReplicas,
    recoveries: Recoveries,
    changes: PendingChanges,
    reports: Reports,
    draining_since: Option<Micros>,
}

/// The time since the replica began.
struct Clock(Instant);

impl Clock {
    fn now(&self) -> Micros {
        Micros(self.0.elapsed().as_micros() as u64)
    }
}

impl Replica {
    pub fn new(config: Config, epoch: Epoch, announce: watch::Sender<Announcement>, others: OtherReplicas) -> Replica {
        let of = ReplicaLabel::replica(&config.replica);
        let config = Arc::new(config);
        Replica {
            clock: Clock(Instant::now()),
            deployment: Deployment::new(Arc::clone(&config), of.clone(), epoch),
            requests: LiveRequests::new(&config, of.clone(), epoch.incarnation),
            others,
            recoveries: Recoveries::new(of.clone()),
            changes: PendingChanges::default(),
            reports: Reports::new(of, announce),
            draining_since: None,
            config,
        }
    }

    /// Handles events until the replica has drained.
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
        self.requests.check_when_idle();
        let n_left = self.requests.all_live().len();
        tracing::info!(n_left, "drained: routers move the remaining requests to other replicas");
        self.deployment.log_speed(&self.requests.stats().counters);
        self.deployment.leave_all("the coordinator has drained");
        self.requests.close_all(&Status::unavailable("the coordinator has drained"));
        Ok(())
    }

    /// Handles an event, those already queued behind it, and what follows from them.
    fn turn(&mut self, event: Event, queue: &mut mpsc::Receiver<Event>) -> Result<(), Error> {
        // The tick comes last: a heartbeat that is in the queue was not missed.
        let (first, last) = match event {
            Event::Tick => (None, Some(Event::Tick)),
            other => (Some(other), None),
        };
        let ready = std::iter::from_fn(|| queue.try_recv().ok()).take(EVENTS_PER_TURN_MAX);
        for event in first.into_iter().chain(ready).chain(last) {
            self.handle(event)?;
            self.take_losses()?;
        }
        self.plan_steps();
        self.grow_kv();
        self.take_losses()?;
        self.send_to_routers();
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), Error> {
        let now = self.clock.now();
        let mut next = None;
        match event {
            Event::RouterAttached { router, former, protocol, frames } => {
                self.requests.attach(router, (former, protocol), frames, now);
                self.reports.state_changed();
            }
            Event::Submit(request) => drop(self.requests.submit(*request, now)),
            Event::Adopt(adopt) => self.requests.adopt(*adopt, now),
            Event::Cancel { router, id, stopped } => self.requests.cancel_for(router, id, stopped, now),
            Event::Recite { router } => self.requests.resend_names_to(router),
            Event::RouterGone { router, why } => self.requests.router_gone(router, why, now),
            Event::WorkerJoined { worker, hello, protocol, frames } => {
                next = self.deployment.worker_joined(worker, (hello, protocol), frames, now);
            }
            Event::RankLoaded { worker, loaded } => self.deployment.rank_loaded(worker, &loaded, now),
            Event::RankReady { worker, ready } => next = self.deployment.rank_ready(worker, &ready),
            Event::StepDone { worker, done } => self.step_done(worker, &done, now),
            Event::Heartbeat { worker, beat } => {
                if let Some(parts) = self.deployment.heartbeat(worker, &beat) {
                    self.requests.kv_committed(parts);
                }
            }
            Event::PagesFetched { worker, done } => {
                if let Some(done) = self.deployment.pages_fetched(worker, done) {
                    self.requests.pages_fetched(&done);
                }
            }
            Event::PagesKept { worker, pages } => {
                self.deployment.pages_kept(worker, &pages);
                self.requests.add_tier_pages(self.deployment.take_kept_pages());
            }
            Event::RankFailed { worker, failed } => next = self.deployment.rank_failed(worker, &failed, now),
            Event::WorkerLeaves { worker } => next = self.deployment.worker_leaves(worker),
            Event::RankLost { worker, why } => self.deployment.worker_gone(worker, why),
            Event::Weights { reply } => send_reply(reply, self.deployment.weights()),
            Event::Scale { grid, reply } => next = self.scale(grid, reply, now),
            Event::Reload { found, reply } => next = self.reload(&found, reply),
            Event::Tick => self.tick(now)?,
            Event::Drain => self.drain(now),
        }
        next.map_or(Ok(()), |transition| self.perform(transition))
    }

    fn is_over(&self) -> bool {
        self.draining_since.is_some() && self.requests.is_idle()
    }

    /// True if the drain is over. Running requests are left to the routers: their streams end without an output, so
    /// that the routers may move them elsewhere.
    fn is_too_late(&self) -> bool {
        let max = micros(self.config.waits.drain_max);
        self.draining_since.is_some_and(|since| self.clock.now().since(since).0 > max)
    }

    fn drain(&mut self, now: Micros) {
        tracing::info!(requests = self.requests.all_live().len(), "draining: waiting for the running requests");
        self.draining_since.get_or_insert(now);
        self.reports.state_changed();
        self.requests.drain();
    }

    fn tick(&mut self, now: Micros) -> Result<(), Error> {
        for look in [Deployment::find_silent_workers, Deployment::find_late_ranks, Deployment::find_stalled_ranks] {
            look(&mut self.deployment, now);
            // A loss ends the epoch, in which the next look would find other losses.
            self.take_losses()?;
        }
        if let Some(transition) = self.deployment.find_hung_rank(now) {
            self.perform(transition)?;
        }
        self.take_losses()?;
        if self.deployment.is_placement_due(now) {
            self.perform(Transition::Place)?;
        }
        self.take_losses()?;
        self.requests.expire(now);
        self.shrink_kv(now);
        self.take_losses()?;
        self.requests.check_when_idle();
        // A coordinator that drains will not be there for a router that comes back.
        let grace = if self.draining_since.is_some() { 0 } else { micros(self.config.waits.router_grace) };
        self.requests.cancel_abandoned(grace, now);
        self.reports.renew_state(self.config.waits.state_every, now);
        if self.reports.begin_look(now) {
            self.look_at_ranks(now)?;
        }
        self.publish_metrics();
        self.requests.beat(now);
        Ok(())
    }

    /// Once a second: reports how the ranks spent their time, and moves to a larger grid if that is due.
    fn look_at_ranks(&mut self, now: Micros) -> Result<(), Error> {
        let times = self.deployment.measure_ranks(now);
        if self.deployment.is_serving() {
            self.reports.publish_cache(CacheLabels {
                block_size: BLOCK_TOKENS,
                n_blocks: self.requests.stats().blocks_total,
                dtype: self.config.policy.kv_dtype.to_string(),
                prefix_caching: self.config.shares_blocks(),
            });
        }
        self.deployment.report_slow_ranks(&times);
        if self.draining_since.is_none() {
            let (promised, is_needed) = (self.requests.promised_context(), self.is_needed(now));
            if let Some(transition) = self.deployment.grow_if_due(promised, is_needed, now) {
                self.perform(transition)?;
            }
        }
        self.deployment.log_speed_if_due(&self.requests.stats().counters, now);
        Ok(())
    }

    /// Whether another replica's streams may depend on this one, which then makes no optional change. Either it has
    /// taken some over not long ago, or the other replicas are there and none of them serves.
    fn is_needed(&self, now: Micros) -> bool {
        let hold = micros(self.config.waits.takeover_hold);
        let has_taken_over = self.requests.last_takeover().is_some_and(|at| now.since(at).0 < hold);
        let others = self.others.count();
        has_taken_over || (others.n > 0 && others.n_ready == 0)
    }

    fn publish_metrics(&self) {
        let (n, n_ranks_ready) = (self.deployment.epoch().n, self.deployment.n_ranks_ready());
        self.reports.publish_metrics(n, n_ranks_ready, &self.requests.stats());
    }

    fn send_to_routers(&mut self) {
        let now = self.clock.now();
        self.reports.measure_when_still(&self.requests.stats());
        self.requests.flush(now);
        if self.deployment.take_changed() {
            self.reports.state_changed();
        }
        if !self.reports.take_state_changed(now) {
            return;
        }
        self.publish_metrics();
        let state = self.state(now);
        let ranks_ready = if self.deployment.is_serving() { state.ranks.len() as u16 } else { 0 };
        let (policy, grid) = (self.requests.policy(), self.deployment.grid());
        self.reports.announce(Announcement { policy, tp: grid.tp, pp: grid.pp, ranks_ready });
        self.requests.broadcast_state(&state, now);
    }

    fn state(&self, now: Micros) -> wire::State {
        let stats = self.requests.stats();
        let phase = match (self.draining_since, self.requests.has_served(), self.deployment.is_serving()) {
            (Some(_), _, _) => wire::state::Phase::Draining,
            (None, false, _) => wire::state::Phase::Loading,
            (None, true, true) => wire::state::Phase::Ready,
            (None, true, false) => wire::state::Phase::Recovering,
        };
        wire::State {
            phase: phase.into(),
            n_waiting: stats.n_waiting,
            n_running: stats.n_running,
            blocks_used: stats.blocks_used,
            blocks_total: stats.blocks_total,
            blocks_committed: stats.blocks_committed,
            backlog_tokens: self.requests.backlog_tokens(),
            lost: self.recoveries.report(now),
            step_speed: self.requests.step_speed().map(Box::new),
            ..self.deployment.state(&stats.counters, now)
        }
    }
}
