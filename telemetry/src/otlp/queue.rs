//! Bounded queues of items to send, and the tasks that empty them in batches. Has no knowledge of the collector or of
//! the contents of a batch.

use super::wire::{CollectorClient, ExportBatch};
use crate::metrics;
use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout_at};

/// The most items of one signal that wait: some megabytes, or some seconds of a busy server.
const QUEUED_MAX: usize = 4096;
const BATCH_MAX: usize = 512;
/// How long the first item of a batch waits for others.
const GATHER_MAX: Duration = Duration::from_secs(1);
/// How often a batch is tried; the pause doubles after each try.
const TRIES_MAX: u32 = 4;
const PAUSE: Duration = Duration::from_millis(500);
/// At most one warning per minute about a collector.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

pub type Pack<T> = Box<dyn Fn(Vec<T>) -> ExportBatch + Send>;

/// The sending half of the queue. Adding an item never waits.
#[derive(Debug)]
pub struct ExportQueue<T> {
    signal: &'static str,
    queue: mpsc::Sender<T>,
}

impl<T> ExportQueue<T> {
    pub fn put(&self, thing: T) {
        if self.queue.try_send(thing).is_err() {
            metrics::not_sent(self.signal, "full", 1);
        }
    }
}

/// The receiving half of the queue, which sends batches.
pub struct ExportTask<T> {
    queue: mpsc::Receiver<T>,
    pack: Pack<T>,
    sender: BatchSender,
}

pub fn open<T>(
    signal: &'static str,
    pack: Pack<T>,
    wire: CollectorClient,
    ending: watch::Receiver<bool>,
) -> (ExportQueue<T>, ExportTask<T>) {
    let (sender, receiver) = mpsc::channel(QUEUED_MAX);
    let leaving = ExportTask { queue: receiver, pack, sender: BatchSender { signal, wire, ending, complained: None } };
    (ExportQueue { signal, queue: sender }, leaving)
}

impl<T> ExportTask<T> {
    /// Ends with the process, after it has tried to send everything in the queue.
    pub async fn run(&mut self) {
        loop {
            let batch = self.next_batch().await;
            if batch.is_empty() {
                return;
            }
            let n = batch.len() as u64;
            let packed = (self.pack)(batch);
            self.sender.send(&packed, n).await;
        }
    }

    /// Returns the next batch, which is empty at the end.
    async fn next_batch(&mut self) -> Vec<T> {
        let mut batch = Vec::new();
        let mut ending = self.sender.ending.clone();
        tokio::select! {
            biased;
            _ = self.queue.recv_many(&mut batch, BATCH_MAX) => {}
            _ = ending.wait_for(|is_ending| *is_ending) => {}
        }
        let until = Instant::now() + GATHER_MAX;
        while batch.len() < BATCH_MAX && !*ending.borrow() {
            let room = BATCH_MAX - batch.len();
            let more = async {
                tokio::select! {
                    biased;
                    n = self.queue.recv_many(&mut batch, room) => n > 0,
                    _ = ending.wait_for(|is_ending| *is_ending) => false,
                }
            };
            if !timeout_at(until, more).await.unwrap_or(false) {
                break;
            }
        }
        while batch.len() < BATCH_MAX
            && let Ok(thing) = self.queue.try_recv()
        {
            batch.push(thing);
        }
        batch
    }
}

/// Sends the result of `batch` at intervals, and once more at the end.
pub async fn repeat(
    every: Duration,
    batch: impl Fn() -> (ExportBatch, u64),
    wire: CollectorClient,
    mut ending: watch::Receiver<bool>,
) {
    let mut sender = BatchSender { signal: "metrics", wire, ending: ending.clone(), complained: None };
    loop {
        let is_last = tokio::select! {
            _ = ending.wait_for(|is_ending| *is_ending) => true,
            () = sleep(every) => false,
        };
        let (packed, n) = batch();
        sender.send(&packed, n).await;
        if is_last {
            return;
        }
    }
}

/// Sends batches one after another, and counts the outcomes.
struct BatchSender {
    signal: &'static str,
    wire: CollectorClient,
    ending: watch::Receiver<bool>,
    complained: Option<Instant>,
}

impl BatchSender {
    async fn send(&mut self, batch: &ExportBatch, n: u64) {
        let mut tries = 0;
        let failed = loop {
            tries += 1;
            match self.wire.send(batch).await {
                Ok(refused) => {
                    let n_refused = refused.n.min(n);
                    metrics::sent(self.signal, n - n_refused);
                    if n_refused > 0 || !refused.why.is_empty() {
                        metrics::not_sent(self.signal, "refused", n_refused);
                        self.log_failure(&refused.why);
                    }
                    return;
                }
                Err(failure) if failure.is_passing && tries < TRIES_MAX && !*self.ending.borrow() => {
                    let mut ending = self.ending.clone();
                    tokio::select! {
                        () = sleep(PAUSE * 2_u32.pow(tries - 1)) => {}
                        _ = ending.wait_for(|is_ending| *is_ending) => {}
                    }
                }
                Err(failure) => break failure,
            }
        };
        metrics::not_sent(self.signal, if failed.is_passing { "unreachable" } else { "refused" }, n);
        self.log_failure(&failed.why);
    }

    /// Logs to stderr only: a line for the collector would be one more item to send.
    fn log_failure(&mut self, why: &str) {
        let now = Instant::now();
        if self.complained.is_none_or(|last| now - last >= COMPLAIN_EVERY) {
            self.complained = Some(now);
            tracing::warn!(target: "telemetry", signal = self.signal, why, "the collector does not accept the data");
        }
    }
}

/// Takes spans that have ended.
#[derive(Debug)]
pub struct QueueSpanProcessor(pub ExportQueue<SpanData>);

impl SpanProcessor for QueueSpanProcessor {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() {
            self.0.put(span);
        }
    }

    /// The queue's task sends the waiting items, and the end of the process waits for that task.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

pub fn unix_nanos() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
