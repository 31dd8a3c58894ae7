//! The loop of a link: it waits for events, keeps the stream to the coordinator, and suspects a coordinator that is
//! silent. What a replica's frames mean is in `receive.rs`; which requests are sent and which leave is in `moves.rs`.

use crate::config::Config;
use crate::link::connection::CoordinatorConnection;
use crate::link::event::{AttachedStream, LinkEvent};
use crate::link::handle::ReplicaLink;
use crate::link::outbox::Outbox;
use crate::link::peers::ReplicaLinks;
use crate::link::place::LinkPlace;
use crate::link::replica::AttachedReplica;
use crate::link::request::LinkRequest;
use crate::link::table::RequestTable;
use crate::link::target::{AimedTarget, LinkTarget};
use crate::link::ticket::Cancel;
use crate::refusal::Refusal;
use proto::cluster::replica_frame::Frame;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use telemetry::metrics;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// The task that owns the stream and the table.
pub struct LinkTask {
    pub(super) submitted: mpsc::Receiver<(u64, Box<LinkRequest>)>,
    pub(super) cancelled: mpsc::Receiver<Cancel>,
    pub(super) target: AimedTarget,
    pub(super) connection: CoordinatorConnection,
    pub(super) outbox: Outbox,
    pub(super) replica: AttachedReplica,
    pub(super) requests: RequestTable,
    pub(super) place: LinkPlace,
    pub(super) outputs_unread_max: usize,
    pub(super) retry_after: Duration,
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
            submitted,
            cancelled,
            target: AimedTarget::new(target),
            connection: CoordinatorConnection::new(config),
            outbox: Outbox::default(),
            replica: AttachedReplica::new(&config.timeouts),
            requests: RequestTable::new(config),
            place: LinkPlace::new(place, peers, ledger),
            outputs_unread_max: config.limits.outputs_unread_max,
            retry_after,
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
        let retry_after = self.retry_after;
        let is_end = end.is_cancelled();
        let refusal = if is_end {
            Refusal::Draining { retry_after }
        } else {
            Refusal::NotReady { retry_after, why: String::new() }
        };
        // Requests that were just about to be sent here end too.
        self.submitted.close();
        let submitted = std::iter::from_fn(|| self.submitted.try_recv().ok()).map(|(_, entry)| *entry);
        let left = self.requests.into_requests().chain(submitted);
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
        tracing::error!(place = self.place.number(), "a link panicked on an event: attaching again");
        if let Some(key) = of {
            self.requests.end(key, Refusal::failed("the request caused a panic"));
        }
        self.receive_lost(&Status::internal("the link panicked on an event"));
    }

    pub(super) fn dispatch(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Submit(key, entry) => self.submit(key, *entry),
            LinkEvent::Cancel(cancel) => self.cancel(cancel),
            LinkEvent::Dial => self.connection.dial(self.target.aim()),
            LinkEvent::Attached(attached) => self.receive_attached(attached),
            LinkEvent::Frame(frame) => self.receive(frame),
            LinkEvent::Lost(status) => self.receive_lost(&status),
            LinkEvent::Seen => {
                self.move_parked();
                self.leave_if_better();
            }
            LinkEvent::Target => self.retarget(),
            LinkEvent::Due => self.handle_due(Instant::now()),
            LinkEvent::Sent | LinkEvent::End => {}
        }
    }

    async fn next_event(&mut self, end: &CancellationToken) -> LinkEvent {
        let due = self.next_due();
        let takes_requests = self.outbox.has_room();
        let looks_elsewhere = match self.replica.reason_to_leave() {
            Some(_) => !self.requests.is_empty(),
            None => !self.replica.accepts_all_lengths() && self.requests.n_parked() > 0,
        };
        // The branches are tried in a fixed order, so that the same arrivals give the same frames.
        tokio::select! {
            biased;
            () = end.cancelled() => LinkEvent::End,
            Some(cancel) = self.cancelled.recv() => LinkEvent::Cancel(cancel),
            Some(event) = self.outbox.send_first() => event,
            Some((key, entry)) = self.submitted.recv(), if takes_requests => LinkEvent::Submit(key, entry),
            event = self.connection.next() => event,
            Ok(()) = self.place.views_changed(), if looks_elsewhere => LinkEvent::Seen,
            Ok(()) = self.target.changed() => LinkEvent::Target,
            () = until(due) => LinkEvent::Due,
        }
    }

    /// Follows the store's address of the replica. An open stream stays, unless another coordinator has claimed the
    /// replica later: a vanished entry is only a suspicion, and the stream is the truth.
    pub(super) fn retarget(&mut self) {
        if self.target.is_claimed_after(self.replica.incarnation()) {
            self.connection.reset_pause();
            if !self.connection.is_down() {
                self.receive_lost(&Status::aborted("another coordinator has claimed the replica"));
            }
            self.connection.end_pause(Instant::now());
        }
    }

    /// Whether the link is of no more use: the store does not list the replica, no stream is open, and no request
    /// waits.
    pub(super) fn is_forsaken(&self) -> bool {
        self.connection.is_down() && self.requests.is_empty() && !self.target.is_listed()
    }

    fn receive_attached(&mut self, attached: AttachedStream) {
        self.outbox.open(attached.outbound);
        self.connection.open(attached.inbound, Instant::now());
    }

    pub(super) fn receive(&mut self, frame: Frame) {
        if let Err(status) = self.receive_frame(frame, Instant::now()) {
            self.receive_lost(&status);
        }
    }

    pub(super) fn receive_lost(&mut self, status: &Status) {
        let was_attached = self.detach();
        if was_attached {
            self.place.ledger().record_break();
        }
        if self.connection.record_reason(status.message()) || was_attached {
            let (reason, requests) = (self.connection.reason(), self.requests.len());
            tracing::warn!(code = ?status.code(), reason, requests, "no coordinator");
        }
        self.outbox.close();
        self.requests.park_all(was_attached, Instant::now());
        self.move_parked();
        self.connection.close(Instant::now());
    }

    /// Detaches the replica. Returns true if it was attached.
    fn detach(&mut self) -> bool {
        self.place.reset();
        self.replica.detach()
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        [self.requests.due(), self.replica.due()].into_iter().flatten().min()
    }

    pub(super) fn handle_due(&mut self, now: Instant) {
        if self.replica.end_recovery(now) {
            self.leave_if_better();
        }
        if self.replica.record_missed_beat(now) {
            self.suspect();
        }
        self.give_up(now);
        self.retry(now);
    }

    /// Suspects a silent replica: it may be dead, stopped or cut off. Its requests move to other replicas that can
    /// continue them at once; the others wait, because it may still come back.
    fn suspect(&mut self) {
        tracing::warn!(requests = self.requests.len(), "a replica is silent: suspecting it");
        self.place.ledger().record_break();
        metrics::replica_suspected(self.replica.name());
        self.place.update_view(|view| view.is_suspected = true);
        self.leave_if_better();
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
