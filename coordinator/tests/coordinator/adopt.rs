//! Requests that change their router: earlier output is sent again, once, and the old request disappears.

use crate::common;
use crate::common::{Cluster, Router, config, next, request, router_frame, sim};
use proto::cluster as wire;
use proto::cluster::replica_frame;
use proto::cluster::router_frame::Frame;
use types::{Goal, Request, RequestId, Sampling, TenantId};
use worker::sim::SimModel;

/// Slow enough that nothing ends before it is adopted: a step takes a millisecond, and a request 500 of them.
fn slow() -> SimModel {
    SimModel { step_micros: 1000, ..sim() }
}

fn long() -> Request {
    request((0..40).map(|i| i % 64).collect(), 500)
}

async fn adopt(router: &mut Router, of: RequestId, request: Request) -> RequestId {
    adopt_behind(router, of, request, 0).await
}

/// Adopts a request whose client has `n_had` of its tokens.
async fn adopt_behind(router: &mut Router, of: RequestId, request: Request, n_had: u32) -> RequestId {
    let id = router.next_id();
    let request = Request { id, ..request };
    let adopt = wire::Adopt { of: of.0, request: Some((&request).into()), n_had };
    let stream = common::Stream { output: request.output.clone(), request, finish: None };
    router.streams.insert(id, stream);
    router.up.send(router_frame(Frame::Adopt(adopt))).await.unwrap();
    id
}

/// How many tokens the first output of a request has.
async fn first_word(router: &mut Router, id: RequestId) -> usize {
    let n_before = router.streams[&id].output.len();
    loop {
        router.receive().await;
        let n_tokens = router.streams[&id].output.len();
        if n_tokens > n_before {
            return n_tokens - n_before;
        }
    }
}

/// A request whose first router has received this many tokens and then disappears.
async fn left_behind(cluster: &Cluster, request: Request, n_received: usize) -> (RequestId, Request) {
    let mut gone = cluster.router().await;
    let id = gone.submit(request).await;
    while gone.streams[&id].output.len() < n_received {
        gone.receive().await;
    }
    let stream = gone.streams.remove(&id).unwrap();
    (id, Request { output: stream.output, ..stream.request })
}

/// The output that another router left behind arrives at once as twenty tokens, then the rest; nothing is left over.
async fn goes_on(cluster: Cluster, mut router: Router, of: RequestId, request: Request) {
    let id = adopt(&mut router, of, request).await;
    assert!(first_word(&mut router, id).await >= 20);
    router.receive_all().await;
    router.streams.remove(&id).unwrap().check(&slow());
    router.receive_until_idle().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_is_sent_again_and_the_left_request_ends() {
    let cluster = Cluster::start(config(128, 1024, 8));
    let _worker = cluster.worker(slow());
    let mut router = cluster.router().await;
    let (of, left) = left_behind(&cluster, long(), 20).await;
    // The coordinator must have noticed that its router is gone: until then, the request is that router's own.
    router.receive_until(|state| state.n_running == 1).await;
    // A router that has nothing of it, as after a client's resumption, and one that has more.
    goes_on(cluster, router, of, Request { output: Vec::new(), ..left }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_goes_on_behind_what_its_router_knows() {
    let cluster = Cluster::start(config(128, 1024, 8));
    let _worker = cluster.worker(slow());
    let router = cluster.router().await;
    let (of, left) = left_behind(&cluster, long(), 30).await;
    let known = Request { output: left.output[..10].to_vec(), ..left };
    goes_on(cluster, router, of, known).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_else_than_the_same_request_is_a_claim_to_it() {
    let cluster = Cluster::start(config(256, 1024, 16));
    let _worker = cluster.worker(slow());
    let mut router = cluster.router().await;
    let (of, left) = left_behind(&cluster, long(), 20).await;
    let fresh = Request { output: Vec::new(), ..left };
    let sampling = |sampling| Request { sampling, ..fresh.clone() };
    let other = [
        Request { prompt: vec![1, 2, 3], ..fresh.clone() },
        Request { tenant: TenantId(7), ..fresh.clone() },
        sampling(Sampling { seed: 1, ..fresh.sampling.clone() }),
        sampling(Sampling { choice: 1, ..fresh.sampling.clone() }),
        // It needs more than the first time.
        sampling(Sampling { logprobs: Some(0), ..fresh.sampling.clone() }),
        Request { goal: Goal::Score { top_n: 0 }, cache_bypass: true, ..fresh.clone() },
        // Its output is no prefix of the log.
        Request { output: vec![63; 3], ..fresh.clone() },
    ];
    for (i, other) in other.into_iter().enumerate() {
        let id = adopt(&mut router, of, other).await;
        assert!(first_word(&mut router, id).await < 10, "request {i}");
        router.cancel(id).await;
        router.receive_all().await;
    }
    // Ids that no request has.
    for of in [RequestId(0), RequestId(u64::MAX), RequestId(of.0 + 1)] {
        let id = adopt(&mut router, of, fresh.clone()).await;
        assert!(first_word(&mut router, id).await < 10);
        router.cancel(id).await;
        router.receive_all().await;
    }
    router.streams.clear();
    cluster.stop().await;
}

/// Logprobs are in no log: what the client has is sent without them, what it lacks is drawn again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_log_with_logprobs_only_what_the_client_lacks_is_drawn_again() {
    let cluster = Cluster::start(config(128, 1024, 8));
    let _worker = cluster.worker(slow());
    let mut router = cluster.router().await;
    let original = long();
    let sampling = Sampling { logprobs: Some(2), ..original.sampling.clone() };
    let (of, left) = left_behind(&cluster, Request { sampling, ..original }, 20).await;
    let id = adopt_behind(&mut router, of, Request { output: Vec::new(), ..left }, 15).await;
    let mut tokens = Vec::new();
    while router.streams[&id].finish.is_none() {
        if let replica_frame::Frame::Outputs(outputs) = next(&mut router.down).await.unwrap() {
            for output in outputs.outputs {
                tokens.extend(output.tokens.clone());
                router.apply_output(output);
            }
        }
    }
    let (had, drawn) = tokens.split_at(15);
    assert!(had.iter().all(|out| out.logprob.is_none() && out.top.is_empty()), "{had:?}");
    assert!(drawn.iter().all(|out| out.logprob.is_some() && out.top.len() == 2), "{drawn:?}");
    router.streams.remove(&id).unwrap().check(&slow());
    router.receive_until_idle().await;
    cluster.stop().await;
}

/// A router that is attached keeps its request: another may submit the same one, and disturbs nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_a_router_is_left_to_it() {
    let cluster = Cluster::start(config(256, 1024, 16));
    let _worker = cluster.worker(slow());
    let (mut first, mut second) = (cluster.router().await, cluster.router().await);
    let of = first.submit(long()).await;
    first_word(&mut first, of).await;
    let id = adopt(&mut second, of, long()).await;
    second.receive_all().await;
    first.receive_all().await;
    first.streams.remove(&of).unwrap().check(&slow());
    second.streams.remove(&id).unwrap().check(&slow());
    second.receive_until_idle().await;
    cluster.stop().await;
}
