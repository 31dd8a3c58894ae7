//! How a request goes from one link to another, and why. Knows the neighbours by what they can take, no frames.

use crate::link::task::Task;
use crate::peers::Others;
use crate::refusal::Refusal;
use crate::ticket::Cancel;
use tokio::time::Instant;

impl Task {
    /// Gives what waits here to those who can go on with it at once.
    pub(super) fn move_away(&mut self) {
        let waiting: Vec<u64> = self.parked.keys().copied().collect();
        let mut others = self.peers.besides(self.place);
        for key in waiting {
            self.move_to(key, &mut others);
        }
    }

    pub(super) fn move_one(&mut self, key: u64) -> bool {
        let mut others = self.peers.besides(self.place);
        self.move_to(key, &mut others)
    }

    /// True: it is another link's now.
    pub(super) fn move_to(&mut self, key: u64, others: &mut Others) -> bool {
        let Some(entry) = self.table.get(&key) else { return false };
        let Some(link) = others.ready_for(entry.need(), entry.request.n_tokens() as u64) else { return false };
        if let Err(wait) = self.peers.budget.take(Instant::now()) {
            if let Some(retry) = self.parked.get_mut(&key) {
                // A time that has passed would be no timer; a later one is what the replica asked for.
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

    /// What the replica has goes to others, where there are any that can go on with it at once.
    pub(super) fn leave_to_others(&mut self, why: &'static str) {
        let others = self.peers.besides(self.place);
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

    /// The replica does not have it any more.
    pub(super) fn park(&mut self, key: u64) {
        let (now, losses_max) = (Instant::now(), self.losses_max);
        let Some(entry) = self.table.get_mut(&key) else { return };
        if self.parked.insert(key, None).is_none() {
            (entry.since, entry.n_lost) = (now, entry.n_lost + 1);
        }
        let times = entry.n_lost;
        if times > losses_max {
            self.end(key, Refusal::LostTooOften { times });
        }
    }

    /// The replica has ended a request that somebody still wants.
    pub(super) fn put_out(&mut self, key: u64) {
        self.park(key);
        if self.move_one(key) {
            return;
        }
        if let Some(retry) = self.parked.get_mut(&key) {
            *retry = Some(Instant::now() + self.waits.retry_after);
        }
    }
}
