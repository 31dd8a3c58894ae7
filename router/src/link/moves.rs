//! Which requests are sent to the replica, which leave it, and which end. `table.rs` gives one to another link. Knows
//! no stream, and no tokens' values.

use crate::link::request::LinkRequest;
use crate::link::task::LinkTask;
use crate::link::ticket::Cancel;
use crate::refusal::Refusal;
use tokio::time::Instant;

impl LinkTask {
    pub(super) fn submit(&mut self, key: u64, entry: LinkRequest) {
        if entry.call.outputs.is_closed() || entry.home.is_over() {
            // Its owner has already left; the cancel may have overtaken the request.
            return;
        }
        self.requests.add(key, entry, Instant::now());
        if self.replica.is_attached() {
            self.send(key);
        } else {
            self.move_parked();
        }
    }

    /// Sends the replica all waiting requests that have no retry time.
    pub(super) fn send_waiting(&mut self) {
        self.requests.waiting().into_iter().for_each(|key| self.send(key));
    }

    /// Sends a parked request to the attached replica, or ends it if no replica can continue it.
    fn send(&mut self, key: u64) {
        let Some(entry) = self.requests.get(key).filter(|_| self.replica.is_attached()) else { return };
        let (now, need, has_begun) = (Instant::now(), entry.need(), entry.has_begun());
        if entry.call.deadline.is_some_and(|deadline| deadline <= now) {
            self.requests.end(key, Refusal::Deadline);
        } else if !self.replica.can_continue(need) {
            if !self.move_one(key) && !self.place.others().may_come_for(need) {
                self.requests.end(key, Refusal::Lost);
            }
        } else if !self.replica.has_room_for(need) {
            // A request that has begun waits for room.
            if !self.move_one(key) && !has_begun {
                let why = format!("{}; try again when there are more ranks", self.replica.room_limit());
                self.requests.end(key, Refusal::NotReady { retry_after: self.retry_after, why });
            }
        } else if !self.replica.is_stranded() || !self.move_one(key) {
            self.send_to_replica(key, now);
        }
    }

    fn send_to_replica(&mut self, key: u64, now: Instant) {
        let is_retry = self.requests.get(key).is_some_and(|entry| entry.n_lost > 0);
        if is_retry && let Err(wait) = self.place.take_retry(now) {
            self.requests.retry_at(key, now + wait);
            return;
        }
        let Some(id) = self.replica.id(key) else { return };
        let frame = self.requests.unpark(key, id, self.replica.computes(), now);
        frame.into_iter().for_each(|frame| self.outbox.push(frame));
    }

    pub(super) fn cancel(&mut self, cancel: Cancel) {
        let parked = self.requests.is_parked(cancel.key);
        if self.requests.remove(cancel.key).is_some() && !parked {
            self.send_cancel(cancel);
        }
    }

    pub(super) fn send_cancel(&mut self, Cancel { key, stopped }: Cancel) {
        if let Some(id) = self.replica.id(key) {
            self.outbox.cancel(id, stopped);
        }
    }

    /// Moves requests that wait here to links that can continue them at once.
    pub(super) fn move_parked(&mut self) {
        self.requests.move_parked(&mut self.place.others());
    }

    /// Moves one request. Returns true if another link has it now.
    pub(super) fn move_one(&mut self, key: u64) -> bool {
        self.requests.move_to(key, &mut self.place.others())
    }

    /// Moves the replica's requests to other replicas that can continue them at once, if there is a reason.
    pub(super) fn leave_if_better(&mut self) {
        let Some(why) = self.replica.reason_to_leave() else { return };
        let movable = self.requests.movable(&self.place.others());
        if !movable.is_empty() {
            tracing::warn!(requests = movable.len(), "{why}");
        }
        for key in movable {
            if self.move_one(key) {
                self.send_cancel(Cancel { key, stopped: false });
            }
        }
    }

    /// Handles a request that the replica has ended and that still has a client.
    pub(super) fn move_or_retry(&mut self, key: u64) {
        let now = Instant::now();
        self.requests.park(key, false, now);
        if !self.move_one(key) && self.requests.is_parked(key) {
            self.requests.retry_at(key, now + self.retry_after);
        }
    }

    /// Tries the parked requests again whose time has come.
    pub(super) fn retry(&mut self, now: Instant) {
        for key in self.requests.due_retries(now) {
            if self.move_one(key) {
                continue;
            }
            self.requests.forget_past_retry(key, now);
            if self.replica.accepts_requests() {
                self.send(key);
            }
        }
    }

    /// Ends requests that no replica has computed for as long as they may wait, wherever they wait.
    pub(super) fn give_up(&mut self, now: Instant) {
        for key in self.requests.overdue(now) {
            let Some(entry) = self.requests.get(key) else { continue };
            let why = match self.replica.is_attached() {
                true => self.replica.absence_reason(entry.need()),
                false => format!("its coordinator is lost ({})", self.connection.reason()),
            };
            let (replica, waited) = (self.place.name(), entry.absence.so_far(now));
            if !self.requests.is_parked(key) {
                self.send_cancel(Cancel { key, stopped: false });
            }
            self.requests.end(key, Refusal::Away { replica, why, waited, retry_after: self.retry_after });
        }
    }
}
