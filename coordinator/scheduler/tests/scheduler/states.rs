//! Recurrent groups: which pages of states a step has blocks for, which of them are kept, and what a hit needs.

use super::by_hand::{apply, plan, request, run_out};
use scheduler::{Config, Scheduler};
use types::{BlockId, CacheGroup, Epoch, Micros, Request, Step, Token};

/// Every position in one group, states in the other.
fn config(n_blocks: [u32; 2]) -> Config {
    Config {
        groups: vec![CacheGroup::STATE, CacheGroup::FULL],
        n_blocks: n_blocks.to_vec(),
        context_max: 10_000,
        running_max: 4,
        batch_tokens_max: 100,
        chunk_tokens_max: 100,
        state_stride: 64,
        ..Config::default()
    }
}

fn scheduler(config: Config) -> Scheduler {
    Scheduler::new(config, Epoch::default()).unwrap()
}

/// Which entries of the first slice's run of states have a block.
fn states(step: &Step) -> Vec<u32> {
    let of_states = &step.blocks[..step.blocks.len() / 2];
    (0..).zip(of_states).filter(|(_, block)| **block != BlockId::NONE).map(|(i, _)| i).collect()
}

/// Returns where the first slice of a request begins, when it is the next to run. Runs it to its end.
fn begins_at(scheduler: &mut Scheduler, request: Request) -> u32 {
    scheduler.submit(request, Micros(0)).unwrap();
    let first = loop {
        let step = plan(scheduler).unwrap();
        apply(scheduler, &step);
        if let Some(slice) = step.slices.first() {
            break slice.range.start;
        }
    };
    run_out(scheduler);
    first
}

/// Returns the log of a conversation: its prompt and the tokens drawn.
fn log(prompt: &[Token], n_drawn: usize) -> Vec<Token> {
    prompt.iter().copied().chain(std::iter::repeat_n(7, n_drawn)).collect()
}

#[test]
fn a_slice_has_pages_at_its_end_and_where_requests_come_back() {
    let mut scheduler = scheduler(config([64, 64]));
    scheduler.submit(request(1, 0..200, 20), Micros(0)).unwrap();
    let first = plan(&mut scheduler).unwrap();
    assert_eq!((first.slices[0].range.clone(), states(&first)), (0..100, vec![3, 6]), "a stride and the end");
    apply(&mut scheduler, &first);
    let second = plan(&mut scheduler).unwrap();
    // Entries 7 to 12: a stride, the last full block of the prompt, and the one that the draw may come back to.
    assert_eq!((second.slices[0].range.clone(), states(&second)), (100..200, vec![0, 4, 5]));
    apply(&mut scheduler, &second);
    run_out(&mut scheduler);
    assert_eq!(scheduler.stats().blocks_used, 0);
    // Of states: 64, 128, 192 and the last full block of the answer, at 208.
    let of_states = scheduler.stats().blocks_cached - 219 / 16;
    assert_eq!((of_states, scheduler.stats().states_kept), (4, 3));
}

#[test]
fn a_long_answer_leaves_its_last_state_and_those_at_the_stride() {
    let alone = Config { groups: vec![CacheGroup::STATE], n_blocks: vec![64], ..config([1; 2]) };
    for (stride, n_kept) in [(0, 2), (64, 2 + 320 / 64)] {
        let mut scheduler = scheduler(Config { state_stride: stride, ..alone.clone() });
        scheduler.submit(request(1, 0..20, 330), Micros(0)).unwrap();
        run_out(&mut scheduler);
        assert_eq!((scheduler.stats().blocks_used, scheduler.stats().blocks_cached), (0, n_kept), "{stride}");
        // The next turn: 349 positions were computed, 21 blocks.
        let turn = log(&(0..20).collect::<Vec<_>>(), 330).into_iter().chain(500..540);
        assert_eq!(begins_at(&mut scheduler, request(2, turn, 1)), 336);
    }
}

#[test]
fn a_turn_computes_what_is_new_and_at_most_a_block() {
    let plain = Config { batch_tokens_max: 512, chunk_tokens_max: 512, state_stride: 512, ..config([24, 1000]) };
    for n_stages in [1, 3] {
        let deep = Config { n_stages, steps_in_flight_max: n_stages + 1, ..plain.clone() };
        let mut scheduler = scheduler(deep);
        let mut prompt: Vec<Token> = (0..8000).collect();
        for turn in 0..6 {
            let before = scheduler.stats().tokens_computed;
            let n_drawn = 100 + turn as usize;
            let n_new = if turn == 0 { 8000 } else { 50 + n_drawn as u64 };
            begins_at(&mut scheduler, request(turn, prompt.clone(), n_drawn as u32));
            let n_computed = scheduler.stats().tokens_computed - before;
            assert!(n_computed <= n_new + n_drawn as u64 + 16, "{n_computed} for {n_new} new ones");
            prompt = log(&prompt, n_drawn);
            prompt.extend((0..50).map(|i| 10_000 + 100 * turn as Token + i));
        }
    }
}

#[test]
fn where_prompts_part_the_second_keeps_a_state_and_the_third_finds_it() {
    let mut scheduler = scheduler(Config { state_stride: 0, ..config([64, 200]) });
    let after_system = |own: u32| (0..300).chain(own * 1000..own * 1000 + 50);
    assert_eq!(begins_at(&mut scheduler, request(1, after_system(1), 1)), 0);
    assert_eq!(begins_at(&mut scheduler, request(2, after_system(2), 1)), 0, "the cache has blocks but no state");
    assert_eq!(begins_at(&mut scheduler, request(3, after_system(3), 1)), 288);
    assert_eq!(
        begins_at(&mut scheduler, request(4, after_system(3), 1)),
        336,
        "an equal prompt finds the state at its end"
    );
}

#[test]
fn no_preemption_for_states_that_are_only_kept() {
    // Four run, each of two pages: there is room for no other.
    let tight = Config { state_stride: 16, ..config([9, 1000]) };
    let mut scheduler = scheduler(tight);
    for id in 0..4 {
        scheduler.submit(request(id, (0..150).map(|at| at + 1000 * id as Token), 100), Micros(id)).unwrap();
    }
    run_out(&mut scheduler);
    assert_eq!((scheduler.stats().preemptions, scheduler.stats().tokens_drawn), (0, 400));
}

#[test]
fn unshared_request_keeps_no_state() {
    let mut scheduler = scheduler(config([64, 64]));
    let apart = Request { cache_apart: true, ..request(1, 0..200, 20) };
    scheduler.submit(apart, Micros(0)).unwrap();
    let first = plan(&mut scheduler).unwrap();
    assert_eq!(states(&first), [6]);
    apply(&mut scheduler, &first);
    run_out(&mut scheduler);
    assert_eq!((scheduler.stats().blocks_cached, scheduler.stats().states_kept), (0, 0));
}
