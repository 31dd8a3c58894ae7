//! One request on this rank: its token log, its block tables, its computed positions, and the rows of a slice. Has no
//! knowledge of other requests or of the source of drawn tokens.

use crate::runner::guesses::{GuessRules, Guesser, RecentAnswers, SequenceGuesses};
use crate::runner::sequences::limits::{SequenceLimits, StepViolation};
use crate::runner::sequences::pending::{DrawnTokens, PendingDraw, UNKNOWN};
use crate::runner::sequences::pooled::PooledStates;
use backend::{Batch, DrawError, PassSlice};
use std::ops::Range;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, Failure, Goal, Request, Sampling, Slice, Token, TokenOut, Want};

/// `[0, n_computed) in the cache · [n_computed, tokens.len()) to be computed`
#[derive(Debug, Default)]
pub(super) struct RankSequence {
    /// Prompt and output.
    pub tokens: Vec<Token>,
    pub n_prompt: usize,
    pub sampling: Sampling,
    pub n_computed: u32,
    /// The step of its last slice. It is 0 if none has run; the first slice may then begin behind a shared prefix.
    pub last_slice: u64,
    /// The step that started it: this run drops tokens that were drawn before a restart.
    pub life: u64,
    /// Whether the last token was drawn but not received.
    pub is_pending: bool,
    /// The guesses behind the log; on ranks that embed, as the sampler sent them.
    pub guesses: SequenceGuesses,
    /// The guesser of the newest drafts.
    pub drafted_by: Guesser,
    /// On ranks that never receive tokens: the drafts of the last slice. The start of the next slice shows how many
    /// held.
    n_unsettled: u32,
    pub pooled: PooledStates,
    /// The position of a token that the device has drawn and the host has not received yet, and its number among the
    /// draws.
    pub promised: Option<(u32, u32)>,
    /// Why nothing could be drawn. Slices planned ahead still run, on arbitrary tokens, and their results are
    /// discarded.
    pub failed: Option<Failure>,
    /// Whether its draws have masks, and may be late.
    pub has_grammar: bool,
    /// The length of the log at its start.
    n_started: u32,
    /// On the sampler: the position whose draw was late. Slices planned behind it are void.
    pub late: Option<u32>,
    /// On the sampler: whether this step's draw has a mask.
    pub is_masked: bool,
    /// Per cache group, the blocks of its positions.
    pub tables: Vec<Vec<BlockId>>,
}

impl RankSequence {
    pub fn restart(&mut self, request: &Request, limits: &SequenceLimits, recent: &RecentAnswers, life: u64) {
        /// The most tokens that slices planned past a stop may add.
        const PAST_END: usize = 8;
        let n_tokens = request.prompt.len().saturating_add(request.sampling.tokens_max as usize);
        let n_max = n_tokens.max(request.n_tokens()).min(limits.context as usize) + PAST_END;
        self.tokens.clear();
        self.tokens.reserve(n_max);
        self.tokens.extend(request.prompt.iter().chain(&request.output));
        self.n_prompt = request.prompt.len();
        self.sampling.clone_from(&request.sampling);
        self.n_computed = 0;
        self.last_slice = 0;
        self.life = life;
        self.is_pending = false;
        self.n_unsettled = 0;
        self.pooled.restart(limits.pooling, request.prompt.len(), request.second_text);
        self.promised = None;
        self.failed = None;
        self.has_grammar = request.grammar.is_some();
        self.n_started = self.tokens.len() as u32;
        self.late = None;
        self.is_masked = false;
        let may_guess = request.goal == Goal::Generate && limits.can_recompute();
        let recent = (!limits.zero_kv).then_some(recent);
        self.guesses.restart(&GuessRules { config: &limits.guesses, may_guess, recent }, request, n_max);
        self.tables.resize_with(limits.groups.len(), Vec::new);
        for table in &mut self.tables {
            table.clear();
            table.reserve(blocks_for(n_max as u32) as usize);
        }
    }

    pub fn check(&self, slice: &Slice, limits: &SequenceLimits, step: u64) -> Result<(), StepViolation> {
        let (id, start, end, context) = (slice.id, slice.range.start, slice.range.end, limits.context);
        if start >= end {
            return Err(StepViolation::Empty { id, start });
        }
        if self.last_slice == step {
            return Err(StepViolation::TwoSlices(id));
        }
        let n_tokens = self.tokens.len() as u32;
        if limits.keeps_nothing() && slice.range != (0..n_tokens) {
            return Err(StepViolation::NotWhole { id, end, n_tokens });
        }
        // Only full blocks are shared, so a shared prefix ends at a block's end.
        let shared_prefix = self.last_slice == 0 && start.is_multiple_of(BLOCK_TOKENS) && !limits.zero_kv;
        let is_next = start == self.n_computed || self.is_settled_by(slice);
        if !is_next && !shared_prefix && !self.is_recomputed_by(slice) {
            return Err(StepViolation::Gap { id, start, n_computed: self.n_computed });
        }
        if end > context {
            return Err(StepViolation::TooLong { id, end, context });
        }
        let settled = self.is_settled_by(slice).then_some(start + 1);
        let n_tokens = settled.unwrap_or(self.tokens.len() as u32);
        let end = slice.first_drawn();
        if end > n_tokens || (slice.n_draft > 0 && end != n_tokens) {
            return Err(StepViolation::NotInLog { id, end, n_tokens });
        }
        Ok(())
    }

    /// Returns whether the slice begins among the drafts of the slice before, and so shows how many of them held.
    fn is_settled_by(&self, slice: &Slice) -> bool {
        let drafts = self.n_computed.saturating_sub(self.n_unsettled)..=self.n_computed;
        self.n_unsettled > 0 && drafts.contains(&slice.range.start)
    }

    /// `[0, start) computed · [start, start + 1) drawn behind the last draft that held`
    pub fn settle_by(&mut self, slice: &Slice) {
        if std::mem::take(&mut self.n_unsettled) > 0 {
            self.tokens.truncate(slice.range.start as usize + 1);
            self.n_computed = slice.range.start;
        }
    }

    /// Appends the slice's drafts to the log, where the ones that hold stay. `are_known` is false on ranks that compute
    /// what others embed.
    pub fn take_drafts(&mut self, slice: &Slice, are_known: bool) -> Result<(), StepViolation> {
        let (n_draft, n_guess) = (usize::from(slice.n_draft), self.guesses.tokens.len());
        if are_known && n_draft > n_guess {
            return Err(StepViolation::NotGuessed { id: slice.id, n_draft: slice.n_draft, n_guess });
        }
        if n_draft > 0 {
            self.drafted_by = self.guesses.guesser;
        }
        if are_known {
            self.tokens.extend_from_slice(&self.guesses.tokens[..n_draft]);
        } else {
            self.tokens.resize(self.tokens.len() + n_draft, UNKNOWN);
            self.n_unsettled = n_draft as u32;
        }
        Ok(())
    }

    /// Takes the tokens drawn behind the log and behind its drafts, as long as each draft equals its drawn token. Adds
    /// them to `out` and to the log. A failed draw behind a draft is not reported: it is repeated alone.
    pub fn verify(
        &mut self,
        slice: &Slice,
        drawn: impl Iterator<Item = Result<TokenOut, DrawError>>,
        out: &mut Vec<TokenOut>,
    ) {
        let first = slice.first_drawn() as usize;
        let mut holds = true;
        for (position, drawn) in (first..=slice.range.end as usize).zip(drawn) {
            let is_first = position == first;
            let token = if is_first { self.outcome(slice, Some(drawn)) } else { drawn.ok() };
            let Some(token) = token.filter(|_| holds) else {
                holds = false;
                continue;
            };
            holds = self.tokens.get(position) == Some(&token.token);
            out.push(token);
        }
        self.tokens.truncate(first);
        self.tokens.extend(out.iter().map(|out| out.token));
        if out.is_empty() {
            self.tokens.push(UNKNOWN);
        }
        self.n_computed = self.tokens.len() as u32 - 1;
    }

    /// Returns whether the slice computes the log's last position again, because the token behind it was drawn late.
    /// Only the sampler has the position of that draw.
    pub fn is_recomputed_by(&self, slice: &Slice) -> bool {
        let (start, end) = (slice.range.start, slice.range.end);
        let is_one = start + 1 == end && slice.want == Want::Last;
        let is_behind = start < self.n_computed && end >= self.n_started && self.last_slice != 0;
        self.has_grammar && is_one && is_behind
    }

    /// `[0, start) computed · [start, start + 1) again`. Tokens drawn behind it before do not belong to this run.
    pub fn rewind(&mut self, start: u32, life: u64) {
        self.tokens.truncate(start as usize + 1);
        self.n_computed = start;
        self.life = life;
        self.is_pending = false;
        self.late = None;
    }

    pub fn fail_if(&mut self, has_failed: bool) {
        if has_failed {
            self.failed.get_or_insert(Failure::Computation);
        }
    }

    /// Returns the result of the slice's draw. It notes a late mask, and the draw is repeated.
    pub fn outcome(&mut self, slice: &Slice, drawn: Option<Result<TokenOut, DrawError>>) -> Option<TokenOut> {
        if self.failed.is_some() || self.is_void(slice) {
            return None;
        }
        match drawn {
            Some(Ok(out)) => return Some(out),
            Some(Err(DrawError::Late)) => self.late = Some(slice.first_drawn()),
            Some(Err(DrawError::NothingLeft)) => self.failed = Some(Failure::NoToken),
            Some(Err(DrawError::NotNumbers)) | None => self.failed = Some(Failure::Computation),
        }
        None
    }

    /// Returns whether the slice was planned behind a token that was drawn late.
    pub fn is_void(&self, slice: &Slice) -> bool {
        self.late.is_some_and(|late| slice.range.end > late)
    }

    pub fn take_blocks(
        &mut self,
        slice: &Slice,
        blocks: &mut &[BlockId],
        limits: &SequenceLimits,
    ) -> Result<(), StepViolation> {
        let id = slice.id;
        for ((group, &n_blocks), table) in limits.groups.iter().zip(&limits.n_blocks).zip(&mut self.tables) {
            let needed = (group.n_blocks(slice.range.end) as usize).saturating_sub(table.len());
            let Some((new, rest)) = blocks.split_at_checked(needed) else {
                return Err(StepViolation::TooFewBlocks { id, needed, n_left: blocks.len() });
            };
            // Positions behind every later window need no block, nor does a recurrence's middle.
            let may_lack = |i: u32| group.may_lack(i, &slice.range, slice.n_draft.into());
            let is_missing =
                |(i, block): &(u32, &BlockId)| block.0 >= n_blocks && !(**block == BlockId::NONE && may_lack(*i));
            if let Some((_, block)) = (table.len() as u32..).zip(new).find(is_missing) {
                return Err(StepViolation::NoSuchBlock { id, block: block.0, n_blocks });
            }
            table.extend_from_slice(new);
            *blocks = rest;
        }
        Ok(())
    }

    /// Marks the slice's blocks as written. Many threads store rows at once, so no two slices may store into one block.
    pub fn mark_written(&self, slice: &Slice, written: &mut [Vec<u64>], stamp: u64) -> Result<(), StepViolation> {
        let touched = slice.range.start / BLOCK_TOKENS..blocks_for(slice.range.end);
        for (table, written) in self.tables.iter().zip(written) {
            let touched = &table[touched.start as usize..touched.end as usize];
            for block in touched.iter().filter(|block| **block != BlockId::NONE) {
                let last = &mut written[block.0 as usize];
                if *last == stamp {
                    return Err(StepViolation::WrittenTwice { id: slice.id, block: block.0 });
                }
                *last = stamp;
            }
        }
        Ok(())
    }

    /// Appends a drawn token at its position, unless the log already has that position. Returns whether it was
    /// appended.
    pub fn append_drawn(&mut self, position: u32, token: Token) -> bool {
        let is_new = self.tokens.len() == position as usize;
        if is_new {
            self.tokens.push(token);
        }
        is_new
    }

    /// Sets a drawn token, whether or not the log has counted it already.
    pub fn set_drawn(&mut self, position: u32, token: Token) {
        match self.promised.take_if(|(promised, _)| *promised == position) {
            Some(_) => self.tokens[position as usize] = token,
            None => drop(self.append_drawn(position, token)),
        }
    }

    /// Returns whether the slice has a row for the token that is not received yet.
    pub fn needs_pending(&self, slice: &Slice) -> bool {
        self.is_pending && slice.range.end as usize >= self.tokens.len()
    }

    pub fn receive(&mut self, draw: PendingDraw, drawn: &DrawnTokens<'_>) {
        let is_ours = self.life == draw.life && self.is_pending && self.tokens.len() == draw.position as usize + 1;
        if !is_ours {
            return;
        }
        self.tokens.pop();
        self.tokens.push(drawn.first.unwrap_or(UNKNOWN));
        self.tokens.extend(drawn.more.iter().flatten());
        self.guesses.tokens.clear();
        self.guesses.tokens.extend(drawn.guess.iter().flatten());
        self.is_pending = false;
        if draw.n_draft > 0 {
            self.n_computed = self.tokens.len() as u32 - 1;
        }
    }

    /// On ranks that do not draw: the log grows by a token that another rank draws. Returns whether it did.
    /// `is_receiver` means that this rank will receive the token, and how many of the drafts held.
    pub fn note_remote_draw(&mut self, slice: &Slice, is_receiver: bool) -> bool {
        if slice.n_draft > 0 && is_receiver {
            self.tokens.truncate(slice.first_drawn() as usize);
            return self.append_drawn(slice.first_drawn(), UNKNOWN);
        }
        self.append_drawn(slice.range.end, UNKNOWN)
    }

    /// Returns the number of output tokens before those that the slice draws.
    pub fn n_output_before(&self, slice: &Slice) -> u32 {
        slice.first_drawn().saturating_sub(self.n_prompt as u32)
    }

    /// Guesses at most `n_max` tokens behind the log. `only_way` adds the tokens that must follow an output, where they
    /// are known.
    pub fn guess(&mut self, n_max: usize, only_way: impl FnOnce(&[Token], &mut Vec<Token>)) {
        let output = self.tokens.get(self.n_prompt..).unwrap_or_default();
        self.guesses.guess(&self.tokens, n_max, |way| {
            if self.has_grammar {
                only_way(output, way);
            }
        });
    }

    /// Returns whether the slice draws the token after its range. Call it before the log grows.
    pub fn draws(&self, slice: &Slice) -> bool {
        match slice.want {
            Want::Last => true,
            Want::All { .. } => slice.range.end as usize == self.tokens.len(),
            Want::Nothing | Want::Pool => false,
        }
    }

    /// Returns the positions whose rows are scored: those with another prompt token behind them.
    pub fn scored_positions(&self, slice: &Slice) -> Range<u32> {
        match slice.want {
            Want::All { .. } => {
                slice.range.start..slice.range.end.min((self.n_prompt as u32).saturating_sub(1)).max(slice.range.start)
            }
            Want::Nothing | Want::Last | Want::Pool => 0..0,
        }
    }

    /// Returns the token to score in each scored row, and how many likely tokens to report beside it.
    pub fn tokens_to_score(&self, slice: &Slice) -> Vec<(Token, u8)> {
        let top_n = if let Want::All { top_n } = slice.want { top_n } else { 0 };
        self.scored_positions(slice).map(|position| (self.tokens[position as usize + 1], top_n)).collect()
    }

    pub fn lay_out(&self, slice: &Slice, batch: &mut Batch) {
        let first = batch.n_rows() as u32;
        let rows = first..first + slice.range.len() as u32;
        batch.tokens.extend_from_slice(&self.tokens[slice.range.start as usize..slice.range.end as usize]);
        batch.positions.extend(slice.range.clone());
        if let Some((position, draw)) = self.promised.filter(|(position, _)| slice.range.contains(position)) {
            batch.drawn.push((first + position - slice.range.start, draw));
        }
        batch.outputs.extend(self.scored_positions(slice).map(|position| first + position - slice.range.start));
        if self.draws(slice) {
            batch.outputs.extend(rows.end - 1 - u32::from(slice.n_draft)..rows.end);
        }
        batch.slices.push(PassSlice { rows, range: slice.range.clone(), want: slice.want });
        for (of_batch, of_sequence) in batch.tables.iter_mut().zip(&self.tables) {
            of_batch.blocks.extend_from_slice(of_sequence);
            of_batch.bounds.push(of_batch.blocks.len() as u32);
        }
    }
}
