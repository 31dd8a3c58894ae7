//! Ranks on CUDA's kernels, over a driver that runs them on an emulator: tokens and logprobs are the same alone,
//! together, preempted and on every grid, bit for bit, and a device that fails is an error of its step.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code, reason = "shared with tests that need other parts of it")]
mod common;
#[path = "../backend/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[allow(dead_code, reason = "shared with the example, which asks for more")]
#[path = "../examples/gpu_check/cluster.rs"]
mod gpu_check_cluster;
#[allow(dead_code, reason = "shared with tests that need other parts of it")]
#[path = "../model/tests/whole/mod.rs"]
mod whole;

use common::grid::Threads;
use common::{Alone, Plan, Played, Player, assignment, requests};
use fake_cuda::on_fake_cuda;
use std::path::{Path, PathBuf};
use types::{Grid, Layout, Numerics, Pace, PolicyDigest, Request, RequestId, Slice, Step, StepDone, StepId, Want};
use worker::{Assignment, Carrier, LoadError, ModelLoader, Place, RunError, Runner};

const DEEP: &str = "llama-deep.gguf";
const N_LAYERS: u32 = 5;

fn loader() -> ModelLoader {
    ModelLoader { place: Place::Cuda { ordinal: 0, cache: None }, spin: false, ..ModelLoader::new(1) }
}

fn on_cuda(name: &str) -> Assignment {
    Assignment { activations: "bf16".into(), kv_dtype: "bf16".into(), ..assignment(name) }
}

/// Short ones: the emulator takes a thousand times as long as a device.
fn short_requests(n: u64) -> Vec<Request> {
    let cut = |mut request: Request| {
        request.prompt.truncate(40);
        request.sampling.tokens_max = 4;
        request
    };
    requests(n).into_iter().map(cut).collect()
}

fn alone(assignment: &Assignment, requests: &[Request]) -> Played {
    let (mut runner, _) = loader().build(assignment).unwrap();
    Player::new(&mut Alone::new(&mut runner), assignment).play(requests, Plan::ALONE)
}

#[test]
fn company_and_preemption_change_no_token() {
    on_fake_cuda("company_and_preemption_change_no_token", &[], || {
        let (assignment, requests) = (on_cuda("llama-bf16-odd"), short_requests(7));
        let expected = alone(&assignment, &requests);
        let (mut runner, _) = loader().build(&assignment).unwrap();
        let plan = Plan { chunk: 19, together: 5, preempt_every: Some(3), ..Plan::ALONE };
        let played = Player::new(&mut Alone::new(&mut runner), &assignment).play(&requests, plan);
        assert!(played.outputs == expected.outputs);
        assert!(played.n_preempted > 0 && expected.outputs.iter().all(|output| !output.is_empty()));
    });
}

#[test]
fn grids_give_the_tokens_of_one_rank() {
    on_fake_cuda("grids_give_the_tokens_of_one_rank", &[("FAKE_CUDA_ORDER", "1")], || {
        let (assignment, requests) = (on_cuda(DEEP), short_requests(3));
        let expected = alone(&assignment, &requests);
        for (tp, pp) in [(2, 1), (3, 2)] {
            let layout = Layout::even(Grid { tp, pp, ep: 1 }, N_LAYERS).unwrap();
            let plan = Plan { chunk: 25, together: 3, turns: pp.into(), in_flight: usize::from(pp) + 1, ..Plan::ALONE };
            let mut grid = Threads::start(&loader(), &assignment, &layout);
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            grid.end();
            assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}");
        }
    });
}

/// One line of what `gpu_check` finds.
pub struct Finding {
    pub name: String,
    pub is_good: bool,
    pub told: serde_json::Value,
}

#[test]
fn nccl_carries_the_tokens_of_one_rank() {
    on_fake_cuda("nccl_carries_the_tokens_of_one_rank", &[], || {
        let (assignment, requests) = (on_cuda(DEEP), short_requests(3));
        let expected = alone(&assignment, &requests);
        let loader = ModelLoader { carrier: Carrier::Nccl, ..loader() };
        for (tp, pp) in [(2, 1), (1, 2), (2, 2)] {
            let layout = Layout::even(Grid { tp, pp, ep: 1 }, N_LAYERS).unwrap();
            let plan = Plan { chunk: 25, together: 3, turns: pp.into(), in_flight: usize::from(pp) + 1, ..Plan::ALONE };
            let mut grid = Threads::start(&loader, &assignment, &layout);
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            grid.end();
            assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}");
        }
    });
}

#[test]
fn what_gpu_check_looks_for_in_a_cluster_is_there() {
    on_fake_cuda("what_gpu_check_looks_for_in_a_cluster_is_there", &[], || {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference");
        let cache: PathBuf = std::env::temp_dir().join(format!("lockstep-gpu-check-{}", std::process::id()));
        let findings = gpu_check_cluster::check(&models, &cache, &gpu_check_cluster::TINY).unwrap();
        std::fs::remove_dir_all(&cache).unwrap();
        findings.iter().for_each(|Finding { name, told, .. }| println!("{name}: {told}"));
        assert!(findings.iter().all(|finding| finding.is_good));
        for part in ["beside the CPU", "nine together", "through the host", "through NCCL", "is gone"] {
            assert!(findings.iter().any(|finding| finding.name.contains(part)), "{part}");
        }
        assert!(findings.iter().all(|finding| finding.told.get("skipped").is_none()));
    });
}

#[test]
fn a_device_that_fails_is_an_error_of_its_step() {
    on_fake_cuda("a_device_that_fails_is_an_error_of_its_step", &[("FAKE_CUDA_FAIL_LAUNCH", "9")], || {
        let (mut runner, _) = loader().build(&on_cuda("llama-f32-tied")).unwrap();
        let request = Request { id: RequestId(1), prompt: [1, 2, 3].into(), ..Request::default() };
        let slice = Slice { id: request.id, range: 0..3, n_draft: 0, want: Want::Last };
        let step = Step {
            id: StepId(1),
            starts: vec![request],
            slices: vec![slice],
            blocks: vec![types::BlockId(0)],
            ..Step::default()
        };
        let failed = runner.run(&step, &mut StepDone::default());
        assert!(
            matches!(&failed, Err(RunError::Pass(why)) if why.to_string().contains("a kernel failed")),
            "{failed:?}"
        );
    });
}

/// Under which a device of this architecture computes the model.
fn digest(device: &str, pace: Pace) -> PolicyDigest {
    let assignment = on_cuda("llama-f32-tied");
    let weights = checkpoint::Checkpoint::open(&assignment.model_path).unwrap().digest();
    Numerics::plain(device, pace, "bf16", "bf16", weights).digest()
}

#[test]
fn another_architecture_is_another_policy() {
    on_fake_cuda("another_architecture_is_another_policy", &[("FAKE_CUDA_SM", "80")], || {
        let (_, ready) = loader().build(&on_cuda("llama-f32-tied")).unwrap();
        assert_eq!(ready.policy, digest("cuda/sm_80", Pace::Lockstep));
        assert_ne!(ready.policy, digest("cuda/sm_90", Pace::Lockstep));
    });
}

#[test]
fn under_fast_a_grid_serves_under_a_policy_of_its_own() {
    on_fake_cuda("under_fast_a_grid_serves_under_a_policy_of_its_own", &[], || {
        let (fast, requests) = (Assignment { pace: Pace::Fast, ..on_cuda(DEEP) }, short_requests(2));
        let loader = ModelLoader { carrier: Carrier::Nccl, ..loader() };
        let (_, ready) = loader.build(&Assignment { pace: Pace::Fast, ..on_cuda("llama-f32-tied") }).unwrap();
        assert_eq!(ready.policy, digest("cuda/sm_90", Pace::Fast));
        let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, N_LAYERS).unwrap();
        let mut grid = Threads::start(&loader, &fast, &layout);
        let played = Player::new(&mut grid, &fast).play(&requests, Plan { chunk: 40, ..Plan::ALONE });
        grid.end();
        assert!(played.outputs.iter().all(|output| !output.is_empty()));
        let on_cpu = Assignment { pace: Pace::Fast, ..assignment("llama-f32-tied") };
        let refused = ModelLoader::new(1).build(&on_cpu).err().unwrap();
        assert!(refused.to_string().contains("numerics other than lockstep on the CPU"), "{refused}");
    });
}

#[test]
fn what_does_not_fit_is_told() {
    on_fake_cuda("what_does_not_fit_is_told", &[("FAKE_CUDA_MIB", "16")], || {
        let failed = loader().build(&on_cuda("llama-f32-tied")).err().unwrap();
        assert!(matches!(&failed, LoadError::Model { .. }) && failed.to_string().contains("do not fit in memory"));
        let wrong = loader().build(&assignment("llama-f32-tied")).err().unwrap();
        assert!(wrong.to_string().contains("--activations bf16"), "{wrong}");
    });
}
