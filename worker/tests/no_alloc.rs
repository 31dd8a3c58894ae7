//! Checks that a steady step allocates nothing: neither the batch's layout, nor the pass, the draws or the answer.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../tests/common/allocations.rs"]
mod allocations;
#[allow(dead_code, reason = "shared with tests that play whole requests")]
mod common;

use allocations::{n_allocations, n_allocations_here};
use collective::Mesh;
use grammar::{GrammarLimits, GrammarSpec, ThinkingBudget};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::Duration;
use types::cache::blocks_for;
use types::{
    BlockId, Grammar, Grid, NgramLimits, Rank, Request, Sampling, Slice, SliceDone, Step, StepDone, StepId, TokenOut,
    Want,
};
use worker::{Assignment, DraftModelConfig, GuessConfig, GuessSource, MaskConfig, ModelLoader, Runner};

/// Returns steps of requests that all decode, after one that starts them. Each group has its own pool of the same ids.
fn steps(requests: &[Request], n: u32, n_groups: usize) -> Vec<Step> {
    let mut n_given = 0;
    let mut step = |i: u32| {
        let mut step = Step { id: StepId(i.into()), ..Step::default() };
        for request in requests {
            let n_prompt = request.prompt.len() as u32;
            let (start, end) = if i == 0 { (0, n_prompt) } else { (n_prompt + i - 1, n_prompt + i) };
            step.slices.push(Slice::new(request.id, start..end, Want::Last));
            let n_new = blocks_for(end) - if i == 0 { 0 } else { blocks_for(start) };
            (0..n_groups).for_each(|_| step.blocks.extend((n_given..n_given + n_new).map(BlockId)));
            n_given += n_new;
        }
        step
    };
    let mut steps: Vec<_> = (0..n).map(&mut step).collect();
    steps[0].starts = requests.to_vec();
    steps
}

/// The count is of the whole process, so one test runs at a time.
static TURN: Mutex<()> = Mutex::new(());

const WARM_UP: usize = 4;
const N: u32 = 40;

fn decoding() -> Vec<Request> {
    let mut requests = common::requests(8);
    for request in &mut requests {
        request.sampling = Sampling { logprobs: None, tokens_max: N, ..request.sampling.clone() };
        request.prompt.iter_mut().for_each(|token| *token %= 264);
    }
    requests
}

#[test]
fn steady_steps_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, threads) in [("llama-f16-sharded", 1), ("llama-f16-sharded", 3), ("gemma3", 1)] {
        let assignment = common::assignment(name);
        let (mut runner, _) = ModelLoader::new(threads).build(&assignment).unwrap();
        let mut done = StepDone::default();
        let mut counted = Vec::with_capacity(N as usize);
        for step in steps(&decoding(), N, assignment.n_blocks.len()) {
            let before = n_allocations();
            runner.run(&step, &mut done).unwrap();
            counted.push(n_allocations() - before);
        }
        assert_eq!(counted[WARM_UP..].iter().sum::<usize>(), 0, "{name}, {threads} threads: {counted:?}");
    }
}

/// Some drafts hold and some do not.
#[test]
fn steady_steps_with_drafts_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let ngrams = GuessSource::Ngrams(NgramLimits { least: 1, most: 4 });
    let ngrams = GuessConfig { source: ngrams, n_max: DRAFTS_MAX, draft_model: None, mtp: None };
    with_drafts(ngrams.clone(), None, n_allocations);
    // Grammars run on threads of their own, which allocate.
    let rhyme = GrammarSpec::Regex("((ding|dong) ){60}".into());
    let rhyme = grammar::compile(&rhyme, &GrammarLimits::default()).unwrap();
    with_drafts(ngrams.clone(), Some(rhyme), n_allocations_here);
    let path = common::assignment("llama-f16-sharded").model_path;
    let draft_model = Some(DraftModelConfig { path, kv_bytes: 1 << 20, cost: None, learns_cost: false });
    with_drafts(GuessConfig { source: GuessSource::Off, draft_model, ..ngrams }, None, n_allocations);
}

const DRAFTS_MAX: u16 = 4;

/// Runs one request that repeats itself. Its slices have as many drafts as were guessed.
fn with_drafts(guesses: GuessConfig, grammar: Option<Grammar>, n_allocations: fn() -> usize) {
    let assignment = Assignment { guesses, ..common::assignment("llama-f16-sharded") };
    let masks = MaskConfig { wait_max: Duration::from_secs(60), ..MaskConfig::default() };
    let (mut runner, _) = ModelLoader { masks, ..ModelLoader::new(1) }.build(&assignment).unwrap();
    let mut request = decoding().remove(1);
    // Of three tokens every text repeats itself.
    let allowed = if grammar.is_none() { vec![5, 9, 13] } else { Vec::new() };
    request.sampling = Sampling { tokens_max: 150, allowed, ..Sampling::default() };
    request.grammar = grammar;
    let (id, mut at, mut n_known, mut n_blocks) = (request.id, 0, request.prompt.len() as u32, 0);
    let mut step = Step { starts: vec![request], ..Step::default() };
    let tokens: Vec<TokenOut> = Vec::with_capacity(1 + usize::from(DRAFTS_MAX));
    let mut done = StepDone { slices: vec![SliceDone { tokens, ..SliceDone::default() }], ..StepDone::default() };
    let (mut n_guess, mut n_drafts, mut counted, mut n_warm) = (0, 0, Vec::with_capacity(N as usize * 3), None);
    while n_known < 120 {
        let end = n_known + u32::from(n_guess);
        step.slices.push(Slice { n_draft: n_guess, ..Slice::new(id, at..end, Want::Last) });
        step.blocks.extend((n_blocks..blocks_for(end).max(n_blocks)).map(BlockId));
        n_blocks = blocks_for(end).max(n_blocks);
        let before = n_allocations();
        runner.run(&step, &mut done).unwrap();
        counted.push((n_guess, n_allocations() - before));
        // The message of drawn and guessed tokens gets its memory when it first has several of both.
        let is_long = done.slices[0].tokens.len() > 1 && done.slices[0].n_guess == DRAFTS_MAX;
        n_warm = n_warm.or(is_long.then_some(counted.len()));
        n_known += done.slices[0].tokens.len() as u32;
        (at, n_guess, n_drafts) = (n_known - 1, done.slices[0].n_guess, n_drafts + n_guess);
        step.clear();
        step.id = StepId(counted.len() as u64);
    }
    let n_warm = n_warm.unwrap().max(WARM_UP);
    assert!(n_drafts > 40 && counted.len() > n_warm + 10, "{n_drafts} drafts in {} steps", counted.len());
    assert!(counted[n_warm..].iter().all(|(_, n)| *n == 0), "drafts and allocations: {counted:?}");
}

/// Grammars run on threads of their own, which allocate. The computing thread does not.
#[test]
fn steady_steps_with_grammars_allocate_nothing_where_passes_run() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let regex = GrammarSpec::Regex("[a-z]{100,200}".into());
    let regex = grammar::compile(&regex, &GrammarLimits::default()).unwrap();
    let budget =
        ThinkingBudget { tokens_max: 9, is_open: true, closes: vec!["zq".into()], ..ThinkingBudget::default() };
    let mut requests = decoding();
    for (i, request) in requests.iter_mut().enumerate() {
        request.grammar = Some(if i % 2 == 0 { regex.clone() } else { budget.to_grammar(None) });
        (request.sampling.allowed, request.sampling.stop) = (Vec::new(), Vec::new());
        request.sampling.bad_words.clear();
    }
    let assignment = common::assignment("llama-f16-sharded");
    let masks = MaskConfig { wait_max: Duration::from_secs(60), ..MaskConfig::default() };
    let (mut runner, _) = ModelLoader { masks, ..ModelLoader::new(1) }.build(&assignment).unwrap();
    let (mut done, mut counted) = (StepDone::default(), Vec::with_capacity(N as usize));
    for step in steps(&requests, N, assignment.n_blocks.len()) {
        let before = n_allocations_here();
        runner.run(&step, &mut done).unwrap();
        counted.push(n_allocations_here() - before);
        assert!(done.slices.iter().all(|slice| slice.tokens.len() == 1), "every slice has drawn");
    }
    assert_eq!(counted[WARM_UP..].iter().sum::<usize>(), 0, "{counted:?}");
}

/// Returns the allocations of all ranks together, after the first steps.
fn allocations_of(grid: Grid) -> usize {
    let assignment = common::assignment("llama-f16-sharded");
    let layout = types::Layout::even(grid, assignment.layout.n_layers()).unwrap();
    let steps = steps(&decoding(), N, assignment.n_blocks.len());
    let (warm, measured) = (Barrier::new(grid.n_ranks().into()), Barrier::new(grid.n_ranks().into()));
    let rank = &|rank: Rank, collective: Mesh| {
        let assignment = Assignment { rank, layout: layout.clone(), ..assignment.clone() };
        let (mut runner, _) = ModelLoader::new(1).build_with(&assignment, collective).unwrap();
        let mut done = StepDone::default();
        steps[..WARM_UP].iter().for_each(|step| runner.run(step, &mut done).unwrap());
        warm.wait();
        let before = n_allocations();
        // No rank begins before all have read the count, and none ends before all have read it again.
        measured.wait();
        steps[WARM_UP..].iter().for_each(|step| runner.run(step, &mut done).unwrap());
        measured.wait();
        let after = n_allocations();
        warm.wait();
        after - before
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Mesh::in_process(&layout).into_iter().zip(0..).collect();
        let threads: Vec<_> =
            ranks.into_iter().map(|(collective, i)| scope.spawn(move || rank(Rank(i), collective))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    })
}

#[test]
fn steady_steps_of_a_grid_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (tp, pp) in [(2, 1), (1, 2), (2, 2)] {
        assert_eq!(allocations_of(Grid { tp, pp }), 0, "tp {tp}, pp {pp}");
    }
}
