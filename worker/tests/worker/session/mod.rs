//! A worker over TCP, driven by a coordinator that sends exactly what the test requires.

mod kv_parts;

use crate::common;
use collective::Mesh;
use proto::cluster::coordinator_server::{Coordinator, CoordinatorServer};
use proto::cluster::{
    Assign, GetHashesRequest, GetModelRequest, Meet, ModelBytes, ModelFiles, RankFrame, ReadModelRequest, Release,
    ReloadReply, ReloadRequest, ReplicaFrame, RouterFrame, ScaleReply, ScaleRequest, Stage, WeightHashes, WorkerFrame,
    WorkerHello, rank_frame, worker_frame,
};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use types::{BlockId, Epoch, Grid, Layout, RequestId, Slice, Step, StepDone, StepId, Want};
use worker::sim::SimModel;
use worker::{Assignment, CancelFlag, Load, LoadError, LoadedModel, ModelLoader, ReadyReport};

const PATIENCE: Duration = Duration::from_secs(30);
const EPOCH: Epoch = Epoch { incarnation: 3, n: 2 };

/// The coordinator's side of one worker's connection.
struct Joined {
    down: mpsc::Sender<Result<RankFrame, Status>>,
    inbound: Streaming<WorkerFrame>,
    n_beats: usize,
}

struct Puppet {
    joined: mpsc::Sender<Joined>,
}

#[tonic::async_trait]
impl Coordinator for Puppet {
    type AttachStream = ReceiverStream<Result<ReplicaFrame, Status>>;
    type JoinStream = ReceiverStream<Result<RankFrame, Status>>;
    type ReadModelStream = ReceiverStream<Result<ModelBytes, Status>>;

    async fn attach(&self, _: Request<Streaming<RouterFrame>>) -> Result<Response<Self::AttachStream>, Status> {
        Err(Status::unimplemented("no routers here"))
    }

    async fn join(&self, request: Request<Streaming<WorkerFrame>>) -> Result<Response<Self::JoinStream>, Status> {
        let (down, frames) = mpsc::channel(16);
        let joined = Joined { down, inbound: request.into_inner(), n_beats: 0 };
        self.joined.send(joined).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(frames)))
    }

    async fn reload(&self, _: Request<ReloadRequest>) -> Result<Response<ReloadReply>, Status> {
        Err(Status::unimplemented("no model here"))
    }

    async fn scale(&self, _: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        Err(Status::unimplemented("no grid here"))
    }

    async fn get_hashes(&self, _: Request<GetHashesRequest>) -> Result<Response<WeightHashes>, Status> {
        Err(Status::unimplemented("no model here"))
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<ModelFiles>, Status> {
        Err(Status::unimplemented("no model here"))
    }

    async fn read_model(&self, _: Request<ReadModelRequest>) -> Result<Response<Self::ReadModelStream>, Status> {
        Err(Status::unimplemented("no model here"))
    }
}

impl Joined {
    async fn send(&self, frame: rank_frame::Frame) {
        self.down.send(Ok(RankFrame { frame: Some(frame) })).await.unwrap();
    }

    async fn step(&self, step: &Step) {
        self.send(rank_frame::Frame::Step(proto::encode_step(step))).await;
    }

    /// Returns the next frame that is not a heartbeat.
    async fn receive(&mut self) -> worker_frame::Frame {
        loop {
            let frame = timeout(PATIENCE, self.inbound.message()).await.unwrap().unwrap().unwrap();
            match frame.frame.unwrap() {
                worker_frame::Frame::Heartbeat(_) => self.n_beats += 1,
                other => return other,
            }
        }
    }

    async fn hello(&mut self) -> WorkerHello {
        match self.receive().await {
            worker_frame::Frame::Hello(hello) => hello,
            other => panic!("{other:?}"),
        }
    }

    async fn done(&mut self) -> StepDone {
        match self.receive().await {
            worker_frame::Frame::Done(done) => done.into(),
            other => panic!("{other:?}"),
        }
    }

    async fn failed(&mut self) -> String {
        match self.receive().await {
            worker_frame::Frame::Failed(failed) => failed.message,
            other => panic!("{other:?}"),
        }
    }

    /// Takes the worker to its first step.
    async fn seat(&mut self) {
        self.seat_as(assign()).await;
    }

    async fn seat_as(&mut self, assign: Assign) {
        assert_eq!(self.hello().await.version, proto::VERSION);
        self.place(assign).await;
    }

    async fn place(&mut self, assign: Assign) {
        self.send(rank_frame::Frame::Assign(assign)).await;
        self.loaded().await;
        self.meet().await;
    }

    async fn loaded(&mut self) {
        match self.receive().await {
            worker_frame::Frame::Loaded(loaded) => assert_eq!(loaded.epoch_n, EPOCH.n),
            other => panic!("{other:?}"),
        }
    }

    async fn meet(&mut self) {
        let meet = Meet { epoch_incarnation: EPOCH.incarnation, epoch_n: EPOCH.n };
        self.send(rank_frame::Frame::Meet(meet)).await;
        match self.receive().await {
            worker_frame::Frame::Ready(ready) => assert_eq!(ready.epoch_n, EPOCH.n),
            other => panic!("{other:?}"),
        }
    }
}

fn stages(layout: &Layout) -> Vec<Stage> {
    layout.stages().iter().map(Stage::from).collect()
}

fn assign() -> Assign {
    Assign {
        epoch_incarnation: EPOCH.incarnation,
        epoch_n: EPOCH.n,
        stages: stages(&Layout::solo(1)),
        activations: "int8".into(),
        kv_dtype: "f16".into(),
        n_blocks: vec![8],
        ..Assign::default()
    }
}

fn first_step(epoch: Epoch) -> Step {
    let id = RequestId(1);
    let start = types::Request { id, prompt: vec![4, 5], ..types::Request::default() };
    let slice = Slice::new(id, 0..2, Want::Last);
    Step { epoch, starts: vec![start], slices: vec![slice], blocks: vec![BlockId(0)], ..Step::default() }
}

struct Scene {
    joined: mpsc::Receiver<Joined>,
    worker: JoinHandle<Result<(), worker::Error>>,
    stop: CancellationToken,
    server: JoinHandle<()>,
}

impl Scene {
    async fn start() -> Scene {
        Scene::start_with(Box::new(SimModel::default())).await
    }

    async fn start_with(loader: Box<dyn Load>) -> Scene {
        Scene::start_as(loader, worker::Config::default()).await
    }

    async fn start_as(loader: Box<dyn Load>, config: worker::Config) -> Scene {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let channel = wire::tcp(&listener.local_addr().unwrap().to_string()).unwrap();
        let (joined, seats) = mpsc::channel(4);
        let serve = wire::server()
            .add_service(CoordinatorServer::new(Puppet { joined }))
            .serve_with_incoming(wire::tcp_incoming(listener));
        let server = tokio::spawn(async { serve.await.unwrap() });
        let stop = CancellationToken::new();
        let config = worker::Config { device: "sim".into(), ..config };
        let worker = tokio::spawn(worker::serve(channel, loader, config, stop.clone()));
        Scene { joined: seats, worker, stop, server }
    }

    async fn joined(&mut self) -> Joined {
        timeout(PATIENCE, self.joined.recv()).await.unwrap().unwrap()
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.worker).await.unwrap().unwrap().unwrap();
        self.server.abort();
    }
}

#[tokio::test]
async fn steps_of_another_epoch_are_dropped() {
    let mut scene = Scene::start().await;
    let mut joined = scene.joined().await;
    joined.seat().await;
    joined.step(&first_step(Epoch { n: 1, ..EPOCH })).await;
    joined.step(&first_step(EPOCH)).await;
    let done = joined.done().await;
    assert_eq!((done.epoch, done.slices.len(), done.slices[0].tokens.len()), (EPOCH, 1, 1));
    scene.end().await;
}

#[tokio::test]
async fn idle_worker_sends_heartbeats() {
    let mut scene = Scene::start().await;
    let mut joined = scene.joined().await;
    joined.seat().await;
    let beats = async {
        while joined.n_beats < 3 {
            joined.n_beats += usize::from(joined.inbound.message().await.unwrap().is_some());
        }
    };
    timeout(PATIENCE, beats).await.unwrap();
    scene.end().await;
}

#[tokio::test]
async fn stopped_worker_announces_leaving_and_ends_when_released() {
    let mut scene = Scene::start().await;
    let mut joined = scene.joined().await;
    joined.seat().await;
    scene.stop.cancel();
    let frame = joined.receive().await;
    assert!(matches!(frame, worker_frame::Frame::Leaving(_)), "{frame:?}");
    assert!(!scene.worker.is_finished());
    drop(joined);
    scene.end().await;
}

#[tokio::test]
async fn what_cannot_be_run_is_named_and_the_worker_joins_again() {
    let mut scene = Scene::start().await;
    let slices = vec![Slice { n_draft: 1, ..Slice::new(RequestId(1), 0..2, Want::Nothing) }];
    let unsupported = proto::encode_step(&Step { slices, ..first_step(EPOCH) });
    let beyond = proto::encode_step(&Step { id: StepId(7), blocks: vec![BlockId(8)], ..first_step(EPOCH) });
    let cases = [
        (unsupported, "drafts of a slice"),
        (beyond, "step 7 breaks the protocol"),
        (vec![0xff; 9].into(), "invalid step"),
    ];
    for (bytes, expect) in cases {
        let mut joined = scene.joined().await;
        joined.seat().await;
        joined.send(rank_frame::Frame::Step(bytes)).await;
        let message = joined.failed().await;
        assert!(message.contains(expect), "{message}");
    }
    scene.end().await;
}

#[tokio::test]
async fn a_place_that_cannot_be_meant_is_named() {
    let mut scene = Scene::start().await;
    let mut joined = scene.joined().await;
    joined.hello().await;
    joined.send(rank_frame::Frame::Assign(Assign { stages: vec![], ..assign() })).await;
    let message = joined.failed().await;
    assert!(message.contains("assign.stages"), "{message}");
    scene.end().await;
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_ends_the_worker_by_name() {
    let mut scene = Scene::start().await;
    let mut joined = scene.joined().await;
    joined.hello().await;
    joined.send(rank_frame::Frame::Assign(Assign { n_blocks: vec![1 << 30], ..assign() })).await;
    let message = joined.failed().await;
    assert!(message.contains("a table of the sim's pages"), "{message}");
    drop(joined);
    let error = timeout(PATIENCE, scene.worker).await.unwrap().unwrap().unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("a table of the sim's pages"), "{cause}");
    scene.server.abort();
}

#[tokio::test]
async fn only_the_rank_that_samples_answers() {
    let two = Layout::even(Grid { pp: 2, ..Grid::SOLO }, 2).unwrap();
    for (rank, answers) in [(0, false), (1, true)] {
        let mut scene = Scene::start().await;
        let mut joined = scene.joined().await;
        joined.seat_as(Assign { stages: stages(&two), rank, ..assign() }).await;
        joined.step(&first_step(EPOCH)).await;
        let beyond = Step { id: StepId(1), blocks: vec![BlockId(8)], ..first_step(EPOCH) };
        joined.step(&beyond).await;
        if answers {
            assert_eq!(joined.done().await.slices[0].tokens.len(), 1);
        }
        assert!(joined.failed().await.contains("step 1 breaks the protocol"));
        drop(joined);
        scene.end().await;
    }
}

/// Loads rank 0 of two; the test holds the other rank, which sends nothing.
struct Half {
    others: std::sync::mpsc::Sender<Mesh>,
}

impl Load for Half {
    fn load(&mut self, _: &Assignment, _: &CancelFlag) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let whole = common::assignment("llama-f16-sharded");
        let layout = half(whole.layout.n_layers());
        let [mine, other] = Mesh::in_process(&layout).try_into().unwrap();
        self.others.send(other).unwrap();
        let (runner, ready) = ModelLoader::new(1).build_with(&Assignment { layout, ..whole }, mine)?;
        Ok((Box::new(runner), ready))
    }
}

fn half(n_layers: u32) -> Layout {
    Layout::even(Grid { tp: 2, ..Grid::SOLO }, n_layers).unwrap()
}

fn assign_half() -> Assign {
    Assign { stages: stages(&half(2)), ..assign() }
}

// The deadline of a collective is far beyond the test's patience: a rank that continues was freed.
#[tokio::test]
async fn a_rank_that_waits_for_another_is_freed_for_its_next_place() {
    let (others, silent) = std::sync::mpsc::channel();
    let mut scene = Scene::start_with(Box::new(Half { others })).await;
    let mut joined = scene.joined().await;
    joined.seat_as(assign_half()).await;
    joined.step(&first_step(EPOCH)).await;
    let _first = silent.recv_timeout(PATIENCE).unwrap();
    // Another assignment of the same session.
    joined.place(assign_half()).await;
    joined.step(&first_step(EPOCH)).await;
    let _second = silent.recv_timeout(PATIENCE).unwrap();
    // The session ends, and the next one has an assignment.
    drop(joined);
    scene.joined().await.seat_as(assign_half()).await;
    scene.end().await;
}

#[tokio::test]
async fn worker_that_lost_a_peer_names_it_and_stays() {
    let (others, silent) = std::sync::mpsc::channel();
    let mut scene = Scene::start_with(Box::new(Half { others })).await;
    let mut joined = scene.joined().await;
    joined.seat_as(assign_half()).await;
    joined.step(&first_step(EPOCH)).await;
    drop(silent.recv_timeout(PATIENCE).unwrap());
    match joined.receive().await {
        worker_frame::Frame::Failed(failed) => assert_eq!(failed.guilty_rank, Some(1), "{}", failed.message),
        other => panic!("{other:?}"),
    }
    joined.place(assign_half()).await;
    scene.end().await;
}

/// Every other load lasts until it is cancelled.
struct Slow {
    begun: std::sync::mpsc::Sender<()>,
    n_loads: u32,
}

impl Load for Slow {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        self.n_loads += 1;
        self.begun.send(()).unwrap();
        while self.n_loads % 2 == 1 && !cancel.is_cancelled() {
            std::thread::sleep(Duration::from_millis(5));
        }
        SimModel::default().load(assignment, cancel)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_is_broken_off_when_its_place_is_over() {
    let (sender, begun) = std::sync::mpsc::channel();
    let mut scene = Scene::start_with(Box::new(Slow { begun: sender, n_loads: 0 })).await;
    let mut joined = scene.joined().await;
    joined.hello().await;
    joined.send(rank_frame::Frame::Assign(assign())).await;
    begun.recv_timeout(PATIENCE).unwrap();
    joined.send(rank_frame::Frame::Release(Release {})).await;
    // The cancelled load sends no report, and the next assignment begins at once.
    joined.place(assign()).await;
    joined.step(&first_step(EPOCH)).await;
    assert_eq!(joined.done().await.slices.len(), 1);
    begun.recv_timeout(PATIENCE).unwrap();
    // The end of the session cancels a load too.
    joined.send(rank_frame::Frame::Assign(assign())).await;
    begun.recv_timeout(PATIENCE).unwrap();
    drop(joined);
    scene.joined().await.seat().await;
    scene.end().await;
}

#[tokio::test]
async fn released_worker_holds_nothing_and_ignores_late_frames() {
    let mut scene = Scene::start().await;
    let mut joined = scene.joined().await;
    joined.seat().await;
    joined.send(rank_frame::Frame::Release(Release {})).await;
    // A step of the earlier assignment gets no answer and does no harm.
    joined.step(&first_step(EPOCH)).await;
    joined.send(rank_frame::Frame::Meet(Meet { epoch_incarnation: EPOCH.incarnation, epoch_n: EPOCH.n })).await;
    joined.place(assign()).await;
    joined.step(&first_step(EPOCH)).await;
    assert_eq!(joined.done().await.slices.len(), 1);
    scene.end().await;
}

/// Records the call of `distrust`.
struct DistrustRecorder {
    sim: Box<dyn Load>,
    distrusts: std::sync::mpsc::Sender<()>,
}

impl Load for DistrustRecorder {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        self.sim.load(assignment, cancel)
    }

    fn reject_last_load(&mut self) {
        self.distrusts.send(()).unwrap();
    }
}

#[tokio::test]
async fn worker_refused_for_its_bytes_distrusts_its_copy() {
    for (refusal, is_distrusted) in
        [(Status::data_loss("other bytes"), true), (Status::failed_precondition("other"), false)]
    {
        let (distrusts, received) = std::sync::mpsc::channel();
        let sim = Box::new(SimModel::default());
        let mut scene = Scene::start_with(Box::new(DistrustRecorder { sim, distrusts })).await;
        let mut joined = scene.joined().await;
        joined.seat().await;
        joined.down.send(Err(refusal.clone())).await.unwrap();
        let error = timeout(PATIENCE, scene.worker).await.unwrap().unwrap().unwrap_err();
        assert!(error.to_string().contains(refusal.message()), "{error}");
        // Before it ended.
        assert_eq!(received.try_recv().is_ok(), is_distrusted);
        scene.server.abort();
    }
}
