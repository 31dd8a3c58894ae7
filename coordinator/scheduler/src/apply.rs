//! Applies the answer to the oldest step in flight.

use crate::StaleAnswer;
use crate::in_flight::PlannedSlice;
use crate::scheduler::{RequestOutput, Scheduler};
use crate::sequence::{Sequence, SequenceIdx, SequenceState};
use alloc::vec::Vec;
use core::ops::Range;
use types::{BLOCK_TOKENS, Failure, Finish, SliceDone, StepDone, Token, TokenOut};

impl Scheduler {
    /// Answers come in the order in which steps were planned; any other answer is refused and changes nothing.
    pub fn apply(&mut self, done: &StepDone, out: &mut Vec<RequestOutput>) -> Result<(), StaleAnswer> {
        self.check_is_oldest(done)?;
        let Some(step) = self.in_flight.pop_oldest() else { return Ok(()) };
        for (slice, (planned, slice_done)) in step.slices.iter().zip(&done.slices).enumerate() {
            self.apply_slice(planned, slice, slice_done, out);
        }
        self.in_flight.recycle(step);
        self.is_starved = false;
        Ok(())
    }

    fn check_is_oldest(&mut self, done: &StepDone) -> Result<(), StaleAnswer> {
        if done.epoch != self.epoch {
            return Err(StaleAnswer::Epoch { expected: self.epoch, got: done.epoch });
        }
        let Some(step) = self.in_flight.oldest().filter(|step| step.id == done.id) else {
            return Err(StaleAnswer::Step { expected: self.in_flight.oldest().map(|step| step.id), got: done.id });
        };
        if step.slices.len() != done.slices.len() {
            return Err(StaleAnswer::SliceCount { expected: step.slices.len(), got: done.slices.len() });
        }
        for (slice, (planned, slice_done)) in step.slices.iter().zip(&done.slices).enumerate() {
            let (max, got) = (planned.draws_max as usize, slice_done.tokens.len());
            if got > max && slice_done.failed.is_none() {
                return Err(StaleAnswer::TokenCount { slice, max, got });
            }
        }
        Ok(())
    }

    /// Refuses an answer to the oldest step that lacks a token of a request without a grammar. `apply` takes such an
    /// answer and plans the draw again, for ever if need be: ranks have only masks to wait for.
    pub fn check_all_drawn(&self, done: &StepDone) -> Result<(), StaleAnswer> {
        let oldest = self.in_flight.oldest().filter(|step| (step.id, self.epoch) == (done.id, done.epoch));
        let planned = oldest.map_or(&[][..], |step| &step.slices);
        let lacks = |(planned, done): (&PlannedSlice, &SliceDone)| {
            !planned.may_be_late && done.failed.is_none() && done.tokens.is_empty() && planned.draws_max > 0
        };
        match planned.iter().zip(&done.slices).position(lacks) {
            Some(slice) => Err(StaleAnswer::NoToken { slice }),
            None => Ok(()),
        }
    }

    fn apply_slice(&mut self, planned: &PlannedSlice, slice: usize, done: &SliceDone, out: &mut Vec<RequestOutput>) {
        let idx = planned.sequence;
        let Some(sequence) = self.sequences.of_generation(idx, planned.generation) else {
            self.counters.tokens_redrawn += done.tokens.len() as u64;
            return;
        };
        sequence.n_slices_in_flight -= 1;
        if sequence.state == SequenceState::Ending {
            self.counters.tokens_discarded += done.tokens.len() as u64;
            self.forget_if_landed(idx);
            return;
        }
        if sequence.n_stale > 0 {
            sequence.n_stale -= 1;
            self.counters.tokens_discarded += done.tokens.len() as u64;
            return;
        }
        let n_drafts = planned.draws_max.saturating_sub(1);
        let result = SliceResult { position: sequence.n_output(), slice, n_tokens: 0, scored_position: 0, n_drafts };
        if let Some(failure) = done.failed {
            if failure == Failure::Computation {
                self.forget_names(idx);
            }
            return self.push_output(idx, result, Some(failure.into()), out);
        }
        let (n_tokens, finish) = self.append_drawn(idx, planned, &done.tokens);
        self.note_guesses(idx, done.tokens.len() as u32, done.n_hit.into(), done.n_guess.into());
        self.name_and_release_blocks(idx, planned.range.start);
        if n_tokens > 0 || finish.is_some() || !done.scored.is_empty() {
            let result = SliceResult { n_tokens, scored_position: planned.range.start + 1, ..result };
            self.push_output(idx, result, finish, out);
        }
    }

    /// Appends the drawn tokens to the log. Returns how many, and whether the log ends with them.
    fn append_drawn(&mut self, idx: SequenceIdx, planned: &PlannedSlice, drawn: &[TokenOut]) -> (u32, Option<Finish>) {
        let sequence = &mut self.sequences[idx];
        let (mut n_tokens, mut finish) = (0, None);
        for TokenOut { token, .. } in drawn {
            sequence.append(*token);
            n_tokens += 1;
            finish = finish_after(sequence, *token);
            if finish.is_some() {
                break;
            }
        }
        sequence.apply_returned_slice(planned.range.end, planned.draws_max, n_tokens);
        if n_tokens > 0 {
            self.n_suspects -= u32::from(sequence.is_suspect());
            sequence.suspicion = 0;
        } else if sequence.is_pooled() {
            finish = Some(Finish::Stop);
        }
        self.counters.tokens_drawn += u64::from(n_tokens);
        self.counters.drafts_accepted += u64::from(n_tokens.saturating_sub(1));
        self.counters.draws_late += u64::from(n_tokens == 0 && planned.draws_max > 0);
        (n_tokens, finish)
    }

    /// Names the blocks that became full for good since position `from`, and releases those behind windows.
    fn name_and_release_blocks(&mut self, idx: SequenceIdx, from: u32) {
        let n_full = self.sequences[idx].n_sure / BLOCK_TOKENS;
        let may_name = self.config.prefix_cache && !self.sequences[idx].has_private_blocks();
        if from / BLOCK_TOKENS < n_full && may_name {
            self.name_blocks(idx, from / BLOCK_TOKENS..n_full);
        }
        if self.has_windows {
            self.release_passed_blocks(idx, n_full);
            self.drop_temporary_states(idx, n_full);
        }
    }

    fn name_blocks(&mut self, idx: SequenceIdx, full: Range<u32>) {
        let sequence = &mut self.sequences[idx];
        for i in full.clone() {
            let name = sequence.hash(i);
            let kept_whole = self.pools.iter_mut().zip(&sequence.tables).filter(|(pool, _)| !pool.group.is_state());
            for (pool, table) in kept_whole {
                pool.name(table.blocks[i as usize], name);
            }
        }
        self.name_states(idx, full);
    }

    /// Takes the names from a failed request's blocks, shared ones too: their content may be the cause, and no other
    /// request is to build on it. A sound prompt is computed again once.
    fn forget_names(&mut self, idx: SequenceIdx) {
        if !self.config.prefix_cache || self.sequences[idx].has_private_blocks() {
            return;
        }
        let sequence = &mut self.sequences[idx];
        for i in 0..sequence.n_sure / BLOCK_TOKENS {
            let name = sequence.hash(i);
            self.pools.iter_mut().for_each(|pool| pool.forget(&name));
        }
    }

    /// Releases, of the first `n_full` blocks, those behind the windows of all positions that may yet be planned.
    /// Slices in flight may still read them: later steps may write them at once, because each rank runs steps in order.
    /// They are named by now.
    fn release_passed_blocks(&mut self, idx: SequenceIdx, n_full: u32) {
        let sequence = &mut self.sequences[idx];
        let position = sequence.earliest_start();
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            self.counters.blocks_passed += u64::from(pool.release_passed(table, position, n_full));
        }
    }

    fn push_output(
        &mut self,
        idx: SequenceIdx,
        result: SliceResult,
        finish: Option<Finish>,
        out: &mut Vec<RequestOutput>,
    ) {
        let sequence = &self.sequences[idx];
        let SliceResult { position, slice, n_tokens, scored_position, n_drafts } = result;
        let drafts_accepted = n_tokens.saturating_sub(1);
        let drafts_rejected = n_drafts - drafts_accepted;
        let (id, n_cached, reuse) = (sequence.id, sequence.n_cached, sequence.reuse);
        out.push(RequestOutput {
            id,
            position,
            slice,
            n_tokens,
            scored_position,
            n_cached,
            reuse,
            drafts_accepted,
            drafts_rejected,
            finish,
        });
        if finish.is_some() {
            self.end(idx);
        }
    }
}

/// The result of a slice, as it goes into an `Output`.
#[derive(Clone, Copy)]
struct SliceResult {
    position: u32,
    slice: usize,
    n_tokens: u32,
    scored_position: u32,
    n_drafts: u32,
}

/// Whether the log ends with the token just appended.
fn finish_after(sequence: &Sequence, token: Token) -> Option<Finish> {
    if sequence.stops_at(token) {
        return Some(Finish::Stop);
    }
    let end = if sequence.is_length_limited() { Finish::Outgrown } else { Finish::Length };
    (sequence.n_known() >= sequence.length_max).then_some(end)
}
