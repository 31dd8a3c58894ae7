//! Processes of clusters that find each other through etcd: a new process is found, a leaving one is removed, and an
//! outage of etcd only delays both.

use crate::common::node::{Node, PATIENCE, answer, field, post};
use crate::etcd::Etcd;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

/// A model whose context has room for a stream long enough to be interrupted.
const MODEL: &str = "tests/reference/llama-f32-rope3";
const LEASE_SECONDS: u64 = 2;
const PROMPTS: [&str; 4] = ["hello", "a b c d", "the store is away", "x"];

/// The flags for the store.
fn store(etcd: &Etcd) -> [String; 4] {
    let seconds = LEASE_SECONDS.to_string();
    ["--etcd-endpoints".into(), etcd.endpoints().join(","), "--etcd-lease-seconds".into(), seconds]
}

fn start(role: &[&str], store: &[String]) -> Node {
    let store: Vec<&str> = store.iter().map(String::as_str).collect();
    Node::start(&[role, &store[..]].concat())
}

/// Starts a coordinator, which has no claim while etcd is away.
fn coordinator(replica: &str, store: &[String]) -> Node {
    start(&["coordinator", MODEL, "--activations", "f32", "--listen", "127.0.0.1:0", "--replica", replica], store)
}

/// Starts the coordinator's worker, as soon as it has its claim.
fn worker(coordinator: &mut Node) -> Node {
    let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
    Node::start(&["worker", "--threads", "1", "--join", &address])
}

fn page(http: &str) -> Value {
    let text = ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
    serde_json::from_str(&text).unwrap()
}

fn until(what: &str, http: &str, holds: impl Fn(&Value) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let page = page(http);
        if holds(&page) {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {page}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether exactly these replicas are listed, and all are ready.
fn are(page: &Value, names: &[&str]) -> bool {
    let replicas = page["replicas"].as_array().unwrap();
    let is_ready = |name: &&str| replicas.iter().any(|of| of["replica"] == **name && of["phase"] == "ready");
    replicas.len() == names.len() && names.iter().all(is_ready)
}

/// Sends requests at once, repeatedly, until all replicas have served.
fn all_serve(http: &str, n_replicas: usize, expect: &[Value]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answers: Vec<Value> = std::thread::scope(|scope| {
            let clients: Vec<_> = PROMPTS.iter().map(|prompt| scope.spawn(|| answer(http, prompt))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        assert_eq!(answers, expect);
        let page = page(http);
        let replicas = page["replicas"].as_array().unwrap();
        if replicas.len() == n_replicas && replicas.iter().all(|of| of["tokens"].as_u64() > Some(0)) {
            return;
        }
        assert!(Instant::now() < deadline, "one of {n_replicas} serves nothing: {page}");
    }
}

/// The events of a long stream: texts and logprobs, in order.
fn long_stream(http: &str) -> impl Iterator<Item = Value> + use<> {
    let body = json!({
        "prompt": "once", "max_tokens": 1500, "seed": 3, "temperature": 0.9, "ignore_eos": true, "logprobs": 1,
        "stream": true,
    });
    let lines = BufReader::new(post(http, &body).into_body().into_reader()).lines().map(Result::unwrap);
    let events = lines.filter_map(|line| Some(line.strip_prefix("data: ")?.to_owned()));
    events.take_while(|event| event != "[DONE]").map(|event| {
        let event: Value = serde_json::from_str(&event).unwrap();
        assert!(event["error"].is_null(), "{event}");
        event["choices"][0].clone()
    })
}

/// A stream's text and logprobs, however it was cut into events.
fn concat_events(events: impl IntoIterator<Item = Value>) -> (String, Vec<Value>) {
    let (mut text, mut logprobs) = (String::new(), Vec::new());
    for event in events {
        text.push_str(event["text"].as_str().unwrap_or_default());
        logprobs.extend(event["logprobs"]["token_logprobs"].as_array().into_iter().flatten().cloned());
    }
    (text, logprobs)
}

#[test]
fn etcd_is_lost_in_mid_stream_and_comes_back() {
    let mut etcd = Etcd::start(1);
    let flags = store(&etcd);
    let mut router = start(&["router", MODEL, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"], &flags);
    let http = router.http();
    let (mut one, mut two) = (coordinator("one", &flags), coordinator("two", &flags));
    let _workers = [worker(&mut one), worker(&mut two)];
    until("two are found", &http, |page| are(page, &["one", "two"]));
    let expect: Vec<Value> = PROMPTS.iter().map(|prompt| answer(&http, prompt)).collect();
    all_serve(&http, 2, &expect);
    let undisturbed = concat_events(long_stream(&http));
    assert_eq!(undisturbed.1.len(), 1500);

    let mut events = long_stream(&http);
    let first = events.next().unwrap();
    etcd.kill(0);
    let rest = std::thread::spawn(move || concat_events(std::iter::once(first).chain(events)));
    assert!(!rest.is_finished(), "the stream was over before etcd was lost: make it longer");
    until("it is told", &http, |page| page["store"]["kind"] == "etcd" && page["store"]["connected"] == false);
    assert!(page(&http)["store"]["reason"].is_string());
    let metrics = ureq::get(format!("{http}/metrics")).call().unwrap().body_mut().read_to_string().unwrap();
    let is_away = |line: &str| line.starts_with("lockstep:store_connected") && line.ends_with(" 0");
    assert!(metrics.lines().any(is_away), "{metrics}");
    // A new coordinator waits now; running ones serve, even after their leases have expired.
    let mut three = coordinator("three", &flags);
    three.until(&["the claim waits for the store"]);
    std::thread::sleep(Duration::from_secs(2 * LEASE_SECONDS));
    all_serve(&http, 2, &expect);
    assert!(are(&page(&http), &["one", "two"]));
    assert_eq!(rest.join().unwrap(), undisturbed);

    etcd.start_again(0);
    let worker = worker(&mut three);
    until("the third is found", &http, |page| {
        page["store"]["connected"] == true && are(page, &["one", "two", "three"])
    });
    all_serve(&http, 3, &expect);
    // A killed coordinator is removed with its lease; one that ends after a signal is removed immediately.
    one.kill();
    until("one is forgotten", &http, |page| are(page, &["two", "three"]));
    kill_process(Pid::from_raw(two.pid().cast_signed()).unwrap(), Signal::TERM).unwrap();
    assert!(two.ended().success(), "{}", two.log());
    until("two is forgotten", &http, |page| are(page, &["three"]));
    all_serve(&http, 1, &expect);
    drop(worker);
}

#[test]
fn a_later_claim_ends_the_coordinator_that_had_the_name() {
    let etcd = Etcd::start(1);
    let flags = store(&etcd);
    let mut router = start(&["router", MODEL, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"], &flags);
    let http = router.http();
    let mut first = coordinator("name", &flags);
    let _worker = worker(&mut first);
    until("the first is found", &http, |page| are(page, &["name"]));
    let epoch = |page: &Value| page["replicas"][0]["epoch"].as_str().unwrap_or("0.0").to_owned();
    let incarnation = |page: &Value| epoch(page).split('.').next().unwrap().parse::<u64>().unwrap();
    let before = incarnation(&page(&http));
    let expect = answer(&http, "hello");
    let mut second = coordinator("name", &flags);
    let _other = worker(&mut second);
    assert!(!first.ended().success());
    first.until(&["claim lost", "name"]);
    until("the second is found", &http, |page| are(page, &["name"]) && incarnation(page) > before);
    assert_eq!(answer(&http, "hello"), expect);
}

/// Workers have no address of a coordinator, and follow their replica's coordinator.
#[test]
fn workers_follow_the_coordinator_in_etcd() {
    let etcd = Etcd::start(1);
    let flags = store(&etcd);
    // The worker starts before everything else.
    let mut worker = start(&["worker", "--threads", "1", "--replica", "name"], &flags);
    worker.until(&["looking for the coordinator of this replica"]);
    let mut router = start(&["router", MODEL, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"], &flags);
    let http = router.http();
    let mut first = coordinator("name", &flags);
    let mut other = coordinator("another", &flags);
    other.until(&["coordinating"]);
    until("the first has its worker", &http, |page| ranks(page, "name") == 1);
    let expect = answer(&http, "hello");
    first.kill();
    let mut second = coordinator("name", &flags);
    second.until(&["coordinating"]);
    worker.until(&["the coordinator of this replica has moved", "name"]);
    until("the second has its worker", &http, |page| ranks(page, "name") == 1);
    assert_eq!(answer(&http, "hello"), expect);
    assert!(!other.log().contains("a worker joins"), "{}", other.log());
}

/// The number of ranks of a ready replica.
fn ranks(page: &Value, name: &str) -> usize {
    let replicas = page["replicas"].as_array().into_iter().flatten();
    let ready = replicas.filter(|of| of["replica"] == name && of["phase"] == "ready");
    ready.filter_map(|of| of["ranks"].as_array()).map(Vec::len).sum()
}

#[test]
fn a_store_that_cannot_be_meant_is_refused() {
    let refused = |arguments: &[&str], part: &str| {
        let mut node = Node::start(arguments);
        node.until(&[part]);
        assert!(!node.ended().success());
    };
    let (one, etcd) = (["--coordinator", "127.0.0.1:1"], ["--etcd-endpoints", "127.0.0.1:1"]);
    refused(&["router", MODEL], "--etcd-endpoints");
    refused(&[&["router", MODEL], &one[..], &etcd[..]].concat(), "give either");
    refused(&["router", MODEL, "--coordinator", "nowhere"], "host:port");
    refused(&["worker"], "--join HOST:PORT");
    refused(&[&["worker", "--join", "a:1"], &etcd[..]].concat(), "give either");
    refused(&[&["worker"], &etcd[..]].concat(), "--replica NAME");
    refused(&["coordinator", MODEL, "--advertise", "h:1"], "--advertise needs");
    refused(&["coordinator", MODEL, "--etcd-user", "a"], "--etcd-user needs");
    refused(&["coordinator", MODEL, "--listen", "127.0.0.1:0", "--etcd-endpoints", "nowhere"], "host:port");
    refused(&[&["coordinator", MODEL, "--replica", "a/b", "--listen", "127.0.0.1:0"], &etcd[..]].concat(), "a/b");
}
