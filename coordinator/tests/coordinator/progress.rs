//! The progress of a prompt comes before its first token, for requests that watch it.

use crate::common::{Cluster, PATIENCE, Router, config, next, request, router_frame, sim};
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use proto::cluster::router_frame::Frame as Up;
use tokio::time::timeout;

/// Returns the computed and cached tokens that are sent for a prompt until its answer has ended.
async fn receive_progress(router: &mut Router, with_progress: bool) -> Vec<(u32, u32)> {
    let sample = request((0..40).collect(), 3);
    let id = router.next_id().0;
    let frame = wire::Request { id, needs_progress: with_progress, ..(&sample).into() };
    router.up.send(router_frame(Up::Submit(frame))).await.unwrap();
    let (mut progress, mut n_tokens) = (Vec::new(), 0);
    let until_end = async {
        loop {
            let Frame::Outputs(outputs) = next(&mut router.down).await.unwrap() else { continue };
            for output in outputs.outputs {
                assert!(output.computed.is_none() || n_tokens == 0, "progress is reported only before the first token");
                progress.extend(output.computed.map(|computed| (computed, output.cached_tokens)));
                n_tokens += output.tokens.len();
                if output.finish() != wire::Finish::Unspecified {
                    return;
                }
            }
        }
    };
    timeout(PATIENCE, until_end).await.expect("it ends in time");
    assert_eq!(n_tokens, 3);
    progress
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_progress_is_sent_in_chunks_on_request() {
    let mut config = config(64, 256, 16);
    config.limits.chunk_tokens_max = 16;
    let cluster = Cluster::start(config);
    let _worker = cluster.worker(sim());
    let mut router = cluster.router().await;
    assert_eq!(receive_progress(&mut router, true).await, [(0, 0), (16, 0), (32, 0), (40, 0)]);
    // Its full blocks are cached by now.
    assert_eq!(receive_progress(&mut router, true).await, [(32, 32), (40, 32)]);
    assert_eq!(receive_progress(&mut router, false).await, []);
    cluster.stop().await;
}
