//! Applies the answer to the oldest step in flight.

use super::Scheduler;
use crate::costs::StepTiming;
use crate::drafting::{DecodeStep, DraftPolicy};
use crate::in_flight::PlannedSlice;
use crate::output::RequestOutput;
use crate::refusal::StaleAnswer;
use crate::sequence::{Sequence, SequenceState};
use crate::slab::SequenceIdx;
use alloc::vec::Vec;
use types::{Failure, Finish, Goal, Micros, SliceDone, StepDone, Token, TokenOut};

impl Scheduler {
    /// Answers come in the order in which steps were planned; any other answer is refused and changes nothing. `took`
    /// is the step's duration; zero if that is not known.
    pub fn apply(&mut self, done: &StepDone, took: Micros, out: &mut Vec<RequestOutput>) -> Result<(), StaleAnswer> {
        self.in_flight.check_is_oldest(done)?;
        let Some(step) = self.in_flight.pop_oldest() else { return Ok(()) };
        self.pools.tier.confirm_removals(step.n_removals);
        self.costs.learn(step.size, took);
        let is_known = took.0 > 0 && step.predicted.0 > 0;
        self.timing = is_known.then_some(StepTiming { predicted: step.predicted, measured: took });
        if let Some(timing) = self.timing {
            self.counters.steps_predicted += 1;
            self.counters.steps_as_predicted += u64::from(timing.is_close());
        }
        for (slice, (planned, slice_done)) in step.slices.iter().zip(&done.slices).enumerate() {
            self.apply_slice(planned, slice, slice_done, out);
        }
        self.in_flight.recycle(step);
        Ok(())
    }

    /// Refuses an answer to the oldest step that lacks a token of a request without a grammar. `apply` takes such an
    /// answer and plans the draw again, for ever if need be: ranks have only masks to wait for.
    pub fn check_all_drawn(&self, done: &StepDone) -> Result<(), StaleAnswer> {
        self.in_flight.check_all_drawn(done)
    }

    fn apply_slice(&mut self, planned: &PlannedSlice, slice: usize, done: &SliceDone, out: &mut Vec<RequestOutput>) {
        let idx = planned.sequence;
        let Some(sequence) = self.sequences.of_generation(idx, planned.generation) else {
            self.counters.tokens_redrawn += done.tokens.len() as u64;
            return;
        };
        sequence.land_slice();
        if sequence.state() == SequenceState::Ending {
            self.counters.tokens_discarded += done.tokens.len() as u64;
            return self.forget_if_landed(idx);
        }
        if sequence.drops_slice() {
            self.counters.tokens_discarded += done.tokens.len() as u64;
            return;
        }
        let n_drafts = planned.draws_max.saturating_sub(1);
        let mut output = RequestOutput { slice, drafts_rejected: n_drafts, ..RequestOutput::of(sequence) };
        if let Some(failure) = done.failed {
            if failure == Failure::Computation {
                self.pools.forget_names(sequence);
            }
            output.finish = Some(failure.into());
            return self.push_output(idx, output, out);
        }
        (output.n_tokens, output.finish) = self.append_drawn(idx, planned, &done.tokens);
        self.note_guesses(idx, done);
        self.pools.settle(&mut self.sequences[idx], planned.range.start, &mut self.counters);
        if output.n_tokens > 0 || output.finish.is_some() || !done.scored.is_empty() {
            output.scored_position = planned.range.start + 1;
            output.drafts_accepted = output.n_tokens.saturating_sub(1);
            output.drafts_rejected -= output.drafts_accepted;
            self.push_output(idx, output, out);
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
            self.sequences.clear_suspicion(idx);
        } else if sequence.is_pooled() {
            finish = Some(Finish::Stop);
        }
        self.counters.tokens_drawn += u64::from(n_tokens);
        self.counters.drafts_accepted += u64::from(n_tokens.saturating_sub(1));
        self.counters.draws_late += u64::from(n_tokens == 0 && planned.draws_max > 0);
        (n_tokens, finish)
    }

    /// Takes the guesses of an answer: how many hit, and how many there are for the next slice.
    fn note_guesses(&mut self, idx: SequenceIdx, done: &SliceDone) {
        let policy = self.config.drafting;
        if policy == DraftPolicy::Off {
            return;
        }
        let n_rows = (self.running.len() as u32).div_ceil(self.steps_per_turn());
        let sequence = &mut self.sequences[idx];
        // Rows of prompts are drawn one by one.
        let may_have_drafts = sequence.request.goal == Goal::Generate;
        sequence.guesses.note_drawn(done.tokens.len() as u32, done.n_hit.into());
        let n_guess = if may_have_drafts { done.n_guess.into() } else { 0 };
        let step = DecodeStep { n_rows, n_context: sequence.n_known() };
        sequence.guesses.replace(n_guess, policy, step, &self.costs);
    }

    fn push_output(&mut self, idx: SequenceIdx, output: RequestOutput, out: &mut Vec<RequestOutput>) {
        let has_ended = output.finish.is_some();
        out.push(output);
        if has_ended {
            self.end(idx);
        }
    }
}

/// Whether the log ends with the token just appended.
fn finish_after(sequence: &Sequence, token: Token) -> Option<Finish> {
    if sequence.stops_at(token) {
        return Some(Finish::Stop);
    }
    let end = if sequence.is_length_limited() { Finish::Outgrown } else { Finish::Length };
    (sequence.n_known() >= sequence.length_max()).then_some(end)
}
