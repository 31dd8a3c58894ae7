//! Accepts or refuses requests. If the queue is full, the tenant that fills it most gives up a place.

use crate::config::Config;
use crate::refusal::RequestRejection;
use crate::sequence::undrawn;
use crate::slab::{SequenceIdx, SequenceSlab};
use crate::tenants::{Tenant, Tenants};
use crate::waiting::WaitingQueue;
use alloc::vec::Vec;
use types::{BLOCK_TOKENS, Finish, Goal, Micros, Request, TenantWeight};

/// What the present workers have room for.
pub(crate) struct AcceptanceLimits {
    /// How long a log may become: the context, or less.
    room: u32,
    /// Whether they support the newest fields of a request.
    supports_newest_features: bool,
    /// Nothing new is accepted; running requests finish.
    is_draining: bool,
}

impl AcceptanceLimits {
    pub fn new(config: &Config) -> AcceptanceLimits {
        AcceptanceLimits { room: config.context_max, supports_newest_features: true, is_draining: false }
    }

    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    pub fn set_room(&mut self, room: u32, supports_newest_features: bool) {
        (self.room, self.supports_newest_features) = (room, supports_newest_features);
    }

    /// How long the request's log may become: there is no room at all for a request that the workers would ignore a
    /// part of.
    pub fn room_for(&self, request: &Request) -> u32 {
        if self.supports_newest_features || !request.needs_newest_features() { self.room } else { 0 }
    }

    /// How long the request's log may become, if it can be accepted.
    pub fn accepted_length(
        &self,
        request: &Request,
        config: &Config,
        now: Micros,
        is_duplicate: bool,
    ) -> Result<u32, RequestRejection> {
        if self.is_draining {
            return Err(RequestRejection::Draining);
        }
        let (needed, available) = (request.frame_bytes_max(), config.starts_bytes_max);
        if needed > available {
            return Err(RequestRejection::TooLarge { needed, available });
        }
        if is_duplicate {
            return Err(RequestRejection::Duplicate);
        }
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            return Err(RequestRejection::Deadline);
        }
        self.length_whole(request, config)
    }

    /// Refuses what cannot be one slice, where nothing is kept of a request's positions.
    fn check_whole(&self, request: &Request, config: &Config) -> Result<(), RequestRejection> {
        let (needed, available) = (request.n_tokens() as u64, u64::from(config.slice_max()));
        match config.keeps_nothing() {
            true if request.goal != Goal::Pool => Err(RequestRejection::Encoder),
            true if needed > available => {
                Err(RequestRejection::TooLong { limit: "batch_tokens_max", needed, available })
            }
            _ => Ok(()),
        }
    }

    /// The longest log that the request may reach, if that fits the context, and as much of it as the pool has room
    /// for.
    fn length_whole(&self, request: &Request, config: &Config) -> Result<u32, RequestRejection> {
        if request.prompt.is_empty() {
            return Err(RequestRejection::Empty);
        }
        if let Some(finish) = finish_if_complete(request) {
            return Err(RequestRejection::Finished(finish));
        }
        self.check_whole(request, config)?;
        let n_tokens = request.n_tokens() as u64;
        let undrawn = u64::from(undrawn(request.goal));
        let context_max = u64::from(config.context_max) + undrawn;
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
        if let Some(n_blocks) = config.too_small_pool(length_max) {
            let available = u64::from(n_blocks) * u64::from(BLOCK_TOKENS);
            return Err(RequestRejection::TooLong { limit: "n_blocks", needed: u64::from(length_max - 1), available });
        }
        Ok(length_whole)
    }
}

/// Returns the waiting sequences that have to give up their places for this request. They are the last of the
/// tenant with the most in the queue for its weight, as long as that tenant keeps no less than the requesting one
/// has. Empty if there is room.
pub(crate) fn waiting_to_displace(
    request: &Request,
    config: &Config,
    waiting: &WaitingQueue,
    tenants: &Tenants,
    sequences: &SequenceSlab,
) -> Result<Vec<SequenceIdx>, RequestRejection> {
    let mut displaced = Vec::new();
    let (mut n, mut n_tokens) = (waiting.len() as u64, waiting.n_tokens() + request.n_tokens() as u64);
    let (max, tokens_max) = (u64::from(config.waiting_max), config.waiting_tokens_max);
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
    let place = tenants.find_existing(request.tenant);
    let own = place.map_or(0, |place| load(tenants.get(place)).0);
    let own = (own + size(request.n_tokens()), TenantWeight(request.weight.0.max(1)));
    let heaviest = tenants.heaviest(place.unwrap_or(u32::MAX), load).ok_or(full)?;
    let mut left = load(tenants.get(heaviest)).0;
    let may_give = |idx: &SequenceIdx| sequences[*idx].is_untouched();
    let mut last = waiting.of(heaviest).rev().filter(may_give);
    while n >= max || n_tokens > tokens_max {
        let idx = last.next().ok_or(full)?;
        let n_known = sequences[idx].n_known();
        left = left.saturating_sub(size(n_known as usize));
        if !tenants.is_lighter(own, heaviest, left) {
            return Err(full);
        }
        (n, n_tokens) = (n - 1, n_tokens - u64::from(n_known));
        displaced.push(idx);
    }
    Ok(displaced)
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
