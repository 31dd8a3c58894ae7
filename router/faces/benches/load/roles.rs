//! The processes of a measurement. Each prints its address to standard output, and ends when its standard input closes.

use crate::peers::{Bare, Stub};
use checkpoint::Checkpoint;
use cluster::MemoryStore;
use coordinator::{Limits, ModelShape, PlacementPolicy, Timings};
use proto::v1::inference_server::InferenceServer;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use types::{Activations, Grid, KvDtype};
use wire::{server, tcp, tcp_incoming};
use worker::sim::SimModel;

/// The name of the threads whose CPU time counts as the router's.
pub const ROUTER_THREADS: &str = "router";
pub const OTHER_THREADS: &str = "other";
/// The duration of a step of the replicas on `sim`, how many requests run at once, and their longest log.
const STEP_MICROS: u64 = 1000;
const SLOW_STEP_MICROS: u64 = 500_000;
const RUNNING_MAX: u32 = 512;
const SLOW_RUNNING_MAX: u32 = 1024;
const CONTEXT: u32 = 4096;
/// More streams than are ever open here.
const REQUESTS_MAX: usize = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A bare server that answers at once, and a coordinator that does; no models.
    Peers,
    /// A bare server that forwards to another one.
    Relay,
    Router,
    /// The same with HTTP, at the first of two addresses.
    PageRouter,
    /// A coordinator and a worker on `sim`.
    Replica,
    /// The same with slow steps, and room for more streams.
    SlowReplica,
}

const ROLES: [(Role, &str); 6] = [
    (Role::Peers, "as-peers"),
    (Role::Relay, "as-relay"),
    (Role::Router, "as-router"),
    (Role::PageRouter, "as-page-router"),
    (Role::Replica, "as-replica"),
    (Role::SlowReplica, "as-slow-replica"),
];

impl Role {
    pub fn named(name: &str) -> Option<Role> {
        ROLES.iter().find(|(_, of)| *of == name).map(|(role, _)| *role)
    }

    fn name(self) -> &'static str {
        ROLES.iter().find(|(role, _)| *role == self).unwrap().1
    }

    pub fn play(self, peer: Option<&str>) {
        let is_router = matches!(self, Role::Router | Role::PageRouter);
        let threads = if is_router { ROUTER_THREADS } else { OTHER_THREADS };
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).thread_name(threads).enable_all().build().unwrap();
        let peer = peer.unwrap_or_default().to_owned();
        runtime.spawn(async move {
            match self {
                Role::Peers => peers().await,
                Role::Relay => bare(Bare { behind: Some(crate::client(&peer)) }).await,
                Role::Router => router(&peer).await,
                Role::PageRouter => page_router(&peer).await,
                Role::Replica => replica(STEP_MICROS, RUNNING_MAX).await,
                Role::SlowReplica => replica(SLOW_STEP_MICROS, SLOW_RUNNING_MAX).await,
            }
        });
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        runtime.shutdown_background();
    }
}

async fn listen() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    listener
}

async fn bare(service: Bare) {
    let incoming = tcp_incoming(listen().await);
    server().add_service(InferenceServer::new(service)).serve_with_incoming(incoming).await.unwrap();
}

async fn peers() {
    let serve = bare(Bare { behind: None });
    tokio::spawn(serve);
    // The addresses are printed in this order.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let incoming = tcp_incoming(listen().await);
    server().add_service(Stub::server()).serve_with_incoming(incoming).await.unwrap();
}

fn model() -> Checkpoint {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/llama-f32-tied");
    Checkpoint::open(&folder).unwrap()
}

async fn router(coordinator: &str) {
    let (config, members, text) = router_parts(coordinator);
    let incoming = tcp_incoming(listen().await);
    faces::serve_grpc(config, members, text, incoming, CancellationToken::new()).await.unwrap();
}

async fn page_router(coordinator: &str) {
    let (config, members, text) = router_parts(coordinator);
    let (http, grpc) = (listen().await, listen().await);
    faces::serve(config, members, text, http, grpc, CancellationToken::new()).await.unwrap();
}

fn router_parts(coordinator: &str) -> (router::Config, Vec<router::CoordinatorChannel>, router::ModelText) {
    // Metrics are installed as in the binary: without an exporter they would cost nothing.
    telemetry::exporter::install(&[]).unwrap();
    let checkpoint = model();
    let text = router::ModelText::of(&checkpoint).unwrap();
    let limits = router::RouterLimits {
        requests_max: REQUESTS_MAX,
        requests_waiting_max: REQUESTS_MAX,
        ..router::RouterLimits::default()
    };
    let config = router::Config { limits, ..router::Config::default() };
    let members = vec![router::CoordinatorChannel { name: "replica".into(), channel: tcp(coordinator).unwrap() }];
    (config, members, text)
}

async fn replica(step_micros: u64, running_max: u32) {
    let shape = ModelShape { context: CONTEXT, ..ModelShape::of(&model()) };
    let limits = Limits::default();
    // A step has room for one token of each running request.
    let limits = Limits { batch_tokens_max: limits.batch_tokens_max.max(running_max), ..limits };
    let policy = PlacementPolicy {
        grid: Grid::SOLO,
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        kv_memory: Some(1 << 30),
        memory_permille: None,
        state_cache: None,
        context: Some(CONTEXT),
        running_max,
        slice_max: limits.chunk_tokens_max,
    };
    let vocab = shape.vocab;
    let config = coordinator::Config {
        replica: "replica".into(),
        model: "sim".into(),
        model_path: "/nowhere".into(),
        shape,
        policy,
        policy_digest: None,
        prefix_cache: true,
        zero_kv: false,
        salt: [7; 16],
        mesh_seed: [7; 32],
        speaks: proto::ProtocolRange::default(),
        limits,
        // A busy machine must not count as a lost rank.
        waits: Timings { beats_missed_max: 1000, hang_min: Duration::from_secs(60), ..Timings::default() },
    };
    let sim = SimModel { vocab, step_micros, ..SimModel::default() };
    let worker = worker::Config { device: "sim".into(), memory_bytes: 4 << 30, ..worker::Config::default() };
    let end = CancellationToken::new();
    let listener = listen().await;
    let here = tcp(&listener.local_addr().unwrap().to_string()).unwrap();
    tokio::spawn(worker::serve(here, Box::new(sim), worker, end.clone()));
    let claim = MemoryStore::starting_at(1).claim("replica", "in memory");
    coordinator::serve(tcp_incoming(listener), config, claim, end).await.unwrap();
}

/// A process of this measurement; dropping it ends it.
pub struct Child {
    process: std::process::Child,
    pub addresses: Vec<String>,
}

impl Child {
    pub fn start(role: Role, peer: Option<&str>) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg(role.name()).args(peer).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let stdout_lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let n_addresses = if matches!(role, Role::Peers | Role::PageRouter) { 2 } else { 1 };
        let addresses = stdout_lines.take(n_addresses).map(Result::unwrap).collect();
        Child { process, addresses }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ended = self.process.wait();
    }
}
