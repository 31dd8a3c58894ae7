//! Two models, one of them in two versions, behind one router: each name gives the answers of its own model.

use super::{DOORS, cluster};
use crate::common::node::{BINARY, Folder, Node, PATIENCE, complete, field, post};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

const FIRST: &str = "tests/reference/llama-f32-tied";
const SECOND: &str = "tests/reference/llama-f32-rope3";
/// The KV cache type is part of the policy: another digest, and other tokens.
const VERSIONS: [(&str, &str, &str); 3] = [("v1", FIRST, "f16"), ("v2", FIRST, "f32"), ("rope", SECOND, "f16")];

/// A coordinator and its worker, and the coordinator's address.
fn replica((name, model, kv): (&str, &str, &str)) -> (Node, Node, String) {
    let served = ["--served-model-name", name, "--activations", "f32", "--kv-dtype", kv, "--listen", "127.0.0.1:0"];
    let mut coordinator = Node::start(&[&["coordinator", model], &served[..]].concat());
    let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
    let worker = Node::start(&["worker", "--threads", "1", "--join", &address]);
    (coordinator, worker, address)
}

fn request(model: &str, seed: u64) -> Value {
    let prompt = "the same words";
    json!({ "model": model, "prompt": prompt, "max_tokens": 12, "seed": seed, "temperature": 0.8, "logprobs": 2 })
}

fn alone((_, model, kv): (&str, &str, &str), seeds: &[u64]) -> Vec<Value> {
    let serve = ["serve", model, "--served-model-name", "m", "--activations", "f32", "--kv-dtype", kv];
    let mut node = Node::start(&[&serve[..], &DOORS].concat());
    let http = node.http();
    node.until_ready(&http);
    seeds.iter().map(|seed| complete(&http, &request("m", *seed))).collect()
}

fn text(http: &str, path: &str) -> String {
    ureq::get(format!("{http}{path}")).call().unwrap().body_mut().read_to_string().unwrap()
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn routed_models_and_versions_answer_as_alone() {
    let seeds: Vec<u64> = (0..10).collect();
    let [first, second, rope] = VERSIONS.map(|version| alone(version, &seeds));
    assert!(first != second && first != rope, "the models give the same answers");
    let replicas = VERSIONS.map(replica);
    let folder = Folder::new("routes");
    let routes = folder.write("routes", "# a canary\nchat = v1:50, v2:50\n");
    let behind: Vec<&str> = replicas.iter().flat_map(|(_, _, address)| ["--coordinator", address]).collect();
    let text_of = format!("rope={SECOND}");
    let named = ["router", FIRST, "--served-model-name", "v1", "--text", &text_of, "--routes", &routes];
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let mut router = Node::start(&[&named[..], &doors, &behind].concat());
    let http = router.http();
    until("all are ready", || cluster(&http).iter().all(|replica| replica["phase"] == "ready"));
    let all = |model: &str| seeds.iter().map(|seed| complete(&http, &request(model, *seed))).collect::<Vec<_>>();
    assert_eq!(all("v1"), first);
    assert_eq!(all("rope"), rope);
    let split = all("chat");
    let of_first = split.iter().zip(&first).filter(|(routed, alone)| routed == alone).count();
    let of_second = split.iter().zip(&second).filter(|(routed, alone)| routed == alone).count();
    assert_eq!((of_first, of_second), (5, 5));
    // The canary has served.
    folder.write("routes", "chat = v1:0, v2:1\n");
    router.until(&["the routes were read again"]);
    assert_eq!(all("chat"), second);
    folder.write("routes", "chat = v1:\n");
    router.until(&["the routes stay unchanged"]);
    assert_eq!(all("chat"), second);
    let refused = post(&http, &request("v3", 0));
    assert_eq!(refused.status(), 404);
    let metrics = text(&http, "/metrics");
    let labels = "gen_ai_request_model=\"chat\",gen_ai_response_model=\"v2\"";
    assert!(metrics.contains(labels) && metrics.contains("model_name=\"chat\""), "{metrics}");
    let status = Command::new(BINARY).args(["status", "--url", &http]).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    let line = status.lines().find(|line| line.starts_with("chat = v1@")).unwrap_or_else(|| panic!("{status}"));
    assert!(line.contains(":0 (1 of 1 ready), v2@") && line.ends_with(":1 (1 of 1 ready)"), "{line}");
}

#[test]
fn what_cannot_be_meant_is_refused_at_the_start() {
    let folder = Folder::new("bad-routes");
    let routes = folder.write("routes", "chat = v1\nchat = v2\n");
    let check = |more: &[&str], part: &str| {
        let start = ["router", FIRST, "--coordinator", "127.0.0.1:1"];
        let refused = Command::new(BINARY).args(start).args(DOORS_OF_ROUTER).args(more).output().unwrap();
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && message.contains(part), "{more:?}: {message}");
    };
    check(&["--route", "chat"], "--route chat: a line is");
    check(&["--route", "chat=v1:0"], "have weight 0");
    check(&["--route", "chat=v1", "--route", "chat=v2"], "an earlier line already has `chat`");
    check(&["--routes", &routes], "line 2: an earlier line already has `chat`");
    check(&["--routes", "/nowhere"], "/nowhere");
    check(&["--routes", &routes, "--route", "chat=v1"], "--route or --routes");
    check(&["--text", "/nowhere.gguf"], "--text /nowhere.gguf");
    check(&["--served-model-name", "v1", "--text", &format!("v1={SECOND}")], "already has a tokenizer");
}

const DOORS_OF_ROUTER: [&str; 4] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
