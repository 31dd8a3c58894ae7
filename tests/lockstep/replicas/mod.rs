//! Replicas behind one router: both serve, both give the same answers, and one continues when the other is gone.

mod mixed;
mod models;

use crate::common::node::{Node, PATIENCE, answer, field};
use serde_json::Value;
use std::time::{Duration, Instant};

const MODEL: &str = "tests/reference/llama-f32-tied";
const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];
const PROMPTS: [&str; 6] = ["hello", "a b c d", "the grid is the same", "x", "two of them", "one is enough"];

fn serve(more: &[&str]) -> Node {
    Node::start(&[&["serve", MODEL, "--activations", "f32"], &DOORS[..], more].concat())
}

/// A coordinator for one rank and its worker, and the coordinator's address.
fn replica() -> (Node, Node, String) {
    let mut coordinator = Node::start(&["coordinator", MODEL, "--activations", "f32", "--listen", "127.0.0.1:0"]);
    let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
    let worker = Node::start(&["worker", "--threads", "1", "--join", &address]);
    (coordinator, worker, address)
}

fn cluster(http: &str) -> Vec<Value> {
    let text = ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
    let page: Value = serde_json::from_str(&text).unwrap();
    page["replicas"].as_array().unwrap().clone()
}

fn until(what: &str, http: &str, holds: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let replicas = cluster(http);
        if holds(&replicas) {
            return replicas;
        }
        assert!(Instant::now() < deadline, "{what}: {replicas:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends all requests at the same time.
fn at_once(http: &str) -> Vec<Value> {
    std::thread::scope(|scope| {
        let clients: Vec<_> = PROMPTS.iter().map(|prompt| scope.spawn(|| answer(http, prompt))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

/// Sends requests at once, repeatedly, until every replica has served.
fn all_serve(http: &str, expect: &[Value]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert_eq!(at_once(http), expect);
        let tokens: Vec<u64> = cluster(http).iter().map(|replica| replica["tokens"].as_u64().unwrap()).collect();
        if tokens.iter().all(|n| *n > 0) {
            return;
        }
        assert!(Instant::now() < deadline, "one replica serves nothing: {tokens:?}");
    }
}

fn alone() -> Vec<Value> {
    let mut node = serve(&[]);
    let http = node.http();
    node.until_ready(&http);
    PROMPTS.iter().map(|prompt| answer(&http, prompt)).collect()
}

fn all_ready(replicas: &[Value]) -> bool {
    replicas.iter().all(|replica| replica["phase"] == "ready")
}

#[test]
fn replicas_of_one_process_answer_as_one_does() {
    let alone = alone();
    let mut both = serve(&["--replicas", "2", "--tp", "2"]);
    let http = both.http();
    let replicas = until("both are ready", &http, all_ready);
    assert_eq!(both.workers().len(), 4);
    let names: Vec<&str> = replicas.iter().map(|replica| replica["replica"].as_str().unwrap()).collect();
    assert_eq!(names, ["local-0", "local-1"]);
    all_serve(&http, &alone);
    let page = ureq::get(format!("{http}/metrics")).call().unwrap().body_mut().read_to_string().unwrap();
    for replica in names {
        let label = format!("replica=\"{replica}\"");
        let is_tokens_line =
            |line: &str| line.starts_with("lockstep:generation_tokens_total{") && line.contains(&label);
        assert!(page.lines().any(is_tokens_line), "{label} has no tokens in\n{page}");
    }
}

#[test]
fn a_router_goes_on_with_the_replica_that_is_left() {
    let alone = alone();
    let (mut one, _one, first) = replica();
    let (_two, _worker, second) = replica();
    let addresses = ["--coordinator", &first, "--coordinator", &second];
    let mut router = Node::start(&[&["router", MODEL], &addresses[..], &DOORS[..4]].concat());
    let http = router.http();
    let replicas = until("both are ready", &http, all_ready);
    assert_eq!(replicas.len(), 2);
    all_serve(&http, &alone);
    one.kill();
    let replicas = until("one is absent", &http, |replicas| replicas[0]["phase"] == "absent");
    assert_eq!(replicas[1]["phase"], "ready");
    router.until_ready(&http);
    assert_eq!(at_once(&http), alone);
}
