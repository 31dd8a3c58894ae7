//! Ranks that grow commit what requests will need, and give back what they do not.

use super::RawWorker;
use crate::common::{Cluster, PATIENCE, Router, config, request};
use coordinator::{Config, Timings};
use proto::cluster::rank_frame::Frame;
use proto::cluster::{self as wire, worker_frame};
use std::time::Duration;
use tokio::time::timeout;
use types::{KV_PARTS, SliceDone, StepDone, TokenOut, Want, blocks_committed};

/// Blocks of the only pool.
const N_BLOCKS: u32 = 1024;
const LONG: usize = 3000;

/// A rank of a replica without a prefix cache: what a request has held is free when it has ended.
async fn grown(parts: u32) -> (Cluster, RawWorker, Router) {
    let small = config(N_BLOCKS.into(), 4096, 16);
    let waits = Timings { kv_release_after: Duration::from_millis(500), ..small.waits.clone() };
    let cluster = Cluster::start(Config { waits, prefix_cache: false, ..small });
    let mut rank = RawWorker::join(&cluster, proto::VERSION).await.unwrap();
    rank.last = rank.assigned().await;
    assert!(rank.last.sends_kv_target);
    rank.send_loaded(super::sim_digest()).await;
    rank.meet_with(Some(parts), true).await;
    let router = cluster.router().await;
    (cluster, rank, router)
}

/// The blocks that a target is for.
fn n_blocks(target: wire::KvTarget) -> u32 {
    blocks_committed(N_BLOCKS, target.parts)
}

impl RawWorker {
    /// The next frame that is no step; steps are answered, with one token where one is drawn.
    async fn next_kv_target(&mut self) -> wire::KvTarget {
        loop {
            match self.next().await.unwrap() {
                Frame::KvTarget(target) => return target,
                Frame::Step(bytes) => self.answer(&bytes).await,
                other => panic!("{other:?}"),
            }
        }
    }

    async fn answer(&mut self, step: &[u8]) {
        let step = proto::decode_step(step).unwrap();
        let token = TokenOut { token: 7, ..TokenOut::default() };
        let slices = step.slices.iter().map(|slice| match slice.want {
            Want::Last => SliceDone { tokens: vec![token.clone()], ..SliceDone::default() },
            _ => SliceDone::default(),
        });
        let done = StepDone { id: step.id, epoch: step.epoch, slices: slices.collect(), micros: 0 };
        self.send(worker_frame::Frame::Done((&done).into())).await;
    }

    /// Answers steps until this router has received all of its answers.
    async fn answer_all(&mut self, router: &mut Router) {
        let ended = router.receive_all();
        tokio::pin!(ended);
        loop {
            tokio::select! {
                biased;
                () = &mut ended => return,
                frame = self.next() => match frame.unwrap() {
                    Frame::Step(bytes) => self.answer(&bytes).await,
                    other => panic!("{other:?}"),
                },
            }
        }
    }

    /// Checks that no step comes that starts a request.
    async fn starts_nothing(&mut self) {
        let until = tokio::time::Instant::now() + Duration::from_millis(300);
        while let Ok(frame) = tokio::time::timeout_at(until, self.next()).await {
            let Frame::Step(bytes) = frame.unwrap() else { continue };
            assert!(proto::decode_step(&bytes).unwrap().starts.is_empty(), "a request began without memory");
            self.answer(&bytes).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_grows_is_sent_what_requests_need_and_what_they_no_longer_do() {
    let (cluster, mut rank, mut router) = grown(KV_PARTS / 8).await;
    let epoch_n = rank.last.epoch_n;
    router.submit(request(vec![1; LONG], 1)).await;
    let first = timeout(PATIENCE, rank.next_kv_target()).await.unwrap();
    assert_eq!(first.n, 1);
    // Its own blocks, and 128 to spare.
    assert!((188 + 128..188 + 140).contains(&n_blocks(first)), "{}", n_blocks(first));
    rank.starts_nothing().await;
    rank.beat_kv_after(1, epoch_n, first.parts).await;
    rank.answer_all(&mut router).await;
    // Nothing is held any more.
    let less = timeout(PATIENCE, rank.next_kv_target()).await.unwrap();
    assert_eq!((less.n, n_blocks(less)), (2, 128));
    router.submit(request(vec![2; LONG], 1)).await;
    let more = timeout(PATIENCE, rank.next_kv_target()).await.unwrap();
    assert_eq!(more.n, 3);
    // A report from before memory was given back is of memory that is gone.
    rank.beat_kv_after(1, epoch_n, first.parts).await;
    rank.starts_nothing().await;
    rank.beat_kv_after(3, epoch_n, more.parts).await;
    rank.answer_all(&mut router).await;
    drop(rank);
    cluster.stop().await;
}

/// A machine without memory: a full pool, and no loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_cannot_grow_is_a_full_pool_and_no_lost_rank() {
    let (cluster, mut rank, mut router) = grown(KV_PARTS / 8).await;
    let epoch_n = rank.last.epoch_n;
    router.submit(request(vec![1; LONG], 1)).await;
    let target = timeout(PATIENCE, rank.next_kv_target()).await.unwrap();
    for _ in 0..5 {
        rank.beat_kv_after(target.n, epoch_n, KV_PARTS / 8).await;
        rank.starts_nothing().await;
    }
    // Requests that fit run as soon as the long one is gone.
    rank.beat_kv_after(target.n, epoch_n, target.parts).await;
    rank.answer_all(&mut router).await;
    drop(rank);
    cluster.stop().await;
}
