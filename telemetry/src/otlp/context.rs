//! W3C Trace Context: a span's place in a trace, read from text and written as text. Knows no wire.

use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Array, StringValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The two headers of W3C Trace Context, for the other side of a wire. Empty where nobody records the span.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    pub parent: String,
    pub state: String,
}

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

/// What the other side is to be told, so that its spans are children of this one. The flag says whether it is sampled.
pub(crate) fn carried(span: &Span) -> Carried {
    let context = span.context();
    let of = context.span().span_context().clone();
    match of.is_valid() {
        true => Carried {
            parent: format!("00-{}-{}-{:02x}", of.trace_id(), of.span_id(), of.trace_flags().to_u8()),
            state: of.trace_state().header(),
        },
        false => Carried::default(),
    }
}

/// What a span is called from now on, once its work is known: `tracing` can tell that only before the first child.
pub(crate) fn name(span: &Span, name: &str) {
    span.context().span().update_name(name.to_owned());
}

/// An attribute that is a list, which `tracing` has no word for.
pub(crate) fn list<'a>(span: &Span, name: &'static str, of: impl Iterator<Item = &'a str>) {
    let of: Vec<StringValue> = of.map(|text| text.to_owned().into()).collect();
    span.set_attribute(name, Value::Array(Array::String(of)));
}

/// An attribute that only some spans have, by the operator's wish.
pub(crate) fn text(span: &Span, name: &'static str, text: &str) {
    span.set_attribute(name, text.to_owned());
}
