//! Plans the next step: running sequences go on, best first, then waiting ones are admitted into the room that is left.
//! Between tenants both are divided by weight (`shares.rs`).
//!
//! Blocks are given out in the order of the running sequences, so that one that must be preempted for them has nothing
//! in this step yet. Tokens are given out to decoding sequences first, because a prompt's chunk can have any length and
//! they cannot. Which sequences have a slice in a step is in `turns.rs`; chunks of one prompt may be in flight in every
//! stage at once, because each stage computes positions in order.

use crate::config::GROUPS_MAX;
use crate::in_flight::PlannedSlice;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceIdx, SequenceState};
use crate::stats::Counters;
use types::{BLOCK_TOKENS, BlockId, CacheGroup, Micros, SCORED_ROWS_MAX, Slice, Step, StepId};

/// The rest of a step after the running sequences.
pub(crate) struct StepBudget {
    pub n_tokens: u32,
    /// Rows that may still be scored.
    pub n_scores: u32,
    /// Bytes of the frame for requests that start.
    pub start_bytes: usize,
    /// A sequence was preempted or got no blocks: a newly admitted one would soon be preempted.
    pub short: bool,
}

/// For each group, the blocks that running sequences will take until their logs are computed.
pub(crate) type PromisedBlocks = [u32; GROUPS_MAX];

impl Scheduler {
    /// Fills `step` with the next step, if there is work and not enough in flight.
    pub fn next_step(&mut self, now: Micros, step: &mut Step) -> bool {
        step.clear();
        if self.in_flight.len() >= self.n_steps_allowed() as usize {
            return false;
        }
        self.ahead_max = self.ahead_now();
        let n_turns = self.steps_per_turn();
        // A decoding sequence is planned as many steps behind its last draw as there are stages. If that leaves the
        // step empty, a shorter distance is allowed: a step that waits at the first stage begins sooner than one that
        // waits for this scheduler.
        let distance = (1..=n_turns).rev().find(|&distance| self.plan_slices(distance, now, step));
        if distance.is_none() && self.ends.is_empty() {
            self.note_starved();
            return false;
        }
        self.counters.steps_early += u64::from(distance.is_some_and(|distance| distance < n_turns));
        self.write(step);
        true
    }

    /// Plans slices; a sequence that awaits a draw gets one only if it is `distance` steps behind it. Returns whether
    /// there are any. If not, nothing has changed, except that a sequence may have been preempted.
    fn plan_slices(&mut self, distance: u32, now: Micros, step: &mut Step) -> bool {
        self.order_running();
        let mut left = self.plan_running(distance);
        self.admit(now, &mut left, step);
        if self.tenants.are_many() {
            self.spread_unused_tokens(left);
        }
        self.running.iter().any(|&idx| self.sequences[idx].n_planned > 0)
    }

    fn note_starved(&mut self) {
        let ahead_max = self.ahead_max;
        let all_in_flight = self.running.iter().all(|&idx| self.sequences[idx].n_missing(ahead_max) == 0);
        if !self.is_starved && !self.running.is_empty() && all_in_flight {
            self.is_starved = true;
            self.counters.starved += 1;
        }
    }

    /// How many steps may be in flight: one while there is a suspect, so that it is known which step was lost.
    pub(crate) fn n_steps_allowed(&self) -> u32 {
        if self.n_suspects > 0 { 1 } else { self.config.steps_in_flight_max }
    }

    /// Gives each running sequence tokens and blocks for its slice of this step.
    fn plan_running(&mut self, distance: u32) -> StepBudget {
        self.tenants.begin_step();
        let n_turns = self.give_turns(distance);
        let n_drafts = self.give_drafts();
        let mut for_chunks = self.config.batch_tokens_max - n_turns - n_drafts;
        self.divide_prompt_tokens(for_chunks);
        let start_bytes = self.config.starts_bytes_max;
        let n_scores = SCORED_ROWS_MAX - n_drafts;
        let mut left = StepBudget { n_tokens: self.config.batch_tokens_max, n_scores, start_bytes, short: false };
        let n_preemptions = self.counters.preemptions;
        let mut at = 0;
        while at < self.running.len() {
            let idx = self.running[at];
            self.drop_drafts_without_blocks(idx);
            let sequence = &self.sequences[idx];
            let (tenant, scores) = (sequence.tenant, sequence.has_rows_to_score());
            let n_missing = sequence.n_missing(self.ahead_max);
            let is_chunk = sequence.is_chunk();
            let n_requested = if is_chunk {
                let n_scores = if scores { left.n_scores } else { u32::MAX };
                let n_tokens = for_chunks.min(self.tenants.get(tenant).for_chunks);
                n_missing.min(sequence.chunk_max).min(n_tokens).min(n_scores)
            } else {
                sequence.turn
            };
            // Most decoding sequences have room left in their last block.
            let end = sequence.n_computed + n_requested;
            let n_planned =
                if !sequence.lacks_blocks(end) || self.take_blocks_or_preempt(at, end) { n_requested } else { 0 };
            let sequence = &mut self.sequences[idx];
            sequence.n_planned = n_planned;
            sequence.n_drafts = sequence.n_drafts.min(n_planned);
            self.tenants.plan(tenant, n_planned);
            if is_chunk {
                for_chunks -= n_planned;
                self.tenants.take_for_chunks(tenant, n_planned);
            }
            left.n_scores -= if scores { n_planned } else { 0 };
            left.n_tokens -= n_planned;
            left.short |= n_planned < n_requested;
            at += 1;
        }
        left.short |= self.counters.preemptions > n_preemptions;
        left
    }

    /// Drops drafts whose blocks are missing: no sequence is preempted for them.
    fn drop_drafts_without_blocks(&mut self, idx: SequenceIdx) {
        let sequence = &self.sequences[idx];
        if sequence.n_drafts > 0 && !self.has_blocks(idx, sequence.n_computed + sequence.turn) {
            let sequence = &mut self.sequences[idx];
            sequence.turn -= core::mem::take(&mut sequence.n_drafts);
        }
    }

    /// Gives the running sequence `at` blocks of each group up to position `end`, and preempts later ones for them.
    /// False if there is no later one, or its own slices in flight will free enough: then it waits.
    fn take_blocks_or_preempt(&mut self, at: usize, end: u32) -> bool {
        let idx = self.running[at];
        while !self.has_blocks(idx, end) {
            if at + 1 == self.running.len() || self.will_free_blocks(idx, end) {
                return false;
            }
            self.preempt(self.running.len() - 1);
        }
        self.take_blocks(idx, end);
        true
    }

    /// Whether the blocks up to `end` are available once its slices in flight have landed and their windows have moved
    /// on. Nothing is preempted for blocks that come anyway.
    fn will_free_blocks(&self, idx: SequenceIdx, end: u32) -> bool {
        let sequence = &self.sequences[idx];
        let mut groups = self.pools.iter().zip(&sequence.tables);
        groups.all(|(pool, table)| {
            let n_passed = pool.group.n_passed(sequence.earliest_start()) as usize;
            let n_given_back = table.held().take_while(|(i, _)| *i < n_passed).count() as u32;
            sequence.n_lacking(&pool.group, end) <= pool.n_available() + n_given_back
        })
    }

    /// Preempts a running sequence: it releases its blocks and will begin again from its log. Later steps may write the
    /// blocks at once: ranks run steps in order. Returns how many tokens the step had for it.
    pub(crate) fn preempt(&mut self, at: usize) -> u32 {
        let idx = self.running.remove(at);
        self.release(idx);
        let sequence = &mut self.sequences[idx];
        let (tenant, n_planned) = (sequence.tenant, sequence.n_planned);
        sequence.rewind();
        // The ranks forget it, so that they never hold more than may run; its next start brings the log back.
        sequence.held = false;
        self.ends.push(sequence.id);
        self.enqueue(idx);
        self.tenants.unplan(tenant, n_planned);
        self.tenants.remove_running(tenant);
        self.is_ranked = false;
        self.counters.preemptions += 1;
        n_planned
    }

    /// Starts waiting sequences, in their order, while there is room. The first that does not fit holds up the rest, so
    /// that a long prompt is not overtaken for ever.
    fn admit(&mut self, now: Micros, left: &mut StepBudget, step: &mut Step) {
        if self.waiting.is_empty() {
            return;
        }
        let mut promised = self.promised();
        let mut beside_suspect =
            self.n_suspects > 0 && self.running.iter().any(|&idx| self.sequences[idx].is_suspect());
        while self.may_admit(left) {
            let Some(idx) = self.first_waiting(now, beside_suspect) else { return };
            let n_hits = self.n_prefix_hits(idx);
            let sequence = &self.sequences[idx];
            let (scores, n_bytes) = (sequence.has_rows_to_score(), sequence.request.frame_bytes_max());
            if n_bytes > left.start_bytes && !step.starts.is_empty() {
                return;
            }
            let is_room = !left.short && self.has_free_slot() && self.fits(idx, n_hits, &promised);
            if (scores && left.n_scores == 0)
                || !(is_room || self.preempt_above_share(idx, n_hits, &mut promised, left))
            {
                return;
            }
            self.start(idx, n_hits, step);
            // A log that has outgrown the limit goes alone.
            left.start_bytes = left.start_bytes.saturating_sub(n_bytes);
            let sequence = &mut self.sequences[idx];
            let n_missing = sequence.n_missing(self.ahead_max);
            sequence.n_planned = n_missing.min(sequence.chunk_max).min(left.n_tokens);
            if scores {
                sequence.n_planned = sequence.n_planned.min(left.n_scores);
                left.n_scores -= sequence.n_planned;
            }
            left.n_tokens -= sequence.n_planned;
            beside_suspect |= sequence.is_suspect();
            self.tenants.plan(sequence.tenant, sequence.n_planned);
            let end = sequence.n_computed + sequence.n_planned;
            self.take_blocks(idx, end);
            self.promise(idx, &mut promised);
        }
    }

    /// Whether a sequence might be admitted: into a free slot, or into that of a tenant above its share.
    fn may_admit(&self, left: &StepBudget) -> bool {
        left.n_tokens > 0 && ((!left.short && self.has_free_slot()) || self.tenants.are_many())
    }

    pub(crate) fn has_free_slot(&self) -> bool {
        self.running.len() < self.config.running_max as usize
    }

    pub(crate) fn promised(&self) -> PromisedBlocks {
        let mut promised = [0; GROUPS_MAX];
        self.running.iter().for_each(|&idx| self.promise(idx, &mut promised));
        promised
    }

    /// Adds the blocks of each group that a running sequence needs for its log, and one more.
    fn promise(&self, idx: SequenceIdx, promised: &mut PromisedBlocks) {
        let sequence = &self.sequences[idx];
        let n_tokens = sequence.n_known().max(sequence.n_computed + sequence.n_planned);
        for ((pool, table), n_promised) in self.pools.iter().zip(&sequence.tables).zip(promised) {
            let n_needed = self.n_needed(pool.group, n_tokens, sequence.n_computed);
            *n_promised += n_needed.saturating_sub(table.n_held) + 1;
        }
    }

    /// Blocks of a group that a sequence needs to go on from `start` until `n_tokens` positions are computed.
    fn n_needed(&self, group: CacheGroup, n_tokens: u32, start: u32) -> u32 {
        let slice_max = n_tokens.saturating_sub(start).clamp(1, self.config.slice_max());
        group.n_held_max(n_tokens, slice_max)
    }

    /// The first waiting sequence that may run. One past its deadline is reported by `expire`. Among suspects it is the
    /// least suspicious one; while a suspect runs all of them are passed over, and once that one gets a token, the next
    /// of them holds up the rest again.
    fn first_waiting(&mut self, now: Micros, beside_suspect: bool) -> Option<SequenceIdx> {
        let is_in_time =
            |idx: &SequenceIdx| self.sequences[*idx].request.deadline.is_none_or(|deadline| now < deadline);
        let tenants = self.tenants.waiting_in_order().iter();
        let mut in_time = tenants.flat_map(|&tenant| self.waiting.of(tenant)).filter(is_in_time);
        if self.n_suspects == 0 {
            return in_time.next();
        }
        let suspects = in_time.clone().filter(|&idx| self.sequences[idx].is_suspect() && !beside_suspect);
        let least = suspects.min_by_key(|&idx| self.sequences[idx].suspicion);
        in_time.find(|&idx| !self.sequences[idx].is_suspect() || Some(idx) == least)
    }

    /// Whether each pool has blocks for its whole log, beside those that running sequences need for theirs and one more
    /// for each.
    pub(crate) fn fits(&self, idx: SequenceIdx, n_hits: u32, promised: &PromisedBlocks) -> bool {
        let sequence = &self.sequences[idx];
        let start = n_hits * BLOCK_TOKENS;
        self.pools.iter().zip(promised).all(|(pool, n_promised)| {
            let is_idle_block = |name| pool.find(name).is_some_and(|block| pool.is_cached(block));
            let shared = &sequence.hashes[pool.group.n_passed(start) as usize..n_hits as usize];
            let n_revived = shared.iter().filter(|name| is_idle_block(name)).count() as u32;
            let n_needed = self.n_needed(pool.group, sequence.n_known(), start);
            n_needed.saturating_sub(shared.len() as u32) + n_revived + n_promised <= pool.n_available()
        })
    }

    /// Shares blocks that others have computed: `[0, n_passed) NONE · [n_passed, n_hits) shared`, in each group.
    fn share_prefix(&mut self, idx: SequenceIdx, n_hits: u32) {
        let sequence = &mut self.sequences[idx];
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            table.n_passed = pool.group.n_passed(n_hits * BLOCK_TOKENS);
            table.blocks.resize(table.n_passed as usize, BlockId::NONE);
            for name in &sequence.hashes[table.n_passed as usize..n_hits as usize] {
                let block = pool.find(name).expect("a hit is in the index");
                pool.share(block);
                table.push(block);
            }
        }
        sequence.set_n_entries(n_hits);
    }

    /// `[0, n_hits blocks) computed by others · the rest is computed`
    fn start(&mut self, idx: SequenceIdx, n_hits: u32, step: &mut Step) {
        self.n_generations += 1;
        // Reported once, as look-ups are counted: a preempted sequence finds its own blocks again.
        if !self.sequences[idx].admitted {
            self.sequences[idx].reuse = self.explain(idx, n_hits);
        }
        let sequence = &mut self.sequences[idx];
        let (tenant, n_known) = (sequence.tenant, sequence.n_known());
        self.waiting.remove(tenant, sequence.key, n_known);
        self.tenants.start_running(tenant, n_known);
        sequence.reserve();
        self.share_prefix(idx, n_hits);
        let sequence = &mut self.sequences[idx];
        sequence.state = SequenceState::Running;
        sequence.generation = self.n_generations;
        sequence.n_computed = n_hits * BLOCK_TOKENS;
        sequence.n_sure = sequence.n_computed;
        // A prompt is cut for all stages, so that it keeps them busy and none has the whole of it at once.
        let share = (sequence.n_known() - sequence.n_computed).div_ceil(self.config.n_stages);
        sequence.chunk_max = share.max(self.config.chunk_tokens_min).min(self.config.chunk_tokens_max);
        sequence.held = true;
        if !sequence.admitted {
            sequence.n_cached = sequence.n_computed;
            self.counters.prefix_hit_tokens += u64::from(sequence.n_computed);
        }
        sequence.admitted = true;
        self.counters.admissions += 1;
        step.starts.push(types::Request { deadline: None, ..(*sequence.request).clone() });
        // The id comes back in the step that would have ended it: the start replaces what the ranks hold.
        let (id, key) = (sequence.id, sequence.key);
        if !self.ends.is_empty() {
            self.ends.retain(|&ended| ended != id);
        }
        let at = self.running.partition_point(|&other| self.sequences[other].key < key);
        self.running.insert(at, idx);
        self.is_ranked = false;
        self.counters.running_peak = self.counters.running_peak.max(self.running.len() as u32);
    }

    /// Writes the planned slices into the step: decoding sequences first, then chunks.
    fn write(&mut self, step: &mut Step) {
        step.id = StepId(self.n_steps);
        step.epoch = self.epoch;
        self.n_steps += 1;
        self.counters.steps += 1;
        self.is_starved = false;
        let mut slices = self.in_flight.list();
        let mut is_chunk_planned = false;
        for &idx in &self.running {
            let sequence = &mut self.sequences[idx];
            if sequence.n_planned > 0 && sequence.is_chunk() {
                is_chunk_planned = true;
            } else if sequence.n_planned > 0 {
                slices.push(write_slice(idx, sequence, step, &mut self.counters));
            }
        }
        // A sequence that was written has nothing planned any more.
        for &idx in if is_chunk_planned { &self.running[..] } else { &[] } {
            let sequence = &mut self.sequences[idx];
            if sequence.n_planned > 0 {
                slices.push(write_slice(idx, sequence, step, &mut self.counters));
            }
        }
        self.counters.slices += slices.len() as u64;
        self.in_flight.push(step.id, slices);
        step.ends.append(&mut self.ends);
        self.tenants.charge();
    }
}

fn write_slice(idx: SequenceIdx, sequence: &mut Sequence, step: &mut Step, counters: &mut Counters) -> PlannedSlice {
    let range = sequence.n_computed..sequence.n_computed + sequence.n_planned;
    let draws_max = sequence.draws_max_at(range.end);
    if sequence.n_sent < sequence.n_entries() {
        for table in &sequence.tables {
            step.blocks.extend_from_slice(&table.blocks[sequence.n_sent as usize..]);
        }
        sequence.n_sent = sequence.n_entries();
    }
    let want = sequence.want(draws_max > 0);
    let n_draft = draws_max.saturating_sub(1) as u16;
    step.slices.push(Slice { n_draft, ..Slice::new(sequence.id, range.clone(), want) });
    counters.drafts += u64::from(n_draft);
    counters.slices_ahead += u64::from(range.end > sequence.n_known());
    counters.tokens_computed += u64::from(sequence.n_planned);
    sequence.n_computed = range.end;
    sequence.n_drawing += draws_max;
    sequence.n_slices_in_flight += 1;
    sequence.last_step = step.id.0;
    sequence.n_planned = 0;
    sequence.n_drafts = 0;
    let may_be_late = sequence.request.grammar.is_some();
    PlannedSlice { sequence: idx, generation: sequence.generation, range, draws_max, may_be_late }
}
