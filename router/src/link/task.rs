//! The loop of a link, which owns the stream and the table of requests. What a replica's frames mean is in
//! `receive.rs`; how requests go to other links is in `moves.rs`.

use crate::board::ledger::Ledger;
use crate::config::{Config, Timeouts};
use crate::link::beats::BeatMonitor;
use crate::link::condition::ReplicaCondition;
use crate::link::connection::{CoordinatorStream, attach, send_first, up};
use crate::link::event::{AttachedStream, LinkEvent};
use crate::link::handle::ReplicaLink;
use crate::link::peers::ReplicaLinks;
use crate::link::request::LinkRequest;
use crate::link::target::LinkTarget;
use crate::link::ticket::Cancel;
use crate::link::view::{ReplicaInfo, ReplicaView};
use crate::refusal::Refusal;
use proto::ProtocolRange;
use proto::cluster as wire;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::Finish;

/// Frames that the transport has not taken yet. At this limit, no new request is taken.
const FRAMES_UNSENT_MAX: usize = 256;

/// The task that owns the stream and the table.
pub struct LinkTask {
    pub(super) target: watch::Receiver<LinkTarget>,
    /// The last known incarnation when this link dialled.
    pub(super) aimed: u64,
    pub(super) timeouts: Timeouts,
    pub(super) outputs_unread_max: usize,
    pub(super) losses_max: u32,
    pub(super) coordinator_losses_max: u32,
    pub(super) speaks: ProtocolRange,
    pub(super) submitted: mpsc::Receiver<(u64, Box<LinkRequest>)>,
    pub(super) cancelled: mpsc::Receiver<Cancel>,
    pub(super) peers: ReplicaLinks,
    pub(super) views: watch::Receiver<Vec<ReplicaView>>,
    /// Its number among the links.
    pub(super) place: usize,
    pub(super) ledger: Arc<Ledger>,
    /// Present while the stream is open and the replica has reported that it can serve.
    pub(super) replica: Option<Arc<ReplicaInfo>>,
    /// This router's number at the replica, in this attachment or the last one.
    pub(super) former: Option<wire::FormerNumber>,
    pub(super) condition: ReplicaCondition,
    /// How many tokens of a request its ranks have room for, as last reported.
    pub(super) room: u32,
    /// At or before the moment at which some request's absence exceeds the limit.
    pub(super) next_give_up: Option<Instant>,
    pub(super) beats: BeatMonitor,
    pub(super) connection: CoordinatorStream,
    pub(super) reattach: Duration,
    pub(super) outbound: Option<mpsc::Sender<wire::RouterFrame>>,
    pub(super) outbox: VecDeque<wire::RouterFrame>,
    /// Requests by key, and so in order of arrival. A request's id is its key under the router's number at the replica.
    pub(super) table: BTreeMap<u64, LinkRequest>,
    /// Keys of requests that the replica does not have, each with the time to submit it again if the replica gave one.
    /// Another link that can continue one takes it.
    pub(super) parked: BTreeMap<u64, Option<Instant>>,
    /// Why the last dial failed, so that the same reason is not logged again and again.
    pub(super) reason: String,
}

impl LinkTask {
    /// Makes the task of a link, which the caller has to run, and introduces the link to the others.
    pub fn new(
        target: watch::Receiver<LinkTarget>,
        peers: ReplicaLinks,
        place: usize,
        next_key: Arc<AtomicU64>,
        config: &Config,
    ) -> LinkTask {
        let requests_max = config.limits.requests_max;
        let (submits, submitted) = mpsc::channel(requests_max);
        let (cancels, cancelled) = mpsc::channel(requests_max);
        let ledger = peers.ledger();
        let retry_after = config.timeouts.retry_after;
        peers.add_link(place, ReplicaLink { submits, cancels, ledger: ledger.clone(), next_key, retry_after });
        LinkTask {
            target,
            aimed: 0,
            timeouts: config.timeouts.clone(),
            outputs_unread_max: config.limits.outputs_unread_max,
            losses_max: config.limits.losses_max,
            coordinator_losses_max: config.limits.coordinator_losses_max,
            speaks: config.speaks.clone(),
            submitted,
            cancelled,
            views: peers.views(),
            peers,
            place,
            ledger,
            replica: None,
            former: None,
            condition: ReplicaCondition::Serves,
            room: u32::MAX,
            next_give_up: None,
            beats: BeatMonitor::default(),
            connection: CoordinatorStream::Down { until: Instant::now() },
            reattach: config.timeouts.reattach_min,
            outbound: None,
            outbox: VecDeque::new(),
            table: BTreeMap::new(),
            parked: BTreeMap::new(),
            reason: String::new(),
        }
    }

    /// Runs until `end`, and then ends every request that is left.
    pub async fn run(mut self, end: CancellationToken) {
        loop {
            let event = self.next_event(&end).await;
            if matches!(event, LinkEvent::End) {
                break;
            }
            self.handle(event);
            if self.is_forsaken() {
                break;
            }
        }
        self.detach();
        let retry_after = self.timeouts.retry_after;
        let is_end = end.is_cancelled();
        let refusal = if is_end {
            Refusal::Draining { retry_after }
        } else {
            Refusal::NotReady { retry_after, why: String::new() }
        };
        // Requests that were just about to be sent here end too.
        self.submitted.close();
        let submitted = std::iter::from_fn(|| self.submitted.try_recv().ok()).map(|(_, entry)| *entry);
        let left = std::mem::take(&mut self.table).into_values().chain(submitted);
        left.for_each(|entry| entry.end(refusal.clone()));
    }

    /// Handles one event. A panic costs the stream to the replica and the event's own request; all other requests
    /// continue elsewhere or here, as after any loss.
    pub(super) fn handle(&mut self, event: LinkEvent) {
        let of = match &event {
            LinkEvent::Submit(key, _) => Some(*key),
            _ => None,
        };
        if catch_unwind(AssertUnwindSafe(|| self.dispatch(event))).is_ok() {
            return;
        }
        tracing::error!(place = self.place, "a link panicked on an event: attaching again");
        if let Some(key) = of {
            self.end(key, Refusal::failed("the request caused a panic"));
        }
        self.receive_lost(&Status::internal("the link panicked on an event"));
    }

    pub(super) fn dispatch(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Submit(key, entry) => self.submit(key, *entry),
            LinkEvent::Cancel(cancel) => self.cancel(cancel),
            LinkEvent::Dial => self.dial(),
            LinkEvent::Attached(attached) => self.receive_attached(attached),
            LinkEvent::Frame(frame) => self.receive(frame),
            LinkEvent::Lost(status) => self.receive_lost(&status),
            LinkEvent::Seen => {
                self.move_away();
                self.leave_if_better();
            }
            LinkEvent::Target => self.retarget(),
            LinkEvent::Due => self.handle_due(Instant::now()),
            LinkEvent::Sent | LinkEvent::End => {}
        }
    }

    pub(super) fn dial(&mut self) {
        let LinkTarget { channel, incarnation, .. } = self.target.borrow_and_update().clone();
        self.aimed = incarnation;
        let ProtocolRange { version, protocols } = self.speaks.clone();
        let hello = wire::RouterHello { version, protocols, former: self.former };
        self.connection = CoordinatorStream::Dialing(Box::pin(attach(channel, self.timeouts.attach_max, hello)));
    }

    /// Follows the store's address of the replica. An open stream stays, unless another coordinator has claimed the
    /// replica later: a vanished entry is only a suspicion, and the stream is the truth.
    pub(super) fn retarget(&mut self) {
        let incarnation = self.target.borrow_and_update().incarnation;
        let of_connection = self.replica.as_ref().map_or(self.aimed, |replica| replica.incarnation);
        if of_connection < incarnation {
            self.reattach = self.timeouts.reattach_min;
            if !matches!(self.connection, CoordinatorStream::Down { .. }) {
                self.receive_lost(&Status::aborted("another coordinator has claimed the replica"));
            }
            self.connection = CoordinatorStream::Down { until: Instant::now() };
        }
    }

    /// Whether the link is of no more use: the store does not list the replica, no stream is open, and no request
    /// waits.
    pub(super) fn is_forsaken(&self) -> bool {
        let is_down = matches!(self.connection, CoordinatorStream::Down { .. });
        is_down && self.table.is_empty() && !self.target.borrow().is_listed
    }

    pub(super) async fn next_event(&mut self, end: &CancellationToken) -> LinkEvent {
        let due = self.next_due();
        let takes_requests = self.outbox.len() < FRAMES_UNSENT_MAX;
        let looks_elsewhere = match self.reason_to_leave() {
            Some(_) => !self.table.is_empty(),
            None => (!self.accepts_requests() || self.room < u32::MAX) && !self.parked.is_empty(),
        };
        // The branches are tried in a fixed order, so that the same arrivals give the same frames.
        tokio::select! {
            biased;
            () = end.cancelled() => LinkEvent::End,
            Some(cancel) = self.cancelled.recv() => LinkEvent::Cancel(cancel),
            Some(event) = send_first(&self.outbound, &mut self.outbox) => event,
            Some((key, entry)) = self.submitted.recv(), if takes_requests => LinkEvent::Submit(key, entry),
            event = self.connection.next(self.timeouts.replica_silence_max) => event,
            Ok(()) = self.views.changed(), if looks_elsewhere => LinkEvent::Seen,
            Ok(()) = self.target.changed() => LinkEvent::Target,
            () = until(due) => LinkEvent::Due,
        }
    }

    pub(super) fn submit(&mut self, key: u64, entry: LinkRequest) {
        if entry.call.outputs.is_closed() || entry.home.is_over() {
            // Its owner has already left; the cancel may have overtaken the request.
            return;
        }
        self.table.insert(key, entry);
        self.parked.insert(key, None);
        self.begin_absence(key, Instant::now());
        if self.replica.is_some() {
            self.send(key);
        } else {
            self.move_away();
        }
    }

    /// Whether the replica may get the waiting requests.
    pub(super) fn accepts_requests(&self) -> bool {
        self.replica.is_some() && self.condition != ReplicaCondition::Drains
    }

    /// Sends a parked request to the attached replica, or ends it if no replica can continue it.
    pub(super) fn send(&mut self, key: u64) {
        let (Some(replica), Some(entry)) = (self.replica.clone(), self.table.get_mut(&key)) else { return };
        let (now, need) = (Instant::now(), entry.need());
        if entry.call.deadline.is_some_and(|deadline| deadline <= now) {
            self.end(key, Refusal::Deadline);
        } else if need.digest != replica.digest || need.n_tokens > replica.context.into() {
            if !self.move_one(key) && !self.peers.links_besides(self.place).may_come_for(need) {
                self.end(key, Refusal::Lost);
            }
        } else if need.n_known >= self.room.into() {
            if !self.move_one(key) {
                self.end_without_room(key);
            }
        } else if !self.condition.is_stranded() || !self.move_one(key) {
            self.send_to_replica(key, &replica, now);
        }
    }

    /// No replica has room for the request at present. One that has begun waits for room.
    fn end_without_room(&mut self, key: u64) {
        if self.table.get(&key).is_some_and(|entry| !entry.has_begun()) {
            let why = format!(
                "the remaining ranks hold {} tokens of a request; try again when there are more ranks",
                self.room
            );
            self.end(key, Refusal::NotReady { retry_after: self.timeouts.retry_after, why });
        }
    }

    fn send_to_replica(&mut self, key: u64, replica: &ReplicaInfo, now: Instant) {
        let Some(entry) = self.table.get_mut(&key) else { return };
        if entry.n_lost > 0
            && let Err(wait) = self.peers.budget.take(now)
        {
            self.parked.insert(key, Some(now + wait));
            return;
        }
        let frame = entry.frame(replica.id(key), now);
        self.outbox.push_back(up(frame));
        self.parked.remove(&key);
        if self.condition.computes() {
            entry.absence.ends(now);
        }
    }

    /// Sends the replica all waiting requests that have no retry time.
    pub(super) fn send_all(&mut self) {
        let waiting = self.parked.iter().filter(|(_, retry)| retry.is_none()).map(|(key, _)| *key);
        let waiting: Vec<u64> = waiting.collect();
        waiting.into_iter().for_each(|key| self.send(key));
    }

    pub(super) fn cancel(&mut self, cancel: Cancel) {
        let parked = self.parked.contains_key(&cancel.key);
        if self.remove(cancel.key).is_some() && !parked {
            self.send_cancel(cancel);
        }
    }

    pub(super) fn send_cancel(&mut self, Cancel { key, stopped }: Cancel) {
        let Some(replica) = &self.replica else { return };
        let id = replica.id(key).0;
        let is_its_submit = |frame: &wire::RouterFrame| match &frame.frame {
            Some(wire::router_frame::Frame::Submit(request)) => request.id == id,
            Some(wire::router_frame::Frame::Adopt(adopt)) => adopt.request.as_ref().is_some_and(|of| of.id == id),
            _ => false,
        };
        match self.outbox.iter().position(is_its_submit) {
            // The request was not sent yet: neither frame is needed.
            Some(unsent) => drop(self.outbox.remove(unsent)),
            None => self.outbox.push_back(up(wire::router_frame::Frame::Cancel(wire::Cancel { id, stopped }))),
        }
    }

    pub(super) fn receive_attached(&mut self, attached: AttachedStream) {
        self.outbound = Some(attached.outbound);
        self.connection = CoordinatorStream::Up { inbound: attached.inbound, last_frame: Instant::now() };
    }

    /// Detaches the replica. Returns true if it was attached.
    pub(super) fn detach(&mut self) -> bool {
        self.peers.update_view(self.place, |view| (view.replica, view.state, view.is_suspected) = (None, None, false));
        self.peers.reset_reports(self.place);
        self.beats = BeatMonitor::default();
        self.ledger.reset_measurements();
        (self.condition, self.room) = (ReplicaCondition::Serves, u32::MAX);
        self.replica.take().is_some()
    }

    pub(super) fn receive_lost(&mut self, status: &Status) {
        let was_attached = self.detach();
        if was_attached {
            self.ledger.record_break();
        }
        if was_attached || self.reason != status.message() {
            self.reason = status.message().to_owned();
            tracing::warn!(code = ?status.code(), reason = self.reason, requests = self.table.len(), "no coordinator");
        }
        self.outbound = None;
        self.outbox.clear();
        let keys: Vec<u64> = self.table.keys().copied().collect();
        keys.into_iter().for_each(|key| self.park(key, was_attached));
        self.move_away();
        self.connection = CoordinatorStream::Down { until: Instant::now() + self.reattach };
        self.reattach = (self.reattach * 2).min(self.timeouts.reattach_max);
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        let recovered = self.condition.due(self.timeouts.recovery_max);
        let retries = self.parked.values().copied();
        retries.chain([recovered, self.beats.due(), self.next_give_up]).flatten().min()
    }

    pub(super) fn handle_due(&mut self, now: Instant) {
        if self.condition.due(self.timeouts.recovery_max).is_some_and(|due| due <= now) {
            self.condition = self.condition.clone().at_time(now, self.timeouts.recovery_max);
            self.leave_if_better();
        }
        if self.beats.pass(now) {
            self.suspect();
        }
        self.give_up(now);
        let parked: Vec<_> = self.parked.iter().map(|(key, retry)| (*key, *retry)).collect();
        for (key, retry) in parked {
            if retry.is_some_and(|retry| retry <= now) && !self.move_one(key) {
                let is_put_off = self.parked.get(&key).is_some_and(|retry| retry.is_some_and(|retry| retry > now));
                if !is_put_off {
                    self.parked.insert(key, None);
                }
                if self.accepts_requests() {
                    self.send(key);
                }
            }
        }
    }

    pub(super) fn finish(&mut self, key: u64, output: wire::Output, finish: Finish) {
        if let Some(entry) = self.remove(key) {
            entry.finish(output, finish);
        }
    }

    pub(super) fn end(&mut self, key: u64, refusal: Refusal) {
        if let Some(entry) = self.remove(key) {
            entry.end(refusal);
        }
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<LinkRequest> {
        self.parked.remove(&key);
        self.table.remove(&key)
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
