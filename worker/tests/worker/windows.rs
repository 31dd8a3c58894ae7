//! Models with windows behind `Runner`, planned by the scheduler: a running sequence gives back the blocks behind a
//! window, and others write them. Tokens and logprobs are those of a sequence that keeps everything, bit for bit.

use crate::common::grid::{Threads, layout};
use crate::common::{Alone, CONTEXT, Plan, Player, Ranks, assignment, requests};
use checkpoint::Checkpoint;
use scheduler::{Config, Counters, Scheduler};
use std::collections::BTreeMap;
use types::cache::blocks_for;
use types::{CacheGroup, Epoch, Layout, Micros, Request, RequestId, Sampling, Step, TokenOut};
use worker::{Assignment, ModelLoader};

/// The most prompt tokens that a step computes.
const SLICE_MAX: u32 = 40;

fn loader() -> ModelLoader {
    ModelLoader { spin: false, ..ModelLoader::new(1) }
}

fn groups(assignment: &Assignment) -> Vec<CacheGroup> {
    Checkpoint::open(&assignment.model_path).unwrap().spec().cache_groups().groups().to_vec()
}

/// Returns for each group the blocks of a whole context, and this many more.
fn pools(groups: &[CacheGroup], n_more: u32) -> Vec<u32> {
    groups.iter().map(|group| group.n_held_max(CONTEXT, SLICE_MAX) + n_more).collect()
}

fn config(groups: Vec<CacheGroup>, n_blocks: Vec<u32>, n_stages: u32) -> Config {
    Config {
        groups,
        n_blocks,
        context_max: CONTEXT,
        running_max: 6,
        batch_tokens_max: 100,
        chunk_tokens_max: SLICE_MAX,
        chunk_tokens_min: 16,
        n_stages,
        steps_in_flight_max: n_stages + 1,
        ..Config::default()
    }
}

/// Returns requests in pairs with equal beginnings, whose outputs outgrow the blocks of their admission.
fn in_pairs(n: u64) -> Vec<Request> {
    let mut all = requests(n);
    all.iter_mut().zip(0..).for_each(|(request, i)| request.sampling.tokens_max = 40 + i * 13 % 40);
    for i in (1..all.len()).step_by(2) {
        all[i].prompt = all[i - 1].prompt.clone();
        let last = all[i].prompt.last_mut().unwrap();
        *last += 1;
    }
    all.iter_mut().flat_map(|request| &mut request.prompt).for_each(|token| *token %= 264);
    all
}

/// Plays every request alone on one rank, without ever giving a block back.
fn keeping_everything(assignment: &Assignment, requests: &[Request]) -> Vec<Vec<TokenOut>> {
    let (mut runner, _) = loader().build(assignment).unwrap();
    Player::new(&mut Alone::new(&mut runner), assignment).play(requests, Plan::ALONE).outputs
}

struct Driven {
    outputs: Vec<Vec<TokenOut>>,
    counters: Counters,
    /// For each step, where its last slice ends and how many blocks of all groups are held.
    held: Vec<(u32, u32)>,
}

fn drive(ranks: &mut dyn Ranks, config: Config, requests: &[Request]) -> Driven {
    let mut scheduler = Scheduler::new(config, Epoch::default()).unwrap();
    for (at, request) in requests.iter().enumerate() {
        scheduler.submit(request.clone(), Micros(at as u64)).unwrap();
    }
    let mut outputs: BTreeMap<RequestId, Vec<TokenOut>> = BTreeMap::new();
    let (mut step, mut new_outputs, mut held, mut n_in_flight) = (Step::default(), Vec::new(), Vec::new(), 0);
    while !scheduler.is_idle() {
        while scheduler.next_step(Micros(1000), &mut step) {
            ranks.give(step.clone());
            n_in_flight += 1;
            held.extend(step.slices.last().map(|slice| (slice.range.end, scheduler.stats().blocks_used)));
        }
        assert!(n_in_flight > 0, "a sequence runs");
        let done = ranks.answer();
        n_in_flight -= 1;
        scheduler.apply(&done, Micros(0), &mut new_outputs).unwrap();
        scheduler.check();
        for output in new_outputs.drain(..) {
            let tokens = &done.slices[output.slice].tokens[..output.n_tokens as usize];
            let log = outputs.entry(output.id).or_default();
            assert_eq!(log.len(), output.position as usize);
            log.extend_from_slice(tokens);
        }
    }
    Driven { outputs: outputs.into_values().collect(), counters: scheduler.stats().counters, held }
}

fn on_grid(assignment: &Assignment, layout: &Layout, config: Config, requests: &[Request]) -> Driven {
    let assignment = Assignment { n_blocks: config.n_blocks.clone(), ..assignment.clone() };
    let mut grid = Threads::start(&loader(), &assignment, layout);
    let driven = drive(&mut grid, config, requests);
    grid.end();
    driven
}

#[test]
fn a_sequence_far_beyond_its_window_holds_no_more_than_the_window() {
    let sampling = Sampling { tokens_max: 70, logprobs: Some(2), temperature: 0.8, seed: 5, ..Sampling::default() };
    let prompt = (0..320).map(|i| (i * i * 3 + i) % 264).collect();
    let request = Request { id: RequestId(1), prompt, sampling, ..Request::default() };
    let n_computed = 320 + 70 - 1;
    for (name, windows) in [
        ("mistral", &[Some(20)][..]),
        ("gemma2", &[Some(18), None]),
        ("gemma3", &[Some(18), None]),
        ("gemma4", &[Some(18), None]),
        ("gguf-gemma3/model.gguf", &[Some(18), None]),
    ] {
        let assignment = assignment(name);
        let groups = groups(&assignment);
        assert_eq!(groups.iter().map(|group| group.layout.window()).collect::<Vec<_>>(), windows, "{name}");
        let requests = [request.clone()];
        let expected = keeping_everything(&assignment, &requests);
        let mut n_blocks = pools(&groups, 0);
        n_blocks[0] = groups[0].n_held_max(n_computed, SLICE_MAX);
        let keeps_all = groups.len() > 1;
        let config = config(groups, n_blocks.clone(), 1);
        let (mut runner, _) = loader().build(&Assignment { n_blocks: n_blocks.clone(), ..assignment }).unwrap();
        let driven = drive(&mut Alone::new(&mut runner), config, &requests);
        assert!(driven.outputs == expected, "{name}");
        let of_window = |(end, n_used): &(u32, u32)| n_used - if keeps_all { blocks_for(*end) } else { 0 };
        let (n_held, n_all) = (driven.held.iter().map(of_window).max().unwrap(), blocks_for(n_computed));
        println!("{name}: at most {n_held} blocks of a window are held, {n_all} without it");
        assert!(n_held <= n_blocks[0], "{name}: {n_held} blocks held");
        assert_eq!((n_blocks[0], n_all, driven.counters.preemptions), (5, 25, 0), "{name}");
        let Counters { blocks_passed, .. } = driven.counters;
        assert!(blocks_passed >= u64::from(n_all - n_blocks[0]), "{name}: {blocks_passed} freed");
    }
}

#[test]
fn what_others_wrote_behind_a_window_changes_nothing() {
    for name in ["mistral", "gemma2", "gemma3", "qwen2"] {
        let (assignment, requests) = (assignment(name), in_pairs(16));
        let (groups, expected) = (groups(&assignment), keeping_everything(&assignment, &requests));
        let n_layers = assignment.layout.n_layers();
        let solo = Layout::solo(n_layers);
        let tight = on_grid(&assignment, &solo, config(groups.clone(), pools(&groups, 1), 1), &requests);
        assert!(tight.outputs == expected, "{name}, preempted");

        let Counters { preemptions, evictions, blocks_passed, .. } = tight.counters;
        assert!(preemptions > 0 && evictions > 0 && blocks_passed > 20, "{name}: {:?}", tight.counters);
        let roomy = on_grid(&assignment, &solo, config(groups.clone(), pools(&groups, 90), 1), &requests);
        assert!(roomy.outputs == expected, "{name}, with prefix hits");
        assert!(roomy.counters.prefix_hit_tokens > 0, "{name}: {:?}", roomy.counters);
    }
}

#[test]
fn grids_give_blocks_back_too() {
    let requests = in_pairs(12);
    // The last of six layers is the one that keeps everything.
    let uneven: &[u32] = &[0, 5, 16];
    let layouts = [
        ("gemma3", layout(&[5, 1], &[&[0, 16], &[0, 16]])),
        ("gemma3", layout(&[2, 3, 1], &[uneven, &[0, 8, 16], &[0, 0, 16]])),
        ("gemma2", layout(&[1, 1], &[uneven, uneven])),
        ("mistral", layout(&[1, 1], &[&[0, 16], &[0, 16]])),
        ("mistral", layout(&[2], &[&[0, 5, 5, 16]])),
    ];
    for (name, layout) in layouts {
        let assignment = assignment(name);
        let (groups, expected) = (groups(&assignment), keeping_everything(&assignment, &requests));
        let n_stages = u32::from(layout.grid().pp);
        let mut all = Counters::default();
        for n_more in [1, 90] {
            let config = config(groups.clone(), pools(&groups, n_more), n_stages);
            let driven = on_grid(&assignment, &layout, config, &requests);
            assert!(driven.outputs == expected, "{name} with {n_more} more blocks on {layout:?}");
            all.preemptions += driven.counters.preemptions;
            all.tokens_redrawn += driven.counters.tokens_redrawn;
            all.prefix_hit_tokens += driven.counters.prefix_hit_tokens;
            all.blocks_passed += driven.counters.blocks_passed;
        }
        assert!(all.preemptions > 0 && all.prefix_hit_tokens > 0 && all.blocks_passed > 20, "{name}: {all:?}");
    }
}

/// Tokens drawn for an ended life are on their way to the first stage when the next life begins.
#[test]
fn a_token_of_an_earlier_life_is_dropped_where_it_is_embedded() {
    let requests: Vec<Request> = in_pairs(12).into_iter().filter(|request| request.prompt.len() > 4).collect();
    let assignment = assignment("llama-deep.gguf");
    let (groups, expected) = (groups(&assignment), keeping_everything(&assignment, &requests));
    let mut n_redrawn = 0;
    for stages in [&[2, 3][..], &[1, 2, 2]] {
        let layout = layout(stages, &vec![&[0, 16][..]; stages.len()]);
        for n_more in [1, 8, 14] {
            let config =
                Config { prefix_cache: false, ..config(groups.clone(), pools(&groups, n_more), stages.len() as u32) };
            let driven = on_grid(&assignment, &layout, config, &requests);
            assert!(driven.outputs == expected, "{n_more} more blocks on {stages:?}");
            n_redrawn += driven.counters.tokens_redrawn;
        }
    }
    assert!(n_redrawn > 0, "no sequence was preempted with a token in flight");
}

/// Blocks behind a window are cleared while their sequence runs. The blocks of an ended or preempted sequence are
/// cleared in the step that reports it, because others may own them afterwards.
#[test]
fn what_is_cleared_is_nobodys() {
    let requests = in_pairs(12);
    let layouts = [("gemma3", layout(&[5, 1], &[&[0, 16], &[0, 16]])), ("mistral", layout(&[2], &[&[0, 5, 16]]))];
    for (name, layout) in layouts {
        let assignment = Assignment { zero_kv: true, ..assignment(name) };
        let groups = groups(&assignment);
        let expected = keeping_everything(&Assignment { zero_kv: false, ..assignment.clone() }, &requests);
        let config = config(groups.clone(), pools(&groups, 1), layout.grid().pp.into());
        let driven = on_grid(&assignment, &layout, Config { prefix_cache: false, ..config }, &requests);
        assert!(driven.outputs == expected, "{name} on {layout:?}");
        let Counters { preemptions, blocks_passed, .. } = driven.counters;
        assert!(preemptions > 0 && blocks_passed > 20, "{name}: {:?}", driven.counters);
    }
}
