//! A replica without a router: a coordinator in this process, workers as its threads or as processes of the built
//! binary, and the test in the router's role. Handles requests and answers as token ids and bits, without text.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod node;
pub mod pem;
pub mod requests;
pub mod terminal;
pub mod watched;

use ::wire::Dialer;
use ::wire::Trust;
use checkpoint::Checkpoint;
use checkpoint::catalogue::{self, ModelSources};
use cluster::MemoryStore;
use coordinator::{
    Blueprint, DraftModel, Machine, ModelShape, MtpDrafts, PlacementPolicy, Speculation, StepPace, Unplaceable,
    WorkerId, plan,
};
use node::Node;
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{replica_frame, router_frame};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use types::{Finish, Grid, Layout, Request, RequestId, Token, TokenOut};
use watched::{Seen, Watch};
use worker::tier::{KvDiskConfig, KvTiers, KvTiersConfig};
use worker::{Isa, MaskConfig, ModelLoader, PeerListener, RecalledLogs, WireChoice};

/// Limit for one round of requests, far beyond what any needs: a test that hangs fails.
const ROUND_MAX: Duration = Duration::from_secs(600);
const FRAMES_UP_MAX: usize = 16;
/// The memory that workers report.
const MEMORY: u64 = 16 << 30;
/// Threads that a worker reports in order to count as a fast one.
const THREADS_OF_FAST: u32 = 3;
/// KV memory so large that no balance is needed: a fast worker may hold more.
const KV_PLENTY: u64 = 1 << 30;
/// The search for the least KV memory ends at this fraction of it.
const KV_PRECISION: u64 = 1024;

/// What runs a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workers {
    Threads,
    Processes,
}

/// Whether ranks get equal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Alike,
    /// One worker counts as three times as fast as the others, and memory is plenty, so that it gets more layers.
    Unlike,
}

/// The settings that must not change an answer, and the numeric policy's two fields, which do change it.
#[derive(Clone, Debug)]
pub struct Setup {
    pub model: PathBuf,
    pub activations: &'static str,
    pub kv_dtype: &'static str,
    pub threads: usize,
    pub isa: Isa,
    /// Blocks of the KV pool.
    pub n_blocks: u32,
    pub batch_tokens_max: u32,
    pub chunk_tokens_max: u32,
    pub pace: StepPace,
    pub running_max: u32,
    pub steps_in_flight_max: u32,
    pub prefix_cache: bool,
    pub zero_kv: bool,
    pub grid: Grid,
    pub workers: Workers,
    pub wire: WireChoice,
    pub cut: Cut,
    pub masks: MaskConfig,
    pub speculation: Speculation,
    /// Answers from which ranks guess, with mistakes, in place of their own guesses.
    pub recalled: Option<Arc<RecalledLogs>>,
    /// A model that guesses.
    pub draft_model: Option<DraftModel>,
    /// The model's own layer that guesses.
    pub mtp: Option<MtpDrafts>,
    /// A folder for pages of the KV cache.
    pub kv_disk: Option<PathBuf>,
    /// How long a fetch from it may take, so that no time of this machine decides which prefixes are fetched.
    pub fetch_micros: Option<u64>,
}

impl Setup {
    pub fn new(model: PathBuf, activations: &'static str, kv_dtype: &'static str) -> Setup {
        Setup {
            model,
            activations,
            kv_dtype,
            threads: 2,
            isa: Isa::detect(),
            n_blocks: 2048,
            batch_tokens_max: 1024,
            chunk_tokens_max: 1024,
            // Chunks of the same lengths in each run.
            pace: StepPace::fixed(u64::MAX),
            running_max: 64,
            steps_in_flight_max: 2,
            prefix_cache: false,
            zero_kv: false,
            grid: Grid::SOLO,
            workers: Workers::Threads,
            wire: WireChoice::Any,
            cut: Cut::Alike,
            masks: MaskConfig::default(),
            speculation: Speculation::default(),
            recalled: None,
            draft_model: None,
            mtp: None,
            kv_disk: None,
            fetch_micros: None,
        }
    }

    pub fn on(&self, tp: u16, pp: u16) -> Setup {
        Setup { grid: Grid { tp, pp }, threads: 1, ..self.clone() }
    }

    fn policy(&self, kv_memory: u64) -> PlacementPolicy {
        PlacementPolicy {
            grid: self.grid,
            activations: self.activations.parse().unwrap(),
            kv_dtype: self.kv_dtype.parse().unwrap(),
            kv_memory: Some(kv_memory),
            memory_permille: None,
            state_cache: None,
            context: None,
            running_max: self.running_max,
            slice_max: self.chunk_tokens_max.min(self.batch_tokens_max),
        }
    }

    /// The least memory with which the grid's largest pool has `n_blocks`.
    fn kv_memory(&self, shape: &ModelShape) -> u64 {
        let alike = Setup { cut: Cut::Alike, ..self.clone() };
        let largest = |blueprint: Blueprint| blueprint.n_blocks().into_iter().max();
        let holds =
            |memory: u64| alike.plan(shape, memory).is_ok_and(|plan| largest(plan).is_none_or(|n| n >= self.n_blocks));
        let (mut too_little, mut enough) = (0, KV_PLENTY);
        while enough - too_little > enough / KV_PRECISION {
            let middle = too_little.midpoint(enough);
            if holds(middle) {
                enough = middle;
            } else {
                too_little = middle;
            }
        }
        enough
    }

    fn plan(&self, shape: &ModelShape, kv_memory: u64) -> Result<Blueprint, Unplaceable> {
        let machine = |(i, threads)| Machine {
            worker: WorkerId(i),
            host: String::new(),
            device: types::DeviceClass::Cpu.into(),
            memory_bytes: MEMORY,
            threads,
            cores: 0,
        };
        let inventory: Vec<Machine> = (0..).zip(self.speeds()).map(machine).collect();
        plan(&inventory, shape, &self.policy(kv_memory), None)
    }

    /// The layout where memory is plenty, or why there is none.
    pub fn layout(&self) -> Result<Layout, Unplaceable> {
        let shape = ModelShape::of(&Checkpoint::open(&self.model).unwrap());
        self.plan(&shape, KV_PLENTY).map(|blueprint| blueprint.layout)
    }

    /// The thread counts that workers report, which make them fast or slow.
    fn speeds(&self) -> Vec<u32> {
        let fast = if self.cut == Cut::Unlike { THREADS_OF_FAST } else { 1 };
        (0..self.grid.n_ranks()).map(|i| if i == 1 { fast } else { 1 }).collect()
    }

    fn coordinator(&self) -> coordinator::Config {
        let checkpoint = Checkpoint::open(&self.model).unwrap();
        let shape = ModelShape::of(&checkpoint);
        coordinator::Config {
            replica: "local".into(),
            model: checkpoint.spec().name.clone(),
            model_path: self.model.clone(),
            policy: self.policy(match self.cut {
                Cut::Alike => self.kv_memory(&shape),
                Cut::Unlike => KV_PLENTY,
            }),
            shape,
            policy_digest: None,
            prefix_cache: self.prefix_cache,
            zero_kv: self.zero_kv,
            salt: [7; 16],
            mesh_seed: [3; 32],
            speaks: proto::ProtocolRange::default(),
            limits: coordinator::Limits {
                batch_tokens_max: self.batch_tokens_max,
                chunk_tokens_max: self.chunk_tokens_max,
                pace: self.pace,
                fetch_micros: self.fetch_micros,
                steps_in_flight_max: self.steps_in_flight_max,
                speculation: self.speculation,
                draft_model: self.draft_model.clone(),
                mtp: self.mtp,
                ..coordinator::Limits::default()
            },
            // State reports are frequent, and no rank counts as lost on a machine that is busy with other tests.
            waits: coordinator::Timings {
                beat_every: Duration::from_millis(20),
                beats_missed_max: 30_000,
                hang_min: ROUND_MAX,
                step_first_max: ROUND_MAX,
                state_every: Duration::from_millis(20),
                ..coordinator::Timings::default()
            },
        }
    }
}

/// The default model's file, as `lockstep pull` stores it.
pub fn smollm2() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let user_cache = || from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")));
    let cache = from("LOCKSTEP_CACHE").or_else(|| user_cache().map(|cache| cache.join("lockstep")));
    let sources = ModelSources::new(cache.expect("a home folder, or LOCKSTEP_CACHE"));
    match catalogue::locate("smollm2", &sources) {
        Ok(located) => located.path,
        Err(error) => panic!("{error}: run `make test`, or `lockstep pull smollm2`"),
    }
}

/// The path of a reference model; of a GGUF, the file.
pub fn reference_model(name: &str) -> PathBuf {
    let path = reference_folder(name);
    if name.starts_with("gguf-") { path.join("model.gguf") } else { path }
}

pub fn reference_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name)
}

/// The answer to a request, as bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub drawn: Vec<Drawn>,
    pub finish: Option<Finish>,
    /// Scores of the prompt, if they were requested.
    pub scored: Vec<Drawn>,
    pub pooled: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawn {
    pub token: Token,
    /// `f32::to_bits`, so that equality means equal bits.
    pub logprob: Option<u32>,
    pub top: Vec<(Token, u32)>,
}

impl Answer {
    pub fn tokens(&self) -> Vec<Token> {
        self.drawn.iter().map(|drawn| drawn.token).collect()
    }
}

impl From<TokenOut> for Drawn {
    fn from(out: TokenOut) -> Drawn {
        Drawn {
            token: out.token,
            logprob: out.logprob.map(f32::to_bits),
            top: out.top.iter().map(|top| (top.token, top.logprob.to_bits())).collect(),
        }
    }
}

/// A rank's ranges of layers and heads.
pub type Part = (Range<u32>, Range<u32>);

/// A serving replica, and the one router attached to it.
pub struct Replica {
    up: mpsc::Sender<wire::RouterFrame>,
    down: Streaming<wire::ReplicaFrame>,
    router: u32,
    n_submitted: u64,
    watch: Watch,
    threads: Vec<JoinHandle<Result<(), worker::Error>>>,
    processes: Vec<Node>,
    /// The last reported states, by rank.
    ranks: Vec<wire::RankState>,
    n_cached: usize,
    longest_hit: u32,
    coordinator: JoinHandle<Result<(), coordinator::Error>>,
    worker_end: CancellationToken,
    coordinator_end: CancellationToken,
}

impl Replica {
    pub async fn start(setup: &Setup) -> Replica {
        let (dialer, pipes) = ::wire::in_memory();
        let (worker_end, coordinator_end) = (CancellationToken::new(), CancellationToken::new());
        let claim = MemoryStore::starting_at(0).claim("local", "in this process");
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let connections = pipes.merge(::wire::incoming(socket, Trust::default()));
        let coordinator =
            coordinator::serve(Box::pin(connections), setup.coordinator(), claim, coordinator_end.clone());
        let coordinator = tokio::spawn(coordinator);
        let watch = Watch::default();
        let (threads, processes) = match setup.workers {
            Workers::Threads => (start_threads(setup, &dialer, &watch, &worker_end), Vec::new()),
            Workers::Processes => (Vec::new(), start_processes(setup, address)),
        };
        let (up, down) = attach(&dialer).await;
        let mut replica = Replica {
            up,
            down,
            router: 0,
            n_submitted: 0,
            watch,
            threads,
            processes,
            ranks: Vec::new(),
            n_cached: 0,
            longest_hit: 0,
            coordinator,
            worker_end,
            coordinator_end,
        };
        replica.router = replica.welcome().await;
        replica
    }

    /// Submits all requests at once: none starts before the coordinator has them all.
    pub async fn run(&mut self, requests: &[Request]) -> Vec<Answer> {
        let deadline = Instant::now() + ROUND_MAX;
        let mut open = BTreeMap::new();
        self.watch.close();
        for (i, request) in requests.iter().enumerate() {
            open.insert(self.submit(request).await, i);
        }
        let mut answers = vec![Answer::default(); requests.len()];
        while !open.is_empty() {
            match self.frame(deadline).await {
                replica_frame::Frame::State(state)
                    if (state.n_waiting + state.n_running) as usize == requests.len() =>
                {
                    self.watch.open();
                }
                replica_frame::Frame::Outputs(outputs) => {
                    let firsts = outputs.outputs.iter().filter(|output| output.position == 0);
                    let hits = firsts.map(|output| output.cached_tokens).filter(|n| *n > 0);
                    self.longest_hit = hits.clone().fold(self.longest_hit, u32::max);
                    self.n_cached += hits.count();
                    outputs.outputs.into_iter().for_each(|output| take(output, requests, &mut open, &mut answers));
                }
                replica_frame::Frame::Refused(refused) => panic!("refused: {refused:?}"),
                _ => {}
            }
        }
        answers
    }

    /// Submits one request after the other, each alone on the replica.
    pub async fn run_alone(&mut self, requests: &[Request]) -> Vec<Answer> {
        let mut answers = Vec::new();
        for request in requests {
            answers.extend(self.run(std::slice::from_ref(request)).await);
        }
        answers
    }

    /// The rank that samples fails at its `n`th step from now.
    pub fn break_at(&self, n: u32) {
        self.watch.break_at(n);
    }

    /// The worker's counts since the last call.
    pub fn seen(&self) -> Seen {
        self.watch.take()
    }

    /// Answers that report a cached beginning.
    pub fn n_cached(&self) -> usize {
        self.n_cached
    }

    /// The tokens of the longest cached beginning of an answer.
    pub fn longest_hit(&self) -> u32 {
        self.longest_hit
    }

    /// The layers and heads of each rank.
    pub fn parts(&self) -> Vec<Part> {
        let part = |rank: &wire::RankState| (rank.layer_start..rank.layer_end, rank.head_start..rank.head_end);
        self.ranks.iter().map(part).collect()
    }

    /// The number of ranks held by fast workers.
    pub fn n_fast(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.threads == THREADS_OF_FAST).count()
    }

    pub async fn stop(self) {
        drop((self.up, self.down));
        self.coordinator_end.cancel();
        self.coordinator.await.unwrap().unwrap();
        self.worker_end.cancel();
        for worker in self.threads {
            worker.await.unwrap().unwrap();
        }
    }

    async fn welcome(&mut self) -> u32 {
        let deadline = Instant::now() + ROUND_MAX;
        loop {
            if let replica_frame::Frame::Welcome(welcome) = self.frame(deadline).await {
                return welcome.router;
            }
        }
    }

    async fn submit(&mut self, request: &Request) -> u64 {
        self.n_submitted += 1;
        let id = RequestId::new(self.router, self.n_submitted).unwrap();
        let request = Request { id, ..request.clone() };
        self.up.send(up(router_frame::Frame::Submit((&request).into()))).await.unwrap();
        id.0
    }

    async fn frame(&mut self, deadline: Instant) -> replica_frame::Frame {
        assert!(!self.threads.iter().any(JoinHandle::is_finished), "a worker ended");
        let frame = tokio::select! {
            ended = &mut self.coordinator => panic!("the coordinator ended: {ended:?}"),
            message = timeout_at(deadline, self.down.message()) => {
                message.expect("an answer in time").unwrap().expect("the stream stays").frame.expect("a frame")
            }
        };
        if let replica_frame::Frame::State(state) = &frame {
            self.ranks.clone_from(&state.ranks);
        }
        frame
    }
}

fn start_threads(
    setup: &Setup,
    dialer: &Dialer,
    watch: &Watch,
    end: &CancellationToken,
) -> Vec<JoinHandle<Result<(), worker::Error>>> {
    let start = |speed| {
        let door = Arc::new(PeerListener::bind("127.0.0.1:0").unwrap());
        let mesh_address = door.address().to_string();
        let (listener, isa, wire) = (Some(door), setup.isa, setup.wire);
        // With one rank per core or more, no thread spins.
        let spin = setup.grid.n_ranks() == 1;
        let tiers = |folder: &PathBuf| {
            let disk = Some(KvDiskConfig::new(folder.clone(), 1 << 30));
            KvTiers::open(KvTiersConfig { disk, ..KvTiersConfig::default() }, None).unwrap()
        };
        let loader = watch.around(ModelLoader {
            isa,
            wire,
            kv_tiers: setup.kv_disk.as_ref().map(tiers),
            listener,
            spin,
            masks: setup.masks,
            recalled: setup.recalled.clone(),
            ..ModelLoader::new(setup.threads)
        });
        let config = worker::Config { memory_bytes: MEMORY, threads: speed, mesh_address, ..worker::Config::default() };
        tokio::spawn(worker::serve(dialer.channel(), loader, config, end.clone()))
    };
    setup.speeds().into_iter().map(start).collect()
}

fn start_processes(setup: &Setup, coordinator: SocketAddr) -> Vec<Node> {
    let wire = match setup.wire {
        WireChoice::Any => "auto",
        WireChoice::Memory => "shm",
        WireChoice::Socket => "tcp",
    };
    let (coordinator, n_local) = (coordinator.to_string(), setup.grid.n_ranks().to_string());
    let join = ["worker", "--join", &coordinator, "--local-workers", &n_local, "--wire", wire, "--memory", "16GiB"];
    let disk = setup.kv_disk.as_ref().map(|folder| format!("{}:1GiB", folder.display()));
    let disk: Vec<&str> = disk.iter().flat_map(|disk| ["--kv-disk", disk]).collect();
    let start = |speed: u32| Node::start(&[&join[..], &disk, &["--threads", &speed.to_string()]].concat());
    setup.speeds().into_iter().map(start).collect()
}

async fn attach(dialer: &Dialer) -> (mpsc::Sender<wire::RouterFrame>, Streaming<wire::ReplicaFrame>) {
    let (frames, sent) = mpsc::channel(FRAMES_UP_MAX);
    let proto::ProtocolRange { version, protocols } = proto::ProtocolRange::default();
    let hello = wire::RouterHello { version, protocols, former: None };
    frames.send(up(router_frame::Frame::Hello(hello))).await.unwrap();
    let mut client = CoordinatorClient::new(dialer.channel()).max_decoding_message_size(proto::FRAME_BYTES_MAX);
    (frames, client.attach(ReceiverStream::new(sent)).await.unwrap().into_inner())
}

fn up(frame: router_frame::Frame) -> wire::RouterFrame {
    wire::RouterFrame { frame: Some(frame) }
}

/// Adds an output to its answer. Positions must have no gap and no repetition.
fn take(output: wire::Output, requests: &[Request], open: &mut BTreeMap<u64, usize>, answers: &mut [Answer]) {
    let i = *open.get(&output.id).expect("an output of a request that is under way");
    let answer = &mut answers[i];
    let next = requests[i].output.len() + answer.drawn.len();
    assert_eq!(output.position as usize, next, "request {i} continues at its next position");
    answer.finish = output.finished().unwrap();
    // A restarted request repeats its scores: from its position on, they must be the same.
    let (at, scored) = ((output.scored_position as usize).saturating_sub(1), output.scored);
    assert!(scored.is_empty() || at <= answer.scored.len(), "request {i} leaves a gap in its scores");
    if !scored.is_empty() {
        answer.scored.truncate(at);
    }
    answer.scored.extend(scored.into_iter().map(|out| Drawn::from(TokenOut::from(out))));
    answer.pooled.extend(output.pooled.iter().map(|value| value.to_bits()));
    answer.drawn.extend(output.tokens.into_iter().map(|out| Drawn::from(TokenOut::from(out))));
    if answer.finish.is_some() {
        open.remove(&output.id);
    }
}
