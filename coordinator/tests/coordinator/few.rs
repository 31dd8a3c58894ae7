//! A replica with too few workers: it reports so at once, goes on with what fits those that are left, and keeps its
//! promised context when more come.

use crate::common::{Cluster, PATIENCE, Router, RouterEvent, Worker, config, grid_sim, on_grid, request};
use coordinator::Config;
use proto::cluster as wire;
use proto::cluster::refused::Reason;
use proto::cluster::state::Phase;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use types::{Finish, RequestId};
use worker::sim::SimModel;
use worker::{Assignment, CancelFlag, Load, LoadError, LoadedModel, ReadyReport};

fn slow() -> SimModel {
    SimModel { step_micros: 200, ..grid_sim() }
}

/// Records the context that its ranks receive.
struct Noting {
    sim: SimModel,
    contexts: Arc<Mutex<Vec<u32>>>,
}

impl Load for Noting {
    fn load(
        &mut self,
        assignment: &Assignment,
        cancel: &CancelFlag,
    ) -> Result<(Box<dyn LoadedModel>, ReadyReport), LoadError> {
        self.contexts.lock().unwrap().push(assignment.context);
        self.sim.load(assignment, cancel)
    }
}

fn workers(cluster: &Cluster, n: usize) -> VecDeque<Worker> {
    (0..n).map(|_| cluster.worker(slow())).collect()
}

async fn ready_on(router: &mut Router, tp: u32, pp: u32) {
    router.receive_until(|state| state.phase() == Phase::Ready && (state.tp, state.pp) == (tp, pp)).await;
}

/// One whole context fits two ranks, half of one fits one. No context was configured.
fn tight() -> Config {
    let mut config = on_grid(config(8, 128, 16), 2, 1);
    config.policy.context = None;
    config
}

fn why(state: &wire::State) -> &str {
    state.unplaced.as_ref().map_or("", |unplaced| &unplaced.why)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_see_unplaceable_grid_and_recovery_at_once() {
    // The lost rank is kept free for ten minutes: these reports do not wait for that.
    let cluster = Cluster::start(on_grid(config(64, 128, 16), 2, 1));
    let mut workers = workers(&cluster, 2);
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 1).await;
    assert_eq!(why(&router.state), "");
    workers.pop_front().unwrap().kill().await;
    router.receive_until(|state| state.phase() == Phase::Recovering && !why(state).is_empty()).await;
    assert!(why(&router.state).contains("tp 2 x pp 1 needs 2 workers, but 1 is available"), "{:?}", router.state);
    workers.pop_front().unwrap().kill().await;
    router.receive_until(|state| why(state).contains("0 are available")).await;
    router.receive_until(|state| state.unplaced.as_ref().is_some_and(|unplaced| unplaced.micros > 0)).await;
    workers.extend([cluster.worker(slow()), cluster.worker(slow())]);
    ready_on(&mut router, 2, 1).await;
    assert_eq!(why(&router.state), "");
    router.check_one(&grid_sim()).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_that_leaves_is_replaced_without_ending_requests() {
    let cluster = Cluster::start(on_grid(config(64, 128, 16), 2, 2));
    let mut workers = workers(&cluster, 4);
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 2).await;
    for n in 0..8 {
        router.submit(request(vec![n; 20], 90)).await;
    }
    let begun = Instant::now();
    let leaver = workers.pop_front().unwrap();
    let (left, ()) = tokio::join!(leaver.leave(), ready_on(&mut router, 1, 3));
    let () = left;
    // The lost rank would have been kept free for ten minutes.
    assert!(begun.elapsed() < PATIENCE);
    router.receive_all().await;
    for (_, stream) in router.streams.drain() {
        assert_eq!(stream.finish, Some(Finish::Length));
        stream.check(&grid_sim());
    }
    // The last ones leave too: no worker is left, and new ones may join.
    for worker in workers {
        worker.leave().await;
    }
    router.receive_until(|state| why(state).contains("0 are available")).await;
    cluster.stop().await;
}

/// Waits until a request has ended or was refused.
async fn end(router: &mut Router, id: RequestId) -> Result<Finish, wire::Refused> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < deadline, "it ends in time");
        if let Some(finish) = router.streams.get(&id).and_then(|stream| stream.finish) {
            return Ok(finish);
        }
        for event in router.receive().await {
            if let RouterEvent::Refused(refused, request) = event
                && request.id == id
            {
                return Err(refused);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_too_long_for_fewer_ranks_end_as_outgrown() {
    let mut config = tight();
    config.waits.replan_after = Duration::from_millis(50);
    // Enough for all to be running when a worker is lost.
    let step = SimModel { step_micros: 3000, ..grid_sim() };
    let cluster = Cluster::start(config);
    let contexts = Arc::new(Mutex::new(Vec::new()));
    let noting = || Noting { sim: step.clone(), contexts: contexts.clone() };
    let mut workers: VecDeque<_> = (0..2).map(|_| cluster.worker(noting())).collect();
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 1).await;
    assert_eq!((router.welcome.context, &router.state.shortened), (128, &None));
    let long = router.submit(request(vec![1; 80], 40)).await;
    while router.streams[&long].output.is_empty() {
        router.receive().await;
    }
    let short = router.submit(request(vec![2; 10], 40)).await;
    // It would grow longer than there is room for.
    let grows = router.submit(request(vec![3; 10], 100)).await;
    workers.pop_front().unwrap().kill().await;
    ready_on(&mut router, 1, 1).await;
    let shortened = router.state.shortened.clone().unwrap();
    assert_eq!((shortened.requested, shortened.has), (128, 64));
    // The angles of scaled RoPE depend on the context: a rank computes for the promised one.
    assert_eq!(*contexts.lock().unwrap(), [128; 3]);
    assert!(shortened.why.contains("a context of 128 needs"), "{shortened:?}");
    assert_eq!(end(&mut router, long).await.unwrap(), Finish::Outgrown);
    assert_eq!(end(&mut router, short).await.unwrap(), Finish::Length);
    assert_eq!(end(&mut router, grows).await.unwrap(), Finish::Outgrown);
    let stream = &router.streams[&grows];
    assert_eq!(stream.output.len(), 54, "all tokens that fit");
    assert!(step.reference(&stream.request).starts_with(&stream.output), "the tokens equal those of the reference");
    let refused = router.submit(request(vec![4; 70], 5)).await;
    let refused = end(&mut router, refused).await.unwrap_err();
    assert_eq!(refused.reason(), Reason::NotReady);
    assert!(refused.message.contains("hold 64"), "{refused:?}");
    // Another worker joins: the whole context is there again, and the request that had no room goes on.
    workers.push_back(cluster.worker(step.clone()));
    ready_on(&mut router, 2, 1).await;
    assert_eq!(router.state.shortened, None);
    let output = router.streams[&grows].output.clone();
    let again = types::Request { output: output.clone(), ..request(vec![3; 10], 100) };
    let again = router.submit(again).await;
    router.streams.get_mut(&again).unwrap().output = output;
    assert_eq!(end(&mut router, again).await.unwrap(), Finish::Length);
    router.streams[&again].check(&step);
    router.streams.retain(|id, _| [short, again].contains(id));
    router.receive_until_idle().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_shortened_by_memory_is_reported_from_the_start() {
    let mut config = on_grid(config(8, 4096, 16), 2, 1);
    config.policy.context = None;
    let cluster = Cluster::start(config);
    let _workers = workers(&cluster, 2);
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 1).await;
    let shortened = router.state.shortened.clone().unwrap();
    assert_eq!((router.welcome.context, shortened.requested, shortened.has), (128, 4096, 128));
    assert!(shortened.why.contains("set a shorter context (--context) or more KV memory"), "{shortened:?}");
    router.check_one(&grid_sim()).await;
    cluster.stop().await;
}

/// A replica on fewer ranks that has taken a stream over returns to more ranks only after a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_has_taken_a_stream_over_does_not_pause_it_to_grow() {
    let hold = Duration::from_secs(1);
    let mut config = on_grid(config(64, 128, 16), 2, 1);
    (config.waits.replan_after, config.waits.takeover_hold) = (Duration::from_millis(50), hold);
    let cluster = Cluster::start(config);
    let mut workers = workers(&cluster, 2);
    let mut router = cluster.router().await;
    ready_on(&mut router, 2, 1).await;
    workers.pop_front().unwrap().kill().await;
    ready_on(&mut router, 1, 1).await;
    let epoch = router.state.epoch_n;
    // Its first tokens are another replica's.
    let begun = request(vec![1; 20], 90);
    let output: types::Tokens = slow().reference(&begun)[..8].to_vec();
    let id = router.submit(types::Request { output: output.clone(), ..begun }).await;
    router.streams.get_mut(&id).unwrap().output = output;
    let taken_over = Instant::now();
    workers.push_back(cluster.worker(slow()));
    assert_eq!(end(&mut router, id).await.unwrap(), Finish::Length);
    router.receive_until(|state| state.epoch_n > epoch).await;
    let held = taken_over.elapsed();
    assert!(held >= hold, "it grew after {held:?}");
    ready_on(&mut router, 2, 1).await;
    router.streams[&id].check(&slow());
    cluster.stop().await;
}
