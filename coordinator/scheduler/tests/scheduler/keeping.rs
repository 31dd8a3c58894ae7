//! Which blocks make room: prompts that came back stay longer than those of one request, hints move a request's blocks
//! up or down, and nothing stays for ever.

use super::by_hand::{plan, request, run_out};
use scheduler::{Config, Scheduler};
use types::{CacheGroup, CacheHint, Epoch, Micros, Request, Token};

/// A pool for four prompts.
fn scheduler() -> Scheduler {
    let (groups, n_blocks) = (vec![CacheGroup::FULL], vec![28]);
    Scheduler::new(Config { groups, n_blocks, context_max: 200, ..Config::default() }, Epoch::default()).unwrap()
}

/// Seven blocks, six of them full.
fn prompt(n: u64) -> impl Iterator<Item = Token> {
    (0..100).map(move |at| 1000 * n as u32 + at)
}

/// Runs a request for a prompt. Returns where its first slice begins.
fn run(scheduler: &mut Scheduler, id: u64, n: u64, cache_hint: CacheHint) -> u32 {
    scheduler.submit(Request { cache_hint, ..request(id, prompt(n), 1) }, Micros(0)).unwrap();
    let step = plan(scheduler).unwrap();
    super::by_hand::apply(scheduler, &step);
    run_out(scheduler);
    step.slices[0].range.start
}

/// Returns how many prompts of one request each can follow a prompt before its first block makes room.
fn n_survived(hints: &[CacheHint]) -> u64 {
    let survives = |n_others: u64| {
        let mut scheduler = scheduler();
        (0..).zip(hints).for_each(|(id, hint)| _ = run(&mut scheduler, id, 0, *hint));
        (1..=n_others).for_each(|n| assert_eq!(run(&mut scheduler, 100 + n, n, CacheHint::None), 0));
        run(&mut scheduler, 99, 0, CacheHint::None) > 0
    };
    (0..200).take_while(|n| survives(*n)).last().unwrap()
}

#[test]
fn prompts_that_came_back_stay_longer_and_nothing_stays_for_ever() {
    use CacheHint::{Demote, None, Retain};
    let n_once = n_survived(&[None]);
    assert!((3..=4).contains(&n_once), "{n_once}");
    let (n_twice, n_retained) = (n_survived(&[None, None]), n_survived(&[Retain]));
    assert!(n_twice > 2 * n_once && n_retained > 2 * n_twice && n_retained < 100, "{n_twice} {n_retained}");
    // The blocks of another request are not demoted.
    assert_eq!((n_survived(&[None, None, Demote]), n_survived(&[Retain, Demote])), (n_twice, n_retained));
}

#[test]
fn demoted_prompts_make_room_first() {
    let mut scheduler = scheduler();
    for n in 0..4 {
        let hint = if n == 3 { CacheHint::Demote } else { CacheHint::None };
        assert_eq!(run(&mut scheduler, n, n, hint), 0);
    }
    // The newest of four prompts makes room for the fifth.
    assert_eq!(run(&mut scheduler, 10, 10, CacheHint::None), 0);
    assert_eq!([0, 1, 2].map(|n| run(&mut scheduler, 20 + n, n, CacheHint::None)), [96; 3]);
    assert!(run(&mut scheduler, 30, 3, CacheHint::None) < 96);
}
