//! Which traces are recorded: a caller's trace by the caller's flag; a fraction of the traces that begin here; and the
//! trace of a step, which is separate, if the step serves a recorded request.

use opentelemetry::trace::{Link, SpanKind, TraceContextExt, TraceId, TraceState};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{Sampler as Standard, SamplingDecision, SamplingResult, ShouldSample};

#[derive(Clone, Debug)]
pub struct Sampler {
    roots: Standard,
}

impl Sampler {
    pub fn new(ratio: f64) -> Sampler {
        Sampler { roots: Standard::ParentBased(Box::new(Standard::TraceIdRatioBased(ratio))) }
    }
}

impl ShouldSample for Sampler {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let has_parent = parent.is_some_and(Context::has_active_span);
        if has_parent || links.is_empty() {
            return self.roots.should_sample(parent, trace, name, kind, attributes, links);
        }
        let decision = match links.iter().any(|link| link.span_context.is_sampled()) {
            true => SamplingDecision::RecordAndSample,
            false => SamplingDecision::Drop,
        };
        SamplingResult { decision, attributes: Vec::new(), trace_state: TraceState::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags};

    fn span(flags: TraceFlags) -> SpanContext {
        SpanContext::new(TraceId::from(7), SpanId::from(9), flags, true, TraceState::default())
    }

    fn is_sampled(ratio: f64, parent: Option<TraceFlags>, links: &[TraceFlags]) -> bool {
        let parent = parent.map(|flags| Context::new().with_remote_span_context(span(flags)));
        let links: Vec<Link> = links.iter().map(|flags| Link::with_context(span(*flags))).collect();
        let trace = TraceId::from(u128::MAX >> 1);
        let result = Sampler::new(ratio).should_sample(parent.as_ref(), trace, "", &SpanKind::Server, &[], &links);
        result.decision == SamplingDecision::RecordAndSample
    }

    #[test]
    fn caller_decides_then_links_then_ratio() {
        let (yes, no) = (TraceFlags::SAMPLED, TraceFlags::NOT_SAMPLED);
        assert_eq!([is_sampled(0.0, Some(yes), &[]), is_sampled(1.0, Some(no), &[])], [true, false]);
        assert_eq!([is_sampled(0.0, None, &[no, yes]), is_sampled(1.0, None, &[no])], [true, false]);
        assert_eq!([is_sampled(0.0, None, &[]), is_sampled(1.0, None, &[])], [false, true]);
    }
}
