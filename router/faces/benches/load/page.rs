//! The cost of the page's viewers for a router that answers 1,000 streams: the CPU time of its threads with ten viewers
//! of each view, compared with the time without viewers, before them and after them.

use crate::roles::{Child, ROUTER_THREADS, Role};
use crate::watch::{Machine, threads_seconds};
use crate::{client, ready, request};
use proto::v1::generate_reply::Event;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

const STREAMS: usize = 1000;
const CONNECTIONS: usize = 20;
/// More tokens than any stream receives during the measurement.
const STREAM_TOKENS: u32 = 3500;
const STREAMS_BEGIN_MAX: Duration = Duration::from_secs(120);
const VIEWERS: usize = 10;
/// The number of the first request that viewers open. It is in progress, whatever was requested before all was ready.
const OPENED: usize = 600;
const ROUNDS: usize = 5;
const WINDOW: Duration = Duration::from_secs(5);
/// A view's first events are not part of its running cost.
const SETTLE: Duration = Duration::from_secs(1);
/// In percent of a core: the most that ten viewers may cost, and the most that may remain after they have left.
const COST_MAX: f64 = 1.0;
const LEFT_MAX: f64 = 0.2;

/// A viewer's requests: the topic of the view, and whether a request is open beside the list, which the page reads
/// again with each event.
#[derive(Clone, Copy)]
struct PageView {
    name: &'static str,
    topic: &'static str,
    opens_request: bool,
}

const VIEWS: [PageView; 4] = [
    PageView { name: "Cluster", topic: "cluster", opens_request: false },
    PageView { name: "Requests", topic: "requests", opens_request: false },
    PageView { name: "Requests, one open", topic: "requests", opens_request: true },
    PageView { name: "Load", topic: "load", opens_request: false },
];

/// The events and bytes that all viewers of a view have read.
#[derive(Default)]
struct SeenCounts {
    n_events: AtomicU64,
    n_bytes: AtomicU64,
}

/// Measures, prints a table, and returns whether the bounds were kept.
pub async fn page() -> bool {
    let replica = Child::start(Role::SlowReplica, None);
    let router = Child::start(Role::PageRouter, Some(&replica.addresses[0]));
    let [http, grpc] = [&router.addresses[0], &router.addresses[1]];
    let streams = begin_streams(grpc).await;
    let pids = [std::process::id(), router.pid(), replica.pid()];
    let (mut costs, mut before, mut left) = (VIEWS.map(|_| Vec::new()), Vec::new(), Vec::new());
    let (reads, machine) = (VIEWS.map(|_| Arc::<SeenCounts>::default()), Machine::now(&pids));
    // The first round warms up.
    for round in 0..=ROUNDS {
        let baseline = percent_of_core(router.pid()).await;
        let mut spent = Vec::new();
        for (view, read) in VIEWS.iter().zip(&reads) {
            let mut viewers = JoinSet::new();
            for at in 0..VIEWERS {
                viewers.spawn(look(*view, http.clone(), OPENED + at, read.clone()));
            }
            sleep(SETTLE).await;
            spent.push(percent_of_core(router.pid()).await);
            assert!(viewers.try_join_next().is_none(), "{}: a viewer was refused", view.name);
        }
        sleep(SETTLE).await;
        let after = percent_of_core(router.pid()).await;
        if round > 0 {
            // The streams' own cost drifts with the machine. The mean of before and after estimates it in between.
            let alone = f64::midpoint(baseline, after);
            costs.iter_mut().zip(&spent).for_each(|(costs, spent)| costs.push(spent - alone));
            before.push(baseline);
            left.push(after - baseline);
        }
    }
    assert_eq!(streams.len(), STREAMS, "a stream ended early");
    println!("{STREAMS} streams, {VIEWERS} viewers, {ROUNDS} rounds; others used {:.2} cores", machine.foreign_cores());
    println!("{:<24}{:>28}{:>12}{:>14}", "percent of a core", "median (least to most)", "events/s", "KB/s");
    println!("{:<24}{:>28}", "no viewer", format_costs(&mut before));
    println!("{:<24}{:>28}", "after them - before", format_costs(&mut left));
    let watched = (ROUNDS + 1) as f64 * (WINDOW + SETTLE).as_secs_f64();
    for ((view, costs), read) in VIEWS.iter().zip(&mut costs).zip(&reads) {
        let [events, bytes] = [&read.n_events, &read.n_bytes].map(|n| n.load(Relaxed) as f64 / watched);
        assert!(events > 1.0, "{}: nothing was shown", view.name);
        println!("{:<24}{:>28}{events:>12.1}{:>14.0}", view.name, format_costs(costs), bytes / 1e3);
    }
    let is_kept = costs.iter_mut().all(|costs| median(costs) <= COST_MAX) && median(&mut left).abs() <= LEFT_MAX;
    println!(
        "limits: {COST_MAX} each, and {LEFT_MAX} of viewers that left: {}",
        ["missed", "kept"][usize::from(is_kept)]
    );
    is_kept
}

fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn format_costs(values: &mut [f64]) -> String {
    let median = median(values);
    format!("{median:.2} ({:.2} to {:.2})", values[0], values[values.len() - 1])
}

/// Returns the CPU time of the router's threads within a window.
async fn percent_of_core(pid: u32) -> f64 {
    let (before, began) = (threads_seconds(pid, ROUTER_THREADS), Instant::now());
    sleep(WINDOW).await;
    (threads_seconds(pid, ROUTER_THREADS) - before) / began.elapsed().as_secs_f64() * 100.0
}

/// Starts streams that receive one token with each of the replica's slow steps. Returns once all have begun.
async fn begin_streams(address: &str) -> JoinSet<()> {
    let clients: Vec<_> = (0..CONNECTIONS).map(|_| client(address)).collect();
    ready(&clients[0]).await;
    let (n_begun, mut streams) = (Arc::<AtomicU64>::default(), JoinSet::new());
    for at in 0..STREAMS {
        let (mut client, n_begun) = (clients[at % CONNECTIONS].clone(), n_begun.clone());
        streams.spawn(async move {
            let text = format!("Client {at} asks");
            let mut replies = client.generate(request(&text, STREAM_TOKENS)).await.unwrap().into_inner();
            let mut has_begun = false;
            while let Some(reply) = replies.message().await.unwrap() {
                if matches!(reply.event, Some(Event::Delta(_))) && !std::mem::replace(&mut has_begun, true) {
                    n_begun.fetch_add(1, Relaxed);
                }
            }
            panic!("a stream ended before it was measured");
        });
    }
    let deadline = Instant::now() + STREAMS_BEGIN_MAX;
    while n_begun.load(Relaxed) < STREAMS as u64 {
        assert!(Instant::now() < deadline, "{} streams have begun", n_begun.load(Relaxed));
        assert!(streams.try_join_next().is_none(), "a stream ended early");
        sleep(Duration::from_millis(50)).await;
    }
    streams
}

/// Reads the same resources as the page, until it is aborted.
async fn look(view: PageView, address: String, number: usize, read: Arc<SeenCounts>) {
    let mut events = get(&address, &format!("/events?of={}", view.topic)).await;
    let mut opened = BufReader::new(TcpStream::connect(&address).await.unwrap());
    let mut line = Vec::new();
    loop {
        line.clear();
        let n = timeout(Duration::from_secs(30), events.read_until(b'\n', &mut line)).await.unwrap().unwrap();
        if n == 0 {
            return;
        }
        read.n_bytes.fetch_add(n as u64, Relaxed);
        if line.starts_with(b"data: ") {
            read.n_events.fetch_add(1, Relaxed);
            if view.opens_request {
                let n = open(&mut opened, &address, number).await;
                read.n_bytes.fetch_add(n as u64, Relaxed);
            }
        }
    }
}

/// Opens a stream, and reads past its head.
async fn get(address: &str, path: &str) -> BufReader<TcpStream> {
    let mut stream = BufReader::new(TcpStream::connect(address).await.unwrap());
    send_get(&mut stream, address, path).await;
    let head = head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    stream
}

/// Reads a request's timeline over a persistent connection, and returns its number of bytes.
async fn open(stream: &mut BufReader<TcpStream>, address: &str, number: usize) -> usize {
    send_get(stream, address, &format!("/requests/{number}")).await;
    let head = head(stream).await.to_lowercase();
    let n = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().trim().parse().unwrap();
    let mut body = vec![0; n];
    stream.read_exact(&mut body).await.unwrap();
    assert!(head.starts_with("http/1.1 200") && body.starts_with(b"{"), "{head}");
    n
}

async fn send_get(stream: &mut BufReader<TcpStream>, address: &str, path: &str) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n").as_bytes()).await.unwrap();
}

async fn head(stream: &mut BufReader<TcpStream>) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(stream.read_line(&mut head).await.unwrap() > 0, "{head}");
    }
    head
}
