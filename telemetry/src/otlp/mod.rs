//! Spans, metrics and logs to a collector, over OTLP. The only folder that uses OpenTelemetry: other code makes spans
//! with `spans`, counts with `metrics`, logs with `tracing`, and forwards a `traceparent` as text.
//!
//! Everything goes into a bounded queue, and a separate thread sends it in batches. A full queue drops items and counts
//! them: a collector that is slow, gone or faulty delays no request.

mod collector;
pub(crate) mod context;
mod log;
mod page;
mod queue;
mod reach;
mod sample;
mod wire;

pub use collector::{Collector, Protocol};
pub use context::TraceHeaders;
pub use reach::ExportHeaders;

use crate::{Error, metrics};
use opentelemetry::trace::TracerProvider;
use opentelemetry::{Key, KeyValue, Value};
use opentelemetry_proto::tonic::resource::v1::Resource as Sender;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use queue::{ExportQueue, Pack};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::Subscriber;
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::registry::LookupSpan;
use wire::{CollectorClient, ExportBatch};

/// The longest wait for the last batches at the end of a process.
const LAST_MAX: Duration = Duration::from_secs(2);

static SENDING: OnceLock<ExportSetup> = OnceLock::new();

struct ExportSetup {
    wire: CollectorClient,
    sender: Sender,
    metrics_every: Option<Duration>,
    content: bool,
    ending: watch::Sender<bool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// The connection's runtime, which outlives every other runtime of the process.
    runtime: Runtime,
}

impl ExportSetup {
    fn start(&self, task: impl Future<Output = ()> + Send + 'static) {
        let task = self.runtime.spawn(task);
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    /// Makes a queue, and the task that sends the items in it.
    fn queue<T: Send + 'static>(&self, signal: &'static str, pack: Pack<T>) -> ExportQueue<T> {
        let (pile, mut leaving) = queue::open(signal, pack, self.wire.clone(), self.ending.subscribe());
        self.start(async move { leaving.run().await });
        pile
    }
}

/// Returns layers that send this process's spans and logs to the collector. They dial at the first batch.
pub(crate) fn layers<S>(
    collector: &Collector,
) -> Result<(impl tracing_subscriber::Layer<S> + use<S>, impl tracing_subscriber::Layer<S> + use<S>), Error>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).thread_name("otlp").enable_all().build()?;
    let wire = {
        let _within = runtime.enter();
        CollectorClient::to(collector)?
    };
    let resource = resource();
    let described = ResourceAttributesWithSchema::from(&resource);
    let sender = Sender { attributes: described.attributes.0.clone(), ..Sender::default() };
    let sending = ExportSetup {
        wire,
        sender: sender.clone(),
        metrics_every: collector.metrics_every,
        content: collector.content,
        ending: watch::Sender::new(false),
        tasks: Mutex::default(),
        runtime,
    };
    let spans = sending.queue("traces", Box::new(move |spans| ExportBatch::spans(spans, &described)));
    let logs = sending.queue("logs", Box::new(move |logs| ExportBatch::logs(logs, &sender)));
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_sampler(sample::Sampler::new(collector.sample))
        .with_span_processor(queue::QueueSpanProcessor(spans))
        .build();
    let tracer = provider.tracer("lockstep");
    if SENDING.set(sending).is_err() {
        return Err(Error::LogsTwice);
    }
    // The source file and the thread belong in logs.
    let layer = OpenTelemetryLayer::new(tracer).with_location(false).with_threads(false).with_target(false);
    Ok((layer.with_tracked_inactivity(false).with_context_activation(false), log::LogLayer::new(logs)))
}

/// Sends the page of the metrics at intervals. `page` renders it.
pub(crate) fn export_metrics(page: impl Fn() -> String + Send + 'static) {
    let Some(sending) = SENDING.get() else { return };
    let Some(every) = sending.metrics_every else { return };
    let (sender, wire, ending) = (sending.sender.clone(), sending.wire.clone(), sending.ending.subscribe());
    let since = queue::unix_nanos();
    let batch = move || {
        let metrics = page::read(&page(), since, queue::unix_nanos());
        let n = page::n_points(&metrics);
        (ExportBatch::metrics(metrics, &sender), n)
    };
    sending.start(queue::repeat(every, batch, wire, ending));
}

/// Whether spans have to contain prompts and answers.
pub(crate) fn wants_content() -> bool {
    SENDING.get().is_some_and(|sending| sending.content)
}

/// Returns the resource of `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, with defaults for the rest.
fn resource() -> Resource {
    let own = [
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("process.pid", i64::from(std::process::id())),
    ];
    let configured = Resource::builder().build();
    let is_named = |name: Value| !name.as_str().starts_with("unknown_service");
    let mut resource = Resource::builder().with_attributes(own);
    if !configured.get(&Key::from_static_str("service.name")).is_some_and(is_named) {
        resource = resource.with_service_name("lockstep");
    }
    // Distinguishes two processes that count the same metrics.
    if configured.get(&Key::from_static_str("service.instance.id")).is_none() {
        resource = resource.with_attribute(KeyValue::new("service.instance.id", instance_id()));
    }
    resource.build()
}

/// Returns a UUID of this run of the process.
fn instance_id() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    let (high, low) = (draw() & !0xf000 | 0x4000, draw() & !(0b11 << 62) | 1 << 63);
    let (low_head, low_tail) = (low >> 48, low & 0xffff_ffff_ffff);
    format!("{:08x}-{:04x}-{:04x}-{low_head:04x}-{low_tail:012x}", high >> 32, high >> 16 & 0xffff, high & 0xffff)
}

/// Sends the queued items, within a limit. Called at the end of the process.
pub fn flush() {
    let Some(sending) = SENDING.get() else { return };
    sending.ending.send_replace(true);
    let tasks = std::mem::take(&mut *sending.tasks.lock().unwrap_or_else(PoisonError::into_inner));
    let all = async {
        for task in tasks {
            // Each task itself logs the items that it could not send.
            let _ended = task.await;
        }
    };
    let sent = sending.runtime.block_on(async { tokio::time::timeout(LAST_MAX, all).await });
    if sent.is_err() {
        metrics::not_sent("all", "end", 1);
        tracing::warn!(target: "telemetry", "some telemetry was not sent to the collector in time");
    }
}
