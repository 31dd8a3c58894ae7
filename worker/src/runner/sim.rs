//! A runner without a model: it draws tokens from the request's hash, after a modelled time. Its checks are as strict
//! as possible: it tracks the contents of each page, and rejects a step that would read anything else.

use crate::CancelFlag;
use crate::assignment::{Assignment, Load, LoadError, LoadedModel, ReadyReport};
use crate::runner::{RunError, Runner};
use std::collections::HashMap;
use std::time::Duration;
use types::cache::blocks_for;
use types::{
    BLOCK_TOKENS, BLOCKS_MAX, BlockId, CacheGroup, DeviceClass, Failure, GrammarFault, Numerics, Request, RequestId,
    Sampling, Slice, SliceDone, Step, StepDone, Token, TokenLogprob, TokenOut, Tokens, Unsupported, Want,
};

/// The model of a simulated rank: vocabulary, cache groups and times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimModel {
    pub vocab: u32,
    /// Each group has a pool of pages, as large as the assignment specifies.
    pub groups: Vec<CacheGroup>,
    pub weight_bytes: u64,
    /// A pass takes `step_micros + token_micros * n_tokens + slice_micros * n_slices`.
    pub step_micros: u64,
    pub token_micros: u64,
    pub slice_micros: u64,
}

impl Default for SimModel {
    /// Returns a model in which no time passes and all layers keep everything.
    fn default() -> Self {
        SimModel {
            vocab: 512,
            groups: vec![CacheGroup::FULL],
            weight_bytes: 0,
            step_micros: 0,
            token_micros: 0,
            slice_micros: 0,
        }
    }
}

impl SimModel {
    /// Returns the whole output of a request, which must be the same on any topology, batch and fault.
    pub fn reference(&self, request: &Request) -> Tokens {
        let prompt = hash_tokens(&request.prompt);
        let mut output = Tokens::new();
        while output.len() < request.sampling.tokens_max as usize {
            let token = self.draw(&request.sampling, prompt, output.len() as u32);
            output.push(token);
            if request.sampling.is_stop(token) {
                break;
            }
        }
        output
    }

    /// Draws a token that depends only on the request and its number of generated tokens.
    fn draw(&self, sampling: &Sampling, prompt: u64, n_generated: u32) -> Token {
        let noise = mix(mix(mix(prompt, sampling.seed), sampling.choice.into()), n_generated.into());
        let first = (noise % u64::from(self.vocab)) as Token;
        if n_generated >= sampling.tokens_min {
            return first;
        }
        let next_allowed =
            (0..self.vocab).map(|skip| (first + skip) % self.vocab).find(|token| !sampling.is_stop(*token));
        next_allowed.unwrap_or(first)
    }

    fn draw_out(&self, sequence: &SimSequence) -> TokenOut {
        let sampling = &sequence.request.sampling;
        let n_generated = (sequence.log.len() - sequence.request.prompt.len()) as u32;
        self.token_out(sequence, self.draw(sampling, sequence.prompt, n_generated), sampling)
    }

    fn token_out(&self, sequence: &SimSequence, token: Token, sampling: &Sampling) -> TokenOut {
        let Some(n_top) = sampling.logprobs else { return TokenOut { token, ..TokenOut::default() } };
        let logprob = |token: Token| -((mix(sequence.prompt, token.into()) % 1024) as f32) / 64.0;
        let with_logprob = |token: Token| TokenLogprob { token, logprob: logprob(token) };
        let likely = (0..u32::from(n_top)).map(|i| with_logprob((token + i) % self.vocab));
        let top = match sampling.logprob_token_ids.is_empty() {
            true => likely.collect(),
            false => {
                let others = sampling.logprob_token_ids.iter().filter(|other| **other != token);
                [token].iter().chain(others).map(|token| with_logprob(*token)).collect()
            }
        };
        TokenOut { token, logprob: Some(logprob(token)), top }
    }

    /// Scores the prompt tokens that follow the slice's positions.
    fn score(&self, sequence: &SimSequence, slice: &Slice, n_top: u8) -> Vec<TokenOut> {
        let sampling = Sampling { logprobs: Some(n_top), ..Sampling::default() };
        let known = sequence.request.prompt.iter().enumerate();
        let scored = known.filter(|(at, _)| (slice.range.start + 1..=slice.range.end).contains(&(*at as u32)));
        scored.map(|(_, token)| self.token_out(sequence, *token, &sampling)).collect()
    }

    /// Returns four numbers of the prompt's hash.
    fn pool(sequence: &SimSequence) -> Vec<f32> {
        (0..4).map(|i| (mix(sequence.prompt, i) % 1024) as f32 / 512.0 - 1.0).collect()
    }

    fn micros(&self, step: &Step) -> u64 {
        self.step_micros + self.token_micros * step.n_tokens() as u64 + self.slice_micros * step.slices.len() as u64
    }
}

impl Load for SimModel {
    fn load(
        &mut self,
        assignment: &Assignment,
        _: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let n_blocks = &assignment.n_blocks;
        if n_blocks.len() != self.groups.len() {
            return Err(Unsupported("any number of pools other than one for each cache group of the model").into());
        }
        if let Some(n_blocks) = n_blocks.iter().find(|n_blocks| **n_blocks > BLOCKS_MAX) {
            let (needed, available) = ((*n_blocks).into(), BLOCKS_MAX.into());
            return Err(LoadError::Memory { what: "a table of the sim's pages", needed, available });
        }
        let (Assignment { mode, activations, kv_dtype, .. }, sim) = (assignment, DeviceClass::Sim.into());
        let numerics = Numerics::plain(&sim, *mode, *activations, *kv_dtype, [0; 32]);
        let (policy, weight_bytes) = (numerics.digest(), self.weight_bytes);
        let ready = ReadyReport { policy, weight_bytes, weights: Vec::new(), unread: None };
        Ok((Box::new(SimRunner::new(self.clone(), n_blocks)), ready))
    }
}

pub struct SimRunner {
    sim: SimModel,
    sequences: HashMap<RequestId, SimSequence>,
    /// The pages of each group.
    pages: Vec<Vec<SimPage>>,
}

/// The contents of a page: how many positions, and the hash chain over all tokens up to the last of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SimPage {
    n_filled: u32,
    chain: u64,
}

struct SimSequence {
    request: Request,
    /// The hash of the prompt.
    prompt: u64,
    /// The prompt, the output at the start, and the tokens drawn since.
    log: Tokens,
    /// `chain[i]` is the hash of `log[..i]`, as far as computed: `[0, chain.len() - 1)` is computed.
    chain: Vec<u64>,
    /// One block table per group.
    tables: Vec<Vec<BlockId>>,
    has_begun: bool,
}

impl SimRunner {
    /// Creates a runner; `n_blocks` has the number of pages of each group.
    pub fn new(sim: SimModel, n_blocks: &[u32]) -> SimRunner {
        let pages = n_blocks.iter().map(|n_blocks| vec![SimPage::default(); *n_blocks as usize]).collect();
        SimRunner { sim, sequences: HashMap::new(), pages }
    }

    /// Returns the number of sequences held; zero once the coordinator has ended all of them.
    pub fn n_sequences(&self) -> usize {
        self.sequences.len()
    }

    fn run_slice(&mut self, slice: &Slice, blocks: &mut impl Iterator<Item = BlockId>) -> Result<SliceDone, String> {
        if slice.n_draft > 0 {
            return Err(format!("{} has drafts, but the sim runner guesses none", slice.id));
        }
        let Some(sequence) = self.sequences.get_mut(&slice.id) else {
            return Err(format!("{} has a slice, but was not started", slice.id));
        };
        let groups = || self.sim.groups.iter().copied();
        for ((group, table), pages) in groups().zip(&mut sequence.tables).zip(&self.pages) {
            take_blocks(group, table, slice, blocks, pages.len())?;
        }
        sequence.begin_or_continue(slice)?;
        groups().zip(&self.pages).enumerate().try_for_each(|(i, (group, pages))| sequence.read(group, i, pages))?;
        sequence.write(slice, &mut self.pages)?;
        let mut done = SliceDone::default();
        let is_end = sequence.log.len() == slice.range.end as usize;
        let draws = match slice.want {
            Want::Nothing => false,
            Want::Last => true,
            Want::All { top_n } => {
                done.scored = self.sim.score(sequence, slice, top_n);
                is_end
            }
            Want::Pool => {
                if slice.range.end as usize == sequence.request.prompt.len() {
                    done.pooled = SimModel::pool(sequence);
                }
                false
            }
        };
        if !draws {
            return Ok(done);
        }
        if sequence.request.grammar.is_some() {
            // The answer is a hash, but a grammar needs the bytes of tokens.
            tracing::warn!(request = %slice.id, "the sim runner serves no grammar, because it has no vocabulary");
            sequence.log.push(0);
            return Ok(SliceDone { failed: Some(Failure::Grammar(GrammarFault::Broken)), ..done });
        }
        if sequence.log.len() != slice.range.end as usize {
            return Err(format!("{} draws position {}, which it already has", slice.id, slice.range.end));
        }
        let out = self.sim.draw_out(sequence);
        sequence.log.push(out.token);
        Ok(SliceDone { tokens: vec![out], ..done })
    }

    fn apply(&mut self, step: &Step, done: &mut StepDone) -> Result<(), String> {
        for id in &step.ends {
            self.sequences.remove(id).ok_or_else(|| format!("{id} ends, but was not started"))?;
        }
        for request in &step.starts {
            self.sequences.insert(request.id, SimSequence::new(request.clone(), self.pages.len()));
        }
        let mut blocks = step.blocks.iter().copied();
        done.slices.clear();
        for slice in &step.slices {
            done.slices.push(self.run_slice(slice, &mut blocks)?);
        }
        match blocks.count() {
            0 => {}
            n_left => return Err(format!("the step has {n_left} blocks too many")),
        }
        Ok(())
    }
}

impl Runner for SimRunner {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        step.supported()?;
        self.apply(step, done).map_err(|what| RunError::Protocol { step: step.id.0, what })?;
        let micros = self.sim.micros(step);
        if micros > 0 {
            std::thread::sleep(Duration::from_micros(micros));
        }
        done.micros = u32::try_from(micros).unwrap_or(u32::MAX);
        Ok(())
    }
}

impl SimSequence {
    fn new(request: Request, n_groups: usize) -> SimSequence {
        let log: Tokens = request.prompt.iter().chain(&request.output).copied().collect();
        let prompt = hash_tokens(&request.prompt);
        let tables = vec![Vec::new(); n_groups];
        SimSequence { request, prompt, log, chain: vec![CHAIN_ROOT], tables, has_begun: false }
    }

    fn n_computed(&self) -> u32 {
        self.chain.len() as u32 - 1
    }

    /// The first slice may begin behind a prefix of whole shared blocks; every other slice begins where the last one
    /// ended.
    fn begin_or_continue(&mut self, slice: &Slice) -> Result<(), String> {
        let start = slice.range.start;
        let is_prefix_hit = !self.has_begun && start.is_multiple_of(BLOCK_TOKENS) && (start as usize) < self.log.len();
        if is_prefix_hit {
            self.extend_chain(start)?;
        }
        self.has_begun = true;
        if start != self.n_computed() {
            return Err(format!("{} continues at {start}, but has computed {}", slice.id, self.n_computed()));
        }
        Ok(())
    }

    /// Attention reads every earlier position in the slice's window: each page must match this sequence's log.
    fn read(&self, group: CacheGroup, i: usize, pages: &[SimPage]) -> Result<(), String> {
        let n_computed = self.n_computed();
        for i_block in group.n_passed(n_computed)..blocks_for(n_computed) {
            let block = self.tables[i][i_block as usize];
            let end = ((i_block + 1) * BLOCK_TOKENS).min(n_computed);
            let expected = SimPage { n_filled: end - i_block * BLOCK_TOKENS, chain: self.chain[end as usize] };
            if pages.get(block.0 as usize) != Some(&expected) {
                return Err(format!(
                    "{} reads block {} of group {i}, which has other content",
                    self.request.id, block.0
                ));
            }
        }
        Ok(())
    }

    fn write(&mut self, slice: &Slice, pages: &mut [Vec<SimPage>]) -> Result<(), String> {
        self.extend_chain(slice.range.end)?;
        let first = slice.range.start / BLOCK_TOKENS;
        for i in first..blocks_for(slice.range.end) {
            let end = ((i + 1) * BLOCK_TOKENS).min(slice.range.end);
            let page = SimPage { n_filled: end - i * BLOCK_TOKENS, chain: self.chain[end as usize] };
            for (table, pages) in self.tables.iter().zip(&mut *pages) {
                let block = table[i as usize];
                if block != BlockId::NONE {
                    pages[block.0 as usize] = page;
                }
            }
        }
        Ok(())
    }

    fn extend_chain(&mut self, end: u32) -> Result<(), String> {
        for position in self.n_computed()..end {
            let Some(token) = self.log.get(position as usize) else {
                return Err(format!("{} computes position {position}, whose token is not known", self.request.id));
            };
            self.chain.push(mix(self.chain[position as usize], (*token).into()));
        }
        Ok(())
    }
}

/// Takes as many blocks as `range.end` needs and the table lacks. Blocks may be absent behind the window, and in the
/// slice's middle for a recurrence.
fn take_blocks(
    group: CacheGroup,
    table: &mut Vec<BlockId>,
    slice: &Slice,
    blocks: &mut impl Iterator<Item = BlockId>,
    n_blocks: usize,
) -> Result<(), String> {
    while table.len() < group.n_blocks(slice.range.end) as usize {
        let block = blocks.next().ok_or_else(|| format!("{} lacks a block for {:?}", slice.id, slice.range))?;
        let may_lack = block == BlockId::NONE && group.may_lack(table.len() as u32, &slice.range, 0);
        if block.0 as usize >= n_blocks && !may_lack {
            return Err(format!("{} is given block {} of {n_blocks}", slice.id, block.0));
        }
        table.push(block);
    }
    Ok(())
}

const CHAIN_ROOT: u64 = 0x6c6f_636b_7374_6570;

fn hash_tokens(tokens: &[Token]) -> u64 {
    tokens.iter().fold(CHAIN_ROOT, |hash, token| mix(hash, (*token).into()))
}

/// Returns one round of a 64-bit mixer over both words.
fn mix(hash: u64, word: u64) -> u64 {
    let mut x = (hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)).wrapping_add(hash.rotate_left(17))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;
    use types::StepId;

    fn request(prompt: Range<u32>) -> Request {
        Request { id: RequestId(1), prompt: prompt.collect(), ..Request::default() }
    }

    fn slice(range: Range<u32>, want: Want) -> Slice {
        Slice::new(RequestId(1), range, want)
    }

    fn step(starts: Vec<Request>, slices: Vec<Slice>, blocks: &[u32]) -> Step {
        let blocks = blocks.iter().copied().map(BlockId).collect();
        Step { id: StepId(0), starts, slices, blocks, ..Step::default() }
    }

    fn run(runner: &mut SimRunner, step: &Step) -> Result<StepDone, String> {
        let mut done = StepDone::default();
        runner.run(step, &mut done).map(|()| done).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn refused(result: Result<StepDone, String>, expect: &str) {
        let error = result.unwrap_err();
        assert!(error.contains(expect), "{error}");
    }

    #[test]
    fn chunks_do_not_change_tokens() {
        let sim = SimModel::default();
        let request = request(0..20);
        let reference = sim.reference(&request);
        for chunk in [1, 7, 20] {
            let mut runner = SimRunner::new(sim.clone(), &[4]);
            let mut output = Tokens::new();
            let mut starts = vec![request.clone()];
            let mut start = 0;
            while output.len() < reference.len() {
                let n_known = 20 + output.len() as u32;
                let end = (start + chunk).min(n_known);
                let want = if end == n_known { Want::Last } else { Want::Nothing };
                let new: Vec<u32> = (blocks_for(start)..blocks_for(end)).collect();
                let step = step(std::mem::take(&mut starts), vec![slice(start..end, want)], &new);
                let done = run(&mut runner, &step).unwrap();
                output.extend(done.slices[0].tokens.iter().map(|out| out.token));
                start = end;
            }
            assert_eq!(output, reference);
        }
    }

    #[test]
    fn a_resumed_request_goes_on_with_its_tokens() {
        let sim = SimModel::default();
        let whole = sim.reference(&request(0..5));
        let resumed = Request { output: whole[..3].to_vec(), ..request(0..5) };
        let mut runner = SimRunner::new(sim, &[2]);
        let done = run(&mut runner, &step(vec![resumed], vec![slice(0..8, Want::Last)], &[0])).unwrap();
        assert_eq!(done.slices[0].tokens[0].token, whole[3]);
    }

    #[test]
    fn stops_are_not_drawn_too_early() {
        let sim = SimModel { vocab: 4, ..SimModel::default() };
        let sampling = Sampling { stop: vec![0, 1, 2], tokens_min: 5, tokens_max: 50, ..Sampling::default() };
        let output = sim.reference(&Request { sampling, ..request(0..3) });
        assert!(output.len() > 5 || output.last() != Some(&3));
        assert!(output[..5].iter().all(|token| *token == 3));
    }

    #[test]
    fn violations_are_named() {
        let mut runner = SimRunner::new(SimModel::default(), &[4]);
        refused(run(&mut runner, &step(vec![], vec![slice(0..1, Want::Last)], &[0])), "was not started");
        let start = || vec![request(0..20)];
        refused(run(&mut runner, &step(start(), vec![slice(0..20, Want::Last)], &[0])), "lacks a block");
        refused(run(&mut runner, &step(start(), vec![slice(0..20, Want::Last)], &[0, 9])), "block 9 of 4");
        refused(run(&mut runner, &step(start(), vec![slice(0..20, Want::Last)], &[0, 1, 2])), "too many");
        refused(run(&mut runner, &step(start(), vec![slice(3..20, Want::Last)], &[0, 1])), "continues at 3");
        refused(run(&mut runner, &step(start(), vec![slice(0..21, Want::Last)], &[0, 1])), "not known");
        refused(run(&mut runner, &step(start(), vec![slice(0..8, Want::Last)], &[0])), "which it already has");
        refused(run(&mut runner, &step(start(), vec![slice(16..20, Want::Last)], &[3, 1])), "which has other content");
        let end = Step { ends: vec![RequestId(9)], ..step(vec![], vec![], &[]) };
        refused(run(&mut runner, &end), "was not started");
        let drafts = Slice { n_draft: 1, ..slice(0..1, Want::Last) };
        refused(run(&mut runner, &step(vec![], vec![drafts], &[])), "drafts");
    }

    #[test]
    fn a_prefix_hit_reads_what_another_wrote() {
        let mut runner = SimRunner::new(SimModel::default(), &[4]);
        run(&mut runner, &step(vec![request(0..20)], vec![slice(0..20, Want::Last)], &[0, 1])).unwrap();
        let twin = Request { id: RequestId(2), ..request(0..18) };
        let hit = Slice { id: RequestId(2), ..slice(16..18, Want::Last) };
        run(&mut runner, &step(vec![twin], vec![hit], &[0, 2])).unwrap();
        let stranger = Request { id: RequestId(3), ..request(1..19) };
        let miss = Slice { id: RequestId(3), ..slice(16..18, Want::Last) };
        refused(run(&mut runner, &step(vec![stranger], vec![miss], &[0, 3])), "which has other content");
    }

    #[test]
    fn a_window_reads_what_it_shows_and_no_more() {
        let window = CacheGroup::FULL.with_window(18);
        let sim = SimModel { groups: vec![CacheGroup::FULL, window], ..SimModel::default() };
        let mut runner = SimRunner::new(sim, &[4, 3]);
        // Behind 48 positions the window shows the last 17, so the first of the windowed pages is free.
        let first = step(vec![request(0..49)], vec![slice(0..48, Want::Nothing)], &[0, 1, 2, 0, 1, 2]);
        run(&mut runner, &first).unwrap();
        run(&mut runner, &step(vec![], vec![slice(48..49, Want::Last)], &[3, 0])).unwrap();
        let twin = |blocks: &[u32]| {
            let twin = Request { id: RequestId(2), ..request(0..50) };
            step(vec![twin], vec![Slice { id: RequestId(2), ..slice(48..50, Want::Last) }], blocks)
        };
        let none = BlockId::NONE.0;
        refused(run(&mut runner, &twin(&[0, 1, 2, 3, none, none, 2, 0])), "block 4294967295 of 3");
        refused(run(&mut runner, &twin(&[0, 1, 2, 3, none, 2, 1, 0])), "of group 1, which has other content");
        refused(run(&mut runner, &twin(&[1, 0, 2, 3, none, 1, 2, 0])), "of group 0, which has other content");
        run(&mut runner, &twin(&[0, 1, 2, 3, none, 1, 2, 0])).unwrap();
    }

    #[test]
    fn a_recurrence_goes_on_from_the_page_before_and_writes_where_it_has_a_block() {
        let sim = || SimModel { groups: vec![CacheGroup::STATE], ..SimModel::default() };
        let none = BlockId::NONE.0;
        let mut runner = SimRunner::new(sim(), &[3]);
        refused(
            run(&mut runner, &step(vec![request(0..64)], vec![slice(0..48, Want::Nothing)], &[none, none, none])),
            "block 4294967295 of 3",
        );
        let mut runner = SimRunner::new(sim(), &[3]);
        let first = step(vec![request(0..64)], vec![slice(0..48, Want::Nothing)], &[none, 0, 1]);
        run(&mut runner, &first).unwrap();
        run(&mut runner, &step(vec![], vec![slice(48..64, Want::Last)], &[2])).unwrap();
        let twin = |blocks: &[u32]| {
            let twin = Request { id: RequestId(2), ..request(0..40) };
            step(vec![twin], vec![Slice { id: RequestId(2), ..slice(32..40, Want::Last) }], blocks)
        };
        refused(run(&mut runner, &twin(&[none, none, 2])), "block 4294967295 of 3");
        refused(run(&mut runner, &twin(&[none, 1, 2])), "which has other content");
        run(&mut runner, &twin(&[none, 0, 2])).unwrap();
    }
}
