//! The memory of the KV cache grows under load and shrinks afterwards, and the tokens are those of a cache with all of
//! its memory from the start.

use crate::common::node::{Node, PATIENCE, complete};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MODEL: &str = "tests/reference/llama-f32-tied";
const N_PROMPTS: usize = 24;

fn serve(kv_commit: &str, tp: &str) -> (Node, String) {
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let memory = ["--kv-commit", kv_commit, "--kv-memory", "24MiB", "--prefix-cache", "false"];
    let mut node = Node::start(&[&["serve", MODEL, "--tp", tp, "--threads", "1"][..], &doors, &memory].concat());
    let http = node.http();
    node.until_ready(&http);
    (node, http)
}

/// Answers to long prompts that run at once.
fn answers(http: &str) -> Vec<Value> {
    let answer = |i: usize| {
        let prompt = format!("{i} of many ").repeat(28);
        complete(http, &json!({ "prompt": prompt, "max_tokens": 24, "seed": i, "temperature": 0.8, "logprobs": 1 }))
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..N_PROMPTS).map(|i| scope.spawn(move || answer(i))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn n_committed(http: &str) -> (u64, u64) {
    let page = ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
    let page: Value = serde_json::from_str(&page).unwrap();
    let blocks = &page["replicas"][0]["blocks"];
    (blocks["committed"].as_u64().unwrap(), blocks["total"].as_u64().unwrap())
}

/// Waits until so many blocks have memory.
fn until(http: &str, what: &str, holds: impl Fn(u64) -> bool) -> u64 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (committed, total) = n_committed(http);
        if holds(committed) {
            return committed;
        }
        assert!(Instant::now() < deadline, "{what} never: {committed} of {total} blocks have memory");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_cache_that_grows_and_shrinks_gives_the_tokens_of_one_that_has_all() {
    let (_all, http) = serve("all", "1");
    let expect = answers(&http);
    let total = n_committed(&http).1;
    until(&http, "all of it", |committed| committed == total);
    for (tp, n_rounds) in [("2", 1), ("1", 2)] {
        let (_grows, http) = serve("grow", tp);
        let total = n_committed(&http).1;
        let idle = until(&http, "a beginning", |committed| committed > 0);
        assert!(idle * 3 < total, "{idle} of {total} blocks");
        for round in 0..n_rounds {
            if round > 0 {
                until(&http, "a release of unused memory", |committed| committed < total / 8);
            }
            assert_eq!(answers(&http), expect, "tp {tp}, round {round}");
            let grown = until(&http, "growth", |committed| committed > total / 8);
            assert!(grown > 2 * idle, "{grown} of {total} blocks, and {idle} at first");
        }
    }
}
