//! Measures the scheduler: a step with 1,024 decoding sequences, and the prefix cache's look-ups. Prints a table.
//!
//! `cargo bench --workspace --bench steps -- [ROUNDS]`
#![expect(unsafe_code, reason = "a global allocator is unsafe to implement; this one counts and passes on")]
#![allow(clippy::unwrap_used, reason = "a measurement may panic")]

use scheduler::{Config, RequestOutput, Scheduler};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use types::{BLOCK_TOKENS, Epoch, Micros, Request, RequestId, Sampling, Step, StepDone, TokenOut, Want};

struct Counting;

static N_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        N_ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        N_ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.realloc(at, layout, n_bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const N_SEQUENCES: u64 = 1024;
/// Steps of one round, and tokens of one answer: no sequence ends.
const N_STEPS: usize = 1000;
/// The length of a long prompt that is requested again and again.
const N_PROMPT: u32 = 32_768;
const N_LOOKS: usize = 40;
/// Look-ups while the decoding sequence leaves no room: it generates 60 tokens.
const N_LOOKS_IN_VAIN: usize = 30;

fn main() {
    let rounds = std::env::args().skip(1).find(|arg| arg != "--bench");
    let n_rounds = rounds.map_or(5, |rounds| rounds.parse().expect("the number of rounds"));
    println!("{:<44}{:>10}{:>10}{:>10}{:>10}", "", "median", "mean", "p99", "allocated");
    for (what, n_stages) in [("a step of 1,024 that decode, one stage", 1), ("the same, four stages", 4)] {
        let mut spent = Vec::new();
        let n_allocations = (0..n_rounds).map(|_| steps(n_stages, &mut spent)).sum::<u64>();
        let mean = micros(spent.iter().sum::<Duration>()) / spent.len() as f64;
        let [median, p99] = [50, 99].map(|percent| micros(percentile(&mut spent, percent)));
        println!("{what:<44}{median:>7.2} us{mean:>7.2} us{p99:>7.2} us{n_allocations:>10}");
    }
    let (mut first, mut again) = (Vec::new(), Vec::new());
    (0..n_rounds).for_each(|_| look_ups(&mut first, &mut again));
    for (what, spent) in [("names made and looked up, blocks/s", &mut first), ("looked up, blocks/s", &mut again)] {
        let n_blocks = f64::from((N_PROMPT - 1) / BLOCK_TOKENS);
        let rate = |percent| n_blocks / percentile(spent, percent).as_secs_f64() / 1e6;
        let [median, p99] = [50, 99].map(rate);
        println!("{what:<44}{median:>8.2} M{:>10}{p99:>8.2} M", "");
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn percentile(spent: &mut [Duration], percent: usize) -> Duration {
    spent.sort();
    spent[(spent.len() * percent).div_ceil(100) - 1]
}

fn request(id: u64, n_prompt: u32, n_output: u32) -> Request {
    let prompt = (0..n_prompt).map(|position| position.wrapping_mul(7919) ^ (id << 17) as u32).collect();
    let sampling = Sampling { tokens_max: n_output, ..Sampling::default() };
    Request { id: RequestId(id), prompt, sampling, ..Request::default() }
}

fn answer(step: &Step, done: &mut StepDone) {
    (done.id, done.epoch) = (step.id, step.epoch);
    done.slices.resize_with(step.slices.len(), Default::default);
    for (slice, answer) in step.slices.iter().zip(&mut done.slices) {
        answer.tokens.clear();
        if slice.want == Want::Last {
            answer.tokens.push(TokenOut { token: slice.range.end, ..TokenOut::default() });
        }
    }
}

/// Times planning a step and applying another; returns how much was allocated meanwhile.
fn steps(n_stages: u32, spent: &mut Vec<Duration>) -> u64 {
    let n_output = 64 + N_STEPS as u32;
    let config = Config {
        n_stages,
        steps_in_flight_max: n_stages + 1,
        running_max: N_SEQUENCES as u32,
        batch_tokens_max: 2048,
        chunk_tokens_max: 2048,
        n_blocks: vec![N_SEQUENCES as u32 * 80],
        ..Config::default()
    };
    let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
    // Prompts of all lengths, so that the same number of blocks becomes full and named in each step.
    let prompt = |id: u64| 20 + (id % u64::from(BLOCK_TOKENS)) as u32;
    (0..N_SEQUENCES).for_each(|id| scheduler.submit(request(id, prompt(id), n_output), Micros(0)).unwrap());
    let (mut done, mut out) = (StepDone::default(), Vec::with_capacity(N_SEQUENCES as usize));
    let mut in_flight: VecDeque<Step> = (0..=n_stages).map(|_| Step::default()).collect();
    in_flight.iter_mut().skip(1).for_each(|step| assert!(scheduler.next_step(Micros(0), step)));
    let n_warm = 40 * n_stages as usize;
    spent.reserve(N_STEPS);
    let mut n_allocations = 0;
    for i in 0..n_warm + N_STEPS {
        let mut step = in_flight.pop_front().unwrap();
        let (began, before) = (Instant::now(), N_ALLOCATIONS.load(Relaxed));
        assert!(scheduler.next_step(Micros(0), &mut step));
        let (planning, allocated) = (began.elapsed(), N_ALLOCATIONS.load(Relaxed) - before);
        in_flight.push_back(step);
        answer(&in_flight[0], &mut done);
        out.clear();
        let (began, before) = (Instant::now(), N_ALLOCATIONS.load(Relaxed));
        scheduler.apply(&done, Micros(0), &mut out).unwrap();
        let applying = began.elapsed();
        if i >= n_warm {
            n_allocations += allocated + N_ALLOCATIONS.load(Relaxed) - before;
            spent.push(planning + applying);
        }
    }
    assert!(scheduler.stats().n_running == N_SEQUENCES as u32 && scheduler.stats().preemptions == 0);
    n_allocations
}

/// A prompt that is wholly cached. It waits first, because another sequence runs alone, and is looked up at every step:
/// the first time its blocks get their names as well.
fn look_ups(first: &mut Vec<Duration>, again: &mut Vec<Duration>) {
    let n_blocks = N_PROMPT / BLOCK_TOKENS;
    let config = Config {
        context_max: N_PROMPT + 64,
        running_max: 2,
        batch_tokens_max: 2048,
        chunk_tokens_max: 2048,
        // Room for one running sequence, and for another only if they share blocks.
        n_blocks: vec![n_blocks + 4],
        ..Config::default()
    };
    let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
    let (mut step, mut done, mut out) = (Step::default(), StepDone::default(), Vec::new());
    run_alone(&mut scheduler, request(1, N_PROMPT, 1), (&mut step, &mut done, &mut out));
    for id in 2..2 + N_LOOKS as u64 {
        let repeated_request = Request { id: RequestId(id), ..request(1, N_PROMPT, 1) };
        scheduler.submit(repeated_request, Micros(0)).unwrap();
        let began = Instant::now();
        assert!(scheduler.next_step(Micros(0), &mut step));
        first.push(began.elapsed());
        assert!(step.slices[0].range.start >= N_PROMPT - BLOCK_TOKENS, "the cache has all full blocks");
        answer(&step, &mut done);
        scheduler.apply(&done, Micros(0), &mut out).unwrap();
    }
    look_again(&mut scheduler, (&mut step, &mut done, &mut out), again);
}

fn run_alone(
    scheduler: &mut Scheduler,
    request: Request,
    (step, done, out): (&mut Step, &mut StepDone, &mut Vec<RequestOutput>),
) {
    scheduler.submit(request, Micros(0)).unwrap();
    while scheduler.next_step(Micros(0), step) {
        answer(step, done);
        scheduler.apply(done, Micros(0), out).unwrap();
    }
}

/// A sequence that holds the shared prompt decodes; another waits that shares all but its end and finds no room for
/// that, so that each step looks it up in vain.
fn look_again(
    scheduler: &mut Scheduler,
    (step, done, out): (&mut Step, &mut StepDone, &mut Vec<RequestOutput>),
    again: &mut Vec<Duration>,
) {
    scheduler.submit(Request { id: RequestId(1000), ..request(1, N_PROMPT, 60) }, Micros(0)).unwrap();
    let mut plan = |scheduler: &mut Scheduler| {
        let began = Instant::now();
        assert!(scheduler.next_step(Micros(0), step));
        let took = began.elapsed();
        answer(step, done);
        scheduler.apply(done, Micros(0), out).unwrap();
        took
    };
    // The first computes what it does not share.
    let alone = (0..12).map(|_| plan(scheduler)).min().unwrap();
    let mut waiting = Request { id: RequestId(1001), ..request(1, N_PROMPT, 1) };
    waiting.prompt.extend(0..62);
    scheduler.submit(waiting, Micros(0)).unwrap();
    // The first look-up names its blocks.
    plan(scheduler);
    for _ in 0..N_LOOKS_IN_VAIN {
        let took = plan(scheduler);
        assert_eq!(scheduler.stats().n_waiting, 1, "it waits for blocks");
        again.push(took.saturating_sub(alone));
    }
}
