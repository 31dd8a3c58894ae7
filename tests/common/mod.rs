//! A replica in this process without a router: coordinator and worker talk over pipes in memory, as in `serve`, and the
//! test is the router. Knows requests and answers as token ids and bits, no text.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod watched;

use checkpoint::catalogue::{self, Sources};
use checkpoint::{Checkpoint, ModelSpec};
use cluster::MemoryStore;
use coordinator::{ModelShape, Policy};
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::transport::{self, Dialer};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use types::{BLOCK_TOKENS, Finish, Grid, Request, RequestId, Token, TokenOut};
use watched::{Seen, Watch};
use wire::{replica_frame, router_frame};
use worker::{Isa, ModelLoader};

/// For one round of requests; far beyond what any needs, so that a test that hangs says so.
const ROUND_MAX: Duration = Duration::from_secs(600);
const FRAMES_UP_MAX: usize = 16;

/// Everything that must not change an answer, but for the numeric policy's two fields.
#[derive(Clone, Debug)]
pub struct Setup {
    pub model: PathBuf,
    pub activations: &'static str,
    pub kv_dtype: &'static str,
    pub threads: usize,
    pub isa: Isa,
    /// Of the KV pool.
    pub n_blocks: u32,
    pub batch_tokens_max: u32,
    pub chunk_tokens_max: u32,
    pub running_max: u32,
    pub steps_in_flight_max: u32,
    pub prefix_cache: bool,
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
            running_max: 64,
            steps_in_flight_max: 2,
            prefix_cache: false,
        }
    }

    fn kv_bytes(&self, spec: &ModelSpec) -> u64 {
        let element_bytes = if self.kv_dtype == "f16" { 2 } else { 4 };
        let row_bytes = u64::from(spec.n_kv_heads * spec.head_dim) * element_bytes;
        u64::from(self.n_blocks) * u64::from(BLOCK_TOKENS) * u64::from(spec.n_layers) * 2 * row_bytes
    }

    fn coordinator(&self) -> coordinator::Config {
        let checkpoint = Checkpoint::open(&self.model).unwrap();
        let spec = checkpoint.spec();
        coordinator::Config {
            replica: "local".into(),
            model: spec.name.clone(),
            model_path: self.model.clone(),
            shape: ModelShape::of(&checkpoint),
            policy: Policy {
                grid: Grid::SOLO,
                activations: self.activations.into(),
                kv_dtype: self.kv_dtype.into(),
                kv_memory: Some(self.kv_bytes(spec)),
                context: None,
                running_max: self.running_max,
                slice_max: self.chunk_tokens_max.min(self.batch_tokens_max),
            },
            prefix_cache: self.prefix_cache,
            salt: [7; 16],
            mesh_seed: [3; 32],
            limits: coordinator::Limits {
                batch_tokens_max: self.batch_tokens_max,
                chunk_tokens_max: self.chunk_tokens_max,
                steps_in_flight_max: self.steps_in_flight_max,
                ..coordinator::Limits::default()
            },
            // States come often, and no rank is taken for lost on a machine that is busy with other tests.
            waits: coordinator::Waits {
                beat_every: Duration::from_millis(20),
                beats_missed_max: 30_000,
                state_every: Duration::from_millis(20),
                ..coordinator::Waits::default()
            },
        }
    }
}

/// The default model where `lockstep pull` puts it.
pub fn smollm2() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let user_cache = || from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")));
    let cache = from("LOCKSTEP_CACHE").or_else(|| user_cache().map(|cache| cache.join("lockstep")));
    let sources = Sources::new(cache.expect("a home folder, or LOCKSTEP_CACHE"));
    match catalogue::locate("smollm2", &sources) {
        Ok(located) => located.path,
        Err(error) => panic!("{error}: run `make test`, or `lockstep pull smollm2`"),
    }
}

pub fn reference_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name)
}

/// What a request was answered, as bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub drawn: Vec<Drawn>,
    pub finish: Option<Finish>,
    /// Of the prompt, if that was asked for.
    pub scored: Vec<Drawn>,
    pub pooled: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawn {
    pub token: Token,
    /// `f32::to_bits`, so that equal means equal.
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

/// A replica that serves, and the one router that is attached to it.
pub struct Replica {
    up: mpsc::Sender<wire::RouterFrame>,
    down: Streaming<wire::ReplicaFrame>,
    router: u32,
    n_submitted: u64,
    watch: Watch,
    worker: JoinHandle<Result<(), worker::Error>>,
    coordinator: JoinHandle<Result<(), coordinator::Error>>,
    worker_end: CancellationToken,
    coordinator_end: CancellationToken,
}

impl Replica {
    pub async fn start(setup: &Setup) -> Replica {
        let (dialer, pipes) = transport::in_memory();
        let (worker_end, coordinator_end) = (CancellationToken::new(), CancellationToken::new());
        let claim = MemoryStore::starting_at(0).claim("local", "in this process");
        let coordinator = coordinator::serve(pipes, setup.coordinator(), claim, coordinator_end.clone());
        let watch = Watch::default();
        let loader = watch.around(ModelLoader { isa: setup.isa, ..ModelLoader::new(setup.threads) });
        let config = worker::Config { memory_bytes: 16 << 30, ..worker::Config::default() };
        let worker = worker::serve(dialer.channel(), loader, config, worker_end.clone());
        let (coordinator, worker) = (tokio::spawn(coordinator), tokio::spawn(worker));
        let (up, down) = attach(&dialer).await;
        let router = 0;
        let mut replica =
            Replica { up, down, router, n_submitted: 0, watch, worker, coordinator, worker_end, coordinator_end };
        replica.router = replica.welcome().await;
        replica
    }

    /// All of them at once: none goes on before the coordinator has all.
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
                    outputs.outputs.into_iter().for_each(|output| take(output, requests, &mut open, &mut answers));
                }
                replica_frame::Frame::Refused(refused) => panic!("refused: {refused:?}"),
                _ => {}
            }
        }
        answers
    }

    /// One after the other, each alone on the replica.
    pub async fn run_alone(&mut self, requests: &[Request]) -> Vec<Answer> {
        let mut answers = Vec::new();
        for request in requests {
            answers.extend(self.run(std::slice::from_ref(request)).await);
        }
        answers
    }

    /// What the worker was asked to do since the last time.
    pub fn seen(&self) -> Seen {
        self.watch.take()
    }

    pub async fn stop(self) {
        drop((self.up, self.down));
        self.coordinator_end.cancel();
        self.coordinator.await.unwrap().unwrap();
        self.worker_end.cancel();
        self.worker.await.unwrap().unwrap();
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
        tokio::select! {
            ended = &mut self.worker => panic!("the worker ended: {ended:?}"),
            ended = &mut self.coordinator => panic!("the coordinator ended: {ended:?}"),
            message = timeout_at(deadline, self.down.message()) => {
                message.expect("an answer in time").unwrap().expect("the stream stays").frame.expect("a frame")
            }
        }
    }
}

async fn attach(dialer: &Dialer) -> (mpsc::Sender<wire::RouterFrame>, Streaming<wire::ReplicaFrame>) {
    let (frames, sent) = mpsc::channel(FRAMES_UP_MAX);
    let hello = wire::RouterHello { version: proto::VERSION.into() };
    frames.send(up(router_frame::Frame::Hello(hello))).await.unwrap();
    let mut client = CoordinatorClient::new(dialer.channel()).max_decoding_message_size(proto::FRAME_BYTES_MAX);
    (frames, client.attach(ReceiverStream::new(sent)).await.unwrap().into_inner())
}

fn up(frame: router_frame::Frame) -> wire::RouterFrame {
    wire::RouterFrame { frame: Some(frame) }
}

/// Adds an output to its answer. Positions leave no gap and repeat nothing.
fn take(output: wire::Output, requests: &[Request], open: &mut BTreeMap<u64, usize>, answers: &mut [Answer]) {
    let i = *open.get(&output.id).expect("an output of a request that is under way");
    let answer = &mut answers[i];
    let next = requests[i].output.len() + answer.drawn.len();
    assert_eq!(output.position as usize, next, "request {i} goes on at its next position");
    answer.finish = output.finished().unwrap();
    // Who begins again says scores again: from the position on, the same.
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
