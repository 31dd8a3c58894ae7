//! Ranks on CUDA's kernels, over a driver that runs them on an emulator: tokens and logprobs are the same alone,
//! together, preempted and on every grid, bit for bit, and a device that fails is an error of its step.

use crate::common::grid::Threads;
use crate::common::{Alone, Plan, Played, Player, assignment, requests};
use crate::fake_cuda::{is_inside, on_fake_cuda};
use crate::parts;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use types::{
    Activations, Grid, KvDtype, Layout, Numerics, NumericsMode, PolicyDigest, Request, RequestId, Slice, Step,
    StepDone, StepId, Want,
};
use worker::{Assignment, CarrierChoice, ComputeDevice, LoadError, ModelLoader, RunError, Runner};

const DEEP: &str = "llama-deep.gguf";
const N_LAYERS: u32 = 5;

pub fn loader() -> ModelLoader {
    ModelLoader { device: ComputeDevice::Cuda { ordinal: 0, cache: None }, spin: false, ..ModelLoader::new(1) }
}

pub fn on_cuda(name: &str) -> Assignment {
    Assignment { activations: Activations::Bf16, kv_dtype: KvDtype::Bf16, ..assignment(name) }
}

/// Returns short requests: the emulator takes a thousand times as long as a device.
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
            let layout = Layout::even(Grid { tp, pp }, N_LAYERS).unwrap();
            let plan = Plan { chunk: 25, together: 3, turns: pp.into(), in_flight: usize::from(pp) + 1, ..Plan::ALONE };
            let mut grid = Threads::start(&loader(), &assignment, &layout);
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            grid.end();
            assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}");
        }
    });
}

/// Rows that ranks exchange for a norm, sinks, and experts with biases.
#[test]
fn families_on_grids_give_the_tokens_of_one_rank() {
    on_fake_cuda("families_on_grids_give_the_tokens_of_one_rank", &[], || {
        let host = CarrierChoice::Host;
        for (name, carrier) in [("olmo2", host), ("olmo2", CarrierChoice::Nccl), ("gpt-oss", host)] {
            let (assignment, mut requests) = (on_cuda(name), short_requests(2));
            requests.iter_mut().flat_map(|request| &mut request.prompt).for_each(|token| *token %= 264);
            let expected = alone(&assignment, &requests);
            let layout = Layout::even(Grid { tp: 2, pp: 1 }, 2).unwrap();
            let plan = Plan { chunk: 25, together: 2, in_flight: 2, ..Plan::ALONE };
            let mut grid = Threads::start(&ModelLoader { carrier, ..loader() }, &assignment, &layout);
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            grid.end();
            assert!(played.outputs == expected.outputs, "{name} over {carrier:?}");
        }
    });
}

#[test]
fn nccl_carries_the_tokens_of_one_rank() {
    on_fake_cuda("nccl_carries_the_tokens_of_one_rank", &[], || {
        let (assignment, requests) = (on_cuda(DEEP), short_requests(3));
        let expected = alone(&assignment, &requests);
        let loader = ModelLoader { carrier: CarrierChoice::Nccl, ..loader() };
        for (tp, pp) in [(2, 1), (1, 2), (2, 2)] {
            let layout = Layout::even(Grid { tp, pp }, N_LAYERS).unwrap();
            let plan = Plan { chunk: 25, together: 3, turns: pp.into(), in_flight: usize::from(pp) + 1, ..Plan::ALONE };
            let mut grid = Threads::start(&loader, &assignment, &layout);
            let played = Player::new(&mut grid, &assignment).play(&requests, plan);
            grid.end();
            assert!(played.outputs == expected.outputs, "tp {tp}, pp {pp}");
        }
    });
}

/// Names the groups that a process of the test below runs, a line each.
const GROUPS: &str = "LOCKSTEP_TEST_GPU_CHECK_GROUPS";
const PATIENCE: Duration = Duration::from_secs(3600);

fn gpu_check_options() -> parts::Options {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference");
    parts::Options { models, cache: std::env::temp_dir().join("lockstep-gpu-check-of-tests"), is_tiny: true }
}

/// Returns all findings of `gpu_check` for these parts, as it writes them. Its processes are those of the test after
/// this one.
fn gpu_check(of: &[&str]) -> (bool, serde_json::Value) {
    gpu_check_within(PATIENCE, of)
}

fn gpu_check_within(limit: Duration, of: &[&str]) -> (bool, serde_json::Value) {
    let out = std::env::temp_dir().join(format!("lockstep-gpu-check-{}/page.json", std::process::id()));
    let again = |groups: &[String]| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["cuda::groups_of_gpu_check_are_a_process", "--exact", "--nocapture"])
            .env(GROUPS, groups.join("\n"));
        Ok(command)
    };
    let of: Vec<String> = of.iter().map(|part| (*part).to_owned()).collect();
    let is_good = parts::run(&of, &gpu_check_options(), &out, limit, again).unwrap();
    let page = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    std::fs::remove_dir_all(out.parent().unwrap()).unwrap();
    (is_good, page)
}

#[test]
fn groups_of_gpu_check_are_a_process() {
    if let Ok(groups) = std::env::var(GROUPS) {
        parts::run_here(&groups.lines().collect::<Vec<_>>(), &gpu_check_options()).unwrap();
    }
}

/// The kernels that a pass over the fake libraries never reaches: a path without cuBLASLt.
const NOT_LAUNCHED: [&str; 3] = ["linear_plain_r64", "linear_f8plain_r64", "linear_plain_r128"];

#[test]
fn gpu_check_finds_all_good_and_launches_every_kernel() {
    let trace = std::env::temp_dir().join(format!("lockstep-gpu-check-trace-{}", std::process::id()));
    let screws = [("FAKE_CUDA_TRACE", trace.to_str().unwrap())];
    on_fake_cuda("gpu_check_finds_all_good_and_launches_every_kernel", &screws, || {
        // The folder may be absent, or other tests may be about to create it anew.
        let _gone = std::fs::remove_dir_all(gpu_check_options().cache);
        let (is_good, page) = gpu_check(&parts::PARTS);
        assert!(is_good && page["good"] == true && page["whole"] == true, "{page:#}");
        let findings = page["findings"].as_array().unwrap();
        assert!(findings.iter().all(|finding| finding["outcome"] != "not run"), "{page:#}");
        // A process takes seconds on a device, and there are some seventy groups.
        let processes = parts::PARTS.map(|part| page["parts"][part]["processes"].as_u64().unwrap());
        assert_eq!(processes, [3, 2, 3], "{page:#}");
        for name in [
            "opened",
            "product with Q6K",
            "gate and up of BF16",
            "sequences up to",
            "fast planes",
            "beside the CPU",
            "nine together",
            "tp 2 x pp 2 through NCCL",
            "is gone, through the host",
            "copies within",
            "fast: 1 sequences decode",
            "four bits beside bf16",
            "device idle",
            "lockstep's share",
            "down of 40 rows",
            "attention of a prompt",
            "lockstep: throughput",
        ] {
            let is_there = |finding: &serde_json::Value| finding["name"].as_str().unwrap().contains(name);
            assert!(findings.iter().any(is_there), "{name} is not in {page:#}");
        }
    });
    // The process over the fake driver wrote it, and its parent process reads it.
    if !is_inside() {
        let log = std::fs::read_to_string(&trace).unwrap();
        let launched: BTreeSet<&str> = log.lines().filter_map(|line| line.strip_prefix("launch ")).collect();
        let missing: Vec<&str> = backend::cuda::kernel_names().filter(|name| !launched.contains(name)).collect();
        assert_eq!(missing, NOT_LAUNCHED, "gpu_check launches all kernels but these");
        let mut compiled: Vec<&str> = log.lines().filter_map(|line| line.strip_prefix("compile ")).collect();
        compiled.sort_unstable();
        assert!(compiled.windows(2).all(|two| two[0] != two[1]), "all processes share what is compiled: {compiled:?}");
        std::fs::remove_file(&trace).unwrap();
    }
}

#[test]
fn gpu_check_reports_every_group_of_failing_device() {
    let name = "gpu_check_reports_every_group_of_failing_device";
    on_fake_cuda(name, &[("FAKE_CUDA_FAIL_LAUNCH", "2")], || {
        let (is_good, page) = gpu_check(&["kernels"]);
        let findings = page["findings"].as_array().unwrap();
        assert!(!is_good && page["good"] == false && page["whole"] == true, "{page:#}");
        let is_reported = |finding: &&serde_json::Value| {
            finding["outcome"] == "WRONG" && finding["details"]["why"].to_string().contains("a kernel failed")
        };
        // Nothing is launched when a device is opened.
        let n_groups = parts::kernels::groups(&gpu_check_options()).len();
        assert_eq!(findings.iter().filter(is_reported).count(), n_groups - 1, "{page:#}");
        // The first group fails behind a good one. Each of the others has a device without an earlier failure.
        assert_eq!(page["parts"]["kernels"]["processes"], n_groups as u64 - 1, "{page:#}");
    });
}

#[test]
fn gpu_check_writes_its_page_when_the_time_is_over() {
    let name = "gpu_check_writes_its_page_when_the_time_is_over";
    // On any machine, however fast, one kernel does not end.
    on_fake_cuda(name, &[("FAKE_CUDA_HANG_LAUNCH", "40")], || {
        let begun = Instant::now();
        let (is_good, page) = gpu_check_within(Duration::from_secs(8), &["kernels", "bench"]);
        assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
        assert!(!is_good && page["good"] == true && page["whole"] == false, "{page:#}");
        let findings = page["findings"].as_array().unwrap();
        let n_groups =
            parts::kernels::groups(&gpu_check_options()).len() + parts::bench::groups(&gpu_check_options()).len();
        assert!(findings.len() >= n_groups, "each group has a result: {page:#}");
        let is_left = |finding: &&serde_json::Value| {
            finding["outcome"] == "not run"
                && finding["details"]["why"].to_string().contains("the time for its part was over")
        };
        let of_bench = findings.iter().filter(|finding| finding["part"] == "bench").collect::<Vec<_>>();
        assert!(!of_bench.is_empty() && of_bench.iter().all(is_left), "{page:#}");
    });
}

#[test]
fn gpu_check_measures_nothing_that_has_no_room() {
    on_fake_cuda("gpu_check_measures_nothing_that_has_no_room", &[("FAKE_CUDA_MIB", "34")], || {
        let (is_good, page) = gpu_check(&["bench/decode"]);
        let last = page["findings"].as_array().unwrap().last().unwrap();
        let why = last["details"]["why"].as_str().unwrap();
        assert!(is_good && last["outcome"] == "not run" && why.contains("do not fit in memory"), "{page:#}");
    });
}

#[test]
fn gpu_check_runs_nothing_that_this_machine_lacks_something_for() {
    let name = "gpu_check_runs_nothing_that_this_machine_lacks_something_for";
    on_fake_cuda(name, &[("FAKE_NCCL_VERSION", "22703")], || {
        let (is_good, page) = gpu_check(&["cluster/grids through NCCL", "cluster/a rank is gone, through NCCL"]);
        let findings = page["findings"].as_array().unwrap();
        let why = "2 ranks share 1 devices, but NCCL 2.27.3 cannot share a device: 2.30.0 can";
        assert!(is_good && findings.len() == 4, "{page:#}");
        assert!(findings.iter().all(|finding| finding["outcome"] == "not run"), "{page:#}");
        assert_eq!(findings[0]["details"]["why"], why);
    });
}

#[test]
fn a_device_that_fails_is_an_error_of_its_step() {
    on_fake_cuda("a_device_that_fails_is_an_error_of_its_step", &[("FAKE_CUDA_FAIL_LAUNCH", "9")], || {
        let (mut runner, _) = loader().build(&on_cuda("llama-f32-tied")).unwrap();
        let request = Request { id: RequestId(1), prompt: [1, 2, 3].into(), ..Request::default() };
        let slice = Slice::new(request.id, 0..3, Want::Last);
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

/// Returns the policy under which a device of this architecture computes the model.
fn digest(device: &str, mode: NumericsMode) -> PolicyDigest {
    let assignment = on_cuda("llama-f32-tied");
    let weights = checkpoint::Checkpoint::open(&assignment.model_path).unwrap().fingerprint().unwrap();
    Numerics::plain(&device.parse().unwrap(), mode, Activations::Bf16, KvDtype::Bf16, weights).digest()
}

#[test]
fn another_architecture_is_another_policy() {
    on_fake_cuda("another_architecture_is_another_policy", &[("FAKE_CUDA_SM", "80")], || {
        let (_, ready) = loader().build(&on_cuda("llama-f32-tied")).unwrap();
        assert_eq!(ready.policy, digest("cuda/sm_80", NumericsMode::Lockstep));
        assert_ne!(ready.policy, digest("cuda/sm_90", NumericsMode::Lockstep));
    });
}

#[test]
fn under_fast_a_grid_serves_under_a_policy_of_its_own() {
    on_fake_cuda("under_fast_a_grid_serves_under_a_policy_of_its_own", &[], || {
        let (fast, requests) = (Assignment { mode: NumericsMode::Fast, ..on_cuda(DEEP) }, short_requests(2));
        let loader = ModelLoader { carrier: CarrierChoice::Nccl, ..loader() };
        let (_, ready) = loader.build(&Assignment { mode: NumericsMode::Fast, ..on_cuda("llama-f32-tied") }).unwrap();
        assert_eq!(ready.policy, digest("cuda/sm_90", NumericsMode::Fast));
        let layout = Layout::even(Grid { tp: 2, pp: 1 }, N_LAYERS).unwrap();
        let mut grid = Threads::start(&loader, &fast, &layout);
        let played = Player::new(&mut grid, &fast).play(&requests, Plan { chunk: 40, ..Plan::ALONE });
        grid.end();
        assert!(played.outputs.iter().all(|output| !output.is_empty()));
        let on_cpu = Assignment { mode: NumericsMode::Fast, ..assignment("llama-f32-tied") };
        let refused = ModelLoader::new(1).build(&on_cpu).err().unwrap();
        assert!(refused.to_string().contains("numerics other than lockstep on the CPU"), "{refused}");
    });
}

#[test]
fn a_gpu_reads_the_bytes_that_a_processor_reads() {
    on_fake_cuda("a_gpu_reads_the_bytes_that_a_processor_reads", &[], || {
        let (_, there) = loader().build(&on_cuda("llama-f32-tied")).unwrap();
        let (_, here) = ModelLoader::new(1).build(&assignment("llama-f32-tied")).unwrap();
        assert!(!here.weights.is_empty());
        assert_eq!(there.weights, here.weights);
    });
}

#[test]
fn model_beyond_device_memory_is_an_error() {
    on_fake_cuda("model_beyond_device_memory_is_an_error", &[("FAKE_CUDA_MIB", "16")], || {
        let failed = loader().build(&on_cuda("llama-f32-tied")).err().unwrap();
        assert!(matches!(&failed, LoadError::Model { .. }) && failed.to_string().contains("do not fit in memory"));
        let wrong = loader().build(&assignment("llama-f32-tied")).err().unwrap();
        assert!(wrong.to_string().contains("--activations bf16"), "{wrong}");
    });
}
