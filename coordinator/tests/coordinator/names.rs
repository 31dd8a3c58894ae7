//! Routers learn the names of cached blocks: late ones learn all of them, and names that are lost with their workers
//! disappear.

use crate::common::{Cluster, Router, config, next, request, router_frame, sim};
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use std::collections::BTreeSet;
use types::{BlockHash, TenantId, Token};

/// The names that a router has received of a cache.
#[derive(Default)]
struct KnownNames {
    names: BTreeSet<u64>,
    last_sequence: u64,
    n_anew: u32,
    load: wire::Load,
}

impl KnownNames {
    fn apply(&mut self, beat: wire::Beat) {
        self.load = beat.load.unwrap();
        let Some(cached) = beat.cached else { return };
        self.last_sequence += 1;
        assert_eq!(cached.sequence, self.last_sequence);
        if cached.anew {
            self.names.clear();
            self.n_anew += 1;
        }
        self.names.extend(&cached.added);
        self.names.retain(|name| !cached.dropped.contains(name));
    }

    /// Reads until `is_it` holds.
    async fn until(&mut self, router: &mut Router, is_it: impl Fn(&KnownNames, &Router) -> bool) {
        while !is_it(self, router) {
            match next(&mut router.down).await.unwrap() {
                Frame::Beat(beat) => self.apply(beat),
                Frame::Outputs(outputs) => {
                    outputs.outputs.into_iter().for_each(|output| drop(router.apply_output(output)))
                }
                Frame::State(state) => router.state = state,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The names of the full blocks of a log.
fn names(welcome: &wire::Welcome, log: &[Token]) -> BTreeSet<u64> {
    let digest = proto::policy_digest(&welcome.policy_digest).unwrap();
    let mut name = BlockHash::root(&digest, TenantId::default(), welcome.salt.as_slice().try_into().unwrap());
    let blocks = log.chunks_exact(16).map(|block| {
        name = name.child(block.iter().copied());
        name.short()
    });
    blocks.collect()
}

#[tokio::test]
async fn each_router_knows_what_the_cache_has() {
    let cluster = Cluster::start(config(64, 512, 4));
    let worker = cluster.worker(sim());
    let mut router = cluster.router().await;
    assert!(router.welcome.beat_millis > 0);
    let prompt: Vec<Token> = (0..40).map(|i| i % 64).collect();
    let id = router.submit(request(prompt, 60)).await;
    let mut known = KnownNames::default();
    known.until(&mut router, |_, router| router.streams[&id].finish.is_some()).await;
    let stream = router.streams.remove(&id).unwrap();
    let log: Vec<Token> = stream.request.prompt.iter().chain(&stream.output).copied().collect();
    // The last token that was drawn is never computed.
    let expect = names(&router.welcome, &log[..log.len() - 1]);
    assert!(expect.len() >= 3, "{}", log.len());
    known.until(&mut router, |known, _| known.names == expect && known.load.blocks_used == 0).await;
    assert_eq!((known.load.blocks_total, known.load.n_running), (64, 0));

    let mut late = cluster.router().await;
    let mut late_known = KnownNames::default();
    late_known.until(&mut late, |known, _| known.names == expect).await;
    // All names again, for a router that has missed some.
    late.up.send(router_frame(wire::router_frame::Frame::Recite(wire::Recite {}))).await.unwrap();
    late_known.until(&mut late, |known, _| known.n_anew == 2 && known.names == expect).await;

    worker.kill().await;
    let again = cluster.worker(sim());
    late_known.until(&mut late, |known, _| known.n_anew >= 3 && known.names.is_empty()).await;
    cluster.stop().await;
    drop((again, router));
}
