//! Guesses by the model's own layer that predicts one token further, on the sampling rank: the layer's KV cache, and
//! its passes. Has no knowledge of the model's blocks.
//!
//! After each step it computes the step's positions from the model's hidden states, which the next pass overwrites.
//! Then it guesses behind the logs that need guesses, one token per pass, from its own hidden states. It draws with the
//! noise of the guessed position, as the model will.

mod sequence;

use crate::runner::draft_model::{CachedLogs, DraftLimits, DraftRoom, FreeDraftBlocks};
use crate::runner::guesses::{GuessRequest, LearnedDraftCost};
use crate::runner::reuse_allocation;
use backend::{Batch, Device, Draw, DrawError, DrawMask, PassSlice};
use model::{KvCache, MtpHead};
use sequence::MtpSequence;
use std::time::Instant;
use types::cache::blocks_for;
use types::{BLOCKS_MAX, Layout, Rank, RequestId, Step, Token, TokenOut, Want};

pub(super) struct MtpRunner<D: Device + 'static> {
    kv: KvCache<D>,
    context: usize,
    logs: CachedLogs<MtpSequence>,
    pub cost: Option<LearnedDraftCost>,
    pub requests: Vec<GuessRequest>,
    turns: Vec<MtpTurn>,
    /// The turns whose rows draw in the present pass.
    drawing: Vec<usize>,
    /// The rows whose hidden states the present pass takes.
    hidden_rows: Vec<u32>,
    // The buffers of a pass, reused.
    batch: Batch,
    draws: Vec<Draw<'static>>,
    drawn: Vec<Result<TokenOut, DrawError>>,
}

/// A sequence of which the step has computed positions.
struct MtpTurn {
    id: RequestId,
    n_max: usize,
    /// The row in the last pass whose hidden state the next guess follows.
    row: u32,
    /// The position of that row in the cache.
    position: usize,
    is_over: bool,
}

impl<D: Device + 'static> MtpRunner<D> {
    /// `rows_max` are the rows of the model's largest pass.
    pub fn new(
        device: &D,
        head: &MtpHead<D>,
        limits: DraftLimits,
        (rows_max, context): (usize, u32),
    ) -> model::Result<MtpRunner<D>> {
        let DraftLimits { running_max, kv_dtype, .. } = limits;
        let part = Layout::solo(1).part(Rank(0));
        let specs = |n: u32| model::kv_specs(head.spec(), &part, device.class(), kv_dtype, &[n]);
        let block_bytes: u64 = specs(1).iter().map(|spec| spec.block_bytes()).sum();
        let of_sequences = running_max as u64 * u64::from(blocks_for(context));
        let n_blocks = (limits.kv_bytes / block_bytes.max(1)).min(of_sequences).clamp(1, BLOCKS_MAX.into()) as u32;
        let mut batch = Batch::default();
        batch.tokens.reserve(rows_max);
        batch.positions.reserve(rows_max);
        batch.slices.reserve(running_max);
        batch.outputs.reserve(running_max);
        batch.tables.resize_with(1, Default::default);
        batch.tables[0].blocks.reserve(running_max * blocks_for(context) as usize);
        batch.tables[0].bounds.reserve(running_max + 1);
        let free = FreeDraftBlocks::new(DraftRoom { n_blocks, n_pages: 0 }, vec![false], limits.zero_kv);
        Ok(MtpRunner {
            kv: KvCache::new(device, &specs(n_blocks))?,
            context: context as usize,
            logs: CachedLogs::new(running_max, free),
            cost: limits.cost,
            requests: Vec::with_capacity(running_max),
            turns: Vec::with_capacity(running_max),
            drawing: Vec::with_capacity(running_max),
            hidden_rows: Vec::with_capacity(rows_max),
            batch,
            draws: Vec::with_capacity(running_max),
            drawn: Vec::with_capacity(running_max),
        })
    }

    /// Applies the ends and starts of a step.
    pub fn begin(&mut self, step: &Step, device: &D) {
        self.logs.begin(step, self.context, &mut self.kv, device);
    }

    /// Forgets all sequences.
    pub fn forget_all(&mut self, device: &D) {
        self.logs.forget_all(&mut self.kv, device);
    }

    /// Computes the positions of a step, of which the model has just computed `slices` and their `hidden` states, and
    /// guesses for the sequences of `requests`.
    pub fn guess<'a>(
        &mut self,
        device: &D,
        head: &mut MtpHead<D>,
        hidden: &D::Buffer,
        slices: impl Iterator<Item = (RequestId, &'a PassSlice)>,
        log: impl Fn(RequestId) -> Option<&'a [Token]>,
    ) -> model::Result<()> {
        self.clear_batch();
        self.turns.clear();
        for (id, slice) in slices {
            if let Some(log) = log(id).filter(|log| (1..=self.context).contains(&log.len())) {
                self.lay_out_slice(id, slice, log);
            }
        }
        self.requests.clear();
        if self.batch.n_rows() == 0 {
            return Ok(());
        }
        head.set_hidden(device, hidden, &self.hidden_rows);
        self.run_pass(device, head)?;
        while self.lay_out_guesses() {
            let (begun, n_rows) = (Instant::now(), self.batch.n_rows());
            head.set_own_hidden(device, &self.hidden_rows);
            self.run_pass(device, head)?;
            if let Some(cost) = &mut self.cost {
                cost.note_pass(n_rows, begun.elapsed());
            }
        }
        Ok(())
    }

    /// Returns the guesses for each sequence that got some.
    pub fn guesses(&self) -> impl Iterator<Item = (RequestId, &[Token])> {
        let of =
            |turn: &MtpTurn| self.logs.held.get(&turn.id).map(|sequence| (turn.id, &sequence.tokens[sequence.n_log..]));
        self.turns.iter().filter_map(of).filter(|(_, guessed)| !guessed.is_empty())
    }

    fn clear_batch(&mut self) {
        self.batch.clear();
        self.hidden_rows.clear();
        self.drawing.clear();
    }

    /// Lays out the positions of a slice whose next token is known. The last of them draws if guesses are requested.
    fn lay_out_slice(&mut self, id: RequestId, slice: &PassSlice, log: &[Token]) {
        let Some(sequence) = self.logs.held.get_mut(&id) else { return };
        let positions = sequence.follow(log, slice.range.clone());
        let cached = sequence.in_cache(&positions);
        if positions.is_empty() || !self.logs.free.fill(&mut sequence.memory, &(0..cached.end as u32), 0) {
            return sequence.lose();
        }
        let request = self.requests.iter().find(|request| request.id == id);
        let n_max = request.map_or(0, |request| request.n_max);
        let turn =
            MtpTurn { id, n_max, row: 0, position: cached.end - 1, is_over: n_max == 0 || !sequence.has_caught_up() };
        let first = slice.rows.start + (positions.start as u32 - slice.range.start);
        self.hidden_rows.extend(first..first + positions.len() as u32);
        self.turns.push(turn);
        self.lay_out_rows(self.turns.len() - 1, &log[positions.start + 1..=positions.end], cached.start);
    }

    /// Lays out the next guess of each sequence. Returns false if no sequence needs one.
    fn lay_out_guesses(&mut self) -> bool {
        self.clear_batch();
        for i in 0..self.turns.len() {
            let MtpTurn { id, row, position, is_over, .. } = self.turns[i];
            let Some(sequence) = self.logs.held.get_mut(&id).filter(|_| !is_over) else { continue };
            if !self.logs.free.fill(&mut sequence.memory, &(0..position as u32 + 2), 0) {
                self.turns[i].is_over = true;
                continue;
            }
            let guess = sequence.tokens[sequence.tokens.len() - 1];
            self.hidden_rows.push(row);
            self.turns[i].position = position + 1;
            self.lay_out_rows(i, &[guess], position + 1);
        }
        self.batch.n_rows() > 0
    }

    /// Adds rows of a turn: these tokens, from a position in the cache on.
    fn lay_out_rows(&mut self, i: usize, tokens: &[Token], start: usize) {
        let (turn, batch) = (&mut self.turns[i], &mut self.batch);
        let Some(sequence) = self.logs.held.get(&turn.id) else { return };
        let first = batch.n_rows() as u32;
        let rows = first..first + tokens.len() as u32;
        batch.tokens.extend_from_slice(tokens);
        batch.positions.extend(start as u32..(start + tokens.len()) as u32);
        turn.row = rows.end - 1;
        if !turn.is_over {
            batch.outputs.push(turn.row);
            self.drawing.push(i);
        }
        batch.slices.push(PassSlice::new(rows, start as u32, if turn.is_over { Want::Nothing } else { Want::Last }));
        batch.tables[0].blocks.extend_from_slice(&sequence.memory.blocks);
        let n_blocks = batch.tables[0].blocks.len() as u32;
        batch.tables[0].bounds.push(n_blocks);
    }

    fn run_pass(&mut self, device: &D, head: &mut MtpHead<D>) -> model::Result<()> {
        let n_rows = device.padded_rows(&self.batch.pass());
        self.batch.pad(n_rows);
        let logits = head.forward(device, &self.batch.pass(), &mut self.kv)?;
        self.drawn.clear();
        if let Some(logits) = logits {
            let mut draws = reuse_allocation(std::mem::take(&mut self.draws));
            for turn in &self.drawing {
                let Some(sequence) = self.logs.held.get(&self.turns[*turn].id) else { continue };
                let (prompt, output) = sequence.prompt_and_output();
                draws.push(Draw { sampling: &sequence.sampling, prompt, output, score: None, mask: DrawMask::Open });
            }
            device.draw(logits, &draws, &mut self.drawn);
            self.draws = reuse_allocation(draws);
        }
        self.take_drawn();
        Ok(device.take_failure()?)
    }

    fn take_drawn(&mut self) {
        for (turn, drawn) in self.drawing.iter().zip(self.drawn.drain(..)) {
            let turn = &mut self.turns[*turn];
            let (Some(sequence), Ok(TokenOut { token, .. })) = (self.logs.held.get_mut(&turn.id), drawn) else {
                turn.is_over = true;
                continue;
            };
            sequence.tokens.push(token);
            // No token is drawn behind the end of an answer.
            let is_end = sequence.sampling.stop.contains(&token);
            turn.is_over = is_end || sequence.n_guessed() == turn.n_max || sequence.tokens.len() >= self.context;
        }
    }
}
