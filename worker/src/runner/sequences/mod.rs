//! A rank's state of each request, and how a step changes it: the token log, the block tables, the number of computed
//! positions. Rejects a step that contradicts this state. Has no knowledge of models or devices.
//!
//! All ranks of a replica lay out the same rows for a step, though only some of them have the drawn tokens. A log
//! therefore grows by position: a rank without the token writes `UNKNOWN` there, and so do all ranks if no token could
//! be drawn.

use crate::runner::guesses::{GuessRequest, Guesser, LearnedDraftCost, RecentAnswers};
use crate::runner::masks::{GrammarMasks, MaskStatus};
use backend::{Batch, Draw, DrawError, DrawMask, Pass, ScoreRequest};
use freed_blocks::FreedBlocks;
use pending::{PendingDraw, PendingDraws, UNKNOWN, append_rest, read_message};
use sequence::RankSequence;
use std::collections::{HashMap, VecDeque};
use types::cache::blocks_for;
use types::{BlockId, Request, RequestId, Slice, SliceDone, Step, StepId, Token, TokenOut, Want};

mod freed_blocks;
mod limits;
mod pending;
mod pooled;
mod sequence;

pub use limits::{SequenceLimits, StepViolation};
pub use pending::TokenSource;

pub struct RankSequences {
    limits: SequenceLimits,
    tokens: TokenSource,
    /// The sampler's messages that are still due, in the order of steps.
    pending: PendingDraws,
    held: HashMap<RequestId, RankSequence>,
    /// Ended sequences, reused for their memory.
    spare: Vec<RankSequence>,
    recent: RecentAnswers,
    /// The step that last wrote each block of each group, to detect two writers in one step.
    written: Vec<Vec<u64>>,
    /// The number of steps begun, which stamps the present one.
    n_begun: u64,
    /// The freed blocks, if blocks are cleared.
    freed: Option<FreedBlocks>,
    /// The second part of the message on draws, while a step is finished.
    message_rest: Vec<Option<Token>>,
    /// The slices that have drawn, while a step is finished.
    drew: Vec<usize>,
}

impl RankSequences {
    pub fn new(mut limits: SequenceLimits, tokens: TokenSource) -> RankSequences {
        if tokens != TokenSource::Draws {
            // Other ranks receive the guesses.
            limits.guesses.switch_off();
        }
        let n_pending = match tokens {
            TokenSource::Receives { late_max } => late_max + 1,
            TokenSource::Draws | TokenSource::NeverKnows => 0,
        };
        let draws = VecDeque::with_capacity(n_pending * limits.outputs_max());
        RankSequences {
            tokens,
            pending: PendingDraws { steps: VecDeque::with_capacity(n_pending), draws },
            held: HashMap::with_capacity(limits.running_max),
            spare: Vec::with_capacity(limits.running_max),
            recent: RecentAnswers::default(),
            written: limits.n_blocks.iter().map(|n_blocks| vec![0; *n_blocks as usize]).collect(),
            n_begun: 0,
            freed: limits.zero_kv.then(|| FreedBlocks::new(&limits)),
            message_rest: Vec::with_capacity(limits.message_words_max()),
            drew: Vec::with_capacity(limits.running_max),
            limits,
        }
    }

    pub fn len(&self) -> usize {
        self.held.len()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Creates a batch with room for any step, so that building one allocates nothing.
    pub fn new_batch(&self) -> Batch {
        let SequenceLimits { rows_max, running_max, context, .. } = self.limits;
        let mut batch = Batch::default();
        batch.tokens.reserve(rows_max);
        batch.positions.reserve(rows_max);
        batch.slices.reserve(running_max);
        batch.outputs.reserve(self.limits.outputs_max());
        batch.drawn.reserve(running_max);
        let n_tables = self.limits.groups.len().max(1);
        batch.tables.resize_with(n_tables, Default::default);
        batch.types.reserve(rows_max);
        for table in &mut batch.tables {
            table.blocks.reserve(running_max * blocks_for(context) as usize);
            table.bounds.reserve(running_max + 1);
        }
        batch.clear();
        batch
    }

    /// Applies the ends and starts of a step.
    pub fn begin(&mut self, step: &Step) -> Result<(), StepViolation> {
        self.n_begun += 1;
        step.ends.iter().for_each(|id| self.forget(*id));
        step.starts.iter().try_for_each(|request| self.start(request))
    }

    /// Returns each group's freed blocks, which must be cleared before the step that has begun stores data. None if
    /// blocks are not cleared.
    pub fn uncleared(&mut self) -> Option<&mut [Vec<BlockId>]> {
        self.freed.as_mut().map(FreedBlocks::uncleared)
    }

    /// Frees all sequences.
    pub fn forget_all(&mut self) {
        let ids: Vec<RequestId> = self.held.keys().copied().collect();
        ids.into_iter().for_each(|id| self.forget(id));
    }

    /// Returns the step whose tokens this rank must receive before it can lay out the rows of the begun step. None if
    /// it needs no message; call again after each `receive`.
    pub fn step_to_receive(&self, step: &Step) -> Option<StepId> {
        let TokenSource::Receives { late_max } = self.tokens else { return None };
        let (oldest, _) = self.pending.steps.front()?;
        let needs = |slice: &Slice| self.held.get(&slice.id).is_some_and(|sequence| sequence.needs_pending(slice));
        let must = self.pending.steps.len() > late_max || step.slices.iter().any(needs);
        must.then_some(*oldest)
    }

    /// Takes the tokens drawn in the step that `step_to_receive` named, in the order of its slices, and the guesses
    /// behind them.
    pub fn receive(&mut self, words: &[Option<Token>]) -> Result<(), StepViolation> {
        let Some((step, n_draws)) = self.pending.steps.pop_front() else { return Ok(()) };
        let Some(received) = read_message(words, n_draws) else {
            return Err(StepViolation::NotAsManyTokens { step: step.0, n: words.len(), n_draws });
        };
        let n_vocab = self.limits.n_vocab;
        for (draw, drawn) in self.pending.draws.drain(..n_draws).zip(received) {
            let mut tokens = drawn.first.iter().chain(drawn.more.iter().flatten()).chain(drawn.guess.iter().flatten());
            if let Some(&token) = tokens.find(|token| **token >= n_vocab) {
                return Err(StepViolation::NoSuchToken { id: draw.id, token, n_vocab });
            }
            if let Some(sequence) = self.held.get_mut(&draw.id) {
                sequence.receive(draw, &drawn);
            }
        }
        Ok(())
    }

    /// Applies the slices of a step, and lays out its rows.
    pub fn lay_out(&mut self, step: &Step, batch: &mut Batch) -> Result<(), StepViolation> {
        batch.clear();
        let mut blocks = step.blocks.as_slice();
        for slice in &step.slices {
            self.apply_slice(slice, &mut blocks, batch)?;
        }
        if !blocks.is_empty() {
            return Err(StepViolation::BlocksLeftOver(blocks.len()));
        }
        if self.limits.keeps_nothing() {
            self.lay_out_texts(step, batch);
        }
        Ok(())
    }

    /// Lays out what only encoders have: memory of the pass alone, and the kinds of tokens.
    fn lay_out_texts(&mut self, step: &Step, batch: &mut Batch) {
        batch.lay_out_own_blocks();
        if let (Some(freed), Some(table)) = (&mut self.freed, batch.tables.first()) {
            freed.leave_pass(&table.blocks);
        }
        for slice in &step.slices {
            let Some(sequence) = self.held.get(&slice.id) else { continue };
            batch.types.extend(slice.range.clone().map(|position| sequence.pooled.token_type(position)));
        }
    }

    fn start(&mut self, request: &Request) -> Result<(), StepViolation> {
        let id = request.id;
        let SequenceLimits { n_vocab, context, running_max, .. } = self.limits;
        let n_tokens = u32::try_from(request.n_tokens()).unwrap_or(u32::MAX);
        if n_tokens == 0 {
            return Err(StepViolation::NoTokens(id));
        }
        if n_tokens > context {
            return Err(StepViolation::TooLong { id, end: n_tokens, context });
        }
        let mut tokens = request.prompt.iter().chain(&request.output);
        if let Some(&token) = tokens.find(|token| **token >= n_vocab) {
            return Err(StepViolation::NoSuchToken { id, token, n_vocab });
        }
        self.forget(id);
        if self.held.len() >= running_max {
            return Err(StepViolation::TooManySequences { n: self.held.len() + 1, running_max });
        }
        let mut sequence = self.spare.pop().unwrap_or_default();
        sequence.restart(request, &self.limits, &self.recent, self.n_begun);
        self.held.insert(id, sequence);
        Ok(())
    }

    fn apply_slice(&mut self, slice: &Slice, blocks: &mut &[BlockId], batch: &mut Batch) -> Result<(), StepViolation> {
        let sequence = self.held.get_mut(&slice.id).ok_or(StepViolation::Unknown(slice.id))?;
        sequence.check(slice, &self.limits, self.n_begun)?;
        if sequence.is_recomputed_by(slice) {
            let is_known = self.tokens == TokenSource::Draws && sequence.late != Some(slice.range.end);
            if is_known {
                return Err(StepViolation::NotLate { id: slice.id, position: slice.range.end });
            }
            sequence.rewind(slice.range.start, self.n_begun);
        }
        sequence.settle_by(slice);
        sequence.take_drafts(slice, self.tokens != TokenSource::NeverKnows)?;
        sequence.take_blocks(slice, blocks, &self.limits)?;
        sequence.last_slice = self.n_begun;
        sequence.n_computed = slice.range.end;
        if let Some(freed) = &mut self.freed {
            freed.free_passed(&sequence.tables, &slice.range);
        }
        let n_rows = batch.n_rows() + slice.range.len();
        if n_rows > self.limits.rows_max {
            return Err(StepViolation::TooManyRows { n: n_rows, rows_max: self.limits.rows_max });
        }
        sequence.mark_written(slice, &mut self.written, self.n_begun)?;
        sequence.lay_out(slice, batch);
        let (n, outputs_max) = (batch.outputs.len(), self.limits.outputs_max());
        if n > outputs_max { Err(StepViolation::TooManyOutputs { n, outputs_max }) } else { Ok(()) }
    }

    /// On the sampler: starts the masks for the draws behind the drafts of a step that is laid out.
    pub fn request_draft_masks(&self, step: &Step, masks: &GrammarMasks) {
        for slice in step.slices.iter().filter(|slice| slice.n_draft > 0) {
            if let Some(sequence) = self.held.get(&slice.id).filter(|sequence| sequence.has_grammar) {
                let drafts = slice.first_drawn() as usize..slice.range.end as usize;
                masks.request_draft_masks(slice.id, sequence.n_output_before(slice), &sequence.tokens[drafts]);
            }
        }
    }

    /// Takes the masks of the step's draws that are ready, or that become ready within the time to wait.
    pub fn take_masks(&mut self, step: &Step, masks: &mut GrammarMasks) {
        masks.begin_draws();
        let may_be_late = self.limits.can_recompute();
        for slice in &step.slices {
            let held = self.held.get_mut(&slice.id).filter(|sequence| sequence.has_grammar && sequence.draws(slice));
            let Some(sequence) = held else { continue };
            sequence.is_masked = false;
            if sequence.is_void(slice) || sequence.failed.is_some() {
                continue;
            }
            match masks.find(slice.id, sequence.n_output_before(slice), may_be_late) {
                MaskStatus::Ready => sequence.is_masked = true,
                MaskStatus::Late => {}
                MaskStatus::Failed(failure) => sequence.failed = Some(failure),
            }
        }
    }

    /// Adds the draws of a step's outputs, in the order of `batch.outputs`.
    pub fn collect_draws<'a>(&'a self, step: &Step, masks: &'a GrammarMasks, draws: &mut Vec<Draw<'a>>) {
        draws.clear();
        for slice in &step.slices {
            let Some(sequence) = self.held.get(&slice.id) else { continue };
            for (token, n_top) in sequence.tokens_to_score(slice) {
                let (prompt, output) = (&sequence.tokens[..0], &sequence.tokens[..0]);
                let score = Some(ScoreRequest { token, n_top });
                draws.push(Draw { sampling: &sequence.sampling, prompt, output, score, mask: DrawMask::Open });
            }
            if sequence.draws(slice) {
                let mask = |n_drafts: u32| match sequence.has_grammar {
                    false => DrawMask::Open,
                    true if sequence.is_masked => masks.mask_of(slice.id, n_drafts as usize),
                    true => DrawMask::Late,
                };
                // A row behind drafts counts only if they hold, and then they are part of the log.
                draws.extend((slice.first_drawn()..=slice.range.end).map(|position| {
                    let log = &sequence.tokens[..position as usize];
                    let (prompt, output) = log.split_at(sequence.n_prompt.min(log.len()));
                    let mask = mask(position - slice.first_drawn());
                    Draw { sampling: &sequence.sampling, prompt, output, score: None, mask }
                }));
            }
        }
    }

    /// Returns whether `next` may begin before the draws of `step` are known: it starts no sequence, ends none that
    /// `step` computes, requests only drawn tokens, draws none that needs a mask, and neither step has drafts. If so,
    /// logs count the pending tokens from now on.
    pub fn can_follow(&mut self, step: &Step, next: &Step) -> bool {
        let is_in_step = |id: &RequestId| step.slices.iter().any(|slice| slice.id == *id);
        let has_mask = |slice: &Slice| self.held.get(&slice.id).is_some_and(|sequence| sequence.has_grammar);
        let is_plain = |slice: &Slice| match slice.want {
            Want::Nothing => true,
            Want::Last => !has_mask(slice) && slice.n_draft == 0,
            Want::All { .. } | Want::Pool => false,
        };
        let may = next.starts.is_empty()
            && !next.ends.iter().any(is_in_step)
            && next.slices.iter().all(is_plain)
            && step.slices.iter().all(is_plain);
        if !may {
            return false;
        }
        let drawing = step.slices.iter().filter(|slice| slice.want == Want::Last);
        for (slice, draw) in drawing.zip(0..) {
            let Some(sequence) = self.held.get_mut(&slice.id) else { return false };
            if sequence.append_drawn(slice.range.end, UNKNOWN) {
                sequence.promised = Some((slice.range.end, draw));
            }
        }
        let is_in_log = |slice: &Slice| {
            let n_tokens = self.held.get(&slice.id).map_or(0, |sequence| sequence.tokens.len());
            slice.range.end as usize <= n_tokens
        };
        next.slices.iter().all(is_in_log)
    }

    /// Pools the rows of the slices to pool; `read` copies a row into the given memory.
    pub fn pool_rows(
        &mut self,
        step: &Step,
        pass: &Pass<'_>,
        state: &mut [f32],
        mut read: impl FnMut(usize, &mut [f32]),
    ) {
        for (slice, laid) in step.slices.iter().zip(pass.slices).filter(|(slice, _)| slice.want == Want::Pool) {
            let Some(sequence) = self.held.get_mut(&slice.id) else { continue };
            for (row, position) in laid.rows.clone().zip(laid.range.clone()) {
                if sequence.pooled.reads(position) {
                    read(row as usize, state);
                    sequence.pooled.add(state);
                }
            }
        }
    }

    /// On the sampler: appends the drawn tokens to the logs, answers each slice, guesses, and leaves in `message` the
    /// first part of the message to the first stage, which has no token where none was drawn.
    pub fn apply_draws(
        &mut self,
        step: &Step,
        drawn: &mut Vec<Result<TokenOut, DrawError>>,
        masks: &GrammarMasks,
        message: &mut Vec<Option<Token>>,
        done: &mut Vec<SliceDone>,
    ) {
        let mut drawn = drawn.drain(..);
        message.clear();
        self.drew.clear();
        let n_guess_max = self.limits.guesses.n_max_among(n_draws(step));
        done.resize_with(step.slices.len(), SliceDone::default);
        for (i, (slice, done)) in step.slices.iter().zip(&mut *done).enumerate() {
            clear(done);
            let Some(sequence) = self.held.get_mut(&slice.id) else { continue };
            for _ in sequence.scored_positions(slice) {
                let out = drawn.next().and_then(Result::ok);
                sequence.fail_if(out.is_none());
                done.scored.extend(out);
            }
            if slice.want == Want::Pool && slice.range.end as usize == sequence.n_prompt {
                sequence.pooled.write(&mut done.pooled);
                sequence.fail_if(done.pooled.is_empty());
            }
            if sequence.draws(slice) {
                if slice.n_draft > 0 {
                    sequence.verify(slice, &mut drawn, &mut done.tokens);
                } else {
                    done.tokens.extend(sequence.outcome(slice, drawn.next()));
                    sequence.set_drawn(slice.range.end, done.tokens.first().map_or(UNKNOWN, |out| out.token));
                }
                if sequence.has_grammar && !done.tokens.is_empty() {
                    masks.push_drawn(slice.id, done.tokens.iter().map(|out| out.token));
                }
                message.push(done.tokens.first().map(|out| out.token));
                done.n_hit = sequence.guesses.n_hit(done.tokens.iter().map(|out| out.token));
                let n_guess_max = if done.tokens.is_empty() { 0 } else { n_guess_max };
                sequence.guess(n_guess_max, |output, way| masks.add_forced_tokens(slice.id, output, way));
                self.drew.push(i);
            }
            done.failed = sequence.failed;
        }
    }

    /// Collects the sequences of a settled step for which a draft model should guess.
    pub fn collect_guess_requests(
        &mut self,
        step: &Step,
        done: &[SliceDone],
        cost: Option<&LearnedDraftCost>,
        requests: &mut Vec<GuessRequest>,
    ) {
        requests.clear();
        let n_draws = n_draws(step);
        let n_max = self.limits.guesses.n_max_among(n_draws);
        let cost = cost.map(|cost| cost.of(n_draws));
        for i in &self.drew {
            let (id, done) = (step.slices[*i].id, &done[*i]);
            let drew = !done.tokens.is_empty() && done.failed.is_none();
            if let Some(sequence) = self.held.get_mut(&id).filter(|_| drew) {
                let n_max = sequence.guesses.n_model_guesses(cost, n_max, n_draws);
                requests.extend((n_max > 0).then_some(GuessRequest { id, n_max }));
            }
        }
    }

    pub fn log(&self, id: RequestId) -> Option<&[Token]> {
        self.held.get(&id).map(|sequence| sequence.tokens.as_slice())
    }

    /// Takes a model's guesses for a sequence.
    pub fn set_model_guesses(&mut self, id: RequestId, guessed: &[Token], by: Guesser) {
        if let Some(sequence) = self.held.get_mut(&id) {
            sequence.guesses.set_model_guesses(guessed, by);
        }
    }

    /// Returns the guesser of the newest drafts of a sequence.
    pub fn drafted_by(&self, id: RequestId) -> Guesser {
        self.held.get(&id).map_or(Guesser::Source, |sequence| sequence.drafted_by)
    }

    /// On the sampler: reports how much is guessed, and adds the second part of the message.
    pub fn report_guesses(&mut self, step: &Step, message: &mut Vec<Option<Token>>, done: &mut [SliceDone]) {
        for i in &self.drew {
            let done = &mut done[*i];
            let Some(sequence) = self.held.get(&step.slices[*i].id) else { continue };
            done.n_guess = sequence.guesses.tokens.len() as u16;
            let more = done.tokens.iter().skip(1).map(|out| out.token);
            append_rest(&mut self.message_rest, more, &sequence.guesses.tokens);
        }
        if self.message_rest.iter().any(Option::is_some) {
            message.extend_from_slice(&self.message_rest);
        }
        self.message_rest.clear();
    }

    /// On ranks that do not draw: the logs grow by the positions that other ranks draw.
    pub fn note_remote_draws(&mut self, step: &Step) {
        let is_receiver = matches!(self.tokens, TokenSource::Receives { .. });
        let n_before = self.pending.draws.len();
        for slice in &step.slices {
            let held = self.held.get_mut(&slice.id);
            let Some(sequence) = held.filter(|sequence| sequence.draws(slice)) else { continue };
            let has_grown = sequence.note_remote_draw(slice, is_receiver);
            if is_receiver {
                sequence.is_pending |= has_grown;
                let (life, position) = (sequence.life, slice.first_drawn());
                let draw = PendingDraw { id: slice.id, life, position, n_draft: slice.n_draft };
                self.pending.draws.push_back(draw);
            }
        }
        let n_draws = self.pending.draws.len() - n_before;
        if n_draws > 0 {
            self.pending.steps.push_back((step.id, n_draws));
        }
    }

    fn forget(&mut self, id: RequestId) {
        if let Some(sequence) = self.held.remove(&id) {
            if let Some(freed) = &mut self.freed {
                freed.leave(&sequence.tables, sequence.n_computed);
            }
            if let Some(owner) = sequence.guesses.owner {
                self.recent.add(owner, &sequence.tokens[sequence.n_prompt..]);
            }
            self.spare.push(sequence);
        }
    }
}

fn n_draws(step: &Step) -> usize {
    step.slices.iter().filter(|slice| slice.want != Want::Nothing).count()
}

/// Clears an answer and keeps its memory.
fn clear(done: &mut SliceDone) {
    done.tokens.clear();
    done.scored.clear();
    done.pooled.clear();
    done.failed = None;
    done.n_guess = 0;
    done.n_hit = 0;
}

#[cfg(test)]
mod tests;
