//! Whole tiny models: near the CPU's numbers, and the same bits in chunks, in company, preempted, and on two ranks that
//! share the device.

use crate::Finding;
use crate::common::grid::Threads;
use crate::common::{Alone, CONTEXT, Plan, Played, Player, RUNNING_MAX, requests};
use crate::whole::{NAMES, distance, keeps_its_bits};
use checkpoint::Checkpoint;
use serde_json::json;
use std::path::Path;
use types::{Epoch, Grid, Layout, Rank};
use worker::{Assignment, MeshSecret, ModelLoader, Place, Timeouts};

const DEEP: &str = "llama-deep.gguf";
const N_TOKENS: u32 = 60;

pub fn check(models: &Path, cache: &Path) -> Result<Vec<Finding>, String> {
    if !models.join(DEEP).exists() {
        return Err(format!("{} has no {DEEP}: give --models, the checkout's tests/reference", models.display()));
    }
    let mut findings = Vec::new();
    for name in NAMES {
        let distance = distance(models, name, N_TOKENS, Some(cache));
        findings.push(Finding {
            name: format!("{name} beside the CPU"),
            is_good: distance.is_good(),
            told: json!({ "farthest": distance.farthest, "typical": distance.typical }),
        });
        let same_bits = keeps_its_bits(models, name, Some(cache));
        let name = format!("{name} alone, in chunks and in company");
        findings.push(Finding { name, is_good: same_bits, told: json!({ "same_bits": same_bits }) });
    }
    findings.extend(grids(&assignment(&models.join(DEEP)), cache));
    Ok(findings)
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
        model_path: model.to_owned(),
        activations: "bf16".into(),
        kv_dtype: "bf16".into(),
        n_blocks: vec![crate::common::N_BLOCKS; spec.cache_groups().groups().len()],
        kv_bytes: 64 << 20,
        context: CONTEXT.min(spec.context),
        batch_tokens_max: 512,
        running_max: RUNNING_MAX,
    }
}

fn grids(assignment: &Assignment, cache: &Path) -> Vec<Finding> {
    let loader = ModelLoader {
        place: Place::Cuda { ordinal: 0, cache: Some(cache.to_owned()) },
        spin: false,
        ..ModelLoader::new(1)
    };
    let requests = requests(12);
    let (mut runner, _) = loader.build(assignment).unwrap();
    let expected = Player::new(&mut Alone::new(&mut runner), assignment).play(&requests, Plan::ALONE);
    let found = |name: String, played: Played| {
        let same_tokens = played.outputs == expected.outputs;
        Finding { name, is_good: same_tokens, told: json!({ "same_tokens": same_tokens }) }
    };
    let together = Plan { chunk: 60, together: 9, preempt_every: Some(4), ..Plan::ALONE };
    let played = Player::new(&mut Alone::new(&mut runner), assignment).play(&requests, together);
    let mut findings = vec![found("nine together, with preemption".into(), played)];
    for (tp, pp) in [(2, 1), (1, 2), (2, 2)] {
        let layout = Layout::even(Grid { tp, pp, ep: 1 }, assignment.layout.n_layers()).unwrap();
        let plan = Plan { turns: pp.into(), in_flight: usize::from(pp) + 1, ..together };
        let mut grid = Threads::start(&loader, assignment, &layout);
        let played = Player::new(&mut grid, assignment).play(&requests, plan);
        grid.end();
        findings.push(found(format!("tp {tp} x pp {pp}, all ranks on one device"), played));
    }
    findings
}
