//! A changed byte in the middle of a file: a rank that has read it is rejected with the weight's name, computes under
//! another policy, or fetches the byte again.

use super::{DOORS, MODEL, coordinator, router, serve};
use crate::common::node::{BINARY, Folder, Node, field};
use checkpoint::spans;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file of weights, in a folder that is a copy of the model's.
const WEIGHTS: &str = "model.safetensors";
const EMBEDDING: &str = "model.embed_tokens.weight";

fn copy(folder: &Folder) -> PathBuf {
    for entry in std::fs::read_dir(MODEL).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), folder.0.join(entry.file_name())).unwrap();
    }
    folder.0.join(WEIGHTS)
}

/// Overwrites a byte in the middle of a layer's largest tensor, or of the largest tensor outside of layers.
fn damage(file: &Path, is_of_layer: bool) {
    let spans = spans::of_model(file.parent().unwrap()).unwrap().into_iter();
    let spans = spans.filter(|of| of.path.ends_with(WEIGHTS)).flat_map(|of| of.spans);
    let spans = spans.filter(|span| span.layer.is_some() == is_of_layer).map(|span| span.bytes);
    let largest = spans.max_by_key(|bytes| bytes.end - bytes.start).unwrap();
    let file = File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    let middle = u64::midpoint(largest.start, largest.end);
    file.read_exact_at(&mut byte, middle).unwrap();
    file.write_all_at(&[byte[0] ^ 1], middle).unwrap();
}

fn replicas(http: &str) -> Value {
    let text = ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["replicas"].clone()
}

fn policy(node: &mut Node) -> String {
    let http = node.http();
    node.until_ready(&http);
    replicas(&http)[0]["policy_digest"].as_str().unwrap().to_owned()
}

/// Both stages load the embedding, one of them as its head.
#[test]
fn ranks_with_other_bytes_are_refused_by_the_weights_name() {
    let folder = Folder::new("other-bytes");
    damage(&copy(&folder), false);
    let (mut coordinating, address) = coordinator(MODEL, &["--pp", "2"]);
    let join = ["worker", "--threads", "1", "--local-workers", "2", "--join", &address];
    let mut good = Node::start(&join);
    let mut bad = Node::start(&[&join[..], &["--model-path", folder.0.to_str().unwrap()]].concat());
    let why = [EMBEDDING, "a file is damaged"];
    // Neither is trusted, because no process can decide which file is right.
    for worker in [&mut good, &mut bad] {
        worker.until(&["lockstep:", why[0], why[1]]);
        assert!(!worker.ended().success());
    }
    coordinating.until(&["a worker is lost", "wrong", why[0], why[1]]);
    let _ranks = [Node::start(&join), Node::start(&join)];
    assert_eq!(router(&address).answers(), serve(&[]).answers());
}

/// The bytes that are already served decide which ranks may join later.
#[test]
fn a_rank_that_joins_with_other_bytes_is_refused_alone() {
    let folder = Folder::new("later");
    damage(&copy(&folder), true);
    let (mut coordinating, address) = coordinator(MODEL, &[]);
    let join = ["worker", "--threads", "1", "--join", &address];
    let mut good = Node::start(&join);
    coordinating.until(&["the replica is ready"]);
    good.kill();
    let mut bad = Node::start(&[&join[..], &["--model-path", folder.0.to_str().unwrap()]].concat());
    bad.until(&["lockstep:", "model.layers.", "than the replica"]);
    assert!(!bad.ended().success());
    let _good = Node::start(&join);
    assert_eq!(router(&address).answers(), serve(&[]).answers());
}

#[test]
fn a_replica_with_a_damaged_byte_has_another_policy() {
    let folder = Folder::new("policy");
    let file = copy(&folder);
    let start = |more: &[&str]| {
        let model = ["serve", folder.0.to_str().unwrap(), "--activations", "f32"];
        policy(&mut Node::start(&[&model[..], &DOORS, more].concat()))
    };
    let whole = policy(&mut serve(&[]));
    let grids = [&[][..], &["--tp", "2"], &["--pp", "2"]];
    let policies = grids.map(start);
    assert!(policies.iter().all(|policy| *policy == whole), "a copy is the same model, on any grid: {policies:?}");
    damage(&file, true);
    let damaged = start(&[]);
    assert_ne!(damaged, whole);
    assert_eq!(start(&["--tp", "2", "--inproc"]), damaged);
}

#[test]
fn a_fetched_model_that_is_damaged_is_fetched_anew() {
    let folder = Folder::new("refetch");
    let cache = folder.0.join("cache");
    let (_coordinator, address) = coordinator(MODEL, &[]);
    let fetch = ["worker", "--threads", "1", "--join", &address, "--fetch", "--cache", cache.to_str().unwrap()];
    let mut router = router(&address);
    let mut worker = Node::start_in(&folder.0, &fetch);
    let fetched = worker.until(&["fetching this rank's part"]);
    let answers = router.answers();
    worker.kill();
    let place = PathBuf::from(field(&fetched, "folder")).join("llama-f32-tied");
    damage(&place.join(WEIGHTS), true);
    let mut again = Node::start_in(&folder.0, &fetch);
    again.until(&["damaged: they are fetched again"]);
    assert_eq!(router.answers(), answers);
}

/// The coordinator's file is damaged when it is fetched, and repaired later.
#[test]
fn what_was_fetched_of_a_damaged_file_is_fetched_anew_when_it_is_refused() {
    let folder = Folder::new("repaired");
    let (there, here) = (folder.0.join("there"), folder.0.join("here"));
    let model = Folder(there.join("llama-f32-tied"));
    [&model.0, &here].iter().for_each(|folder| std::fs::create_dir_all(folder).unwrap());
    damage(&copy(&model), true);
    // The name exists only in the coordinator's folder.
    let coordinate = || {
        let flags = ["coordinator", "llama-f32-tied", "--activations", "f32", "--listen", "127.0.0.1:0"];
        let mut node = Node::start_in(&there, &flags);
        let address = field(&node.until(&["coordinating"]), "address").to_owned();
        (node, address)
    };
    let fetch = |address: &str| {
        let flags = ["worker", "--threads", "1", "--join", address, "--fetch", "--cache", "cache"];
        Node::start_in(&here, &flags)
    };
    let (mut damaged, address) = coordinate();
    let mut worker = fetch(&address);
    damaged.until(&["the replica is ready"]);
    worker.kill();
    damaged.kill();
    copy(&model);
    let (mut repaired, address) = coordinate();
    let mut good = Node::start(&["worker", "--threads", "1", "--join", &address, "--model-path", MODEL]);
    repaired.until(&["the replica is ready"]);
    good.kill();
    let mut refused = fetch(&address);
    refused.until(&["the fetched model is not trusted any more"]);
    refused.until(&["lockstep:", "model.layers.", "than the replica"]);
    assert!(!refused.ended().success());
    let mut again = fetch(&address);
    again.until(&["fetching this rank's part"]);
    assert_eq!(router(&address).answers(), serve(&[]).answers());
}

/// Two replicas that should have one model: the cluster page of either one names the weight in which they differ.
#[test]
fn replicas_that_differ_are_reported_by_weight_name() {
    let folder = Folder::new("replicas");
    // A model is called by its folder's name.
    let model = Folder(folder.0.join("llama-f32-tied"));
    std::fs::create_dir_all(&model.0).unwrap();
    damage(&copy(&model), true);
    let start = |model: &str| {
        let (coordinator, address) = coordinator(model, &[]);
        (coordinator, Node::start(&["worker", "--threads", "1", "--join", &address]), address)
    };
    // Of three, the first is the damaged one.
    let started = [model.0.to_str().unwrap(), MODEL, MODEL].map(start);
    let addresses = started.iter().flat_map(|(_, _, address)| ["--coordinator", address]);
    let mut router = Node::start(&[&["router", MODEL], &addresses.collect::<Vec<_>>()[..], &DOORS[..4]].concat());
    let http = router.http();
    router.until(&["two replicas differ in a weight", "model.layers."]);
    let replicas = replicas(&http);
    let differs = &replicas[0]["differs"];
    assert!(differs["weight"].as_str().unwrap().starts_with("model.layers."), "{replicas}");
    assert!(differs["piece"].is_u64() && differs["replica"].is_string(), "{replicas}");
    assert!(replicas[1]["differs"].is_null() && replicas[2]["differs"].is_null(), "{replicas}");
    // The majority of replicas counts, and not the one that came first.
    assert_eq!(router.answers(), serve(&[]).answers());
    let output = Command::new(BINARY).args(["status", "--url", &http]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("the bytes of the weight model.layers."), "{text}");
    let of_replica = |replica: &Value| replica["tokens"].as_u64().unwrap();
    assert_eq!(of_replica(&self::replicas(&http)[0]), 0, "it gets nothing");
}
