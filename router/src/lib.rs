//! The outside of a cluster: text, HTTP and gRPC for clients; one stream of tokens to each replica's coordinator.
//!
//! Knows no tensor, no schedule and no worker. The caller owns sockets and the stop signal.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod audit;
pub mod board;
pub mod config;
pub mod front;
pub mod history;
pub mod limits;
mod lines;
pub mod link;
pub mod record;
pub mod refusal;
pub mod replicas;

pub use board::pick::PickPolicy;
pub use config::{Config, DisabledPages, ListMachineModels, ReadTextFiles, Render, RouterLimits, Timeouts};
pub use front::resume::ResumeKey;
pub use front::stored::StoreLimits;
pub use limits::keys::ApiKeys;
pub use limits::shared::SharedQuotas;
pub use lines::{BadLine, nearest};
pub use record::{RecordConfig, find as find_record, lines as recorded_lines};
pub use replicas::models::routes::ModelRoutes;
pub use replicas::models::table::ModelTexts;
pub use replicas::models::text::ModelText;
pub use replicas::roster::{CoordinatorChannel, Dial, Membership};

use crate::front::finished_answer::{AnswerQueue, AnswerQueues, FinishedAnswer, QueuedAnswer, record_dropped};
use crate::front::frontend::Frontend;
use crate::front::grammars::Grammars;
use crate::front::public_ids::PublicIds;
use crate::front::reader_watch::ReaderWatch;
use crate::front::stored::ResponseStore;
use crate::front::text_work::TextWork;
use crate::front::threads::LimitedThreads;
use crate::history::History;
use crate::limits::admission::Admission;
use crate::replicas::models::table::ModelTable;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long the last output of streams may be on its way after all streams have ended.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// How long the last answers may take to be recorded.
const RECORDING_MAX: Duration = Duration::from_secs(5);

/// Writes one line of the record for an answer, with its prompt if the flag is set.
pub type RecordLine = fn(&FinishedAnswer, bool) -> String;

/// The folder for records cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the folder for records cannot be used")]
pub struct RecordError(#[source] io::Error);

/// Runs a router until `shutdown`, and then until the running streams have ended or `drain_max` has passed. From
/// `shutdown` on it refuses new requests. `faces` serves clients; its two tokens end new requests and all connections.
/// The replicas have to outlive this: they finish the running streams.
pub async fn run<E: From<RecordError>, F: Future<Output = Result<(), E>>>(
    config: Config,
    members: Membership,
    texts: ModelTexts,
    shutdown: CancellationToken,
    faces: impl FnOnce(Arc<Frontend>, CancellationToken, CancellationToken) -> F,
    record_line: RecordLine,
) -> Result<(), E> {
    let end = CancellationToken::new();
    let nonce = front::sampling::random_nonce();
    // Ends when no client is answered any more.
    let recorded = CancellationToken::new();
    let (record, recording) = record_of(&config, nonce, &recorded, record_line).map_err(RecordError)?.unzip();
    let (replicas, roster) = replicas::pool::attach(members, &config, end.clone());
    let admission = Admission::new(&config.limits, shutdown.clone(), config.timeouts.retry_after);
    let Timeouts { drain_max, unread_max, introduction_max, .. } = config.timeouts;
    let (streams, reader_watch) = (TaskTracker::new(), Arc::new(ReaderWatch::default()));
    let text_work = TextWork::new(LimitedThreads::new(config.limits.long_texts_max, &config.timeouts));
    let record_threads = LimitedThreads::new(1, &config.timeouts);
    let grammars = Grammars::new(config.limits.grammar, config.limits.grammars_kept_bytes_max);
    let grammars = Arc::new(grammars);
    let responses = ResponseStore::new(config.limits.stored);
    let bodies = Arc::new(Semaphore::new(config.limits.bodies_bytes_max.min(Semaphore::MAX_PERMITS)));
    telemetry::metrics::audits_begin();
    telemetry::metrics::records_begin();
    let (audit, audited) = (config.audit > 0.0).then(|| audit::queue(config.audit)).unzip();
    let models = ModelTable::new(texts, config.names.clone(), config.routes.clone());
    let attends = reader_watch.clone();
    let attends = tokio::spawn(async move { attends.watch(unread_max).await });
    let front = Arc::new(Frontend {
        config,
        models,
        replicas,
        admission,
        streams: streams.clone(),
        reader_watch,
        texts: text_work,
        record_threads,
        grammars,
        responses,
        answers: AnswerQueues { record, audit },
        bodies,
        since: front::frontend::unix_seconds(),
        ids: PublicIds::new(nonce),
        history: History::default(),
    });
    let audits = audited.map(|answers| tokio::spawn(audit::run(front.clone(), answers, end.clone())));
    let roster = tokio::spawn(roster.run());
    // The first connections wait in the listeners' queues for replicas that may be ready in a moment.
    let known = tokio::time::timeout(introduction_max, front.replicas.wait_until_known());
    let _known = shutdown.run_until_cancelled(known).await;
    // Connections are accepted while streams end: a new client receives the reason, and readiness reports it too.
    let served = drain(faces(front, shutdown.clone(), end.clone()), &shutdown, &streams, drain_max, &end).await;
    end.cancel();
    attends.abort();
    recorded.cancel();
    if let Some(audits) = audits
        && audits.await.is_err()
    {
        tracing::error!("the audit task ended early");
    }
    if roster.await.is_err() {
        tracing::error!("the supervisor of links ended early");
    }
    if let Some(recording) = recording {
        close(recording).await;
    }
    served
}

/// Returns the queue of the answers that are recorded, and the thread that writes them.
fn record_of(
    config: &Config,
    nonce: u32,
    until: &CancellationToken,
    record_line: RecordLine,
) -> io::Result<Option<(AnswerQueue, JoinHandle<()>)>> {
    let Some(record) = &config.record else { return Ok(None) };
    let limits = &config.limits;
    let (queue, answers) =
        AnswerQueue::new(limits.answers_unrecorded_max, limits.answers_unrecorded_bytes_max, record_dropped);
    let with_prompts = record.prompts;
    let line = move |queued: &QueuedAnswer| record_line(&queued.answer, with_prompts);
    Ok(Some((queue, record::start(record, nonce, answers, until.clone(), line)?)))
}

/// Waits until the answers are recorded.
async fn close(recording: JoinHandle<()>) {
    let joined = tokio::task::spawn_blocking(move || recording.join());
    if !matches!(tokio::time::timeout(RECORDING_MAX, joined).await, Ok(Ok(Ok(())))) {
        tracing::warn!("the last answers may not be recorded");
    }
}

/// Runs the faces to their end. After `shutdown` they have until no stream runs, but at most `drain_max`; then `end`
/// ends the remaining ones. A health watch or an idle connection delays nothing.
async fn drain<E>(
    faces: impl Future<Output = Result<(), E>>,
    shutdown: &CancellationToken,
    streams: &TaskTracker,
    drain_max: Duration,
    end: &CancellationToken,
) -> Result<(), E> {
    let too_late = async {
        shutdown.cancelled().await;
        tracing::info!(requests = streams.len(), "draining: waiting for the running requests");
        streams.close();
        if tokio::time::timeout(drain_max, streams.wait()).await.is_err() {
            tracing::warn!(streams = streams.len(), "ending streams that did not finish in time");
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
