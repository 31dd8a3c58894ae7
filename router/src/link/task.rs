//! Owns the stream and the table: one loop, one closed set of events. What a replica's frames mean is in `hear.rs`, who
//! else goes on with a request in `moves.rs`.

use crate::beats::Beats;
use crate::config::Waits;
use crate::ledger::Ledger;
use crate::link::entry::Entry;
use crate::link::line::{Line, Up, attach, send_first, up};
use crate::link::{Progress, Replica, View};
use crate::peers::Peers;
use crate::refusal::Refusal;
use crate::target::Target;
use crate::ticket::Cancel;
use proto::cluster as wire;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use wire::replica_frame::Frame;

/// Frames that the transport has not taken yet; while there are so many, no request is taken from the router's side.
const FRAMES_UNSENT_MAX: usize = 256;

pub(super) enum Event {
    Submit(u64, Box<Entry>),
    Cancel(Cancel),
    Dial,
    Attached(Up),
    Frame(Frame),
    Lost(Status),
    Sent,
    /// The replicas, as this link sees them, have changed.
    Seen,
    /// The store says otherwise where the replica is, or whether it is there.
    Target,
    Due,
    End,
}

/// Owns the stream and the table. One loop, one closed set of events.
pub struct Task {
    pub(super) target: watch::Receiver<Target>,
    /// The incarnation that was the last known one when it dialled.
    pub(super) aimed: u64,
    pub(super) waits: Waits,
    pub(super) outputs_unread_max: usize,
    pub(super) losses_max: u32,
    pub(super) submitted: mpsc::Receiver<(u64, Box<Entry>)>,
    pub(super) cancelled: mpsc::Receiver<Cancel>,
    pub(super) peers: Peers,
    pub(super) views: watch::Receiver<Vec<View>>,
    /// Among the links.
    pub(super) place: usize,
    pub(super) ledger: Arc<Ledger>,
    /// Present while the stream stands and the replica has said that it can serve.
    pub(super) replica: Option<Arc<Replica>>,
    /// This router's number at the replica, now or before.
    pub(super) former: Option<wire::FormerNumber>,
    /// It finishes what it has, and takes nothing more.
    pub(super) draining: bool,
    /// Since when it has been without its ranks.
    pub(super) recovering_since: Option<Instant>,
    pub(super) beats: Beats,
    pub(super) line: Line,
    pub(super) reattach: Duration,
    pub(super) outbound: Option<mpsc::Sender<wire::RouterFrame>>,
    pub(super) outbox: VecDeque<wire::RouterFrame>,
    /// By key, so in order of arrival. A request's id is its key under the router's number at the replica.
    pub(super) table: BTreeMap<u64, Entry>,
    /// Keys of the table that the replica does not have, and when to submit them again where it asked for patience. Who
    /// else can go on with one takes it.
    pub(super) parked: BTreeMap<u64, Option<Instant>>,
    /// Of the last failure to reach a coordinator: the same one is not logged again and again.
    pub(super) reason: String,
}

impl Task {
    /// Runs until `end`, and then ends every request that is left.
    pub async fn run(mut self, end: CancellationToken) {
        loop {
            let event = self.next_event(&end).await;
            if matches!(event, Event::End) {
                break;
            }
            self.handle(event);
            if self.is_forsaken() {
                break;
            }
        }
        self.leave();
        let retry_after = self.waits.retry_after;
        let is_end = end.is_cancelled();
        let refusal = if is_end { Refusal::Draining { retry_after } } else { Refusal::NotReady { retry_after } };
        // Who was just about to be sent here hears of it too.
        self.submitted.close();
        let submitted = std::iter::from_fn(|| self.submitted.try_recv().ok()).map(|(_, entry)| *entry);
        let left = std::mem::take(&mut self.table).into_values().chain(submitted);
        left.for_each(|entry| entry.end(refusal.clone()));
    }

    /// What panics costs the stream to the replica, and the request that it is about: all others go on elsewhere or
    /// here, as after any loss.
    pub(super) fn handle(&mut self, event: Event) {
        let of = match &event {
            Event::Submit(key, _) => Some(*key),
            _ => None,
        };
        if catch_unwind(AssertUnwindSafe(|| self.heed(event))).is_ok() {
            return;
        }
        tracing::error!(place = self.place, "a link broke on what it heard: it attaches again");
        if let Some(key) = of {
            self.end(key, Refusal::failed("this router broke on it"));
        }
        self.lost(&Status::internal("this link broke on what it heard"));
    }

    fn heed(&mut self, event: Event) {
        match event {
            Event::Submit(key, entry) => self.submit(key, *entry),
            Event::Cancel(cancel) => self.cancel(cancel),
            Event::Dial => self.dial(),
            Event::Attached(up) => self.attached(up),
            Event::Frame(frame) => self.hear(frame),
            Event::Lost(status) => self.lost(&status),
            Event::Seen => {
                self.move_away();
                if self.beats.is_suspected() {
                    self.leave_to_others("a replica is silent: its requests move");
                }
            }
            Event::Target => self.retarget(),
            Event::Due => self.due(Instant::now()),
            Event::Sent | Event::End => {}
        }
    }

    pub(super) fn dial(&mut self) {
        let Target { channel, incarnation, .. } = self.target.borrow_and_update().clone();
        self.aimed = incarnation;
        self.line = Line::Dialing(Box::pin(attach(channel, self.waits.attach_max, self.former)));
    }

    /// An open stream stays unless somebody else has claimed the replica later: that the store has lost sight of it is
    /// a suspicion, and the stream is the truth.
    pub(super) fn retarget(&mut self) {
        let incarnation = self.target.borrow_and_update().incarnation;
        let of_line = self.replica.as_ref().map_or(self.aimed, |replica| replica.incarnation);
        if of_line < incarnation {
            self.reattach = self.waits.reattach_min;
            if !matches!(self.line, Line::Down { .. }) {
                self.lost(&Status::aborted("another coordinator has claimed the replica"));
            }
            self.line = Line::Down { until: Instant::now() };
        }
    }

    /// The store does not have it, nobody answers, and nobody waits for it.
    pub(super) fn is_forsaken(&self) -> bool {
        let is_down = matches!(self.line, Line::Down { .. });
        is_down && self.table.is_empty() && !self.target.borrow().is_listed
    }

    pub(super) async fn next_event(&mut self, end: &CancellationToken) -> Event {
        let due = self.next_due();
        let takes_requests = self.outbox.len() < FRAMES_UNSENT_MAX;
        let looks_elsewhere = match self.beats.is_suspected() {
            true => !self.table.is_empty(),
            false => !self.serves() && !self.parked.is_empty(),
        };
        // In a fixed order, so that the same arrivals give the same frames.
        tokio::select! {
            biased;
            () = end.cancelled() => Event::End,
            Some(cancel) = self.cancelled.recv() => Event::Cancel(cancel),
            Some(event) = send_first(&self.outbound, &mut self.outbox) => event,
            Some((key, entry)) = self.submitted.recv(), if takes_requests => Event::Submit(key, entry),
            event = self.line.next(self.waits.replica_silence_max) => event,
            Ok(()) = self.views.changed(), if looks_elsewhere => Event::Seen,
            Ok(()) = self.target.changed() => Event::Target,
            () = until(due) => Event::Due,
        }
    }

    pub(super) fn submit(&mut self, key: u64, entry: Entry) {
        if entry.ear.is_closed() || entry.home.is_over() {
            // Its owner has left already, and the cancel may have overtaken it.
            return;
        }
        self.table.insert(key, entry);
        self.parked.insert(key, None);
        if self.replica.is_some() {
            self.send(key);
        } else {
            self.move_away();
        }
    }

    /// What waits here may be given to the replica.
    pub(super) fn serves(&self) -> bool {
        self.replica.is_some() && !self.draining
    }

    /// Gives a parked request to the replica that is there, or ends it where nobody can go on with it.
    pub(super) fn send(&mut self, key: u64) {
        let (Some(replica), Some(entry)) = (self.replica.clone(), self.table.get_mut(&key)) else { return };
        let (now, need) = (Instant::now(), entry.need());
        if entry.deadline.is_some_and(|deadline| deadline <= now) {
            self.end(key, Refusal::Deadline);
        } else if need.digest == replica.digest && need.n_tokens <= replica.context.into() {
            if entry.n_lost > 0
                && let Err(wait) = self.peers.budget.take(now)
            {
                self.parked.insert(key, Some(now + wait));
                return;
            }
            self.outbox.push_back(entry.frame(replica.id(key), now));
            self.parked.remove(&key);
        } else if !self.move_one(key) && !self.peers.besides(self.place).may_come_for(need) {
            self.end(key, Refusal::Lost);
        }
    }

    /// To the replica that is there, all that wait for it and were not asked for patience.
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
            // It has not left yet: neither frame is needed.
            Some(unsent) => drop(self.outbox.remove(unsent)),
            None => self.outbox.push_back(up(wire::router_frame::Frame::Cancel(wire::Cancel { id, stopped }))),
        }
    }

    pub(super) fn attached(&mut self, up: Up) {
        self.outbound = Some(up.outbound);
        self.line = Line::Up { inbound: up.inbound, heard: Instant::now() };
    }

    /// The replica is not there any more; whether it was.
    pub(super) fn leave(&mut self) -> bool {
        self.peers.show(self.place, |view| (view.replica, view.state, view.is_suspected) = (None, None, false));
        self.peers.hear_anew(self.place);
        self.beats = Beats::default();
        self.ledger.gone();
        (self.draining, self.recovering_since) = (false, None);
        self.replica.take().is_some()
    }

    pub(super) fn lost(&mut self, status: &Status) {
        let was_attached = self.leave();
        if was_attached {
            self.ledger.broke();
        }
        if was_attached || self.reason != status.message() {
            self.reason = status.message().to_owned();
            tracing::warn!(code = ?status.code(), reason = self.reason, requests = self.table.len(), "no coordinator");
        }
        self.outbound = None;
        self.outbox.clear();
        let keys: Vec<u64> = self.table.keys().copied().collect();
        keys.into_iter().for_each(|key| self.park(key));
        self.move_away();
        self.line = Line::Down { until: Instant::now() + self.reattach };
        self.reattach = (self.reattach * 2).min(self.waits.reattach_max);
    }

    pub(super) fn give_up(&self, key: &u64) -> Option<Instant> {
        self.table.get(key).map(|entry| entry.since + self.waits.replica_absence_max)
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        let parked = self.parked.iter().flat_map(|(key, retry)| [*retry, self.give_up(key)]);
        let recovered = self.recovering_since.map(|since| since + self.waits.recovery_max);
        parked.chain([recovered, self.beats.due()]).flatten().min()
    }

    pub(super) fn due(&mut self, now: Instant) {
        if self.recovering_since.is_some_and(|since| since + self.waits.recovery_max <= now) {
            self.recovering_since = None;
            self.leave_to_others("a replica recovers for too long: its requests move");
        }
        if self.beats.pass(now) {
            self.suspect();
        }
        let parked: Vec<_> = self.parked.iter().map(|(key, retry)| (*key, *retry)).collect();
        for (key, retry) in parked {
            if self.give_up(&key).is_some_and(|give_up| give_up <= now) {
                self.end(key, Refusal::Lost);
            } else if retry.is_some_and(|retry| retry <= now) && !self.move_one(key) {
                let is_put_off = self.parked.get(&key).is_some_and(|retry| retry.is_some_and(|retry| retry > now));
                if !is_put_off {
                    self.parked.insert(key, None);
                }
                if self.serves() {
                    self.send(key);
                }
            }
        }
    }

    pub(super) fn finish(&mut self, key: u64, progress: Progress) {
        if let Some(entry) = self.remove(key) {
            entry.finish(progress);
        }
    }

    pub(super) fn end(&mut self, key: u64, refusal: Refusal) {
        if let Some(entry) = self.remove(key) {
            entry.end(refusal);
        }
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<Entry> {
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
