//! Accepts or refuses requests. If the queue is full, the tenant that fills it most gives up a place.

use crate::RequestRejection;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceIdx, undrawn};
use crate::tenants::Tenant;
use crate::waiting::QueueKey;
use alloc::vec::Vec;
use types::{BLOCK_TOKENS, BlockHash, Finish, Goal, Micros, Request, RequestId, TenantWeight};

impl Scheduler {
    pub fn submit(&mut self, request: Request, now: Micros) -> Result<(), RequestRejection> {
        let length_whole = self.accepted_length(&request, now)?;
        for idx in self.waiting_to_displace(&request)? {
            self.displaced.push(self.sequences[idx].id);
            self.end(idx);
        }
        self.latest = self.latest.max(now);
        let key = QueueKey::new(request.priority, self.latest, self.n_arrivals, self.config.aging_micros);
        self.n_arrivals += 1;
        let root = BlockHash::root(&self.config.policy, request.cache_owner(), &self.config.salt);
        let (id, deadline) = (request.id, request.deadline);
        let tenant = self.tenants.find_or_insert(request.tenant, request.weight);
        let mut sequence = Sequence::new(request, tenant, key, length_whole, root, self.pools.len());
        sequence.limit_length(self.room);
        let idx = self.sequences.insert(sequence);
        self.enqueue(idx);
        self.by_id.insert(id, idx);
        self.deadlines.extend(deadline.map(|deadline| (deadline, id)));
        Ok(())
    }

    /// A request that was accepted and has lost its place in the queue to another tenant, or None. It has ended without
    /// an output: its client must be informed that the queue is full.
    pub fn take_displaced(&mut self) -> Option<RequestId> {
        self.displaced.pop()
    }

    pub(crate) fn enqueue(&mut self, idx: SequenceIdx) {
        let sequence = &self.sequences[idx];
        let (tenant, key, n_tokens) = (sequence.tenant, sequence.key, sequence.n_known());
        self.waiting.insert(tenant, key, idx, n_tokens);
        self.tenants.add_waiting(tenant, n_tokens);
    }

    /// How long the request's log may become, if it can be accepted.
    fn accepted_length(&self, request: &Request, now: Micros) -> Result<u32, RequestRejection> {
        if self.draining {
            return Err(RequestRejection::Draining);
        }
        let (needed, available) = (request.frame_bytes_max(), self.config.starts_bytes_max);
        if needed > available {
            return Err(RequestRejection::TooLarge { needed, available });
        }
        if self.by_id.contains_key(&request.id) {
            return Err(RequestRejection::Duplicate);
        }
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            return Err(RequestRejection::Deadline);
        }
        self.length_whole(request)
    }

    /// The longest log that the request may reach, if that fits the context, and as much of it as the pool has room
    /// for.
    fn length_whole(&self, request: &Request) -> Result<u32, RequestRejection> {
        if request.prompt.is_empty() {
            return Err(RequestRejection::Empty);
        }
        if let Some(finish) = finish_if_complete(request) {
            return Err(RequestRejection::Finished(finish));
        }
        let n_tokens = request.n_tokens() as u64;
        let undrawn = u64::from(undrawn(request.goal));
        let context_max = u64::from(self.config.context_max) + undrawn;
        if n_tokens == context_max && !request.output.is_empty() {
            return Err(RequestRejection::Finished(Finish::Length));
        }
        if n_tokens >= context_max {
            let (needed, available) = (n_tokens + 1 - undrawn, context_max - undrawn);
            return Err(RequestRejection::TooLong { limit: "context_max", needed, available });
        }
        if request.needs_newest_features() && !self.supports_newest_features {
            return Err(RequestRejection::OlderRanks);
        }
        let room = u64::from(self.room) + undrawn;
        if n_tokens >= room {
            return Err(RequestRejection::Outgrown { n_tokens, room: room - undrawn });
        }
        // A pooled request draws no token: room for one token is room for its prompt.
        let tokens_max = if request.goal == Goal::Pool { 1 } else { request.sampling.tokens_max };
        let length_requested = request.prompt.len() as u64 + u64::from(tokens_max);
        let length_whole = length_requested.min(context_max) as u32;
        let length_max = length_whole.min(u32::try_from(room).unwrap_or(u32::MAX));
        if let Some(n_blocks) = self.config.too_small_pool(length_max) {
            let available = u64::from(n_blocks) * u64::from(BLOCK_TOKENS);
            return Err(RequestRejection::TooLong { limit: "n_blocks", needed: u64::from(length_max - 1), available });
        }
        Ok(length_whole)
    }

    /// Returns the waiting sequences that have to give up their places for this request. They are the last of the
    /// tenant with the most in the queue for its weight, as long as that tenant keeps no less than the requesting one
    /// has. Empty if there is room.
    fn waiting_to_displace(&self, request: &Request) -> Result<Vec<SequenceIdx>, RequestRejection> {
        let mut displaced = Vec::new();
        let (mut n, mut n_tokens) = (self.waiting.len() as u64, self.waiting.n_tokens() + request.n_tokens() as u64);
        let (max, tokens_max) = (u64::from(self.config.waiting_max), self.config.waiting_tokens_max);
        let by_count = n >= max;
        let full = match by_count {
            true => RequestRejection::Full { limit: "waiting_max", max },
            false => RequestRejection::Full { limit: "waiting_tokens_max", max: tokens_max },
        };
        if !by_count && n_tokens <= tokens_max {
            return Ok(displaced);
        }
        let load = if by_count { Tenant::waiting } else { Tenant::waiting_tokens };
        let size = |n_tokens: usize| if by_count { 1 } else { n_tokens as u64 };
        let place = self.tenants.find_existing(request.tenant);
        let own = place.map_or(0, |place| load(self.tenants.get(place)).0);
        let own = (own + size(request.n_tokens()), TenantWeight(request.weight.0.max(1)));
        let heaviest = self.tenants.heaviest(place.unwrap_or(u32::MAX), load).ok_or(full)?;
        let mut left = load(self.tenants.get(heaviest)).0;
        let may_give = |idx: &SequenceIdx| self.sequences[*idx].is_untouched();
        let mut last = self.waiting.of(heaviest).rev().filter(may_give);
        while n >= max || n_tokens > tokens_max {
            let idx = last.next().ok_or(full)?;
            let n_known = self.sequences[idx].n_known();
            left = left.saturating_sub(size(n_known as usize));
            if !self.tenants.is_lighter(own, heaviest, left) {
                return Err(full);
            }
            (n, n_tokens) = (n - 1, n_tokens - u64::from(n_known));
            displaced.push(idx);
        }
        Ok(displaced)
    }
}

/// Why a request that carries an output has nothing left to generate.
fn finish_if_complete(request: &Request) -> Option<Finish> {
    let n_output = request.output.len() as u64;
    let stopped = request.output.last().is_some_and(|&token| request.sampling.is_stop(token));
    if stopped && n_output > u64::from(request.sampling.tokens_min) {
        return Some(Finish::Stop);
    }
    (n_output >= u64::from(request.sampling.tokens_max)).then_some(Finish::Length)
}
