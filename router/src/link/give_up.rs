//! Which requests have a replica that computes them, and which have waited too long for one: these end with a refusal
//! that contains the reason. Knows no frames.

use crate::link::condition::ReplicaCondition;
use crate::link::request::LinkRequest;
use crate::link::task::LinkTask;
use crate::link::ticket::Cancel;
use crate::refusal::Refusal;
use tokio::time::Instant;

impl LinkTask {
    /// Sets the replica's condition. Requests at a replica that does not compute count as absent until it does.
    pub(super) fn set_condition(&mut self, condition: ReplicaCondition, now: Instant) {
        let computed = std::mem::replace(&mut self.condition, condition).computes();
        match (computed, self.condition.computes()) {
            (true, false) => {
                let all: Vec<u64> = self.table.keys().copied().collect();
                all.into_iter().for_each(|key| self.begin_absence(key, now));
            }
            (false, true) => {
                let parked = &self.parked;
                let there = self.table.iter_mut().filter(|(key, _)| !parked.contains_key(key));
                there.for_each(|(_, entry)| entry.absence.ends(now));
            }
            (true, true) | (false, false) => {}
        }
    }

    /// Marks that no replica computes the request from now on.
    pub(super) fn begin_absence(&mut self, key: u64, now: Instant) {
        let Some(entry) = self.table.get_mut(&key) else { return };
        entry.absence.begins(now);
        let over = entry.absence.lasts_until(self.timeouts.replica_absence_max);
        self.next_give_up = [self.next_give_up, over].into_iter().flatten().min();
    }

    /// Ends requests that no replica has computed for as long as they may wait, wherever they wait.
    pub(super) fn give_up(&mut self, now: Instant) {
        if self.next_give_up.is_none_or(|next| next > now) {
            return;
        }
        let max = self.timeouts.replica_absence_max;
        let until = |entry: &LinkRequest| entry.absence.lasts_until(max);
        let over = self.table.iter().filter(|(_, entry)| until(entry).is_some_and(|until| until <= now));
        let over: Vec<u64> = over.map(|(key, _)| *key).collect();
        for key in over {
            self.end_absent(key, now);
        }
        self.next_give_up = self.table.values().filter_map(until).min();
    }

    fn end_absent(&mut self, key: u64, now: Instant) {
        let Some(entry) = self.table.get(&key) else { return };
        let refusal = Refusal::Away {
            replica: self.peers.name(self.place),
            why: self.absence_reason(entry),
            waited: entry.absence.so_far(now),
            retry_after: self.timeouts.retry_after,
        };
        if !self.parked.contains_key(&key) {
            self.send_cancel(Cancel { key, stopped: false });
        }
        self.end(key, refusal);
    }

    /// Returns why the replica does not continue the request.
    fn absence_reason(&self, entry: &LinkRequest) -> String {
        match self.condition.why() {
            _ if self.replica.is_none() => format!("its coordinator is lost ({})", self.reason),
            Some(why) => why.to_owned(),
            None if entry.need().n_known >= self.room.into() => {
                format!("the remaining ranks hold {} tokens of a request", self.room)
            }
            None => "it is full".to_owned(),
        }
    }
}
