//! Too few workers: requests that cannot be computed end in time with a reason, those that fit on fewer ranks continue,
//! and a leaving worker reports its leave.

use super::{BINARY, MODEL, coordinator, pid, router, serve};
use crate::common::node::{Node, PATIENCE, post};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

fn cluster(http: &str) -> Value {
    let text = ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["replicas"][0].clone()
}

fn until(http: &str, node: &Node, fits: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let replica = cluster(http);
        if fits(&replica) {
            return replica;
        }
        assert!(Instant::now() < deadline, "never so: {replica}\n{}", node.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The status and the whole body of an answer.
fn answer(http: &str, more: Value) -> (u16, String) {
    let mut body = json!({ "prompt": "hello", "max_tokens": 30, "ignore_eos": true, "seed": 7 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut answer = post(http, &body);
    (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
}

#[test]
fn request_waits_at_most_failover_max_for_workers() {
    let more = ["--tp", "2", "--kv-memory", "8KiB", "--context", "64", "--failover-max", "3", "--replan-seconds", "1"];
    let mut grid = serve(&more);
    let http = grid.http();
    grid.until_ready(&http);
    kill_process(pid(grid.workers()[0]), Signal::STOP).unwrap();
    let begun = Instant::now();
    // Within a step that is never answered, whole and streamed; and after the placement has failed.
    let in_a_step = std::thread::scope(|scope| {
        let clients = [json!({}), json!({ "stream": true })].map(|more| scope.spawn(|| answer(&http, more)));
        until(&http, &grid, |replica| !replica["unplaced"].is_null());
        clients.map(|client| client.join().unwrap())
    });
    let known = [json!({}), json!({ "stream": true })].map(|more| answer(&http, more));
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    for ((status, text), is_streamed) in in_a_step.iter().chain(&known).zip([false, true, false, true]) {
        assert_eq!(*status, if is_streamed { 200 } else { 503 }, "{text}");
        for part in ["local", "cannot be placed", "--failover-max"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
    let why = until(&http, &grid, |replica| replica["unplaced"]["seconds"].as_u64() > Some(0))["unplaced"].clone();
    assert!(why["why"].as_str().unwrap().contains("a context of 64 needs"), "{why}");
    kill_process(pid(grid.workers()[0]), Signal::CONT).unwrap();
    grid.until_ready(&http);
    assert_eq!(answer(&http, json!({})).0, 200);
}

/// Figures are enough for a plan: no weight is read or fetched.
#[test]
fn a_model_is_planned_by_a_name_or_a_config() {
    let plan = |model: &str| {
        let sizes = ["--context", "512", "--kv-memory", "64MiB", "--activations", "f32", "--tp", "2"];
        let mut plan = Command::new(BINARY);
        // No hub answers at this address.
        plan.args(["plan", model]).args(sizes).env("HF_ENDPOINT", "http://127.0.0.1:9");
        let output = plan.output().unwrap();
        assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(plan("qwen3-0.6b").starts_with("qwen3-0.6b · "), "{}", plan("qwen3-0.6b"));
    let config = plan(&format!("{MODEL}/config.json"));
    assert!(config.contains("predicted: ") && config.contains("tp 2"), "{config}");
}

#[test]
fn fewer_ranks_carry_on_with_the_context_that_they_hold() {
    let sizes = ["--kv-memory", "8KiB", "--activations", "f32"];
    let plan = Command::new(BINARY).args(["plan", MODEL, "--tp", "2"]).args(sizes).output().unwrap();
    let plan = String::from_utf8(plan.stdout).unwrap();
    assert!(plan.contains("\nthe context is 64 instead of 512: a context of 512 needs"), "{plan}");

    let mut grid = serve(&["--tp", "2", "--kv-memory", "8KiB", "--failover-max", "60", "--replan-seconds", "1"]);
    let http = grid.http();
    grid.until(&["the context is 64 instead of 512"]);
    grid.until_ready(&http);
    let request = || answer(&http, json!({ "max_tokens": 20 }));
    let text = |(status, answer): (u16, String)| {
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str::<Value>(&answer).unwrap()["choices"].clone()
    };
    let expected = text(request());
    kill_process(pid(grid.workers()[0]), Signal::STOP).unwrap();
    // It waits for the lost worker's place, and then continues without it.
    assert_eq!(text(request()), expected);
    let replica = until(&http, &grid, |replica| replica["phase"] == "ready");
    assert_eq!((&replica["grid"]["tp"], &replica["shortened"]["has"]), (&json!(1), &json!(32)), "{replica}");
    let long = || answer(&http, json!({ "prompt": (10..50).collect::<Vec<u32>>(), "max_tokens": 4 }));
    let (status, refused) = long();
    assert!(status == 503 && refused.contains("the remaining ranks hold 32"), "{status} {refused}");
    kill_process(pid(grid.workers()[0]), Signal::CONT).unwrap();
    // The full grid with the whole context, and no further changes since then.
    let is_whole = |replica: &Value| replica["grid"]["tp"] == 2 && replica["shortened"].is_null();
    until(&http, &grid, |replica| replica["phase"] == "ready" && replica["context"] == 64 && is_whole(replica));
    assert_eq!(long().0, 200);
}

#[test]
fn terminated_worker_leaves_and_is_not_lost() {
    // A lost worker's place would be kept for an hour.
    let (mut coordinating, address) = coordinator(MODEL, &["--tp", "2", "--replan-seconds", "3600"]);
    let join = ["worker", "--threads", "1", "--local-workers", "2", "--join", &address];
    let (mut leaves, _stays) = (Node::start(&join), Node::start(&join));
    let mut router = router(&address);
    let answers = router.answers();
    kill_process(pid(leaves.pid()), Signal::TERM).unwrap();
    assert!(leaves.ended().success(), "{}", leaves.log());
    coordinating.until(&["a worker leaves"]);
    assert_eq!(router.answers(), answers);
    let http = router.http();
    until(&http, &coordinating, |replica| replica["grid"]["tp"] == 1 && replica["phase"] == "ready");
    assert!(!coordinating.log().contains("a worker is lost"), "{}", coordinating.log());
}
