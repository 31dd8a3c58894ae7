//! Plans the next step: running sequences go on, best first, then waiting ones are admitted into the room that is left.
//! Between tenants both are divided by weight (`tenants.rs`). With a single tenant, weights change no step.
//!
//! Blocks are given out in the order of the running sequences, so that one that must be preempted for them has nothing
//! in this step yet. Tokens are given out to decoding sequences first, because a prompt's chunk can have any length and
//! they cannot. Which sequences have a slice in a step is in `turns.rs`; chunks of one prompt may be in flight in every
//! stage at once, because each stage computes positions in order.

use super::Scheduler;
use crate::awaited::awaited_prefix;
use crate::costs::{StepCosts, StepSize};
use crate::in_flight::{PlannedSlice, StepInFlight};
use crate::pools::PromisedBlocks;
use crate::sequence::Sequence;
use crate::sequence_index::{Awaited, SequenceIdx};
use crate::stats::Counters;
use crate::step_plan::SlicePlan;
use crate::turns::TurnRule;
use core::ops::Range;
use types::{BLOCK_TOKENS, Micros, PageKey, Slice, Step};

/// The chunks of a step have at least so many tokens together, whatever its time, so that prompts go on.
const CHUNKS_MIN: u32 = BLOCK_TOKENS;

/// Fewer blocks than these are computed and not fetched.
const FETCH_MIN: u32 = 4;

/// A fetch may take half as long as computing its tokens, and always this long.
const FETCH_WAIT_MIN: Micros = Micros(500_000);

/// How long it may take while the time to compute is not known.
const FETCH_WAIT_FIRST: Micros = Micros(5_000_000);

impl Scheduler {
    /// Fills `step` with the next step, if there is work and not enough in flight.
    pub fn next_step(&mut self, now: Micros, step: &mut Step) -> bool {
        step.clear();
        if self.in_flight.len() >= self.n_steps_allowed() as usize {
            return false;
        }
        // This step carries the cancels, before which the blocks belong to nothing else.
        self.cancel_late_fetches(now);
        let n_turns = self.steps_per_turn();
        let (n_steps, ahead_max) = (self.in_flight.n_steps(), self.ahead_now());
        // A decoding sequence is planned as many steps behind its last draw as there are stages. If that leaves the
        // step empty, a shorter distance is allowed: a step that waits at the first stage begins sooner than one that
        // waits for this scheduler.
        let distance = (1..=n_turns).rev().find(|&distance| {
            self.plan.rule = TurnRule { n_steps, ahead_max, steps_per_turn: n_turns, distance };
            self.plan_slices(now, step)
        });
        if distance.is_none() && self.in_flight.ends().is_empty() && !self.pools.tier.is_urgent() {
            self.note_starved();
            return false;
        }
        self.counters.steps_early += u64::from(distance.is_some_and(|distance| distance < n_turns));
        self.write(step);
        true
    }

    /// Slices planned ahead of known tokens. While any sequence has drafts there are none: the others would go on in
    /// steps of their own, and a step costs much the same for a few rows as for one.
    fn ahead_now(&self) -> u32 {
        let has_drafts = self.running_sequences().any(|sequence| sequence.guesses.n_target() > 0);
        if has_drafts { 0 } else { self.config.slices_ahead_max }
    }

    /// Plans slices. Returns whether there are any. If not, nothing has changed, except that a fetch may have begun and
    /// a sequence may have been preempted.
    fn plan_slices(&mut self, now: Micros, step: &mut Step) -> bool {
        self.running.rank(&mut self.sequences, &mut self.tenants);
        self.plan_running();
        self.admit(now, step);
        if self.tenants.are_many() {
            self.spread_unused_tokens();
        }
        self.plan.has_slices()
    }

    fn note_starved(&mut self) {
        let ahead_max = self.plan.rule.ahead_max;
        let all_in_flight = self.running_sequences().all(|sequence| sequence.n_missing(ahead_max) == 0);
        if self.running.len() > 0 && all_in_flight {
            self.counters.starved += u64::from(self.in_flight.note_starved());
        }
    }

    /// Gives each running sequence tokens and blocks for its slice of this step.
    fn plan_running(&mut self) {
        self.tenants.begin_step();
        let n_turns = self.plan.give_turns(self.running.order(), &self.sequences, &self.pools);
        let n_drafts = self.plan.give_drafts(self.running.order(), &self.sequences, &self.config);
        let n_decoded = n_turns + n_drafts;
        let n_left = self.config.batch_tokens_max - n_decoded;
        let mut for_chunks = self.chunk_tokens_in_time(n_left);
        self.plan.is_short_of_time = for_chunks < n_left;
        self.divide_prompt_tokens(for_chunks);
        self.plan.fill_budget(&self.config, n_decoded + for_chunks, n_drafts);
        let n_preemptions = self.counters.preemptions;
        let mut at = 0;
        while at < self.running.len() {
            for_chunks -= self.plan_slice(at, for_chunks);
            at += 1;
        }
        self.plan.left.short |= self.counters.preemptions > n_preemptions;
    }

    /// How many of `n_left` tokens chunks may have, so that the step keeps the pace of the sequences that decode.
    fn chunk_tokens_in_time(&self, n_left: u32) -> u32 {
        let decoding = self.plan.decoding(self.running.order(), &self.sequences);
        let first_waiting = (!self.waiting.is_empty()).then_some(0);
        let Some(n_context) = decoding.first_chunk.or(first_waiting).filter(|_| decoding.is_paced) else {
            return n_left;
        };
        let all = self.costs.nanos(self.step_of_all(decoding.n_positions));
        let target = self.config.pace.nanos(all, self.steps_per_turn());
        self.costs.rows_within(target, decoding.size, n_context, n_left).max(CHUNKS_MIN.min(n_left))
    }

    /// The size of a step in which all sequences decode, also those that wait, as far as they may run together. If only
    /// the sequences that decode now counted, prompts would have less time the more of them wait.
    fn step_of_all(&self, n_positions: u64) -> StepSize {
        let (n_turns, n_all) = (self.steps_per_turn(), (self.running.len() + self.waiting.len()) as u32);
        let rows = n_all.min(self.config.running_max).div_ceil(n_turns);
        StepSize { rows, pairs: n_positions / u64::from(n_turns) }
    }

    /// Divides `n_tokens` between tenants that have a prompt to compute, or one to begin. A single tenant may have all.
    fn divide_prompt_tokens(&mut self, n_tokens: u32) {
        if !self.tenants.are_many() {
            return self.tenants.set_needs(n_tokens);
        }
        self.tenants.set_needs(0);
        let ahead_max = self.plan.rule.ahead_max;
        for &idx in self.running.order() {
            let sequence = &self.sequences[idx];
            if sequence.is_chunk() {
                self.tenants.add_need(sequence.tenant, sequence.chunk_tokens(ahead_max));
            }
        }
        let slice_max = self.config.slice_max();
        for tenant in self.tenants.indices() {
            let first = self.waiting.of(tenant).next().map_or(0, |idx| self.sequences[idx].n_known());
            self.tenants.add_need(tenant, first.min(slice_max));
        }
        self.tenants.divide(n_tokens);
    }

    /// Plans the slice of the running sequence `at`. Returns how many of the tokens for chunks it has.
    #[inline]
    fn plan_slice(&mut self, at: usize, for_chunks: u32) -> u32 {
        self.drop_drafts_without_blocks(at);
        let sequence = &self.sequences[self.running.order()[at]];
        let (tenant, scores, is_chunk) = (sequence.tenant, sequence.has_rows_to_score(), sequence.is_chunk());
        let n_requested = if is_chunk {
            let n_scores = if scores { self.plan.left.n_scores } else { u32::MAX };
            let n_tokens = for_chunks.min(self.tenants.get(tenant).for_chunks);
            sequence.chunk_tokens(self.plan.rule.ahead_max).min(n_tokens).min(n_scores)
        } else {
            self.plan.slice(at).turn
        };
        // Most decoding sequences have room left in their last block.
        let end = sequence.slice_end(n_requested);
        let has_blocks = !sequence.lacks_blocks(end) || self.take_blocks_or_preempt(at, end);
        let n_planned = if has_blocks { n_requested } else { 0 };
        self.plan.take_tokens(at, n_planned, scores);
        self.plan.left.short |= n_planned < n_requested;
        self.tenants.plan(tenant, n_planned);
        if !is_chunk {
            return 0;
        }
        self.tenants.take_for_chunks(tenant, n_planned);
        n_planned
    }

    /// Drops drafts whose blocks are missing: no sequence is preempted for them.
    #[inline]
    fn drop_drafts_without_blocks(&mut self, at: usize) {
        let SlicePlan { turn, n_drafts, .. } = self.plan.slice(at);
        if n_drafts > 0 {
            let sequence = &self.sequences[self.running.order()[at]];
            if !self.pools.has_blocks(sequence, sequence.slice_end(turn), n_drafts) {
                self.plan.drop_drafts(at);
            }
        }
    }

    /// Gives the running sequence `at` blocks of each group up to position `end`, and preempts later ones for them.
    /// False if there is no later one, or its own slices in flight will free enough: then it waits.
    fn take_blocks_or_preempt(&mut self, at: usize, end: u32) -> bool {
        let (idx, n_drafts) = (self.running.order()[at], self.plan.slice(at).n_drafts);
        while !self.pools.has_blocks(&self.sequences[idx], end, n_drafts) {
            let is_last = at + 1 == self.running.len();
            if is_last || self.pools.will_have_blocks(&self.sequences[idx], end, n_drafts) {
                return false;
            }
            self.preempt(self.running.len() - 1);
        }
        self.take_blocks(idx, end, n_drafts);
        true
    }

    fn take_blocks(&mut self, idx: SequenceIdx, end: u32, n_drafts: u32) {
        let sequence = &mut self.sequences[idx];
        self.pools.take(sequence, end, n_drafts, self.running.len(), &mut self.counters);
    }

    /// Preempts a running sequence: it releases its blocks and will begin again from its log. Later steps may write the
    /// blocks at once: ranks run steps in order. They forget the sequence, so that they never hold more than may run;
    /// its next start brings the log back.
    fn preempt(&mut self, at: usize) {
        let idx = self.running.remove_at(at);
        let sequence = &mut self.sequences[idx];
        self.pools.release(sequence);
        sequence.rewind();
        let (id, tenant) = (sequence.id, sequence.tenant);
        self.in_flight.end(id);
        self.enqueue(idx);
        self.tenants.unplan(tenant, self.plan.remove(at));
        self.tenants.remove_running(tenant);
        self.counters.preemptions += 1;
    }

    /// Starts waiting sequences, in their order, while there is room. The first that does not fit holds up the rest, so
    /// that a long prompt is not overtaken for ever.
    fn admit(&mut self, now: Micros, step: &mut Step) {
        if self.waiting.is_empty() {
            return;
        }
        let mut promised = self.promised();
        let mut beside_suspect = self.sequences.n_suspects() > 0 && self.running_sequences().any(Sequence::is_suspect);
        while self.may_admit() {
            let tenants = self.tenants.waiting_in_order();
            let next = self.waiting.first_to_run(tenants, &self.sequences, now, beside_suspect);
            let Some(idx) = next else { return };
            let n_hits = self.pools.n_prefix_hits(&mut self.sequences[idx]);
            let awaited = awaited_prefix(idx, n_hits, &self.running, &mut self.sequences, &self.pools);
            if awaited.is_some() {
                self.sequences[idx].awaited = awaited.map(Awaited::Prefix);
                self.counters.prefixes_awaited += 1;
                continue;
            }
            if self.awaits_fetch(idx, n_hits, now, &promised) {
                continue;
            }
            let sequence = &self.sequences[idx];
            if self.config.keeps_nothing() && sequence.n_known() > self.plan.left.n_tokens {
                return;
            }
            let (scores, n_bytes) = (sequence.has_rows_to_score(), sequence.request.frame_bytes_max());
            if n_bytes > self.plan.left.start_bytes && !step.starts.is_empty() {
                return;
            }
            let is_room = !self.plan.left.short && self.has_room(idx, n_hits, &promised);
            if (scores && self.plan.left.n_scores == 0)
                || !(is_room || self.preempt_above_share(idx, n_hits, &mut promised))
            {
                return;
            }
            let at = self.start(idx, n_hits, step);
            // A log that has outgrown the limit goes alone.
            self.plan.left.start_bytes = self.plan.left.start_bytes.saturating_sub(n_bytes);
            let end = self.plan_first_slice(at, scores);
            let sequence = &self.sequences[idx];
            beside_suspect |= sequence.is_suspect();
            self.pools.promise(sequence, end, &mut promised);
        }
    }

    /// Whether a waiting sequence that could run now waits for pages of the tier: a fetch of them is in flight, or one
    /// begins, because it should take less time than to compute them. The tier is read once for each time that a
    /// sequence waits.
    fn awaits_fetch(&mut self, idx: SequenceIdx, n_hits: u32, now: Micros, promised: &PromisedBlocks) -> bool {
        let sequence = &mut self.sequences[idx];
        if self.config.tier_pages_max == 0 || sequence.found.is_tier_read || sequence.n_sharable() < n_hits + FETCH_MIN
        {
            return false;
        }
        let (next, n_found) = (sequence.hash(n_hits), self.pools.n_hits_with_tier(sequence));
        if n_found < n_hits + FETCH_MIN || !self.has_room(idx, n_hits, promised) {
            return false;
        }
        let groups = 0..self.pools.n_groups() as u8;
        let in_flight = groups.filter_map(|group| self.pools.tier.fetch_of(&PageKey { group, name: next })).next();
        let (sequence, computed) = (&mut self.sequences[idx], n_hits * BLOCK_TOKENS..n_found * BLOCK_TOKENS);
        if let Some(fetch) = in_flight {
            sequence.found.await_tier(computed.start);
            sequence.awaited = Some(Awaited::Fetch(fetch));
            return true;
        }
        if !self.pools.fits_fetch(sequence, n_found, promised) {
            return false;
        }
        sequence.found.is_tier_read = true;
        sequence.found.n_in_tier = n_found;
        // A fetch has half of the time that computing takes: one that fails has not doubled the wait.
        let nanos = match self.config.fetch_micros {
            Some(_) => 0,
            None => prefill_nanos(&self.costs, computed.clone(), self.config.slice_max()) / 2,
        };
        if !self.pools.tier.is_worth(self.pools.n_pages_lacking(sequence, n_found), nanos) {
            self.counters.fetches_refused += 1;
            return false;
        }
        let wait = match self.config.fetch_micros {
            Some(micros) => Micros(micros),
            None if nanos == 0 => FETCH_WAIT_FIRST,
            None => Micros((nanos / 1000).max(FETCH_WAIT_MIN.0)),
        };
        let times = (now, Micros(now.0.saturating_add(wait.0)));
        let fetch = self.pools.begin_fetch(sequence, n_found, times, &mut self.counters);
        sequence.found.await_tier(computed.start);
        sequence.awaited = Some(Awaited::Fetch(fetch));
        self.counters.fetches += 1;
        true
    }

    fn cancel_late_fetches(&mut self, now: Micros) {
        while let Some(fetch) = self.pools.cancel_late_fetch(now) {
            self.counters.fetches_late += 1;
            self.end_wait_for(fetch.id);
        }
    }

    /// Whether a sequence might be admitted: into a free slot, or into that of a tenant above its share.
    fn may_admit(&self) -> bool {
        let left = &self.plan.left;
        left.n_tokens > 0 && ((!left.short && self.running.has_free_slot()) || self.tenants.are_many())
    }

    fn has_room(&self, idx: SequenceIdx, n_hits: u32, promised: &PromisedBlocks) -> bool {
        self.running.has_free_slot() && self.pools.fits(&self.sequences[idx], n_hits, promised)
    }

    /// What running sequences will take, as far as they are planned by now.
    fn promised(&self) -> PromisedBlocks {
        let planned = self.running_sequences().zip(self.plan.slices());
        self.pools.promised(planned.map(|(sequence, slice)| (sequence, sequence.slice_end(slice.n_tokens))))
    }

    /// Makes room for the first waiting sequence by preempting those of the tenant furthest above its share, as long as
    /// that keeps as much as the other then has. False: it has to wait for its turn.
    fn preempt_above_share(&mut self, idx: SequenceIdx, n_hits: u32, promised: &mut PromisedBlocks) -> bool {
        let tenant = self.sequences[idx].tenant;
        let mut above_share = self.tenants.above_share(tenant);
        let is_behind = above_share.is_some();
        while is_behind && !self.has_room(idx, n_hits, promised) {
            let newest = above_share.and_then(|tenant| self.running.newest_of(tenant, &self.sequences));
            let Some(newest) = newest else { return false };
            self.preempt(newest);
            *promised = self.promised();
            above_share = self.tenants.above_share(tenant);
        }
        is_behind
    }

    /// A waiting sequence begins to run behind `n_hits` blocks that others have computed. Returns its place.
    fn start(&mut self, idx: SequenceIdx, n_hits: u32, step: &mut Step) -> usize {
        let generation = self.sequences.next_generation();
        let sequence = &mut self.sequences[idx];
        // Reported once, as look-ups are counted: a preempted sequence finds its own blocks again.
        if !sequence.was_admitted() {
            sequence.found.reuse = self.pools.explain(sequence, n_hits);
        }
        self.waiting.remove(sequence);
        self.tenants.start_running(sequence.tenant, sequence.n_known());
        sequence.reserve();
        self.pools.share_prefix(sequence, n_hits);
        if sequence.start(generation, n_hits, &self.config) {
            self.counters.prefix_hit_tokens += u64::from(sequence.found.n_cached);
        }
        self.counters.admissions += 1;
        step.starts.push(types::Request { deadline: None, ..(*sequence.request).clone() });
        self.in_flight.start(sequence.id);
        let at = self.running.insert(idx, &self.sequences);
        self.plan.insert(at);
        self.counters.running_peak = self.counters.running_peak.max(self.running.len() as u32);
        at
    }

    /// Gives the sequence that has just started at this place what is left for its slice. Returns the slice's end.
    fn plan_first_slice(&mut self, at: usize, scores: bool) -> u32 {
        let idx = self.running.order()[at];
        let sequence = &self.sequences[idx];
        let left = self.plan.left;
        let n_max = if scores { left.n_tokens.min(left.n_scores) } else { left.n_tokens };
        let n_planned = sequence.chunk_tokens(self.plan.rule.ahead_max).min(n_max);
        let end = sequence.slice_end(n_planned);
        self.plan.take_tokens(at, n_planned, scores);
        self.tenants.plan(sequence.tenant, n_planned);
        self.take_blocks(idx, end, 0);
        end
    }

    /// Gives tokens that were kept for a tenant and not used to the chunks of others, as far as blocks are free.
    fn spread_unused_tokens(&mut self) {
        for at in 0..self.running.len() {
            let idx = self.running.order()[at];
            let sequence = &self.sequences[idx];
            let left = self.plan.left;
            if left.n_tokens == 0 || left.short || !sequence.is_chunk() || sequence.has_rows_to_score() {
                continue;
            }
            let n_planned = self.plan.slice(at).n_tokens;
            let n_more = (sequence.chunk_tokens(self.plan.rule.ahead_max) - n_planned).min(left.n_tokens);
            let end = sequence.slice_end(n_planned + n_more);
            if self.pools.has_blocks(sequence, end, 0) {
                self.tenants.plan(sequence.tenant, n_more);
                self.plan.take_tokens(at, n_more, false);
                self.take_blocks(idx, end, 0);
            }
        }
    }

    /// Writes the planned slices into the step: decoding sequences first, then chunks.
    fn write(&mut self, step: &mut Step) {
        let mut slices = self.in_flight.begin_step(step);
        let mut is_chunk_planned = false;
        for (&idx, slice) in self.running.order().iter().zip(self.plan.slices_mut()) {
            if slice.n_tokens == 0 {
                continue;
            }
            let sequence = &mut self.sequences[idx];
            if sequence.is_chunk() {
                is_chunk_planned = true;
            } else {
                slices.push(write_slice(idx, sequence, core::mem::take(slice), step, &mut self.counters));
            }
        }
        if is_chunk_planned {
            // A sequence that was written has nothing planned any more.
            let planned = self.running.order().iter().zip(self.plan.slices_mut());
            for (&idx, slice) in planned.filter(|(_, slice)| slice.n_tokens > 0) {
                let sequence = &mut self.sequences[idx];
                slices.push(write_slice(idx, sequence, core::mem::take(slice), step, &mut self.counters));
            }
        }
        let mut size = StepSize::default();
        slices.iter().for_each(|slice| size.add(slice.range.start, slice.range.end - slice.range.start));
        self.counters.steps += 1;
        self.counters.slices += slices.len() as u64;
        if is_chunk_planned {
            self.count_cut();
        }
        let predicted = Micros(self.costs.nanos(size) / 1000);
        let n_removals = self.pools.tier.take_work(&mut step.tier);
        self.in_flight.push(step, StepInFlight { id: step.id, size, predicted, slices, n_removals });
        self.tenants.charge();
    }

    /// Counts what limited the chunks of this step, if anything did.
    fn count_cut(&mut self) {
        let (left, counters) = (self.plan.left, &mut self.counters);
        match left.n_tokens {
            _ if left.short => counters.cut_by_blocks += 1,
            0 if self.plan.is_short_of_time => counters.cut_by_time += 1,
            0 => counters.cut_by_tokens += 1,
            _ => {}
        }
    }
}

/// Returns the expected time to compute these positions of one sequence; zero if it is not known.
fn prefill_nanos(costs: &StepCosts, positions: Range<u32>, slice_max: u32) -> u64 {
    let chunk = |start: u32| {
        let mut size = StepSize::default();
        size.add(start, slice_max.min(positions.end - start));
        costs.nanos(size)
    };
    positions.clone().step_by(slice_max as usize).map(chunk).fold(0, u64::saturating_add)
}

fn write_slice(
    idx: SequenceIdx,
    sequence: &mut Sequence,
    slice: SlicePlan,
    step: &mut Step,
    counters: &mut Counters,
) -> PlannedSlice {
    let end = sequence.slice_end(slice.n_tokens);
    let draws_max = sequence.draws_max_at(end, slice.n_drafts);
    let want = sequence.want(draws_max > 0);
    let n_draft = draws_max.saturating_sub(1) as u16;
    counters.drafts += u64::from(n_draft);
    counters.slices_ahead += u64::from(end > sequence.n_known());
    counters.tokens_computed += u64::from(slice.n_tokens);
    sequence.send_entries(&mut step.blocks);
    let range = sequence.add_slice(step.id.0, slice.n_tokens, draws_max);
    step.slices.push(Slice { n_draft, ..Slice::new(sequence.id, range.clone(), want) });
    let may_be_late = sequence.request.grammar.is_some();
    PlannedSlice { sequence: idx, generation: sequence.progress().generation, range, draws_max, may_be_late }
}
