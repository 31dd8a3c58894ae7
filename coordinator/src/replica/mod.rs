//! The loop, and what it owns: the workers, the requests, and the replica's phase (`phase`). Everything arrives as an
//! event; nothing here waits for a peer.
//!
//! An event may find workers that are lost (`losses`): they are queued, and the loop takes them one after the other.
//! Each may end the epoch (`epochs`), after which the replica is laid out anew (`place`) on the grid that is best now
//! (`grids`); its ranks load and meet (`ranks`), and steps go on (`steps`) in as much memory as they need (`kv`). An
//! operator's change (`changes`) ends an epoch as a loss does. The replica's state is reported by `views`.

pub mod announcement;
mod changes;
mod endings;
mod epochs;
mod grids;
pub mod joined;
mod kv;
mod losses;
mod lost;
mod phase;
mod place;
mod ranks;
mod readings;
mod speed;
mod steps;
mod views;

use crate::config::micros;
use crate::event::Event;
use crate::members::workers::JoinedWorkers;
use crate::requests::LiveRequests;
use crate::{Config, Error};
use announcement::Announcement;
use changes::PendingChanges;
use cluster::OtherReplicas;
use endings::{LostWorker, Recovery};
use grids::GridChooser;
use lost::LostRanks;
use phase::Phase;
use readings::WeightReadings;
use speed::Performance;
use std::collections::VecDeque;
use telemetry::metrics::{CacheLabels, ReplicaLabel};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::{Epoch, Micros};

/// Events taken before steps are planned and outputs sent: enough to share their cost, too few to delay them.
const EVENTS_PER_TURN_MAX: usize = 256;

pub(crate) struct Replica {
    config: Config,
    /// The label of its metrics.
    of: ReplicaLabel,
    /// The announcement that the store publishes.
    announce: watch::Sender<Announcement>,
    began: Instant,
    /// Grows when a placement begins and when it ends.
    epoch: Epoch,
    members: JoinedWorkers,
    requests: LiveRequests,
    others: OtherReplicas,
    grids: GridChooser,
    phase: Phase,
    /// The hashes of the bytes that the ranks have read.
    readings: WeightReadings,
    /// Empty between events. Each look at the workers adds at most one entry per worker.
    losses: VecDeque<LostWorker>,
    /// Present if the replica has served and does not now.
    recovery: Option<Recovery>,
    lost: LostRanks,
    changes: PendingChanges,
    performance: Performance,
    draining_since: Option<Micros>,
    state_sent: Micros,
    state_changed: bool,
    /// Whether no request ran when the load was measured last.
    was_still: bool,
    looked: Micros,
    /// The cache's layout as last reported to the metrics.
    cache: Option<CacheLabels>,
}

impl Replica {
    pub fn new(config: Config, epoch: Epoch, announce: watch::Sender<Announcement>, others: OtherReplicas) -> Replica {
        let of = ReplicaLabel::replica(&config.replica);
        Replica {
            announce,
            began: Instant::now(),
            epoch,
            members: JoinedWorkers::default(),
            requests: LiveRequests::new(&config, of.clone(), epoch.incarnation),
            others,
            grids: GridChooser::new(config.policy.grid),
            phase: Phase::default(),
            readings: WeightReadings::default(),
            losses: VecDeque::new(),
            recovery: None,
            lost: LostRanks::default(),
            changes: PendingChanges::default(),
            performance: Performance::default(),
            draining_since: None,
            state_sent: Micros(0),
            state_changed: false,
            was_still: true,
            looked: Micros(0),
            cache: None,
            of,
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
        self.performance.log(&self.requests.stats().counters);
        self.members.leave_all("the coordinator has drained");
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
            self.take_losses();
        }
        self.plan_steps();
        self.grow_kv();
        self.take_losses();
        self.send_to_routers();
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), Error> {
        let now = self.now();
        match event {
            Event::RouterAttached { router, former, protocol, frames } => {
                self.requests.attach(router, (former, protocol), frames, now);
                self.state_changed = true;
            }
            Event::Submit(request) => drop(self.requests.submit(*request, now)),
            Event::Adopt(adopt) => self.requests.adopt(*adopt, now),
            Event::Cancel { router, id, stopped } => self.requests.cancel_for(router, id, stopped, now),
            Event::Recite { router } => self.requests.resend_names_to(router),
            Event::RouterGone { router, why } => self.requests.router_gone(router, why, now),
            Event::WorkerJoined { worker, hello, protocol, frames } => {
                self.worker_joined(worker, hello, protocol, frames);
            }
            Event::RankLoaded { worker, loaded } => self.rank_loaded(worker, &loaded),
            Event::RankReady { worker, ready } => self.rank_ready(worker, &ready)?,
            Event::StepDone { worker, done } => self.step_done(worker, &done),
            Event::Heartbeat { worker, beat } => self.heartbeat(worker, &beat),
            Event::RankFailed { worker, failed } => self.rank_failed(worker, &failed),
            Event::WorkerLeaves { worker } => self.worker_leaves(worker),
            Event::RankLost { worker, why } => self.worker_gone(worker, why),
            Event::Weights { reply } => self.send_weights(reply),
            Event::Scale { grid, reply } => self.scale(grid, reply),
            Event::Reload { found, reply } => self.reload(&found, reply),
            Event::Tick => self.tick(),
            Event::Drain => self.drain(),
        }
        Ok(())
    }

    /// One after the other: the next lost worker may hold a rank of the epoch that follows.
    fn take_losses(&mut self) {
        while let Some(lost) = self.losses.pop_front() {
            self.lose(lost);
        }
    }

    fn now(&self) -> Micros {
        Micros(self.began.elapsed().as_micros() as u64)
    }

    fn is_over(&self) -> bool {
        self.draining_since.is_some() && self.requests.is_idle()
    }

    /// True if the drain is over. Running requests are left to the routers: their streams end without an output, so
    /// that the routers may move them elsewhere.
    fn is_too_late(&self) -> bool {
        let max = micros(self.config.waits.drain_max);
        self.draining_since.is_some_and(|since| self.now().since(since).0 > max)
    }

    fn drain(&mut self) {
        tracing::info!("draining");
        let now = self.now();
        self.draining_since.get_or_insert(now);
        self.state_changed = true;
        self.requests.drain();
    }

    fn tick(&mut self) {
        let now = self.now();
        for look in [
            Replica::drop_silent_workers,
            Replica::drop_late_ranks,
            Replica::drop_stalled_ranks,
            Replica::drop_hung_rank,
        ] {
            look(self, now);
            // A loss ends the epoch, in which the next look would find other losses.
            self.take_losses();
        }
        self.place_if_due(now);
        self.take_losses();
        self.requests.expire(now);
        self.shrink_kv(now);
        self.take_losses();
        self.requests.check_when_idle();
        // A coordinator that drains will not be there for a router that comes back.
        let grace = if self.draining_since.is_some() { 0 } else { micros(self.config.waits.router_grace) };
        self.requests.cancel_abandoned(grace, now);
        if now.since(self.state_sent).0 >= micros(self.config.waits.state_every) {
            self.state_changed = true;
        }
        self.report_each_second(now);
        self.publish_metrics();
        self.requests.beat(now);
    }

    fn send_to_routers(&mut self) {
        let now = self.now();
        self.measure_when_still();
        self.requests.flush(now);
        if !std::mem::take(&mut self.state_changed) {
            return;
        }
        self.state_sent = now;
        self.publish_metrics();
        let state = self.state();
        self.requests.broadcast_state(&state, now);
    }
}
