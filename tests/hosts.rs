//! Two hosts for real: two network namespaces and a link between them. Coordinator, router and a worker stand in one,
//! in the other a worker that has no model; between them are TLS and a join token. Where namespaces are not permitted
//! it says so, and tests nothing.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/node.rs"]
mod node;

use checkpoint::catalogue::{self, Sources};
use node::{BINARY, Folder, Node, complete, field, post};
use proto::secure::Token;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const HERE: &str = "192.0.2.1";
const THERE: &str = "192.0.2.2";
const MODEL: &str = "smollm2.gguf";
const CUT: Duration = Duration::from_secs(1);

/// Two namespaces, removed at the end.
struct Hosts {
    here: String,
    there: String,
}

impl Hosts {
    /// None: this system does not permit it.
    fn new() -> Option<Hosts> {
        let name = |side| format!("lockstep-{}-{side}", std::process::id());
        let hosts = Hosts { here: name("a"), there: name("b") };
        let (here, there) = (&hosts.here, &hosts.there);
        let link = format!("ls{}", std::process::id());
        let (near, far) = (format!("{link}a"), format!("{link}b"));
        if !run(&format!("ip netns add {here}")) {
            return None;
        }
        let commands = [
            format!("ip netns add {there}"),
            format!("ip link add {near} netns {here} type veth peer name {far} netns {there}"),
            format!("ip -n {here} link set dev {near} name link"),
            format!("ip -n {there} link set dev {far} name link"),
            format!("ip -n {here} address add {HERE}/24 dev link"),
            format!("ip -n {there} address add {THERE}/24 dev link"),
            format!("ip -n {here} link set lo up"),
            format!("ip -n {there} link set lo up"),
            format!("ip -n {here} link set dev link up"),
            format!("ip -n {there} link set dev link up"),
        ];
        assert!(commands.iter().all(|command| run(command)));
        Some(hosts)
    }

    /// This thread, and what it starts, stand on the first host from now on.
    fn enter(&self) {
        let place = File::open(Path::new("/run/netns").join(&self.here)).unwrap();
        move_into_link_name_space(place.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }

    fn start_there(&self, folder: &Path, arguments: &[&str]) -> Node {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.there, BINARY]).args(arguments).current_dir(folder);
        Node::spawn(command)
    }

    fn set_link(&self, state: &str) {
        assert!(run(&format!("ip -n {} link set dev link {state}", self.there)));
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in [&self.here, &self.there] {
            run(&format!("ip netns delete {name}"));
        }
    }
}

fn run(command: &str) -> bool {
    let mut words = command.split(' ');
    let done = Command::new(words.next().unwrap()).args(words).output();
    let done = done.map_err(|error| error.to_string());
    match done {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            eprintln!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim());
            false
        }
        Err(error) => {
            eprintln!("{command}: {error}");
            false
        }
    }
}

fn smollm2() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let user_cache = || from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")));
    let cache = from("LOCKSTEP_CACHE").or_else(|| user_cache().map(|cache| cache.join("lockstep"))).unwrap();
    catalogue::locate("smollm2", &Sources::new(cache)).unwrap_or_else(|error| panic!("{error}: `make test`")).path
}

/// A long one that goes on whatever it says.
fn story(stream: bool) -> Value {
    json!({
        "prompt": "Once upon a time", "max_tokens": 160, "seed": 3, "temperature": 0.9, "ignore_eos": true,
        "stream": stream,
    })
}

fn short(http: &str) -> Vec<Value> {
    let ask = |prompt: &str| {
        let body = json!({
            "prompt": prompt, "max_tokens": 16, "seed": 5, "temperature": 0.7, "logprobs": 2, "return_token_ids": true,
        });
        complete(http, &body)
    };
    ["The capital of France is", "def fibonacci(n):", "Two hosts and one link"].map(ask).into()
}

/// The texts of a stream's events, one after the other.
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
    let Some(hosts) = Hosts::new() else {
        // Past the harness, which shows what a test prints only when it fails.
        let word = b"NOT RUN: two network namespaces and a link between them are not permitted here\n";
        std::io::stderr().write_all(word).unwrap();
        return;
    };
    hosts.enter();
    let (here, there) = (Folder::new("here"), Folder::new("there"));
    std::os::unix::fs::symlink(smollm2(), here.0.join(MODEL)).unwrap();
    let token = here.write("token", Token::random().unwrap().expose());
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let (expected, whole) = {
        let mut alone = Node::start_in(&here.0, &[&["serve", MODEL, "--threads", "1"], &doors[..]].concat());
        let http = alone.http();
        alone.until_ready(&http);
        (short(&http), complete(&http, &story(false)))
    };

    let listen = format!("{HERE}:0");
    let grid = ["--pp", "2", "--kv-memory", "64MiB", "--token-file", &token];
    let mut coordinator = Node::start_in(&here.0, &[&["coordinator", MODEL, "--listen", &listen], &grid[..]].concat());
    let line = coordinator.until(&["coordinating"]);
    assert_eq!((field(&line, "tls"), field(&line, "token")), ("true", "true"));
    let address = field(&line, "address").to_owned();
    let join = ["worker", "--join", &address, "--token-file", &token, "--threads", "1", "--local-workers", "2"];
    let _near = Node::start_in(&here.0, &join);
    let cache = there.0.join("cache");
    // Memory could be shared, because in truth there is one kernel.
    let fetch = [&join[..], &["--wire", "tcp", "--fetch", "--cache", cache.to_str().unwrap()]].concat();
    let mut far = hosts.start_there(&there.0, &fetch);
    far.until(&["fetching this rank's part"]);
    let attach = ["router", MODEL, "--coordinator", &address, "--token-file", &token];
    let mut router = Node::start_in(&here.0, &[&attach[..], &doors[..]].concat());
    let http = router.http();
    router.until_ready(&http);
    assert_eq!(short(&http), expected);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", far.pid())).unwrap();
    assert!(maps.contains("lockstep") && !maps.contains("memfd:lockstep"), "the ranks talk over the link");

    let mut text = String::new();
    let mut cut_at = None;
    for (i, piece) in pieces(&http).enumerate() {
        if i == 8 {
            cut_at = Some(cut(&hosts, &mut coordinator));
        }
        text.push_str(&piece);
    }
    let cut_at = cut_at.expect("a stream of more than eight events");
    println!("the stream went on, and ended {} ms after the cut", cut_at.elapsed().as_millis());
    assert_eq!(text, whole[0]["text"].as_str().unwrap(), "the stream goes on with the same tokens");
    assert_eq!(short(&http), expected, "and so does the cluster");
}

/// For a second. The rank behind the link is lost by name while it is down.
fn cut(hosts: &Hosts, coordinator: &mut Node) -> Instant {
    let begun = Instant::now();
    hosts.set_link("down");
    let line = coordinator.until(&["a worker is lost", "rank=", "was not heard of for too long"]);
    println!("{} ms after the link went down: {line}", begun.elapsed().as_millis());
    std::thread::sleep(CUT.saturating_sub(begun.elapsed()));
    hosts.set_link("up");
    begun
}
