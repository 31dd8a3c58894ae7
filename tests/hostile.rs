//! Hostile connections of ten kinds, against every port of a cluster of processes, while 32 clients stream. Each answer
//! has the same bits as without an attack, and every port serves afterwards as before. The same for hostile tools,
//! schemas and grammars, beside eight clients.
//!
//! `make hostile` makes 100,000 of them, and fails if memory grows or if the 99th percentile of the streams' gaps is
//! more than doubled; its figures are in `benches/results/hostile.md`. CI makes few, and checks only bits and counts.
//! So does `make hostile-tools` with tools.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "hostile/kinds.rs"]
mod kinds;
#[path = "common/machine.rs"]
mod machine;
#[path = "common/node.rs"]
mod node;
#[path = "common/pem.rs"]
mod pem;
#[path = "common/ports.rs"]
mod ports;
#[path = "hostile/secured.rs"]
mod secured;
#[path = "hostile/streams.rs"]
mod streams;
#[path = "hostile/tools.rs"]
mod tools;

use kinds::{HOLD, KINDS, Port, Went, attack};
use machine::{Held, load, machine, write_result};
use node::{Folder, Node, free_address};
use std::fmt::Write;
use std::net::TcpStream;
use std::time::Duration;
use streams::{Seen, Streams};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};

const N_STREAMS: usize = 32;
/// The number of clients beside hostile tools.
const N_NEIGHBOURS: usize = 8;
/// The p99 of gaps under attack, in multiples of that in peace.
const GAPS_MAX: f64 = 2.0;
/// The number of bursts of the attack in a second.
const PORTIONS_A_SECOND: u64 = 20;
/// The longest time until ports release the resources of hostile connections.
const SETTLE: Duration = Duration::from_secs(30);

/// The extent of a run.
struct Plan {
    n_connections: usize,
    a_second: usize,
    peace: Duration,
    tokens_max: u32,
    model: &'static [&'static str],
}

const FEW: Plan = Plan {
    n_connections: 600,
    a_second: 300,
    peace: Duration::ZERO,
    tokens_max: 60,
    model: &["tests/reference/llama-f32-tied", "--activations", "f32"],
};

/// A cluster of three roles, with a second router that serves its clients by TLS and operators by a port of their own;
/// and the ports by name.
struct Cluster {
    nodes: Vec<(&'static str, Node)>,
    ports: Vec<(&'static str, Port)>,
    http: String,
    _folder: Folder,
}

impl Cluster {
    fn start(model: &[&str], context: &str) -> Cluster {
        let folder = Folder::new("hostile");
        let token = folder.write("token", wire::JoinToken::random().unwrap().expose());
        let [http, grpc, join, mesh, of_coordinator, of_worker, https, grpcs, admin] = [(); 9].map(|()| free_address());
        let text = [http, grpc, join, mesh, of_coordinator, of_worker].map(|port| port.to_string());
        let [at_http, at_grpc, at_join, at_mesh, at_coordinator, at_worker] = text.each_ref().map(String::as_str);
        let token = ["--token-file", &token];
        let limits = ["--max-running", "32", "--max-waiting", "64", "--context", context];
        let coordinator = ["--listen", at_join, "--health", at_coordinator, "--kv-memory", "64MiB"];
        let coordinator = [&["coordinator"], model, &coordinator[..], &limits, &token].concat();
        let worker = ["worker", "--join", at_join, "--mesh-listen", at_mesh, "--health", at_worker, "--threads", "1"];
        let router = [&["router", model[0], "--coordinator", at_join], &limits[..4], &token].concat();
        let plain = ["--http", at_http, "--grpc", at_grpc];
        let (tls, flags) = secured::files(&folder);
        let with_tls = ["--http", &https.to_string(), "--grpc", &grpcs.to_string(), "--admin", &admin.to_string()];
        let with_tls = [&router[..], &with_tls, &flags.each_ref().map(String::as_str)].concat();
        let mut nodes = vec![
            ("coordinator", Node::start(&coordinator)),
            ("worker", Node::start(&[&worker[..], &token].concat())),
            ("router", Node::start(&[&router[..], &plain].concat())),
            ("router with TLS", Node::start(&with_tls)),
        ];
        nodes[0].1.until(&["coordinating"]);
        let http_url = nodes[2].1.http();
        nodes[2].1.until_ready(&http_url);
        nodes[3].1.until_ready(&format!("http://{admin}"));
        let within = |address, protocol| Port { address, tls: Some(tls.handshake(protocol)) };
        let ports = vec![
            ("HTTP", Port::plain(http)),
            ("gRPC", Port::plain(grpc)),
            ("coordinator", Port::plain(join)),
            ("mesh", Port::plain(mesh)),
            ("health of a coordinator", Port::plain(of_coordinator)),
            ("health of a worker", Port::plain(of_worker)),
            ("HTTPS, before a handshake", Port::plain(https)),
            ("HTTPS, after it", within(https, "http/1.1")),
            ("HTTPS, after it, HTTP/2", within(https, "h2")),
            ("gRPC with TLS, before a handshake", Port::plain(grpcs)),
            ("gRPC with TLS, after it", within(grpcs, "h2")),
            ("operators", Port::plain(admin)),
        ];
        Cluster { nodes, ports, http: http_url, _folder: folder }
    }

    fn held(&self) -> Vec<Held> {
        self.nodes.iter().map(|(_, node)| Held::by(node.pid())).collect()
    }
}

/// The connections of a run, by port and by outcome.
struct Flood {
    counts: Vec<[usize; 4]>,
    took: Duration,
    /// The resources of each process, once a second.
    held: Vec<Vec<Held>>,
}

impl Flood {
    fn column(went: Went) -> usize {
        match went {
            Went::Ended => 0,
            Went::Left => 1,
            Went::Refused => 2,
            Went::Stuck => 3,
        }
    }
}

/// Makes so many connections at this rate, each kind against each port in turn.
async fn flood(cluster: &Cluster, plan: &Plan) -> Flood {
    let mut seen = Flood { counts: vec![[0; 4]; cluster.ports.len()], took: Duration::ZERO, held: Vec::new() };
    let (begun, mut looked) = (Instant::now(), Instant::now());
    let mut under_way = JoinSet::new();
    let mut portions = interval(Duration::from_secs(1) / PORTIONS_A_SECOND as u32);
    let each = (plan.a_second / PORTIONS_A_SECOND as usize).max(1);
    for first in (0..plan.n_connections).step_by(each) {
        portions.tick().await;
        for i in first..(first + each).min(plan.n_connections) {
            let port = i / KINDS.len() % cluster.ports.len();
            let (kind, to) = (KINDS[i % KINDS.len()], cluster.ports[port].1.clone());
            under_way.spawn(async move { (port, attack(kind, to).await) });
        }
        while let Some(done) = under_way.try_join_next() {
            let (port, went) = done.unwrap();
            seen.counts[port][Flood::column(went)] += 1;
        }
        if looked.elapsed() >= Duration::from_secs(1) {
            looked = Instant::now();
            seen.held.push(cluster.held());
        }
    }
    seen.took = begun.elapsed();
    while let Some(done) = under_way.join_next().await {
        let (port, went) = done.unwrap();
        seen.counts[port][Flood::column(went)] += 1;
    }
    seen
}

fn check_bits(seen: &Seen, n_streams: usize, when: &str) {
    assert!(seen.different.is_none(), "{when}: {:?}", seen.different);
    assert!(seen.n_answers >= n_streams, "{when}: {} answers", seen.n_answers);
}

/// The mesh's port immediately ends hostile connections that do not begin like a peer, or that hang up: six kinds of
/// ten, of which the last round may be short.
fn check_mesh(cluster: &Cluster, flood: &Flood) {
    let at = cluster.ports.iter().position(|(port, _)| *port == "mesh").unwrap();
    let (n_ended, n_all) = (flood.counts[at][0], flood.counts[at].iter().sum::<usize>());
    assert!(2 * n_ended > n_all, "the mesh's port has ended {n_ended} of {n_all}");
}

/// Each process has as many files open as before, shortly after the last connection.
fn check_let_go(cluster: &Cluster, before: &[Held]) {
    let began = std::time::Instant::now();
    let too_many = || {
        let now = cluster.held();
        let grown = now.iter().zip(before).zip(&cluster.nodes);
        grown
            .filter(|((now, before), _)| now.n_files > before.n_files + 2.0)
            .map(|(held, (name, _))| (*name, held.0.n_files, held.1.n_files))
            .collect::<Vec<_>>()
    };
    while !too_many().is_empty() {
        assert!(began.elapsed() < SETTLE, "files that stay open (now, before): {:?}", too_many());
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn run(plan: &Plan) -> (Cluster, Seen, Flood, Seen) {
    let cluster = Cluster::start(plan.model, "256");
    let expected = streams::expected(&cluster.http, N_STREAMS, plan.tokens_max);
    let begin = || -> Streams { streams::begin(&cluster.http, plan.tokens_max, &expected) };
    let streams = begin();
    std::thread::sleep(plan.peace);
    let peace = streams.end();
    check_bits(&peace, N_STREAMS, "before the attack");
    let before = cluster.held();
    let streams = begin();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let flood = runtime.block_on(flood(&cluster, plan));
    let attacked = streams.end();
    check_bits(&attacked, N_STREAMS, "under attack");
    let n_made: usize = flood.counts.iter().flatten().sum();
    assert_eq!(n_made, plan.n_connections);
    for (counts, (port, Port { address, .. })) in flood.counts.iter().zip(&cluster.ports) {
        assert!(counts.iter().sum::<usize>() > 0, "{port} was not attacked");
        assert_eq!((counts[2], counts[3]), (0, 0), "{port}: refused, or neither read nor ended");
        assert!(TcpStream::connect(address).is_ok(), "{port} still accepts connections");
    }
    for (name, port) in cluster.ports.iter().filter(|(_, port)| port.tls.is_some()) {
        let answer = runtime.block_on(secured::request(port));
        assert!(!answer.is_empty(), "{name} still answers");
    }
    check_mesh(&cluster, &flood);
    check_let_go(&cluster, &before);
    let again = streams::expected(&cluster.http, N_STREAMS, plan.tokens_max);
    assert!(again == expected, "the same answers afterwards");
    for (name, node) in &cluster.nodes {
        assert!(!node.log().contains("panicked"), "{name}: {}", node.log());
    }
    (cluster, peace, flood, attacked)
}

#[test]
fn hostile_connections_change_no_stream() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<usize>().unwrap());
    let Some(n_connections) = number("LOCKSTEP_TEST_HOSTILE") else {
        drop(run(&FEW));
        return;
    };
    let a_second = number("LOCKSTEP_TEST_HOSTILE_RATE").unwrap_or(500);
    let plan = Plan { n_connections, a_second, peace: Duration::from_secs(20), tokens_max: 100, ..FEW };
    let (cluster, peace, flood, attacked) = run(&plan);
    judge(&plan, &cluster, [&peace, &attacked], &flood);
}

/// Sends every kind so many times, one after another, while other clients stream: each has its expected outcome, and no
/// answer of the other clients changes.
fn run_tools(n_rounds: usize, peace: Duration) -> [Seen; 2] {
    let cluster = Cluster::start(&["tests/reference/llama-f32-rope3"], "4096");
    let expected = streams::expected(&cluster.http, N_NEIGHBOURS, FEW.tokens_max);
    let begin = || -> Streams { streams::begin(&cluster.http, FEW.tokens_max, &expected) };
    let streams = begin();
    std::thread::sleep(peace);
    let in_peace = streams.end();
    let (streams, kinds) = (begin(), tools::kinds());
    let mut wrong = Vec::new();
    for _ in 0..n_rounds {
        for (name, status, body) in &kinds {
            let became = tools::send_request(&cluster.http, name, body);
            println!("{}: {} after {:?}, {}", became.name, became.status, became.took, became.detail);
            wrong.extend((became.status != *status).then_some(became));
        }
    }
    let beside = streams.end();
    assert!(wrong.is_empty(), "{wrong:#?}");
    check_bits(&in_peace, N_NEIGHBOURS, "without hostile tools");
    check_bits(&beside, N_NEIGHBOURS, "beside hostile tools");
    for (name, node) in &cluster.nodes {
        assert!(!node.log().contains("panicked"), "{name}: {}", node.log());
    }
    [in_peace, beside]
}

#[test]
fn hostile_tools_are_bounded_and_change_no_stream() {
    let n_rounds = std::env::var("LOCKSTEP_TEST_HOSTILE_TOOLS").ok().map(|text| text.parse::<usize>().unwrap());
    let peace = Duration::from_secs(if n_rounds.is_some() { 20 } else { 0 });
    let [peace, beside] = run_tools(n_rounds.unwrap_or(1), peace);
    if n_rounds.is_some() {
        let (before, after) = (peace.within(99), beside.within(99));
        println!("{} machine: p99 of gaps {before:.1} ms without, {after:.1} ms beside hostile tools", load());
        assert!(after <= GAPS_MAX * before, "{after} ms, {before} without them");
    }
}

fn judge(plan: &Plan, cluster: &Cluster, [peace, attacked]: [&Seen; 2], flood: &Flood) {
    let rate = plan.n_connections as f64 / flood.took.as_secs_f64();
    let mut rows = String::new();
    for (counts, (port, _)) in flood.counts.iter().zip(&cluster.ports) {
        writeln!(rows, "| {port} | {} | {} | {} |", counts.iter().sum::<usize>(), counts[0], counts[1]).unwrap();
    }
    let mut memory = String::new();
    let mut flat = Vec::new();
    for (i, (name, _)) in cluster.nodes.iter().enumerate() {
        let n = flood.held.len() / 3;
        assert!(n > 0, "an attack of {:?} is too short to measure memory in thirds", flood.took);
        let third = |part: usize| {
            let looks = flood.held[part * n..(part + 1) * n].iter().map(|held| &held[i]);
            Held { n_files: 0.0, ..Held::median(&looks.collect::<Vec<_>>()) }
        };
        let thirds = [0, 1, 2].map(third);
        let mib = thirds.clone().map(|held| format!("{:.1}", held.rss_kib / 1024.0)).join(" | ");
        writeln!(memory, "| {name} | {mib} |").unwrap();
        flat.push((*name, thirds[2].is_flat_after(&thirds[1])));
    }
    let gaps = |seen: &Seen| format!("{:.1} | {:.1} | {:.1}", seen.within(50), seen.within(99), seen.within(100));
    let text = format!(
        "# Hostile connections\n\n\
        Made by `make hostile` on {}, {} at its end: {} connections at {rate:.0} a second, a tenth of each kind (idle \
        for {} s, a byte at a time, half closed, one byte, 100 HTTP/2 streams opened and reset, another protocol, \
        broken TLS, a header of 1 MiB, 100,000 headers, a request that is aborted), against every port of a router, a \
        router with TLS and a port for operators, a coordinator and a worker in processes of their own, while {} \
        clients stream. Against a port with TLS, each kind comes before a handshake and after one. Clients, \
        attackers and servers share the machine. Every answer had the same bits as before the attack: {} answers \
        before, {} under attack.\n\n\
        | gaps of streams, ms | median | p99 | worst |\n|---|---:|---:|---:|\n\
        | before the attack | {} |\n| under attack | {} |\n\n\
        Required: a p99 at most twice as long; it is {:.2} times as long.\n\n\
        | port | connections | ended or answered by the port | left by the attacker |\n|---|---:|---:|---:|\n{rows}\n\
        RSS in the thirds of the attack, MiB; required: flat.\n\n\
        | process | first | second | last |\n|---|---:|---:|---:|\n{memory}",
        machine(),
        load(),
        plan.n_connections,
        HOLD.as_secs(),
        N_STREAMS,
        peace.n_answers,
        attacked.n_answers,
        gaps(peace),
        gaps(attacked),
        attacked.within(99) / peace.within(99),
    );
    println!("{text}");
    write_result("hostile.md", &text);
    assert!(flat.iter().all(|(_, is_flat)| *is_flat), "{flat:?}");
    assert!(
        attacked.within(99) <= GAPS_MAX * peace.within(99),
        "{} ms, {} before",
        attacked.within(99),
        peace.within(99)
    );
}
