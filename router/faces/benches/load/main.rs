//! The cost of a router. Measures the time that it adds to a request, compared with a bare tonic server and a bare
//! tonic relay in the same run. Measures requests and tokens for each CPU-second of its threads, before a replica on
//! `sim`. Measures memory under 10,000 streams. Measures the cost of the page's viewers beside 1,000 streams, and fails
//! if it exceeds its bounds.
//!
//! `cargo bench --workspace --bench load -- [latency] [cpu] [streams] [page]` (all of them, if none is named)
//!
//! The router is a process of its own, and so are its replica and the peers. Latency is measured in windows of two
//! seconds. Only windows count in which other processes used little of the machine.
#![allow(clippy::unwrap_used, reason = "a measurement may panic")]

mod page;
mod peers;
mod roles;
mod watch;

use proto::v1;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use roles::{Child, Role};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::Channel;
use watch::{Machine, resident_bytes, threads_seconds};
use wire::tcp;

type Client = InferenceClient<Channel>;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let role = args.first().and_then(|arg| Role::named(arg));
    match role {
        Some(role) => role.play(args.get(1).map(String::as_str)),
        None => measure(&args),
    }
}

fn measure(args: &[String]) {
    let is_selected = |what: &str| args.is_empty() || args.iter().any(|arg| arg == what);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        if is_selected("latency") {
            latency().await;
        }
        if is_selected("cpu") {
            cpu().await;
        }
        if is_selected("streams") {
            streams().await;
        }
        if is_selected("page") && !page::page().await {
            std::process::exit(1);
        }
    });
}

fn request(text: &str, n_tokens: u32) -> v1::GenerateRequest {
    let sampling =
        v1::Sampling { max_tokens: Some(n_tokens), ignore_eos: true, temperature: Some(0.0), ..Default::default() };
    let (input, sampling) = (Some(Input::Text(text.to_owned())), Some(sampling));
    v1::GenerateRequest { input, sampling, ..Default::default() }
}

/// Reads a stream to its end, and returns the number of tokens.
async fn generate_tokens(mut client: Client, request: v1::GenerateRequest) -> usize {
    let mut replies = client.generate(request).await.unwrap().into_inner();
    let mut n_tokens = 0;
    while let Some(reply) = replies.message().await.unwrap() {
        if let Some(v1::generate_reply::Event::Delta(delta)) = reply.event {
            n_tokens += delta.token_ids.len();
        }
    }
    n_tokens
}

fn client(address: &str) -> Client {
    InferenceClient::new(tcp(address).unwrap())
}

/// Waits until a router serves: it first attaches to its replica.
async fn ready(client: &Client) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while client.clone().generate(request("ready?", 1)).await.is_err() {
        assert!(Instant::now() < deadline, "the router is not ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const RATE: f64 = 200.0;
const WINDOW: Duration = Duration::from_secs(2);
const WINDOWS: usize = 40;
/// How many cores other processes may use in a window that counts.
const FOREIGN_MAX: f64 = 0.1;
/// If fewer windows were quiet, this many of the quietest are shown instead, and labelled so.
const WINDOWS_MIN: usize = 5;
const KINDS: [&str; 3] = ["bare server", "bare relay", "router"];

/// Sends requests at a steady rate, to each kind in turn. Each is sent on time, whether or not earlier ones have ended.
async fn latency() {
    let peers = Child::start(Role::Peers, None);
    let router = Child::start(Role::Router, Some(&peers.addresses[1]));
    let relay = Child::start(Role::Relay, Some(&peers.addresses[0]));
    let clients = [client(&peers.addresses[0]), client(&relay.addresses[0]), client(&router.addresses[0])];
    for client in &clients {
        ready(client).await;
    }
    let pids = [std::process::id(), peers.pid(), router.pid(), relay.pid()];
    let mut windows = Vec::new();
    for i in 0..=WINDOWS {
        let machine = Machine::now(&pids);
        let times = window(&clients).await;
        let foreign = machine.foreign_cores();
        // The first round warms up.
        if i > 0 {
            windows.push((foreign, times));
        }
    }
    windows.sort_by(|a, b| a.0.total_cmp(&b.0));
    let n_quiet = windows.iter().filter(|(foreign, _)| *foreign <= FOREIGN_MAX).count();
    let n_shown = n_quiet.max(WINDOWS_MIN);
    let quiet = if n_quiet >= WINDOWS_MIN { "quiet" } else { "the quietest, none of them quiet enough" };
    let most = windows[n_shown - 1].0;
    println!("{n_shown} of {WINDOWS} windows of {WINDOW:?}, {quiet}: others used at most {most:.2} cores");
    println!("{:<24}{:>10}{:>10}{:>10}{:>10}", "microseconds", "p50", "p90", "p99", "requests");
    let of_kind = |kind: usize| {
        let mut times: Vec<f64> =
            windows[..n_shown].iter().flat_map(|(_, times)| times[kind].iter().copied()).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let all = [0, 1, 2].map(of_kind);
    for (kind, times) in KINDS.iter().zip(&all) {
        let [p50, p90, p99] = [50, 90, 99].map(|percent| percentile(times, percent));
        println!("{kind:<24}{p50:>10.0}{p90:>10.0}{p99:>10.0}{:>10}", times.len());
    }
    for control in [0, 1] {
        let [p50, p90, p99] =
            [50, 90, 99].map(|percent| percentile(&all[2], percent) - percentile(&all[control], percent));
        println!("{:<24}{p50:>10.0}{p90:>10.0}{p99:>10.0}", format!("router - {}", KINDS[control]));
    }
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

async fn window(clients: &[Client; 3]) -> [Vec<f64>; 3] {
    let n = (RATE * WINDOW.as_secs_f64()) as usize * clients.len();
    let mut requests = JoinSet::new();
    let began = Instant::now();
    for i in 0..n {
        // Each kind has the whole rate.
        tokio::time::sleep_until(began + Duration::from_secs_f64(i as f64 / RATE / clients.len() as f64)).await;
        let (kind, client) = (i % clients.len(), clients[i % clients.len()].clone());
        requests.spawn(async move {
            let began = std::time::Instant::now();
            assert_eq!(generate_tokens(client, request("How do you do?", 1)).await, 1);
            (kind, began.elapsed().as_secs_f64() * 1e6)
        });
    }
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    while let Some(done) = requests.join_next().await {
        let (kind, micros) = done.unwrap();
        times[kind].push(micros);
    }
    times
}

const N_CONNECTIONS: usize = 8;
const LONG_TOKENS: u32 = 2000;

/// A name, concurrent clients, requests of each, and tokens of each answer. The more streams have output in one step,
/// the more of them leave in one write.
const RUNS: [(&str, usize, usize, u32); 4] = [
    ("warm-up", 64, 20, 20),
    ("one token, 64 clients", 64, 400, 1),
    ("2,000 tokens, 64 streams", 64, 2, LONG_TOKENS),
    ("2,000 tokens, 512 streams", 512, 1, LONG_TOKENS),
];

/// Rounds alternate between the router and a bare relay before it, which sees the same requests at the same pace.
const ROUNDS: usize = 5;

/// Measures the CPU time of the router's threads, for requests of one token and for long answers, and that of a bare
/// relay.
async fn cpu() {
    let replica = Child::start(Role::Replica, None);
    let router = Child::start(Role::Router, Some(&replica.addresses[0]));
    let relay = Child::start(Role::Relay, Some(&router.addresses[0]));
    println!("{:<28}{:>12}{:>24}{:>28}", "", "threads of", "requests/CPU-s", "tokens/CPU-s");
    for (what, n_at_once, n_each, n_tokens) in RUNS {
        let mut spent = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS * spent.len() {
            let kind = round % spent.len();
            let (child, threads) = [(&router, roles::ROUTER_THREADS), (&relay, roles::OTHER_THREADS)][kind];
            let before = threads_seconds(child.pid(), threads);
            run_clients(&child.addresses[0], n_at_once, n_each, n_tokens).await;
            spent[kind].push(threads_seconds(child.pid(), threads) - before);
        }
        let n_requests = (n_at_once * n_each) as f64;
        for (kind, spent) in ["router", "bare relay"].iter().zip(&mut spent) {
            spent.sort_by(f64::total_cmp);
            let [most, median, least] = [0, ROUNDS / 2, ROUNDS - 1].map(|at| n_requests / spent[at]);
            let tokens = f64::from(n_tokens);
            let requests = format!("{median:.0} ({least:.0}-{most:.0})");
            let tokens = format!("{:.0} ({:.0}-{:.0})", median * tokens, least * tokens, most * tokens);
            if what != "warm-up" {
                println!("{what:<28}{kind:>12}{requests:>24}{tokens:>28}");
            }
        }
    }
}

async fn run_clients(address: &str, n_at_once: usize, n_each: usize, n_tokens: u32) {
    let clients: Vec<Client> = (0..N_CONNECTIONS).map(|_| client(address)).collect();
    for client in &clients {
        ready(client).await;
    }
    let mut tasks = JoinSet::new();
    for i in 0..n_at_once {
        let client = clients[i % clients.len()].clone();
        tasks.spawn(async move {
            for j in 0..n_each {
                let text = format!("Client {i} asks {j}");
                assert_eq!(generate_tokens(client.clone(), request(&text, n_tokens)).await, n_tokens as usize);
            }
        });
    }
    tasks.join_all().await;
}

const STREAM_CONNECTIONS: usize = 100;
const STREAMS_EACH: usize = 100;

/// Measures memory under streams that have received one token and wait for the next.
async fn streams() {
    let peers = Child::start(Role::Peers, None);
    let router = Child::start(Role::Router, Some(&peers.addresses[1]));
    let clients: Vec<Client> = (0..STREAM_CONNECTIONS).map(|_| client(&router.addresses[0])).collect();
    ready(&clients[0]).await;
    let idle = resident_bytes(router.pid());
    let mut open = Vec::new();
    for client in &clients {
        for _ in 0..STREAMS_EACH {
            let mut replies = client.clone().generate(request("And then?", 1000)).await.unwrap().into_inner();
            while !matches!(
                replies.message().await.unwrap().and_then(|reply| reply.event),
                Some(v1::generate_reply::Event::Delta(_))
            ) {}
            open.push(replies);
        }
    }
    let held = resident_bytes(router.pid());
    let [idle, held] = [idle, held].map(|bytes| bytes as f64 / 1e6);
    let each = (held - idle) * 1e3 / open.len() as f64;
    println!(
        "{} streams over {STREAM_CONNECTIONS} connections: {held:.1} MB, idle {idle:.1} MB, {each:.1} KB each",
        open.len()
    );
}
