//! A replica of sim workers in this process, and a router made of nothing but the generated client.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ::wire::{Dialer, in_memory};
use checkpoint::ModelSizes;
use cluster::MemoryStore;
use coordinator::{Config, Limits, ModelShape, PlacementPolicy, Timings};
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::replica_frame::Frame;
use proto::cluster::router_frame;
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};
use types::{Activations, Finish, Grid, KvDtype, KvLayout, LayerGroups, Request, RequestId, Token, Tokens};
use worker::Load;
use worker::sim::SimModel;

/// Longer than anything here takes, and shorter than a tester waits.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// 16 tokens x 1 layer x K and V x 1 head x 1 number x 2 bytes.
const BLOCK_BYTES: u64 = 64;

pub fn sim() -> SimModel {
    SimModel { vocab: 64, ..SimModel::default() }
}

pub fn config(n_blocks: u64, context: u32, running_max: u32) -> Config {
    let shape = ModelShape {
        n_layers: 1,
        hidden: 1,
        n_heads: 1,
        n_kv_heads: 1,
        head_dim: 1,
        inner: 1,
        vocab: 64,
        context,
        experts: None,
        states: None,
        cache: LayerGroups::alike(1, KvLayout::heads(1, 1)),
        sizes: ModelSizes::default(),
        joined: 0..0,
        draft: 0,
    };
    let policy = PlacementPolicy {
        grid: Grid::SOLO,
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        kv_memory: Some(n_blocks * BLOCK_BYTES),
        memory_permille: None,
        state_cache: None,
        context: Some(context),
        running_max,
        slice_max: Limits::default().chunk_tokens_max,
    };
    Config {
        replica: "replica-0".into(),
        model: "sim".into(),
        model_path: "/nowhere".into(),
        shape,
        policy,
        prefix_cache: true,
        zero_kv: false,
        salt: [7; 16],
        policy_digest: None,
        mesh_seed: [7; 32],
        speaks: proto::ProtocolRange::default(),
        limits: Limits::default(),
        // Longer limits than in production: a busy machine must not make a worker count as dead. Tests that need losses
        // set these themselves.
        waits: Timings {
            state_every: Duration::from_millis(10),
            beats_missed_max: 30_000,
            hang_min: Duration::from_secs(600),
            // Longer than any test: a grid stays as it is, except in tests that shorten this.
            replan_after: Duration::from_secs(600),
            regrow_after: Duration::from_millis(100),
            ..Timings::default()
        },
    }
}

/// 16 tokens x 4 layers x K and V x 2 heads x 32 numbers x 2 bytes.
const GRID_BLOCK_BYTES: u64 = 16_384;

/// A rank of `on_grid`, whatever the grid.
pub fn grid_sim() -> SimModel {
    sim()
}

/// The same replica on `tp` ranks in each of `pp` stages, which divide its model evenly.
pub fn on_grid(config: Config, tp: u16, pp: u16) -> Config {
    let n_blocks = config.policy.kv_memory.unwrap() / BLOCK_BYTES;
    let n_ranks = u64::from(tp) * u64::from(pp);
    let policy = PlacementPolicy {
        grid: Grid { tp, pp },
        kv_memory: Some(n_blocks * GRID_BLOCK_BYTES / n_ranks),
        memory_permille: None,
        ..config.policy
    };
    let cache = LayerGroups::alike(4, KvLayout::heads(2, 32));
    let shape = ModelShape { n_layers: 4, n_heads: 4, n_kv_heads: 2, head_dim: 32, cache, ..config.shape };
    // Simulated ranks do not wait for each other as those of a real grid do: one may be any number of steps behind.
    let limits = Limits { rank_frames_max: 1 << 16, ..config.limits };
    Config { shape, policy, limits, ..config }
}

pub struct Cluster {
    pub dialer: Dialer,
    pub shutdown: CancellationToken,
    pub coordinator: JoinHandle<Result<(), coordinator::Error>>,
}

impl Cluster {
    pub fn start(config: Config) -> Cluster {
        let (dialer, pipes) = in_memory();
        let shutdown = CancellationToken::new();
        let claim = MemoryStore::starting_at(1).claim(&config.replica, "in-memory");
        let coordinator = tokio::spawn(coordinator::serve(Box::pin(pipes), config, claim, shutdown.clone()));
        Cluster { dialer, shutdown, coordinator }
    }

    pub fn worker(&self, loader: impl Load + 'static) -> Worker {
        self.worker_at("", loader)
    }

    /// A worker that gives peers this address.
    pub fn worker_at(&self, mesh_address: &str, loader: impl Load + 'static) -> Worker {
        let (device, mesh_address) = ("sim".into(), mesh_address.into());
        let config = worker::Config { device, mesh_address, memory_bytes: 1 << 30, ..worker::Config::default() };
        let stop = CancellationToken::new();
        let serve = worker::serve(self.dialer.channel(), Box::new(loader), config, stop.clone());
        Worker { task: tokio::spawn(serve), stop }
    }

    pub async fn router(&self) -> Router {
        self.router_with_hello(hello(proto::VERSION)).await
    }

    pub async fn router_with_hello(&self, hello: wire::RouterFrame) -> Router {
        let (up, mut down) = attach(&self.dialer, &[hello]).await.unwrap();
        let mut states = Vec::new();
        let welcome = loop {
            match next(&mut down).await.unwrap() {
                Frame::Welcome(welcome) => break welcome,
                Frame::State(state) => states.push(state),
                other => panic!("{other:?} arrived before a welcome"),
            }
        };
        Router { up, down, welcome, state: states.pop().unwrap_or_default(), streams: HashMap::new(), n_requests: 0 }
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        timeout(PATIENCE, self.coordinator).await.unwrap().unwrap().unwrap();
    }
}

pub struct Worker {
    pub task: JoinHandle<Result<(), worker::Error>>,
    pub stop: CancellationToken,
}

impl Worker {
    /// The worker disappears without a message.
    pub async fn kill(self) {
        self.task.abort();
        assert!(timeout(PATIENCE, self.task).await.unwrap().unwrap_err().is_cancelled());
    }

    /// The worker is signalled to end, and reports it before it disappears.
    pub async fn leave(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.task).await.unwrap().unwrap().unwrap();
    }
}

pub fn hello(version: &str) -> wire::RouterFrame {
    let hello = wire::RouterHello { version: version.into(), ..wire::RouterHello::default() };
    router_frame(router_frame::Frame::Hello(hello))
}

pub fn router_frame(frame: router_frame::Frame) -> wire::RouterFrame {
    wire::RouterFrame { frame: Some(frame) }
}

pub async fn attach(
    dialer: &Dialer,
    first: &[wire::RouterFrame],
) -> Result<(mpsc::Sender<wire::RouterFrame>, Streaming<wire::ReplicaFrame>), Status> {
    let (up, frames) = mpsc::channel(4096);
    for frame in first {
        up.try_send(frame.clone()).unwrap();
    }
    let mut client = CoordinatorClient::new(dialer.channel());
    let down = timeout(PATIENCE, client.attach(ReceiverStream::new(frames))).await.unwrap()?.into_inner();
    Ok((up, down))
}

pub async fn next(down: &mut Streaming<wire::ReplicaFrame>) -> Result<Frame, Status> {
    match timeout(PATIENCE, down.message()).await.expect("a frame arrives in time")? {
        Some(frame) => Ok(frame.frame.unwrap()),
        None => Err(Status::ok("the stream has ended")),
    }
}

pub struct Router {
    pub up: mpsc::Sender<wire::RouterFrame>,
    pub down: Streaming<wire::ReplicaFrame>,
    pub welcome: wire::Welcome,
    pub state: wire::State,
    pub streams: HashMap<RequestId, Stream>,
    n_requests: u64,
}

#[derive(Debug)]
pub struct Stream {
    pub request: Request,
    pub output: Tokens,
    pub finish: Option<Finish>,
}

/// The content of a frame about one request.
pub enum RouterEvent {
    Tokens(RequestId),
    Finished(RequestId),
    Refused(wire::Refused, Box<Request>),
}

impl Router {
    pub fn next_id(&mut self) -> RequestId {
        self.n_requests += 1;
        RequestId::new(self.welcome.router, self.n_requests).unwrap()
    }

    pub async fn submit(&mut self, request: Request) -> RequestId {
        let id = self.next_id();
        let request = Request { id, ..request };
        let frame = router_frame(router_frame::Frame::Submit((&request).into()));
        self.streams.insert(id, Stream { request, output: Tokens::new(), finish: None });
        self.up.send(frame).await.unwrap();
        id
    }

    pub async fn cancel(&mut self, id: RequestId) {
        self.up
            .send(router_frame(router_frame::Frame::Cancel(wire::Cancel { id: id.0, stopped: false })))
            .await
            .unwrap();
    }

    /// Takes one frame; positions must go on without a gap.
    pub async fn receive(&mut self) -> Vec<RouterEvent> {
        match next(&mut self.down).await.unwrap() {
            Frame::Outputs(outputs) => outputs.outputs.into_iter().map(|output| self.apply_output(output)).collect(),
            Frame::Refused(refused) => {
                let stream = self.streams.remove(&RequestId(refused.id)).expect("only a submitted request is refused");
                vec![RouterEvent::Refused(refused, Box::new(stream.request))]
            }
            Frame::State(state) => {
                self.state = state;
                Vec::new()
            }
            Frame::Beat(_) => Vec::new(),
            Frame::Welcome(_) => panic!("a second welcome"),
        }
    }

    pub fn apply_output(&mut self, output: wire::Output) -> RouterEvent {
        let id = RequestId(output.id);
        let stream = self.streams.get_mut(&id).expect("an output belongs to a running request");
        assert_eq!(stream.finish, None, "{id} returns output after its end");
        assert_eq!(output.position as usize, stream.output.len(), "{id} has a gap");
        stream.output.extend(output.tokens.iter().map(|out| out.token));
        stream.finish = output.finished().unwrap();
        if stream.finish.is_some() { RouterEvent::Finished(id) } else { RouterEvent::Tokens(id) }
    }

    /// Reads until a request is refused.
    pub async fn receive_refusal(&mut self) -> wire::Refused {
        let refusal = async {
            loop {
                let refused = self.receive().await.into_iter().find_map(|event| match event {
                    RouterEvent::Refused(refused, _) => Some(refused),
                    RouterEvent::Tokens(_) | RouterEvent::Finished(_) => None,
                });
                if let Some(refused) = refused {
                    return refused;
                }
            }
        };
        timeout(PATIENCE, refusal).await.expect("it is refused in time")
    }

    /// Reads until all streams have ended.
    pub async fn receive_all(&mut self) {
        let all = async {
            while self.streams.values().any(|stream| stream.finish.is_none()) {
                self.receive().await;
            }
        };
        timeout(PATIENCE, all).await.expect("all streams end in time");
    }

    pub async fn receive_until(&mut self, mut fits: impl FnMut(&wire::State) -> bool) {
        let state = async {
            while !fits(&self.state) {
                self.receive().await;
            }
        };
        timeout(PATIENCE, state).await.expect("the state comes in time");
    }

    /// Reads until a new state reports that nothing is held.
    pub async fn receive_until_idle(&mut self) {
        self.state.n_running = u32::MAX;
        self.receive_until(|state| (state.n_waiting, state.n_running, state.blocks_used) == (0, 0, 0)).await;
    }

    pub async fn check_one(&mut self, sim: &SimModel) {
        let id = self.submit(request(vec![1, 2, 3], 10)).await;
        self.receive_all().await;
        self.streams.remove(&id).unwrap().check(sim);
    }
}

impl Stream {
    /// A stream that ended by itself equals the reference; one that was cancelled is a prefix of it.
    pub fn check(&self, sim: &SimModel) {
        let reference = sim.reference(&self.request);
        let id = self.request.id;
        match self.finish.expect("it has ended") {
            Finish::Stop | Finish::Length => assert_eq!(self.output, reference, "{id}"),
            Finish::Cancelled => assert!(reference.starts_with(&self.output), "{id}"),
            other => panic!("{id} ended with {other:?}"),
        }
    }
}

pub fn request(prompt: Vec<Token>, tokens_max: u32) -> Request {
    let sampling = types::Sampling { tokens_max, ..types::Sampling::default() };
    Request { prompt, sampling, ..Request::default() }
}

/// A small generator, so that a failing run can be run again.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x >> 33) % u64::from(n)) as u32
    }

    /// Prompts share prefixes in a few families, so that the prefix cache has something to find.
    pub fn request(&mut self) -> Request {
        let family = self.below(8);
        let shared = self.below(3) * 16;
        let n_own = 1 + self.below(20);
        let prompt = (0..shared).map(|i| (i * 7 + family) % 64).chain((0..n_own).map(|_| self.below(64))).collect();
        let mut request = request(prompt, 1 + self.below(76));
        request.sampling.seed = self.below(1000).into();
        request.sampling.stop = (0..self.below(2)).map(|_| self.below(64)).collect();
        request.sampling.tokens_min = self.below(8);
        request.sampling.logprobs = (self.below(10) == 0).then_some(2);
        request.priority = types::Priority(self.below(3) as i8);
        request
    }
}
