//! The outside of a cluster: text, HTTP and gRPC to clients; one stream of tokens to each replica's coordinator.
//!
//! Knows no tensor, no schedule and no worker. The caller owns sockets and the stop signal.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod admission;
pub mod config;
mod embed;
mod generate;
mod generation;
mod grpc;
mod http;
mod keys;
mod ledger;
mod link;
mod measure;
mod peers;
mod pick;
mod refusal;
mod replicas;
mod resume;
mod roster;
mod sampling;
mod stop;
mod target;
mod text;
mod ticket;
mod topology;

pub use config::{Config, Limits, Render, Waits};
pub use keys::{ApiKeys, NoKey};
pub use resume::ResumeKey;
pub use roster::{Coordinator, Dial, Membership};

use crate::admission::Admission;
use crate::generate::Front;
use checkpoint::{ChatTemplate, Defaults, ModelSpec, Tokenizer};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What turns text into tokens and back: of the model that the replicas serve.
pub struct Text {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    pub spec: ModelSpec,
    pub defaults: Defaults,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the HTTP listener failed")]
    Http(#[source] std::io::Error),
    #[error("the gRPC listener failed")]
    Grpc(#[source] tonic::transport::Error),
    #[error("the reflection service cannot be made")]
    Reflection(#[source] tonic_reflection::server::Error),
}

/// When streams have ended: how long their last words may be on their way.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// Serves until `shutdown`, and then until the streams that run have ended or `drain_max` has passed. New requests are
/// refused from `shutdown` on. The replicas are to outlive this: streams that run are finished by them.
pub async fn serve(
    config: Config,
    members: impl Into<Membership>,
    text: Text,
    http: TcpListener,
    grpc: TcpListener,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let end = CancellationToken::new();
    let (replicas, roster) = replicas::attach(members.into(), &config, end.clone());
    let admission = Admission::new(&config.limits, shutdown.clone(), config.waits.retry_after);
    let drain_max = config.waits.drain_max;
    let streams = TaskTracker::new();
    let nonce = sampling::random_nonce();
    let long_texts = Arc::new(Semaphore::new(config.limits.long_texts_max.clamp(1, Semaphore::MAX_PERMITS)));
    let bodies = Arc::new(Semaphore::new(config.limits.bodies_bytes_max.min(Semaphore::MAX_PERMITS)));
    let front = Front { config, text, replicas, admission, streams: streams.clone(), long_texts, bodies, nonce };
    let front = Arc::new(front);
    let roster = tokio::spawn(roster.run());
    let faces = async {
        // The doors stay open while streams end: who comes is told that this is draining, and readiness says so.
        let http = http::serve(front.clone(), http, end.clone());
        tokio::try_join!(http, grpc::serve(front.clone(), grpc, shutdown.clone(), end.clone()))
    };
    let served = drain(faces, &shutdown, &streams, drain_max, &end).await;
    end.cancel();
    if roster.await.is_err() {
        tracing::error!("the task of the links ended early");
    }
    served
}

/// Runs the faces to their end. After `shutdown` they have until no stream runs, but no longer than `drain_max`; then
/// `end` ends what is left. A health watch or an idle connection keeps nobody here.
async fn drain(
    faces: impl Future<Output = Result<((), ()), Error>>,
    shutdown: &CancellationToken,
    streams: &TaskTracker,
    drain_max: Duration,
    end: &CancellationToken,
) -> Result<(), Error> {
    let too_late = async {
        shutdown.cancelled().await;
        streams.close();
        if tokio::time::timeout(drain_max, streams.wait()).await.is_err() {
            tracing::warn!(streams = streams.len(), "streams are cut: they did not end in time");
        }
        end.cancel();
        tokio::time::sleep(LAST_WORDS_MAX).await;
    };
    tokio::select! {
        served = faces => served.map(|_| ()),
        () = too_late => Ok(()),
    }
}
