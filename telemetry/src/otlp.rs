//! Spans to a collector, over OTLP. The only file that knows OpenTelemetry: others make spans with `spans` and pass a
//! `traceparent` on as text.
//!
//! Spans are queued, sent in batches by threads of their own, and dropped when the queue is full: a collector that is
//! slow or gone holds up no request. The queue's limits are the SDK's, and so are the names by which `OTEL_*` variables
//! change them, the sampler and the resource.

use crate::Error;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{TraceContextExt, TracerProvider};
use opentelemetry::{Key, KeyValue, Value};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use std::sync::OnceLock;
use std::time::Duration;
use tokio::runtime::Runtime;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt};
use tracing_subscriber::registry::LookupSpan;

/// How long the end of a process waits for its last spans to be sent.
const LAST_SPANS_MAX: Duration = Duration::from_secs(2);

static SENDING: OnceLock<Sending> = OnceLock::new();

struct Sending {
    provider: SdkTracerProvider,
    /// The connection's; it outlives every runtime that the process has besides.
    _runtime: Runtime,
}

/// What makes spans of this process known to the collector at `endpoint`. Nothing is dialled before the first batch.
pub(crate) fn layer<S>(endpoint: &str) -> Result<impl tracing_subscriber::Layer<S>, Error>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    let endpoint = if endpoint.contains("://") { endpoint.to_owned() } else { format!("http://{endpoint}") };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).thread_name("otlp").enable_all().build()?;
    let exporter = {
        let _within = runtime.enter();
        SpanExporter::builder().with_tonic().with_endpoint(&endpoint).build()
    };
    let exporter = exporter.map_err(|error| Error::Collector { endpoint, why: error.to_string() })?;
    let provider = SdkTracerProvider::builder().with_resource(resource()).with_batch_exporter(exporter).build();
    let tracer = provider.tracer("lockstep");
    if SENDING.set(Sending { provider, _runtime: runtime }).is_err() {
        return Err(Error::LogsTwice);
    }
    // What a source file is called, and which thread it ran on, is for logs.
    let layer = OpenTelemetryLayer::new(tracer).with_location(false).with_threads(false).with_target(false);
    Ok(layer.with_tracked_inactivity(false).with_context_activation(false))
}

/// `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, and what they leave open.
fn resource() -> Resource {
    let own = [
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("process.pid", i64::from(std::process::id())),
    ];
    let told = Resource::builder().build();
    let is_named = |name: Value| !name.as_str().starts_with("unknown_service");
    let resource = Resource::builder().with_attributes(own);
    match told.get(&Key::from_static_str("service.name")).is_some_and(is_named) {
        true => resource.build(),
        false => resource.with_service_name("lockstep").build(),
    }
}

/// Sends what is still queued, within a limit. For the end of the process.
pub fn flush() {
    let Some(sending) = SENDING.get() else { return };
    if let Err(error) = sending.provider.shutdown_with_timeout(LAST_SPANS_MAX) {
        tracing::warn!(%error, "the last spans were not sent");
    }
}

/// The two headers of W3C Trace Context.
struct Headers<'a> {
    parent: &'a str,
    state: &'a str,
}

impl Extractor for Headers<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        match name {
            "traceparent" => Some(self.parent),
            "tracestate" => Some(self.state),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

fn read(parent: &str, state: &str) -> opentelemetry::Context {
    TraceContextPropagator::new().extract_with_context(&opentelemetry::Context::new(), &Headers { parent, state })
}

/// Makes `span` a part of the caller's trace. What cannot be read is as good as absent, as the standard has it.
pub(crate) fn join(span: &Span, parent: &str, state: &str) {
    let caller = read(parent, state);
    if caller.span().span_context().is_valid() {
        // A span that nobody records has no parent either.
        let _unrecorded = span.set_parent(caller);
    }
}

/// Says that `span` also served another, which has a trace of its own.
pub(crate) fn link(span: &Span, to: &Span) {
    span.add_link(to.context().span().span_context().clone());
}

/// What the other side is to be told, so that its spans are children of this one. Empty where nobody records it.
pub(crate) fn traceparent(span: &Span) -> String {
    let context = span.context();
    let of = context.span().span_context().clone();
    match of.is_valid() {
        true => format!("00-{}-{}-{:02x}", of.trace_id(), of.span_id(), of.trace_flags().to_u8()),
        false => String::new(),
    }
}
