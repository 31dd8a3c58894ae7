//! Peers that fail: workers that die, routers that vanish or read nothing, invalid frames.

mod kv;

use crate::common::{
    Cluster, PATIENCE, Random, Router, attach, config, grid_sim, hello, next, on_grid, request,
    router_frame as up_frame, sim,
};
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::refused::Reason;
use proto::cluster::replica_frame::Frame;
use proto::cluster::{rank_frame, router_frame, worker_frame};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use types::{Activations, Finish, KvDtype, NumericsMode, RequestId, Sampling, Step, StepDone};
use worker::sim::SimModel;
use worker::{Assignment, CancelFlag, Load, LoadError, LoadedModel, ReadyReport, RunError, Runner};

async fn submit_many(router: &mut Router, random: &mut Random, n: usize) {
    for _ in 0..n {
        router.submit(random.request()).await;
    }
}

fn check_all(router: &mut Router) {
    check_all_of(router, &sim());
}

fn check_all_of(router: &mut Router, sim: &SimModel) {
    for (_, stream) in router.streams.drain() {
        assert!(stream.finish.is_some_and(|finish| finish != Finish::Cancelled));
        stream.check(sim);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_outlive_their_workers() {
    let cluster = Cluster::start(config(64, 128, 16));
    let slow = SimModel { step_micros: 200, ..sim() };
    let mut worker = cluster.worker(slow.clone());
    let mut router = cluster.router().await;
    submit_many(&mut router, &mut Random(2), 400).await;
    for (epoch, n_received) in [(1, 20), (3, 60), (5, 0), (7, 40)] {
        router.receive_until(|state| state.phase() == wire::state::Phase::Ready && state.epoch_n == epoch).await;
        for _ in 0..n_received {
            router.receive().await;
        }
        worker.kill().await;
        worker = cluster.worker(slow.clone());
    }
    router.receive_all().await;
    check_all(&mut router);
    router.receive_until_idle().await;
    assert_eq!(router.state.epoch_n, 9, "each loss ended an epoch and each placement began one");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_takes_over() {
    let cluster = Cluster::start(config(64, 128, 16));
    let first = cluster.worker(SimModel { step_micros: 200, ..sim() });
    let mut router = cluster.router().await;
    let _spare = cluster.worker(sim());
    submit_many(&mut router, &mut Random(3), 200).await;
    for _ in 0..10 {
        router.receive().await;
    }
    first.kill().await;
    router.receive_all().await;
    check_all(&mut router);
    cluster.stop().await;
}

/// Runs a number of steps in its first life, then fails as a bug would.
struct Buggy {
    n_steps_left: Option<u32>,
    bug: fn() -> Result<(), RunError>,
}

struct BuggyRunner {
    sim: Box<dyn Runner>,
    n_steps_left: Option<u32>,
    bug: fn() -> Result<(), RunError>,
}

impl Load for Buggy {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let (loaded, ready) = sim().load(assignment, cancel)?;
        let sim = loaded.join_peers(cancel)?;
        Ok((Box::new(BuggyRunner { sim, n_steps_left: self.n_steps_left.take(), bug: self.bug }), ready))
    }
}

impl Runner for BuggyRunner {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        self.n_steps_left = self.n_steps_left.map(|n| n - 1);
        if self.n_steps_left == Some(0) {
            (self.bug)()?;
        }
        self.sim.run(step, done)
    }
}

async fn check_bug(bug: fn() -> Result<(), RunError>) {
    let cluster = Cluster::start(config(64, 128, 16));
    let _worker = cluster.worker(Buggy { n_steps_left: Some(30), bug });
    let mut router = cluster.router().await;
    submit_many(&mut router, &mut Random(4), 200).await;
    router.receive_all().await;
    check_all(&mut router);
    router.receive_until_idle().await;
    assert_eq!(router.state.epoch_n, 3, "it was placed twice");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_panics_or_fails_joins_again() {
    check_bug(|| panic!("a bug")).await;
    check_bug(|| Err(RunError::Protocol { step: 30, what: "a bug".into() })).await;
}

struct NoModel;

impl Load for NoModel {
    fn load(&mut self, _: &Assignment, _: &CancelFlag) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        Err(LoadError::Memory { what: "the model", needed: 9, available: 1 })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_cannot_be_loaded_ends_the_worker() {
    let cluster = Cluster::start(config(64, 128, 16));
    let worker = cluster.worker(NoModel);
    let error = timeout(PATIENCE, worker.task).await.unwrap().unwrap().unwrap_err();
    let error = std::error::Error::source(&error).unwrap().to_string();
    assert!(error.contains("needs 9 bytes, but 1 are available"), "{error}");
    let _worker = cluster.worker(sim());
    cluster.router().await.check_one(&sim()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_vanishes_frees_its_blocks_after_the_grace() {
    let mut config = config(4096, 60_000, 16);
    config.waits.router_grace = Duration::from_millis(300);
    let cluster = Cluster::start(config);
    let _worker = cluster.worker(SimModel { step_micros: 500, ..sim() });
    let mut neighbour = cluster.router().await;
    let mut router = cluster.router().await;
    for _ in 0..4 {
        // At least half a minute's work.
        router.submit(request(vec![1; 40], 55_000)).await;
    }
    while router.streams.values().any(|stream| stream.output.is_empty()) {
        router.receive().await;
    }
    drop(router);
    neighbour.receive_until(|state| state.n_running == 4 && state.blocks_used > 0).await;
    neighbour.receive_until_idle().await;
    neighbour.check_one(&sim()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn router_that_reads_nothing_is_cut_off_alone() {
    let mut config = config(4096, 60_000, 16);
    config.limits.router_frames_max = 8;
    let cluster = Cluster::start(config);
    let _worker = cluster.worker(SimModel { step_micros: 1000, ..sim() });
    let mut neighbour = cluster.router().await;
    let mut deaf = cluster.router().await;
    let sampling = Sampling { tokens_max: 50_000, logprobs: Some(60), ..Sampling::default() };
    for _ in 0..8 {
        deaf.submit(types::Request { sampling: sampling.clone(), ..request(vec![1; 40], 0) }).await;
    }
    neighbour.state.n_running = 0;
    neighbour.receive_until(|state| state.n_running > 0).await;
    neighbour.receive_until_idle().await;
    neighbour.check_one(&sim()).await;
    let end = loop {
        if let Err(status) = next(&mut deaf.down).await {
            break status;
        }
    };
    assert_eq!(end.code(), Code::ResourceExhausted, "{end:?}");
    assert!(end.message().contains("unread"), "{end:?}");
    cluster.stop().await;
}

/// A router's frames are handled in order: behind all its requests it sends an invalid one.
async fn all_taken(router: &mut Router) {
    router.up.send(submit_frame(router.welcome.router, |request| request.prompt.clear())).await.unwrap();
    loop {
        match next(&mut router.down).await.unwrap() {
            Frame::Refused(refused) => return assert_eq!(refused.reason(), Reason::Invalid),
            Frame::Outputs(outputs) => outputs.outputs.into_iter().for_each(|output| drop(router.apply_output(output))),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_lets_streams_finish_and_takes_nothing_new() {
    let cluster = Cluster::start(config(64, 128, 16));
    let _worker = cluster.worker(SimModel { step_micros: 1000, ..sim() });
    let mut router = cluster.router().await;
    submit_many(&mut router, &mut Random(5), 400).await;
    router.receive_until(|state| state.n_running > 0).await;
    all_taken(&mut router).await;
    cluster.shutdown.cancel();
    router.receive_until(|state| state.phase() == wire::state::Phase::Draining).await;
    router.up.send(submit_frame(router.welcome.router, |_| {})).await.unwrap();
    let mut reasons = Vec::new();
    while router.streams.values().any(|stream| stream.finish.is_none()) {
        match next(&mut router.down).await.unwrap() {
            Frame::Refused(refused) => reasons.push(refused.reason()),
            Frame::Outputs(outputs) => outputs.outputs.into_iter().for_each(|output| drop(router.apply_output(output))),
            _ => {}
        }
    }
    assert_eq!(reasons, [Reason::Draining]);
    check_all(&mut router);
    // A last beat may be on its way.
    let end = loop {
        if let Err(end) = next(&mut router.down).await {
            break end;
        }
    };
    assert_eq!(end.code(), Code::Unavailable);
    timeout(PATIENCE, cluster.coordinator).await.unwrap().unwrap().unwrap();
}

fn submit_frame(router: u32, change: impl Fn(&mut wire::Request)) -> wire::RouterFrame {
    let id = RequestId::new(router, 999).unwrap();
    let mut request = wire::Request::from(&types::Request { id, ..request(vec![1, 2], 3) });
    change(&mut request);
    up_frame(router_frame::Frame::Submit(request))
}

/// The status with which a router's stream ends after these frames.
async fn refused_stream(cluster: &Cluster, first: &[wire::RouterFrame]) -> Status {
    match attach(&cluster.dialer, first).await {
        Err(status) => status,
        Ok((_up, mut down)) => loop {
            if let Err(status) = next(&mut down).await {
                break status;
            }
        },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_cannot_be_meant_end_their_own_stream() {
    let cluster = Cluster::start(config(64, 128, 16));
    let _worker = cluster.worker(sim());
    let mut neighbour = cluster.router().await;
    let ours = || hello(proto::VERSION);
    let empty = || wire::RouterFrame { frame: None };
    let foreign = submit_frame(0xff, |_| {});
    let cases = [
        (vec![hello("0.0.0-other")], Code::FailedPrecondition, "0.0.0-other"),
        (vec![empty()], Code::InvalidArgument, "must be its hello"),
        (vec![foreign.clone()], Code::InvalidArgument, "must be its hello"),
        (vec![ours(), ours()], Code::InvalidArgument, "a second hello"),
        (vec![ours(), empty()], Code::InvalidArgument, "without content"),
        (vec![ours(), foreign], Code::InvalidArgument, "does not belong to router"),
    ];
    // Five bytes each exceed the limit of a frame.
    let too_long = submit_frame(1, |request| request.prompt.resize(proto::FRAME_BYTES_MAX / 5 + 1, u32::MAX));
    let too_long = (vec![ours(), too_long], Code::InvalidArgument, "message length too large");
    for (frames, code, part) in cases.into_iter().chain([too_long]) {
        let status = refused_stream(&cluster, &frames).await;
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(part), "{status:?}");
        neighbour.check_one(&sim()).await;
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_cannot_be_meant_are_refused_alone() {
    let cluster = Cluster::start(config(64, 128, 16));
    let _worker = cluster.worker(sim());
    let mut router = cluster.router().await;
    let number = router.welcome.router;
    type Change = fn(&mut wire::Request);
    let cases: [(Change, Reason, &str); 9] = [
        (|r| r.sampling = None, Reason::Invalid, "sampling is missing"),
        (|r| r.sampling.as_mut().unwrap().top_p = f32::NAN, Reason::Invalid, "sampling.top_p"),
        (|r| r.sampling.as_mut().unwrap().temperature = 2.5, Reason::Invalid, "sampling.temperature"),
        (|r| r.prompt.clear(), Reason::Invalid, "no tokens"),
        (|r| r.prompt.push(64), Reason::Invalid, "token 64 is outside the vocabulary of 64"),
        (|r| r.prompt.resize(128, 1), Reason::TooLong, "context_max"),
        (|r| r.adapter = Some(1), Reason::Unsupported, "adapter"),
        (|r| r.constraint = Some(vec![0xff]), Reason::Invalid, "constraint"),
        (|r| r.deadline_micros = Some(0), Reason::Deadline, "deadline"),
    ];
    for (change, reason, part) in cases {
        router.up.send(submit_frame(number, change)).await.unwrap();
        let refused = loop {
            if let Frame::Refused(refused) = next(&mut router.down).await.unwrap() {
                break refused;
            }
        };
        assert_eq!(refused.reason(), reason, "{}", refused.message);
        assert!(refused.message.contains(part), "{}", refused.message);
        router.check_one(&sim()).await;
    }
    cluster.stop().await;
}

/// A worker made of the generated client: the test chooses its frames.
struct RawWorker {
    up: mpsc::Sender<wire::WorkerFrame>,
    down: Streaming<wire::RankFrame>,
    /// Its last assignment.
    last: wire::Assign,
}

impl RawWorker {
    async fn join(cluster: &Cluster, version: &str) -> Result<RawWorker, Status> {
        RawWorker::join_at(cluster, version, "").await
    }

    async fn join_at(cluster: &Cluster, version: &str, mesh_address: &str) -> Result<RawWorker, Status> {
        RawWorker::join_of(cluster, "", version, mesh_address).await
    }

    async fn join_of(cluster: &Cluster, host: &str, version: &str, mesh_address: &str) -> Result<RawWorker, Status> {
        let (up, frames) = mpsc::channel(16);
        let hello = wire::WorkerHello {
            version: version.into(),
            host: host.into(),
            memory_bytes: 1 << 30,
            mesh_address: mesh_address.into(),
            ..wire::WorkerHello::default()
        };
        up.try_send(frame(worker_frame::Frame::Hello(hello))).unwrap();
        let mut client = CoordinatorClient::new(cluster.dialer.channel());
        let down = timeout(PATIENCE, client.join(ReceiverStream::new(frames))).await.unwrap()?.into_inner();
        Ok(RawWorker { up, down, last: wire::Assign::default() })
    }

    async fn next(&mut self) -> Result<rank_frame::Frame, Status> {
        let frame = timeout(PATIENCE, self.down.message()).await.unwrap()?;
        Ok(frame.ok_or_else(|| Status::ok("ended"))?.frame.unwrap())
    }

    /// Waits for its next assignment; a release of the last one may come first.
    async fn assigned(&mut self) -> wire::Assign {
        loop {
            match self.next().await.unwrap() {
                rank_frame::Frame::Assign(assign) => return assign,
                rank_frame::Frame::Release(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn send(&self, content: worker_frame::Frame) {
        self.up.send(frame(content)).await.unwrap();
    }

    async fn ready(&mut self, digest: [u8; 32]) {
        self.last = self.assigned().await;
        self.send_loaded(digest).await;
        self.meet(None).await;
    }

    /// Waits until all have loaded and receive `Meet`. `kv_parts` of its cache have memory.
    async fn meet(&mut self, kv_parts: Option<u32>) {
        self.meet_with(kv_parts, false).await;
    }

    async fn meet_with(&mut self, kv_parts: Option<u32>, kv_grows: bool) {
        let rank_frame::Frame::Meet(meet) = self.next().await.unwrap() else { panic!("Meet follows") };
        let wire::Meet { epoch_incarnation, epoch_n } = meet;
        assert_eq!(epoch_n, self.last.epoch_n);
        let ready = wire::Ready { epoch_incarnation, epoch_n, kv_parts, kv_grows, kv_tier: false };
        self.send(worker_frame::Frame::Ready(ready)).await;
    }

    async fn blame(&self, rank: u32) {
        let wire::Assign { epoch_incarnation, epoch_n, .. } = self.last;
        let message = "no answer".into();
        let failed =
            wire::Failed { epoch_incarnation, epoch_n, message, guilty_rank: Some(rank), ..wire::Failed::default() };
        self.send(worker_frame::Frame::Failed(failed)).await;
    }

    /// A heartbeat from within a step, waiting for a rank or for none.
    async fn beat_in_step(&self, waits_for: Option<u32>) {
        let beat = wire::Heartbeat { in_step: true, waits_for, ..wire::Heartbeat::default() };
        // The coordinator reads nothing from a dismissed worker.
        let _ended = self.up.send(frame(worker_frame::Frame::Heartbeat(beat))).await;
    }

    /// A heartbeat with the committed part of its cache.
    async fn beat_kv(&self, epoch_n: u32, parts: u32) {
        self.beat_kv_after(0, epoch_n, parts).await;
    }

    /// The same, after the target with this number.
    async fn beat_kv_after(&self, target: u32, epoch_n: u32, parts: u32) {
        let kv = wire::KvCommitted { epoch_incarnation: self.last.epoch_incarnation, epoch_n, parts, target };
        self.send(worker_frame::Frame::Heartbeat(wire::Heartbeat { kv: Some(kv), ..wire::Heartbeat::default() })).await;
    }

    async fn beat(&self, steps_done: u64) {
        let beat = wire::Heartbeat { steps_done, ..wire::Heartbeat::default() };
        self.send(worker_frame::Frame::Heartbeat(beat)).await;
    }

    async fn send_loaded(&self, digest: [u8; 32]) {
        let wire::Assign { epoch_incarnation, epoch_n, .. } = self.last;
        let policy_digest = digest.to_vec();
        let loaded = wire::Loaded { epoch_incarnation, epoch_n, policy_digest, ..wire::Loaded::default() };
        self.send(worker_frame::Frame::Loaded(loaded)).await;
    }

    async fn ended(mut self) -> Status {
        loop {
            if let Err(status) = self.next().await {
                return status;
            }
        }
    }
}

fn frame(frame: worker_frame::Frame) -> wire::WorkerFrame {
    wire::WorkerFrame { frame: Some(frame) }
}

fn sim_digest() -> [u8; 32] {
    let assignment = Assignment {
        epoch: types::Epoch::default(),
        rank: types::Rank(0),
        layout: types::Layout::solo(1),
        mesh_addresses: vec![],
        mesh_secret: worker::MeshSecret::default(),
        model_path: "/nowhere".into(),
        activations: Activations::Int8,
        kv_dtype: KvDtype::F16,
        mode: NumericsMode::Lockstep,
        n_blocks: vec![1],
        kv_bytes: 64,
        context: 16,
        batch_tokens_max: 16,
        running_max: 1,
        timeouts: worker::MeshTimeouts::default(),
        policy: None,
        reading: 0,
        zero_kv: false,
        guesses: worker::GuessConfig::default(),
    };
    sim().load(&assignment, &CancelFlag::default()).unwrap().1.policy.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_lie_are_dismissed_by_name() {
    let cluster = Cluster::start(config(64, 128, 16));
    let other = RawWorker::join(&cluster, "0.0.0-other").await.err().unwrap();
    assert_eq!(other.code(), Code::FailedPrecondition);

    let mut liar = RawWorker::join(&cluster, proto::VERSION).await.unwrap();
    liar.ready(sim_digest()).await;
    let mut router = cluster.router().await;
    let id = router.submit(request(vec![1, 2, 3], 10)).await;
    let rank_frame::Frame::Step(bytes) = liar.next().await.unwrap() else { panic!("a step follows") };
    let step = proto::decode_step(&bytes).unwrap();
    // No answer to the step's one slice.
    let done = StepDone { id: step.id, epoch: step.epoch, ..StepDone::default() };
    liar.send(worker_frame::Frame::Done((&done).into())).await;
    let end = liar.ended().await;
    assert!(end.message().contains("slices"), "{end:?}");

    let mut idle = RawWorker::join(&cluster, proto::VERSION).await.unwrap();
    idle.ready(sim_digest()).await;
    let rank_frame::Frame::Step(bytes) = idle.next().await.unwrap() else { panic!("the step is sent again") };
    let step = proto::decode_step(&bytes).unwrap();
    // An answer without the step's one token.
    let slices = vec![types::SliceDone::default()];
    let done = StepDone { id: step.id, epoch: step.epoch, slices, ..StepDone::default() };
    idle.send(worker_frame::Frame::Done((&done).into())).await;
    let end = idle.ended().await;
    assert!(end.message().contains("lacks the token"), "{end:?}");

    let mut stranger = RawWorker::join(&cluster, proto::VERSION).await.unwrap();
    stranger.last = stranger.assigned().await;
    stranger.send_loaded([9; 32]).await;
    let end = stranger.ended().await;
    assert!(end.message().contains("computes under"), "{end:?}");

    let _worker = cluster.worker(sim());
    router.receive_all().await;
    router.streams.remove(&id).unwrap().check(&sim());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_blocks_that_some_rank_has_no_memory_for() {
    let cluster = Cluster::start(on_grid(config(64, 128, 16), 2, 1));
    let [mut sampler, mut second] = two_ranks(&cluster).await;
    for rank in [&sampler, &second] {
        rank.send_loaded(sim_digest()).await;
    }
    // Of the second rank's 64 blocks, two have memory.
    sampler.meet(None).await;
    second.meet(Some(types::KV_PARTS / 32)).await;
    let mut router = cluster.router().await;
    let epoch_n = second.last.epoch_n;
    router.submit(request(vec![1; 20], 1)).await;
    router.submit(request(vec![2; 40], 1)).await;
    let starts = async |rank: &mut RawWorker| loop {
        let rank_frame::Frame::Step(bytes) = rank.next().await.unwrap() else { panic!("a step follows") };
        let step = proto::decode_step(&bytes).unwrap();
        if !step.starts.is_empty() {
            return step;
        }
        // A step that only ends a request is answered too.
        let done = StepDone { id: step.id, epoch: step.epoch, ..StepDone::default() };
        rank.send(worker_frame::Frame::Done((&done).into())).await;
    };
    let step = starts(&mut sampler).await;
    assert_eq!(step.starts.iter().map(|start| start.prompt.len()).collect::<Vec<_>>(), [20]);
    let answer = |step: &types::Step| {
        let token = types::TokenOut { token: 7, ..types::TokenOut::default() };
        let slices = vec![types::SliceDone { tokens: vec![token], ..types::SliceDone::default() }];
        let done = StepDone { id: step.id, epoch: step.epoch, slices, ..StepDone::default() };
        worker_frame::Frame::Done((&done).into())
    };
    sampler.send(answer(&step)).await;
    // Its memory of another epoch, and memory that another rank has anyway, are no memory of the second rank.
    second.beat_kv(epoch_n + 1, types::KV_PARTS).await;
    sampler.beat_kv(epoch_n, types::KV_PARTS).await;
    let none = timeout(Duration::from_millis(300), starts(&mut sampler)).await;
    assert!(none.is_err(), "the long request began without memory");
    second.beat_kv(epoch_n, types::KV_PARTS / 16).await;
    let step = starts(&mut sampler).await;
    assert_eq!(step.starts.iter().map(|start| start.prompt.len()).collect::<Vec<_>>(), [40]);
    sampler.send(answer(&step)).await;
    router.receive_all().await;
    // No rank answers the step that ends the second request.
    drop((sampler, second));
    cluster.stop().await;
}

/// The older build uses all blocks of a ready rank, whatever the rank reports. A coordinator that is limited to that
/// build's protocol finds a rank that sends its parts all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rank_that_reports_parts_to_an_older_build_is_dismissed() {
    let speaks = proto::ProtocolRange::up_to(proto::since::KV_PARTS - 1);
    let cluster = Cluster::start(coordinator::Config { speaks, ..config(64, 128, 16) });
    for at_once in [true, false] {
        let mut rank = RawWorker::join(&cluster, proto::VERSION).await.unwrap();
        rank.last = rank.assigned().await;
        rank.send_loaded(sim_digest()).await;
        rank.meet(at_once.then_some(types::KV_PARTS)).await;
        if !at_once {
            rank.beat_kv(rank.last.epoch_n, types::KV_PARTS).await;
        }
        let end = rank.ended().await;
        assert!(end.code() == Code::InvalidArgument && end.message().contains("KV cache"), "{end:?}");
    }
    let _worker = cluster.worker(sim());
    let mut router = cluster.router().await;
    router.check_one(&sim()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_rank_of_a_grid_may_die_and_another_takes_its_place() {
    let cluster = Cluster::start(on_grid(config(64, 128, 16), 2, 2));
    let slow = SimModel { step_micros: 200, ..grid_sim() };
    let mut workers: VecDeque<_> = (0..4).map(|_| cluster.worker(slow.clone())).collect();
    let mut router = cluster.router().await;
    router.receive_until(|state| state.phase() == wire::state::Phase::Ready).await;
    let epoch = router.state.epoch_n;
    submit_many(&mut router, &mut Random(6), 300).await;
    for n_killed in 1..=4 {
        for _ in 0..15 {
            router.receive().await;
        }
        // The worker that has served longest: every rank dies once.
        workers.pop_front().unwrap().kill().await;
        workers.push_back(cluster.worker(slow.clone()));
        let is_back =
            |state: &wire::State| state.phase() == wire::state::Phase::Ready && state.epoch_n >= epoch + 2 * n_killed;
        router.receive_until(is_back).await;
        assert_eq!(router.state.ranks.len(), 4);
    }
    router.receive_all().await;
    check_all_of(&mut router, &grid_sim());
    router.receive_until_idle().await;
    assert_eq!(router.state.epoch_n, epoch + 8, "each loss ended an epoch and each placement began one");
    cluster.stop().await;
}

/// Raw workers that are ranks of a 2 x 1 grid, in order of rank.
async fn two_ranks(cluster: &Cluster) -> [RawWorker; 2] {
    let mut ranks = [
        RawWorker::join_at(cluster, proto::VERSION, "here:1").await.unwrap(),
        RawWorker::join_at(cluster, proto::VERSION, "there:1").await.unwrap(),
    ];
    for (i, worker) in ranks.iter_mut().enumerate() {
        let assign = worker.assigned().await;
        assert_eq!((assign.rank as usize, assign.mesh_addresses.len()), (i, 2));
        assert_eq!(assign.mesh_addresses, ["here:1", "there:1"]);
        worker.last = assign;
    }
    assert_eq!(ranks[0].last.mesh_secret, ranks[1].last.mesh_secret);
    assert_eq!(ranks[0].last.mesh_secret.len(), 32);
    ranks
}

/// Waits until the coordinator reports that this rank has loaded.
async fn wait_until_loaded(cluster: &Cluster, rank: usize) {
    let (_up, mut down) = attach(&cluster.dialer, &[hello(proto::VERSION)]).await.unwrap();
    let is_loaded = |state: &wire::State| state.ranks.get(rank).is_some_and(|rank| rank.state == "meeting");
    while !matches!(next(&mut down).await.unwrap(), Frame::State(state) if is_loaded(&state)) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_do_not_reach_each_other_are_placed_ever_more_slowly() {
    let mut config = on_grid(config(64, 128, 16), 2, 1);
    config.waits.replace_min = Duration::from_millis(40);
    let cluster = Cluster::start(config);
    let [mut here, mut there] = two_ranks(&cluster).await;
    let begun = tokio::time::Instant::now();
    let mut secrets = vec![here.last.mesh_secret.clone()];
    for _ in 0..4 {
        // Each blames the other, and both stay.
        here.blame(1).await;
        there.blame(0).await;
        (here.last, there.last) = (here.assigned().await, there.assigned().await);
        assert_eq!((here.last.rank, there.last.rank), (0, 1));
        assert_eq!(here.last.epoch_n, there.last.epoch_n);
        secrets.push(here.last.mesh_secret.clone());
        for worker in [&here, &there] {
            worker.beat(secrets.len() as u64).await;
        }
    }
    assert!(begun.elapsed() >= Duration::from_millis(40 + 80 + 160 + 320), "each wait is twice the one before");
    secrets.sort();
    secrets.dedup();
    assert_eq!(secrets.len(), 5, "every epoch has a secret of its own");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blamed_rank_that_beats_and_does_not_compute_is_lost_by_name() {
    let mut config = on_grid(config(64, 128, 16), 2, 1);
    (config.waits.replace_min, config.waits.suspect_max) = (Duration::from_millis(1), Duration::from_millis(300));
    let cluster = Cluster::start(config);
    let [mut reporter, mut hung] = two_ranks(&cluster).await;
    reporter.blame(1).await;
    reporter.last = reporter.assigned().await;
    hung.last = hung.assigned().await;
    let beats = async {
        loop {
            reporter.beat(1).await;
            // Its counters stand still.
            let beat = wire::Heartbeat::default();
            if hung.up.send(frame(worker_frame::Frame::Heartbeat(beat))).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, beats).await.unwrap();
    let end = hung.ended().await;
    assert!(end.message().contains("does not compute") && end.message().contains("no answer"), "{end:?}");
    let mut next = RawWorker::join_at(&cluster, proto::VERSION, "elsewhere:1").await.unwrap();
    assert_eq!(next.assigned().await.rank, 1, "another takes the rank, and the reporter keeps its own");
    assert_eq!(reporter.assigned().await.rank, 0);
    cluster.stop().await;
}

/// Two ranks that have met, and a step that neither answers.
async fn two_ranks_in_a_step(cluster: &Cluster) -> [RawWorker; 2] {
    let mut ranks = two_ranks(cluster).await;
    for rank in &ranks {
        rank.send_loaded(sim_digest()).await;
    }
    for rank in &mut ranks {
        rank.meet(None).await;
    }
    let mut router = cluster.router().await;
    router.submit(request(vec![1, 2, 3], 10)).await;
    for rank in &mut ranks {
        assert!(matches!(rank.next().await, Ok(rank_frame::Frame::Step(_))));
    }
    // Its request goes on without the router.
    drop(router);
    ranks
}

fn shortly(mut config: coordinator::Config) -> coordinator::Config {
    config.waits.step_first_max = Duration::from_millis(300);
    config.waits.replace_min = Duration::from_millis(1);
    config.limits.steps_in_flight_max = 1;
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_ranks_in_a_step_the_one_that_does_not_wait_hangs() {
    let cluster = Cluster::start(shortly(on_grid(config(64, 128, 16), 2, 1)));
    let [mut waits, hangs] = two_ranks_in_a_step(&cluster).await;
    // Both have done as many steps.
    waits.beat_in_step(Some(1)).await;
    hangs.beat_in_step(None).await;
    let end = hangs.ended().await;
    assert!(end.message().contains("has not answered its step for"), "{end:?}");
    // The other one is released at once, and gets the next assignment.
    assert!(matches!(waits.next().await, Ok(rank_frame::Frame::Release(_))));
    let _other = RawWorker::join_at(&cluster, proto::VERSION, "elsewhere:1").await.unwrap();
    assert_eq!(waits.assigned().await.mesh_addresses, ["here:1", "elsewhere:1"]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_rank_is_dismissed_while_the_hung_one_is_unknown() {
    let mut config = shortly(on_grid(config(64, 128, 16), 2, 1));
    config.waits.suspect_max = Duration::from_millis(300);
    let cluster = Cluster::start(config);
    let [mut one, mut other] = two_ranks_in_a_step(&cluster).await;
    one.beat_in_step(None).await;
    other.beat_in_step(None).await;
    // Both get another rank, and the one whose thread moves there keeps it.
    (one.last, other.last) = (one.assigned().await, other.assigned().await);
    one.beat(1).await;
    let end = other.ended().await;
    assert!(end.message().contains("sends heartbeats but does not compute"), "{end:?}");
    let _third = RawWorker::join_at(&cluster, proto::VERSION, "elsewhere:1").await.unwrap();
    assert_eq!(one.assigned().await.mesh_addresses, ["here:1", "elsewhere:1"]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_is_silent_is_dismissed() {
    let mut config = config(64, 128, 16);
    config.waits.beats_missed_max = 5;
    let cluster = Cluster::start(config);
    let silent = RawWorker::join(&cluster, proto::VERSION).await.unwrap();
    let end = silent.ended().await;
    assert!(end.message().contains("sent no frame for too long"), "{end:?}");
    let _worker = cluster.worker(sim());
    cluster.router().await.check_one(&sim()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_of_one_grid_agree_or_the_stranger_goes() {
    let mut config = on_grid(config(64, 128, 16), 2, 1);
    config.waits.drain_max = Duration::from_millis(50);
    let cluster = Cluster::start(config);
    let [mut first, stranger] = two_ranks(&cluster).await;
    let twin = RawWorker::join_at(&cluster, proto::VERSION, "here:1").await.unwrap().ended().await;
    assert!(twin.code() == Code::AlreadyExists && twin.message().contains("here:1"), "{twin:?}");
    first.send_loaded(sim_digest()).await;
    // Two connections have no order: the one that is read first sets the policy.
    wait_until_loaded(&cluster, 0).await;
    stranger.send_loaded([9; 32]).await;
    let end = stranger.ended().await;
    assert!(end.code() == Code::FailedPrecondition && end.message().contains("computes under"), "{end:?}");

    // The cluster goes on with the worker that fits.
    let mut second = RawWorker::join_at(&cluster, proto::VERSION, "there:2").await.unwrap();
    (first.last, second.last) = (first.assigned().await, second.assigned().await);
    first.send_loaded(sim_digest()).await;
    second.send_loaded(sim_digest()).await;
    first.meet(None).await;
    second.meet(None).await;
    let mut router = cluster.router().await;
    assert_eq!(router.welcome.policy_digest, sim_digest());

    // Every rank gets the same bytes, and answers from any but the sampler are ignored.
    router.submit(request(vec![1, 2, 3], 10)).await;
    let (rank_frame::Frame::Step(a), rank_frame::Frame::Step(b)) =
        (first.next().await.unwrap(), second.next().await.unwrap())
    else {
        panic!("a step follows")
    };
    assert_eq!(a, b);
    let step = proto::decode_step(&a).unwrap();
    let nonsense = StepDone { id: step.id, epoch: step.epoch, ..StepDone::default() };
    second.send(worker_frame::Frame::Done((&nonsense).into())).await;
    let token = types::TokenOut { token: 7, ..types::TokenOut::default() };
    let slices = vec![types::SliceDone { tokens: vec![token], ..types::SliceDone::default() }];
    let done = StepDone { id: step.id, epoch: step.epoch, slices, ..StepDone::default() };
    first.send(worker_frame::Frame::Done((&done).into())).await;
    router.receive_until(|state| state.actual.is_some_and(|actual| actual.tokens == 1)).await;
    cluster.stop().await;
}

/// A worker of this host, which is reached at the port.
async fn of_host(cluster: &Cluster, host: &str, port: u16) -> RawWorker {
    RawWorker::join_of(cluster, host, proto::VERSION, &format!("{host}:{port}")).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_has_loaded_another_model_is_taken_last() {
    let mut config = on_grid(config(64, 128, 16), 2, 1);
    config.waits.drain_max = Duration::from_millis(50);
    // It stays a candidate: the test checks the order.
    (config.waits.replace_min, config.waits.replace_max) = (Duration::ZERO, Duration::ZERO);
    let cluster = Cluster::start(config);
    let (mut good, mut bad) = (of_host(&cluster, "good", 1).await, of_host(&cluster, "bad", 1).await);
    (good.last, bad.last) = (good.assigned().await, bad.assigned().await);
    good.send_loaded(sim_digest()).await;
    wait_until_loaded(&cluster, 0).await;
    // A worker of the same host comes before one of another.
    let mut same_host = of_host(&cluster, "bad", 2).await;
    let mut other = of_host(&cluster, "other", 1).await;
    bad.send_loaded([9; 32]).await;
    assert!(bad.ended().await.message().contains("computes under"));
    good.last = good.assigned().await;
    assert_eq!(good.last.mesh_addresses, ["good:1", "other:1"]);
    other.last = other.assigned().await;
    // If nothing can be placed without it, it is taken.
    drop(other);
    good.last = good.assigned().await;
    assert_eq!(good.last.mesh_addresses, ["good:1", "bad:2"]);
    same_host.last = same_host.assigned().await;
    // And when ranks have met it is a host as any other.
    for worker in [&mut good, &mut same_host] {
        worker.send_loaded(sim_digest()).await;
    }
    good.meet(None).await;
    same_host.meet(None).await;
    cluster.router().await;
    cluster.stop().await;
}

/// The refused spare leaves no worker behind whose attempt could be waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fewer_ranks_carry_on_when_the_only_spare_was_refused() {
    let mut config = on_grid(config(64, 128, 16), 2, 1);
    config.waits.drain_max = Duration::from_millis(50);
    (config.waits.replan_after, config.waits.replace_min) = (Duration::from_secs(3), Duration::from_millis(20));
    let cluster = Cluster::start(config);
    let (mut good, mut other) = (of_host(&cluster, "good", 1).await, of_host(&cluster, "other", 1).await);
    (good.last, other.last) = (good.assigned().await, other.assigned().await);
    for worker in [&mut good, &mut other] {
        worker.send_loaded(sim_digest()).await;
    }
    good.meet(None).await;
    other.meet(None).await;
    cluster.router().await;
    drop(other);
    let mut bad = of_host(&cluster, "bad", 1).await;
    (good.last, bad.last) = (good.assigned().await, bad.assigned().await);
    bad.send_loaded([9; 32]).await;
    assert!(bad.ended().await.message().contains("computes under"));
    good.last = good.assigned().await;
    assert!(good.last.mesh_addresses.is_empty(), "alone, not {:?}", good.last.mesh_addresses);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_loads_another_model_again_and_again_is_placed_ever_more_slowly() {
    let mut config = config(64, 128, 16);
    config.waits.replace_min = Duration::from_millis(40);
    let cluster = Cluster::start(config);
    let _good = {
        let mut first = of_host(&cluster, "bad", 1).await;
        first.ready(sim_digest()).await;
        cluster.router().await
    };
    let begun = tokio::time::Instant::now();
    for port in 2..6 {
        let mut bad = of_host(&cluster, "bad", port).await;
        bad.last = bad.assigned().await;
        bad.send_loaded([9; 32]).await;
        assert!(bad.ended().await.message().contains("computes under"));
    }
    // Between the four there are 40, 80 and 160 ms.
    assert!(begun.elapsed() >= Duration::from_millis(280), "{:?}", begun.elapsed());
    cluster.stop().await;
}
