//! How and why a request moves from one link to another. Knows what other links can take, and no frames.

use crate::link::peers::Neighbours;
use crate::link::task::LinkTask;
use crate::link::ticket::Cancel;
use crate::refusal::Refusal;
use proto::cluster::passage::Kind;
use tokio::time::Instant;

impl LinkTask {
    /// Moves requests that wait here to links that can continue them at once.
    pub(super) fn move_away(&mut self) {
        let waiting: Vec<u64> = self.parked.keys().copied().collect();
        let mut others = self.peers.links_besides(self.place);
        for key in waiting {
            self.move_to(key, &mut others);
        }
    }

    pub(super) fn move_one(&mut self, key: u64) -> bool {
        let mut others = self.peers.links_besides(self.place);
        self.move_to(key, &mut others)
    }

    /// Moves one request. Returns true if another link has it now.
    pub(super) fn move_to(&mut self, key: u64, others: &mut Neighbours) -> bool {
        let Some(entry) = self.table.get(&key) else { return false };
        let Some(link) = others.ready_for(entry.need(), entry.request.n_tokens() as u64) else { return false };
        if let Err(wait) = self.peers.budget.take(Instant::now()) {
            if let Some(retry) = self.parked.get_mut(&key) {
                // The later of both times counts: the replica set one of them, and a time that has passed would never
                // fire.
                let again = Instant::now() + wait;
                *retry = Some(retry.map_or(again, |retry| retry.max(again)));
            }
            return false;
        }
        let Some(entry) = self.table.remove(&key) else { return false };
        match link.adopt(key, Box::new(entry)) {
            Ok(()) => {
                self.parked.remove(&key);
                true
            }
            Err(entry) => {
                self.table.insert(key, *entry);
                false
            }
        }
    }

    /// Returns why the requests had better leave this replica, if others can continue them at once, or None if they had
    /// better stay.
    pub(super) fn reason_to_leave(&self) -> Option<&'static str> {
        if self.beats.is_suspected() {
            return Some("a replica is silent: moving its requests");
        }
        self.condition.is_stranded().then_some("a replica has lost ranks: moving its requests")
    }

    pub(super) fn leave_if_better(&mut self) {
        if let Some(why) = self.reason_to_leave() {
            self.leave_to_others(why);
        }
    }

    /// Moves the replica's requests to other replicas that can continue them at once.
    pub(super) fn leave_to_others(&mut self, why: &'static str) {
        let others = self.peers.links_besides(self.place);
        let at_the_replica = self.table.iter().filter(|(key, _)| !self.parked.contains_key(key));
        let movable = at_the_replica.filter(|(_, entry)| others.is_any_ready_for(entry.need()));
        let movable: Vec<u64> = movable.map(|(key, _)| *key).collect();
        if !movable.is_empty() {
            tracing::warn!(requests = movable.len(), "{why}");
        }
        for key in movable {
            if self.move_one(key) {
                self.send_cancel(Cancel { key, stopped: false });
            }
        }
    }

    /// Records that the replica no longer has the request. `is_gone`: its coordinator is lost too.
    pub(super) fn park(&mut self, key: u64, is_gone: bool) {
        let now = Instant::now();
        let Some(entry) = self.table.get_mut(&key) else { return };
        if self.parked.insert(key, None).is_none() {
            (entry.since, entry.n_lost) = (now, entry.n_lost + 1);
            entry.n_coordinators_lost += u32::from(is_gone);
            entry.record_event(Kind::Lost, now);
        }
        let times = entry.n_lost;
        let is_suspect = times > self.losses_max || entry.n_coordinators_lost > self.coordinator_losses_max;
        self.begin_absence(key, now);
        if is_suspect {
            self.end(key, Refusal::LostTooOften { times });
        }
    }

    /// Handles a request that the replica has ended and that still has a client.
    pub(super) fn move_or_retry(&mut self, key: u64) {
        self.park(key, false);
        if self.move_one(key) {
            return;
        }
        if let Some(retry) = self.parked.get_mut(&key) {
            *retry = Some(Instant::now() + self.timeouts.retry_after);
        }
    }
}
