//! Cache groups with a window: what a step carries for each, what is released, and what a prefix hit needs.

use super::by_hand::{apply, plan, request, run_out};
use scheduler::{Config, RequestRejection, Scheduler, WorkerLoss};
use types::cache::blocks_for;
use types::{BlockId, CacheGroup, Epoch, Micros, SliceDone, Step, StepDone};

fn window(n_positions: u32) -> CacheGroup {
    CacheGroup::FULL.with_window(n_positions)
}

/// Every position in one group, the last 40 in the other.
fn config(n_blocks: [u32; 2]) -> Config {
    Config {
        groups: vec![CacheGroup::FULL, window(40)],
        n_blocks: n_blocks.to_vec(),
        context_max: 400,
        running_max: 4,
        batch_tokens_max: 32,
        chunk_tokens_max: 32,
        ..Config::default()
    }
}

/// The first slice's runs of blocks: of the full group, and of the windowed one.
fn runs(step: &Step, n_held: u32) -> (&[BlockId], &[BlockId]) {
    let n_new = blocks_for(step.slices[0].range.end) - n_held;
    assert_eq!(step.blocks.len() as u32, 2 * n_new, "each group has as many entries");
    step.blocks.split_at(n_new as usize)
}

#[test]
fn a_sequence_of_any_length_holds_a_window_and_a_chunk() {
    // 40 - 1 + 32 positions touch six blocks at most, and five where chunks begin with a block; the whole log has 24.
    let mut scheduler = Scheduler::new(config([24, 6]), Epoch::default()).unwrap();
    scheduler.submit(request(1, 0..300, 80), Micros(0)).unwrap();
    let (mut used_max, mut n_held) = (0, 0);
    while let Some(step) = plan(&mut scheduler) {
        if let Some(slice) = step.slices.first() {
            let (full, windowed) = runs(&step, n_held);
            assert!(full.iter().all(|block| block.0 < 24) && windowed.iter().all(|block| block.0 < 6));
            n_held = blocks_for(slice.range.end);
            used_max = used_max.max(scheduler.stats().blocks_used - n_held);
        }
        apply(&mut scheduler, &step);
    }
    assert!(scheduler.is_idle());
    assert_eq!((scheduler.stats().tokens_drawn, scheduler.stats().preemptions), (80, 0));
    // The last query is at position 378 and reads from 339 on.
    assert_eq!((used_max, scheduler.stats().blocks_passed), (5, 339 / 16));
}

#[test]
fn what_the_smaller_pool_cannot_hold_is_refused() {
    let mut scheduler = Scheduler::new(config([24, 5]), Epoch::default()).unwrap();
    let too_long = RequestRejection::TooLong { limit: "n_blocks", needed: 99, available: 80 };
    assert_eq!(scheduler.submit(request(1, 0..80, 20), Micros(0)), Err(too_long));
    scheduler.submit(request(1, 0..60, 20), Micros(0)).unwrap();
    run_out(&mut scheduler);
    assert!(scheduler.is_idle());
    scheduler.submit(request(2, 0..60, 20), Micros(0)).unwrap();
    let mut out = Vec::new();
    scheduler.requeue_into(Epoch { incarnation: 0, n: 1 }, &[24, 4], WorkerLoss::Unexplained, &mut out);
    assert!(scheduler.is_idle() && out.len() == 1, "the new workers have no room for it");
}

#[test]
fn a_hit_brings_the_whole_prefix_and_the_last_window_of_it() {
    let mut scheduler = Scheduler::new(config([64, 64]), Epoch::default()).unwrap();
    scheduler.submit(request(1, 0..200, 1), Micros(0)).unwrap();
    let steps = run_out(&mut scheduler);
    let of_group = |nth: usize| {
        let mut n_held = 0;
        let mut all = Vec::new();
        for step in steps.iter().filter(|step| !step.slices.is_empty()) {
            let (full, windowed) = runs(step, n_held);
            all.extend_from_slice([full, windowed][nth]);
            n_held = blocks_for(step.slices[0].range.end);
        }
        all
    };
    let (full, windowed) = (of_group(0), of_group(1));
    // (tokens in common, blocks that are hit, entries that no query will read)
    for (n_common, n_hits, n_none) in [(200, 12, 9), (150, 9, 6), (50, 3, 0), (60, 3, 0), (66, 4, 1)] {
        let id = u64::from(n_common) + 10;
        scheduler.submit(request(id, (0..n_common).chain(900..910), 1), Micros(0)).unwrap();
        let step = plan(&mut scheduler).unwrap();
        assert_eq!(step.slices[0].range.start, 16 * n_hits as u32, "{n_common} in common");
        let (full_now, windowed_now) = runs(&step, 0);
        assert_eq!(full_now[..n_hits], full[..n_hits]);
        assert_eq!(windowed_now[..n_none], vec![BlockId::NONE; n_none]);
        assert_eq!(windowed_now[n_none..n_hits], windowed[n_none..n_hits], "{n_common} in common");
        apply(&mut scheduler, &step);
        run_out(&mut scheduler);
    }
}

#[test]
fn a_hit_ends_where_every_group_has_what_its_next_query_reads() {
    // The windowed pool drops the front of the log while its end is computed; the full one has all of it.
    for (n_common, n_hits) in [(100, 0), (300, 18)] {
        let mut scheduler = Scheduler::new(config([64, 6]), Epoch::default()).unwrap();
        scheduler.submit(request(1, 0..300, 1), Micros(0)).unwrap();
        run_out(&mut scheduler);
        assert!(scheduler.stats().evictions > 0);
        scheduler.submit(request(2, (0..n_common).chain(900..905), 1), Micros(0)).unwrap();
        let step = plan(&mut scheduler).unwrap();
        assert_eq!(step.slices[0].range.start, 16 * n_hits, "{n_common} in common");
    }
}

#[test]
fn blocks_of_slices_in_flight_keep_their_names_until_they_are_computed() {
    // Four chunks in flight: what the first computed is behind the window of the last before any answer.
    let deep = Config { n_stages: 3, steps_in_flight_max: 4, chunk_tokens_min: 1, ..config([64, 64]) };
    let mut scheduler = Scheduler::new(deep, Epoch::default()).unwrap();
    scheduler.submit(request(1, 0..200, 1), Micros(0)).unwrap();
    let steps: Vec<Step> = core::iter::from_fn(|| plan(&mut scheduler)).collect();
    assert_eq!((steps.len(), scheduler.stats().blocks_passed), (4, 0));
    apply(&mut scheduler, &steps[0]);
    assert_eq!(scheduler.stats().blocks_passed, 2, "all computed blocks behind the window are passed");
    steps[1..].iter().for_each(|step| apply(&mut scheduler, step));
    run_out(&mut scheduler);
    scheduler.submit(request(2, (0..40).chain(900..910), 1), Micros(0)).unwrap();
    assert_eq!(plan(&mut scheduler).unwrap().slices[0].range.start, 32);
}

#[test]
fn no_preemption_for_blocks_that_windows_release() {
    // Two long prompts fill three stages. The pool has room for one chunk of each and their windows, not for all chunks
    // that could be in flight.
    let deep =
        Config { n_stages: 3, steps_in_flight_max: 4, chunk_tokens_min: 32, batch_tokens_max: 64, ..config([1; 2]) };
    let tight = Config { groups: vec![window(40)], n_blocks: vec![13], ..deep };
    let mut scheduler = Scheduler::new(tight, Epoch::default()).unwrap();
    let own = |id: u32| (0..300).map(move |at| at + 1000 * id);
    (1..3).for_each(|id| scheduler.submit(request(id.into(), own(id), 20), Micros(id.into())).unwrap());
    let (mut in_flight, mut n_side_by_side) = (std::collections::VecDeque::new(), 0);
    while !scheduler.is_idle() {
        in_flight.extend(core::iter::from_fn(|| plan(&mut scheduler)));
        let step = in_flight.pop_front().unwrap();
        n_side_by_side += u32::from(step.slices.len() == 2);
        apply(&mut scheduler, &step);
    }
    assert_eq!((scheduler.stats().preemptions, scheduler.stats().tokens_drawn), (0, 40));
    assert!(n_side_by_side > 0);
}

#[test]
fn a_window_stays_whole_until_the_draw_at_its_end_has_come() {
    let mut scheduler = Scheduler::new(config([64, 64]), Epoch::default()).unwrap();
    scheduler.submit(request(1, 0..32, 90), Micros(0)).unwrap();
    let mut in_flight = plan(&mut scheduler).unwrap();
    // A query at position 54 is the last that reads the first block.
    let last = loop {
        let behind = plan(&mut scheduler).unwrap();
        if in_flight.slices[0].range.end == 55 {
            break behind;
        }
        apply(&mut scheduler, &in_flight);
        in_flight = behind;
    };
    assert_eq!((last.slices[0].range.clone(), scheduler.stats().blocks_passed), (55..56, 0));
    let late = |step: &Step| StepDone { id: step.id, slices: vec![SliceDone::default()], ..StepDone::default() };
    scheduler.apply(&late(&in_flight), Micros(0), &mut Vec::new()).unwrap();
    scheduler.check();
    let again = plan(&mut scheduler).unwrap();
    assert_eq!((again.slices[0].range.clone(), scheduler.stats().blocks_passed), (54..55, 0));
    apply(&mut scheduler, &last);
    apply(&mut scheduler, &again);
    assert_eq!(scheduler.stats().blocks_passed, 1);
}
