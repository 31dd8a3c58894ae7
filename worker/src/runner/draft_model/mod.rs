//! A smaller model that guesses the next tokens of logs, on the sampling rank: its own KV cache, and its passes over
//! all sequences that still need a token. Has no knowledge of the served model's blocks.
//!
//! It draws with the same noise per position as the served model, so both agree as often as they can. It catches up
//! with a log when a guess behind that log is needed, and overwrites guesses that were not drawn.

mod drafted;
mod held;
mod states;

use crate::load::draft_weights::DraftWeights;
use crate::runner::guesses::{GuessRequest, LearnedDraftCost};
use crate::runner::reuse_allocation;
use backend::{Batch, Device, Draw, DrawError, DrawMask, KvSpec, PassSlice};
use collective::Ranks;
use drafted::DraftSequence;
pub(super) use drafted::{DraftMemory, DraftRoom, FreeDraftBlocks};
pub(super) use held::{CachedLog, CachedLogs};
use model::KvCache;
use std::time::Instant;
use types::cache::blocks_for;
use types::{CacheGroup, DRAFT_ROWS_MAX, KvDtype, Layout, Rank, RequestId, Step, Token, TokenOut, Want};

/// The limits of what it can hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftLimits {
    pub kv_bytes: u64,
    pub kv_dtype: KvDtype,
    pub running_max: usize,
    /// Whether freed blocks are cleared.
    pub zero_kv: bool,
    /// None where the number of guesses does not depend on their cost.
    pub cost: Option<LearnedDraftCost>,
}

pub(super) struct DraftModelRunner<D: Device + 'static> {
    ranks: Ranks<D>,
    kv: KvCache<D>,
    context: usize,
    rows_max: usize,
    logs: CachedLogs<DraftSequence>,
    pub requests: Vec<GuessRequest>,
    pub cost: Option<LearnedDraftCost>,
    turns: Vec<DraftTurn>,
    /// The turns whose rows draw in the present pass.
    drawing: Vec<usize>,
    // The buffers of a pass, reused.
    batch: Batch,
    draws: Vec<Draw<'static>>,
    drawn: Vec<Result<TokenOut, DrawError>>,
}

/// A sequence that needs guesses.
struct DraftTurn {
    id: RequestId,
    n_max: usize,
    /// The length of the log that the guesses follow.
    n_log: usize,
    /// Its rows in the present pass.
    n_rows: usize,
    is_over: bool,
}

/// A sequence that lacks at most this many tokens goes before those that lack more.
const LACKING_MAX: usize = DRAFT_ROWS_MAX as usize + 1;

impl<D: Device + 'static> DraftModelRunner<D> {
    pub fn new(weights: &DraftWeights<D>, limits: DraftLimits) -> model::Result<DraftModelRunner<D>> {
        let DraftWeights { device, spec, .. } = weights;
        let DraftLimits { running_max, .. } = limits;
        let (context, (rows_max, outputs_max)) = (weights.context(), weights.rows_max());
        let part = Layout::solo(spec.n_layers).part(Rank(0));
        let are_states: Vec<bool> = spec.cache_groups().groups().iter().map(CacheGroup::is_state).collect();
        let specs = |n_blocks: &[u32]| model::kv_specs(spec, &part, device.class(), limits.kv_dtype, n_blocks);
        let each = specs(&vec![1; are_states.len()]);
        let bytes = |is_state| -> u64 {
            let of_kind = each.iter().filter(|spec| spec.layout.is_state() == is_state);
            of_kind.map(KvSpec::block_bytes).sum()
        };
        let sizes = [bytes(false), bytes(true)];
        let room = DraftRoom::divide(limits.kv_bytes, sizes, running_max as u32, blocks_for(context));
        let n_blocks: Vec<u32> = are_states.iter().map(|is_state| room.of_group(*is_state)).collect();
        let mut batch = Batch::default();
        batch.tokens.reserve(rows_max);
        batch.positions.reserve(rows_max);
        batch.slices.reserve(running_max);
        batch.outputs.reserve(outputs_max);
        batch.tables.resize_with(are_states.len(), Default::default);
        for table in &mut batch.tables {
            table.blocks.reserve(running_max * blocks_for(context) as usize);
            table.bounds.reserve(running_max + 1);
        }
        Ok(DraftModelRunner {
            ranks: Ranks::solo(spec.n_layers),
            kv: KvCache::new(device, &specs(&n_blocks))?,
            context: context as usize,
            rows_max,
            logs: CachedLogs::new(running_max, FreeDraftBlocks::new(room, are_states, limits.zero_kv)),
            requests: Vec::with_capacity(running_max),
            cost: limits.cost,
            turns: Vec::with_capacity(running_max),
            drawing: Vec::with_capacity(running_max),
            batch,
            draws: Vec::with_capacity(outputs_max),
            drawn: Vec::with_capacity(outputs_max),
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

    /// Guesses for the sequences of `requests`, whose logs are known by now.
    pub fn guess<'a>(
        &mut self,
        weights: &mut DraftWeights<D>,
        log: impl Fn(RequestId) -> Option<&'a [Token]>,
    ) -> model::Result<()> {
        self.turns.clear();
        for GuessRequest { id, n_max } in self.requests.drain(..) {
            let known =
                self.logs.held.get_mut(&id).zip(log(id)).filter(|(_, log)| (1..=self.context).contains(&log.len()));
            let Some((drafted, log)) = known else { continue };
            drafted.sync_with_log(log);
            self.turns.push(DraftTurn { id, n_max, n_log: log.len(), n_rows: 0, is_over: n_max == 0 });
        }
        while self.lay_out() {
            let (begun, n_rows) = (Instant::now(), self.batch.n_rows());
            self.run_pass(weights)?;
            self.take_drawn();
            if let Some(cost) = &mut self.cost {
                cost.note_pass(n_rows, begun.elapsed());
            }
        }
        Ok(())
    }

    /// Returns the guesses for each sequence. They are empty if the cache has not caught up with the log, or if there
    /// is no memory for it.
    pub fn guesses(&self) -> impl Iterator<Item = (RequestId, &[Token])> {
        let of = |turn: &DraftTurn| Some((turn.id, &self.logs.held.get(&turn.id)?.tokens[turn.n_log..]));
        self.turns.iter().filter_map(of)
    }

    /// Lays out the next pass: for each sequence the rows that its cache lacks, as far as there is room. Returns false
    /// without any row.
    fn lay_out(&mut self) -> bool {
        self.batch.clear();
        self.drawing.clear();
        for i in 0..self.turns.len() {
            let turn = &mut self.turns[i];
            turn.n_rows = 0;
            let lacks_little = self.logs.held.get(&turn.id).is_some_and(|drafted| drafted.n_lacking() <= LACKING_MAX);
            if !turn.is_over && lacks_little {
                self.lay_out_turn(i);
            }
        }
        for i in 0..self.turns.len() {
            if !self.turns[i].is_over && self.turns[i].n_rows == 0 {
                self.lay_out_turn(i);
            }
        }
        self.batch.n_rows() > 0
    }

    /// Lays out one sequence's rows. Its turn is over if they do not reach the log's end.
    fn lay_out_turn(&mut self, i: usize) {
        let (turn, batch) = (&mut self.turns[i], &mut self.batch);
        let Some(drafted) = self.logs.held.get_mut(&turn.id) else { return };
        let (n_lacking, first) = (drafted.n_lacking(), batch.n_rows());
        let n_rows = n_lacking.min(self.rows_max - first);
        let range = drafted.n_computed..drafted.n_computed + n_rows;
        let slice = range.start as u32..range.end as u32;
        turn.is_over = n_rows < n_lacking;
        // The log only grows, so no later slice begins before the log's last token.
        if n_rows == 0 || !self.logs.free.fill(&mut drafted.memory, &slice, turn.n_log as u32 - 1) {
            turn.is_over = true;
            return;
        }
        turn.n_rows = n_rows;
        batch.tokens.extend_from_slice(&drafted.tokens[range]);
        let rows = first as u32..(first + n_rows) as u32;
        batch.positions.extend(slice.clone());
        if !turn.is_over {
            batch.outputs.push(rows.end - 1);
            self.drawing.push(i);
        }
        let want = if turn.is_over { Want::Nothing } else { Want::Last };
        drafted.memory.lay_out(slice.end, self.logs.free.are_states(), &mut batch.tables);
        batch.slices.push(PassSlice { rows, range: slice, want });
    }

    fn run_pass(&mut self, weights: &mut DraftWeights<D>) -> model::Result<()> {
        let DraftWeights { device, model, .. } = weights;
        let n_rows = device.padded_rows(&self.batch.pass());
        self.batch.pad(n_rows);
        let logits = model.forward(device, &mut self.ranks, &self.batch.pass(), &mut self.kv)?;
        self.drawn.clear();
        if let Some(logits) = logits {
            let mut draws = reuse_allocation(std::mem::take(&mut self.draws));
            for turn in &self.drawing {
                let Some(drafted) = self.logs.held.get(&self.turns[*turn].id) else { continue };
                let (prompt, output) = drafted.prompt_and_output();
                let (sampling, mask) = (&drafted.sampling, DrawMask::Open);
                draws.push(Draw { sampling, prompt, output, score: None, mask });
            }
            device.draw(logits, &draws, &mut self.drawn);
            self.draws = reuse_allocation(draws);
        }
        Ok(device.take_failure()?)
    }

    fn take_drawn(&mut self) {
        for turn in self.turns.iter().filter(|turn| turn.n_rows > 0) {
            if let Some(drafted) = self.logs.held.get_mut(&turn.id) {
                drafted.n_computed += turn.n_rows;
            }
        }
        for (turn, drawn) in self.drawing.iter().zip(self.drawn.drain(..)) {
            let turn = &mut self.turns[*turn];
            let (Some(drafted), Ok(TokenOut { token, .. })) = (self.logs.held.get_mut(&turn.id), drawn) else {
                turn.is_over = true;
                continue;
            };
            drafted.tokens.push(token);
            let n_guessed = drafted.tokens.len() - turn.n_log;
            // No token is drawn behind the end of an answer.
            let is_end = drafted.sampling.stop.contains(&token);
            turn.is_over = is_end || n_guessed == turn.n_max || drafted.tokens.len() >= self.context;
        }
    }
}

#[cfg(test)]
mod tests;
