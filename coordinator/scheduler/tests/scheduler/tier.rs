//! The tier behind the pools: what is stored, when a prefix is fetched and not computed, and what becomes of fetches.

use super::by_hand::{apply, plan, request, run_out};
use scheduler::{Config, RequestOutput, Scheduler, WorkerLoss};
use types::{
    CacheGroup, Epoch, Failure, FetchDone, Micros, Page, PageFetch, PageKey, PrefixReuse, RequestId, ReuseEnd,
    SliceDone, Step, StepDone, TokenOut, Want,
};

const PAGES_MAX: u32 = 1 << 12;

fn config(groups: &[CacheGroup], n_blocks: &[u32]) -> Config {
    Config {
        groups: groups.to_vec(),
        n_blocks: n_blocks.to_vec(),
        context_max: 400,
        running_max: 4,
        batch_tokens_max: 64,
        chunk_tokens_max: 64,
        state_stride: 0,
        tier_pages_max: PAGES_MAX,
        ..Config::default()
    }
}

fn scheduler(groups: &[CacheGroup], n_blocks: &[u32]) -> Scheduler {
    Scheduler::new(config(groups, n_blocks), Epoch::default()).unwrap()
}

fn window(n_positions: u32) -> CacheGroup {
    CacheGroup::FULL.with_window(n_positions)
}

fn plan_at(scheduler: &mut Scheduler, now: u64) -> Option<Step> {
    let mut step = Step::default();
    let planned = scheduler.next_step(Micros(now), &mut step);
    scheduler.check();
    planned.then_some(step)
}

fn keys(pages: &[Page]) -> Vec<PageKey> {
    pages.iter().map(|page| page.key).collect()
}

/// Runs a request to its end. Returns the pages that its steps store.
fn store(scheduler: &mut Scheduler, id: u64, prompt: impl IntoIterator<Item = u32>) -> Vec<PageKey> {
    scheduler.submit(request(id, prompt, 1), Micros(0)).unwrap();
    run_out(scheduler).iter().flat_map(|step| keys(&step.tier.stores)).collect()
}

/// Plans the step that carries one fetch and no slice, and answers the step.
fn plan_fetch(scheduler: &mut Scheduler) -> PageFetch {
    let step = plan(scheduler).expect("a step carries the fetch");
    assert_eq!((step.tier.fetches.len(), step.slices.len()), (1, 0));
    apply(scheduler, &step);
    step.tier.fetches[0].clone()
}

fn answer(scheduler: &mut Scheduler, fetch: &PageFetch, missing: &[u32], micros: u64) {
    scheduler.fetched(&FetchDone { epoch: scheduler.epoch(), id: fetch.id, missing: missing.to_vec(), micros });
    scheduler.check();
}

/// Plans the step that starts a request. Returns where its first slice begins.
fn plan_start(scheduler: &mut Scheduler, id: u64) -> u32 {
    let step = plan(scheduler).expect("the request starts");
    assert_eq!(step.starts.iter().map(|start| start.id).collect::<Vec<_>>(), [RequestId(id)]);
    apply(scheduler, &step);
    step.slices[0].range.start
}

/// Plans a step, and answers it.
fn apply_next(scheduler: &mut Scheduler) -> Step {
    let step = plan(scheduler).expect("there is a step");
    apply(scheduler, &step);
    step
}

/// The answer to a step, of which each slice fails or draws.
fn step_done(step: &Step, failed: Option<Failure>) -> StepDone {
    let draw = |want| if want == Want::Last { vec![TokenOut::default()] } else { vec![] };
    let done = |want| SliceDone { tokens: draw(want), failed, ..SliceDone::default() };
    let slices = step.slices.iter().map(|slice| done(slice.want)).collect();
    StepDone { id: step.id, epoch: step.epoch, slices, micros: 0 }
}

/// Runs a request of another prompt that needs the whole pool of 12 blocks.
fn evict(scheduler: &mut Scheduler, id: u64) {
    store(scheduler, id, (0..190).map(|at| 1000 * id as u32 + at));
}

#[test]
fn an_evicted_prompt_is_fetched_and_not_computed() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    let stored = store(&mut scheduler, 1, 0..100);
    assert_eq!(stored.len(), 6, "each full block is stored once");
    evict(&mut scheduler, 2);
    scheduler.submit(request(3, 0..100, 2), Micros(0)).unwrap();
    let fetch = plan_fetch(&mut scheduler);
    assert_eq!(keys(&fetch.pages), stored);
    assert!(plan(&mut scheduler).is_none(), "it waits for the fetch");
    assert_eq!(scheduler.stats().blocks_used, 6);
    answer(&mut scheduler, &fetch, &[], 100);
    let step = plan(&mut scheduler).unwrap();
    assert_eq!((step.slices[0].range.clone(), step.tier.is_empty()), (96..100, true));
    assert_eq!(&step.blocks[..6], fetch.pages.iter().map(|page| page.block).collect::<Vec<_>>());
    let mut out: Vec<RequestOutput> = Vec::new();
    scheduler.apply(&step_done(&step, None), Micros(0), &mut out).unwrap();
    assert_eq!((out[0].n_cached, out[0].reuse.fetched), (96, 96));
    run_out(&mut scheduler);
    let stats = scheduler.stats();
    assert_eq!((stats.fetches, stats.pages_fetched, stats.pages_missing, stats.blocks_used), (1, 6, 0, 0));
}

#[test]
fn only_what_the_pools_lack_is_fetched() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    let stored = store(&mut scheduler, 1, 0..190);
    // The end of a chain is evicted first.
    store(&mut scheduler, 2, 1000..1100);
    scheduler.submit(request(3, 0..190, 1), Micros(0)).unwrap();
    let fetch = plan_fetch(&mut scheduler);
    assert_eq!(keys(&fetch.pages), stored[5..]);
    answer(&mut scheduler, &fetch, &[], 100);
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(step.slices[0].range.start, 176);
    let mut out: Vec<RequestOutput> = Vec::new();
    scheduler.apply(&step_done(&step, None), Micros(0), &mut out).unwrap();
    assert_eq!((out[0].n_cached, out[0].reuse.fetched), (176, 96));
}

#[test]
fn a_short_prefix_is_computed() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    store(&mut scheduler, 1, 0..60);
    evict(&mut scheduler, 2);
    scheduler.submit(request(3, 0..60, 1), Micros(0)).unwrap();
    assert_eq!((plan_start(&mut scheduler, 3), scheduler.stats().fetches), (0, 0));
}

#[test]
fn a_fetch_that_takes_longer_than_computing_is_not_begun() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    let run = |scheduler: &mut Scheduler, id, prompt: core::ops::Range<u32>| {
        scheduler.submit(request(id, prompt, 1), Micros(0)).unwrap();
        let (mut fetch, mut begin) = (None, None);
        while let Some(step) = plan(scheduler) {
            begin = begin.or(step.slices.first().map(|slice| slice.range.start));
            scheduler.apply(&step_done(&step, None), Micros(1000), &mut Vec::new()).unwrap();
            if let Some(begun) = step.tier.fetches.first() {
                // A page takes 50 ms, and a chunk of four blocks takes 1 ms.
                answer(scheduler, begun, &[], 300_000);
                fetch = Some(begun.clone());
            }
        }
        (fetch.is_some(), begin.unwrap())
    };
    assert_eq!(run(&mut scheduler, 1, 0..100), (false, 0));
    assert_eq!(run(&mut scheduler, 2, 1000..1190), (false, 0));
    assert_eq!(run(&mut scheduler, 3, 0..100), (true, 96), "the first is always begun");
    assert_eq!(run(&mut scheduler, 4, 2000..2190), (false, 0));
    assert_eq!(run(&mut scheduler, 5, 0..100), (false, 0));
    assert_eq!((scheduler.stats().fetches, scheduler.stats().fetches_refused), (1, 1));
}

#[test]
fn pages_before_a_missing_one_are_a_hit() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    let stored = store(&mut scheduler, 1, 0..100);
    evict(&mut scheduler, 2);
    scheduler.submit(request(3, 0..100, 1), Micros(0)).unwrap();
    let fetch = plan_fetch(&mut scheduler);
    answer(&mut scheduler, &fetch, &[2], 100);
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(step.slices[0].range.start, 32);
    scheduler.apply(&step_done(&step, None), Micros(0), &mut Vec::new()).unwrap();
    let last = plan(&mut scheduler).unwrap();
    let mut out: Vec<RequestOutput> = Vec::new();
    scheduler.apply(&step_done(&last, None), Micros(0), &mut out).unwrap();
    let reuse = PrefixReuse { ended: Some(ReuseEnd::NotFetched), position: 96, fetched: 32 };
    assert_eq!(out[0].reuse, reuse, "of six blocks two came");
    let later = run_out(&mut scheduler);
    let stored_again: Vec<PageKey> = [last].iter().chain(&later).flat_map(|step| keys(&step.tier.stores)).collect();
    assert_eq!(stored_again, [stored[2]], "only the missing page is stored again");
    assert_eq!((scheduler.stats().pages_fetched, scheduler.stats().pages_missing), (5, 1));
}

#[test]
fn a_fetch_without_any_page_is_not_repeated() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    store(&mut scheduler, 1, 0..100);
    evict(&mut scheduler, 2);
    scheduler.submit(request(3, 0..100, 1), Micros(0)).unwrap();
    let fetch = plan_fetch(&mut scheduler);
    answer(&mut scheduler, &fetch, &[0, 1, 2, 3, 4, 5], 100);
    assert_eq!(scheduler.stats().blocks_used, 0);
    assert_eq!((plan_start(&mut scheduler, 3), scheduler.stats().fetches), (0, 1));
}

#[test]
fn requests_with_one_prefix_share_a_fetch() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[24]);
    store(&mut scheduler, 1, 0..100);
    store(&mut scheduler, 2, 1000..1380);
    (3..5).for_each(|id| scheduler.submit(request(id, (0..100).chain([id as u32]), 1), Micros(id)).unwrap());
    let fetch = plan_fetch(&mut scheduler);
    assert!(plan(&mut scheduler).is_none(), "both wait");
    answer(&mut scheduler, &fetch, &[], 100);
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(step.slices.iter().map(|slice| slice.range.start).collect::<Vec<_>>(), [96, 96]);
    assert_eq!((scheduler.stats().fetches, step.tier.is_empty()), (1, true));
}

#[test]
fn only_what_a_query_reads_is_fetched() {
    let groups = [CacheGroup::FULL, window(40), CacheGroup::STATE];
    let mut scheduler = scheduler(&groups, &[24, 16, 5]);
    store(&mut scheduler, 1, 0..200);
    (2..8).for_each(|id| drop(store(&mut scheduler, id, (0..380).map(|at| at + 1000 * id as u32))));
    scheduler.submit(request(8, 0..200, 1), Micros(0)).unwrap();
    let fetch = plan_fetch(&mut scheduler);
    let n_pages = |group| fetch.pages.iter().filter(|page| page.key.group == group).count();
    // A query at position 192 reads from position 153 on, and the last state.
    assert_eq!([0, 1, 2].map(n_pages), [12, 3, 1]);
    answer(&mut scheduler, &fetch, &[], 100);
    assert_eq!(plan_start(&mut scheduler, 8), 192);
}

#[test]
fn a_preempted_sequence_reads_the_tier_again() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[14]);
    store(&mut scheduler, 1, 0..100);
    evict(&mut scheduler, 2);
    scheduler.submit(request(3, 5000..5020, 150), Micros(0)).unwrap();
    let first = plan(&mut scheduler).unwrap();
    apply(&mut scheduler, &first);
    scheduler.submit(request(4, 0..100, 100), Micros(1)).unwrap();
    let (mut n_fetches, mut n_pages) = (0, Vec::new());
    for _ in 0..1000 {
        let Some(step) = plan(&mut scheduler) else { break };
        apply(&mut scheduler, &step);
        for fetch in &step.tier.fetches {
            n_fetches += 1;
            n_pages.push(fetch.pages.len());
            answer(&mut scheduler, fetch, &[], 1);
        }
    }
    let stats = scheduler.stats();
    assert!(scheduler.is_idle() && stats.preemptions > 0, "{stats:?}");
    assert!(n_fetches >= 2 && n_pages[1] >= 4, "{n_pages:?}");
}

#[test]
fn a_late_fetch_is_cancelled_at_its_deadline() {
    // (the duration of a step, how long a fetch may take)
    for (took, wait) in [(0, 5_000_000), (1000, 500_000), (1_000_000, 1_000_000)] {
        let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
        for (id, prompt) in [(1, 0..100), (2, 1000..1190)] {
            scheduler.submit(request(id, prompt, 1), Micros(0)).unwrap();
            while let Some(step) = plan(&mut scheduler) {
                scheduler.apply(&step_done(&step, None), Micros(took), &mut Vec::new()).unwrap();
            }
        }
        scheduler.submit(request(3, 0..100, 1), Micros(0)).unwrap();
        let begun = plan_at(&mut scheduler, 10).unwrap();
        apply(&mut scheduler, &begun);
        let fetch = &begun.tier.fetches[0];
        assert!(plan_at(&mut scheduler, 10 + wait * 9 / 10).is_none());
        let late = plan_at(&mut scheduler, 10 + wait * 11 / 10).unwrap();
        assert_eq!((&late.tier.cancels[..], late.slices[0].range.start), (&[fetch.id][..], 0));
        let before = scheduler.stats();
        answer(&mut scheduler, fetch, &[], 1);
        assert_eq!((scheduler.stats(), before.fetches_late), (before, 1), "the late answer is ignored");
    }
}

#[test]
fn a_fetch_outlives_its_request_and_gives_its_blocks_back() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    store(&mut scheduler, 1, 0..100);
    evict(&mut scheduler, 2);
    scheduler.submit(request(3, 0..100, 1), Micros(0)).unwrap();
    let fetch = plan_fetch(&mut scheduler);
    scheduler.cancel(RequestId(3), &mut Vec::new());
    scheduler.check();
    assert_eq!(scheduler.stats().blocks_used, 6);
    answer(&mut scheduler, &fetch, &[], 1);
    assert_eq!(scheduler.stats().blocks_used, 0);
    scheduler.submit(request(4, 0..100, 1), Micros(0)).unwrap();
    assert_eq!((plan_start(&mut scheduler, 4), scheduler.stats().fetches), (96, 1));
}

#[test]
fn new_workers_fetch_what_lost_ones_have_stored() {
    let mut scheduler = scheduler(&[CacheGroup::FULL], &[12]);
    store(&mut scheduler, 1, 0..100);
    evict(&mut scheduler, 2);
    scheduler.submit(request(3, 0..100, 1), Micros(0)).unwrap();
    let lost = plan_fetch(&mut scheduler);
    let old_epoch = scheduler.epoch();
    scheduler.requeue_all(Epoch { incarnation: 0, n: 1 }, WorkerLoss::Unexplained, &mut Vec::new());
    scheduler.check();
    assert_eq!(scheduler.stats().blocks_used, 0);
    scheduler.fetched(&FetchDone { epoch: old_epoch, id: lost.id, ..FetchDone::default() });
    assert_eq!(scheduler.stats().pages_fetched, 0, "an answer of the old epoch is ignored");
    let fetch = plan_fetch(&mut scheduler);
    assert!(keys(&fetch.pages) == keys(&lost.pages) && fetch.id != lost.id);
    answer(&mut scheduler, &fetch, &[], 1);
    assert_eq!(plan_start(&mut scheduler, 3), 96);
}

/// Pages of a failed request are removed, whatever happens to the step that first says so.
#[test]
fn damaged_pages_are_removed_until_the_ranks_confirm_it() {
    // (pages that the index has room for)
    for tier_pages_max in [PAGES_MAX, 1] {
        let config = Config { tier_pages_max, ..config(&[CacheGroup::FULL], &[32]) };
        let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
        scheduler.submit(request(1, 0..200, 5), Micros(0)).unwrap();
        let mut stored = Vec::new();
        let failing = loop {
            let step = plan(&mut scheduler).unwrap();
            stored.extend(keys(&step.tier.stores));
            if step.slices[0].range.start == 200 {
                break step;
            }
            apply(&mut scheduler, &step);
        };
        assert_eq!(stored.len(), 12);
        scheduler.apply(&step_done(&failing, Some(Failure::Computation)), Micros(0), &mut Vec::new()).unwrap();
        for n in 1..4 {
            let epoch = Epoch { incarnation: 0, n };
            // In the first turn nothing was sent before the loss, and then no step was answered.
            scheduler.requeue_all(epoch, WorkerLoss::Planned, &mut Vec::new());
            scheduler.submit(request(1 + u64::from(n), 5000..5010, 1), Micros(0)).unwrap();
            let step = plan(&mut scheduler).unwrap();
            assert_eq!(step.tier.removals, stored, "{tier_pages_max}");
            if n == 3 {
                apply(&mut scheduler, &step);
                assert!(run_out(&mut scheduler).iter().all(|step| step.tier.removals.is_empty()));
            }
        }
        scheduler.requeue_all(Epoch { incarnation: 0, n: 4 }, WorkerLoss::Planned, &mut Vec::new());
        scheduler.submit(request(9, 5000..5010, 1), Micros(0)).unwrap();
        assert!(plan(&mut scheduler).unwrap().tier.is_empty());
    }
}

#[test]
fn a_page_that_turns_out_damaged_while_it_is_fetched_is_no_hit() {
    let mut scheduler = scheduler(&[window(40)], &[12]);
    scheduler.submit(request(1, 0..200, 50), Micros(0)).unwrap();
    while apply_next(&mut scheduler).slices[0].range.end < 200 {}
    // Its first blocks are behind the window, and another needs their room.
    scheduler.submit(request(2, 1000..1100, 1), Micros(1)).unwrap();
    while scheduler.stats().n_running + scheduler.stats().n_waiting > 1 {
        apply_next(&mut scheduler);
    }
    scheduler.submit(request(3, 0..100, 1), Micros(2)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    let fetch = &step.tier.fetches[0];
    assert_eq!((fetch.pages.len(), step.slices[0].id), (3, RequestId(1)));
    scheduler.apply(&step_done(&step, Some(Failure::Computation)), Micros(0), &mut Vec::new()).unwrap();
    answer(&mut scheduler, fetch, &[], 1);
    assert_eq!((plan_start(&mut scheduler, 3), scheduler.stats().fetches), (0, 1));
}

/// The pool of a window has room for the whole log of a request that shares blocks with a running one, and not for the
/// blocks of the fetch beside them.
#[test]
fn a_fetch_without_room_is_not_begun() {
    let narrow =
        Config { chunk_tokens_max: 1, batch_tokens_max: 4, ..config(&[CacheGroup::FULL, window(40)], &[64, 6]) };
    let mut scheduler = Scheduler::new(narrow, Epoch::default()).unwrap();
    store(&mut scheduler, 1, 0..200);
    store(&mut scheduler, 2, 1000..1300);
    scheduler.submit(request(3, (0..48).chain([7]), 10), Micros(0)).unwrap();
    while apply_next(&mut scheduler).slices[0].range.end < 50 {}
    scheduler.submit(request(4, 0..200, 1), Micros(1)).unwrap();
    while let Some(step) = plan(&mut scheduler) {
        apply(&mut scheduler, &step);
        step.tier.fetches.iter().for_each(|fetch| answer(&mut scheduler, fetch, &[], 1));
    }
    assert!(scheduler.is_idle());
}
