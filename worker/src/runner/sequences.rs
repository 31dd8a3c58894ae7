//! A rank's state of each request, and how a step changes it: the token log, the block tables, the number of computed
//! positions. Knows nothing of models or devices. A step that contradicts this state is refused, not applied.
//!
//! All ranks of a replica lay out the same rows for a step, though only some know the drawn tokens. A log therefore
//! grows by position: a rank that does not know the token writes `UNKNOWN` there, and so do all ranks where nothing
//! could be drawn.

use crate::runner::let_go::LetGo;
use backend::{Batch, Draw, Pass, PassSlice, Score};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use types::cache::blocks_for;
use types::{
    BLOCK_TOKENS, BlockId, CacheGroup, Part, Request, RequestId, SCORED_ROWS_MAX, Sampling, Slice, SliceDone, Step,
    StepId, Token, TokenOut, Want,
};

/// The limits of what this rank can hold and run at once. A step beyond them breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceLimits {
    pub n_vocab: u32,
    /// The most positions of one sequence.
    pub context: u32,
    pub groups: Vec<CacheGroup>,
    /// The size of each group's pool.
    pub n_blocks: Vec<u32>,
    /// The most rows of one step.
    pub rows_max: usize,
    /// The most sequences held, and so the most slices of one step.
    pub running_max: usize,
    /// Freed blocks are cleared, and therefore never shared.
    pub zero_kv: bool,
}

impl SequenceLimits {
    /// Rows of one step whose logits are wanted: one per slice, as no slice is empty, and those that are scored.
    pub fn outputs_max(&self) -> usize {
        self.rows_max.min(self.running_max + SCORED_ROWS_MAX as usize)
    }
}

/// How a rank learns the drawn tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// It draws them.
    Draws,
    /// It embeds, and the sampler sends it the tokens: one message for each step with draws, in the order of steps. A
    /// message is received when a row needs one of its tokens, or when more than `late_max` are on their way.
    IsTold { late_max: usize },
    /// It neither embeds nor draws.
    NeverKnows,
}

impl Tokens {
    pub fn of(part: &Part) -> Tokens {
        match part.n_stages {
            _ if part.is_sampler() => Tokens::Draws,
            _ if !part.is_first() => Tokens::NeverKnows,
            // The message is the first thing that the sampler sends to its own stage.
            1 => Tokens::IsTold { late_max: 0 },
            // As many steps as are in flight: the oldest has been drawn by then, and nobody waits for it.
            n_stages => Tokens::IsTold { late_max: usize::from(n_stages) + 1 },
        }
    }
}

/// Stands in a log for a token that this rank does not know. Any token would do.
const UNKNOWN: Token = 0;

/// How a step contradicts what this rank holds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("request {0} is not held here")]
    Unknown(RequestId),
    #[error("request {id} goes on at {start}, its first {n_computed} positions are computed")]
    Gap { id: RequestId, start: u32, n_computed: u32 },
    #[error("request {id} has an empty slice at {start}")]
    Empty { id: RequestId, start: u32 },
    #[error("request {id} is to be computed up to {end}, its log has {n_tokens} tokens")]
    NotInLog { id: RequestId, end: u32, n_tokens: u32 },
    #[error("request {0} has two slices in one step")]
    TwoSlices(RequestId),
    #[error("request {id} reaches {end} positions, the context has {context}")]
    TooLong { id: RequestId, end: u32, context: u32 },
    #[error("request {0} starts without tokens")]
    NoTokens(RequestId),
    #[error("request {id} has token {token}, the vocabulary has {n_vocab}")]
    NoSuchToken { id: RequestId, token: Token, n_vocab: u32 },
    #[error("request {id} gets block {block}, there are {n_blocks}")]
    NoSuchBlock { id: RequestId, block: u32, n_blocks: u32 },
    #[error("block {block} is written by two slices, the second of request {id}")]
    WrittenTwice { id: RequestId, block: u32 },
    #[error("request {id} needs {needed} more blocks, {n_left} are left")]
    TooFewBlocks { id: RequestId, needed: usize, n_left: usize },
    #[error("{n} drawn tokens were told of step {step}, it has {n_draws} draws")]
    NotAsManyTokens { step: u64, n: usize, n_draws: usize },
    #[error("{0} blocks are left over")]
    BlocksLeftOver(usize),
    #[error("{n} rows, {rows_max} at most")]
    TooManyRows { n: usize, rows_max: usize },
    #[error("{n} rows with logits, {outputs_max} at most")]
    TooManyOutputs { n: usize, outputs_max: usize },
    #[error("{n} sequences, {running_max} at most")]
    TooManySequences { n: usize, running_max: usize },
}

pub struct Sequences {
    limits: SequenceLimits,
    tokens: Tokens,
    /// The sampler's outstanding messages, in the order of steps.
    untold: Untold,
    held: HashMap<RequestId, Sequence>,
    /// Ended sequences, reused for their memory.
    spare: Vec<Sequence>,
    /// The step that last wrote each block of each group, to detect two writers in one step.
    written: Vec<Vec<u64>>,
    /// The number of steps begun, which stamps the present one.
    n_begun: u64,
    /// The freed blocks, where blocks are cleared.
    let_go: Option<LetGo>,
}

/// Draws whose tokens this rank has not received.
#[derive(Debug, Default)]
struct Untold {
    /// Each step, and how many draws it has.
    steps: VecDeque<(StepId, usize)>,
    /// The draws of all these steps, one after another.
    draws: VecDeque<UntoldDraw>,
}

#[derive(Clone, Copy, Debug)]
struct UntoldDraw {
    id: RequestId,
    life: u64,
    position: u32,
}

/// `[0, n_computed) in the cache · [n_computed, tokens.len()) to be computed`
#[derive(Debug, Default)]
struct Sequence {
    /// Prompt and output.
    tokens: Vec<Token>,
    n_prompt: usize,
    sampling: Sampling,
    n_computed: u32,
    /// The step of its last slice; 0 if none has run, and then the first slice may begin behind a shared prefix.
    last_slice: u64,
    /// The step that started it: tokens drawn before a restart are not for this run.
    life: u64,
    /// The last token has been drawn but not received.
    is_untold: bool,
    /// The sum of the hidden states so far, for pooling.
    pooled: Vec<f32>,
    /// The position of a token that the device has drawn and the host does not know yet, and its number among the
    /// draws.
    promised: Option<(u32, u32)>,
    /// Nothing could be drawn. Slices planned ahead still run, on any tokens, and their results are discarded.
    failed: bool,
    /// Per cache group, the blocks of its positions.
    tables: Vec<Vec<BlockId>>,
}

impl Sequences {
    pub fn new(limits: SequenceLimits, tokens: Tokens) -> Sequences {
        let n_untold = match tokens {
            Tokens::IsTold { late_max } => late_max + 1,
            Tokens::Draws | Tokens::NeverKnows => 0,
        };
        let draws = VecDeque::with_capacity(n_untold * limits.outputs_max());
        Sequences {
            tokens,
            untold: Untold { steps: VecDeque::with_capacity(n_untold), draws },
            held: HashMap::with_capacity(limits.running_max),
            spare: Vec::with_capacity(limits.running_max),
            written: limits.n_blocks.iter().map(|n_blocks| vec![0; *n_blocks as usize]).collect(),
            n_begun: 0,
            let_go: limits.zero_kv.then(|| LetGo::new(&limits)),
            limits,
        }
    }

    pub fn len(&self) -> usize {
        self.held.len()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// A batch with room for any step, so that building one allocates nothing.
    pub fn new_batch(&self) -> Batch {
        let SequenceLimits { rows_max, running_max, context, .. } = self.limits;
        let mut batch = Batch::default();
        batch.tokens.reserve(rows_max);
        batch.positions.reserve(rows_max);
        batch.slices.reserve(running_max);
        batch.outputs.reserve(self.limits.outputs_max());
        batch.drawn.reserve(running_max);
        batch.tables.resize_with(self.limits.groups.len(), Default::default);
        for table in &mut batch.tables {
            table.blocks.reserve(running_max * blocks_for(context) as usize);
            table.bounds.reserve(running_max + 1);
        }
        batch.clear();
        batch
    }

    /// Applies the ends and starts of a step.
    pub fn begin(&mut self, step: &Step) -> Result<(), Violation> {
        self.n_begun += 1;
        step.ends.iter().for_each(|id| self.forget(*id));
        step.starts.iter().try_for_each(|request| self.start(request))
    }

    /// The freed blocks of each group that must be cleared before the step that has begun stores anything. None where
    /// blocks are not cleared.
    pub fn uncleared(&mut self) -> Option<&mut [Vec<BlockId>]> {
        self.let_go.as_mut().map(LetGo::uncleared)
    }

    /// Frees all sequences.
    pub fn forget_all(&mut self) {
        let ids: Vec<RequestId> = self.held.keys().copied().collect();
        ids.into_iter().for_each(|id| self.forget(id));
    }

    /// The step whose tokens this rank must receive before it can lay out the rows of the begun step. None if it knows
    /// enough; ask again after each `hear`.
    pub fn must_hear(&self, step: &Step) -> Option<StepId> {
        let Tokens::IsTold { late_max } = self.tokens else { return None };
        let (oldest, _) = self.untold.steps.front()?;
        let needs = |slice: &Slice| self.held.get(&slice.id).is_some_and(|sequence| sequence.needs_untold(slice));
        let must = self.untold.steps.len() > late_max || step.slices.iter().any(needs);
        must.then_some(*oldest)
    }

    /// Takes the tokens drawn in the step that `must_hear` named, in the order of its slices.
    pub fn hear(&mut self, tokens: &[Option<Token>]) -> Result<(), Violation> {
        let Some((step, n_draws)) = self.untold.steps.pop_front() else { return Ok(()) };
        if tokens.len() != n_draws {
            return Err(Violation::NotAsManyTokens { step: step.0, n: tokens.len(), n_draws });
        }
        let n_vocab = self.limits.n_vocab;
        for (draw, token) in self.untold.draws.drain(..n_draws).zip(tokens) {
            if let Some(token) = token.filter(|token| *token >= n_vocab) {
                return Err(Violation::NoSuchToken { id: draw.id, token, n_vocab });
            }
            if let Some(sequence) = self.held.get_mut(&draw.id) {
                sequence.hear(draw, *token);
            }
        }
        Ok(())
    }

    /// Applies the slices of a step, and lays out its rows.
    pub fn lay_out(&mut self, step: &Step, batch: &mut Batch) -> Result<(), Violation> {
        batch.clear();
        let mut blocks = step.blocks.as_slice();
        for slice in &step.slices {
            self.slice(slice, &mut blocks, batch)?;
        }
        if !blocks.is_empty() {
            return Err(Violation::BlocksLeftOver(blocks.len()));
        }
        Ok(())
    }

    fn start(&mut self, request: &Request) -> Result<(), Violation> {
        let id = request.id;
        let SequenceLimits { n_vocab, context, running_max, .. } = self.limits;
        let n_tokens = u32::try_from(request.n_tokens()).unwrap_or(u32::MAX);
        if n_tokens == 0 {
            return Err(Violation::NoTokens(id));
        }
        if n_tokens > context {
            return Err(Violation::TooLong { id, end: n_tokens, context });
        }
        let mut tokens = request.prompt.iter().chain(&request.output);
        if let Some(&token) = tokens.find(|token| **token >= n_vocab) {
            return Err(Violation::NoSuchToken { id, token, n_vocab });
        }
        self.forget(id);
        if self.held.len() >= running_max {
            return Err(Violation::TooManySequences { n: self.held.len() + 1, running_max });
        }
        let mut sequence = self.spare.pop().unwrap_or_default();
        sequence.restart(request, &self.limits, self.n_begun);
        self.held.insert(id, sequence);
        Ok(())
    }

    fn slice(&mut self, slice: &Slice, blocks: &mut &[BlockId], batch: &mut Batch) -> Result<(), Violation> {
        let sequence = self.held.get_mut(&slice.id).ok_or(Violation::Unknown(slice.id))?;
        sequence.check(slice, &self.limits, self.n_begun)?;
        sequence.take_blocks(slice, blocks, &self.limits)?;
        sequence.last_slice = self.n_begun;
        sequence.n_computed = slice.range.end;
        if let Some(let_go) = &mut self.let_go {
            let_go.pass(&sequence.tables, &slice.range);
        }
        let n_rows = batch.n_rows() + slice.range.len();
        if n_rows > self.limits.rows_max {
            return Err(Violation::TooManyRows { n: n_rows, rows_max: self.limits.rows_max });
        }
        sequence.mark_written(slice, &mut self.written, self.n_begun)?;
        sequence.lay_out(slice, batch);
        let (n, outputs_max) = (batch.outputs.len(), self.limits.outputs_max());
        if n > outputs_max { Err(Violation::TooManyOutputs { n, outputs_max }) } else { Ok(()) }
    }

    /// The draws of a step's outputs, in the order of `batch.outputs`.
    pub fn draws<'a>(&'a self, step: &Step, draws: &mut Vec<Draw<'a>>) {
        draws.clear();
        for slice in &step.slices {
            let Some(sequence) = self.held.get(&slice.id) else { continue };
            for (token, n_top) in sequence.scores(slice) {
                let (prompt, output) = (&sequence.tokens[..0], &sequence.tokens[..0]);
                let score = Some(Score { token, n_top });
                draws.push(Draw { sampling: &sequence.sampling, prompt, output, score });
            }
            if sequence.draws(slice) {
                let log = &sequence.tokens[..slice.range.end as usize];
                let (prompt, output) = log.split_at(sequence.n_prompt.min(log.len()));
                draws.push(Draw { sampling: &sequence.sampling, prompt, output, score: None });
            }
        }
    }

    /// Whether `next` may begin before the draws of `step` are known: it starts no sequence, ends none that `step`
    /// computes, and asks only for drawn tokens. If so, logs from now on count the pending tokens.
    pub fn can_follow(&mut self, step: &Step, next: &Step) -> bool {
        let is_in_step = |id: &RequestId| step.slices.iter().any(|slice| slice.id == *id);
        let is_plain = |slice: &Slice| matches!(slice.want, Want::Nothing | Want::Last);
        let may = next.starts.is_empty()
            && next.copies.is_empty()
            && !next.ends.iter().any(is_in_step)
            && next.slices.iter().all(is_plain)
            && step.slices.iter().all(is_plain);
        if !may {
            return false;
        }
        let drawing = step.slices.iter().filter(|slice| slice.want == Want::Last);
        for (slice, draw) in drawing.zip(0..) {
            let Some(sequence) = self.held.get_mut(&slice.id) else { return false };
            if sequence.grow(slice.range.end, UNKNOWN) {
                sequence.promised = Some((slice.range.end, draw));
            }
        }
        let is_in_log = |slice: &Slice| {
            let n_tokens = self.held.get(&slice.id).map_or(0, |sequence| sequence.tokens.len());
            slice.range.end as usize <= n_tokens
        };
        next.slices.iter().all(is_in_log)
    }

    /// Adds up the rows of the slices to be pooled; `read` copies a row into the given memory.
    pub fn pool(&mut self, step: &Step, pass: &Pass<'_>, state: &mut [f32], mut read: impl FnMut(usize, &mut [f32])) {
        for (slice, laid) in step.slices.iter().zip(pass.slices).filter(|(slice, _)| slice.want == Want::Pool) {
            let Some(sequence) = self.held.get_mut(&slice.id) else { continue };
            for row in laid.rows.clone() {
                read(row as usize, state);
                sequence.pool(state);
            }
        }
    }

    /// On the sampler: appends the drawn tokens to the logs, answers each slice, and leaves in `told` the message for
    /// the first stage, with no token for a failed request.
    pub fn finish(
        &mut self,
        step: &Step,
        drawn: &mut [Option<TokenOut>],
        told: &mut Vec<Option<Token>>,
        done: &mut Vec<SliceDone>,
    ) {
        let mut drawn = drawn.iter_mut();
        told.clear();
        done.resize_with(step.slices.len(), SliceDone::default);
        for (slice, done) in step.slices.iter().zip(done) {
            clear(done);
            let Some(sequence) = self.held.get_mut(&slice.id) else { continue };
            for _ in sequence.scored(slice) {
                let out = drawn.next().and_then(Option::take);
                sequence.failed |= out.is_none();
                done.scored.extend(out);
            }
            if slice.want == Want::Pool && slice.range.end as usize == sequence.n_prompt {
                sequence.give_pooled(&mut done.pooled);
                sequence.failed |= done.pooled.is_empty();
            }
            if sequence.draws(slice) {
                let out = drawn.next().and_then(Option::take).filter(|_| !sequence.failed);
                let token = out.as_ref().map(|out| out.token);
                sequence.failed |= token.is_none();
                sequence.learn(slice.range.end, token.unwrap_or(UNKNOWN));
                told.push(token);
                done.tokens.extend(out);
            }
            done.failed = sequence.failed;
        }
    }

    /// On ranks that do not draw: the logs grow by the positions drawn elsewhere.
    pub fn pass_by(&mut self, step: &Step) {
        let is_told = matches!(self.tokens, Tokens::IsTold { .. });
        let n_before = self.untold.draws.len();
        for slice in &step.slices {
            let held = self.held.get_mut(&slice.id);
            let Some(sequence) = held.filter(|sequence| sequence.draws(slice)) else { continue };
            let has_grown = sequence.grow(slice.range.end, UNKNOWN);
            if is_told {
                sequence.is_untold |= has_grown;
                let draw = UntoldDraw { id: slice.id, life: sequence.life, position: slice.range.end };
                self.untold.draws.push_back(draw);
            }
        }
        let n_draws = self.untold.draws.len() - n_before;
        if n_draws > 0 {
            self.untold.steps.push_back((step.id, n_draws));
        }
    }

    fn forget(&mut self, id: RequestId) {
        if let Some(sequence) = self.held.remove(&id) {
            if let Some(let_go) = &mut self.let_go {
                let_go.leave(&sequence.tables, sequence.n_computed);
            }
            self.spare.push(sequence);
        }
    }
}

impl Sequence {
    fn restart(&mut self, request: &Request, limits: &SequenceLimits, life: u64) {
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
        self.is_untold = false;
        self.pooled.clear();
        self.promised = None;
        self.failed = false;
        self.tables.resize_with(limits.groups.len(), Vec::new);
        for table in &mut self.tables {
            table.clear();
            table.reserve(blocks_for(n_max as u32) as usize);
        }
    }

    fn check(&self, slice: &Slice, limits: &SequenceLimits, step: u64) -> Result<(), Violation> {
        let (id, start, end, context) = (slice.id, slice.range.start, slice.range.end, limits.context);
        if start >= end {
            return Err(Violation::Empty { id, start });
        }
        if self.last_slice == step {
            return Err(Violation::TwoSlices(id));
        }
        // Only full blocks are shared, so a shared prefix ends at a block's end.
        let shared_prefix = self.last_slice == 0 && start.is_multiple_of(BLOCK_TOKENS) && !limits.zero_kv;
        if start != self.n_computed && !shared_prefix {
            return Err(Violation::Gap { id, start, n_computed: self.n_computed });
        }
        if end > context {
            return Err(Violation::TooLong { id, end, context });
        }
        let n_tokens = self.tokens.len() as u32;
        if end > n_tokens {
            return Err(Violation::NotInLog { id, end, n_tokens });
        }
        Ok(())
    }

    fn take_blocks(
        &mut self,
        slice: &Slice,
        blocks: &mut &[BlockId],
        limits: &SequenceLimits,
    ) -> Result<(), Violation> {
        let id = slice.id;
        for ((group, &n_blocks), table) in limits.groups.iter().zip(&limits.n_blocks).zip(&mut self.tables) {
            let needed = (group.n_blocks(slice.range.end) as usize).saturating_sub(table.len());
            let Some((new, rest)) = blocks.split_at_checked(needed) else {
                return Err(Violation::TooFewBlocks { id, needed, n_left: blocks.len() });
            };
            // Positions behind the window of everything still to come need no blocks.
            let n_unread = (group.n_passed(slice.range.start) as usize).saturating_sub(table.len()).min(needed);
            let is_missing =
                |(i, block): &(usize, &BlockId)| block.0 >= n_blocks && !(*i < n_unread && **block == BlockId::NONE);
            if let Some((_, block)) = new.iter().enumerate().find(is_missing) {
                return Err(Violation::NoSuchBlock { id, block: block.0, n_blocks });
            }
            table.extend_from_slice(new);
            *blocks = rest;
        }
        Ok(())
    }

    /// Many threads store rows at once, so no two slices may store into one block.
    fn mark_written(&self, slice: &Slice, written: &mut [Vec<u64>], stamp: u64) -> Result<(), Violation> {
        let touched = slice.range.start / BLOCK_TOKENS..blocks_for(slice.range.end);
        for (table, written) in self.tables.iter().zip(written) {
            for block in &table[touched.start as usize..touched.end as usize] {
                let last = &mut written[block.0 as usize];
                if *last == stamp {
                    return Err(Violation::WrittenTwice { id: slice.id, block: block.0 });
                }
                *last = stamp;
            }
        }
        Ok(())
    }

    /// Appends a drawn token at its position, unless the log already holds that position. Whether it was appended.
    fn grow(&mut self, position: u32, token: Token) -> bool {
        let is_new = self.tokens.len() == position as usize;
        if is_new {
            self.tokens.push(token);
        }
        is_new
    }

    /// Sets a drawn token, whether or not the log has already counted it.
    fn learn(&mut self, position: u32, token: Token) {
        match self.promised.take_if(|(promised, _)| *promised == position) {
            Some(_) => self.tokens[position as usize] = token,
            None => drop(self.grow(position, token)),
        }
    }

    /// Whether the slice has a row for the token not yet received.
    fn needs_untold(&self, slice: &Slice) -> bool {
        self.is_untold && slice.range.end as usize >= self.tokens.len()
    }

    fn hear(&mut self, draw: UntoldDraw, token: Option<Token>) {
        let is_ours = self.life == draw.life && self.is_untold && self.tokens.len() == draw.position as usize + 1;
        if let Some(last) = self.tokens.last_mut().filter(|_| is_ours) {
            *last = token.unwrap_or(UNKNOWN);
            self.is_untold = false;
        }
    }

    /// Whether the slice draws the token after its range. Asked before the log grows.
    fn draws(&self, slice: &Slice) -> bool {
        match slice.want {
            Want::Last => true,
            Want::All { .. } => slice.range.end as usize == self.tokens.len(),
            Want::Nothing | Want::Pool => false,
        }
    }

    /// Positions whose rows are scored: those followed by another token of the prompt.
    fn scored(&self, slice: &Slice) -> Range<u32> {
        match slice.want {
            Want::All { .. } => {
                slice.range.start..slice.range.end.min((self.n_prompt as u32).saturating_sub(1)).max(slice.range.start)
            }
            Want::Nothing | Want::Last | Want::Pool => 0..0,
        }
    }

    /// The token that each scored row is asked for, and how many likely ones beside it.
    fn scores(&self, slice: &Slice) -> Vec<(Token, u8)> {
        let top_n = if let Want::All { top_n } = slice.want { top_n } else { 0 };
        self.scored(slice).map(|position| (self.tokens[position as usize + 1], top_n)).collect()
    }

    /// Adds a position's hidden state. Positions come in order, so the sum has one order.
    fn pool(&mut self, state: &[f32]) {
        self.pooled.resize(state.len(), 0.0);
        self.pooled.iter_mut().zip(state).for_each(|(sum, value)| *sum += value);
    }

    /// The mean over the prompt, if it consists of numbers.
    fn give_pooled(&mut self, to: &mut Vec<f32>) {
        let n = self.n_prompt as f32;
        to.extend(self.pooled.iter().map(|sum| sum / n));
        if !to.iter().all(|value| value.is_finite()) {
            to.clear();
        }
    }

    fn lay_out(&self, slice: &Slice, batch: &mut Batch) {
        let first = batch.n_rows() as u32;
        let rows = first..first + slice.range.len() as u32;
        batch.tokens.extend_from_slice(&self.tokens[slice.range.start as usize..slice.range.end as usize]);
        batch.positions.extend(slice.range.clone());
        if let Some((position, draw)) = self.promised.filter(|(position, _)| slice.range.contains(position)) {
            batch.drawn.push((first + position - slice.range.start, draw));
        }
        batch.outputs.extend(self.scored(slice).map(|position| first + position - slice.range.start));
        if self.draws(slice) {
            batch.outputs.push(rows.end - 1);
        }
        batch.slices.push(PassSlice { rows, range: slice.range.clone(), want: slice.want });
        for (of_batch, of_sequence) in batch.tables.iter_mut().zip(&self.tables) {
            of_batch.blocks.extend_from_slice(of_sequence);
            of_batch.bounds.push(of_batch.blocks.len() as u32);
        }
    }
}

/// Clears an answer and keeps its memory.
fn clear(done: &mut SliceDone) {
    done.tokens.clear();
    done.scored.clear();
    done.pooled.clear();
    done.failed = false;
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: RequestId = RequestId(1);

    fn sequences() -> Sequences {
        sequences_that(Tokens::Draws)
    }

    fn sequences_that(tokens: Tokens) -> Sequences {
        Sequences::new(limits(), tokens)
    }

    fn limits() -> SequenceLimits {
        SequenceLimits {
            n_vocab: 100,
            context: 64,
            groups: vec![CacheGroup::FULL],
            n_blocks: vec![8],
            rows_max: 40,
            running_max: 2,
            zero_kv: false,
        }
    }

    fn request(id: RequestId, n_prompt: u32) -> Request {
        Request { id, prompt: (0..n_prompt).collect(), ..Request::default() }
    }

    fn slice(range: std::ops::Range<u32>, want: Want) -> Slice {
        Slice { id: ID, range, n_draft: 0, want }
    }

    fn step(starts: &[Request], slices: &[Slice], blocks: &[u32]) -> Step {
        let blocks = blocks.iter().copied().map(BlockId).collect();
        Step { starts: starts.into(), slices: slices.into(), blocks, ..Step::default() }
    }

    /// Runs a step in which every draw is the given token, or none.
    fn run(sequences: &mut Sequences, step: &Step, token: Option<Token>) -> Result<(Batch, Vec<SliceDone>), Violation> {
        let mut batch = sequences.new_batch();
        sequences.begin(step)?;
        sequences.lay_out(step, &mut batch)?;
        let mut draws = Vec::new();
        sequences.draws(step, &mut draws);
        assert_eq!(draws.len(), batch.outputs.len());
        let out = |token| TokenOut { token, ..TokenOut::default() };
        let mut drawn: Vec<_> = draws.iter().map(|_| token.map(out)).collect();
        let mut done = Vec::new();
        sequences.finish(step, &mut drawn, &mut Vec::new(), &mut done);
        Ok((batch, done))
    }

    #[test]
    fn a_batch_is_laid_out_slice_by_slice() {
        let mut sequences = sequences();
        let other = Slice { id: RequestId(2), ..slice(0..2, Want::Last) };
        let starts = [request(ID, 20), request(RequestId(2), 2)];
        let first = step(&starts, &[slice(0..17, Want::Nothing), other], &[7, 3, 5]);
        let (batch, done) = run(&mut sequences, &first, Some(42)).unwrap();
        assert_eq!(batch.n_rows(), 19);
        assert_eq!(batch.positions[15..], [15, 16, 0, 1]);
        assert_eq!(batch.outputs, [18]);
        let slices = [PassSlice::new(0..17, 0, Want::Nothing), PassSlice::new(17..19, 0, Want::Last)];
        assert_eq!(batch.slices, slices);
        assert_eq!(batch.tables[0].of(0), [BlockId(7), BlockId(3)]);
        assert_eq!(batch.tables[0].of(1), [BlockId(5)]);
        assert!(done[0].tokens.is_empty() && done[1].tokens[0].token == 42);

        let other = Slice { id: RequestId(2), ..slice(2..3, Want::Last) };
        let (batch, _) = run(&mut sequences, &step(&[], &[slice(17..20, Want::Last), other], &[]), Some(43)).unwrap();
        assert_eq!(batch.tokens, [17, 18, 19, 42]);
        assert_eq!(batch.slices[0].range.start, 17);
        assert_eq!(batch.outputs, [2, 3]);
    }

    #[test]
    fn draws_see_the_log_before_the_token() {
        let mut sequences = sequences();
        let again = Request { output: vec![50, 51], ..request(ID, 4) };
        let all = step(&[again], &[slice(0..6, Want::Last)], &[0]);
        sequences.begin(&all).unwrap();
        sequences.lay_out(&all, &mut Batch { tables: vec![Default::default()], ..Batch::default() }).unwrap();
        let mut draws = Vec::new();
        sequences.draws(&all, &mut draws);
        assert_eq!((draws[0].position(), draws[0].n_output()), (6, 2));
        assert_eq!((draws[0].prompt, draws[0].output), ([0, 1, 2, 3].as_slice(), [50, 51].as_slice()));
    }

    #[test]
    fn a_drawn_token_that_the_log_holds_is_not_learned_twice() {
        let mut sequences = sequences();
        let again = Request { output: vec![50, 51], ..request(ID, 4) };
        run(&mut sequences, &step(&[again], &[slice(0..5, Want::Last)], &[0]), Some(99)).unwrap();
        let (batch, _) = run(&mut sequences, &step(&[], &[slice(5..6, Want::Last)], &[]), Some(52)).unwrap();
        assert_eq!(batch.tokens, [51]);
    }

    #[test]
    fn a_request_that_draws_nothing_fails_alone() {
        let mut sequences = sequences();
        let (_, done) = run(&mut sequences, &step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]), None).unwrap();
        assert!(done[0].failed && done[0].tokens.is_empty());
        // What was planned ahead keeps its rows, as on ranks that do not know of the failure, and its results are
        // discarded.
        let planned = step(&[], &[slice(3..4, Want::Last)], &[]);
        let (batch, done) = run(&mut sequences, &planned, Some(1)).unwrap();
        assert!(batch.tokens == [UNKNOWN] && done[0].failed && done[0].tokens.is_empty());
        // After a restart it is sound again.
        let (_, done) =
            run(&mut sequences, &step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[4]), Some(8)).unwrap();
        assert!(!done[0].failed && done[0].tokens.len() == 1);
    }

    /// The rows of a rank that receives `token` for each draw, and the number of messages that it received.
    fn run_told(sequences: &mut Sequences, step: &Step, token: Option<Token>) -> (Vec<Token>, usize) {
        let (mut batch, mut n_told) = (sequences.new_batch(), 0);
        sequences.begin(step).unwrap();
        while sequences.must_hear(step).is_some() {
            sequences.hear(&vec![token; sequences.untold.steps[0].1]).unwrap();
            n_told += 1;
        }
        sequences.lay_out(step, &mut batch).unwrap();
        sequences.pass_by(step);
        (batch.tokens, n_told)
    }

    #[test]
    fn who_is_told_waits_only_for_what_it_needs() {
        let mut sequences = sequences_that(Tokens::IsTold { late_max: 2 });
        let other = |range| Slice { id: RequestId(2), ..slice(range, Want::Last) };
        let starts = [request(ID, 3), request(RequestId(2), 3)];
        let mut told = |step: &Step, token| run_told(&mut sequences, step, token);
        assert_eq!(told(&step(&starts, &[slice(0..3, Want::Last)], &[0]), None), (vec![0, 1, 2], 0));
        assert_eq!(told(&step(&[], &[other(0..3)], &[1]), None), (vec![0, 1, 2], 0));
        assert_eq!(told(&step(&[], &[slice(3..4, Want::Last)], &[]), Some(42)), (vec![42], 1));
        assert_eq!(told(&step(&[], &[other(3..4)], &[]), Some(43)), (vec![43], 1));
        // It restarts from its prompt: a token drawn before that is not for it.
        let again = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[2]);
        assert_eq!(told(&again, None), (vec![0, 1, 2], 0));
        assert_eq!(told(&step(&[], &[slice(3..4, Want::Last)], &[]), Some(44)), (vec![44], 3));
        // More messages than may be late.
        for at in 3..6 {
            told(&step(&[request(ID, at)], &[slice(0..at, Want::Last)], &[3]), Some(9));
        }
        assert_eq!(sequences.untold.steps.len(), 3);
    }

    #[test]
    fn a_failed_draw_leaves_the_same_rows_on_all_ranks() {
        let first = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]);
        let next = step(&[], &[slice(3..4, Want::Last)], &[]);
        let mut sampler = sequences();
        run(&mut sampler, &first, None).unwrap();
        let expected = run(&mut sampler, &next, Some(5)).unwrap().0.tokens;
        for tokens in [Tokens::IsTold { late_max: 0 }, Tokens::IsTold { late_max: 3 }, Tokens::NeverKnows] {
            let mut sequences = sequences_that(tokens);
            run_told(&mut sequences, &first, None);
            assert_eq!(run_told(&mut sequences, &next, None).0, expected);
        }
    }

    #[test]
    fn what_a_sampler_cannot_have_drawn_is_refused() {
        let check = |told: &[Option<Token>], expected: Violation| {
            let mut sequences = sequences_that(Tokens::IsTold { late_max: 0 });
            run_told(&mut sequences, &step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]), None);
            assert_eq!(sequences.must_hear(&Step::default()), Some(StepId(0)));
            assert_eq!(sequences.hear(told).unwrap_err(), expected);
        };
        check(&[], Violation::NotAsManyTokens { step: 0, n: 0, n_draws: 1 });
        check(&[Some(1), None], Violation::NotAsManyTokens { step: 0, n: 2, n_draws: 1 });
        check(&[Some(100)], Violation::NoSuchToken { id: ID, token: 100, n_vocab: 100 });
    }

    /// All steps are in flight: nothing is received before it must be.
    #[test]
    fn what_was_drawn_for_an_earlier_life_is_dropped() {
        let mut sequences = sequences_that(Tokens::IsTold { late_max: 8 });
        let mut silent = |step: &Step| {
            sequences.begin(step).unwrap();
            sequences.lay_out(step, &mut sequences.new_batch()).unwrap();
            sequences.pass_by(step);
        };
        // Preempted while a draw is on its way, it restarts from the same log and draws at the same position. Then it
        // ends, and another request takes its id.
        let first = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]);
        let again = Step { ends: vec![ID], ..first.clone() };
        let other = Request { prompt: vec![9, 8, 7], ..request(ID, 3) };
        [&first, &again, &Step { starts: vec![other], ..again.clone() }].into_iter().for_each(&mut silent);
        let next = step(&[], &[slice(3..4, Want::Last)], &[]);
        sequences.begin(&next).unwrap();
        for (token, is_told) in [(50, false), (51, false), (52, true)] {
            assert!(sequences.must_hear(&next).is_some(), "a row needs what has not been told");
            sequences.hear(&[Some(token)]).unwrap();
            assert_eq!(sequences.held[&ID].is_untold, !is_told, "{token}");
        }
        assert_eq!(sequences.must_hear(&next), None);
        let mut batch = sequences.new_batch();
        sequences.lay_out(&next, &mut batch).unwrap();
        assert_eq!(batch.tokens, [52], "its own, once");
    }

    #[test]
    fn a_draw_of_a_log_that_has_gone_on_is_dropped() {
        let mut sequences = sequences_that(Tokens::IsTold { late_max: 8 });
        let first = step(&[request(ID, 3)], &[slice(0..3, Want::Last)], &[0]);
        // The drawn token has reached the coordinator: the log that restarts has it, and draws one position further on.
        let longer = Request { output: vec![50], ..request(ID, 3) };
        let again = Step { ends: vec![ID], ..step(&[longer], &[slice(0..4, Want::Last)], &[0]) };
        for step in [&first, &again] {
            sequences.begin(step).unwrap();
            sequences.lay_out(step, &mut sequences.new_batch()).unwrap();
            sequences.pass_by(step);
        }
        let next = step(&[], &[slice(4..5, Want::Last)], &[]);
        assert_eq!(run_told(&mut sequences, &next, Some(77)), (vec![77], 2));
        assert_eq!(sequences.held[&ID].tokens[..5], [0, 1, 2, 50, 77]);
    }

    #[test]
    fn what_is_let_go_is_told_once_and_before_others_may_have_it() {
        let window = CacheGroup::FULL.within(20);
        let groups = vec![CacheGroup::FULL, window];
        let limits = SequenceLimits { groups, n_blocks: vec![8, 8], zero_kv: true, ..limits() };
        let mut sequences = Sequences::new(limits, Tokens::Draws);
        let mut after = |step: &Step| {
            sequences.begin(step).unwrap();
            let told = sequences.uncleared().unwrap();
            let blocks: Vec<Vec<u32>> =
                told.iter().map(|of| of.iter().map(|block: &types::BlockId| block.0).collect()).collect();
            told.iter_mut().for_each(Vec::clear);
            sequences.lay_out(step, &mut sequences.new_batch()).unwrap();
            sequences.finish(step, &mut [], &mut Vec::new(), &mut Vec::new());
            blocks
        };
        let none: Vec<Vec<u32>> = vec![vec![], vec![]];
        let other = RequestId(2);
        let first = step(&[request(ID, 60)], &[slice(0..33, Want::Nothing)], &[1, 2, 3, 4, 5, 6]);
        assert_eq!(after(&first), none);
        // Blocks of the window's group that the next position does not read are not there for the next step.
        assert_eq!(after(&step(&[], &[slice(33..40, Want::Nothing)], &[])), none);
        let beside = Slice { id: other, range: 0..5, n_draft: 0, want: Want::Nothing };
        let crowd = step(&[request(other, 9)], &[slice(40..60, Want::Nothing), beside.clone()], &[7, 0, 0, 4]);
        assert_eq!(after(&crowd), [vec![], vec![4]]);
        // One ends, and the other restarts in the step that would have ended it.
        let again = Step { ends: vec![ID], ..step(&[request(other, 9)], &[beside], &[2, 2]) };
        assert_eq!(after(&again), [vec![0, 1, 2, 3, 7], vec![0, 4, 5, 6]]);
        assert_eq!(after(&Step { ends: vec![other, ID], ..Step::default() }), [vec![2], vec![2]]);
        assert_eq!(after(&Step::default()), none);
        // Blocks are never shared there, so no sequence begins behind a shared prefix.
        let hit = step(&[request(ID, 50)], &[slice(16..50, Want::Last)], &[0, 1, 2, 3, 0, 1, 2, 3]);
        sequences.begin(&hit).unwrap();
        let refused = sequences.lay_out(&hit, &mut sequences.new_batch()).unwrap_err();
        assert_eq!(refused, Violation::Gap { id: ID, start: 16, n_computed: 0 });
    }

    #[test]
    fn a_window_needs_no_block_behind_it_and_each_group_has_its_own_pool() {
        let window = CacheGroup::FULL.within(20);
        let windowed = || {
            let limits = SequenceLimits { groups: vec![CacheGroup::FULL, window], n_blocks: vec![8, 4], ..limits() };
            Sequences::new(limits, Tokens::Draws)
        };
        let none = BlockId::NONE.0;
        // After 48 positions, 29 to 47 are read: the first of its three blocks is not.
        let hit = |blocks: &[u32]| {
            run(&mut windowed(), &step(&[request(ID, 50)], &[slice(48..50, Want::Last)], blocks), Some(1))
        };
        let (batch, _) = hit(&[4, 5, 6, 7, none, 1, 2, 3]).unwrap();
        assert_eq!(batch.tables[0].of(0), [4, 5, 6, 7].map(BlockId));
        assert_eq!(batch.tables[1].of(0), [none, 1, 2, 3].map(BlockId));
        hit(&[4, 5, 6, 7, 0, 1, 2, 3]).unwrap();
        let refused = |block, n_blocks| Violation::NoSuchBlock { id: ID, block, n_blocks };
        assert_eq!(hit(&[4, 5, 6, 7, none, none, 2, 3]).unwrap_err(), refused(none, 4), "it is read");
        assert_eq!(hit(&[none, 5, 6, 7, none, 1, 2, 3]).unwrap_err(), refused(none, 8), "all is read");
        assert_eq!(hit(&[4, 5, 6, 7, none, 1, 2, 4]).unwrap_err(), refused(4, 4), "the pool is smaller");
        assert_eq!(hit(&[4, 5, 6, 7, 9, 1, 2, 3]).unwrap_err(), refused(9, 4), "no block, and not said to be none");
        // The same id in two groups is not the same block.
        hit(&[3, 2, 1, 0, none, 2, 1, 0]).unwrap();
    }

    #[test]
    fn ends_come_first_and_a_start_replaces() {
        let mut sequences = sequences();
        let two = [request(ID, 3), request(RequestId(2), 3)];
        run(&mut sequences, &step(&two, &[], &[]), None).unwrap();
        let third = request(RequestId(3), 3);
        let ended = Step { ends: vec![RequestId(2)], ..step(&[third], &[], &[]) };
        run(&mut sequences, &ended, None).unwrap();
        run(&mut sequences, &step(&[request(ID, 5)], &[slice(0..5, Want::Last)], &[0]), Some(1)).unwrap();
        assert_eq!(sequences.len(), 2);
    }

    #[test]
    fn a_prefix_computed_by_others_is_full_blocks() {
        let shared = |start| {
            run(&mut sequences(), &step(&[request(ID, 40)], &[slice(start..40, Want::Last)], &[1, 2, 3]), Some(1))
        };
        assert_eq!(shared(32).unwrap().0.positions[0], 32);
        assert_eq!(shared(20).unwrap_err(), Violation::Gap { id: ID, start: 20, n_computed: 0 });
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        let begun = step(&[request(ID, 20)], &[slice(0..10, Want::Nothing)], &[0]);
        let check = |step: Step, expected: Violation| {
            let mut sequences = sequences();
            run(&mut sequences, &begun, None).unwrap();
            assert_eq!(run(&mut sequences, &step, Some(1)).unwrap_err(), expected);
        };
        let last = |range| slice(range, Want::Last);
        let (id, other) = (ID, RequestId(2));
        check(step(&[], &[Slice { id: other, ..last(0..1) }], &[1]), Violation::Unknown(other));
        check(step(&[], &[last(11..20)], &[1]), Violation::Gap { id, start: 11, n_computed: 10 });
        check(step(&[], &[last(0..20)], &[1]), Violation::Gap { id, start: 0, n_computed: 10 });
        check(step(&[], &[last(10..10)], &[]), Violation::Empty { id, start: 10 });
        check(step(&[], &[last(10..21)], &[1]), Violation::NotInLog { id, end: 21, n_tokens: 20 });
        check(step(&[], &[last(10..u32::MAX)], &[1]), Violation::TooLong { id, end: u32::MAX, context: 64 });
        check(step(&[], &[last(10..12), last(12..20)], &[1]), Violation::TwoSlices(id));
        check(step(&[], &[last(10..20)], &[]), Violation::TooFewBlocks { id, needed: 1, n_left: 0 });
        check(step(&[], &[last(10..20)], &[8]), Violation::NoSuchBlock { id, block: 8, n_blocks: 8 });
        check(step(&[], &[last(10..20)], &[1, 2]), Violation::BlocksLeftOver(1));
        check(step(&[], &[last(10..20)], &[0]), Violation::WrittenTwice { id, block: 0 });
        check(step(&[request(other, 0)], &[], &[]), Violation::NoTokens(other));
        check(step(&[request(other, 65)], &[], &[]), Violation::TooLong { id: other, end: 65, context: 64 });
        let foreign = Request { prompt: vec![100], ..request(other, 0) };
        check(step(&[foreign], &[], &[]), Violation::NoSuchToken { id: other, token: 100, n_vocab: 100 });
        let many = [request(other, 1), request(RequestId(3), 1)];
        check(step(&many, &[], &[]), Violation::TooManySequences { n: 3, running_max: 2 });
        let long = Slice { id: other, ..last(0..40) };
        let rows = step(&[request(other, 40)], &[last(10..20), long], &[1, 2, 3, 4]);
        check(rows, Violation::TooManyRows { n: 50, rows_max: 40 });
    }
}
