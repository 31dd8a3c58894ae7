//! Known figures, and thousands of random models and machines.

use super::shape::PartMeasurer;
use super::*;
use crate::WorkerId;
use checkpoint::{LayerSizes, ModelSizes, StateHeads};
use std::ops::Range;
use types::cache::blocks_for;
use types::{Activations, DeviceClass, Grid, GridPlace, KvDtype, KvLayout, LayerGroups, RankPart, Shares};

/// The KV heads of `smol`.
const HEADS: KvLayout = KvLayout::heads(3, 64);

/// Nine query heads, three of K and V, thirty layers, and a head that weighs nine of them.
fn smol() -> ModelShape {
    let layer = LayerSizes { heads: 460_800, kv_heads: 153_600, mlp: 1_843_200, experts: 0, replicated: 4608 };
    ModelShape {
        n_layers: 30,
        hidden: 576,
        n_heads: 9,
        n_kv_heads: 3,
        head_dim: 64,
        inner: 1536,
        vocab: 49152,
        context: 8192,
        experts: None,
        states: None,
        cache: LayerGroups::alike(30, HEADS),
        joined: 0..0,
        sizes: ModelSizes {
            embedding: 9 * layer.total(),
            layers: vec![layer; 30],
            norm: 2304,
            ..ModelSizes::default()
        },
        draft: 0,
    }
}

fn policy(tp: u16, pp: u16) -> PlacementPolicy {
    PlacementPolicy {
        grid: Grid { tp, pp },
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        kv_memory: None,
        memory_permille: None,
        state_cache: None,
        context: None,
        running_max: 64,
        slice_max: 512,
    }
}

#[test]
fn gpus_of_other_architectures_are_not_alike() {
    let on = |id, device: &str| Machine { device: device.parse().unwrap(), ..machine(id, 64 << 30) };
    let policy = PlacementPolicy { activations: Activations::Bf16, kv_dtype: KvDtype::Bf16, ..policy(2, 1) };
    let planned = |devices: [&str; 2]| plan(&[on(1, devices[0]), on(2, devices[1])], &smol(), &policy, None);
    assert_eq!(planned(["cuda/sm_90", "cuda/sm_90"]).map(|blueprint| blueprint.shards.len()), Ok(2));
    let why = planned(["cuda/sm_80", "cuda/sm_90"]).unwrap_err().to_string();
    for part in ["tp 2 x pp 1 needs 2 workers of one kind", "differ: 1 x cuda/sm_80, 1 x cuda/sm_90"] {
        assert!(why.contains(part), "{why}");
    }
}

fn machine(id: u64, memory_bytes: u64) -> Machine {
    let (worker, host) = (WorkerId(id), format!("host-{id}"));
    Machine { worker, host, device: DeviceClass::Cpu.into(), memory_bytes, threads: 1, cores: 0 }
}

fn machines(n: u64, memory_bytes: u64) -> Vec<Machine> {
    (0..n).map(|id| machine(id, memory_bytes)).collect()
}

#[track_caller]
fn check(memory_bytes: u64, policy: PlacementPolicy, expect: Result<(u32, u32), &str>) {
    let got = plan(&[machine(1, memory_bytes)], &smol(), &policy, None);
    match expect {
        Ok(figures) => assert_eq!(got.map(|plan| (plan.context, plan.pools[0].n_blocks)).unwrap(), figures),
        Err(part) => assert!(got.as_ref().is_err_and(|e| e.to_string().contains(part)), "{got:?}"),
    }
}

#[test]
fn figures_follow_from_memory() {
    let policy = || policy(1, 1);
    // A block: 16 tokens x 30 layers x 2 x 3 heads x 64 x 2 bytes = 368640 bytes.
    check(64 << 30, policy(), Ok((8192, 8 * 512)));
    check(4 << 30, policy(), Ok((8192, (1 << 30) / 368_640)));
    check(64 << 30, PlacementPolicy { kv_memory: Some(368_640 * 600), ..policy() }, Ok((8192, 600)));
    check(
        64 << 30,
        PlacementPolicy { kv_dtype: KvDtype::F32, kv_memory: Some(368_640 * 1200), ..policy() },
        Ok((8192, 600)),
    );
    // A part of a memory is as good as a smaller memory.
    let within = |permille| PlacementPolicy { memory_permille: Some(permille), ..policy() };
    let half = plan(&[machine(1, 4 << 30)], &smol(), &within(500), None).unwrap();
    let whole = plan(&[machine(1, 2 << 30)], &smol(), &within(1000), None).unwrap();
    assert_eq!((half.pools, half.shards[0].kv_bytes), (whole.pools, whole.shards[0].kv_bytes));
    assert!(half.shards[0].weight_bytes + half.shards[0].kv_bytes > (2 << 30) - 368_640, "all of it is used");
    // The pools need no more than all running sequences could fill.
    let few = PlacementPolicy { running_max: 2, context: Some(32), kv_memory: Some(1 << 30), ..policy() };
    check(64 << 30, few, Ok((32, 4)));
    // No context was configured.
    check(64 << 30, PlacementPolicy { kv_memory: Some(368_640 * 10), ..policy() }, Ok((160, 10)));
}

/// Five layers of six have a window of 512 positions: 23 of 28.
#[test]
fn a_draft_model_is_counted_on_the_rank_that_samples_alone() {
    let draft = ModelShape { n_layers: 6, cache: LayerGroups::alike(6, HEADS), ..smol() };
    let sizes = ModelSizes { layers: smol().sizes.layers[..6].to_vec(), ..smol().sizes };
    let draft = ModelShape { sizes, ..draft };
    let needs = |memory| DraftModelCost::of(&draft, &smol(), &policy(1, 1), DeviceClass::Cpu, memory);
    let some = needs(Some(1 << 20)).unwrap();
    assert_eq!((some.kv_bytes, some.weight_bytes), (1 << 20, draft.sizes.total()));
    // Six of thirty layers, and a head that weighs nine of them.
    assert_eq!(some.pass_permille, 1000 * 15 / 39);
    let block_bytes = 6 * HEADS.page_bytes(KvDtype::F16);
    assert_eq!(needs(None).unwrap().kv_bytes, (8 * 512 * block_bytes).min(256 << 20));
    assert!(needs(Some(block_bytes - 1)).unwrap_err().to_string().contains("smaller than one block"));
    let with = ModelShape { draft: some.bytes(), ..smol() };
    for (tp, pp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let weights = |shape: &ModelShape| {
            let layout = types::Layout::even(Grid { tp, pp }, shape.n_layers).unwrap();
            let measure = PartMeasurer::new(shape, DeviceClass::Cpu, KvDtype::F16);
            let of = |rank| measure.part(&layout.part(types::Rank(rank))).weights;
            (0..tp * pp).map(of).collect::<Vec<u64>>()
        };
        let more: Vec<u64> =
            weights(&with).iter().zip(weights(&smol())).map(|(with, without)| with - without).collect();
        let sampler = usize::from(tp * (pp - 1));
        assert!((0..more.len()).all(|rank| more[rank] == if rank == sampler { some.bytes() } else { 0 }), "{more:?}");
    }
}

/// Three pages of states for each of eight sequences, beside what attention reads.
#[test]
fn a_draft_model_s_states_are_counted_beside_its_keys_and_values() {
    let needs = |memory| DraftModelCost::of(&hybrid(), &smol(), &policy(1, 1), DeviceClass::Cpu, memory);
    let (block_bytes, state_bytes) = (7 * HEADS.page_bytes(KvDtype::F16), 3 * 21 * 4 * 8 * (4096 + 16 * 256));
    assert_eq!(needs(None).unwrap().kv_bytes, (256 << 20) + 8 * state_bytes);
    assert_eq!(needs(Some(block_bytes + state_bytes)).unwrap().kv_bytes, block_bytes + state_bytes);
    assert!(needs(Some(block_bytes + state_bytes - 1)).unwrap_err().to_string().contains("a sequence's states"));
}

fn local() -> ModelShape {
    let kind = |layer: u32| if layer % 6 == 5 { HEADS } else { HEADS.with_window(512) };
    let sizes = ModelSizes { layers: smol().sizes.layers[..28].to_vec(), ..smol().sizes };
    ModelShape { n_layers: 28, context: 32_768, cache: LayerGroups::of((0..28).map(kind)), sizes, ..smol() }
}

#[test]
fn a_window_takes_less_memory_and_leaves_more_for_the_rest() {
    let on = |shape: &ModelShape, policy: &PlacementPolicy| plan(&[machine(1, 64 << 30)], shape, policy, None).unwrap();
    let full = ModelShape { cache: LayerGroups::alike(28, HEADS), ..local() };
    // A block of a layer: 16 tokens x 2 x 3 heads x 64 x 2 bytes = 12288 bytes.
    let (with, without) = (on(&local(), &policy(1, 1)), on(&full, &policy(1, 1)));
    assert_eq!((with.n_blocks(), without.n_blocks()), (vec![64 * 33 + 32, 8 * 2048], vec![8 * 2048]));
    let kv_bytes = 12_288 * (24 * (64 * 33 + 32) + 4 * 8 * 2048);
    assert_eq!((with.shards[0].kv_bytes, without.shards[0].kv_bytes), (kv_bytes, 12_288 * 28 * 8 * 2048));
    assert_eq!(with.shards[0].kv_tokens, [16 * (64 * 33 + 32), 16 * 8 * 2048]);
    assert!(with.to_string().contains("2144 blocks of 16 for a window of 512 · 16384 blocks of 16"), "{with}");
    // With equal memory, what is left goes to the layers without a window.
    let tight = PlacementPolicy { kv_memory: Some(1 << 30), ..policy(1, 1) };
    let (with, without) = (on(&local(), &tight), on(&full, &tight));
    assert_eq!((without.context, without.n_blocks()), (32_768, vec![3120]));
    assert_eq!(with.n_blocks(), [1606, 12_209]);
    assert!(with.shards[0].kv_bytes <= 1 << 30);
    // And where not even one context fits, a longer one does.
    let scarce = PlacementPolicy { kv_memory: Some(64 << 20), ..policy(1, 1) };
    let (with, without) = (on(&local(), &scarce), on(&full, &scarce));
    assert_eq!((with.context, without.context), (15_600, 3120));
    let with_context = PlacementPolicy { context: Some(32_768), ..scarce };
    let error = plan(&[machine(1, 64 << 30)], &local(), &with_context, None).unwrap_err().to_string();
    assert!(
        error.contains("needs 114 MiB of KV on rank 0 (at most 336 KiB per 16 tokens), but 64.0 MiB is available"),
        "{error}"
    );
}

/// Three layers of four are recurrent, with eight heads: a page of one weighs 21 of the others.
fn hybrid() -> ModelShape {
    let state = KvLayout::State { n: 8, state: 4096, row: 256 };
    let sizes = ModelSizes { layers: smol().sizes.layers[..28].to_vec(), ..smol().sizes };
    let kind = |layer: u32| if layer % 4 == 3 { HEADS } else { state };
    let (cache, states) = (LayerGroups::of((0..28).map(kind)), Some(StateHeads { n: 8, dim: 64 }));
    ModelShape { n_layers: 28, context: 32_768, cache, states, sizes, ..smol() }
}

#[test]
fn states_have_a_budget_beside_keys_and_values() {
    let on = |policy: &PlacementPolicy| plan(&machines(4, 64 << 30), &hybrid(), policy, None).unwrap();
    let (state_page, page) = (4 * 8 * (4096 + 16 * 256), 12_288);
    let whole = on(&policy(1, 1));
    // The states that 64 sequences go on from, and as many bytes as keys and values have: 7 x 12,288 for each 21 x
    // 262,144.
    let (full, states) = (8 * 2048, 64 * 2 + 2 + 8 * 2048 / 64);
    assert_eq!(whole.n_blocks(), [states, full]);
    let bytes = 21 * state_page * u64::from(states) + 7 * page * u64::from(full);
    assert_eq!(whole.shards[0].kv_bytes, bytes);
    assert!(whole.to_string().contains(&format!("{states} states of recurrent layers")), "{whole}");
    // Four ranks divide the heads.
    let cut = on(&policy(4, 1));
    assert_eq!(cut.n_blocks(), whole.n_blocks());
    let of_states = |shard: &Shard| shard.kv_bytes - 7 * u64::from(full) * 4096 * shard.kv_heads.len() as u64;
    assert_eq!(cut.shards.iter().map(of_states).sum::<u64>(), 21 * state_page * u64::from(states), "{cut}");
    // A budget is each rank's.
    let of_budget = |bytes, tp| on(&PlacementPolicy { state_cache: Some(bytes), ..policy(tp, 1) }).n_blocks()[0];
    assert_eq!([of_budget(0, 1), of_budget(21 * state_page * 10, 1)], [64 * 2 + 2, 64 * 2 + 2 + 10]);
    assert_eq!(of_budget(21 * state_page * 10, 4), 64 * 2 + 2 + 40);
    // With too little memory both become fewer, and a sequence still has what it needs.
    let tight = on(&PlacementPolicy { kv_memory: Some(1 << 30), ..policy(1, 1) });
    assert!(tight.shards[0].kv_bytes <= 1 << 30 && tight.n_blocks()[0] < states, "{tight}");
}

/// Two of these heads are a leaf, which no cut goes through: also where it would go through an odd number of them.
#[test]
fn states_are_cut_where_their_leaves_end() {
    let shape = ModelShape { states: Some(StateHeads { n: 8, dim: 16 }), ..hybrid() };
    let measure = PartMeasurer::new(&shape, DeviceClass::Cpu, KvDtype::F16);
    let of_head = 21 * 4 * (4096 + 16 * 256);
    for (eighths, n_heads) in [(1, [2, 6]), (3, [4, 4]), (4, [4, 4]), (5, [6, 2]), (7, [8, 0])] {
        let shares = Shares::new([0, eighths, 8].map(|i| Shares::WHOLE / 8 * i).to_vec()).unwrap();
        let of_rank = |tp| {
            let place = GridPlace { stage: 0, tp };
            measure.part(&RankPart { place, layers: 0..28, shares: shares.clone(), n_stages: 1 }).block_bytes[0]
        };
        assert_eq!([of_rank(0), of_rank(1)], n_heads.map(|n| n * of_head), "{eighths} of eight");
    }
}

#[test]
fn a_stage_keeps_nothing_of_a_group_that_it_has_no_layer_of() {
    let kinds = [HEADS.with_window(64), HEADS.with_window(64), HEADS, HEADS];
    let sizes = ModelSizes { embedding: 0, layers: smol().sizes.layers[..4].to_vec(), ..smol().sizes };
    let shape = ModelShape { n_layers: 4, cache: LayerGroups::of(kinds), sizes, ..smol() };
    let plan = plan(&machines(2, 64 << 30), &shape, &policy(1, 2), None).unwrap();
    assert_eq!(layers(&plan), [0..2, 2..4]);
    let [local, full] = plan.n_blocks()[..] else { panic!("two pools") };
    let kept: Vec<_> = plan.shards.iter().map(|shard| (shard.kv_tokens.clone(), shard.kv_bytes)).collect();
    let (local, full) = (u64::from(local), u64::from(full));
    assert_eq!(kept, [(vec![local * 16, 0], local * 2 * 12_288), (vec![0, full * 16], full * 2 * 12_288)]);
    assert_eq!(plan.shards[0].kv_tokens_max(), local * 16);
}

#[test]
fn refusals_show_the_arithmetic() {
    let policy = || policy(1, 1);
    check(50 << 20, policy(), Err("has 50.0 MiB, but the weights of rank 0 need 91.5 MiB"));
    let much = PlacementPolicy { kv_memory: Some(1 << 30), ..policy() };
    let beside = "--kv-memory 1.0 GiB does not fit: host-1 has 108 MiB left beside 91.5 MiB of weights of rank 0";
    check(200 << 20, much, Err(beside));
    let long = PlacementPolicy { context: Some(8192), kv_memory: Some(368_640 * 10), ..policy() };
    check(
        64 << 30,
        long,
        Err("needs 180 MiB of KV on rank 0 (at most 360 KiB per 16 tokens), but 3.5 MiB is available"),
    );
    check(64 << 30, PlacementPolicy { context: Some(9000), ..policy() }, Err("exceeds the model's 8192"));
    // A type that no device computes with does not get this far: no policy has it.
    assert!("int3".parse::<KvDtype>().is_err_and(|unknown| unknown.to_string().contains("int3")));
}

#[track_caller]
fn refused(machines: &[Machine], policy: &PlacementPolicy, why: &str, nearest: Option<(u16, u16)>) {
    let error = plan(machines, &smol(), policy, None).unwrap_err();
    assert!(error.to_string().contains(why), "{error}");
    assert_eq!(error.nearest.map(|grid| (grid.tp, grid.pp)), nearest, "{error}");
}

#[test]
fn a_refusal_names_the_nearest_grid_that_fits() {
    refused(&[], &policy(1, 1), "needs 1 workers, but 0 are available; no other grid", None);
    refused(
        &machines(3, 8 << 30),
        &policy(2, 2),
        "needs 4 workers, but 3 are available; the nearest grid",
        Some((1, 3)),
    );
    refused(&machines(16, 8 << 30), &policy(12, 1), "its attention has 9 runs of heads", Some((9, 1)));
    refused(&machines(40, 8 << 30), &policy(1, 40), "exceeds the model's 30 layers", Some((1, 16)));
    // 97 MB of weights, of which a machine holds 70.
    refused(&machines(3, 70 << 20), &policy(1, 1), "the weights of rank 0 need", Some((1, 2)));
    refused(&machines(1, 50 << 20), &policy(1, 1), "no other grid fits", None);
    refused(
        &machines(9, 8 << 30),
        &PlacementPolicy { grid: Grid { tp: 0, pp: 1 }, ..policy(1, 1) },
        "is not a grid",
        Some((1, 1)),
    );
}

fn layers(plan: &Blueprint) -> Vec<Range<u32>> {
    plan.layout.stages().iter().map(|stage| stage.layers.clone()).collect()
}

#[test]
fn uneven_is_ordinary() {
    let plan = plan(&machines(4, 64 << 30), &smol(), &policy(2, 2), None).unwrap();
    // The head weighs nine layers: 39 in all, and the embedding is not read.
    assert_eq!(layers(&plan), [0..19, 19..30]);
    let heads: Vec<_> = plan.shards.iter().map(|shard| (shard.heads.clone(), shard.kv_heads.clone())).collect();
    // Nine heads in two: five and four. The second KV head is read on both sides, and held on both.
    assert_eq!(heads, [(0..5, 0..2), (5..9, 1..3), (0..5, 0..2), (5..9, 1..3)]);
    assert_eq!(plan.layout.stages()[0].shares, Shares::even(2));
    let sum: u64 = plan.shards.iter().map(|shard| shard.kv_bytes).sum();
    assert_eq!(sum, u64::from(plan.pools[0].n_blocks) * 368_640 * 4 / 3);
    assert!(plan.shards.iter().map(|shard| shard.weight_bytes).sum::<u64>() > smol().sizes.total());
}

#[test]
fn thirty_layers_over_four_stages() {
    let without_head = ModelShape { sizes: ModelSizes { embedding: 0, ..smol().sizes }, ..smol() };
    let plan = plan(&machines(4, 64 << 30), &without_head, &policy(1, 4), None).unwrap();
    let mut n: Vec<usize> = layers(&plan).iter().map(Range::len).collect();
    n.sort_unstable();
    assert_eq!(n, [7, 7, 8, 8]);
}

#[test]
fn a_faster_machine_gets_more_and_a_smaller_one_less() {
    let mut all = machines(2, 64 << 30);
    all[0].threads = 3;
    let fast = plan(&all, &smol(), &policy(2, 1), None).unwrap();
    assert_eq!(fast.shards[0].heads, 0..7, "three quarters of nine, rounded");
    let fast = plan(&all, &smol(), &policy(1, 2), None).unwrap();
    assert_eq!(layers(&fast), [0..29, 29..30]);

    let all = [machine(0, 48 << 20), machine(1, 64 << 30)];
    let tight = PlacementPolicy { kv_memory: Some(16 << 20), ..policy(2, 1) };
    let small = plan(&all, &smol(), &tight, None).unwrap();
    let held = small.shards.iter().find(|shard| shard.host == "host-0").unwrap();
    assert!(held.heads.len() == 3 && held.weight_bytes + (16 << 20) <= 48 << 20, "{small}");
}

#[test]
fn layers_move_until_the_pool_is_balanced() {
    // Cutting by speed alone would give 20; then the first stage's KV would limit the pool.
    let tight = PlacementPolicy { kv_memory: Some(12_288 * 15 * 400), ..policy(1, 2) };
    let plan = plan(&machines(2, 1 << 30), &smol(), &tight, None).unwrap();
    assert!(layers(&plan)[0].end <= 17, "{plan}");
    assert!(plan.pools[0].n_blocks >= 360, "{plan}");
}

#[test]
fn experts_are_spread_over_the_ranks() {
    let layer = LayerSizes { experts: 8 << 20, mlp: 0, ..smol().sizes.layers[0] };
    let sizes = ModelSizes { layers: vec![layer; 4], ..smol().sizes };
    let moe = ModelShape {
        n_layers: 4,
        cache: LayerGroups::alike(4, HEADS),
        experts: Some(ExpertShape { n: 8, n_used: 2, inner: 64 }),
        sizes,
        ..smol()
    };
    let plan = plan(&machines(2, 64 << 30), &moe, &policy(2, 1), None).unwrap();
    let [a, b] = &plan.shards[..] else { panic!("two ranks") };
    assert!(a.weight_bytes.abs_diff(b.weight_bytes) < 1 << 20 && a.weight_bytes > 16 << 20, "{plan}");
    let measure = PartMeasurer::new(&moe, DeviceClass::Cpu, KvDtype::F16);
    let whole = measure.stage(0, 1, 0..4);
    assert_eq!(whole.weights - whole.read, (4 * 6) << 20, "six of eight experts rest, the embedding is the head");
}

#[test]
fn worker_with_a_rank_keeps_it() {
    let all = [machine(1, 1 << 20), machine(2, 8 << 30), machine(3, 16 << 30)];
    let first = plan(&all, &smol(), &policy(1, 1), None).unwrap();
    assert_eq!(first.shards[0].worker, WorkerId(2), "the first that is large enough");
    let now = plan(&all[2..], &smol(), &policy(1, 1), None).unwrap();
    assert_eq!(plan(&all, &smol(), &policy(1, 1), Some(&now)).unwrap(), now);
}

#[test]
fn a_stage_sits_on_one_host() {
    let mut all = machines(4, 8 << 30);
    for (machine, host) in all.iter_mut().zip(["a", "b", "b", "a"]) {
        machine.host = host.into();
    }
    let plan = plan(&all, &smol(), &policy(2, 2), None).unwrap();
    let hosts: Vec<_> = plan.shards.iter().map(|shard| shard.host.as_str()).collect();
    assert_eq!(hosts, ["a", "a", "b", "b"]);
}

#[test]
fn more_threads_than_cores_are_predicted_to_be_no_faster() {
    let predicted = |tp: u16, cores: u32| {
        let local = |id| Machine { host: "here".into(), cores, ..machine(id, 8 << 30) };
        let all: Vec<Machine> = (0..u64::from(tp)).map(local).collect();
        let plan = plan(&all, &smol(), &policy(tp, 1), None).unwrap();
        predict(&all, &smol(), &policy(tp, 1), &plan).unwrap()
    };
    let (two, four, roomy) = (predicted(2, 2), predicted(4, 2), predicted(4, 8));
    assert!(four.work_micros >= two.work_micros && four.exchange_micros > two.exchange_micros);
    assert!(roomy.work_micros < two.work_micros && roomy.exchange_micros == two.exchange_micros);
}

/// One token at a time, as measured on two cores of Zen 3.
#[test]
fn predictions_hold_what_was_measured() {
    let predicted = |shape: &ModelShape| {
        let all = [Machine { threads: 2, cores: 2, ..machine(0, 8 << 30) }];
        let plan = plan(&all, shape, &policy(1, 1), None).unwrap();
        predict(&all, shape, &policy(1, 1), &plan).unwrap()
    };
    let holds = |prediction: Prediction, measured: f64| (prediction.low..=prediction.high).contains(&measured);
    let default = predicted(&smol());
    assert!(holds(default, 150.0) && default.high / default.low < 2.3, "{default}");
    let layer = LayerSizes { heads: 32_768, kv_heads: 16_384, mlp: 98_304, experts: 0, replicated: 512 };
    let sizes = ModelSizes { embedding: 81_920, layers: vec![layer; 2], norm: 256, ..ModelSizes::default() };
    let cache = LayerGroups::alike(2, KvLayout::heads(2, 16));
    let small = ModelShape { n_layers: 2, hidden: 64, n_heads: 4, n_kv_heads: 2, head_dim: 16, ..smol() };
    let tiny = predicted(&ModelShape { inner: 128, vocab: 320, cache, sizes, ..small });
    assert!(holds(tiny, 5_800.0), "{tiny}");
}

#[test]
fn the_table_has_a_row_per_rank_and_the_prediction_a_cause() {
    let mut all = machines(4, 64 << 30);
    all.iter_mut().for_each(|machine| machine.threads = 4);
    let plan = plan(&all, &smol(), &policy(2, 2), None).unwrap();
    let table = plan.to_string();
    assert_eq!(table.lines().count(), 6, "{table}");
    let prediction = predict(&all, &smol(), &policy(2, 2), &plan).unwrap();
    assert_eq!(prediction.bottleneck, Bottleneck::Collective, "four hosts, and a small model");
    let solo = super::plan(&all[..1], &smol(), &policy(1, 1), None).unwrap();
    let alone = predict(&all, &smol(), &policy(1, 1), &solo).unwrap();
    assert_eq!((alone.bottleneck, alone.exchange_micros), (Bottleneck::MemoryBandwidth, 0.0));
    assert!(prediction.exchange_micros > prediction.work_micros && prediction.work_micros < alone.work_micros);
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }

    fn model(&mut self) -> ModelShape {
        let n_layers = 1 + self.below(12) as u32;
        let n_kv_heads = 1 + self.below(4) as u32;
        let experts = (self.below(4) == 0).then_some(ExpertShape { n: 8, n_used: 2, inner: 64 });
        let mut layer = || LayerSizes {
            heads: self.below(1 << 20),
            kv_heads: self.below(1 << 18),
            mlp: self.below(1 << 21),
            experts: if experts.is_some() { self.below(1 << 22) } else { 0 },
            replicated: self.below(1 << 12),
        };
        let layers = (0..n_layers).map(|_| layer()).collect();
        // None, each third or all of them with a window.
        let (window, period) = (1 + self.below(300) as u32, [n_layers + 1, 3, 1][self.below(3) as usize]);
        let head = if self.below(2) == 0 { 0 } else { self.below(1 << 22) };
        let layer_inputs = if self.below(3) == 0 { self.below(1 << 22) } else { 0 };
        let shape = ModelShape {
            n_layers,
            hidden: 256,
            n_heads: n_kv_heads * (1 + self.below(4) as u32),
            n_kv_heads,
            head_dim: [16, 32, 64, 80][self.below(4) as usize],
            inner: 32 * (1 + self.below(40) as u32),
            vocab: 1 + self.below(5000) as u32,
            context: 16 + self.below(2000) as u32,
            experts,
            states: None,
            cache: LayerGroups::alike(n_layers, HEADS),
            joined: self.joined(n_layers),
            sizes: ModelSizes { embedding: self.below(1 << 22), layers, norm: 1024, layer_inputs, head },
            draft: 0,
        };
        let heads = KvLayout::heads(n_kv_heads, shape.head_dim);
        let states = StateHeads { n: 1 + self.below(8) as u32, dim: [16, 32, 80][self.below(3) as usize] };
        let state = KvLayout::State { n: states.n, state: 1 + self.below(2000) as u32, row: 40 };
        let other = if self.below(2) == 0 { heads.with_window(window) } else { state };
        let layout = |layer: u32| if layer % period == period - 1 { other } else { heads };
        let states = other.is_state().then_some(states);
        ModelShape { cache: LayerGroups::of((0..n_layers).map(layout)), states, ..shape }
    }

    /// None in two models of three.
    fn joined(&mut self, n_layers: u32) -> std::ops::Range<u32> {
        let start = self.below(n_layers.into()) as u32;
        let end = start + self.below(u64::from(n_layers - start) + 1) as u32;
        if self.below(3) == 0 && start + 1 < end { start..end } else { 0..0 }
    }

    fn machines(&mut self, n: u64, memory: u64) -> Vec<Machine> {
        let scale = memory.max(2);
        let machine = |random: &mut Random, id| Machine {
            host: format!("host-{}", random.below(3)),
            threads: 1 + random.below(3) as u32,
            memory_bytes: scale / 2 + random.below(scale),
            ..machine(id, 0)
        };
        (0..n).map(|id| machine(self, id)).collect()
    }

    fn policy(&mut self) -> PlacementPolicy {
        let kv_memory = (self.below(3) == 0).then(|| self.below(1 << 22));
        let context = (self.below(3) == 0).then(|| 16 + self.below(200) as u32);
        let (running_max, slice_max) = (1 + self.below(8) as u32, 1 + self.below(100) as u32);
        let grid = Grid { tp: 1 + self.below(4) as u16, pp: 1 + self.below(4) as u16 };
        let state_cache = (self.below(3) == 0).then(|| self.below(1 << 20));
        let memory_permille = (self.below(3) == 0).then(|| 300 + self.below(700) as u16);
        PlacementPolicy {
            grid,
            kv_memory,
            memory_permille,
            state_cache,
            context,
            running_max,
            slice_max,
            ..policy(1, 1)
        }
    }
}

fn check_blueprint(plan: &Blueprint, machines: &[Machine], shape: &ModelShape, policy: &PlacementPolicy) {
    let layout = &plan.layout;
    assert_eq!((layout.grid(), layout.n_layers()), (policy.grid, shape.n_layers));
    assert_eq!(plan.shards.len(), usize::from(policy.grid.n_ranks()));
    let mut workers: Vec<_> = plan.shards.iter().map(|shard| shard.worker).collect();
    workers.sort_unstable();
    workers.dedup();
    assert_eq!(workers.len(), plan.shards.len(), "each worker holds one rank");
    assert!(plan.n_blocks().iter().all(|n_blocks| *n_blocks > 0) && plan.context > 0);
    let groups: Vec<_> = plan.pools.iter().map(|pool| pool.group).collect();
    assert_eq!(groups, shape.cache.groups());
    assert!(policy.context.is_none_or(|context| plan.context == context));
    for PoolSize { group, n_blocks } in &plan.pools {
        assert!(*n_blocks >= group.n_held_max(plan.context, policy.slice_max), "a context fits each pool");
    }
    let measure = PartMeasurer::new(shape, DeviceClass::Cpu, policy.kv_dtype);
    for shard in &plan.shards {
        let machine = machines.iter().find(|machine| machine.worker == shard.worker).unwrap();
        let held = measure.part(&layout.part(shard.rank));
        assert_eq!((held.weights, &held.heads, &held.kv_heads), (shard.weight_bytes, &shard.heads, &shard.kv_heads));
        assert!(shard.weight_bytes + shard.kv_bytes <= machine.memory_bytes, "{plan}");
        assert!(policy.kv_memory.is_none_or(|kv| shard.kv_bytes <= kv));
        if let (None, Some(permille)) = (policy.kv_memory, policy.memory_permille) {
            assert!(shard.weight_bytes + shard.kv_bytes <= machine.memory_bytes * u64::from(permille) / 1000, "{plan}");
        }
        assert!(!shard.heads.is_empty() && !shard.kv_heads.is_empty());
        let kept = plan.n_blocks().into_iter().zip(&held.block_bytes);
        assert_eq!(shard.kv_bytes, kept.map(|(n_blocks, bytes)| u64::from(n_blocks) * bytes).sum::<u64>());
        let has_layers: Vec<bool> = shape.cache.n_layers(&shard.layers).map(|n| n > 0).collect();
        let tokens = plan.pools.iter().zip(has_layers).map(|(pool, has)| u64::from(has) * pool.n_tokens());
        assert_eq!(shard.kv_tokens, tokens.collect::<Vec<_>>());
    }
    let is_within = |layer: u32| shape.joined.start < layer && layer < shape.joined.end;
    assert!(!plan.shards.iter().any(|shard| is_within(shard.layers.start)), "joined layers are on one stage: {plan}");
    for stage in plan.shards.chunks(usize::from(policy.grid.tp)) {
        assert_eq!((stage[0].heads.start, stage[stage.len() - 1].heads.end), (0, shape.n_heads));
        assert!(stage.windows(2).all(|pair| pair[0].heads.end == pair[1].heads.start));
        assert!(stage.iter().map(|shard| shard.kv_heads.len()).sum::<usize>() >= shape.n_kv_heads as usize);
    }
}

fn check_refusal(error: &Unplaceable, machines: &[Machine], shape: &ModelShape, policy: &PlacementPolicy) {
    match &error.why {
        UnplaceableReason::Weights { needed, available, .. }
        | UnplaceableReason::KvMemory { needed, available, .. } => {
            assert!(needed > available, "{error}");
        }
        UnplaceableReason::Kv { context, block_bytes, needed, available, .. } => {
            assert!(needed > available, "{error}");
            assert!(*needed <= u64::from(blocks_for(*context)) * block_bytes);
        }
        UnplaceableReason::TooFew { needed, there, .. } => assert!(needed > there && *there == machines.len()),
        UnplaceableReason::Heads { tp, n_leaves } => assert!(u32::from(*tp) > *n_leaves && *n_leaves <= shape.n_heads),
        UnplaceableReason::Layers { pp, n_layers } => {
            assert!(u32::from(*pp) > *n_layers && *n_layers == shape.n_layers)
        }
        UnplaceableReason::Joined { pp, n_stages } => {
            let n_joined = shape.joined.len() as u32;
            assert!(u32::from(*pp) > *n_stages && *n_stages == shape.n_layers + 1 - n_joined)
        }
        UnplaceableReason::Context { requested, model } => assert!(requested > model),
        other => panic!("{other:?}"),
    }
    if let Some(grid) = error.nearest {
        assert_ne!(grid, policy.grid);
        let policy = PlacementPolicy { grid, ..policy.clone() };
        check_blueprint(&plan(machines, shape, &policy, None).unwrap(), machines, shape, &policy);
    }
}

/// A lost worker's rank goes to a spare. Returns whether all others kept their ranks.
fn survives_loss(
    random: &mut Random,
    now: &Blueprint,
    machines: &[Machine],
    shape: &ModelShape,
    of: &PlacementPolicy,
) -> bool {
    let lost = now.shards[random.below(now.shards.len() as u64) as usize].worker;
    let mut left: Vec<Machine> = machines.iter().filter(|machine| machine.worker != lost).cloned().collect();
    left.push(Machine { memory_bytes: 64 << 30, ..machine(99, 0) });
    let Ok(next) = plan(&left, shape, of, Some(now)) else { return false };
    check_blueprint(&next, &left, shape, of);
    now.shards.iter().zip(&next.shards).all(|(old, new)| old.worker == lost || old.worker == new.worker)
}

#[test]
fn thousands_of_models_and_machines() {
    let (mut n_placed, mut n_refused, mut n_moved) = (0, 0, 0);
    for seed in 0..2500 {
        let random = &mut Random(seed);
        let (shape, policy) = (random.model(), random.policy());
        let n_ranks = u64::from(policy.grid.n_ranks());
        let n = (n_ranks + random.below(3)).saturating_sub(random.below(6) / 5);
        let memory = shape.sizes.total() / n_ranks * (1 + random.below(4)) + random.below(1 << 21);
        let machines = random.machines(n, memory);
        let planned = plan(&machines, &shape, &policy, None);
        assert_eq!(planned, plan(&machines, &shape, &policy, None), "seed {seed}: the same twice");
        match planned {
            Ok(blueprint) => {
                n_placed += 1;
                check_blueprint(&blueprint, &machines, &shape, &policy);
                assert_eq!(plan(&machines, &shape, &policy, Some(&blueprint)), Ok(blueprint.clone()), "seed {seed}");
                n_moved += u32::from(!survives_loss(random, &blueprint, &machines, &shape, &policy));
            }
            Err(error) => {
                n_refused += 1;
                check_refusal(&error, &machines, &shape, &policy);
            }
        }
    }
    // A machine of just the size of its rank may be too small for any other cut.
    assert!(n_moved * 50 < n_placed, "{n_moved} of {n_placed} moved though there was a spare");
    assert!(n_placed > 800 && n_refused > 400, "{n_placed} placed, {n_refused} refused");
}

#[test]
fn no_more_stages_than_a_worker_queues_steps() {
    assert!(worker::Config::default().steps_queued_max >= usize::from(STAGES_MAX));
    let machines = machines(30, 64 << 30);
    let deep = plan(&machines, &smol(), &policy(1, 17), None).unwrap_err();
    assert_eq!((deep.why, deep.nearest), (UnplaceableReason::Stages { pp: 17 }, Some(Grid { tp: 1, pp: 16 })));
    assert!(plan(&machines, &smol(), &policy(1, 16), None).is_ok());
}
