//! Whole tiny models: near the CPU's numbers, and the same bits in chunks, in company, preempted, and on grids whose
//! ranks exchange through the host and through NCCL; and what is said of a rank that is gone.

use crate::Finding;
use crate::common::grid::Threads;
use crate::common::{Alone, CONTEXT, Plan, Played, Player, RUNNING_MAX, requests};
use crate::whole::{NAMES, distance, graphs_keep_bits, keeps_its_bits};
use checkpoint::Checkpoint;
use serde_json::json;
use std::path::Path;
use std::time::Instant;
use types::{BlockId, Epoch, Grid, Layout, Pace, Rank, Request, RequestId, Slice, Step, StepId, Want};
use worker::{Assignment, Carrier, Driver, MeshSecret, ModelLoader, Place, Timeouts, nccl_version};

const DEEP: &str = "llama-deep.gguf";
/// tp, pp
const GRIDS: [(u16, u16); 3] = [(2, 1), (1, 2), (2, 2)];

/// How much is tried.
#[derive(Clone, Copy)]
pub struct Size {
    names: &'static [&'static str],
    n_tokens: u32,
    n_requests: u64,
    /// Of a request: its prompt, and what it says.
    tokens_max: Option<(usize, u32)>,
}

pub const FULL: Size = Size { names: &NAMES, n_tokens: 60, n_requests: 12, tokens_max: None };
/// For an emulator, which takes a thousand times as long as a device.
pub const TINY: Size = Size { names: &["llama-bf16-odd"], n_tokens: 20, n_requests: 3, tokens_max: Some((30, 4)) };

impl Size {
    fn requests(&self) -> Vec<Request> {
        let cut = |mut request: Request| {
            if let Some((prompt, output)) = self.tokens_max {
                request.prompt.truncate(prompt);
                request.sampling.tokens_max = output;
            }
            request
        };
        requests(self.n_requests).into_iter().map(cut).collect()
    }
}

pub fn check(models: &Path, cache: &Path, size: &Size) -> Result<Vec<Finding>, String> {
    if !models.join(DEEP).exists() {
        return Err(format!("{} has no {DEEP}: give --models, the checkout's tests/reference", models.display()));
    }
    let mut findings = Vec::new();
    for &of in size.names {
        let name = of;
        let distance = distance(models, name, Pace::Lockstep, size.n_tokens, Some(cache));
        findings.push(Finding {
            name: format!("{name} beside the CPU"),
            is_good: distance.is_good(),
            told: json!({ "farthest": distance.farthest, "typical": distance.typical }),
        });
        let same_bits = keeps_its_bits(models, name, Some(cache));
        let name = format!("{name} alone, in chunks and in company");
        findings.push(Finding { name, is_good: same_bits, told: json!({ "same_bits": same_bits }) });
        findings.push(graphs(models, of, cache));
    }
    findings.extend(grids(&assignment(&models.join(DEEP)), cache, size));
    Ok(findings)
}

/// Passes that are begun again as one.
fn graphs(models: &Path, of: &str, cache: &Path) -> Finding {
    let (same_bits, repeats) = graphs_keep_bits(models, of, Pace::Lockstep, Some(cache));
    Finding {
        name: format!("{of} in graphs"),
        is_good: same_bits && repeats.replayed > 0,
        told: json!({ "same_bits": same_bits, "recorded": repeats.recorded, "replayed": repeats.replayed }),
    }
}

fn assignment(model: &Path) -> Assignment {
    let checkpoint = Checkpoint::open(model).unwrap();
    let spec = checkpoint.spec();
    Assignment {
        epoch: Epoch::default(),
        rank: Rank(0),
        layout: Layout::solo(spec.n_layers),
        mesh_addresses: vec![],
        mesh_secret: MeshSecret::default(),
        timeouts: Timeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        model_path: model.to_owned(),
        activations: "bf16".into(),
        kv_dtype: "bf16".into(),
        pace: Pace::Lockstep,
        n_blocks: vec![crate::common::N_BLOCKS; spec.cache_groups().groups().len()],
        kv_bytes: 64 << 20,
        context: CONTEXT.min(spec.context),
        batch_tokens_max: 512,
        running_max: RUNNING_MAX,
    }
}

/// A loader for each rank: a device of its own where there are as many, otherwise all on the first.
fn loaders(n_ranks: usize, cache: &Path, carrier: Carrier) -> Vec<ModelLoader> {
    let n_cards = Driver::find().and_then(|driver| driver.cards()).map_or(1, |cards| cards.len());
    let loader = |rank: usize| ModelLoader {
        place: Place::Cuda { ordinal: if n_cards >= n_ranks { rank as u32 } else { 0 }, cache: Some(cache.to_owned()) },
        spin: false,
        carrier,
        ..ModelLoader::new(1)
    };
    (0..n_ranks).map(loader).collect()
}

fn grids(assignment: &Assignment, cache: &Path, size: &Size) -> Vec<Finding> {
    let requests = size.requests();
    let (mut runner, _) = loaders(1, cache, Carrier::Auto)[0].build(assignment).unwrap();
    let expected = Player::new(&mut Alone::new(&mut runner), assignment).play(&requests, Plan::ALONE);
    let found = |name: String, played: Played| {
        let same_tokens = played.outputs == expected.outputs;
        Finding { name, is_good: same_tokens, told: json!({ "same_tokens": same_tokens }) }
    };
    let together = Plan { chunk: 60, together: 9, preempt_every: Some(4), ..Plan::ALONE };
    let played = Player::new(&mut Alone::new(&mut runner), assignment).play(&requests, together);
    let mut findings = vec![found("nine together, with preemption".into(), played)];
    let carriers = [(Carrier::Host, "the host"), (Carrier::Nccl, "NCCL")];
    for ((carrier, way), (tp, pp)) in carriers.into_iter().flat_map(|way| GRIDS.map(|grid| (way, grid))) {
        let layout = Layout::even(Grid { tp, pp, ep: 1 }, assignment.layout.n_layers()).unwrap();
        let name = format!("tp {tp} x pp {pp} through {way}");
        if let (Carrier::Nccl, Err(why)) = (carrier, nccl_version()) {
            findings.push(Finding { name, is_good: true, told: json!({ "skipped": why.to_string() }) });
            continue;
        }
        let plan = Plan { turns: pp.into(), in_flight: usize::from(pp) + 1, ..together };
        let loaders = loaders(usize::from(tp * pp), cache, carrier);
        let mut grid = Threads::start_each(loaders, assignment, &layout);
        let played = Player::new(&mut grid, assignment).play(&requests, plan);
        grid.end();
        findings.push(found(name, played));
    }
    findings.extend(carriers.map(|(carrier, way)| lost(assignment, cache, carrier, way)));
    findings
}

/// One of two ranks is gone when the other is in a collective with it: that one says so.
fn lost(assignment: &Assignment, cache: &Path, carrier: Carrier, way: &str) -> Finding {
    let name = format!("a rank is gone, through {way}");
    if let (Carrier::Nccl, Err(why)) = (carrier, nccl_version()) {
        return Finding { name, is_good: true, told: json!({ "skipped": why.to_string() }) };
    }
    let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, assignment.layout.n_layers()).unwrap();
    let request = Request { id: RequestId(1), prompt: [1, 2, 3].into(), ..Request::default() };
    let slice = Slice { id: request.id, range: 0..3, n_draft: 0, want: Want::Last };
    let blocks = vec![BlockId(0); assignment.n_blocks.len()];
    let step = Step { id: StepId(1), starts: vec![request], slices: vec![slice], blocks, ..Step::default() };
    let grid = Threads::start_each(loaders(2, cache, carrier), assignment, &layout);
    let begun = Instant::now();
    let said = grid.without(1, step);
    let told: Vec<String> = said.iter().map(ToString::to_string).collect();
    let is_good = said.len() == 1 && said[0].guilty() == Some(Rank(1));
    Finding { name, is_good, told: json!({ "said": told, "seconds": begun.elapsed().as_secs_f64() }) }
}
