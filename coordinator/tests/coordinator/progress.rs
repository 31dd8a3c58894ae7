//! The progress of a prompt comes before its first token, for requests that watch it.

use crate::common::{Cluster, PATIENCE, Router, config, next, request, router_frame, sim};
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use proto::cluster::router_frame::Frame as Up;
use tokio::time::timeout;

/// Returns the computed and cached tokens that are sent for a prompt until its answer has ended.
async fn told(router: &mut Router, tells_progress: bool) -> Vec<(u32, u32)> {
    let asked = request((0..40).collect(), 3);
    let id = router.next_id().0;
    let frame = wire::Request { id, tells_progress, ..(&asked).into() };
    router.up.send(router_frame(Up::Submit(frame))).await.unwrap();
    let (mut told, mut n_tokens) = (Vec::new(), 0);
    let heard = async {
        loop {
            let Frame::Outputs(outputs) = next(&mut router.down).await.unwrap() else { continue };
            for output in outputs.outputs {
                assert!(output.computed.is_none() || n_tokens == 0, "a prompt is told of before the first token");
                told.extend(output.computed.map(|computed| (computed, output.cached_tokens)));
                n_tokens += output.tokens.len();
                if output.finish() != wire::Finish::Unspecified {
                    return;
                }
            }
        }
    };
    timeout(PATIENCE, heard).await.expect("it ends in time");
    assert_eq!(n_tokens, 3);
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_told_in_its_chunks_to_who_asks() {
    let mut config = config(64, 256, 16);
    config.limits.chunk_tokens_max = 16;
    let cluster = Cluster::start(config);
    let _worker = cluster.worker(sim());
    let mut router = cluster.router().await;
    assert_eq!(told(&mut router, true).await, [(0, 0), (16, 0), (32, 0), (40, 0)]);
    // Its full blocks are cached by now.
    assert_eq!(told(&mut router, true).await, [(32, 32), (40, 32)]);
    assert_eq!(told(&mut router, false).await, []);
    cluster.stop().await;
}
