//! The binary on GPUs. With a driver that runs kernels on an emulator it serves the same tokens with one rank and with
//! two. Without a driver it reports that in one line.

use crate::common::node::{BINARY, Folder, Node, answer, complete, field, post};
use crate::fake_cuda;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::process::{Command, Output};
use std::time::Duration;

const MODEL: &str = "tests/reference/llama-bf16-odd";
const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];

fn on_fake(arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).env("LD_LIBRARY_PATH", fake_cuda::folder());
    command
}

fn ran(mut command: Command) -> (Output, String) {
    let output = command.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

fn serve(kernels: &Folder, more: &[&str]) -> Node {
    let cache = ["--kernel-cache", kernels.0.to_str().unwrap(), "--context", "128", "--max-batch-tokens", "64"];
    let rest = ["--max-running", "4", "--device", "cuda"];
    Node::spawn(on_fake(&[&["serve", MODEL], &DOORS[..], &cache, &rest, more].concat()))
}

fn ranks(http: &str) -> Vec<Value> {
    let text = ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
    let page: Value = serde_json::from_str(&text).unwrap();
    page["replicas"][0]["ranks"].as_array().unwrap().clone()
}

#[test]
fn a_grid_of_gpus_answers_as_one_does() {
    let kernels = Folder::new("kernels");
    let mut one = serve(&kernels, &[]);
    let expected = one.answers();
    let http = one.http();
    assert_eq!(ranks(&http)[0]["device"], "cuda/sm_90");
    let (status, text) = ran(on_fake(&["status", "--url", &http]));
    assert!(status.status.success() && text.contains("cuda"), "{text}");
    assert_eq!(serve(&kernels, &["--tp", "2"]).answers(), expected);
    assert!(std::fs::read_dir(&kernels.0).unwrap().count() > 3, "kernels are kept");
}

#[test]
fn a_process_that_is_killed_while_devices_exchange_costs_no_token() {
    for (collective, log_line) in
        [("nccl", "devices exchange through NCCL"), ("ipc", "devices sum over each other's memory")]
    {
        killed_while_devices_exchange(collective, log_line);
    }
}

fn killed_while_devices_exchange(collective: &str, log_line: &str) {
    let kernels = Folder::new("killed-kernels");
    let mut grid = serve(&kernels, &["--tp", "2", "--collective", collective]);
    let http = grid.http();
    grid.until_ready(&http);
    grid.until(&[log_line]);
    let request = || complete(&http, &json!({"prompt": "and on", "max_tokens": 60, "seed": 3, "temperature": 0.8}));
    let whole = request();
    std::thread::scope(|scope| {
        let client = scope.spawn(request);
        // The checks below hold in any state that it has reached by then.
        std::thread::sleep(Duration::from_millis(500));
        let victim = Pid::from_raw(grid.workers()[1].cast_signed()).unwrap();
        kill_process(victim, Signal::KILL).unwrap();
        assert_eq!(client.join().unwrap(), whole);
    });
    grid.until(&["a worker process ended"]);
    assert_eq!(request(), whole);
}

/// The pool has twelve blocks, room for one prompt. The pages of the first come back from host memory.
#[test]
fn pages_in_host_memory_come_back_to_gpus() {
    let kernels = Folder::new("host-kernels");
    let small = ["--kv-memory", "48KiB", "--kv-host", "8MiB"];
    let mut node = serve(&kernels, &small);
    let http = node.http();
    node.until_ready(&http);
    let complete_prompt = |prompt: &str| {
        let request = json!({"prompt": prompt, "max_tokens": 4, "seed": 3, "temperature": 0.8, "logprobs": 2});
        let mut answer: Value =
            serde_json::from_str(&post(&http, &request).body_mut().read_to_string().unwrap()).unwrap();
        let fetched = answer["usage"]["prompt_tokens_details"]["cached_tokens_fetched"].as_u64().unwrap_or(0);
        (answer["choices"].take(), fetched)
    };
    let [long, second, third] =
        ["abcdefghijklmnopqrst", "zyxwvutsrqponmlkjihg", "01234567890123456789"].map(|of| of.repeat(5));
    let (expected, n_fetched) = complete_prompt(&long);
    assert_eq!(n_fetched, 0);
    [second, third].iter().for_each(|other| _ = complete_prompt(other));
    let (again, n_fetched) = complete_prompt(&long);
    assert!(again == expected && n_fetched >= 64, "{n_fetched} tokens from host memory: {again} {expected}");
}

#[test]
fn fast_numerics_are_used_and_logged() {
    let kernels = Folder::new("fast-kernels");
    let mut one = serve(&kernels, &["--numerics", "fast"]);
    let http = one.http();
    one.until_ready(&http);
    assert!(answer(&http, "hello")[0]["text"].is_string());
    one.until(&["cuBLASLt computes large products", "13.1.0"]);
}

#[test]
fn workers_of_one_gpu_divide_its_memory() {
    const MIB: u64 = 512;
    let kernels = Folder::new("shared-kernels");
    let listen = ["--listen", "127.0.0.1:0", "--context", "128", "--max-batch-tokens", "64", "--max-running", "4"];
    let mut coordinator =
        Node::start(&[&["coordinator", MODEL, "--device", "cuda", "--tp", "2"], &listen[..]].concat());
    let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
    let own = ["--device", "cuda", "--local-workers", "2", "--threads", "1", "--kernel-cache"];
    let arguments = [&["worker", "--join", &address], &own[..], &[kernels.0.to_str().unwrap()]].concat();
    let worker = || {
        let mut command = on_fake(&arguments);
        command.env("FAKE_CUDA_MIB", MIB.to_string());
        Node::spawn(command)
    };
    let _workers = [worker(), worker()];
    let mut router = Node::start(&[&["router", MODEL, "--coordinator", &address], &DOORS[..4]].concat());
    let http = router.http();
    router.until_ready(&http);
    let totals: Vec<u64> = ranks(&http).iter().map(|rank| rank["memory"]["total"].as_u64().unwrap()).collect();
    assert_eq!(totals, [(MIB << 20) / 2 / 100 * 88; 2]);
    assert!(answer(&http, "hello")[0]["text"].is_string());
}

#[test]
fn lone_worker_uses_its_configured_gpu() {
    let kernels = Folder::new("worker-kernels");
    let listen = ["--listen", "127.0.0.1:0", "--context", "128", "--max-batch-tokens", "64", "--max-running", "4"];
    // The coordinator receives the kind of its workers' device without a GPU of its own.
    let mut coordinator = Node::start(&[&["coordinator", MODEL, "--device", "cuda"], &listen[..]].concat());
    let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
    let own = ["--device", "cuda:0", "--threads", "1", "--kernel-cache", kernels.0.to_str().unwrap()];
    let _worker = Node::spawn(on_fake(&[&["worker", "--join", &address], &own[..]].concat()));
    let mut router = Node::start(&[&["router", MODEL, "--coordinator", &address], &DOORS[..4]].concat());
    let http = router.http();
    router.until_ready(&http);
    assert!(answer(&http, "hello")[0]["text"].is_string());
}

#[test]
fn devices_are_listed() {
    let (output, listing) = ran(on_fake(&["plan", "--devices"]));
    assert!(output.status.success());
    assert_eq!(ran(on_fake(&["status", "--devices"])).1, listing);
    for part in [
        "cpu  ",
        "driver for CUDA 13.0, 1 devices",
        "cuda:0  Emulated H100, sm_90, 132",
        "nvrtc   13.0",
        "nccl  ",
        "cublaslt 13.1.0",
    ] {
        assert!(listing.contains(part), "{part} is not in\n{listing}");
    }
    let (_, config) = ran(on_fake(&["serve", "--device", "auto", "--print-config"]));
    assert!(config.contains("device = \"cuda\"") && config.contains("kv-dtype = \"bf16\""), "{config}");
    let (_, plan) = ran(on_fake(&["plan", MODEL, "--device", "cuda"]));
    assert!(plan.contains("predicted") && plan.contains("cuda:0  Emulated H100"), "{plan}");
}

#[test]
fn missing_device_is_reported_in_a_line() {
    let absent = [
        (on_fake(&["serve", MODEL, "--device", "cuda:7"]), "there is no device 7"),
        (on_fake(&["serve", MODEL, "--device", "gpu"]), "is not a device: give auto, cpu, cuda, cuda:N or sim"),
    ];
    let mut absent: Vec<(Command, &str)> = absent.into();
    if worker::Driver::find().is_err() {
        for command in ["serve", "plan"] {
            let mut without = Command::new(BINARY);
            without.args([command, MODEL, "--device", "cuda"]).current_dir(env!("CARGO_MANIFEST_DIR"));
            absent.push((without, "no CUDA: "));
        }
        let mut auto = Command::new(BINARY);
        auto.args(["serve", "--device", "auto", "--print-config"]);
        assert!(ran(auto).1.contains("device = \"cpu\""));
    }
    for (command, why) in absent {
        let what = format!("{command:?}");
        let (output, text) = ran(command);
        assert!(!output.status.success() && text.contains(why), "{what}: {text}");
        assert!(!text.contains("panicked"), "{what}: {text}");
    }
}
