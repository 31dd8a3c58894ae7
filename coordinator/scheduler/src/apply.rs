//! Applies the answer to the oldest step in flight.

use crate::Stale;
use crate::in_flight::Planned;
use crate::scheduler::{Output, Scheduler};
use crate::sequence::{Sequence, SequenceIdx, SequenceState};
use alloc::vec::Vec;
use types::{BLOCK_TOKENS, Finish, SliceDone, StepDone, Token};

impl Scheduler {
    /// Answers come in the order in which steps were planned; any other answer is refused and changes nothing.
    pub fn apply(&mut self, done: &StepDone, out: &mut Vec<Output>) -> Result<(), Stale> {
        self.matches_oldest(done)?;
        let Some(step) = self.in_flight.pop_oldest() else { return Ok(()) };
        for (slice, (planned, slice_done)) in step.slices.iter().zip(&done.slices).enumerate() {
            self.apply_slice(planned, slice, slice_done, out);
        }
        self.in_flight.recycle(step);
        self.is_starved = false;
        Ok(())
    }

    fn matches_oldest(&mut self, done: &StepDone) -> Result<(), Stale> {
        if done.epoch != self.epoch {
            return Err(Stale::Epoch { expected: self.epoch, got: done.epoch });
        }
        let Some(step) = self.in_flight.oldest().filter(|step| step.id == done.id) else {
            return Err(Stale::Step { expected: self.in_flight.oldest().map(|step| step.id), got: done.id });
        };
        if step.slices.len() != done.slices.len() {
            return Err(Stale::SliceCount { expected: step.slices.len(), got: done.slices.len() });
        }
        for (slice, (planned, slice_done)) in step.slices.iter().zip(&done.slices).enumerate() {
            let (expected, got) = (usize::from(planned.draws), slice_done.tokens.len());
            if expected != got && !slice_done.failed {
                return Err(Stale::TokenCount { slice, expected, got });
            }
        }
        Ok(())
    }

    fn apply_slice(&mut self, planned: &Planned, slice: usize, done: &SliceDone, out: &mut Vec<Output>) {
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
        if done.failed {
            let position = sequence.n_output();
            return self.report(
                idx,
                Said { position, slice, n_tokens: 0, scored_position: 0 },
                Some(Finish::Failed),
                out,
            );
        }
        sequence.n_applied = planned.range.end;
        let (position, is_pooled) = (sequence.n_output(), sequence.is_pooled());
        if planned.range.start / BLOCK_TOKENS < planned.range.end / BLOCK_TOKENS && self.config.prefix_cache {
            self.name_full_blocks(idx, planned.range.start);
        }
        if self.has_windows {
            self.release_passed_blocks(idx);
        }
        let said = Said { position, slice, n_tokens: 0, scored_position: planned.range.start + 1 };
        if let Some(drawn) = done.tokens.first() {
            self.append(idx, said, drawn.token, out);
        } else if is_pooled {
            self.report(idx, said, Some(Finish::Stop), out);
        } else if !done.scored.is_empty() {
            self.report(idx, said, None, out);
        }
    }

    /// Names the blocks that became full since position `from`.
    fn name_full_blocks(&mut self, idx: SequenceIdx, from: u32) {
        let sequence = &mut self.sequences[idx];
        for i in from / BLOCK_TOKENS..sequence.n_applied / BLOCK_TOKENS {
            let name = sequence.hash(i);
            for (pool, table) in self.pools.iter_mut().zip(&sequence.tables) {
                pool.name(table.blocks[i as usize], name);
            }
        }
    }

    /// Releases the blocks behind the windows of all positions that are not planned yet. Slices in flight may still
    /// read them: later steps may write them at once, because each rank runs steps in order. They are computed and
    /// named by now.
    fn release_passed_blocks(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        let (position, n_full) = (sequence.n_computed, sequence.n_applied / BLOCK_TOKENS);
        for (pool, table) in self.pools.iter_mut().zip(&mut sequence.tables) {
            self.counters.blocks_passed += u64::from(pool.release_passed(table, position, n_full));
        }
    }

    fn append(&mut self, idx: SequenceIdx, said: Said, token: Token, out: &mut Vec<Output>) {
        let sequence = &mut self.sequences[idx];
        self.n_suspects -= u32::from(sequence.is_suspect());
        sequence.suspicion = 0;
        sequence.append(token);
        let finish = finish_after(sequence, token);
        self.counters.tokens_drawn += 1;
        self.report(idx, Said { n_tokens: 1, ..said }, finish, out);
    }

    fn report(&mut self, idx: SequenceIdx, said: Said, finish: Option<Finish>, out: &mut Vec<Output>) {
        let sequence = &self.sequences[idx];
        let Said { position, slice, n_tokens, scored_position } = said;
        let (id, n_cached) = (sequence.id, sequence.n_cached);
        out.push(Output { id, position, slice, n_tokens, scored_position, n_cached, finish });
        if finish.is_some() {
            self.end(idx);
        }
    }
}

/// The result of a slice, as it goes into an `Output`.
#[derive(Clone, Copy)]
struct Said {
    position: u32,
    slice: usize,
    n_tokens: u32,
    scored_position: u32,
}

/// Whether the log ends with the token just appended.
fn finish_after(sequence: &Sequence, token: Token) -> Option<Finish> {
    if sequence.stops_at(token) {
        return Some(Finish::Stop);
    }
    let end = if sequence.is_narrowed() { Finish::Outgrown } else { Finish::Length };
    (sequence.n_known() >= sequence.length_max).then_some(end)
}
