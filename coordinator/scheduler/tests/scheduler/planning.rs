//! What is planned, case by case: admission, chunks, prefix hits, preemption, order, ends.

use scheduler::{Config, RequestOutput, RequestRejection, Scheduler, StaleAnswer, WorkerLoss};
use types::{
    CacheGroup, CacheSalt, Epoch, Failure, Finish, Goal, Grammar, GrammarFault, Micros, Priority, Request, RequestId,
    SCORED_ROWS_MAX, Sampling, SliceDone, Step, StepDone, StepId, TenantId, Token, TokenOut, Unsupported, Want,
};

fn config() -> Config {
    Config {
        n_blocks: vec![64],
        context_max: 256,
        running_max: 8,
        batch_tokens_max: 64,
        chunk_tokens_max: 64,
        ..Config::default()
    }
}

fn scheduler(config: Config) -> Scheduler {
    Scheduler::new(config, Epoch::default()).unwrap()
}

/// A request with its own prompt of `n_prompt` tokens.
fn request(id: u64, n_prompt: u32, tokens_max: u32) -> Request {
    let prompt = (0..n_prompt).map(|position| id as Token * 1000 + position).collect();
    let sampling = Sampling { tokens_max, ..Sampling::default() };
    Request { id: RequestId(id), prompt, sampling, ..Request::default() }
}

fn window(n_positions: u32) -> CacheGroup {
    CacheGroup::FULL.with_window(n_positions)
}

fn plan(scheduler: &mut Scheduler) -> Option<Step> {
    let mut step = Step::default();
    let planned = scheduler.next_step(Micros(0), &mut step);
    scheduler.check();
    planned.then_some(step)
}

/// The answer to a step in which every draw gives `token`.
fn answer(step: &Step, token: Token) -> StepDone {
    let draw = |want| if want == Want::Last { vec![TokenOut { token, ..TokenOut::default() }] } else { vec![] };
    let slices = step
        .slices
        .iter()
        .map(|slice| SliceDone { tokens: draw(slice.want), failed: None, ..SliceDone::default() })
        .collect();
    StepDone { id: step.id, epoch: step.epoch, slices, micros: 0 }
}

fn apply(scheduler: &mut Scheduler, step: &Step, token: Token) -> Vec<RequestOutput> {
    let mut out = Vec::new();
    scheduler.apply(&answer(step, token), Micros(0), &mut out).unwrap();
    scheduler.check();
    out
}

/// (id, start, end) of each slice.
fn slices(step: &Step) -> Vec<(u64, u32, u32)> {
    step.slices.iter().map(|slice| (slice.id.0, slice.range.start, slice.range.end)).collect()
}

/// Runs until nothing is left to plan, one step at a time.
fn run_out(scheduler: &mut Scheduler) -> Vec<RequestOutput> {
    let mut out = Vec::new();
    for _ in 0..10_000 {
        let Some(step) = plan(scheduler) else { return out };
        out.extend(apply(scheduler, &step, 7));
    }
    panic!("it never ends");
}

#[test]
fn a_prompt_is_cut_into_chunks_under_the_budget_of_a_step() {
    // (chunk, batch, prompt, the ranges of its slices until the first draw)
    let cases: [(u32, u32, u32, &[u32]); 6] = [
        (64, 64, 1, &[0, 1]),
        (64, 64, 64, &[0, 64]),
        (64, 64, 65, &[0, 64, 65]),
        (7, 64, 20, &[0, 7, 14, 20]),
        (1, 64, 3, &[0, 1, 2, 3]),
        (64, 10, 25, &[0, 10, 20, 25]),
    ];
    for (chunk_tokens_max, batch_tokens_max, n_prompt, cuts) in cases {
        let mut scheduler = scheduler(Config { chunk_tokens_max, batch_tokens_max, ..config() });
        scheduler.submit(request(1, n_prompt, 5), Micros(0)).unwrap();
        for (i, range) in cuts.windows(2).enumerate() {
            let step = plan(&mut scheduler).unwrap();
            assert_eq!(slices(&step), [(1, range[0], range[1])]);
            assert_eq!(step.starts.len(), usize::from(i == 0));
            let is_last = range[1] == n_prompt;
            assert_eq!(step.slices[0].want, if is_last { Want::Last } else { Want::Nothing });
            assert_eq!(apply(&mut scheduler, &step, 7).len(), usize::from(is_last));
        }
    }
}

#[test]
fn decoding_is_planned_before_chunks_and_admission() {
    let mut scheduler = scheduler(Config { batch_tokens_max: 16, chunk_tokens_max: 16, ..config() });
    scheduler.submit(request(1, 4, 20), Micros(0)).unwrap();
    scheduler.submit(request(2, 30, 20), Micros(1)).unwrap();
    scheduler.submit(request(3, 5, 20), Micros(2)).unwrap();
    let expected: [&[(u64, u32, u32)]; 3] =
        [&[(1, 0, 4), (2, 0, 12)], &[(1, 4, 5), (2, 12, 27)], &[(1, 5, 6), (2, 27, 30), (3, 0, 5)]];
    for slices_expected in expected {
        let step = plan(&mut scheduler).unwrap();
        assert_eq!(slices(&step), slices_expected);
        apply(&mut scheduler, &step, 7);
    }
}

#[test]
fn one_slice_is_planned_ahead_if_allowed_and_steps_in_flight_are_limited() {
    // (slices ahead, steps in flight, ends of the ranges that are planned before any answer)
    let cases: [(u32, u32, &[u32]); 5] =
        [(0, 4, &[10]), (1, 4, &[10, 11]), (1, 2, &[10, 11]), (1, 1, &[10]), (0, 1, &[10])];
    for (slices_ahead_max, steps_in_flight_max, ends) in cases {
        let mut scheduler = scheduler(Config { slices_ahead_max, steps_in_flight_max, ..config() });
        scheduler.submit(request(1, 10, 5), Micros(0)).unwrap();
        let planned: Vec<u32> =
            core::iter::from_fn(|| plan(&mut scheduler)).map(|step| step.slices[0].range.end).collect();
        assert_eq!(planned, ends);
    }
}

#[test]
fn nothing_is_planned_past_tokens_max_or_the_context() {
    // (prompt, tokens_max, tokens that come)
    for (n_prompt, tokens_max, n_tokens) in [(10, 1, 1), (10, 2, 2), (10, 30, 30), (250, 100, 6), (255, 9, 1)] {
        let mut scheduler = scheduler(config());
        scheduler.submit(request(1, n_prompt, tokens_max), Micros(0)).unwrap();
        let mut out = Vec::new();
        let (mut n_computed, mut in_flight) = (0, std::collections::VecDeque::new());
        while !scheduler.is_idle() {
            while let Some(step) = plan(&mut scheduler) {
                n_computed += step.n_tokens();
                in_flight.push_back(step);
            }
            out.extend(apply(&mut scheduler, &in_flight.pop_front().unwrap(), 7));
        }
        assert_eq!(out.len(), n_tokens);
        assert_eq!(out.last().unwrap().finish, Some(Finish::Length));
        assert_eq!(n_computed, n_prompt as usize + n_tokens - 1, "the last token is not computed");
    }
}

#[test]
fn a_slice_past_a_stop_is_discarded_and_its_blocks_wait_for_it() {
    let mut scheduler = scheduler(config());
    let mut stopping = request(1, 10, 50);
    stopping.sampling.stop = vec![3];
    scheduler.submit(stopping, Micros(0)).unwrap();
    let first = plan(&mut scheduler).unwrap();
    let ahead = plan(&mut scheduler).unwrap();
    let out = apply(&mut scheduler, &first, 3);
    assert_eq!((out[0].position, out[0].n_tokens, out[0].finish), (0, 1, Some(Finish::Stop)));
    let last = plan(&mut scheduler).unwrap();
    assert_eq!((slices(&last), &last.ends), (vec![], &vec![RequestId(1)]), "the step has only ends");
    assert_eq!(scheduler.stats().blocks_used, 1);
    assert_eq!(apply(&mut scheduler, &ahead, 5), []);
    assert_eq!((scheduler.stats().blocks_used, scheduler.stats().tokens_discarded), (0, 1));
    assert!(!scheduler.is_idle());
    assert_eq!(apply(&mut scheduler, &last, 5), []);
    assert!(scheduler.is_idle());
}

#[test]
fn stops_count_only_after_tokens_min() {
    let mut scheduler = scheduler(config());
    let mut stopping = request(1, 10, 50);
    (stopping.sampling.stop, stopping.sampling.tokens_min) = (vec![7], 3);
    scheduler.submit(stopping, Micros(0)).unwrap();
    let out = run_out(&mut scheduler);
    assert_eq!((out.len(), out[3].finish), (4, Some(Finish::Stop)));
}

#[test]
fn a_prefix_is_shared_by_full_blocks_of_the_same_owner_and_one_token_is_left_to_compute() {
    let changed = |i: usize| {
        let mut request = request(1, 40, 1);
        request.prompt[i] += 500;
        request
    };
    let cases = [
        ("the same prompt", request(1, 40, 1), 32),
        ("exactly two blocks", request(1, 32, 1), 16),
        ("one token more", request(1, 33, 1), 32),
        ("less than a block", request(1, 16, 1), 0),
        ("other in the first block", changed(3), 0),
        ("other in the second block", changed(16), 16),
        ("other in the third block", changed(39), 32),
        ("another tenant", Request { tenant: TenantId(9), ..request(1, 40, 1) }, 0),
        ("another salt", Request { cache_salt: CacheSalt::of("mine"), ..request(1, 40, 1) }, 0),
        ("no reading", Request { cache_bypass: true, ..request(1, 40, 1) }, 0),
        ("apart", Request { cache_apart: true, ..request(1, 40, 1) }, 0),
    ];
    for (name, again, n_cached) in cases {
        let mut scheduler = scheduler(config());
        scheduler.submit(request(1, 40, 1), Micros(0)).unwrap();
        run_out(&mut scheduler);
        scheduler.submit(again, Micros(0)).unwrap();
        let step = plan(&mut scheduler).unwrap();
        assert_eq!(step.slices[0].range.start, n_cached, "{name}");
        let n_blocks = types::cache::blocks_for(step.slices[0].range.end) as usize;
        assert_eq!(step.blocks.len(), n_blocks, "{name}: shared blocks are at the front of the first run");
        assert_eq!(apply(&mut scheduler, &step, 7)[0].n_cached, n_cached, "{name}");
        assert_eq!(scheduler.stats().prefix_hit_tokens, u64::from(n_cached), "{name}");
    }
}

#[test]
fn a_request_apart_from_the_cache_leaves_nothing_there() {
    let mut scheduler = scheduler(config());
    let apart = Request { cache_bypass: true, cache_apart: true, ..request(1, 40, 30) };
    scheduler.submit(apart.clone(), Micros(0)).unwrap();
    assert_eq!(run_out(&mut scheduler).len(), 30);
    scheduler.submit(request(1, 40, 1), Micros(0)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(step.slices[0].range.start, 0, "the request apart has filled the cache");
    apply(&mut scheduler, &step, 7);
    // Blocks that others have filled stay unchanged when it runs and ends.
    scheduler.submit(apart, Micros(0)).unwrap();
    run_out(&mut scheduler);
    scheduler.submit(request(1, 40, 1), Micros(0)).unwrap();
    assert_eq!(plan(&mut scheduler).unwrap().slices[0].range.start, 32);
}

#[test]
fn generated_blocks_serve_the_next_turn_and_running_ones_serve_neighbours() {
    let mut scheduler = scheduler(config());
    scheduler.submit(request(1, 20, 30), Micros(0)).unwrap();
    let mut neighbour = request(1, 17, 1);
    neighbour.id = RequestId(2);
    let step = plan(&mut scheduler).unwrap();
    apply(&mut scheduler, &step, 7);
    scheduler.submit(neighbour, Micros(0)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(slices(&step), [(1, 20, 21), (2, 16, 17)], "the first still runs");
    apply(&mut scheduler, &step, 7);
    run_out(&mut scheduler);
    let mut next_turn = request(1, 20, 1);
    next_turn.prompt.extend([7; 30]);
    scheduler.submit(next_turn, Micros(0)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(slices(&step), [(1, 48, 50)]);
}

#[test]
fn the_least_urgent_is_preempted_and_begins_again_from_its_log() {
    // Three sequences that grow from two blocks to four in a pool of nine.
    let mut scheduler = scheduler(Config { n_blocks: vec![9], context_max: 64, slices_ahead_max: 0, ..config() });
    for (id, priority) in [(1, 0), (2, 1), (3, 0)] {
        scheduler.submit(Request { priority: Priority(priority), ..request(id, 18, 40) }, Micros(id)).unwrap();
    }
    let (mut started, mut n_tokens_by_id) = (Vec::new(), std::collections::BTreeMap::<u64, u32>::new());
    while !scheduler.is_idle() {
        let step = plan(&mut scheduler).unwrap();
        started.extend(step.starts.iter().map(|request| (request.id.0, request.output.len() as u32)));
        for output in apply(&mut scheduler, &step, 7) {
            let n = n_tokens_by_id.entry(output.id.0).or_default();
            assert_eq!(output.position, *n);
            *n += output.n_tokens;
        }
    }
    assert_eq!(started[..3], [(1, 0), (3, 0), (2, 0)], "ordered by priority, then by arrival");
    assert!(started.len() > 3 && started[3..].iter().all(|&(id, n_output)| id == 2 && n_output > 0), "{started:?}");
    assert_eq!(n_tokens_by_id.into_values().collect::<Vec<_>>(), [40, 40, 40]);
    assert_eq!(scheduler.stats().preemptions as usize, started.len() - 3);
}

#[test]
fn slices_planned_for_a_preempted_sequence_are_dropped() {
    let config = Config { n_blocks: vec![6], context_max: 96, steps_in_flight_max: 4, ..config() };
    let mut scheduler = scheduler(config);
    scheduler.submit(request(1, 20, 30), Micros(0)).unwrap();
    scheduler.submit(request(2, 47, 30), Micros(0)).unwrap();
    let mut in_flight = vec![plan(&mut scheduler).unwrap()];
    for _ in 0..100 {
        in_flight.push(plan(&mut scheduler).unwrap());
        if scheduler.stats().preemptions > 0 {
            break;
        }
        apply(&mut scheduler, &in_flight.remove(0), 7);
    }
    // [first, second] in flight · second was planned after request 2 lost its blocks to request 1
    assert_eq!(in_flight.iter().map(|step| step.slices.len()).collect::<Vec<_>>(), [2, 1]);
    scheduler.cancel(RequestId(2), &mut Vec::new());
    scheduler.submit(request(3, 5, 2), Micros(0)).unwrap();
    in_flight.push(plan(&mut scheduler).unwrap());
    assert_eq!(in_flight[1].ends, [RequestId(2)], "the ranks forget it when it is preempted");
    assert_eq!((slices(&in_flight[2]), &in_flight[2].ends), (vec![(3, 0, 5)], &vec![]));
    let output_ids =
        in_flight.iter().map(|step| apply(&mut scheduler, step, 7).iter().map(|output| output.id.0).collect());
    assert_eq!(output_ids.collect::<Vec<Vec<u64>>>(), [[1], [1], [3]]);
    assert_eq!(scheduler.stats().tokens_redrawn, 1);
}

#[test]
fn a_request_that_does_not_fit_now_is_not_overtaken() {
    let mut scheduler = scheduler(Config { n_blocks: vec![10], context_max: 160, ..config() });
    scheduler.submit(request(1, 60, 20), Micros(0)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    scheduler.submit(request(2, 150, 5), Micros(1)).unwrap();
    scheduler.submit(request(3, 5, 5), Micros(2)).unwrap();
    apply(&mut scheduler, &step, 7);
    assert_eq!(slices(&plan(&mut scheduler).unwrap()), [(1, 60, 61)]);
    assert_eq!(scheduler.stats().n_waiting, 2);
}

#[test]
fn aged_request_goes_first() {
    // (aging in micros, the first to start of: low priority at 0, high priority at 1000)
    for (aging_micros, first) in [(10_000, 3), (100, 2)] {
        let mut scheduler = scheduler(Config { running_max: 1, aging_micros, ..config() });
        scheduler.submit(request(1, 5, 1), Micros(0)).unwrap();
        let step = plan(&mut scheduler).unwrap();
        scheduler.submit(Request { priority: Priority(5), ..request(2, 5, 1) }, Micros(0)).unwrap();
        scheduler.submit(Request { priority: Priority(0), ..request(3, 5, 1) }, Micros(1000)).unwrap();
        apply(&mut scheduler, &step, 7);
        assert_eq!(plan(&mut scheduler).unwrap().starts[0].id, RequestId(first), "aging {aging_micros}");
    }
}

#[test]
fn refusals_have_specific_reasons() {
    let limited = || Config { n_blocks: vec![10], waiting_max: 3, waiting_tokens_max: 300, ..config() };
    let mut submitted = scheduler(limited());
    submitted.submit(request(1, 60, 10), Micros(5)).unwrap();
    let resumed = |output: &[Token], tokens_max| Request { output: output.to_vec(), ..request(2, 9, tokens_max) };
    let stopped =
        Request { sampling: Sampling { stop: vec![4], ..Sampling::default() }, output: vec![4], ..request(2, 9, 0) };
    let cases = [
        (request(1, 5, 5), RequestRejection::Duplicate),
        (request(2, 0, 5), RequestRejection::Empty),
        (request(2, 256, 5), RequestRejection::TooLong { limit: "context_max", needed: 257, available: 256 }),
        (request(2, 100, 90), RequestRejection::TooLong { limit: "n_blocks", needed: 189, available: 160 }),
        (request(2, 245, 1), RequestRejection::TooLong { limit: "n_blocks", needed: 245, available: 160 }),
        (Request { deadline: Some(Micros(5)), ..request(2, 5, 5) }, RequestRejection::Deadline),
        (resumed(&[1, 2], 2), RequestRejection::Finished(Finish::Length)),
        (stopped, RequestRejection::Finished(Finish::Stop)),
        (request(2, 9, 0), RequestRejection::Finished(Finish::Length)),
    ];
    for (request, rejected) in cases {
        assert_eq!(submitted.submit(request, Micros(5)), Err(rejected));
    }
    submitted.submit(request(2, 130, 10), Micros(5)).unwrap();
    let full = RequestRejection::Full { limit: "waiting_tokens_max", max: 300 };
    assert_eq!(submitted.submit(request(3, 120, 5), Micros(5)), Err(full));
    submitted.submit(request(3, 5, 5), Micros(5)).unwrap();
    let full = RequestRejection::Full { limit: "waiting_max", max: 3 };
    assert_eq!(submitted.submit(request(4, 5, 5), Micros(5)), Err(full));
    submitted.drain();
    assert_eq!(submitted.submit(request(5, 5, 5), Micros(5)), Err(RequestRejection::Draining));
    assert_eq!(run_out(&mut submitted).iter().filter(|output| output.finish.is_some()).count(), 3);
}

#[test]
fn impossible_configurations_are_refused_by_name() {
    let cases = [
        (Config { groups: vec![window(0)], ..config() }, "a window of 0 positions"),
        (Config { groups: vec![CacheGroup::FULL; 2], ..config() }, "other than one n_blocks for each cache group"),
        (Config { groups: vec![], ..config() }, "other than one n_blocks for each cache group"),
        (Config { groups: vec![window(4); 9], n_blocks: vec![9; 9], ..config() }, "more than 8 cache groups"),
        (Config { n_stages: 0, ..config() }, "n_stages = 0"),
        (Config { n_blocks: vec![0], ..config() }, "n_blocks = 0"),
        (Config { running_max: 65, ..config() }, "batch_tokens_max below running_max"),
        (Config { suspicion_max: 0, ..config() }, "suspicion_max = 0"),
        (Config { slices_ahead_max: 2, ..config() }, "slices_ahead_max above 1"),
        (Config { waiting_tokens_max: 255, ..config() }, "waiting_tokens_max below context_max"),
    ];
    for (config, what) in cases {
        assert_eq!(Scheduler::new(config, Epoch::default()).err(), Some(Unsupported(what)));
    }
}

#[test]
fn a_resumed_request_counts_from_the_end_of_its_prompt() {
    let mut scheduler = scheduler(config());
    scheduler.submit(Request { output: vec![1, 2, 3], ..request(1, 10, 5) }, Micros(0)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    assert_eq!((slices(&step), step.starts[0].output.len()), (vec![(1, 0, 13)], 3));
    let mut out = apply(&mut scheduler, &step, 7);
    out.extend(run_out(&mut scheduler));
    assert_eq!(out.iter().map(|output| output.position).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(out[1].finish, Some(Finish::Length));
}

#[test]
fn deadlines_end_what_waits_and_what_runs() {
    let mut scheduler = scheduler(Config { running_max: 1, ..config() });
    for (id, deadline) in [(1, 100), (2, 50), (3, 200)] {
        scheduler.submit(Request { deadline: Some(Micros(deadline)), ..request(id, 10, 50) }, Micros(0)).unwrap();
    }
    let step = plan(&mut scheduler).unwrap();
    let expire = |scheduler: &mut Scheduler, now| {
        let mut out = Vec::new();
        scheduler.expire(Micros(now), &mut out);
        scheduler.check();
        out.iter().map(|output| (output.id.0, output.finish.unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(expire(&mut scheduler, 49), []);
    assert_eq!(expire(&mut scheduler, 50), [(2, Finish::Deadline)]);
    assert_eq!(expire(&mut scheduler, 150), [(1, Finish::Deadline)]);
    apply(&mut scheduler, &step, 7);
    let mut late = Step::default();
    assert!(scheduler.next_step(Micros(200), &mut late), "a request past its deadline does not begin");
    assert_eq!((slices(&late), late.starts.len(), late.ends), (vec![], 0, vec![RequestId(1)]));
}

#[test]
fn a_failed_slice_ends_its_request_and_no_other() {
    let mut scheduler = scheduler(config());
    (1..3).for_each(|id| scheduler.submit(request(id, 10, 5), Micros(0)).unwrap());
    let step = plan(&mut scheduler).unwrap();
    let mut done = answer(&step, 7);
    done.slices[0] = SliceDone { tokens: vec![], failed: Some(Failure::Computation), ..SliceDone::default() };
    let mut out = Vec::new();
    scheduler.apply(&done, Micros(0), &mut out).unwrap();
    assert_eq!(
        out.iter().map(|output| (output.id.0, output.finish)).collect::<Vec<_>>(),
        [(1, Some(Finish::Failed)), (2, None)]
    );
    assert_eq!(run_out(&mut scheduler).len(), 4);
}

#[test]
fn what_a_failed_request_has_computed_is_no_prefix_of_another() {
    let cached = |fails: bool| {
        let mut scheduler = scheduler(config());
        let prompt = || Request { prompt: (0..40).collect(), ..request(1, 40, 20) };
        scheduler.submit(prompt(), Micros(0)).unwrap();
        // The prompt is computed well and its blocks have names; then a row of it is not made of numbers.
        for i in 0..3 {
            let step = plan(&mut scheduler).unwrap();
            let mut done = answer(&step, 7);
            done.slices[0].failed = (fails && i == 2).then_some(Failure::Computation);
            scheduler.apply(&done, Micros(0), &mut Vec::new()).unwrap();
            scheduler.check();
        }
        scheduler.submit(Request { id: RequestId(2), ..prompt() }, Micros(0)).unwrap();
        let mut n_cached = None;
        while n_cached.is_none() {
            let step = plan(&mut scheduler).unwrap();
            n_cached = step.slices.iter().find(|slice| slice.id.0 == 2).map(|slice| slice.range.start);
            apply(&mut scheduler, &step, 7);
        }
        n_cached
    };
    assert_eq!(cached(false), Some(32));
    assert_eq!(cached(true), Some(0));
}

#[test]
fn answers_that_belong_to_no_step_change_nothing() {
    let mut scheduler = scheduler(config());
    scheduler.submit(request(1, 10, 5), Micros(0)).unwrap();
    let first = plan(&mut scheduler).unwrap();
    let second = plan(&mut scheduler).unwrap();
    let good = answer(&first, 7);
    let other = Epoch { incarnation: 9, n: 9 };
    let wrong_count = StepDone { slices: vec![], ..good.clone() };
    let two = SliceDone { tokens: vec![TokenOut::default(); 2], ..SliceDone::default() };
    let wrong_tokens = StepDone { slices: vec![two], ..good.clone() };
    let cases = [
        (StepDone { epoch: other, ..good.clone() }, StaleAnswer::Epoch { expected: Epoch::default(), got: other }),
        (answer(&second, 7), StaleAnswer::Step { expected: Some(StepId(0)), got: StepId(1) }),
        (wrong_count, StaleAnswer::SliceCount { expected: 1, got: 0 }),
        (wrong_tokens, StaleAnswer::TokenCount { slice: 0, max: 1, got: 2 }),
    ];
    for (done, stale) in cases {
        let mut out = Vec::new();
        assert_eq!((scheduler.apply(&done, Micros(0), &mut out), out), (Err(stale), vec![]));
        scheduler.check();
    }
    apply(&mut scheduler, &first, 7);
    let again = scheduler.apply(&good, Micros(0), &mut Vec::new());
    assert_eq!(again, Err(StaleAnswer::Step { expected: Some(StepId(1)), got: StepId(0) }));
}

#[test]
fn lost_workers_cost_no_request_and_the_cache() {
    let mut scheduler = scheduler(config());
    scheduler.submit(request(1, 40, 5), Micros(0)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    apply(&mut scheduler, &step, 7);
    let lost = plan(&mut scheduler).unwrap();
    let epoch = Epoch { incarnation: 0, n: 1 };
    scheduler.requeue_all(epoch, WorkerLoss::Unexplained, &mut Vec::new());
    scheduler.check();
    assert!(matches!(scheduler.apply(&answer(&lost, 7), Micros(0), &mut Vec::new()), Err(StaleAnswer::Epoch { .. })));
    let replay = plan(&mut scheduler).unwrap();
    assert_eq!((replay.id, replay.epoch, slices(&replay)), (StepId(0), epoch, vec![(1, 0, 41)]));
    assert_eq!(replay.starts[0].output, [7]);
    assert_eq!(apply(&mut scheduler, &replay, 7)[0].position, 1);
    let mut out = Vec::new();
    scheduler.requeue_into(Epoch { incarnation: 0, n: 2 }, &[2], WorkerLoss::Planned, &mut out);
    assert_eq!(out[0].finish, Some(Finish::Failed), "it can never fit the new workers");
    assert!(scheduler.is_idle());
}

#[test]
fn ranks_never_hold_more_than_may_run() {
    let limits = Config { n_blocks: vec![8], context_max: 128, running_max: 2, slices_ahead_max: 0, ..config() };
    let mut scheduler = Scheduler::new(limits, Epoch::default()).unwrap();
    scheduler.submit(request(1, 30, 90), Micros(0)).unwrap();
    scheduler.submit(Request { priority: Priority(9), ..request(2, 30, 60) }, Micros(0)).unwrap();
    let mut held = std::collections::BTreeSet::new();
    let mut is_third_here = false;
    while !scheduler.is_idle() {
        if scheduler.stats().preemptions > 0 && !is_third_here {
            is_third_here = true;
            scheduler.submit(request(3, 5, 3), Micros(0)).unwrap();
        }
        let step = plan(&mut scheduler).unwrap();
        assert!(step.ends.iter().all(|id| held.remove(id)), "only held requests end: {step:?}");
        held.extend(step.starts.iter().map(|request| request.id));
        assert!(held.len() <= 2, "{held:?}");
        scheduler.apply(&answer(&step, 7), Micros(0), &mut Vec::new()).unwrap();
    }
    assert!(is_third_here, "a request was preempted");
}

#[test]
fn counters_only_grow() {
    let mut scheduler = Scheduler::new(Config { n_blocks: vec![16], ..config() }, Epoch::default()).unwrap();
    let run = |scheduler: &mut Scheduler, ids: std::ops::Range<u64>| {
        for id in ids {
            scheduler.submit(request(id, 100, 2), Micros(0)).unwrap();
            while let Some(step) = plan(scheduler) {
                scheduler.apply(&answer(&step, 7), Micros(0), &mut Vec::new()).unwrap();
            }
        }
    };
    run(&mut scheduler, 0..8);
    let before = scheduler.stats().evictions;
    assert!(before > 0);
    scheduler.requeue_all(Epoch { incarnation: 0, n: 1 }, WorkerLoss::Unexplained, &mut Vec::new());
    run(&mut scheduler, 9..10);
    assert!(scheduler.stats().evictions >= before);
}

#[test]
fn a_log_that_fills_the_context_is_finished_and_not_too_long() {
    let mut scheduler =
        Scheduler::new(Config { n_blocks: vec![64], context_max: 256, ..config() }, Epoch::default()).unwrap();
    let complete = Request { output: vec![7; 6], ..request(1, 250, 100) };
    assert_eq!(scheduler.submit(complete, Micros(0)), Err(RequestRejection::Finished(Finish::Length)));
}

/// Nine requests, one of which breaks the workers with every slice that ends behind a position. `ahead`: the loss is
/// known before the answers to the steps in front of it. Returns the number of losses and each request's outcome:
/// (tokens, finish).
fn run_with_culprit(
    config: Config,
    culprit: u64,
    breaks_behind: u32,
    ahead: bool,
) -> (u32, std::collections::BTreeMap<u64, (u32, Option<Finish>)>) {
    let mut scheduler = scheduler(config);
    let mut outcomes = std::collections::BTreeMap::<u64, (u32, Option<Finish>)>::new();
    (0..9).for_each(|id| scheduler.submit(request(id, 20 + 7 * id as u32, 12), Micros(id)).unwrap());
    let breaks = |step: &Step| step.slices.iter().any(|s| s.id.0 == culprit && s.range.end > breaks_behind);
    let (mut n_losses, mut in_flight) = (0, std::collections::VecDeque::new());
    for _ in 0..10_000 {
        while let Some(step) = plan(&mut scheduler) {
            in_flight.push_back(step);
        }
        let Some(first) = in_flight.front() else { break };
        let mut out = Vec::new();
        if breaks(first) || ahead && in_flight.iter().any(breaks) {
            n_losses += 1;
            in_flight.clear();
            scheduler.requeue_all(Epoch { incarnation: 0, n: 2 * n_losses }, WorkerLoss::Unexplained, &mut out);
            scheduler.requeue_all(Epoch { incarnation: 0, n: 2 * n_losses + 1 }, WorkerLoss::Unexplained, &mut out);
            scheduler.check();
        } else {
            out = apply(&mut scheduler, &in_flight.pop_front().unwrap(), 7);
        }
        for output in out {
            let client = outcomes.entry(output.id.0).or_default();
            assert_eq!((output.position, client.1), (client.0, None));
            *client = (client.0 + output.n_tokens, output.finish);
        }
    }
    assert!(scheduler.is_idle(), "it never ends");
    (n_losses, outcomes)
}

#[test]
fn what_breaks_the_workers_ends_and_its_neighbours_do_not() {
    let narrow = || Config { batch_tokens_max: 9, chunk_tokens_max: 9, running_max: 9, ..config() };
    let tight = || Config { n_blocks: vec![12], running_max: 9, context_max: 100, ..config() };
    let deep = || Config { steps_in_flight_max: 4, ..narrow() };
    let one = || Config { steps_in_flight_max: 1, slices_ahead_max: 0, ..config() };
    let configs = [config(), narrow(), tight(), deep(), one()];
    let cases =
        configs.iter().flat_map(|config| [3, 5].map(|suspicion_max| Config { suspicion_max, ..config.clone() }));
    for (config, culprit) in cases.flat_map(|config| (0..9).map(move |culprit| (config.clone(), culprit))) {
        let n_prompt = 20 + 7 * culprit as u32;
        // At its first token, in the middle of its prompt, at its first draw, and after five tokens.
        for (breaks_behind, n_output) in [(0, 0), (n_prompt / 2, 0), (n_prompt - 1, 0), (n_prompt + 4, 5)] {
            for ahead in [false, true] {
                let (n_losses, outcomes) = run_with_culprit(config.clone(), culprit, breaks_behind, ahead);
                assert!(n_losses >= config.suspicion_max);
                assert_eq!(outcomes.len(), 9);
                for (id, ended) in outcomes {
                    let expected = if id == culprit { (n_output, Finish::Failed) } else { (12, Finish::Length) };
                    let case = (culprit, breaks_behind, ahead, &config);
                    assert_eq!(ended, (expected.0, Some(expected.1)), "request {id} in {case:?}");
                }
                if !ahead {
                    assert_eq!(n_losses, config.suspicion_max, "each loss is counted against the culprit");
                }
            }
        }
    }
}

#[test]
fn one_suspect_runs_at_a_time_and_the_rest_goes_on_beside_them() {
    let mut scheduler = scheduler(config());
    (1..4).for_each(|id| scheduler.submit(request(id, 10, 3), Micros(id)).unwrap());
    assert_eq!(plan(&mut scheduler).unwrap().slices.len(), 3);
    scheduler.requeue_all(Epoch { incarnation: 0, n: 1 }, WorkerLoss::Unexplained, &mut Vec::new());
    (4..6).for_each(|id| scheduler.submit(request(id, 10, 3), Micros(id)).unwrap());
    let expected: [&[(u64, u32, u32)]; 3] = [
        &[(1, 0, 10), (4, 0, 10), (5, 0, 10)],
        &[(1, 10, 11), (4, 10, 11), (5, 10, 11), (2, 0, 10)],
        &[(1, 11, 12), (2, 10, 11), (4, 11, 12), (5, 11, 12), (3, 0, 10)],
    ];
    for slices_expected in expected {
        let step = plan(&mut scheduler).unwrap();
        assert_eq!(slices(&step), slices_expected);
        assert_eq!(plan(&mut scheduler), None, "beside a suspect one step is in flight");
        apply(&mut scheduler, &step, 7);
    }
    assert!(run_out(&mut scheduler).iter().all(|output| output.finish != Some(Finish::Failed)));
}

#[test]
fn no_request_fails_for_losses_without_a_culprit() {
    let mut scheduler = scheduler(config());
    (0..4).for_each(|id| scheduler.submit(request(id, 10, 3), Micros(id)).unwrap());
    // In turns, the least suspicious first: the sequence that is alone in a loss is another the next time.
    for n in 1..=12 {
        let step = plan(&mut scheduler).unwrap();
        let alone = (n > 1).then(|| slices(&step)[0].0 as u32);
        assert_eq!(alone, (n > 1).then(|| (n - 2) % 4), "of {step:?}");
        let mut out = Vec::new();
        scheduler.requeue_all(Epoch { incarnation: 0, n }, WorkerLoss::Unexplained, &mut out);
        assert_eq!(out, []);
    }
    for n in 13..=30 {
        plan(&mut scheduler).unwrap();
        let mut out = Vec::new();
        scheduler.requeue_all(Epoch { incarnation: 0, n }, WorkerLoss::Planned, &mut out);
        assert_eq!(out, [], "a planned loss counts against no request");
    }
    let ended = run_out(&mut scheduler);
    assert_eq!(ended.iter().filter(|output| output.finish == Some(Finish::Length)).count(), 4);
}

#[test]
fn request_ahead_of_the_culprit_does_not_fail() {
    let config = Config { steps_in_flight_max: 4, batch_tokens_max: 20, chunk_tokens_max: 20, ..config() };
    let mut scheduler = scheduler(config);
    scheduler.submit(request(1, 50, 3), Micros(1)).unwrap();
    scheduler.submit(request(2, 30, 3), Micros(2)).unwrap();
    let breaks = |step: &Step| step.slices.iter().any(|slice| slice.id.0 == 2);
    let mut ended = Vec::new();
    for n in 1..100 {
        let steps: Vec<Step> = core::iter::from_fn(|| plan(&mut scheduler)).collect();
        let mut out = Vec::new();
        if steps.iter().any(breaks) {
            scheduler.requeue_all(Epoch { incarnation: 0, n }, WorkerLoss::Unexplained, &mut out);
        } else {
            out = steps.iter().flat_map(|step| apply(&mut scheduler, step, 7)).collect();
        }
        ended.extend(out.iter().filter_map(|output| Some((output.id.0, output.finish?))));
    }
    ended.sort_by_key(|ended| ended.0);
    assert_eq!(ended, [(1, Finish::Length), (2, Finish::Failed)]);
}

#[test]
fn a_prompt_is_scored_a_few_rows_a_step() {
    let mut scheduler = scheduler(Config { batch_tokens_max: 256, chunk_tokens_max: 256, ..config() });
    let score = |id| Request { goal: Goal::Score { top_n: 1 }, ..request(id, 100, 2) };
    (1..3).for_each(|id| scheduler.submit(score(id), Micros(0)).unwrap());
    scheduler.submit(request(3, 20, 2), Micros(0)).unwrap();
    let first = plan(&mut scheduler).unwrap();
    // The next request waits for its turn to be scored; the next step has rows again.
    assert_eq!(slices(&first), [(1, 0, SCORED_ROWS_MAX)]);
    assert_eq!(first.slices[0].want, Want::All { top_n: 1 });
    let second = plan(&mut scheduler).unwrap();
    assert_eq!(slices(&second), [(1, 64, 100), (2, 0, 28), (3, 0, 20)]);
    let mut done = answer(&first, 7);
    done.slices[0].scored = vec![TokenOut::default(); 64];
    let mut out = Vec::new();
    scheduler.apply(&done, Micros(0), &mut out).unwrap();
    let summaries: Vec<_> =
        out.iter().map(|output| (output.id.0, output.n_tokens, output.scored_position, output.finish)).collect();
    assert_eq!(summaries, [(1, 0, 1, None)]);
    let mut done = answer(&second, 7);
    done.slices[0].tokens = vec![TokenOut { token: 7, ..TokenOut::default() }];
    out.clear();
    scheduler.apply(&done, Micros(0), &mut out).unwrap();
    assert_eq!((out[0].id.0, out[0].n_tokens, out[0].scored_position), (1, 1, 65));
    scheduler.check();
}

/// No token is drawn behind it, and none has to have a place.
#[test]
fn what_is_pooled_may_fill_the_context() {
    let limits = Config { n_blocks: vec![8], context_max: 128, ..config() };
    let mut scheduler = scheduler(limits);
    let pool = Request { goal: Goal::Pool, ..request(1, 128, 1) };
    let refused = scheduler.submit(Request { prompt: vec![7; 129], ..pool.clone() }, Micros(0));
    assert_eq!(refused, Err(RequestRejection::TooLong { limit: "context_max", needed: 129, available: 128 }));
    scheduler.submit(pool, Micros(0)).unwrap();
    let mut ended = Vec::new();
    while let Some(step) = plan(&mut scheduler) {
        ended.extend(apply(&mut scheduler, &step, 7).iter().map(|output| output.finish));
        scheduler.check();
    }
    assert_eq!(ended, [Some(Finish::Stop)]);
    scheduler.limit_log_length(128, true);
}

#[test]
fn what_is_pooled_ends_with_its_prompt() {
    let mut scheduler = scheduler(config());
    let pool = Request { goal: Goal::Pool, ..request(1, 100, 50) };
    scheduler.submit(pool.clone(), Micros(0)).unwrap();
    for range in [(1, 0, 64), (1, 64, 100)] {
        let step = plan(&mut scheduler).unwrap();
        assert_eq!((slices(&step), step.slices[0].want), (vec![range], Want::Pool));
        let out = apply(&mut scheduler, &step, 7);
        let is_end = range.2 == 100;
        let finishes: Vec<_> = out.iter().map(|output| (output.n_tokens, output.finish)).collect();
        assert_eq!(finishes, if is_end { vec![(0, Some(Finish::Stop))] } else { vec![] });
    }
    // Its blocks are named and serve others, but not another pooled request.
    scheduler.submit(Request { id: RequestId(2), ..pool.clone() }, Micros(0)).unwrap();
    scheduler.submit(Request { id: RequestId(3), goal: Goal::Generate, ..pool }, Micros(0)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(slices(&step)[0], (2, 0, 64));
    apply(&mut scheduler, &step, 7);
    let starts: Vec<_> = (0..3).filter_map(|_| plan(&mut scheduler).map(|step| slices(&step))).flatten().collect();
    assert!(starts.contains(&(3, 96, 100)), "{starts:?}");
}

/// An encoder keeps nothing of a request's positions, so no slice may be a part of it.
#[test]
fn without_cache_groups_a_request_is_one_whole_slice() {
    for (n_stages, n_tenants) in [(1, 1), (2, 1), (1, 3)] {
        let limits = Config { n_blocks: vec![], groups: vec![], n_stages, chunk_tokens_min: 8, ..config() };
        let mut scheduler = scheduler(limits);
        let pool = |id, n| {
            let tenant = TenantId(id % n_tenants);
            Request { goal: Goal::Pool, tenant, ..request(id, n, 1) }
        };
        let refused = scheduler.submit(pool(1, 65), Micros(0));
        assert_eq!(refused, Err(RequestRejection::TooLong { limit: "batch_tokens_max", needed: 65, available: 64 }));
        assert_eq!(scheduler.submit(request(1, 5, 5), Micros(0)), Err(RequestRejection::Encoder));
        let lengths = [1, 64, 40, 30, 24, 1, 17, 64, 3, 9];
        for (id, n) in (1..).zip(lengths) {
            scheduler.submit(pool(id, n), Micros(0)).unwrap();
        }
        let (mut computed, mut finished, mut n_steps) = (Vec::new(), 0, 0);
        while let Some(step) = plan(&mut scheduler) {
            assert!(step.blocks.is_empty());
            computed.extend(slices(&step));
            if n_steps == 2 {
                // A loss: what was in flight begins again, as a whole.
                scheduler.requeue_all(Epoch { incarnation: 0, n: 1 }, WorkerLoss::Unexplained, &mut Vec::new());
            }
            n_steps += 1;
            if n_steps == 3 {
                continue;
            }
            finished += apply(&mut scheduler, &step, 7).iter().filter(|output| output.finish.is_some()).count();
        }
        assert_eq!(finished, lengths.len(), "{n_stages} stages, {n_tenants} tenants");
        for (id, start, end) in computed {
            assert_eq!((start, end), (0, lengths[id as usize - 1]), "request {id}");
        }
    }
}

#[test]
fn what_starts_fits_into_one_frame() {
    let with_list = |id, n| {
        let request = request(id, 4, 2);
        Request { sampling: Sampling { allowed: (0..n).collect(), ..request.sampling }, ..request }
    };
    let starts_bytes_max = 2 * with_list(1, 1000).frame_bytes_max();
    let mut scheduler = scheduler(Config { starts_bytes_max, ..config() });
    (1..=5).for_each(|id| scheduler.submit(with_list(id, 1000), Micros(0)).unwrap());
    let mut starts = Vec::new();
    while let Some(step) = plan(&mut scheduler) {
        starts.extend(Some(step.starts.len()).filter(|n| *n > 0));
        apply(&mut scheduler, &step, 7);
    }
    assert_eq!(starts, [2, 2, 1]);
    let too_large = scheduler.submit(with_list(6, 3000), Micros(0));
    assert!(matches!(too_large, Err(RequestRejection::TooLarge { available, .. }) if available == starts_bytes_max));
}

/// The answer to a step in which every draw is late.
fn late(step: &Step) -> StepDone {
    let slices = step.slices.iter().map(|_| SliceDone::default()).collect();
    StepDone { slices, ..answer(step, 0) }
}

fn n_names(scheduler: &Scheduler) -> usize {
    let mut names = Vec::new();
    assert!(!scheduler.append_names(0..1000, &mut names));
    names.len()
}

#[test]
fn a_draw_that_does_not_come_is_planned_again_and_what_was_planned_behind_it_is_discarded() {
    let mut scheduler = scheduler(config());
    scheduler.submit(request(1, 32, 3), Micros(0)).unwrap();
    let [first, behind] = [(); 2].map(|()| plan(&mut scheduler).unwrap());
    assert_eq!((slices(&behind), behind.blocks.len()), (vec![(1, 32, 33)], 1));
    let mut out = Vec::new();
    scheduler.apply(&late(&first), Micros(0), &mut out).unwrap();
    scheduler.check();
    assert_eq!((n_names(&scheduler), scheduler.stats().draws_late), (1, 1), "its last block is written again");
    let again = plan(&mut scheduler).unwrap();
    assert_eq!((slices(&again), again.slices[0].want), (vec![(1, 31, 32)], Want::Last));
    assert_eq!(again.starts.len() + again.blocks.len(), 0, "the ranks have all that it needs");
    let behind_again = plan(&mut scheduler);
    assert_eq!(behind_again, None, "as many steps as may be are in flight");

    assert_eq!(apply(&mut scheduler, &behind, 9), [], "the draws of slices without input are void");
    assert_eq!(scheduler.stats().tokens_discarded, 1);
    let behind_again = plan(&mut scheduler).unwrap();
    assert_eq!((slices(&behind_again), behind_again.blocks.len()), (vec![(1, 32, 33)], 0));
    assert_eq!(n_names(&scheduler), 1);
    let outputs = apply(&mut scheduler, &again, 7);
    assert_eq!((outputs[0].position, outputs[0].n_tokens, outputs[0].finish), (0, 1, None));
    assert_eq!(n_names(&scheduler), 2);
    assert_eq!(apply(&mut scheduler, &behind_again, 7)[0].position, 1);
    assert_eq!(run_out(&mut scheduler).last().unwrap().finish, Some(Finish::Length));
    assert_eq!((scheduler.stats().tokens_drawn, scheduler.stats().blocks_used), (3, 0));
}

#[test]
fn draws_may_fail_to_come_again_and_again() {
    let mut scheduler = scheduler(Config { slices_ahead_max: 0, ..config() });
    scheduler.submit(Request { goal: Goal::Score { top_n: 0 }, ..request(1, 10, 2) }, Micros(0)).unwrap();
    let first = plan(&mut scheduler).unwrap();
    let mut scored = late(&first);
    scored.slices[0].scored = vec![TokenOut::default(); 9];
    let mut out = Vec::new();
    scheduler.apply(&scored, Micros(0), &mut out).unwrap();
    assert_eq!(
        (out[0].n_tokens, out[0].scored_position, out[0].finish),
        (0, 1, None),
        "the scored position is reported"
    );
    for _ in 0..5 {
        let again = plan(&mut scheduler).unwrap();
        assert_eq!(
            (slices(&again), again.slices[0].want),
            (vec![(1, 9, 10)], Want::Last),
            "the position is not scored again"
        );
        scheduler.apply(&late(&again), Micros(0), &mut out).unwrap();
        scheduler.check();
    }
    assert_eq!((out.len(), run_out(&mut scheduler).len()), (1, 2));
    assert!(scheduler.is_idle());
}

#[test]
fn a_failure_ends_its_request_with_its_own_reason() {
    let cases = [
        (Failure::Computation, Finish::Failed),
        (Failure::NoToken, Finish::NoToken),
        (Failure::Grammar(GrammarFault::Late), Finish::Grammar(GrammarFault::Late)),
    ];
    for (failure, finish) in cases {
        let mut scheduler = scheduler(config());
        (1..3).for_each(|id| scheduler.submit(request(id, 4, 2), Micros(0)).unwrap());
        let step = plan(&mut scheduler).unwrap();
        let mut done = answer(&step, 7);
        done.slices[0] = SliceDone { failed: Some(failure), ..SliceDone::default() };
        let mut out = Vec::new();
        scheduler.apply(&done, Micros(0), &mut out).unwrap();
        assert_eq!((out[0].finish, out[0].n_tokens, out[1].finish), (Some(finish), 0, None));
    }
}

#[test]
fn ended_request_keeps_blocks_until_stale_steps_land() {
    let mut scheduler = scheduler(config());
    scheduler.submit(request(1, 32, 9), Micros(0)).unwrap();
    let [first, behind] = [(); 2].map(|()| plan(&mut scheduler).unwrap());
    let mut out = Vec::new();
    scheduler.apply(&late(&first), Micros(0), &mut out).unwrap();
    scheduler.cancel(RequestId(1), &mut out);
    scheduler.check();
    assert_eq!((out.len(), scheduler.stats().blocks_used), (1, 3));
    scheduler.apply(&late(&behind), Micros(0), &mut out).unwrap();
    scheduler.check();
    assert_eq!((out.len(), scheduler.stats().blocks_used), (1, 0));
}

#[test]
fn step_result_without_a_token_fails_the_check() {
    let mut scheduler = scheduler(Config { chunk_tokens_max: 8, chunk_tokens_min: 1, ..config() });
    (1..3).for_each(|id| scheduler.submit(request(id, 4 + 8 * (id as u32 - 1), 5), Micros(0)).unwrap());
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(slices(&step), [(1, 0, 4), (2, 0, 8)]);
    let no_token = Err(StaleAnswer::NoToken { slice: 0 });
    assert_eq!(
        (scheduler.check_all_drawn(&answer(&step, 7)), scheduler.check_all_drawn(&late(&step))),
        (Ok(()), no_token)
    );
    let mut failed = late(&step);
    failed.slices[0].failed = Some(Failure::Computation);
    assert_eq!(scheduler.check_all_drawn(&failed), Ok(()));
    let mut with_grammar = self::scheduler(config());
    let grammar = Some(Grammar::new("any"));
    with_grammar.submit(Request { grammar, ..request(1, 4, 5) }, Micros(0)).unwrap();
    let masked = plan(&mut with_grammar).unwrap();
    assert_eq!(with_grammar.check_all_drawn(&late(&masked)), Ok(()), "its draw waits for a mask");
    let of_another = StepDone { id: StepId(9), ..late(&step) };
    assert_eq!(scheduler.check_all_drawn(&of_another), Ok(()), "apply refuses it as an answer");
}
