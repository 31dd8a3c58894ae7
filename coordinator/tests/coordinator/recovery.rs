//! How a replica handles losses and requested changes: it goes on, on whatever ranks there are, with the same tokens.

use crate::common;
use crate::common::{
    Cluster, PATIENCE, Random, Router, Worker, attach, config, grid_sim, hello, next, on_grid, request,
};
use coordinator::Config;
use proto::cluster as wire;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::replica_frame::Frame;
use proto::cluster::router_frame;
use proto::cluster::state::Phase;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use telemetry::exporter::Exporter;
use tokio::time::timeout;
use tonic::{Code, Status};
use types::{Finish, Rank, Step, StepDone};
use worker::sim::SimModel;
use worker::{Assignment, CancelFlag, Load, LoadError, LoadedModel, MeshError, ReadyReport, RunError, Runner};

/// The value of a metric of this replica, by name and label.
fn counted(name: &str, replica: &str, label: &str) -> f64 {
    static EXPORTER: OnceLock<Exporter> = OnceLock::new();
    let page = EXPORTER.get_or_init(|| telemetry::exporter::install(&[]).unwrap()).render();
    let names = [name.to_owned(), format!("replica=\"{replica}\""), label.to_owned()];
    let lines = page.lines().filter(|line| names.iter().all(|part| line.contains(part)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

fn named(replica: &str, config: Config) -> Config {
    // The recorder is installed before anything counts.
    counted("", replica, "");
    Config { replica: replica.into(), ..config }
}

async fn ready_on(router: &mut Router, tp: u32, pp: u32) {
    let is_on = |state: &wire::State| state.phase() == Phase::Ready && (state.tp, state.pp) == (tp, pp);
    router.receive_until(is_on).await;
    assert_eq!(router.state.ranks.len(), (tp * pp) as usize);
}

async fn receive_n(router: &mut Router, n: usize) {
    for _ in 0..n {
        router.receive().await;
    }
}

async fn finish(mut router: Router, sim: &SimModel) {
    router.receive_all().await;
    for (_, stream) in router.streams.drain() {
        assert!(stream.finish.is_some_and(|finish| finish != Finish::Cancelled));
        stream.check(sim);
    }
    router.receive_until_idle().await;
}

fn slow() -> SimModel {
    SimModel { step_micros: 200, ..grid_sim() }
}

fn workers(cluster: &Cluster, n: usize) -> VecDeque<Worker> {
    (0..n).map(|_| cluster.worker(slow())).collect()
}

async fn busy(cluster: &Cluster, seed: u64, n: usize) -> Router {
    let mut router = cluster.router().await;
    let mut random = Random(seed);
    for _ in 0..n {
        router.submit(random.request()).await;
    }
    router
}

// -- a thread that hangs

/// A loader whose first runner hangs in a step, until the other end of the channel is dropped.
struct Hangs {
    gate: Arc<Mutex<Option<Receiver<()>>>>,
}

struct Hanging {
    sim: Box<dyn Runner>,
    gate: Option<Receiver<()>>,
    n_steps: u32,
}

impl Load for Hangs {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let (loaded, ready) = slow().load(assignment, cancel)?;
        let (sim, gate) = (loaded.join_peers(cancel)?, self.gate.lock().unwrap().take());
        Ok((Box::new(Hanging { sim, gate, n_steps: 0 }), ready))
    }
}

impl Runner for Hanging {
    fn run(&mut self, step: &Step, done: &mut StepDone) -> Result<(), RunError> {
        self.n_steps += 1;
        if let Some(gate) = self.gate.as_ref().filter(|_| self.n_steps > 40) {
            // Ends when the gate's holder drops it.
            let _opened = gate.recv();
        }
        self.sim.run(step, done)
    }
}

fn hangs() -> (Hangs, Sender<()>) {
    let (gate, closed) = channel();
    (Hangs { gate: Arc::new(Mutex::new(Some(closed))) }, gate)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_hangs_is_lost_and_comes_back_when_its_thread_is_free() {
    let mut config = named("hangs", config(64, 128, 16));
    config.waits.hang_min = Duration::from_secs(2);
    let cluster = Cluster::start(config);
    let (hangs, gate) = hangs();
    let _hung = cluster.worker(hangs);
    let mut router = cluster.router().await;
    let _spare = cluster.worker(slow());
    router.receive_until(|state| state.n_spares == 1).await;
    let mut random = Random(7);
    for _ in 0..200 {
        router.submit(random.request()).await;
    }
    // The spare takes over; the hung worker does not count as a spare, because it could take no rank.
    router.receive_until(|state| state.epoch_n >= 3 && state.phase() == Phase::Ready).await;
    router.receive_all().await;
    assert_eq!(router.state.n_spares, 0);
    assert!(counted("ranks_lost_total", "hangs", "rank=\"0\",cause=\"hung\"") >= 1.0);
    assert!(counted("recovery_seconds_count", "hangs", "cause=\"hung\"") >= 1.0);
    assert!(counted("replayed_tokens_total", "hangs", "") > 0.0);
    drop(gate);
    router.receive_until(|state| state.n_spares == 1).await;
    finish(router, &slow()).await;
    cluster.stop().await;
}

// -- a load that takes long

/// A loader whose first load lasts until it is cancelled.
struct Reads {
    begun: tokio::sync::mpsc::UnboundedSender<u32>,
    n_loads: u32,
}

impl Load for Reads {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        self.n_loads += 1;
        self.begun.send(self.n_loads).unwrap();
        while self.n_loads == 1 && !cancel.is_cancelled() {
            std::thread::sleep(Duration::from_millis(2));
        }
        slow().load(assignment, cancel)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn epoch_that_ends_during_a_load_blames_no_rank() {
    let cluster = Cluster::start(named("reads", on_grid(config(64, 128, 16), 2, 1)));
    let (begun, mut loads) = tokio::sync::mpsc::unbounded_channel();
    let _reads = cluster.worker(Reads { begun, n_loads: 0 });
    let other = cluster.worker(slow());
    assert_eq!(timeout(PATIENCE, loads.recv()).await.unwrap(), Some(1));
    other.kill().await;
    let _another = cluster.worker(slow());
    // The load is cancelled, and it loads for the next epoch, in which both are ready.
    assert_eq!(timeout(PATIENCE, loads.recv()).await.unwrap(), Some(2));
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 1).await;
    assert_eq!(router.state.epoch_n, 3, "one loss ended an epoch, and one placement began the next");
    router.check_one(&grid_sim()).await;
    let of_rank = |rank| counted("ranks_lost_total", "reads", &format!("rank=\"{rank}\",cause=\"gone\""));
    assert_eq!((of_rank(0) + of_rank(1), counted("ranks_lost_total", "reads", "cause=\"gone\"")), (1.0, 1.0));
    for cause in ["silent", "hung", "late", "failed", "wrong", "deaf"] {
        assert_eq!(counted("ranks_lost_total", "reads", &format!("cause=\"{cause}\"")), 0.0, "{cause}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_takes_too_long_to_load_is_lost() {
    let mut config = named("late", on_grid(config(64, 128, 16), 2, 1));
    config.waits.load_max = Duration::from_millis(300);
    let cluster = Cluster::start(config);
    let (begun, _loads) = tokio::sync::mpsc::unbounded_channel();
    let _reads = cluster.worker(Reads { begun, n_loads: 0 });
    let _other = cluster.worker(slow());
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 1).await;
    assert!(counted("ranks_lost_total", "late", "cause=\"late\"") >= 1.0);
    router.check_one(&grid_sim()).await;
    cluster.stop().await;
}

// -- fewer ranks, and more again

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fewer_ranks_carry_on_and_more_take_over_again() {
    let mut config = on_grid(config(64, 128, 16), 2, 2);
    config.waits.replan_after = Duration::from_millis(100);
    let cluster = Cluster::start(config);
    let mut workers = workers(&cluster, 4);
    let mut router = busy(&cluster, 8, 700).await;
    ready_on(&mut router, 2, 2).await;
    let epoch = router.state.epoch_n;
    receive_n(&mut router, 10).await;
    workers.pop_front().unwrap().kill().await;
    ready_on(&mut router, 1, 3).await;
    assert_eq!((router.state.n_spares, router.state.epoch_n), (0, epoch + 2), "three are left, and all of them serve");
    assert_eq!((router.state.requested_tp, router.state.requested_pp), (2, 2));
    receive_n(&mut router, 10).await;
    for worker in workers.drain(..2) {
        worker.kill().await;
    }
    ready_on(&mut router, 1, 1).await;
    receive_n(&mut router, 10).await;
    // They come back one after the other, and the replica takes the grid that it can keep.
    workers.push_back(cluster.worker(slow()));
    router.receive_until(|state| state.phase() == Phase::Ready && state.tp * state.pp == 2).await;
    receive_n(&mut router, 10).await;
    workers.extend([cluster.worker(slow()), cluster.worker(slow())]);
    ready_on(&mut router, 2, 2).await;
    let epoch = router.state.epoch_n;
    router.receive_all().await;
    assert_eq!(router.state.epoch_n, epoch, "the epoch does not change again");
    finish(router, &grid_sim()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fewer_ranks_cannot_hold_waits_for_more() {
    // One whole context on two ranks, and half of one on one.
    let mut config = on_grid(config(8, 128, 16), 2, 1);
    config.waits.replan_after = Duration::from_millis(50);
    let cluster = Cluster::start(config);
    let mut workers = workers(&cluster, 2);
    let mut router = busy(&cluster, 9, 100).await;
    ready_on(&mut router, 2, 1).await;
    let epoch = router.state.epoch_n;
    receive_n(&mut router, 5).await;
    workers.pop_front().unwrap().kill().await;
    router.receive_until(|state| state.phase() == Phase::Recovering).await;
    // Far longer than its rank is kept free.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(router.state.ranks.is_empty());
    workers.push_back(cluster.worker(slow()));
    ready_on(&mut router, 2, 1).await;
    assert_eq!(router.state.epoch_n, epoch + 2, "nothing else was tried");
    finish(router, &grid_sim()).await;
    cluster.stop().await;
}

// -- ranks that never meet

/// An address at which no peer is reached.
const UNREACHABLE: &str = "unreachable:1";

/// Reaches every peer but that one.
struct Meets;

struct Meeting {
    sim: Box<dyn LoadedModel>,
    missing: Option<Rank>,
}

impl Load for Meets {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        let (sim, ready) = slow().load(assignment, cancel)?;
        let missing = assignment.mesh_addresses.iter().position(|address| address == UNREACHABLE);
        let missing = missing.map(|rank| Rank(rank as u16)).filter(|rank| *rank != assignment.rank);
        Ok((Box::new(Meeting { sim, missing }), ready))
    }
}

impl LoadedModel for Meeting {
    fn join_peers(self: Box<Self>, cancel: &CancelFlag) -> Result<Box<dyn Runner>, LoadError> {
        match self.missing {
            Some(rank) => Err(MeshError::Deadline { rank }.into()),
            None => self.sim.join_peers(cancel),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_that_never_meet_are_named_and_not_tried_for_ever() {
    let cluster = Cluster::start(named("strangers", on_grid(config(64, 128, 16), 2, 1)));
    let _one = cluster.worker_at("one:1", Meets);
    let _other = cluster.worker_at(UNREACHABLE, Meets);
    // It has never served, and waits for the configured grid.
    let (_up, mut down) = attach(&cluster.dialer, &[hello(proto::VERSION)]).await.unwrap();
    let apart = loop {
        match next(&mut down).await.unwrap() {
            Frame::State(state) if !state.apart.is_empty() => break state,
            Frame::State(_) => {}
            other => panic!("{other:?}"),
        }
    };
    let named = &apart.apart[0];
    assert_eq!((&*named.address, &*named.other_address), (UNREACHABLE, "one:1"));
    assert!(named.why.contains("was silent until the deadline") && named.micros > 30_000_000, "{named:?}");
    tokio::time::sleep(Duration::from_millis(500)).await;
    // A spare takes its rank at once.
    let _spare = cluster.worker_at("spare:1", Meets);
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 1).await;
    assert_eq!(router.state.epoch_n, apart.epoch_n + 1, "nothing was tried in between");
    assert_eq!((router.state.apart.len(), router.state.n_spares), (1, 1));
    router.check_one(&grid_sim()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_worker_is_left_out_of_a_serving_replica() {
    let mut config = on_grid(config(64, 128, 16), 2, 2);
    config.waits.replan_after = Duration::from_secs(2);
    let cluster = Cluster::start(named("left_out", config));
    let mut workers: VecDeque<_> = ["a:1", "b:1", "c:1", "d:1"].map(|at| cluster.worker_at(at, Meets)).into();
    let mut router = busy(&cluster, 12, 300).await;
    ready_on(&mut router, 2, 2).await;
    receive_n(&mut router, 5).await;
    let _stranger = cluster.worker_at(UNREACHABLE, Meets);
    router.receive_until(|state| state.n_spares == 1).await;
    workers.pop_front().unwrap().kill().await;
    router.receive_until(|state| !state.apart.is_empty()).await;
    assert_eq!(router.state.apart[0].address, UNREACHABLE);
    ready_on(&mut router, 1, 3).await;
    assert_eq!(router.state.apart.len(), 1, "the worker is still excluded");
    finish(router, &grid_sim()).await;
    cluster.stop().await;
}

// -- another grid

async fn scale(cluster: &Cluster, tp: u32, pp: u32) -> Result<wire::ScaleReply, Status> {
    let mut client = CoordinatorClient::new(cluster.dialer.channel());
    let request = wire::ScaleRequest { version: proto::VERSION.into(), tp, pp, protocols: None };
    timeout(PATIENCE, client.scale(request)).await.unwrap().map(tonic::Response::into_inner)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_grid_takes_over_and_no_stream_ends() {
    let cluster = Cluster::start(named("scales", on_grid(config(64, 128, 16), 2, 2)));
    let _workers = workers(&cluster, 4);
    let mut router = busy(&cluster, 10, 500).await;
    ready_on(&mut router, 2, 2).await;
    // More often than a request may be lost.
    for (tp, pp) in [(2, 1), (1, 2), (1, 1), (2, 2), (1, 4), (4, 1), (1, 1), (2, 2)] {
        let reply = scale(&cluster, tp, pp).await.unwrap();
        assert_eq!((reply.tp, reply.pp), (tp, pp));
        ready_on(&mut router, tp, pp).await;
        receive_n(&mut router, 3).await;
    }
    let again = scale(&cluster, 2, 2).await.unwrap();
    assert_eq!((again.micros, again.tokens_replayed), (0, 0), "that grid is in force already");
    let epoch = router.state.epoch_n;
    let refused = [
        (4, 2, Code::FailedPrecondition, "needs 8 workers, but 4 are available"),
        (0, 1, Code::FailedPrecondition, "both must be at least 1"),
        (1 << 20, 1, Code::InvalidArgument, "is not a grid"),
    ];
    for (tp, pp, code, part) in refused {
        let status = scale(&cluster, tp, pp).await.unwrap_err();
        assert!(status.code() == code && status.message().contains(part), "{status:?}");
    }
    finish_on(router, epoch).await;
    assert!(counted("recovery_seconds_count", "scales", "cause=\"requested\"") >= 8.0);
    assert_eq!(counted("ranks_lost_total", "scales", ""), 0.0);
    cluster.stop().await;
}

/// The grid stays unchanged until all streams have ended.
async fn finish_on(mut router: Router, epoch: u32) {
    router.receive_all().await;
    assert_eq!(router.state.epoch_n, epoch);
    finish(router, &grid_sim()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scaling_needs_a_serving_replica_and_the_same_version() {
    let cluster = Cluster::start(on_grid(config(64, 128, 16), 2, 1));
    let early = scale(&cluster, 1, 1).await.unwrap_err();
    assert!(early.code() == Code::Unavailable && early.message().contains("loading"), "{early:?}");
    let mut client = CoordinatorClient::new(cluster.dialer.channel());
    let other =
        client.scale(wire::ScaleRequest { version: "0.0.0".into(), tp: 1, pp: 1, protocols: None }).await.unwrap_err();
    assert!(other.code() == Code::FailedPrecondition && other.message().contains("0.0.0"), "{other:?}");
    cluster.stop().await;
}

// -- drains, and routers that come again

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_that_takes_too_long_leaves_its_streams_to_the_router() {
    let mut config = config(4096, 60_000, 16);
    config.waits.drain_max = Duration::from_millis(300);
    let cluster = Cluster::start(config);
    let _worker = cluster.worker(SimModel { step_micros: 500, ..grid_sim() });
    let mut router = cluster.router().await;
    for _ in 0..4 {
        router.submit(request(vec![1; 40], 55_000)).await;
    }
    while router.streams.values().any(|stream| stream.output.is_empty()) {
        router.receive().await;
    }
    cluster.shutdown.cancel();
    let end = loop {
        match next(&mut router.down).await {
            Ok(Frame::Outputs(outputs)) => {
                outputs.outputs.into_iter().for_each(|output| drop(router.apply_output(output)))
            }
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!((end.code(), end.message()), (Code::Unavailable, "the coordinator has drained"));
    assert!(router.streams.values().all(|stream| stream.finish.is_none()), "none was cancelled: another may go on");
    timeout(PATIENCE, cluster.coordinator).await.unwrap().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_comes_again_has_its_old_requests_dropped_at_once() {
    let mut config = config(4096, 60_000, 16);
    config.waits.router_grace = Duration::from_secs(600);
    let cluster = Cluster::start(config);
    let _worker = cluster.worker(SimModel { step_micros: 500, ..grid_sim() });
    let mut neighbour = cluster.router().await;
    let mut router = cluster.router().await;
    for _ in 0..4 {
        router.submit(request(vec![1; 40], 55_000)).await;
    }
    neighbour.receive_until(|state| state.n_running == 4).await;
    let incarnation = router.welcome.incarnation;
    let former = |incarnation, router| {
        let former = Some(wire::FormerNumber { incarnation, router });
        let hello = wire::RouterHello { version: proto::VERSION.into(), former, protocols: None };
        common::router_frame(router_frame::Frame::Hello(hello))
    };
    // A number from another incarnation belongs to no router, and a router without one drops none.
    let strange = attach(&cluster.dialer, &[former(incarnation + 1, router.welcome.router)]).await.unwrap();
    let fresh = attach(&cluster.dialer, &[hello(proto::VERSION)]).await.unwrap();
    neighbour.check_one(&grid_sim()).await;
    neighbour.state.n_running = 0;
    neighbour.receive_until(|state| state.n_running == 4).await;
    // Its old stream may still seem to be open.
    let again = attach(&cluster.dialer, &[former(incarnation, router.welcome.router)]).await.unwrap();
    neighbour.receive_until_idle().await;
    let end = loop {
        if let Err(status) = next(&mut router.down).await {
            break status;
        }
    };
    assert!(end.code() == Code::Aborted && end.message().contains("attached again"), "{end:?}");
    drop((strange, fresh, again));
    neighbour.check_one(&grid_sim()).await;
    cluster.stop().await;
}
