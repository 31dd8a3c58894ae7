//! A steady step allocates nothing: not the layout of the batch, not the pass, not the draws, not the answer.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "an allocator that counts")]

#[allow(dead_code, reason = "shared with a test that plays whole requests")]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use types::cache::blocks_for;
use types::{BlockId, Request, Sampling, Slice, Step, StepDone, Want};
use worker::{ModelLoader, Runner};

struct Counting;

static N_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        N_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The steps of requests that all decode, after one that starts them.
fn steps(requests: &[Request], n: u32) -> Vec<Step> {
    let mut n_given = 0;
    let mut step = |i: u32| {
        let mut step = Step::default();
        for request in requests {
            let n_prompt = request.prompt.len() as u32;
            let (start, end) = if i == 0 { (0, n_prompt) } else { (n_prompt + i - 1, n_prompt + i) };
            step.slices.push(Slice { id: request.id, range: start..end, n_draft: 0, want: Want::Last });
            let n_new = blocks_for(end) - if i == 0 { 0 } else { blocks_for(start) };
            step.blocks.extend((n_given..n_given + n_new).map(BlockId));
            n_given += n_new;
        }
        step
    };
    let mut steps: Vec<_> = (0..n).map(&mut step).collect();
    steps[0].starts = requests.to_vec();
    steps
}

#[test]
fn steady_steps_allocate_nothing() {
    const WARM_UP: u32 = 3;
    const N: u32 = 40;
    let mut requests = common::requests(8);
    for request in &mut requests {
        request.sampling = Sampling { logprobs: None, tokens_max: N, ..request.sampling.clone() };
    }
    for threads in [1, 3] {
        let (mut runner, _) = ModelLoader::new(threads).build(&common::assignment("llama-f16-sharded")).unwrap();
        let mut done = StepDone::default();
        let mut counted = Vec::with_capacity(N as usize);
        for step in steps(&requests, N) {
            let before = N_ALLOCATIONS.load(Ordering::Relaxed);
            runner.run(&step, &mut done).unwrap();
            counted.push(N_ALLOCATIONS.load(Ordering::Relaxed) - before);
        }
        assert_eq!(counted[WARM_UP as usize..].iter().sum::<usize>(), 0, "{threads} threads: {counted:?}");
    }
}
