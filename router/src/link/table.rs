//! The requests of a link: those that the replica has, and those that wait. The table gives a request to another link,
//! and ends one that has waited too long. Knows no stream and no replica.

use crate::config::Config;
use crate::link::peers::Neighbours;
use crate::link::request::LinkRequest;
use crate::refusal::Refusal;
use proto::cluster as wire;
use proto::cluster::router_frame::Frame;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;
use types::{Finish, RequestId};

pub(super) struct RequestTable {
    /// Requests by key, and so in order of arrival. A request's id is its key under the router's number at the replica.
    requests: BTreeMap<u64, LinkRequest>,
    /// Keys of requests that the replica does not have, each with the time to submit it again if the replica gave one.
    /// Another link that can continue one takes it.
    parked: BTreeMap<u64, Option<Instant>>,
    /// At or before the moment at which some request's absence exceeds the limit.
    next_give_up: Option<Instant>,
    absence_max: Duration,
    losses_max: u32,
    coordinator_losses_max: u32,
}

impl RequestTable {
    pub fn new(config: &Config) -> RequestTable {
        RequestTable {
            requests: BTreeMap::new(),
            parked: BTreeMap::new(),
            next_give_up: None,
            absence_max: config.timeouts.replica_absence_max,
            losses_max: config.limits.losses_max,
            coordinator_losses_max: config.limits.coordinator_losses_max,
        }
    }

    pub fn len(&self) -> usize {
        self.requests.len()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub fn n_parked(&self) -> usize {
        self.parked.len()
    }

    pub fn is_parked(&self, key: u64) -> bool {
        self.parked.contains_key(&key)
    }

    pub fn get(&self, key: u64) -> Option<&LinkRequest> {
        self.requests.get(&key)
    }

    /// Returns a request that the replica has. This runs for every token: the requests are looked up once, and `parked`
    /// only if it has entries.
    pub fn at_replica(&mut self, key: u64) -> Option<&mut LinkRequest> {
        if !self.parked.is_empty() && self.parked.contains_key(&key) {
            return None;
        }
        self.requests.get_mut(&key)
    }

    /// Adds a request that the replica does not have yet.
    pub fn add(&mut self, key: u64, request: LinkRequest, now: Instant) {
        self.requests.insert(key, request);
        self.parked.insert(key, None);
        self.begin_absence(key, now);
    }

    /// Records that the replica gets a parked request under this id. Returns the frame for it. `is_computed`: its ranks
    /// compute the requests that it has.
    pub fn unpark(&mut self, key: u64, id: RequestId, is_computed: bool, now: Instant) -> Option<Frame> {
        let request = self.requests.get_mut(&key)?;
        self.parked.remove(&key);
        if is_computed {
            request.absence.ends(now);
        }
        Some(request.frame(id, now))
    }

    /// Records that the replica no longer has the request. `is_gone`: its coordinator is lost too.
    pub fn park(&mut self, key: u64, is_gone: bool, now: Instant) {
        let Some(request) = self.requests.get_mut(&key) else { return };
        if self.parked.insert(key, None).is_none() {
            request.record_loss(is_gone, now);
        }
        let times = request.n_lost;
        let is_suspect = times > self.losses_max || request.n_coordinators_lost > self.coordinator_losses_max;
        self.begin_absence(key, now);
        if is_suspect {
            self.end(key, Refusal::LostTooOften { times });
        }
    }

    pub fn park_all(&mut self, is_gone: bool, now: Instant) {
        self.keys().into_iter().for_each(|key| self.park(key, is_gone, now));
    }

    /// Parks a request until a moment.
    pub fn retry_at(&mut self, key: u64, again: Instant) {
        self.parked.insert(key, Some(again));
    }

    /// Returns when a parked request is tried again, if it has such a time.
    pub fn retry_time(&self, key: u64) -> Option<Instant> {
        self.parked.get(&key).copied().flatten()
    }

    /// Returns the parked requests whose retry time has come.
    pub fn due_retries(&self, now: Instant) -> Vec<u64> {
        let due = self.parked.iter().filter(|(_, retry)| retry.is_some_and(|retry| retry <= now));
        due.map(|(key, _)| *key).collect()
    }

    /// Removes the retry time of a parked request, unless it was put off.
    pub fn forget_past_retry(&mut self, key: u64, now: Instant) {
        if self.retry_time(key).is_none_or(|retry| retry <= now) {
            self.parked.insert(key, None);
        }
    }

    /// Returns the waiting requests that have no retry time.
    pub fn waiting(&self) -> Vec<u64> {
        self.parked.iter().filter(|(_, retry)| retry.is_none()).map(|(key, _)| *key).collect()
    }

    /// The next moment at which a request is tried again or given up.
    pub fn due(&self) -> Option<Instant> {
        self.parked.values().copied().chain([self.next_give_up]).flatten().min()
    }

    /// Returns the requests that no replica has computed for as long as they may wait. The caller ends them.
    pub fn overdue(&mut self, now: Instant) -> Vec<u64> {
        if self.next_give_up.is_none_or(|next| next > now) {
            return Vec::new();
        }
        let max = self.absence_max;
        let until = self.requests.iter().filter_map(|(key, request)| Some((*key, request.absence.lasts_until(max)?)));
        let (over, later): (Vec<_>, Vec<_>) = until.partition(|(_, until)| *until <= now);
        self.next_give_up = later.into_iter().map(|(_, until)| until).min();
        over.into_iter().map(|(key, _)| key).collect()
    }

    /// Marks that no replica computes the requests from now on.
    pub fn begin_absences(&mut self, now: Instant) {
        self.keys().into_iter().for_each(|key| self.begin_absence(key, now));
    }

    /// Marks that the replica computes the requests that it has from now on.
    pub fn end_absences(&mut self, now: Instant) {
        let parked = &self.parked;
        let there = self.requests.iter_mut().filter(|(key, _)| !parked.contains_key(key));
        there.for_each(|(_, request)| request.absence.ends(now));
    }

    fn begin_absence(&mut self, key: u64, now: Instant) {
        let Some(request) = self.requests.get_mut(&key) else { return };
        request.absence.begins(now);
        let over = request.absence.lasts_until(self.absence_max);
        self.next_give_up = [self.next_give_up, over].into_iter().flatten().min();
    }

    /// Returns the replica's requests that other links can continue at once.
    pub fn movable(&self, others: &Neighbours) -> Vec<u64> {
        let at_the_replica = self.requests.iter().filter(|(key, _)| !self.parked.contains_key(key));
        let movable = at_the_replica.filter(|(_, request)| others.is_any_ready_for(request.need()));
        movable.map(|(key, _)| *key).collect()
    }

    /// Moves one request. Returns true if another link has it now.
    pub fn move_to(&mut self, key: u64, others: &mut Neighbours) -> bool {
        let Some(request) = self.requests.get(&key) else { return false };
        let Some(link) = others.ready_for(request.need(), request.request.n_tokens() as u64) else { return false };
        if let Err(wait) = others.take_retry(Instant::now()) {
            if let Some(retry) = self.parked.get_mut(&key) {
                // The later of both times counts: the replica set one of them, and a time that has passed would never
                // fire.
                let again = Instant::now() + wait;
                *retry = Some(retry.map_or(again, |retry| retry.max(again)));
            }
            return false;
        }
        let Some(request) = self.requests.remove(&key) else { return false };
        match link.adopt(key, Box::new(request)) {
            Ok(()) => {
                self.parked.remove(&key);
                true
            }
            Err(request) => {
                self.requests.insert(key, *request);
                false
            }
        }
    }

    /// Moves requests that wait here to links that can continue them at once.
    pub fn move_parked(&mut self, others: &mut Neighbours) {
        let waiting: Vec<u64> = self.parked.keys().copied().collect();
        for key in waiting {
            self.move_to(key, others);
        }
    }

    pub fn finish(&mut self, key: u64, output: wire::Output, finish: Finish) {
        if let Some(request) = self.remove(key) {
            request.finish(output, finish);
        }
    }

    pub fn end(&mut self, key: u64, refusal: Refusal) {
        if let Some(request) = self.remove(key) {
            request.end(refusal);
        }
    }

    pub fn remove(&mut self, key: u64) -> Option<LinkRequest> {
        self.parked.remove(&key);
        self.requests.remove(&key)
    }

    /// Returns all requests, for the end of the link.
    pub fn into_requests(self) -> impl Iterator<Item = LinkRequest> {
        self.requests.into_values()
    }

    fn keys(&self) -> Vec<u64> {
        self.requests.keys().copied().collect()
    }
}
