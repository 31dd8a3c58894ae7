//! A cluster of processes under load that loses ranks, continues with fewer, gets them back, and receives other grids
//! and another coordinator: no request fails, and every answer is that of a single rank.

use crate::common::node::{BINARY, Folder, Node, PATIENCE, complete, field, free_address, post};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const MODEL: &str = "tests/reference/llama-f32-tied";
const ANOTHER: &str = "tests/reference/llama-f16-sharded";
const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];
/// Requests open at a time.
const N_CLIENTS: usize = 4;

static STOP: AtomicBool = AtomicBool::new(false);
static N_ANSWERED: AtomicUsize = AtomicUsize::new(0);

/// Greedy, sampled, penalised, and two choices of one prompt.
fn questions() -> Vec<Value> {
    let question_with = |i: u64, more: Value| {
        let prompt = ["hello", "a b c d", "the grid is the same", "x"][i as usize % 4];
        let mut question = json!({ "prompt": prompt, "max_tokens": 150, "seed": i, "logprobs": 2, "ignore_eos": true });
        question.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        question
    };
    vec![
        question_with(0, json!({ "temperature": 0.0 })),
        question_with(1, json!({ "temperature": 0.9, "top_p": 0.9 })),
        question_with(2, json!({ "temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.3 })),
        question_with(3, json!({ "temperature": 0.8, "n": 2 })),
    ]
}

/// The answers of a single rank.
fn expected() -> Vec<Value> {
    let mut alone = Node::start(&[&["serve", MODEL, "--activations", "f32"], &DOORS[..]].concat());
    let http = alone.http();
    alone.until_ready(&http);
    questions().iter().map(|question| complete(&http, question)).collect()
}

/// Clients that send requests repeatedly, and compare every answer.
fn load(http: &str, expected: &[Value]) -> Vec<JoinHandle<()>> {
    let client = |i: usize| {
        let (http, question, expected) = (http.to_owned(), questions()[i].clone(), expected[i].clone());
        std::thread::spawn(move || {
            while !STOP.load(Ordering::Relaxed) {
                assert_eq!(complete(&http, &question), expected, "{question}");
                N_ANSWERED.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    (0..N_CLIENTS).map(client).collect()
}

/// Waits until the load makes progress: an answer arrives, perhaps to an earlier request.
fn goes_on(clients: &[JoinHandle<()>]) {
    let (before, deadline) = (N_ANSWERED.load(Ordering::Relaxed), Instant::now() + PATIENCE);
    while N_ANSWERED.load(Ordering::Relaxed) < before + N_CLIENTS {
        assert!(!clients.iter().any(JoinHandle::is_finished), "a client has given up");
        assert!(Instant::now() < deadline, "no request is answered");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn page(http: &str) -> Value {
    let text = ureq::get(format!("{http}/cluster")).call().unwrap().body_mut().read_to_string().unwrap();
    serde_json::from_str(&text).unwrap()
}

fn until_on(http: &str, tp: u64, pp: u64, coordinator: &Node) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let replica = &page(http)["replicas"][0];
        if replica["phase"] == "ready" && replica["grid"] == json!({ "tp": tp, "pp": pp }) {
            return;
        }
        assert!(Instant::now() < deadline, "never on tp {tp} x pp {pp}: {replica}\n{}", coordinator.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn worker(address: &str) -> Node {
    Node::start(&["worker", "--threads", "1", "--local-workers", "4", "--join", address])
}

fn scale(address: &str, tp: &str, pp: &str) -> Output {
    Command::new(BINARY).args(["scale", "--coordinator", address, "--tp", tp, "--pp", pp]).output().unwrap()
}

fn signal(node: &Node, signal: Signal) {
    kill_process(Pid::from_raw(node.pid().cast_signed()).unwrap(), signal).unwrap();
}

fn reload(address: &str) -> Output {
    Command::new(BINARY).args(["reload", "--coordinator", address]).output().unwrap()
}

/// Copies a folder of this repository.
fn copy(from: &str, to: &Path) -> PathBuf {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(from)).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    to.to_owned()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn coordinator(model: &Path, listen: &str) -> Node {
    let flags = ["--activations", "f32", "--tp", "2", "--pp", "2", "--listen", listen];
    let waits = ["--replan-seconds", "1", "--regrow-seconds", "1", "--drain-seconds", "1"];
    Node::start(&[&["coordinator", model.to_str().unwrap()], &flags[..], &waits].concat())
}

#[test]
fn losses_grids_and_restarts_are_pauses() {
    let (expected, folder) = (expected(), Folder::new("recovery"));
    let model = copy(MODEL, &folder.0.join("model"));
    let mut coordinator = self::coordinator(&model, &free_address().to_string());
    let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
    let mut workers: Vec<Node> = (0..4).map(|_| worker(&address)).collect();
    let mut router = Node::start(&[&["router", MODEL, "--coordinator", &address], &DOORS[..4]].concat());
    let http = router.http();
    router.until_ready(&http);
    until_on(&http, 2, 2, &coordinator);
    let clients = load(&http, &expected);
    goes_on(&clients);

    // One is lost without a replacement: two of the remaining three carry the model. Then a replacement joins.
    workers.remove(0).kill();
    until_on(&http, 2, 1, &coordinator);
    coordinator.until(&["a worker is lost", "kind=\"gone\""]);
    goes_on(&clients);
    workers.push(worker(&address));
    until_on(&http, 2, 2, &coordinator);
    goes_on(&clients);

    // Other grids, one of which is impossible.
    let done = scale(&address, "1", "2");
    let stdout = text(&done.stdout);
    assert!(done.status.success() && stdout.starts_with("tp 1 x pp 2 after "), "{stdout}");
    until_on(&http, 1, 2, &coordinator);
    goes_on(&clients);
    let refused = scale(&address, "4", "2");
    let stderr = text(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("the model cannot be split into tp 4"), "{stderr}");
    assert!(scale(&address, "2", "2").status.success());
    goes_on(&clients);

    read_again(&mut coordinator, &address, &model, &http, || goes_on(&clients));

    // A stopped worker is lost by its silence, and takes a place again when it continues.
    signal(&workers[0], Signal::STOP);
    coordinator.until(&["a worker is lost", "kind=\"silent\""]);
    until_on(&http, 2, 1, &coordinator);
    goes_on(&clients);
    signal(&workers[0], Signal::CONT);
    until_on(&http, 2, 2, &coordinator);
    goes_on(&clients);

    STOP.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().unwrap());
    restart(&mut coordinator, &model, &mut workers, &http, &expected);
}

/// The model's file is restored under a serving cluster, replaced by another model for a while, and removed, which does
/// not disturb ranks whose part stays the same.
fn read_again(coordinator: &mut Node, address: &str, model: &Path, http: &str, goes_on: impl Fn()) {
    let done = reload(address);
    let stdout = text(&done.stdout);
    assert!(done.status.success() && stdout.starts_with("4 of 4 ranks have read the model again"), "{stdout}");
    goes_on();
    let away = model.with_extension("away");
    std::fs::rename(model, &away).unwrap();
    copy(ANOTHER, model);
    let epoch = page(http)["replicas"][0]["epoch"].clone();
    let refused = reload(address);
    let stderr = text(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("start another replica with the new model"), "{stderr}");
    std::fs::remove_dir_all(model).unwrap();
    let refused = reload(address);
    assert!(!refused.status.success() && text(&refused.stderr).contains("Nothing has changed"));
    goes_on();
    cut_short(&copy(MODEL, model));
    let refused = reload(address);
    let stderr = text(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("is it cut off?"), "{stderr}");
    assert!(stderr.contains("model.safetensors") && stderr.contains("Nothing has changed"), "{stderr}");
    std::fs::remove_dir_all(model).unwrap();
    goes_on();
    assert_eq!(page(http)["replicas"][0]["epoch"], epoch, "nothing has changed:\n{}", coordinator.log());
    std::fs::rename(&away, model).unwrap();
    assert!(reload(address).status.success());
    goes_on();
}

/// Truncates a file, like an interrupted copy.
fn cut_short(model: &Path) {
    let file = std::fs::File::options().write(true).open(model.join("model.safetensors")).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

/// Replaces the coordinator: open requests continue at the new one.
fn restart(coordinator: &mut Node, model: &Path, workers: &mut [Node], http: &str, expected: &[Value]) {
    let questions = questions();
    let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
    std::thread::scope(|scope| {
        let start = |question| scope.spawn(move || complete_when_taken(http, question));
        let clients: Vec<_> = questions.iter().map(start).collect();
        let deadline = Instant::now() + PATIENCE;
        while page(http)["replicas"][0]["requests"]["running"] == 0
            && !clients.iter().all(|client| client.is_finished())
        {
            assert!(Instant::now() < deadline, "nothing runs");
            std::thread::sleep(Duration::from_millis(1));
        }
        signal(coordinator, Signal::TERM);
        assert!(coordinator.ended().success(), "a drain ends well:\n{}", coordinator.log());
        workers[0].until(&["the coordinator dismissed this worker", "drained"]);
        *coordinator = self::coordinator(model, &address);
        let answers: Vec<Value> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert_eq!(answers, expected);
    });
}

/// Repeats a request that a draining coordinator refuses.
fn complete_when_taken(http: &str, question: &Value) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut answer = post(http, question);
        let text = answer.body_mut().read_to_string().unwrap();
        if answer.status() != 503 {
            let answer: Value = serde_json::from_str(&text).unwrap();
            return answer["choices"].clone();
        }
        assert!(Instant::now() < deadline, "no replica accepts it: {text}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
