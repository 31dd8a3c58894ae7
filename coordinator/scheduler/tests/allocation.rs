//! A steady step allocates nothing: neither planning nor applying, across block boundaries and with names assigned.
#![expect(unsafe_code, reason = "a global allocator is unsafe to implement; this one counts and passes on")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use scheduler::{Config, DraftPolicy, RequestOutput, RowCost, Scheduler};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;
use types::{CacheGroup, Epoch, Micros, Request, RequestId, Sampling, Step, StepDone, TokenOut, Want};

struct Counting;

thread_local! {
    /// Counts only this thread: the test harness has its own.
    static N_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count_one() {
    N_ALLOCATIONS.with(|n| n.set(n.get() + 1));
}

// SAFETY: every call goes on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        count_one();
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

const N_SEQUENCES: u64 = 64;

fn request(i: u64) -> Request {
    let prompt = (0..20).map(|position| (i * 100 + position) as u32).collect();
    let sampling = Sampling { tokens_max: 1000, ..Sampling::default() };
    Request { id: RequestId(i), prompt, sampling, ..Request::default() }
}

/// Answers a step with one token for each slice that draws, in reused memory.
fn answer(step: &Step, done: &mut StepDone) {
    (done.id, done.epoch) = (step.id, step.epoch);
    done.slices.resize_with(step.slices.len(), Default::default);
    for (slice, answer) in step.slices.iter().zip(&mut done.slices) {
        answer.tokens.clear();
        if slice.want == Want::Last {
            // Half of the drafts hold.
            let n_drawn = 1 + u32::from(slice.n_draft / 2);
            let drawn = (slice.first_drawn()..).take(n_drawn as usize);
            answer.tokens.extend(drawn.map(|token| TokenOut { token, ..TokenOut::default() }));
        }
        (answer.n_guess, answer.n_hit) = (4, answer.tokens.len() as u16);
    }
}

/// Keeps all steps but one in flight: plans one, answers the oldest.
fn run_steps(
    scheduler: &mut Scheduler,
    n_steps: u64,
    steps: &mut VecDeque<Step>,
    done: &mut StepDone,
    out: &mut Vec<RequestOutput>,
) {
    for _ in 0..n_steps {
        let mut step = steps.pop_front().unwrap();
        assert!(scheduler.next_step(Micros(0), &mut step));
        steps.push_back(step);
        answer(&steps[0], done);
        out.clear();
        scheduler.apply(done, Micros(0), out).unwrap();
    }
}

fn config(n_stages: u32, drafting: DraftPolicy) -> Config {
    let steps_in_flight_max = n_stages + 1;
    let window = CacheGroup::FULL.with_window(50);
    let (groups, n_blocks) = (vec![CacheGroup::FULL, window, CacheGroup::STATE], vec![4096, 400, 250]);
    let running_max = N_SEQUENCES as u32;
    Config { n_stages, steps_in_flight_max, running_max, groups, n_blocks, drafting, ..Config::default() }
}

fn check_steady_steps(n_stages: u32) {
    let config = config(n_stages, DraftPolicy::Off);
    let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
    (0..N_SEQUENCES).for_each(|i| scheduler.submit(request(i), Micros(0)).unwrap());
    let (mut done, mut out) = (StepDone::default(), Vec::new());
    let mut steps: VecDeque<Step> = (0..=n_stages).map(|_| Step::default()).collect();
    for step in steps.iter_mut().skip(1) {
        assert!(scheduler.next_step(Micros(0), step));
    }
    // Names are recorded from the first read on.
    let mut changes = Vec::with_capacity(4096);
    scheduler.name_changes(&mut changes);
    run_steps(&mut scheduler, 40 * u64::from(n_stages), &mut steps, &mut done, &mut out);
    assert!(scheduler.name_changes(&mut changes) && !changes.is_empty());
    let (before, blocks_before) = (N_ALLOCATIONS.get(), scheduler.stats().blocks_used);
    run_steps(&mut scheduler, 200 * u64::from(n_stages), &mut steps, &mut done, &mut out);
    assert!(scheduler.name_changes(&mut changes) && changes.len() >= 12 * N_SEQUENCES as usize);
    assert_eq!(N_ALLOCATIONS.get() - before, 0, "{n_stages} stages");
    let n_outputs = out.len() as u64 * u64::from(n_stages);
    assert_eq!(n_outputs, N_SEQUENCES, "every sequence returned a token in the last steps");
    assert!(scheduler.stats().blocks_used >= blocks_before + 12 * N_SEQUENCES as u32, "blocks were taken");
    assert!(scheduler.stats().blocks_passed >= 12 * N_SEQUENCES, "blocks behind the window were released");
    assert!(scheduler.stats().preemptions == 0 && scheduler.stats().evictions > 0);
    scheduler.check();
}

/// One step in flight: a sequence with drafts is not planned ahead.
#[test]
fn a_steady_step_with_drafts_allocates_nothing() {
    for drafting in [DraftPolicy::Fixed(4), DraftPolicy::Adaptive { max: 8, row: RowCost::Fixed(0) }] {
        let mut scheduler = Scheduler::new(config(1, drafting), Epoch::default()).unwrap();
        (0..N_SEQUENCES).for_each(|i| scheduler.submit(request(i), Micros(0)).unwrap());
        let (mut done, mut out, mut step) = (StepDone::default(), Vec::new(), Step::default());
        let mut run = |scheduler: &mut Scheduler, n_steps| {
            for _ in 0..n_steps {
                assert!(scheduler.next_step(Micros(0), &mut step));
                answer(&step, &mut done);
                out.clear();
                scheduler.apply(&done, Micros(0), &mut out).unwrap();
            }
        };
        run(&mut scheduler, 40);
        let (before, drafts_before) = (N_ALLOCATIONS.get(), scheduler.stats().drafts);
        run(&mut scheduler, 100);
        assert_eq!(N_ALLOCATIONS.get() - before, 0, "{drafting:?}");
        let n_drafts = scheduler.stats().drafts - drafts_before;
        assert!(n_drafts >= 100 * 4, "{drafting:?}: {n_drafts}");
        scheduler.check();
    }
}

#[test]
fn a_steady_step_allocates_nothing() {
    [1, 2, 4].into_iter().for_each(check_steady_steps);
}
