//! A coordinator without a cluster: answers each request with a text from the test, one token per frame.

use proto::cluster as wire;
use proto::cluster::coordinator_server::{Coordinator, CoordinatorServer};
use proto::cluster::replica_frame::Frame;
use proto::cluster::router_frame::Frame as Up;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::sync::{broadcast, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use types::PrefixReuse;

/// A frame that the replica received.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    Submit(Box<wire::Request>),
    Cancel(u64),
}

#[derive(Clone)]
pub struct Script {
    /// Token ids; the end token follows.
    pub answer: Vec<u32>,
    /// It sends nothing from this position on.
    pub hold_at: usize,
    pub tokens_per_frame: usize,
    pub refuse: Option<(wire::refused::Reason, u32)>,
    pub name: &'static str,
    pub model: &'static str,
    pub digest: [u8; 32],
    pub context: u32,
    /// The incarnation of its claim.
    pub incarnation: u64,
    /// The backlog that its states report.
    pub backlog: u64,
    pub actual: wire::Actual,
    pub n_cached: u32,
    /// Why the reuse of the prefix cache was not larger.
    pub reuse: PrefixReuse,
    /// How many tokens it repeats that a resubmitted request already has.
    pub overlap: usize,
    pub last: wire::Finish,
    /// With `Finish::Grammar`.
    pub fault: wire::GrammarFault,
    /// The interval of beats that it promises; it sends none by itself.
    pub beat_millis: u32,
    /// How often a router has requested all names of its cache.
    pub n_recited: u32,
    /// Why there are no machines for its ranks, as its states report.
    pub unplaced: Option<&'static str>,
    /// How far its prompt is, before its first token: sent to requests with progress.
    pub computed: Vec<u32>,
    /// What happened to each request before its first token.
    pub passages: Vec<wire::Passage>,
    /// The newest protocol that it and its ranks speak.
    pub protocol: u32,
}

/// The root of its block names.
pub const SALT: [u8; 16] = [5; 16];

impl Default for Script {
    fn default() -> Script {
        Script {
            answer: b"Hello, world".iter().map(|byte| u32::from(*byte)).collect(),
            hold_at: usize::MAX,
            tokens_per_frame: 1,
            refuse: None,
            name: "replica-0",
            model: "org/toy",
            digest: [7; 32],
            context: crate::model::CONTEXT,
            incarnation: 3,
            backlog: 0,
            actual: wire::Actual::default(),
            n_cached: 0,
            reuse: PrefixReuse::default(),
            overlap: 0,
            last: wire::Finish::Unspecified,
            fault: wire::GrammarFault::Unspecified,
            beat_millis: 0,
            n_recited: 0,
            unplaced: None,
            computed: Vec::new(),
            passages: Vec::new(),
            protocol: proto::NEWEST,
        }
    }
}

#[derive(Clone)]
pub struct Fake {
    channel: Channel,
    shared: Arc<Shared>,
}

struct Shared {
    script: Mutex<Script>,
    seen: Mutex<Vec<Seen>>,
    /// The former ids under which requests were adopted.
    adopted: Mutex<Vec<u64>>,
    /// Counts incarnations: a change ends the streams of the last one.
    life: watch::Sender<u32>,
    welcomed: watch::Sender<bool>,
    phase: watch::Sender<wire::state::Phase>,
    /// Counts how often all running requests were cancelled.
    cancelled: watch::Sender<u32>,
    beats: broadcast::Sender<wire::Beat>,
}

impl Fake {
    pub fn start() -> Fake {
        let (dialer, pipes) = ::wire::in_memory();
        let shared = Arc::new(Shared {
            script: Mutex::default(),
            seen: Mutex::default(),
            adopted: Mutex::default(),
            life: watch::channel(1).0,
            welcomed: watch::channel(false).0,
            phase: watch::channel(wire::state::Phase::Ready).0,
            cancelled: watch::channel(0).0,
            beats: broadcast::channel(64).0,
        });
        let service = CoordinatorServer::new(Service(shared.clone()));
        tokio::spawn(::wire::server().add_service(service).serve_with_incoming(pipes));
        Fake { channel: dialer.channel(), shared }
    }

    pub fn coordinator(&self) -> router::CoordinatorChannel {
        router::CoordinatorChannel { name: "somewhere".into(), channel: self.channel.clone() }
    }

    pub fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.shared.script.lock().unwrap());
    }

    pub fn answer(&self, text: &str) {
        self.script(|script| script.answer = text.bytes().map(u32::from).collect());
    }

    pub fn welcome(&self) {
        self.shared.welcomed.send_replace(true);
    }

    pub fn phase(&self, phase: wire::state::Phase) {
        self.shared.phase.send_replace(phase);
    }

    /// Kills the coordinator. A router that attaches again meets one that is not ready.
    pub fn die(&self) {
        self.shared.welcomed.send_replace(false);
        self.shared.life.send_modify(|life| *life += 1);
    }

    /// Ends all running requests, like a coordinator with a drain that takes too long.
    pub fn cancel_all(&self) {
        self.shared.cancelled.send_modify(|times| *times += 1);
    }

    /// Sends a beat to the routers that are welcomed by now.
    pub fn beat(&self, beat: wire::Beat) {
        self.shared.beats.send(beat).unwrap();
    }

    pub fn n_recited(&self) -> u32 {
        self.shared.script.lock().unwrap().n_recited
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    pub fn forget(&self) {
        self.shared.seen.lock().unwrap().clear();
    }

    pub fn submits(&self) -> Vec<wire::Request> {
        let submit = |seen| match seen {
            Seen::Submit(request) => Some(*request),
            Seen::Cancel(_) => None,
        };
        self.seen().into_iter().filter_map(submit).collect()
    }

    pub fn adopted(&self) -> Vec<u64> {
        self.shared.adopted.lock().unwrap().clone()
    }

    pub fn cancels(&self) -> Vec<u64> {
        let cancel = |seen| match seen {
            Seen::Cancel(id) => Some(id),
            Seen::Submit(_) => None,
        };
        self.seen().into_iter().filter_map(cancel).collect()
    }
}

struct Service(Arc<Shared>);

type Frames = mpsc::Sender<Result<wire::ReplicaFrame, Status>>;

#[tonic::async_trait]
impl Coordinator for Service {
    type AttachStream = ReceiverStream<Result<wire::ReplicaFrame, Status>>;
    type JoinStream = ReceiverStream<Result<wire::RankFrame, Status>>;
    type ReadModelStream = ReceiverStream<Result<wire::ModelBytes, Status>>;

    async fn attach(&self, up: Request<Streaming<wire::RouterFrame>>) -> Result<Response<Self::AttachStream>, Status> {
        let (frames, out) = mpsc::channel(4096);
        let shared = self.0.clone();
        tokio::spawn(async move {
            let mut life = shared.life.subscribe();
            let number = *life.borrow_and_update();
            tokio::select! {
                _ = life.changed() => {}
                () = serve_router(&shared, number, up.into_inner(), frames) => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(out)))
    }

    async fn join(&self, _: Request<Streaming<wire::WorkerFrame>>) -> Result<Response<Self::JoinStream>, Status> {
        Err(Status::unimplemented("no workers here"))
    }

    async fn reload(&self, _: Request<wire::ReloadRequest>) -> Result<Response<wire::ReloadReply>, Status> {
        Err(Status::unimplemented("no model here"))
    }

    async fn scale(&self, _: Request<wire::ScaleRequest>) -> Result<Response<wire::ScaleReply>, Status> {
        Err(Status::unimplemented("no grid here"))
    }

    async fn get_hashes(&self, _: Request<wire::GetHashesRequest>) -> Result<Response<wire::WeightHashes>, Status> {
        Err(Status::unimplemented("no model here"))
    }

    async fn get_model(&self, _: Request<wire::GetModelRequest>) -> Result<Response<wire::ModelFiles>, Status> {
        Err(Status::unimplemented("no workers here"))
    }

    async fn read_model(&self, _: Request<wire::ReadModelRequest>) -> Result<Response<Self::ReadModelStream>, Status> {
        Err(Status::unimplemented("no workers here"))
    }
}

async fn serve_router(shared: &Shared, router: u32, mut up: Streaming<wire::RouterFrame>, frames: Frames) {
    let mut welcomed = shared.welcomed.subscribe();
    let mut phase = shared.phase.subscribe();
    let mut cancelled = shared.cancelled.subscribe();
    let mut beats = shared.beats.subscribe();
    welcomed.wait_for(|welcomed| *welcomed).await.unwrap();
    send_frame(&frames, Frame::Welcome(welcome(shared, router))).await;
    let now = *phase.borrow_and_update();
    send_frame(&frames, Frame::State(state(shared, now))).await;
    let mut running = HashMap::new();
    loop {
        tokio::select! {
            frame = up.message() => match frame {
                Ok(Some(wire::RouterFrame { frame: Some(frame) })) => {
                    handle_frame(shared, &frames, frame, &mut running).await
                }
                _ => return,
            },
            Ok(()) = phase.changed() => {
                let now = *phase.borrow_and_update();
                send_frame(&frames, Frame::State(state(shared, now))).await;
            }
            Ok(beat) = beats.recv() => send_frame(&frames, Frame::Beat(beat)).await,
            Ok(()) = cancelled.changed() => {
                for (id, ()) in running.drain() {
                    let output = wire::Output { id, finish: wire::Finish::Cancelled.into(), ..Default::default() };
                    send_frame(&frames, Frame::Outputs(wire::Outputs { outputs: vec![output] })).await;
                }
            }
        }
    }
}

async fn handle_frame(shared: &Shared, frames: &Frames, frame: Up, running: &mut HashMap<u64, ()>) {
    match frame {
        Up::Recite(_) => shared.script.lock().unwrap().n_recited += 1,
        Up::Hello(hello) => assert_eq!(hello.version, proto::VERSION),
        Up::Cancel(cancel) => {
            running.remove(&cancel.id);
            shared.seen.lock().unwrap().push(Seen::Cancel(cancel.id));
        }
        Up::Adopt(adopt) => {
            shared.adopted.lock().unwrap().push(adopt.of);
            handle_submit(shared, frames, adopt.request.unwrap(), adopt.n_had as usize, running).await;
        }
        Up::Submit(request) => handle_submit(shared, frames, request, 0, running).await,
    }
}

async fn handle_submit(
    shared: &Shared,
    frames: &Frames,
    request: wire::Request,
    n_had: usize,
    running: &mut HashMap<u64, ()>,
) {
    shared.seen.lock().unwrap().push(Seen::Submit(Box::new(request.clone())));
    let script = shared.script.lock().unwrap().clone();
    assert!(running.insert(request.id, ()).is_none(), "an id is used once");
    answer(frames, &request, n_had, &script).await;
}

/// Answers a request. Tokens that the client already has come without logprobs.
async fn answer(frames: &Frames, request: &wire::Request, n_had: usize, script: &Script) {
    if let Some((reason, retry_after_ms)) = script.refuse {
        let message = "refused by the script".into();
        return send_frame(
            frames,
            Frame::Refused(wire::Refused { id: request.id, reason: reason.into(), message, retry_after_ms }),
        )
        .await;
    }
    let sampling = request.sampling.clone().unwrap();
    match request.goal {
        0 => {}
        1 => return pool(frames, request).await,
        _ => score(frames, request, &sampling).await,
    }
    let mut tokens = script.answer.clone();
    tokens.push(crate::model::END);
    let stop = |(i, token): (usize, &u32)| sampling.stop.contains(token) && i as u32 >= sampling.tokens_min;
    let stopped = tokens.iter().enumerate().position(stop).map(|i| i + 1);
    let n_max = stopped.unwrap_or(usize::MAX).min(sampling.tokens_max as usize).min(tokens.len());
    let finish = if stopped == Some(n_max) { wire::Finish::Stop } else { wire::Finish::Length };
    let finish = if script.last == wire::Finish::Unspecified { finish } else { script.last };
    let mut at = request.output.len().saturating_sub(script.overlap);
    let mut passages = script.passages.clone();
    for computed in script.computed.iter().filter(|_| request.needs_progress) {
        let (id, cached_tokens) = (request.id, script.n_cached);
        let output = wire::Output { id, cached_tokens, computed: Some(*computed), ..Default::default() };
        send_frame(frames, Frame::Outputs(wire::Outputs { outputs: vec![output] })).await;
    }
    while at < n_max.min(script.hold_at) {
        let end = (at + script.tokens_per_frame).min(n_max).min(script.hold_at);
        let to_token_output = |(i, token): (usize, &u32)| match at + i < n_had {
            true => wire::TokenOut { token: *token, ..Default::default() },
            false => token_out(*token, &sampling),
        };
        let output = wire::Output {
            id: request.id,
            position: at as u32,
            tokens: tokens[at..end].iter().enumerate().map(to_token_output).collect(),
            finish: if end == n_max { finish.into() } else { 0 },
            grammar_fault: script.fault.into(),
            cached_tokens: script.n_cached,
            passages: std::mem::take(&mut passages),
            ..Default::default()
        };
        let output = if at == 0 { output.with_reuse(script.reuse) } else { output };
        send_frame(frames, Frame::Outputs(wire::Outputs { outputs: vec![output] })).await;
        at = end;
    }
}

/// Answers a pooling request: the hidden states are the prompt's length and its first token.
async fn pool(frames: &Frames, request: &wire::Request) {
    let pooled = vec![request.prompt.len() as f32, request.prompt[0] as f32];
    let output = wire::Output { id: request.id, pooled, finish: wire::Finish::Stop.into(), ..Default::default() };
    send_frame(frames, Frame::Outputs(wire::Outputs { outputs: vec![output] })).await;
}

/// Sends scores in chunks of three, each twice, like a replica that was lost in between.
async fn score(frames: &Frames, request: &wire::Request, sampling: &wire::Sampling) {
    assert!(request.cache_bypass);
    let sampling = wire::Sampling { logprobs: Some(request.goal - 2), ..sampling.clone() };
    for first in (1..request.prompt.len()).step_by(3).flat_map(|first| [first, first]) {
        let scored = request.prompt[first..].iter().take(3).map(|token| token_out(*token, &sampling)).collect();
        let output = wire::Output { id: request.id, scored_position: first as u32, scored, ..Default::default() };
        send_frame(frames, Frame::Outputs(wire::Outputs { outputs: vec![output] })).await;
    }
}

fn token_out(token: u32, sampling: &wire::Sampling) -> wire::TokenOut {
    let top = |n: u32| (0..n).map(|i| wire::TokenLogprob { token: 97 + i, logprob: -1.0 - i as f32 }).collect();
    wire::TokenOut { token, logprob: sampling.logprobs.map(|_| -0.5), top: sampling.logprobs.map_or(vec![], top) }
}

async fn send_frame(frames: &Frames, frame: Frame) {
    let _ = frames.send(Ok(wire::ReplicaFrame { frame: Some(frame) })).await;
}

fn welcome(shared: &Shared, router: u32) -> wire::Welcome {
    let script = shared.script.lock().unwrap();
    wire::Welcome {
        version: proto::VERSION.into(),
        router,
        replica: script.name.into(),
        model: script.model.into(),
        context: script.context,
        policy_digest: script.digest.to_vec(),
        policy_meant: Vec::new(),
        vocab: crate::model::VOCAB,
        incarnation: script.incarnation,
        salt: SALT.to_vec(),
        beat_millis: script.beat_millis,
        protocols: proto::ProtocolRange::up_to(script.protocol).protocols,
    }
}

fn state(shared: &Shared, phase: wire::state::Phase) -> wire::State {
    let rank = wire::RankState { state: "ready".into(), pid: 42, ..Default::default() };
    let script = shared.script.lock().unwrap();
    wire::State {
        phase: phase.into(),
        epoch_incarnation: 3,
        epoch_n: 1,
        ranks: vec![rank],
        backlog_tokens: script.backlog,
        actual: Some(script.actual),
        unplaced: script.unplaced.map(|why| wire::Unplaced { why: why.into(), micros: 0 }),
        protocol: script.protocol,
        ..Default::default()
    }
}
