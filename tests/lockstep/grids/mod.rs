//! The guarantee for topologies: on any grid, over any wire, with threads or processes, token ids and logprobs have the
//! bits that each request has alone on one rank.

mod cover;
mod default_model;
mod product;

use crate::common::requests::{REQUESTS, difference, few_requests, tiny_requests};
use crate::common::{Answer, Cut, Replica, Setup, Workers, reference_model};
use cover::Run;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::LazyLock;
use std::time::Instant;
use tokio::sync::OnceCell;
use types::Request;
use worker::WireChoice;

/// Five leaves in five layers: every rank has work on every grid up to four by four.
const WIDE: &str = "llama-wide.gguf";
/// Too few blocks for 64 requests at once: some are preempted.
const FEW_BLOCKS: u32 = 50;
const GRID_MAX: u16 = 4;

/// One checkpoint of each family, both kinds of file for models with experts, and weights of bf16.
const FAMILIES: [&str; 22] = [
    WIDE,
    "llama-bf16-odd",
    "gguf-llama3",
    "gguf-gemma2",
    "gemma3",
    "gemma4",
    "gemma4-global",
    "olmo-hybrid",
    "falcon-h1",
    "gemma4-moe",
    "gguf-gpt2",
    "gguf-phi3",
    "gguf-qwen2",
    "gguf-qwen3-yarn",
    "gguf-mistral",
    "gguf-smollm3",
    "mixtral",
    "gguf-mixtral",
    "qwen3-moe",
    "gguf-qwen3-moe",
    "qwen3-next",
    "granite4",
];

fn setup(family: &str, activations: &'static str, kv_dtype: &'static str) -> Setup {
    Setup::new(reference_model(family), activations, kv_dtype)
}

/// The answers of each request alone on one rank.
async fn alone(setup: &Setup, requests: &[Request]) -> Vec<Answer> {
    let mut replica = Replica::start(&setup.on(1, 1)).await;
    let answers = replica.run_alone(requests).await;
    assert_eq!(replica.n_cached(), 0, "each ran cold");
    replica.stop().await;
    answers
}

fn check_equal(way: &str, requests: &[Request], got: &[Answer], expected: &[Answer]) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let sampling = &requests[i].sampling;
        assert!(got == expected, "{way}: request {i} ({sampling:?}): {}", difference(got, expected));
    }
    assert!(expected.iter().all(|answer| !answer.drawn.is_empty()));
}

// -- sixteen grids

/// The requests that grow most are first, so that they outgrow the pool together.
fn hard_requests(family: &str) -> Vec<Request> {
    let mut requests = tiny_requests(&reference_model(family));
    requests.sort_by_key(|request| Reverse(request.sampling.tokens_max));
    assert_eq!(requests.len(), REQUESTS);
    requests
}

async fn sixteen_grids(tp: u16) {
    static ALONE: OnceCell<Vec<Answer>> = OnceCell::const_new();
    let (base, requests) = (setup(WIDE, "int8", "f16"), hard_requests(WIDE));
    let expected = ALONE.get_or_init(|| alone(&base, &requests)).await;
    for pp in 1..=GRID_MAX {
        let way = format!("tp {tp}, pp {pp}");
        let setup = Setup { n_blocks: FEW_BLOCKS, prefix_cache: true, ..base.on(tp, pp) };
        let mut replica = Replica::start(&setup).await;
        let answers = replica.run(&requests).await;
        let (seen, parts) = (replica.seen(), replica.parts());
        replica.stop().await;
        println!("{way}: {parts:?}, {seen:?}");
        check_equal(&way, &requests, &answers, expected);
        assert_eq!((seen.loads, parts.len()), (1, usize::from(tp * pp)), "{way}: no worker was lost");
        assert!(seen.hits > 0 && seen.restarts > 0, "{way}: prefix hits and preemption: {seen:?}");
    }
}

#[tokio::test]
async fn grids_of_one_rank_per_stage() {
    sixteen_grids(1).await;
}

#[tokio::test]
async fn grids_of_two_ranks_per_stage() {
    sixteen_grids(2).await;
}

#[tokio::test]
async fn grids_of_three_ranks_per_stage() {
    sixteen_grids(3).await;
}

#[tokio::test]
async fn grids_of_four_ranks_per_stage() {
    sixteen_grids(4).await;
}

// -- a pairwise cover

/// The factors: family, tp - 1, pp - 1, wire, workers, cut, activations, type of cache.
const N_VALUES: [usize; 8] = [FAMILIES.len(), GRID_MAX as usize, GRID_MAX as usize, 2, 2, 2, 2, 3];
const RUNS_MAX: usize = 80;
/// The number of blocks if all parts are equal; otherwise memory is plenty.
const COVER_BLOCKS: u32 = 36;
const WIRES: [WireChoice; 2] = [WireChoice::Memory, WireChoice::Socket];
const WORKERS: [Workers; 2] = [Workers::Processes, Workers::Threads];
const CUTS: [Cut; 2] = [Cut::Alike, Cut::Unlike];
const ACTIVATIONS: [&str; 2] = ["int8", "f32"];
const KV_DTYPES: [&str; 3] = ["f16", "f32", "int8"];

/// Whether a family can be cut on a grid, with equal and unequal parts, by family, tp - 1 and pp - 1.
static CUTTABLE: LazyLock<Vec<[[[bool; 2]; 4]; 4]>> = LazyLock::new(|| {
    let of = |family: &&str| {
        let base = setup(family, "int8", "f16");
        let cuttable = |tp: usize, pp: usize| {
            let layout = |cut| Setup { cut, ..base.on(tp as u16 + 1, pp as u16 + 1) }.layout();
            let alike = layout(Cut::Alike);
            [alike.is_ok(), alike.is_ok() && alike != layout(Cut::Unlike)]
        };
        std::array::from_fn(|tp| std::array::from_fn(|pp| cuttable(tp, pp)))
    };
    FAMILIES.iter().map(of).collect()
});

/// Whether the family of a run can be cut on its grid.
fn is_possible(run: &[usize]) -> bool {
    run[1] + run[2] > 0 && CUTTABLE[run[0]][run[1]][run[2]][run[5]]
}

fn cover_of_all() -> Vec<Run> {
    let cover = cover::pairwise(&N_VALUES, is_possible);
    assert!(cover.len() <= RUNS_MAX, "{} runs", cover.len());
    assert_eq!(cover::missing(&cover, &N_VALUES, is_possible), []);
    // Check that a missing pair is found.
    assert_ne!(cover::missing(&cover[1..], &N_VALUES, is_possible), []);
    cover
}

/// Answers of requests alone, by family, activations and type of cache.
type Known = BTreeMap<[usize; 3], Vec<Answer>>;

async fn cover_with(workers: Workers) {
    let cover = cover_of_all();
    let mut known = Known::new();
    let picked: Vec<&Run> = cover.iter().filter(|run| WORKERS[run[4]] == workers).collect();
    println!("{} of {} runs are of {workers:?}", picked.len(), cover.len());
    let mut n_preempted = 0;
    for run in picked {
        n_preempted += one_run(run, &mut known).await;
    }
    // Steps of other processes cannot be counted.
    assert!(workers == Workers::Processes || n_preempted > 0);
}

/// In a second round the prompts are cached. Returns how many requests were preempted, if workers are threads.
async fn one_run(run: &Run, known: &mut Known) -> u32 {
    let family = FAMILIES[run[0]];
    let (tp, pp) = (run[1] as u16 + 1, run[2] as u16 + 1);
    let base = setup(family, ACTIVATIONS[run[6]], KV_DTYPES[run[7]]);
    let requests = few_requests(&base.model);
    let key = [run[0], run[6], run[7]];
    if let Entry::Vacant(place) = known.entry(key) {
        place.insert(alone(&base, &requests).await);
    }
    let setup = Setup {
        wire: WIRES[run[3]],
        workers: WORKERS[run[4]],
        cut: CUTS[run[5]],
        n_blocks: COVER_BLOCKS,
        prefix_cache: true,
        ..base.on(tp, pp)
    };
    let way = format!(
        "{family}, tp {tp}, pp {pp}, {:?}, {:?}, {:?}, {}, {}",
        setup.wire, setup.workers, setup.cut, setup.activations, setup.kv_dtype
    );
    let begun = Instant::now();
    let mut replica = Replica::start(&setup).await;
    for _ in 0..2 {
        let answers = replica.run(&requests).await;
        check_equal(&way, &requests, &answers, &known[&key]);
    }
    let (parts, n_fast, n_cached) = (replica.parts(), replica.n_fast(), replica.n_cached());
    let n_preempted = replica.seen().restarts;
    replica.stop().await;
    let millis = begun.elapsed().as_millis();
    println!("{way}: {parts:?}, {n_cached} cached, {n_preempted} preempted, {millis} ms");
    assert_eq!(parts.len(), usize::from(tp * pp), "{way}");
    assert_eq!(n_fast, usize::from(setup.cut == Cut::Unlike), "{way}: {parts:?}");
    assert!(n_cached > 0, "{way}: some requests had a cached prefix");
    n_preempted
}

#[tokio::test]
async fn a_pairwise_cover_with_threads() {
    cover_with(Workers::Threads).await;
}

#[tokio::test]
async fn a_pairwise_cover_with_processes() {
    cover_with(Workers::Processes).await;
}
