//! A hundred thousand requests that are cancelled at any moment of their lives: none of them leaves anything behind.

use crate::common::{Cluster, Random, Router, config, sim};
use types::{Finish, Request, Sampling};

const N_ROUNDS: usize = 1000;
const N_AT_ONCE: usize = 100;

fn long(random: &mut Random) -> Request {
    let request = random.request();
    let sampling = Sampling { tokens_max: 150, stop: Vec::new(), ..request.sampling };
    Request { sampling, ..request }
}

/// Submits, reads some outputs, and cancels everything. Returns how many were refused because the queue was full.
async fn round(router: &mut Router, random: &mut Random) -> usize {
    let mut ids = Vec::new();
    for _ in 0..N_AT_ONCE {
        let request = long(random);
        ids.push(router.submit(request).await);
        if random.below(4) == 0 {
            router.cancel(*ids.last().unwrap()).await;
        }
    }
    for _ in 0..random.below(4) {
        router.receive().await;
    }
    for id in ids {
        router.cancel(id).await;
    }
    router.receive_all().await;
    let n_taken = router.streams.len();
    for (_, stream) in router.streams.drain() {
        assert!(matches!(stream.finish, Some(Finish::Cancelled | Finish::Length)), "{:?}", stream.finish);
        stream.check(&sim());
    }
    N_AT_ONCE - n_taken
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_cancels_leave_nothing() {
    let mut config = config(64, 256, 16);
    config.limits.waiting_max = 90;
    let cluster = Cluster::start(config);
    let _worker = cluster.worker(sim());
    let (mut router, mut random, mut n_full) = (cluster.router().await, Random(5), 0);
    for i in 0..N_ROUNDS {
        n_full += round(&mut router, &mut random).await;
        if i % 50 == 0 {
            router.receive_until_idle().await;
        }
    }
    router.receive_until_idle().await;
    assert_eq!((router.state.blocks_total, router.state.backlog_tokens), (64, 0));
    assert!(n_full < N_ROUNDS * N_AT_ONCE / 2, "most were accepted before they were cancelled: {n_full} were refused");
    // The same replica serves the next request.
    router.check_one(&sim()).await;
    cluster.stop().await;
}
