//! Floods of connections that prove nothing, from another address: a worker with the token still joins in time, and its
//! peers still meet it.

use super::{DOORS, MODEL, coordinator, serve};
use crate::common::node::{Folder, Node, free_address};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;
use wire::JoinToken;

/// More than a listener holds: those that prove themselves, and those that wait.
const N_FLOOD: usize = 512;
const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// The limit for a worker's start and join; a silent connection keeps its place for five seconds, if it can.
const JOIN_MAX: Duration = Duration::from_secs(10);

/// Connections that are opened again whenever the port ends them, until this is dropped.
struct UnprovenFlood {
    _runtime: Runtime,
    n_opened: Arc<AtomicUsize>,
}

impl UnprovenFlood {
    /// Sends these bytes on each, and then nothing.
    fn start(port: SocketAddr, first: &'static [u8]) -> UnprovenFlood {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let n_opened = Arc::new(AtomicUsize::new(0));
        for _ in 0..N_FLOOD {
            let n_opened = n_opened.clone();
            runtime.spawn(async move {
                loop {
                    // The port may refuse for a moment.
                    if hold(port, first, &n_opened).await.is_err() {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            });
        }
        let flood = UnprovenFlood { _runtime: runtime, n_opened };
        let begun = Instant::now();
        while flood.n_opened.load(Relaxed) < N_FLOOD {
            assert!(begun.elapsed() < JOIN_MAX, "{} connections", flood.n_opened.load(Relaxed));
            std::thread::sleep(Duration::from_millis(10));
        }
        flood
    }
}

/// Opens a connection and holds it until the port ends it.
async fn hold(port: SocketAddr, first: &[u8], n_opened: &AtomicUsize) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((FROM, 0).into())?;
    let mut stream = socket.connect(port).await?;
    n_opened.fetch_add(1, Relaxed);
    stream.write_all(first).await?;
    stream.read_to_end(&mut Vec::new()).await.map(drop)
}

#[test]
fn a_flood_without_proof_keeps_no_worker_out() {
    let folder = Folder::new("flooded");
    let token = folder.write("token", JoinToken::random().unwrap().expose());
    let (mut coordinator, address) = coordinator(MODEL, &["--tp", "2", "--token-file", &token]);
    let mesh = free_address();
    let worker = ["worker", "--threads", "1", "--local-workers", "2", "--join", &address, "--token-file", &token];
    let first = Node::start(&[&worker[..], &["--mesh-listen", &mesh.to_string()]].concat());
    coordinator.until(&["a worker joins"]);
    // Half of a greeting, and half of what a peer of the mesh sends.
    let at_coordinator = UnprovenFlood::start(address.parse().unwrap(), b"LOCKSTP1");
    let at_mesh = UnprovenFlood::start(mesh, b"LOCKSTEP");
    let (place, begun) = (coordinator.log_len(), Instant::now());
    let second = Node::start(&worker);
    coordinator.until_since(place, &["a worker joins"]);
    let joined = begun.elapsed();
    coordinator.until_since(place, &["the replica is ready"]);
    println!("joined after {joined:?}, ready after {:?}", begun.elapsed());
    assert!(joined < JOIN_MAX, "the second worker joined after {joined:?}");
    assert!(begun.elapsed() < 2 * JOIN_MAX, "the ranks met after {:?}", begun.elapsed());
    let router = ["router", MODEL, "--coordinator", &address, "--token-file", &token];
    assert_eq!(Node::start(&[&router[..], &DOORS[..4]].concat()).answers(), serve(&[]).answers());
    let n_opened = [&at_coordinator, &at_mesh].map(|flood| flood.n_opened.load(Relaxed));
    println!("{n_opened:?} connections");
    for node in [&coordinator, &first, &second] {
        assert!(!node.log().contains("panicked"), "{}", node.log());
    }
}
