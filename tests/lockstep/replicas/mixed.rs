//! A chat model, an encoder and a ranker behind one router: 500 requests for embeddings, ranks, classes and decisions
//! have equal bits alone, warm, beside 32 streams, on grids, and over a lost worker of each model.

use super::cluster;
use crate::common::node::{Node, PATIENCE, field};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The served name and the folder of each model.
const MODELS: [(&str, &str); 3] = [
    ("chat", "tests/reference/llama-f32-tied"),
    ("embed", "tests/reference/nomic-bert"),
    ("rank", "tests/reference/bert-rank"),
];
const REQUESTS: usize = 500;
const CLIENTS: usize = 8;
const STREAMS: usize = 32;
/// The request at whose start a worker of each model is killed.
const KILLED_AT: usize = 200;

/// A coordinator for each model with its workers, and a router.
struct ThreeModels {
    _coordinators: Vec<Node>,
    addresses: Vec<String>,
    /// Of each model, one after the other.
    workers: Mutex<Vec<Node>>,
    _router: Node,
    http: String,
}

impl ThreeModels {
    fn start(grid: &[&str], n_workers: usize) -> ThreeModels {
        let (mut coordinators, mut workers, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
        for (name, model) in MODELS {
            let served = ["--served-model-name", name, "--activations", "f32", "--listen", "127.0.0.1:0"];
            let mut coordinator = Node::start(&[&["coordinator", model], &served[..], grid].concat());
            let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
            coordinators.push(coordinator);
            workers.extend((0..n_workers).map(|_| worker(&address)));
            addresses.push(address);
        }
        let texts = MODELS.map(|(name, model)| format!("{name}={model}"));
        let named =
            ["router", MODELS[0].1, "--served-model-name", MODELS[0].0, "--text", &texts[1], "--text", &texts[2]];
        let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
        let behind: Vec<&str> = addresses.iter().flat_map(|address| ["--coordinator", address]).collect();
        let mut router = Node::start(&[&named[..], &doors, &behind].concat());
        let http = router.http();
        let deadline = Instant::now() + PATIENCE;
        while !cluster(&http).iter().all(|replica| replica["phase"] == "ready") {
            assert!(Instant::now() < deadline, "all are ready");
            std::thread::sleep(Duration::from_millis(50));
        }
        ThreeModels { _coordinators: coordinators, addresses, workers: workers.into(), _router: router, http }
    }

    /// Kills the first worker of each model, and starts another one.
    fn kill_workers(&self) {
        let mut workers = self.workers.lock().unwrap();
        let n_each = workers.len() / MODELS.len();
        for (i, address) in self.addresses.iter().enumerate() {
            let killed = &mut workers[i * n_each];
            killed.kill();
            *killed = worker(address);
        }
    }
}

fn worker(address: &str) -> Node {
    Node::start(&["worker", "--threads", "1", "--join", address])
}

fn request(i: usize) -> (&'static str, Value) {
    let words = ["cats", "are", "pets", "which", "sleep", "all", "day", "and", "most", "nights"];
    let word = |j: usize| words[(i * 7 + i / 10 + j * (i % 3 + 1)) % words.len()];
    let text = |n: usize| format!("{i} {}", (0..n).map(word).collect::<Vec<_>>().join(" "));
    let documents = || [text(1), text(9), text(4)];
    match i % 10 {
        0 | 1 => ("/v1/embeddings", json!({ "model": "embed", "input": text(1 + i % 40) })),
        2 => ("/v1/embeddings", json!({ "model": "embed", "input": documents(), "encoding_format": "base64" })),
        3 => ("/v1/embeddings", json!({ "model": "embed", "input": text(60), "truncate_prompt_tokens": 1 + i % 50 })),
        4 => ("/v1/rerank", json!({ "model": "rank", "query": text(3), "documents": documents() })),
        5 => ("/v1/score", json!({ "model": "rank", "text_1": text(2), "text_2": documents() })),
        6 => ("/classify", json!({ "model": "rank", "input": documents() })),
        7 => ("/v1/score", json!({ "model": "embed", "text_1": text(5), "text_2": documents() })),
        8 => ("/pooling", json!({ "model": "chat", "input": text(12) })),
        _ => (
            "/v1/decisions",
            json!({ "model": "chat", "input": text(20), "questions": [
            { "type": "predicate", "instructions": text(4) },
            { "type": "score", "instructions": "How?", "levels": [{ "label": "low" }, { "label": "high" }] },
        ] }),
        ),
    }
}

/// The reply without what differs between equal requests: ids, times, and which tokens a cache had.
fn reply(http: &str, i: usize) -> Value {
    let (page, body) = request(i);
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let sent = agent.post(format!("{http}{page}")).header("content-type", "application/json");
    let text = sent.send(body.to_string()).unwrap().body_mut().read_to_string().unwrap();
    let mut value: Value = serde_json::from_str(&text).unwrap();
    assert!(value["error"].is_null(), "{page} {body}: {value}");
    for name in ["id", "created", "usage"] {
        value.as_object_mut().unwrap().remove(name);
    }
    value
}

/// All replies, by several clients at once. `at` runs before the request of that number.
fn replies(http: &str, at: &(dyn Fn(usize) + Sync)) -> Vec<Value> {
    let next = AtomicUsize::new(0);
    let client = || {
        let mut own = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= REQUESTS {
                return own;
            }
            at(i);
            own.push((i, reply(http, i)));
        }
    };
    let mut all: Vec<(usize, Value)> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, value)| value).collect()
}

/// The same while streams of chats run, one after another in each of several threads.
fn beside_streams(http: &str, at: &(dyn Fn(usize) + Sync)) -> Vec<Value> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for i in 0..STREAMS {
            let is_over = &is_over;
            scope.spawn(move || {
                let body = json!({ "model": "chat", "prompt": format!("hello {i}"), "max_tokens": 60,
                    "ignore_eos": true, "stream": true, "seed": i });
                while !is_over.load(Ordering::Relaxed) {
                    let sent = ureq::post(format!("{http}/v1/completions")).header("content-type", "application/json");
                    let text = sent.send(body.to_string()).unwrap().body_mut().read_to_string().unwrap();
                    assert!(text.contains("[DONE]"), "{text}");
                }
            });
        }
        let all = replies(http, at);
        is_over.store(true, Ordering::Relaxed);
        all
    })
}

fn check(way: &str, got: &[Value], expected: &[Value]) {
    let differing: Vec<usize> = (0..REQUESTS).filter(|i| got[*i] != expected[*i]).collect();
    assert!(differing.is_empty(), "{way}: {differing:?} differ, the first from {:?}", expected[differing[0]]);
}

#[test]
fn mixed_requests_have_equal_bits_everywhere() {
    let nothing = |_: usize| {};
    let plain = ThreeModels::start(&[], 1);
    let expected: Vec<Value> = (0..REQUESTS).map(|i| reply(&plain.http, i)).collect();
    let distinct: HashSet<String> = expected.iter().map(Value::to_string).collect();
    assert!(distinct.len() > REQUESTS / 3, "only {} replies are distinct", distinct.len());
    check("warm", &replies(&plain.http, &nothing), &expected);
    check("beside streams", &beside_streams(&plain.http, &nothing), &expected);
    drop(plain);
    for (way, grid) in [("tp 2", ["--tp", "2"]), ("pp 2", ["--pp", "2"])] {
        let cluster = ThreeModels::start(&grid, 2);
        check(way, &replies(&cluster.http, &nothing), &expected);
        let kill = |i: usize| {
            if i == KILLED_AT {
                cluster.kill_workers();
            }
        };
        check(&format!("{way}, losses"), &beside_streams(&cluster.http, &kill), &expected);
    }
}
