//! A rank: joins a coordinator, loads its slice of the model and runs steps. Has no knowledge of text, of the cluster
//! store, or of requests that no step names.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod assignment;
mod config;
mod error;
mod load;
pub mod runner;
mod session;
pub mod tier;

pub use assignment::{Assignment, Load, LoadError, LoadedModel, MeshSecret, ReadyReport};
pub use backend::PassStats;
pub use backend::cpu::Isa;
pub use backend::cuda::{Card, Compiler, Driver, lt_version};
pub use collective::{
    AbortHandle, CancelFlag, CarrierChoice, Error as MeshError, LinkEncryption, MeshTimeouts, PeerListener, WireChoice,
    nccl_version,
};
pub use config::{Config, KvMemory, MemoryLeft};
pub use error::Error;
pub use load::packed_cache::{PackedCache, PackedCacheConfig, remove_packed};
pub use load::scrub::{Scrubber, SpoiltWeight};
pub use load::weight_cache::WeightCache;
pub use load::{fetch, source};
pub use runner::guesses::{DraftCost, DraftModelConfig, GuessConfig, GuessSource, MtpConfig, RecalledLogs};
pub use runner::kv_commit::{KvPoolMemory, KvShortage};
pub use runner::masks::MaskConfig;
pub use runner::model_loader::{ComputeDevice, ModelLoader};
pub use runner::model_runner::ModelRunner;
pub use runner::{Rest, RunError, Runner, UpcomingSteps};
pub use runner::{sequences, sim};

use config::ExecutionMode;
use session::{Worker, heartbeat, leases, rank_thread, scrubbing};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use wire::ConnectionFuture;

/// Joins the coordinator behind `channel` and computes for it until `shutdown`, and dials again when the stream ends.
/// At `shutdown` it announces that it leaves, so that another worker takes its rank before it is gone.
pub fn serve(
    channel: Channel,
    loader: Box<dyn Load>,
    config: Config,
    shutdown: CancellationToken,
) -> ConnectionFuture<Error> {
    Box::pin(serve_on(ExecutionMode::Threads, channel, loader, config, shutdown))
}

/// Like `serve`, without a thread of its own, for runners that only model their time: a whole cluster runs in one
/// thread, on virtual time.
pub fn serve_in_tasks(
    channel: Channel,
    loader: Box<dyn Load>,
    config: Config,
    shutdown: CancellationToken,
) -> ConnectionFuture<Error> {
    Box::pin(serve_on(ExecutionMode::Tasks, channel, loader, config, shutdown))
}

async fn serve_on(
    footing: ExecutionMode,
    channel: Channel,
    loader: Box<dyn Load>,
    config: Config,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let (work, queue) = mpsc::channel(config.steps_queued_max);
    let progress = Arc::new(heartbeat::StepCounters::default());
    let leases = Arc::new(leases::ThreadLeases::default());
    let (counters, places) = (progress.clone(), leases.clone());
    // The thread ends when `work` is dropped, after its present step.
    let (memory, scrubber) = (config.kv_memory, config.scrubber.clone());
    let thread = rank_thread::run(loader, queue, counters, places, memory, scrubber);
    match footing {
        ExecutionMode::Threads => {
            drop(std::thread::Builder::new().name("compute".into()).spawn(|| rank_thread::block_on(thread))?)
        }
        ExecutionMode::Tasks => drop(tokio::spawn(thread)),
    }
    if let Some(scrubber) = config.scrubber.clone().filter(|_| footing == ExecutionMode::Threads) {
        scrubbing::start(scrubber, progress.clone(), work.downgrade())?;
    }
    let worker = Worker { config, footing, work, progress, leases, shutdown };
    keep_joined(&worker, &channel).await
}

async fn keep_joined(worker: &Worker, channel: &Channel) -> Result<(), Error> {
    let mut wait = worker.config.redial_min;
    loop {
        let begun = tokio::time::Instant::now();
        let ended = worker.session(channel.clone()).await?;
        if let session::SessionEnd::Left(reason) = &ended {
            tracing::info!(reason, "the coordinator dismissed this worker: it joins again later");
            // A coordinator that dismisses its ranks is about to exit, and its successor is not there yet.
            wait = wait.max(worker.config.redial_after_leave);
        }
        let free = async {
            wait_for_free_thread(worker).await?;
            // Frees the finished assignment's memory now, not at the next assignment.
            worker.work.send(rank_thread::RankWork::Release).await.map_err(|_| Error::ThreadGone)
        };
        let Some(freed) = worker.shutdown.run_until_cancelled(free).await else { return Ok(()) };
        freed?;
        // A session that lasted is not a failed attempt.
        if begun.elapsed() > worker.config.redial_max {
            wait = worker.config.redial_min;
        }
        tracing::info!(%ended, wait_ms = wait.as_millis() as u64, "joining again");
        let waited = worker.shutdown.run_until_cancelled(tokio::time::sleep(wait)).await;
        if waited.is_none() {
            return Ok(());
        }
        wait = (wait * 2).min(worker.config.redial_max);
    }
}

/// Waits until the computing thread is free. A device that hangs keeps the thread forever; the parent of this process
/// may start another one.
async fn wait_for_free_thread(worker: &Worker) -> Result<(), Error> {
    const LOOK: Duration = Duration::from_millis(10);
    const WARN_AFTER: Duration = Duration::from_secs(1);
    let (begun, mut has_warned) = (tokio::time::Instant::now(), false);
    while worker.progress.is_busy() && !worker.work.is_closed() {
        if begun.elapsed() > worker.config.come_back_max {
            return Err(Error::Hung(worker.config.come_back_max));
        }
        if begun.elapsed() > WARN_AFTER && !std::mem::replace(&mut has_warned, true) {
            tracing::warn!("the computing thread still runs an ended assignment: this worker joins when it is free");
        }
        tokio::time::sleep(LOOK).await;
    }
    if worker.work.is_closed() { Err(Error::ThreadGone) } else { Ok(()) }
}
