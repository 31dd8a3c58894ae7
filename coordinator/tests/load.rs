//! Ten thousand requests through coordinator and worker: cancels at random moments, a full queue, too few blocks.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, Random, Router, RouterEvent, config, grid_sim, on_grid, sim};
use proto::cluster::refused::Reason;
use std::collections::{HashMap, VecDeque};
use types::{Finish, Request, RequestId};
use worker::sim::SimModel;

const N_REQUESTS: usize = 10_000;
/// More than can run and wait together, so that some are refused and retry.
const OUTSTANDING_MAX: usize = 160;

/// One router's traffic.
struct Traffic {
    random: Random,
    router: Router,
    sim: SimModel,
    to_submit: VecDeque<Request>,
    /// The number of tokens after which a request is cancelled.
    cancel_after: HashMap<RequestId, usize>,
    /// A request was refused as the queue was full, and none has ended since.
    is_full: bool,
    n_requests: usize,
    n_ended: usize,
    n_full: usize,
    n_cancelled: usize,
}

impl Traffic {
    async fn run(&mut self) {
        while self.n_ended < self.n_requests {
            while !self.is_full && self.router.streams.len() < OUTSTANDING_MAX {
                let Some(request) = self.to_submit.pop_back() else { break };
                self.submit(request).await;
            }
            for event in self.router.receive().await {
                self.react(event).await;
            }
        }
    }

    async fn submit(&mut self, request: Request) {
        let id = self.router.submit(request).await;
        if self.random.below(5) == 0 {
            let after = self.random.below(12) as usize;
            self.cancel_after.insert(id, after);
            if after == 0 {
                self.router.cancel(id).await;
            }
        }
    }

    async fn react(&mut self, event: RouterEvent) {
        match event {
            RouterEvent::Tokens(id) => {
                let n_tokens = self.router.streams[&id].output.len();
                if self.cancel_after.get(&id).is_some_and(|after| n_tokens >= *after) {
                    self.cancel_after.remove(&id);
                    self.router.cancel(id).await;
                }
            }
            RouterEvent::Finished(id) => {
                let stream = self.router.streams.remove(&id).unwrap();
                stream.check(&self.sim);
                self.n_ended += 1;
                self.is_full = false;
                self.n_cancelled += usize::from(stream.finish == Some(Finish::Cancelled));
            }
            RouterEvent::Refused(refused, request) => {
                assert_eq!(refused.reason(), Reason::Full, "{}", refused.message);
                assert!(refused.retry_after_ms > 0);
                self.n_full += 1;
                self.is_full = true;
                // A refused request is submitted again behind all others.
                self.to_submit.push_front(*request);
            }
        }
    }
}

impl Traffic {
    fn new(mut random: Random, router: Router, sim: SimModel, n_requests: usize) -> Traffic {
        let to_submit = (0..n_requests).map(|_| random.request()).collect();
        let cancel_after = HashMap::new();
        let (n_ended, n_full, n_cancelled) = (0, 0, 0);
        Traffic {
            random,
            router,
            sim,
            to_submit,
            cancel_after,
            is_full: false,
            n_requests,
            n_ended,
            n_full,
            n_cancelled,
        }
    }
}

fn tight() -> coordinator::Config {
    let mut config = config(24, 128, 32);
    config.limits.waiting_max = 64;
    config.limits.batch_tokens_max = 96;
    config.limits.chunk_tokens_max = 24;
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_leave_nothing_behind() {
    let exporter = telemetry::exporter::install(&[]).unwrap();
    let cluster = Cluster::start(tight());
    let _worker = cluster.worker(sim());
    let mut traffic = Traffic::new(Random(1), cluster.router().await, sim(), N_REQUESTS);
    traffic.run().await;
    traffic.router.receive_until_idle().await;
    cluster.stop().await;
    let mut n_full = traffic.n_full;
    let n_cancelled = traffic.n_cancelled;

    // And on a grid: every rank runs every step, and one answers.
    let cluster = Cluster::start(on_grid(tight(), 2, 2));
    let _workers: Vec<_> = (0..4).map(|_| cluster.worker(grid_sim())).collect();
    let mut traffic = Traffic::new(Random(2), cluster.router().await, grid_sim(), N_REQUESTS / 5);
    traffic.run().await;
    traffic.router.receive_until_idle().await;
    let ranks: Vec<_> = traffic.router.state.ranks.iter().map(|rank| (rank.rank, rank.stage, rank.tp)).collect();
    assert_eq!(ranks, [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]);
    assert_eq!(traffic.router.state.blocks_total, 24, "the pool is what each rank holds");
    n_full += traffic.n_full;

    let page = exporter.render();
    let counter = |name: &str| -> u64 {
        let line = page.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap_or_else(|| panic!("{page}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let preemptions = counter("lockstep:preemptions_total");
    let hits = counter("vllm:prefix_cache_hits_total");
    let steps = counter("lockstep:steps_total");
    println!("{steps} steps, {preemptions} preemptions, {hits} tokens hit, {n_full} full, {n_cancelled} cancelled");
    assert!(preemptions > 0 && hits > 0 && n_full > 0 && n_cancelled > 0);
    assert!(!page.contains("lockstep:ranks_lost_total"), "the protocol held");
    cluster.stop().await;
}
