//! The outside of a cluster: text, HTTP and gRPC to clients; one stream of tokens to each replica's coordinator.
//!
//! Knows no tensor, no schedule and no worker. The caller owns sockets and the stop signal.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod admission;
mod again;
mod attended;
mod beats;
pub mod board;
mod budget;
pub mod caches;
pub mod circuit;
pub mod config;
mod embed;
mod faces;
mod gate;
mod gathered;
mod generate;
mod generation;
mod grpc;
mod http;
mod keys;
pub mod ledger;
mod link;
mod measure;
mod models;
mod panics;
mod peers;
pub mod pick;
mod refusal;
mod replicas;
mod resume;
mod roster;
mod sampling;
mod socket;
mod stop;
mod target;
mod tenants;
mod text;
mod ticket;
mod topology;

pub use config::{Config, Limits, ReadTextFiles, Render, Waits};
pub use grpc::LIVE;
pub use keys::{ApiKeys, BadLine};
pub use models::{Routes, Texts};
pub use pick::Policy;
pub use resume::ResumeKey;
pub use roster::{Coordinator, Dial, Membership};

use crate::admission::Admission;
use crate::attended::Attendance;
use crate::generate::Front;
use crate::models::Models;
use checkpoint::{ChatTemplate, Defaults, ModelSpec, Tokenizer};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::server::Connected;

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

/// Serves both faces until `shutdown`, and then until the streams that run have ended or `drain_max` has passed. New
/// requests are refused from `shutdown` on. The replicas are to outlive this: streams that run are finished by them.
pub async fn serve(
    config: Config,
    members: impl Into<Membership>,
    texts: impl Into<Texts>,
    http: TcpListener,
    grpc: TcpListener,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let connections = proto::transport::tcp_incoming(grpc);
    let faces = |front: Arc<Front>, draining, end: CancellationToken| async move {
        let http = http::serve(front.clone(), http, end.clone());
        tokio::try_join!(http, grpc::serve(front, connections, draining, end)).map(|_| ())
    };
    serve_faces(config, members.into(), texts.into(), shutdown, faces).await
}

/// The same with the gRPC face alone, over the connections that come.
pub async fn serve_grpc<IO, E>(
    config: Config,
    members: impl Into<Membership>,
    texts: impl Into<Texts>,
    incoming: impl Stream<Item = Result<IO, E>>,
    shutdown: CancellationToken,
) -> Result<(), Error>
where
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let faces = |front, draining, end| grpc::serve(front, incoming, draining, end);
    serve_faces(config, members.into(), texts.into(), shutdown, faces).await
}

async fn serve_faces<F: Future<Output = Result<(), Error>>>(
    config: Config,
    members: Membership,
    texts: Texts,
    shutdown: CancellationToken,
    faces: impl FnOnce(Arc<Front>, CancellationToken, CancellationToken) -> F,
) -> Result<(), Error> {
    let end = CancellationToken::new();
    let (replicas, roster) = replicas::attach(members, &config, end.clone());
    let admission = Admission::new(&config.limits, shutdown.clone(), config.waits.retry_after);
    let (drain_max, unread_max) = (config.waits.drain_max, config.waits.unread_max);
    let (streams, attendance) = (TaskTracker::new(), Arc::new(Attendance::default()));
    let nonce = sampling::random_nonce();
    let long_texts = Arc::new(Semaphore::new(config.limits.long_texts_max.clamp(1, Semaphore::MAX_PERMITS)));
    let bodies = Arc::new(Semaphore::new(config.limits.bodies_bytes_max.min(Semaphore::MAX_PERMITS)));
    let models = Models::new(texts, config.names.clone(), config.routes.clone());
    let attends = attendance.clone();
    let attends = tokio::spawn(async move { attends.attend(unread_max).await });
    let front = Arc::new(Front {
        config,
        models,
        replicas,
        admission,
        streams: streams.clone(),
        attendance,
        long_texts,
        bodies,
        nonce,
    });
    let roster = tokio::spawn(roster.run());
    // The doors stay open while streams end: who comes is told that this is draining, and readiness says so.
    let served = drain(faces(front, shutdown.clone(), end.clone()), &shutdown, &streams, drain_max, &end).await;
    end.cancel();
    attends.abort();
    if roster.await.is_err() {
        tracing::error!("the task of the links ended early");
    }
    served
}

/// Runs the faces to their end. After `shutdown` they have until no stream runs, but no longer than `drain_max`; then
/// `end` ends what is left. A health watch or an idle connection keeps nobody here.
async fn drain(
    faces: impl Future<Output = Result<(), Error>>,
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
        biased;
        served = faces => served,
        () = too_late => Ok(()),
    }
}
