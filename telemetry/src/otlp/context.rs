//! W3C Trace Context: a span's place in a trace, read from text and written as text. Has no knowledge of the wire.

use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Array, StringValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The two headers of W3C Trace Context for the other side of a wire. Empty if the span is not recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceHeaders {
    pub parent: String,
    pub state: String,
}

struct HeaderExtractor<'a> {
    parent: &'a str,
    state: &'a str,
}

impl Extractor for HeaderExtractor<'_> {
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
    TraceContextPropagator::new()
        .extract_with_context(&opentelemetry::Context::new(), &HeaderExtractor { parent, state })
}

/// Makes `span` a part of the caller's trace. Unreadable headers count as absent, as the standard requires.
pub(crate) fn join(span: &Span, parent: &str, state: &str) {
    let caller = read(parent, state);
    if caller.span().span_context().is_valid() {
        // A span that is not recorded has no parent either.
        let _unrecorded = span.set_parent(caller);
    }
}

/// Links `span` to another that it also served and that has its own trace.
pub(crate) fn link(span: &Span, to: &Span) {
    span.add_link(to.context().span().span_context().clone());
}

/// Returns the headers that make the other side's spans children of this one. Their flag is set if the span is sampled.
pub(crate) fn trace_headers(span: &Span) -> TraceHeaders {
    let context = span.context();
    let of = context.span().span_context().clone();
    match of.is_valid() {
        true => TraceHeaders {
            parent: format!("00-{}-{}-{:02x}", of.trace_id(), of.span_id(), of.trace_flags().to_u8()),
            state: of.trace_state().header(),
        },
        false => TraceHeaders::default(),
    }
}

/// Renames a span once its work is known. `tracing` can rename only before the first child.
pub(crate) fn rename(span: &Span, name: &str) {
    span.context().span().update_name(name.to_owned());
}

/// Sets an attribute that is a list, which `tracing` does not support.
pub(crate) fn set_list<'a>(span: &Span, name: &'static str, of: impl Iterator<Item = &'a str>) {
    let of: Vec<StringValue> = of.map(|text| text.to_owned().into()).collect();
    span.set_attribute(name, Value::Array(Array::String(of)));
}

/// Sets an attribute that only some spans have, if the operator has enabled it.
pub(crate) fn set_text(span: &Span, name: &'static str, text: &str) {
    span.set_attribute(name, text.to_owned());
}
