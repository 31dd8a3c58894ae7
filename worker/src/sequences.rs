//! What a rank remembers of each request, and how a step changes it: the token log, the block tables, how far it is
//! computed. Knows nothing of models or devices; a step that contradicts what is here is refused and never followed.

use backend::{Batch, BatchSlice, Draw};
use std::collections::HashMap;
use types::cache::blocks_for;
use types::{
    BLOCK_TOKENS, BlockId, CacheGroup, Request, RequestId, Sampling, Slice, SliceDone, Step, Token, TokenOut, Want,
};

/// What this rank can hold and run at once. A step beyond it breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceLimits {
    pub n_vocab: u32,
    /// Positions of one sequence.
    pub context: u32,
    pub n_blocks: u32,
    pub groups: Vec<CacheGroup>,
    /// Rows of one step.
    pub rows_max: usize,
    /// Sequences held, and so the slices of one step.
    pub running_max: usize,
}

impl SequenceLimits {
    /// Rows of one step whose logits are wanted: one per slice, and no slice is empty.
    pub fn outputs_max(&self) -> usize {
        self.rows_max.min(self.running_max)
    }
}

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
    #[error("{0} blocks are left over")]
    BlocksLeftOver(usize),
    #[error("{n} rows, {rows_max} at most")]
    TooManyRows { n: usize, rows_max: usize },
    #[error("{n} sequences, {running_max} at most")]
    TooManySequences { n: usize, running_max: usize },
}

pub struct Sequences {
    limits: SequenceLimits,
    held: HashMap<RequestId, Sequence>,
    /// Forgotten sequences, kept for their memory.
    spare: Vec<Sequence>,
    /// In which step each block of each group was last written, to notice two writers in one.
    written: Vec<u64>,
    /// Steps begun: the stamp of the present one.
    n_begun: u64,
}

/// `[0, n_computed) in the cache · [n_computed, tokens.len()) to be computed`
#[derive(Debug, Default)]
struct Sequence {
    /// Prompt and output.
    tokens: Vec<Token>,
    n_prompt: usize,
    sampling: Sampling,
    n_computed: u32,
    /// The step of its last slice; 0 if none has run, and the first may begin behind a prefix that others have computed.
    last_slice: u64,
    /// Nothing could be drawn. What was planned ahead for it is skipped.
    failed: bool,
    /// Per cache group, the blocks of its positions.
    tables: Vec<Vec<BlockId>>,
}

impl Sequences {
    pub fn new(limits: SequenceLimits) -> Sequences {
        Sequences {
            held: HashMap::with_capacity(limits.running_max),
            spare: Vec::with_capacity(limits.running_max),
            written: vec![0; limits.n_blocks as usize * limits.groups.len()],
            n_begun: 0,
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
        batch.outputs.reserve(running_max);
        batch.tables.resize_with(self.limits.groups.len(), Default::default);
        for table in &mut batch.tables {
            table.blocks.reserve(running_max * blocks_for(context) as usize);
            table.bounds.reserve(running_max + 1);
        }
        batch.clear();
        batch
    }

    /// Applies the ends, starts and slices of a step, and lays out its rows. Slices of failed requests get no rows.
    pub fn begin(&mut self, step: &Step, batch: &mut Batch) -> Result<(), Violation> {
        self.n_begun += 1;
        batch.clear();
        step.ends.iter().for_each(|id| self.forget(*id));
        step.starts.iter().try_for_each(|request| self.start(request))?;
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
        sequence.restart(request, &self.limits);
        self.held.insert(id, sequence);
        Ok(())
    }

    fn slice(&mut self, slice: &Slice, blocks: &mut &[BlockId], batch: &mut Batch) -> Result<(), Violation> {
        let sequence = self.held.get_mut(&slice.id).ok_or(Violation::Unknown(slice.id))?;
        sequence.check(slice, self.limits.context, self.n_begun)?;
        sequence.take_blocks(slice, blocks, &self.limits)?;
        sequence.last_slice = self.n_begun;
        sequence.n_computed = slice.range.end;
        if !sequence.failed {
            let n_rows = batch.n_rows() + slice.range.len();
            if n_rows > self.limits.rows_max {
                return Err(Violation::TooManyRows { n: n_rows, rows_max: self.limits.rows_max });
            }
            sequence.mark_written(slice, &mut self.written, self.limits.n_blocks, self.n_begun)?;
            sequence.lay_out(slice, batch);
        }
        Ok(())
    }

    /// The draws of a step's outputs, in the order of `batch.outputs`.
    pub fn draws<'a>(&'a self, step: &Step, draws: &mut Vec<Draw<'a>>) {
        draws.clear();
        for slice in step.slices.iter().filter(|slice| slice.want == Want::Last) {
            if let Some(sequence) = self.held.get(&slice.id)
                && !sequence.failed
            {
                let log = &sequence.tokens[..slice.range.end as usize];
                let (prompt, output) = log.split_at(sequence.n_prompt.min(log.len()));
                draws.push(Draw { sampling: &sequence.sampling, prompt, output });
            }
        }
    }

    /// Appends what was drawn to the logs, and answers each slice.
    pub fn finish(&mut self, step: &Step, drawn: &mut [Option<TokenOut>], done: &mut Vec<SliceDone>) {
        let mut drawn = drawn.iter_mut();
        done.resize_with(step.slices.len(), SliceDone::default);
        for (slice, done) in step.slices.iter().zip(done) {
            clear(done);
            let Some(sequence) = self.held.get_mut(&slice.id) else { continue };
            if slice.want == Want::Last && !sequence.failed {
                match drawn.next().and_then(Option::take) {
                    Some(out) => {
                        sequence.learn(slice.range.end, out.token);
                        done.tokens.push(out);
                    }
                    None => sequence.failed = true,
                }
            }
            done.failed = sequence.failed;
        }
    }

    fn forget(&mut self, id: RequestId) {
        if let Some(sequence) = self.held.remove(&id) {
            self.spare.push(sequence);
        }
    }
}

impl Sequence {
    fn restart(&mut self, request: &Request, limits: &SequenceLimits) {
        /// Tokens that slices planned past a stop may add.
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
        self.failed = false;
        self.tables.resize_with(limits.groups.len(), Vec::new);
        for table in &mut self.tables {
            table.clear();
            table.reserve(blocks_for(n_max as u32) as usize);
        }
    }

    fn check(&self, slice: &Slice, context: u32, step: u64) -> Result<(), Violation> {
        let (id, start, end) = (slice.id, slice.range.start, slice.range.end);
        if start >= end {
            return Err(Violation::Empty { id, start });
        }
        if self.last_slice == step {
            return Err(Violation::TwoSlices(id));
        }
        // Only full blocks are shared, so a prefix that others have computed ends on one.
        let shared_prefix = self.last_slice == 0 && start.is_multiple_of(BLOCK_TOKENS);
        if start != self.n_computed && !shared_prefix {
            return Err(Violation::Gap { id, start, n_computed: self.n_computed });
        }
        if end > context {
            return Err(Violation::TooLong { id, end, context });
        }
        let n_tokens = self.tokens.len() as u32;
        // A failed request's log has stopped growing, while its slices are planned on until the coordinator knows.
        if end > n_tokens && !self.failed {
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
        let (id, n_blocks) = (slice.id, limits.n_blocks);
        for (group, table) in limits.groups.iter().zip(&mut self.tables) {
            let needed = (group.n_blocks(slice.range.end) as usize).saturating_sub(table.len());
            let Some((new, rest)) = blocks.split_at_checked(needed) else {
                return Err(Violation::TooFewBlocks { id, needed, n_left: blocks.len() });
            };
            if let Some(block) = new.iter().find(|block| block.0 >= n_blocks) {
                return Err(Violation::NoSuchBlock { id, block: block.0, n_blocks });
            }
            table.extend_from_slice(new);
            *blocks = rest;
        }
        Ok(())
    }

    /// Rows are stored by many threads at once: no two slices may store into one block.
    fn mark_written(&self, slice: &Slice, written: &mut [u64], n_blocks: u32, stamp: u64) -> Result<(), Violation> {
        let touched = slice.range.start / BLOCK_TOKENS..blocks_for(slice.range.end);
        for (group, table) in self.tables.iter().enumerate() {
            for block in &table[touched.start as usize..touched.end as usize] {
                let last = &mut written[group * n_blocks as usize + block.0 as usize];
                if *last == stamp {
                    return Err(Violation::WrittenTwice { id: slice.id, block: block.0 });
                }
                *last = stamp;
            }
        }
        Ok(())
    }

    /// A drawn token belongs to a position: one that the log already holds is not learned twice.
    fn learn(&mut self, position: u32, token: Token) {
        if self.tokens.len() == position as usize {
            self.tokens.push(token);
        }
    }

    fn lay_out(&self, slice: &Slice, batch: &mut Batch) {
        let first = batch.n_rows() as u32;
        let rows = first..first + slice.range.len() as u32;
        batch.tokens.extend_from_slice(&self.tokens[slice.range.start as usize..slice.range.end as usize]);
        batch.positions.extend(slice.range.clone());
        if slice.want == Want::Last {
            batch.outputs.push(rows.end - 1);
        }
        batch.slices.push(BatchSlice { rows, start: slice.range.start });
        for (of_batch, of_sequence) in batch.tables.iter_mut().zip(&self.tables) {
            of_batch.blocks.extend_from_slice(of_sequence);
            of_batch.bounds.push(of_batch.blocks.len() as u32);
        }
    }
}

/// Empties an answer and keeps its memory.
fn clear(done: &mut SliceDone) {
    done.tokens.clear();
    done.scored.clear();
    done.pooled.clear();
    done.failed = false;
}
