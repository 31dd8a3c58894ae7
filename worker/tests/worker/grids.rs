//! One model cut over many ranks, as threads of this process: on any grid and with any steps, tokens and logprobs are
//! those of one rank, bit for bit.

use crate::common;
use crate::common::grid::{Threads, layout};
use crate::common::{Alone, Plan, Played, Player, Ranks, assignment, requests};
use std::sync::Arc;
use types::cache::blocks_for;
use types::{
    Activations, BlockId, Epoch, Grid, KvDtype, Layout, PolicyDigest, Rank, Request, RequestId, Sampling, Slice, Step,
    StepDone, StepId, Want,
};
use worker::{Assignment, GuessConfig, MeshSecret, ModelLoader, PeerListener, RunError, Runner, WireChoice};

const DEEP: &str = "llama-deep.gguf";
const N_LAYERS: u32 = 5;

fn loader() -> ModelLoader {
    ModelLoader { spin: false, ..ModelLoader::new(1) }
}

fn alone(assignment: &Assignment, requests: &[Request]) -> Played {
    let (mut runner, _) = loader().build(assignment).unwrap();
    Player::new(&mut Alone::new(&mut runner), assignment).play(requests, Plan::ALONE)
}

fn on_grid(assignment: &Assignment, layout: &Layout, requests: &[Request], plan: Plan) -> Played {
    let mut grid = Threads::start(&loader(), assignment, layout);
    let played = Player::new(&mut grid, assignment).play(requests, plan);
    grid.end();
    played
}

fn even(tp: u16, pp: u16) -> Layout {
    Layout::even(Grid { tp, pp }, N_LAYERS).unwrap()
}

/// As many steps in flight as a coordinator gives: one per stage, and one ahead.
fn plan(layout: &Layout) -> Plan {
    let pp = layout.grid().pp;
    Plan { chunk: 60, together: 9, preempt_every: Some(4), turns: pp.into(), in_flight: usize::from(pp) + 1 }
}

#[test]
fn sixteen_grids_give_the_tokens_of_one_rank() {
    let (assignment, requests) = (assignment(DEEP), requests(12));
    let expected = alone(&assignment, &requests);
    for (tp, pp) in (1..=4).flat_map(|tp| (1..=4).map(move |pp| (tp, pp))) {
        let layout = even(tp, pp);
        let played = on_grid(&assignment, &layout, &requests, plan(&layout));
        assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}");
        assert!(played.n_preempted > 2, "tp {tp}, pp {pp}: {} preempted", played.n_preempted);
    }
}

#[test]
fn uneven_shares_and_stages_give_the_tokens_of_one_rank() {
    let requests = requests(8);
    let layouts = [
        layout(&[5], &[&[0, 3, 16]]),
        layout(&[1, 4], &[&[0, 11, 16], &[0, 5, 16]]),
        // A rank that owns no leaf at all, in the middle and at the end.
        layout(&[3, 2], &[&[0, 9, 9, 16], &[0, 4, 16, 16]]),
        layout(&[2, 1, 2], &[&[0, 0, 16], &[0, 16, 16], &[0, 8, 16]]),
    ];
    let of_ints = [(Activations::Int8, KvDtype::F16), (Activations::Int8, KvDtype::Int8)];
    for (activations, kv_dtype) in of_ints.into_iter().chain([(Activations::F32, KvDtype::F32)]) {
        let assignment = Assignment { activations, kv_dtype, ..assignment(DEEP) };
        let expected = alone(&assignment, &requests);
        for layout in &layouts {
            let played = on_grid(&assignment, layout, &requests, plan(layout));
            assert!(played.outputs == expected.outputs, "{activations}, {layout:?}");
        }
    }
}

#[test]
fn a_tied_embedding_is_the_head_of_the_last_stage_too() {
    for name in ["llama-f32-tied", "llama-bf16-odd"] {
        let (assignment, requests) = (assignment(name), requests(6));
        let expected = alone(&assignment, &requests);
        for (tp, pp) in [(2, 1), (1, 2), (3, 2)] {
            let layout = Layout::even(Grid { tp, pp }, 2).unwrap();
            let played = on_grid(&assignment, &layout, &requests, plan(&layout));
            assert!(played.outputs == expected.outputs, "{name} on tp {tp}, pp {pp}");
        }
    }
}

/// Experts, windows, caps, sinks, gates, recurrences, norms of heads and of all heads, biases, positions, factors,
/// shared experts, all kinds of norms, and weights of few bits in groups that leaves cut. Each is cut evenly, unevenly,
/// over stages, and over ranks of which one owns nothing.
#[test]
fn every_family_gives_the_tokens_of_one_rank() {
    const FAMILIES: [(&str, u32); 48] = [
        ("mixtral", 2),
        ("qwen3-moe", 3),
        ("qwen2", 2),
        ("qwen3-yarn", 2),
        ("smollm3", 4),
        ("mistral", 2),
        ("phi3-long", 2),
        ("gemma2", 2),
        ("gemma3", 6),
        ("gemma4-global", 3),
        ("gemma4-moe", 3),
        ("gpt2", 2),
        ("llama-linear", 2),
        ("olmo2", 2),
        ("olmo3", 4),
        ("granite-moe", 2),
        ("glm4", 2),
        ("glm4-moe", 3),
        ("ministral3", 2),
        ("cohere2", 4),
        ("gpt-neox", 2),
        ("gpt-oss", 2),
        ("gpt-oss-bf16", 2),
        ("qwen3-vl-moe", 2),
        ("qwen3-next", 4),
        ("qwen3.5", 4),
        ("qwen3.5-moe", 2),
        ("granite4", 3),
        ("awq", 2),
        ("gptq-4", 2),
        ("gptq-3", 2),
        ("gptq-act-order", 2),
        ("packed-4-zeros", 2),
        ("packed-8", 2),
        ("w8a8", 2),
        ("nvfp4", 2),
        ("lfm2", 3),
        ("lfm2-moe", 3),
        ("qwen3.5-moe-fused", 2),
        ("bamba", 3),
        ("nemotron-h", 5),
        ("nemotron-h-moe", 4),
        ("olmo-hybrid", 3),
        ("falcon-h1", 2),
        ("gguf-qwen3.5", 4),
        ("gguf-granite4-dense", 3),
        ("gguf-nemotron-h", 5),
        ("gguf-lfm2-moe", 3),
    ];
    for (name, n_layers) in FAMILIES {
        let (assignment, mut requests) = (assignment(name), requests(5));
        requests.iter_mut().flat_map(|request| &mut request.prompt).for_each(|token| *token %= 264);
        let expected = alone(&assignment, &requests);
        let uneven: [&[u32]; 2] = [&[0, 5, 5, 16], &[0, 11, 14, 16]];
        let layouts = [
            Layout::even(Grid { tp: 2, pp: 1 }, n_layers).unwrap(),
            Layout::even(Grid { tp: 1, pp: 2 }, n_layers).unwrap(),
            layout(&[1, n_layers - 1], &uneven),
        ];
        for layout in layouts {
            let played = on_grid(&assignment, &layout, &requests, plan(&layout));
            assert!(played.outputs == expected.outputs, "{name} on {layout:?}");
        }
    }
}

/// Blocks begin anywhere in a step, and drafts are rewound over a block's boundary.
#[test]
fn recurrent_layers_give_the_tokens_of_one_rank_in_chunks_of_any_length() {
    const HYBRIDS: [(&str, u32); 6] = [
        ("qwen3-next", 4),
        ("granite4", 3),
        ("nemotron-h", 5),
        ("gguf-qwen3.5", 4),
        ("olmo-hybrid", 3),
        ("falcon-h1", 2),
    ];
    for (name, n_layers) in HYBRIDS {
        let (assignment, mut requests) = (assignment(name), requests(6));
        requests.iter_mut().flat_map(|request| &mut request.prompt).for_each(|token| *token %= 264);
        let expected = alone(&assignment, &requests);
        let recalled = Some(Arc::new(common::recalled(&requests, &expected)));
        let loader = ModelLoader { recalled, ..loader() };
        let guesses = GuessConfig { n_max: 9, ..GuessConfig::default() };
        let with_guesses = Assignment { guesses, ..assignment.clone() };
        for (tp, pp, chunk, drafts_max) in
            [(1, 1, 1, 0), (1, 1, 7, 4), (2, 1, 64, 0), (3, 1, 7, 8), (2, 2, 1, 0), (3, 2, 64, 4)]
        {
            let layout = Layout::even(Grid { tp, pp }, n_layers).unwrap();
            let mut grid = Threads::start(&loader, &with_guesses, &layout);
            let plan = Plan { chunk, ..plan(&layout) };
            let played = Player::new(&mut grid, &with_guesses).with_drafts(drafts_max).play(&requests, plan);
            grid.end();
            assert!(
                played.outputs == expected.outputs,
                "{name}: tp {tp}, pp {pp}, chunks of {chunk}, {drafts_max} drafts"
            );
        }
    }
}

#[test]
fn steps_of_any_shape_give_the_tokens_of_one_rank() {
    let (assignment, requests) = (assignment(DEEP), requests(10));
    let expected = alone(&assignment, &requests);
    let layout = even(2, 2);
    for (chunk, together, turns, in_flight) in [(1, 10, 2, 3), (7, 10, 1, 1), (7, 3, 1, 2), (512, 10, 3, 6)] {
        let plan = Plan { chunk, together, turns, in_flight, preempt_every: None };
        let played = on_grid(&assignment, &layout, &requests, plan);
        assert!(played.outputs == expected.outputs, "chunks of {chunk}, {together} together, {in_flight} in flight");
    }
}

#[test]
fn drafts_give_the_tokens_of_none_on_every_grid() {
    let (assignment, requests) = (assignment(DEEP), requests(12));
    let expected = alone(&assignment, &requests);
    let recalled = Some(Arc::new(common::recalled(&requests, &expected)));
    let loader = ModelLoader { recalled, ..loader() };
    let assignment = Assignment { guesses: GuessConfig { n_max: 9, ..GuessConfig::default() }, ..assignment };
    for (tp, pp, drafts_max) in [(1, 1, 8), (2, 1, 1), (1, 2, 4), (2, 2, 8), (3, 3, 4)] {
        let layout = even(tp, pp);
        let mut grid = Threads::start(&loader, &assignment, &layout);
        let played = Player::new(&mut grid, &assignment).with_drafts(drafts_max).play(&requests, plan(&layout));
        grid.end();
        assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}, {drafts_max} drafts");
        let (n_accepted, n_rejected) = (played.n_accepted, played.n_rejected);
        assert!(n_accepted > 10 && n_rejected > 2 && played.n_preempted > 2, "{n_accepted} and {n_rejected}");
    }
}

#[test]
fn a_shared_prefix_gives_the_same_tokens_on_a_grid() {
    let assignment = assignment(DEEP);
    let prompt: Vec<_> = (0..70).map(|i| (i * 13) % common::VOCAB).collect();
    let sampling = Sampling { temperature: 1.0, logprobs: Some(2), ..Sampling::default() };
    let step = |id: u64, start: u32, last: u32| Step {
        id: StepId(id),
        starts: vec![Request {
            id: RequestId(id),
            prompt: prompt.clone(),
            sampling: sampling.clone(),
            ..Request::default()
        }],
        slices: vec![Slice::new(RequestId(id), start..70, Want::Last)],
        blocks: [9, 2, 5, 7, last].map(BlockId).into(),
        ..Step::default()
    };
    for layout in [even(2, 1), even(2, 3)] {
        let mut grid = Threads::start(&loader(), &assignment, &layout);
        grid.give(step(0, 0, 0));
        grid.give(step(1, 64, 3));
        let (cold, warm): (StepDone, StepDone) = (grid.answer(), grid.answer());
        assert_eq!(warm.slices[0].tokens.len(), 1);
        assert_eq!(warm.slices, cold.slices);
        grid.end();
    }
}

#[test]
fn each_rank_holds_its_own_part_of_the_weights() {
    let assignment = assignment(DEEP);
    let whole = Threads::start(&loader(), &assignment, &Layout::solo(N_LAYERS)).weight_bytes[0];
    for (tp, pp) in [(2, 1), (1, 3), (2, 2)] {
        let held = Threads::start(&loader(), &assignment, &even(tp, pp)).weight_bytes;
        // KV heads that a cut halves are held twice, and tiles of sixteen rows are padded.
        assert!(held.iter().sum::<u64>() < whole * 5 / 4, "tp {tp}, pp {pp}: {held:?} of {whole}");
        assert!(held.iter().all(|bytes| *bytes < whole * 3 / 4), "tp {tp}, pp {pp}: {held:?} of {whole}");
    }
}

#[test]
fn ranks_that_meet_through_listeners_give_the_tokens_of_one_rank() {
    let (alone_assignment, requests) = (assignment(DEEP), requests(6));
    let expected = alone(&alone_assignment, &requests);
    for (wire, tp, pp) in [(WireChoice::Any, 2, 2), (WireChoice::Socket, 2, 2), (WireChoice::Socket, 1, 3)] {
        let layout = even(tp, pp);
        let open = |_| Arc::new(PeerListener::bind("127.0.0.1:0").unwrap());
        let listeners: Vec<_> = (0..layout.grid().n_ranks()).map(open).collect();
        let assignment = Assignment {
            mesh_addresses: listeners.iter().map(|listener| listener.address().to_string()).collect(),
            mesh_secret: MeshSecret([7; 32]),
            ..alone_assignment.clone()
        };
        let loaders =
            listeners.iter().map(|listener| ModelLoader { listener: Some(listener.clone()), wire, ..loader() });
        let mut grid = Threads::meet(loaders, &assignment, &layout);
        let played = Player::new(&mut grid, &assignment).play(&requests, plan(&layout));
        grid.end();
        assert!(played.outputs == expected.outputs, "{wire:?}, tp {tp}, pp {pp}");
    }
}

/// A peer leaves in the middle of a pass. The remaining rank keeps its weights, and the next pass uses nothing of the
/// lost pass.
#[test]
fn a_pass_that_is_broken_off_leaves_no_trace_in_what_is_kept() {
    let (alone_assignment, requests) = (assignment(DEEP), requests(6));
    let expected = alone(&alone_assignment, &requests);
    let layout = even(2, 2);
    let open = |_| Arc::new(PeerListener::bind("127.0.0.1:0").unwrap());
    let listeners: Vec<_> = (0..layout.grid().n_ranks()).map(open).collect();
    let assignment = Assignment {
        mesh_addresses: listeners.iter().map(|listener| listener.address().to_string()).collect(),
        mesh_secret: MeshSecret([7; 32]),
        layout: layout.clone(),
        ..alone_assignment
    };
    let loaders: Vec<_> =
        listeners.iter().map(|door| ModelLoader { listener: Some(door.clone()), ..loader() }).collect();
    let step = first_step(&requests[4]);
    let policy = std::thread::scope(|scope| {
        let rank = |(rank, loader)| {
            let (assignment, step) = (Assignment { rank, ..assignment.clone() }, &step);
            scope.spawn(move || leave_in_a_pass(loader, &assignment, step))
        };
        let ranks: Vec<_> = (0..).map(Rank).zip(&loaders).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).next_back().unwrap()
    });
    // The file is gone.
    let epoch = Epoch { incarnation: 0, n: 1 };
    let kept = Assignment { epoch, policy: Some(policy), model_path: "/nowhere".into(), ..assignment };
    let mut grid = Threads::meet(loaders.into_iter(), &kept, &layout);
    let played = Player::new(&mut grid, &kept).play(&requests, plan(&layout));
    grid.end();
    assert!(played.outputs == expected.outputs);
}

fn first_step(request: &Request) -> Step {
    let range = 0..request.prompt.len() as u32;
    let blocks = (0..blocks_for(range.end)).map(BlockId).collect();
    let slices = vec![Slice::new(request.id, range, Want::Last)];
    Step { starts: vec![request.clone()], slices, blocks, ..Step::default() }
}

/// The last rank takes no part, and the one beside it waits for it until it is gone.
fn leave_in_a_pass(loader: &ModelLoader, assignment: &Assignment, step: &Step) -> PolicyDigest {
    let (mut runner, ready) = loader.build(assignment).unwrap();
    let ran = (assignment.rank != Rank(3)).then(|| runner.run(step, &mut StepDone::default()));
    let is_broken_off = matches!(ran, Some(Err(RunError::Collective(_))));
    assert!(is_broken_off || assignment.rank != Rank(2), "{ran:?}");
    assert!(is_broken_off || ran.is_none_or(|ran| ran.is_ok()));
    ready.policy
}
