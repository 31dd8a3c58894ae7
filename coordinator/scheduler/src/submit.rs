//! Takes a request or says why not.

use crate::Rejected;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::waiting::Key;
use types::{BLOCK_TOKENS, BlockHash, Finish, Goal, Micros, Request};

impl Scheduler {
    pub fn submit(&mut self, request: Request, now: Micros) -> Result<(), Rejected> {
        let length_max = self.acceptable(&request, now)?;
        self.latest = self.latest.max(now);
        let key = Key::new(request.priority, self.latest, self.n_arrivals, self.config.aging_micros);
        self.n_arrivals += 1;
        let root = BlockHash::root(&self.config.policy, request.tenant, request.adapter, &self.config.salt);
        let (id, deadline) = (request.id, request.deadline);
        let sequence = Sequence::new(request, key, length_max, root, self.pools.len());
        let n_tokens = sequence.n_known();
        let idx = self.sequences.insert(sequence);
        self.waiting.insert(key, idx, n_tokens);
        self.by_id.insert(id, idx);
        self.deadlines.extend(deadline.map(|deadline| (deadline, id)));
        Ok(())
    }

    /// How long the request's log may become, if it can be taken.
    fn acceptable(&self, request: &Request, now: Micros) -> Result<u32, Rejected> {
        if self.draining {
            return Err(Rejected::Draining);
        }
        request.supported()?;
        if self.by_id.contains_key(&request.id) {
            return Err(Rejected::Duplicate);
        }
        if request.deadline.is_some_and(|deadline| deadline <= now) {
            return Err(Rejected::Deadline);
        }
        let length_max = self.length_max(request)?;
        self.room_to_wait(request.n_tokens() as u64)?;
        Ok(length_max)
    }

    /// The longest log that the request may reach, if that fits the context and the pool.
    fn length_max(&self, request: &Request) -> Result<u32, Rejected> {
        if request.prompt.is_empty() {
            return Err(Rejected::Empty);
        }
        if let Some(finish) = finished(request) {
            return Err(Rejected::Finished(finish));
        }
        let n_tokens = request.n_tokens() as u64;
        let context_max = u64::from(self.config.context_max);
        if n_tokens == context_max && !request.output.is_empty() {
            return Err(Rejected::Finished(Finish::Length));
        }
        if n_tokens >= context_max {
            return Err(Rejected::TooLong { limit: "context_max", needed: n_tokens + 1, available: context_max });
        }
        // What is pooled says nothing: room for one token is room for its prompt.
        let tokens_max = if request.goal == Goal::Pool { 1 } else { request.sampling.tokens_max };
        let wished = request.prompt.len() as u64 + u64::from(tokens_max);
        let length_max = wished.min(context_max) as u32;
        if let Some(n_blocks) = self.config.too_small_pool(length_max) {
            let available = u64::from(n_blocks) * u64::from(BLOCK_TOKENS);
            return Err(Rejected::TooLong { limit: "n_blocks", needed: u64::from(length_max - 1), available });
        }
        Ok(length_max)
    }

    fn room_to_wait(&self, n_tokens: u64) -> Result<(), Rejected> {
        if self.waiting.len() >= self.config.waiting_max as usize {
            return Err(Rejected::Full { limit: "waiting_max", max: self.config.waiting_max.into() });
        }
        if self.waiting.n_tokens() + n_tokens > self.config.waiting_tokens_max {
            return Err(Rejected::Full { limit: "waiting_tokens_max", max: self.config.waiting_tokens_max });
        }
        Ok(())
    }
}

/// Why a request that carries an output has nothing left to say.
fn finished(request: &Request) -> Option<Finish> {
    let n_output = request.output.len() as u64;
    let stopped = request.output.last().is_some_and(|&token| request.sampling.is_stop(token));
    if stopped && n_output > u64::from(request.sampling.tokens_min) {
        return Some(Finish::Stop);
    }
    (n_output >= u64::from(request.sampling.tokens_max)).then_some(Finish::Length)
}
