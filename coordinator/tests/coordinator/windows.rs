//! Cache groups from the shape to the ranks: each has its own pool, every rank receives it, and no sequence reads
//! another's data. The simulator refuses a step that would.

use crate::common;
use crate::common::{Cluster, Random, Router, grid_sim, on_grid};
use checkpoint::StateHeads;
use coordinator::{Config, ModelShape};
use types::{CacheGroup, KvLayout, LayerGroups};
use worker::sim::SimModel;

/// As many heads as the model of `on_grid`, and equally wide.
const HEADS: KvLayout = KvLayout::heads(2, 32);
const WINDOW: CacheGroup = CacheGroup::of(HEADS.with_window(20));

/// Two layers of four have a window of twenty positions.
fn windowed(tp: u16, pp: u16) -> Config {
    beside_full(WINDOW.layout, tp, pp)
}

/// Two layers of four keep this, the others everything.
fn beside_full(layout: KvLayout, tp: u16, pp: u16) -> Config {
    let mut config = on_grid(common::config(40, 128, 8), tp, pp);
    config.limits.batch_tokens_max = 48;
    config.limits.chunk_tokens_max = 24;
    config.policy.slice_max = 24;
    let cache = LayerGroups::of([layout, layout, HEADS, HEADS]);
    let states = layout.is_state().then_some(StateHeads { n: 2, dim: 32 });
    Config { shape: ModelShape { cache, states, ..config.shape }, ..config }
}

fn sim() -> SimModel {
    SimModel { groups: vec![WINDOW, CacheGroup::FULL], ..grid_sim() }
}

async fn serve(router: &mut Router, random: &mut Random, n_requests: usize) {
    for _ in 0..n_requests {
        router.submit(random.request()).await;
    }
    router.receive_all().await;
    router.streams.drain().for_each(|(_, stream)| stream.check(&sim()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recurrence_goes_on_where_it_or_another_has_left_a_state() {
    // A page of it is as large as one of keys and values.
    let state = KvLayout::State { n: 2, state: 256, row: 16 };
    for (tp, pp) in [(1, 1), (2, 1), (1, 2)] {
        let cluster = Cluster::start(beside_full(state, tp, pp));
        let sim = || SimModel { groups: vec![CacheGroup::STATE, CacheGroup::FULL], ..grid_sim() };
        let _workers: Vec<_> = (0..tp * pp).map(|_| cluster.worker(sim())).collect();
        let mut router = cluster.router().await;
        serve(&mut router, &mut Random(u64::from(tp + 2 * pp)), 200).await;
        cluster.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_group_has_a_pool_of_its_own() {
    // Eight sequences of eight blocks, of which three are within the window, and a fourth with a slice. Two layers of
    // each group share what four full ones with 40 blocks would take.
    for (tp, pp, n_blocks) in [(1, 1, 23 + 57), (2, 1, 23 + 57), (1, 2, 16 + 40), (2, 2, 16 + 40)] {
        let cluster = Cluster::start(windowed(tp, pp));
        let _workers: Vec<_> = (0..tp * pp).map(|_| cluster.worker(sim())).collect();
        let mut router = cluster.router().await;
        serve(&mut router, &mut Random(u64::from(tp + 2 * pp)), 300).await;
        router.receive_until_idle().await;
        let state = &router.state;
        assert_eq!(state.blocks_total, n_blocks, "tp {tp} pp {pp}: {:?}", state.ranks);
        cluster.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_rank_is_replaced_with_the_same_pools() {
    let cluster = Cluster::start(windowed(1, 2));
    let (first, _second) = (cluster.worker(sim()), cluster.worker(sim()));
    let (mut router, mut random) = (cluster.router().await, Random(9));
    // The spare joins only now: of three, any two could have been chosen.
    router.receive_until(|state| state.ranks.len() == 2).await;
    let _spare = cluster.worker(sim());
    for _ in 0..60 {
        router.submit(random.request()).await;
    }
    router.receive().await;
    first.kill().await;
    router.receive_all().await;
    router.streams.drain().for_each(|(_, stream)| stream.check(&sim()));
    router.receive_until(|state| state.epoch_n > 1 && state.ranks.len() == 2).await;
    let total = router.state.blocks_total;
    serve(&mut router, &mut random, 40).await;
    assert_eq!(router.state.blocks_total, total);
    cluster.stop().await;
}
