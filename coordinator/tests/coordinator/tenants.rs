//! One tenant's blocks in the prefix cache cannot be found by another: not from outputs, and so not from timing.

use crate::common::{Cluster, Router, config, next, request, sim};
use proto::cluster::replica_frame::Frame;
use types::{Request, TenantId};

/// How many positions of the prompt were found in the cache, in all.
async fn n_cached(router: &mut Router, tenant: u64) -> u32 {
    let prompt = (0..64).collect();
    let id = router.submit(Request { tenant: TenantId(tenant), ..request(prompt, 2) }).await;
    let mut cached = 0;
    loop {
        let Frame::Outputs(outputs) = next(&mut router.down).await.unwrap() else { continue };
        for output in outputs.outputs {
            assert_eq!(output.id, id.0);
            cached = cached.max(output.cached_tokens);
            if output.finished().unwrap().is_some() {
                return cached;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_is_found_by_its_own_tenant_alone() {
    let cluster = Cluster::start(config(64, 256, 8));
    let _worker = cluster.worker(sim());
    let mut router = cluster.router().await;
    assert_eq!(n_cached(&mut router, 1).await, 0);
    let own = n_cached(&mut router, 1).await;
    assert!(own >= 48, "{own} of 64 were found");
    for stranger in [0, 2, u64::MAX] {
        assert_eq!(n_cached(&mut router, stranger).await, 0, "tenant {stranger}");
    }
    assert_eq!(n_cached(&mut router, 1).await, own);
    cluster.stop().await;
}
