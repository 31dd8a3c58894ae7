//! Log events as OTLP records, each with the trace and span in which it was logged, if there is one. Has no knowledge
//! of the collector.

use super::queue::{ExportQueue, unix_nanos};
use super::wire::ScopedRecord;
use opentelemetry::trace::TraceContextExt;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, SeverityNumber};
use std::fmt::Debug;
use tracing::dispatcher::get_default;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Longer values are cut, because they have to fit into a queue.
const VALUE_BYTES_MAX: usize = 4096;

pub struct LogLayer {
    queue: ExportQueue<ScopedRecord>,
}

impl LogLayer {
    pub fn new(queue: ExportQueue<ScopedRecord>) -> LogLayer {
        LogLayer { queue }
    }

    /// Returns the trace id, span id and flags.
    fn place<S>(event: &Event<'_>, context: &Context<'_, S>) -> Option<(Vec<u8>, Vec<u8>, u32)>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let span = context.event_span(event)?;
        // The process's subscriber, of which this is a layer.
        let within = get_default(|dispatch| tracing_opentelemetry::get_otel_context(&span.id(), dispatch))?;
        let of = within.span().span_context().clone();
        let flags = u32::from(of.trace_flags().to_u8());
        of.is_valid().then(|| (of.trace_id().to_bytes().to_vec(), of.span_id().to_bytes().to_vec(), flags))
    }
}

impl<S> Layer<S> for LogLayer
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        let (severity, text) = severity(*metadata.level());
        let mut fields = EventFields::default();
        event.record(&mut fields);
        let (trace_id, span_id, flags) = Self::place(event, &context).unwrap_or_default();
        let now = unix_nanos();
        let log = LogRecord {
            time_unix_nano: now,
            observed_time_unix_nano: now,
            severity_number: severity.into(),
            severity_text: text.into(),
            body: fields.message.map(|message| AnyValue { value: Some(Value::StringValue(message)) }),
            attributes: fields.attributes,
            flags,
            trace_id,
            span_id,
            ..LogRecord::default()
        };
        self.queue.put(ScopedRecord { target: metadata.target(), log });
    }
}

fn severity(level: Level) -> (SeverityNumber, &'static str) {
    match level {
        Level::ERROR => (SeverityNumber::Error, "ERROR"),
        Level::WARN => (SeverityNumber::Warn, "WARN"),
        Level::INFO => (SeverityNumber::Info, "INFO"),
        Level::DEBUG => (SeverityNumber::Debug, "DEBUG"),
        Level::TRACE => (SeverityNumber::Trace, "TRACE"),
    }
}

/// An event's fields.
#[derive(Default)]
struct EventFields {
    message: Option<String>,
    attributes: Vec<KeyValue>,
}

impl EventFields {
    fn add(&mut self, field: &Field, value: Value) {
        let value = Some(AnyValue { value: Some(value) });
        self.attributes.push(KeyValue { key: field.name().into(), value, ..KeyValue::default() });
    }

    fn add_text(&mut self, field: &Field, mut text: String) {
        if let Some(end) =
            (VALUE_BYTES_MAX.saturating_sub(3)..=VALUE_BYTES_MAX).rev().find(|i| text.is_char_boundary(*i))
        {
            text.truncate(end);
        }
        match field.name() {
            "message" => self.message = Some(text),
            _ => self.add(field, Value::StringValue(text)),
        }
    }
}

impl Visit for EventFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, Value::DoubleValue(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, Value::IntValue(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.add(field, Value::IntValue(value)),
            Err(_) => self.add_text(field, value.to_string()),
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, Value::BoolValue(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add_text(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add_text(field, format!("{value:?}"));
    }
}
