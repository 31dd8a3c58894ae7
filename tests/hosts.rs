//! Two real hosts: two network namespaces with a link between them. Coordinator, router and a worker are in one, and a
//! worker without the model in the other; they use TLS and a join token. Without permission for namespaces the test
//! prints that, and checks nothing.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/node.rs"]
mod node;
#[path = "common/ports.rs"]
mod ports;
#[path = "common/star.rs"]
mod star;

use checkpoint::catalogue::{self, ModelSources};
use node::{BINARY, Folder, Node, complete, field, post};
use serde_json::{Value, json};
use star::Star;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use wire::JoinToken;

/// The host behind the link.
const THERE: usize = 0;
const MODEL: &str = "smollm2.gguf";
/// How long the link is down. After ten seconds the replica continues on the ranks that are left.
const CUTS: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(12)];

fn smollm2() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let user_cache = || from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")));
    let cache = from("LOCKSTEP_CACHE").or_else(|| user_cache().map(|cache| cache.join("lockstep"))).unwrap();
    catalogue::locate("smollm2", &ModelSources::new(cache)).unwrap_or_else(|error| panic!("{error}: `make test`")).path
}

/// A long request whose answer does not end early.
fn story(stream: bool) -> Value {
    json!({
        "prompt": "Once upon a time", "max_tokens": 160, "seed": 3, "temperature": 0.9, "ignore_eos": true,
        "stream": stream,
    })
}

fn short(http: &str) -> Vec<Value> {
    let answer = |prompt: &str| {
        let body = json!({
            "prompt": prompt, "max_tokens": 16, "seed": 5, "temperature": 0.7, "logprobs": 2, "return_token_ids": true,
        });
        complete(http, &body)
    };
    ["The capital of France is", "def fibonacci(n):", "Two hosts and one link"].map(answer).into()
}

/// The texts of a stream's events, in order.
fn pieces(http: &str) -> impl Iterator<Item = String> {
    let body = BufReader::new(post(http, &story(true)).into_body().into_reader());
    let events = body.lines().map(Result::unwrap).filter_map(|line| Some(line.strip_prefix("data: ")?.to_owned()));
    events.take_while(|event| event != "[DONE]").map(|event| {
        let event: Value = serde_json::from_str(&event).unwrap();
        assert!(event["error"].is_null(), "{event}");
        event["choices"][0]["text"].as_str().unwrap_or_default().to_owned()
    })
}

#[test]
fn two_hosts_answer_as_one_and_a_cut_link_is_named() {
    let Some(hosts) = Star::new(1) else {
        // Directly to stderr: the harness shows a test's output only when it fails.
        let word = b"NOT RUN: two network namespaces and a link between them are not permitted here\n";
        std::io::stderr().write_all(word).unwrap();
        return;
    };
    hosts.enter();
    let (here, there) = (Folder::new("here"), Folder::new("there"));
    std::os::unix::fs::symlink(smollm2(), here.0.join(MODEL)).unwrap();
    let token = here.write("token", JoinToken::random().unwrap().expose());
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let (expected, whole) = {
        let mut alone = Node::start_in(&here.0, &[&["serve", MODEL, "--threads", "1"], &doors[..]].concat());
        let http = alone.http();
        alone.until_ready(&http);
        (short(&http), complete(&http, &story(false)))
    };

    let listen = format!("{}:0", hosts.near(THERE));
    let grid = ["--pp", "2", "--kv-memory", "64MiB", "--token-file", &token];
    let mut coordinator = Node::start_in(&here.0, &[&["coordinator", MODEL, "--listen", &listen], &grid[..]].concat());
    let line = coordinator.until(&["coordinating"]);
    assert_eq!((field(&line, "tls"), field(&line, "token")), ("true", "true"));
    let address = field(&line, "address").to_owned();
    let join = ["worker", "--join", &address, "--token-file", &token, "--threads", "1", "--local-workers", "2"];
    let _near = Node::start_in(&here.0, &join);
    let cache = there.0.join("cache");
    // These hosts have one kernel, so the workers could share memory.
    let fetch = [&join[..], &["--wire", "tcp", "--fetch", "--cache", cache.to_str().unwrap()]].concat();
    let mut command = hosts.command_at(THERE, BINARY);
    command.args(fetch).current_dir(&there.0);
    let mut far = Node::spawn(command);
    far.until(&["fetching this rank's part"]);
    let attach = ["router", MODEL, "--coordinator", &address, "--token-file", &token];
    let mut router = Node::start_in(&here.0, &[&attach[..], &doors[..]].concat());
    let http = router.http();
    router.until_ready(&http);
    assert_eq!(short(&http), expected);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", far.pid())).unwrap();
    assert!(maps.contains("lockstep") && !maps.contains("memfd:lockstep"), "the ranks talk over the link");

    for lasts in CUTS {
        let mut text = String::new();
        let mut cut_at = None;
        for (i, piece) in pieces(&http).enumerate() {
            if i == 8 {
                cut_at = Some(cut(&hosts, &coordinator, lasts));
            }
            text.push_str(&piece);
        }
        let cut_at = cut_at.expect("a stream of more than eight events");
        println!("cut for {lasts:?}: the stream went on, and ended {} ms after the cut", cut_at.elapsed().as_millis());
        assert_eq!(text, whole[0]["text"].as_str().unwrap(), "the stream continues with the same tokens");
        assert_eq!(short(&http), expected, "and so does the cluster");
    }
}

/// Cuts the link. Meanwhile the rank behind it is reported lost by name.
fn cut(hosts: &Star, coordinator: &Node, lasts: Duration) -> Instant {
    let (begun, place) = (Instant::now(), coordinator.log_len());
    hosts.set_link(THERE, "down");
    let line = coordinator.until_since(place, &["a worker is lost", "rank=", "sent no frame for too long"]);
    println!("{} ms after the link went down: {line}", begun.elapsed().as_millis());
    std::thread::sleep(lasts.saturating_sub(begun.elapsed()));
    hosts.set_link(THERE, "up");
    begun
}
