//! Whole tiny models: their numbers are close to the CPU's, and have the same bits in chunks, in batches, after
//! preemption, and on grids whose ranks exchange through the host, NCCL and each other's memory. Also the error when a
//! rank is lost.

use super::{Done, Finding, FindingSink, Group, Options};
use crate::common::grid::Threads;
use crate::common::{Alone, CONTEXT, Plan, Played, Player, RUNNING_MAX, requests};
use crate::whole::{NAMES, distance, graphs_keep_bits, keeps_its_bits};
use checkpoint::Checkpoint;
use collective::NcclVersion;
use serde_json::json;
use std::path::Path;
use std::time::Instant;
use types::{
    Activations, BlockId, Epoch, Grid, KvDtype, Layout, NumericsMode, Rank, Request, RequestId, Slice, Step, StepId,
    Want,
};
use worker::{Assignment, CarrierChoice, ComputeDevice, Driver, MeshSecret, MeshTimeouts, ModelLoader, nccl_version};

const DEEP: &str = "llama-deep.gguf";
/// tp, pp
const GRIDS: [(u16, u16); 3] = [(2, 1), (1, 2), (2, 2)];
const CARRIERS: [(CarrierChoice, &str); 3] =
    [(CarrierChoice::Ipc, "each other's memory"), (CarrierChoice::Host, "the host"), (CarrierChoice::Nccl, "NCCL")];

/// The sizes of the tests.
#[derive(Clone, Copy)]
struct Size {
    names: &'static [&'static str],
    n_tokens: u32,
    n_requests: u64,
    /// Limits of a request: its prompt, and its output.
    tokens_max: Option<(usize, u32)>,
}

const FULL: Size = Size { names: &NAMES, n_tokens: 60, n_requests: 12, tokens_max: None };
/// For an emulator, which takes a thousand times as long as a device. Together these models launch the kernels that the
/// part `kernels` does not.
const TINY: Size = Size {
    names: &["llama-bf16-odd", "olmo2", "ministral3", "gpt-neox", "glm4-moe", "gpt-oss"],
    n_tokens: 20,
    n_requests: 3,
    tokens_max: Some((30, 4)),
};

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

pub fn groups(options: &Options) -> Vec<Group> {
    let size = if options.is_tiny { TINY } else { FULL };
    let part = |name: String, work: fn(&Options, &str, FindingSink<'_>) -> Done, of: &'static str| {
        Group::new("cluster", name, move |options, report| work(options, of, report))
    };
    let mut groups = vec![Group::opened("cluster")];
    groups.extend(size.names.iter().map(|name| part((*name).into(), model, name)));
    let ways = CARRIERS.map(|(carrier, way)| {
        let grids = move |options: &Options, report: FindingSink<'_>| grids(options, carrier, way, report);
        let lost = move |options: &Options, report: FindingSink<'_>| {
            report(lost(&deep(options)?, &options.cache, carrier, way));
            Ok(())
        };
        // NCCL leaves threads and memory behind when a rank is lost.
        let process = if carrier == CarrierChoice::Nccl { "NCCL" } else { "" };
        let grids = Group::new("cluster", format!("grids through {way}"), grids).in_process(process);
        [grids, Group::new("cluster", format!("a rank is gone, through {way}"), lost).in_process(process)]
    });
    groups.extend(ways.into_iter().flatten());
    groups
}

/// One model on one rank.
fn model(options: &Options, name: &str, report: FindingSink<'_>) -> Done {
    let (models, cache, size) = (&options.models, &options.cache, if options.is_tiny { TINY } else { FULL });
    let distance = distance(models, name, NumericsMode::Lockstep, size.n_tokens, Some(cache));
    let details = json!({ "farthest": distance.farthest, "typical": distance.typical, "rows_far": distance.n_far });
    report(Finding::checked(format!("{name} beside the CPU"), distance.is_good(), details));
    let same_bits = keeps_its_bits(models, name, Some(cache));
    let details = json!({ "same_bits": same_bits });
    report(Finding::checked(format!("{name} alone, in chunks and in a batch"), same_bits, details));
    report(graphs(models, name, cache));
    Ok(())
}

/// Returns the model that grids cut.
fn deep(options: &Options) -> Result<Assignment, String> {
    let path = options.models.join(DEEP);
    if path.exists() {
        return Ok(assignment(&path));
    }
    Err(format!("{} has no {DEEP}: give --models, the checkout's tests/reference", options.models.display()))
}

/// Checks passes that are replayed as graphs.
fn graphs(models: &Path, of: &str, cache: &Path) -> Finding {
    let (same_bits, repeats) = graphs_keep_bits(models, of, NumericsMode::Lockstep, Some(cache));
    let details = json!({ "same_bits": same_bits, "recorded": repeats.recorded, "replayed": repeats.replayed });
    Finding::checked(format!("{of} in graphs"), same_bits && repeats.replayed > 0, details)
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
        timeouts: MeshTimeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        guesses: worker::GuessConfig::default(),
        model_path: model.to_owned(),
        activations: Activations::Bf16,
        kv_dtype: KvDtype::Bf16,
        mode: NumericsMode::Lockstep,
        n_blocks: vec![crate::common::N_BLOCKS; spec.cache_groups().groups().len()],
        kv_bytes: 64 << 20,
        context: CONTEXT.min(spec.context),
        batch_tokens_max: 512,
        running_max: RUNNING_MAX,
    }
}

fn n_cards() -> usize {
    Driver::find().and_then(|driver| driver.cards()).map_or(1, |cards| cards.len())
}

/// Returns why ranks cannot use this carrier on this machine.
fn lacking(carrier: CarrierChoice, n_ranks: usize) -> Option<String> {
    if carrier != CarrierChoice::Nccl {
        return None;
    }
    let (version, n_cards) = match nccl_version() {
        Ok(version) => (version, n_cards()),
        Err(why) => return Some(why.to_string()),
    };
    if version < NcclVersion::MIN {
        return Some(format!("NCCL {version} is older than {}", NcclVersion::MIN));
    }
    let is_short = n_cards < n_ranks && version < NcclVersion::SHARING;
    let least = NcclVersion::SHARING;
    is_short.then(|| {
        format!("{n_ranks} ranks share {n_cards} devices, but NCCL {version} cannot share a device: {least} can")
    })
}

/// Returns a loader for each rank: on separate devices if there are enough, otherwise all on the first one.
fn loaders(n_ranks: usize, cache: &Path, carrier: CarrierChoice) -> Vec<ModelLoader> {
    let n_cards = n_cards();
    let loader = |rank: usize| ModelLoader {
        device: ComputeDevice::Cuda {
            ordinal: if n_cards >= n_ranks { rank as u32 } else { 0 },
            cache: Some(cache.to_owned()),
        },
        spin: false,
        carrier,
        ..ModelLoader::new(1)
    };
    (0..n_ranks).map(loader).collect()
}

fn grids(options: &Options, carrier: CarrierChoice, way: &str, report: FindingSink<'_>) -> Done {
    let (assignment, cache) = (&deep(options)?, &options.cache);
    let requests = if options.is_tiny { TINY } else { FULL }.requests();
    let (mut runner, _) =
        loaders(1, cache, CarrierChoice::Auto)[0].build(assignment).map_err(|error| error.to_string())?;
    let expected = Player::new(&mut Alone::new(&mut runner), assignment).play(&requests, Plan::ALONE);
    let found = |name: String, played: Played| {
        let same_tokens = played.outputs == expected.outputs;
        Finding::checked(name, same_tokens, json!({ "same_tokens": same_tokens }))
    };
    let together = Plan { chunk: 60, together: 9, preempt_every: Some(4), ..Plan::ALONE };
    if carrier == CarrierChoice::Host {
        let played = Player::new(&mut Alone::new(&mut runner), assignment).play(&requests, together);
        report(found("nine together, with preemption".into(), played));
    }
    drop(runner);
    // Ipc only carries the sums of a stage, so it is tested where stages have several ranks.
    for (tp, pp) in GRIDS.into_iter().filter(|(tp, _)| *tp > 1 || carrier != CarrierChoice::Ipc) {
        let layout = Layout::even(Grid { tp, pp }, assignment.layout.n_layers()).unwrap();
        let name = format!("tp {tp} x pp {pp} through {way}");
        if let Some(why) = lacking(carrier, usize::from(tp * pp)) {
            report(Finding::not_run(name, &why));
            continue;
        }
        let plan = Plan { turns: pp.into(), in_flight: usize::from(pp) + 1, ..together };
        let loaders = loaders(usize::from(tp * pp), cache, carrier);
        let mut grid = Threads::start_each(loaders, assignment, &layout);
        let played = Player::new(&mut grid, assignment).play(&requests, plan);
        grid.end();
        report(found(name, played));
    }
    Ok(())
}

/// Loses one of two ranks while the other is in a collective with it: the other rank reports the loss.
fn lost(assignment: &Assignment, cache: &Path, carrier: CarrierChoice, way: &str) -> Finding {
    let name = format!("a rank is gone, through {way}");
    if let Some(why) = lacking(carrier, 2) {
        return Finding::not_run(name, &why);
    }
    let layout = Layout::even(Grid { tp: 2, pp: 1 }, assignment.layout.n_layers()).unwrap();
    let request = Request { id: RequestId(1), prompt: [1, 2, 3].into(), ..Request::default() };
    let slice = Slice::new(request.id, 0..3, Want::Last);
    let blocks = vec![BlockId(0); assignment.n_blocks.len()];
    let step = Step { id: StepId(1), starts: vec![request], slices: vec![slice], blocks, ..Step::default() };
    let grid = Threads::start_each(loaders(2, cache, carrier), assignment, &layout);
    let begun = Instant::now();
    let errors = grid.without(1, step);
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let is_good = errors.len() == 1 && errors[0].guilty() == Some(Rank(1));
    Finding::checked(name, is_good, json!({ "errors": texts, "seconds": begun.elapsed().as_secs_f64() }))
}
