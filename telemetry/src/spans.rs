//! Every span: its name, its fields, and the typed functions that set them. Has no knowledge of the recorder.
//!
//! A request's spans (`request`, `prepare`, `sequence`) are made if a collector is configured. The spans of steps
//! (`step` at the coordinator, `pass` at each rank) are hundreds a second, so they are made only if they are enabled
//! too. Otherwise a span costs one check of a flag.

use crate::otlp::{self, TraceHeaders, context};
use crate::usage::{PROVIDER, TokenUsage};
use std::time::Duration;
use tracing::field::Empty;
use tracing::{Level, Span};

/// The target of all roles' spans, by which one filter selects them.
pub(crate) const TARGET: &str = "span";
/// The level of spans that exist with every collector, and below it that of steps.
pub(crate) const REQUESTS: Level = Level::INFO;
pub(crate) const STEPS: Level = Level::DEBUG;

/// A span of a request or a step; it ends when it is dropped.
#[derive(Clone, Debug)]
pub struct TracedSpan(Span);

/// The default is a span that is not recorded.
impl Default for TracedSpan {
    fn default() -> TracedSpan {
        TracedSpan(Span::none())
    }
}

impl TracedSpan {
    /// Returns whether it is recorded.
    pub fn is_recorded(&self) -> bool {
        !self.0.is_disabled()
    }

    /// Returns the span's W3C Trace Context for the other side of a wire; empty if the span is not recorded.
    pub fn trace_headers(&self) -> TraceHeaders {
        if self.is_recorded() { context::trace_headers(&self.0) } else { TraceHeaders::default() }
    }

    /// Runs a closure that logs within this span.
    pub fn log_within(&self, log: impl FnOnce()) {
        self.0.in_scope(log);
    }

    /// Whether it has to contain prompts and answers: only if an operator has enabled that.
    pub fn wants_content(&self) -> bool {
        self.is_recorded() && otlp::wants_content()
    }

    /// Links this span to `other`, which it also serves.
    pub fn link(&self, other: &TracedSpan) {
        if self.is_recorded() && other.is_recorded() {
            context::link(&self.0, &other.0);
        }
    }

    fn join(self, traceparent: &str, tracestate: &str) -> TracedSpan {
        if self.is_recorded() && !traceparent.is_empty() {
            context::join(&self.0, traceparent, tracestate);
        }
        self
    }

    fn record_failure(&self, why: &'static str) {
        self.0.record("otel.status_code", "ERROR");
        self.0.record("error.type", why);
    }
}

/// OTLP has only signed numbers; unsigned ones would arrive as text.
fn to_i64(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The parameters of a request, under the names of OpenTelemetry's conventions. None if the request does not have them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestAttributes {
    /// `chat`, `text_completion` or `embeddings`.
    pub operation: &'static str,
    /// The client's name for the model; may be empty.
    pub model: String,
    pub n_choices: u64,
    pub max_tokens: Option<u64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<u64>,
    pub seed: Option<u64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub stops: Vec<String>,
}

/// Starts the router's span from a request's arrival to its end, named by operation and model once they are known. It
/// is part of the caller's trace, if the caller has sent one.
pub fn request(face: &'static str, traceparent: &str, tracestate: &str) -> TracedSpan {
    let span = tracing::span!(
        target: TARGET,
        parent: None,
        REQUESTS,
        "request",
        otel.kind = "server",
        otel.status_code = Empty,
        error.type = Empty,
        gen_ai.operation.name = Empty,
        gen_ai.provider.name = PROVIDER,
        gen_ai.request.model = Empty,
        gen_ai.request.choice.count = Empty,
        gen_ai.request.max_tokens = Empty,
        gen_ai.request.temperature = Empty,
        gen_ai.request.top_p = Empty,
        gen_ai.request.top_k = Empty,
        gen_ai.request.seed = Empty,
        gen_ai.request.frequency_penalty = Empty,
        gen_ai.request.presence_penalty = Empty,
        gen_ai.response.id = Empty,
        gen_ai.response.model = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        gen_ai.usage.cache_read.input_tokens = Empty,
        gen_ai.response.time_to_first_chunk = Empty,
        lockstep.face = face,
        lockstep.outcome = Empty,
    );
    TracedSpan(span).join(traceparent, tracestate)
}

impl TracedSpan {
    /// Sets the parameters of a request, once it has been read.
    pub fn record_request(&self, attributes: &RequestAttributes) {
        if !self.is_recorded() {
            return;
        }
        let span = &self.0;
        context::rename(span, format!("{} {}", attributes.operation, attributes.model).trim_end());
        span.record("gen_ai.operation.name", attributes.operation);
        span.record("gen_ai.request.choice.count", to_i64(attributes.n_choices));
        span.record("gen_ai.request.max_tokens", attributes.max_tokens.map(to_i64));
        span.record("gen_ai.request.temperature", attributes.temperature);
        span.record("gen_ai.request.top_p", attributes.top_p);
        span.record("gen_ai.request.top_k", attributes.top_k.map(to_i64));
        span.record("gen_ai.request.seed", attributes.seed.map(to_i64));
        span.record("gen_ai.request.frequency_penalty", attributes.frequency_penalty);
        span.record("gen_ai.request.presence_penalty", attributes.presence_penalty);
        if !attributes.model.is_empty() {
            span.record("gen_ai.request.model", &*attributes.model);
        }
        if !attributes.stops.is_empty() && otlp::wants_content() {
            context::set_list(span, "gen_ai.request.stop_sequences", attributes.stops.iter().map(String::as_str));
        }
    }

    /// Called when the request goes to a replica.
    pub fn record_dispatch(&self, id: &str, operation: &str, model: &str) {
        if !self.is_recorded() {
            return;
        }
        context::rename(&self.0, &format!("{operation} {model}"));
        self.0.record("gen_ai.response.model", model);
        if !id.is_empty() {
            self.0.record("gen_ai.response.id", id);
        }
    }

    pub fn record_first_token(&self, after: Duration) {
        self.0.record("gen_ai.response.time_to_first_chunk", after.as_secs_f64());
    }

    /// Sets prompts and answers in the conventions' message format. Only for spans that `wants_content`.
    pub fn record_content(&self, input: &str, output: &str) {
        for (name, text) in [("gen_ai.input.messages", input), ("gen_ai.output.messages", output)] {
            if !text.is_empty() {
                context::set_text(&self.0, name, text);
            }
        }
    }

    pub fn record_end(&self, outcome: &'static str, usage: TokenUsage, reasons: &[&'static str]) {
        self.0.record("lockstep.outcome", outcome);
        self.0.record("gen_ai.usage.input_tokens", to_i64(usage.n_prompt));
        self.0.record("gen_ai.usage.output_tokens", to_i64(usage.n_output));
        self.0.record("gen_ai.usage.cache_read.input_tokens", to_i64(usage.n_cached));
        if self.is_recorded() && !reasons.is_empty() {
            context::set_list(&self.0, "gen_ai.response.finish_reasons", reasons.iter().copied());
        }
        if outcome != "ok" {
            self.record_failure(outcome);
        }
    }

    /// Starts the router's span over template and tokenizer.
    pub fn preparation_span(&self) -> TracedSpan {
        TracedSpan(tracing::span!(target: TARGET, parent: &self.0, REQUESTS, "prepare", otel.kind = "internal"))
    }

    /// Starts the router's span from the tokens until the request is on its way to a replica.
    pub fn placement_span(&self) -> TracedSpan {
        TracedSpan(tracing::span!(target: TARGET, parent: &self.0, REQUESTS, "place", otel.kind = "internal"))
    }
}

/// Starts the coordinator's span of one choice of a request, from its submission to its end.
pub fn sequence(traceparent: &str, tracestate: &str, id: u64, n_prompt: u64, n_output: u64) -> TracedSpan {
    let span = tracing::span!(
        target: TARGET,
        parent: None,
        REQUESTS,
        "sequence",
        otel.kind = "server",
        otel.status_code = Empty,
        error.type = Empty,
        lockstep.id = format_args!("{id:016x}"),
        lockstep.prompt_tokens = to_i64(n_prompt),
        lockstep.resumed_tokens = to_i64(n_output),
        lockstep.cached_tokens = Empty,
        lockstep.reuse_ended = Empty,
        lockstep.reuse_position = Empty,
        lockstep.seconds_to_first_token = Empty,
        lockstep.steps = Empty,
        lockstep.drafts_accepted = Empty,
        lockstep.drafts_rejected = Empty,
        lockstep.finish = Empty,
    );
    TracedSpan(span).join(traceparent, tracestate)
}

impl TracedSpan {
    /// Starts the coordinator's span from a sequence's submission until its first slice in a step.
    pub fn queue_span(&self) -> TracedSpan {
        TracedSpan(tracing::span!(target: TARGET, parent: &self.0, REQUESTS, "queue", otel.kind = "internal"))
    }

    pub fn sequence_started(&self, after: Duration, n_cached: u64) {
        self.0.record("lockstep.seconds_to_first_token", after.as_secs_f64());
        self.0.record("lockstep.cached_tokens", to_i64(n_cached));
    }

    /// Sets why and where the prefix cache stopped to match the prompt.
    pub fn reuse_ended(&self, why: &'static str, position: u64) {
        self.0.record("lockstep.reuse_ended", why);
        self.0.record("lockstep.reuse_position", to_i64(position));
    }

    pub fn sequence_ended(&self, finish: &'static str, steps: SequenceSteps) {
        self.0.record("lockstep.finish", finish);
        self.0.record("lockstep.steps", to_i64(steps.n));
        if steps.drafts_accepted + steps.drafts_rejected > 0 {
            self.0.record("lockstep.drafts_accepted", to_i64(steps.drafts_accepted));
            self.0.record("lockstep.drafts_rejected", to_i64(steps.drafts_rejected));
        }
        if finish == "error" {
            self.record_failure(finish);
        }
    }
}

/// The steps of a sequence, and what they verified.
#[derive(Clone, Copy, Debug, Default)]
pub struct SequenceSteps {
    pub n: u64,
    pub drafts_accepted: u64,
    pub drafts_rejected: u64,
}

/// Starts the coordinator's span from the sending of a step to its answer.
pub fn step(id: u64, epoch: u32, n_slices: u64, n_positions: u64) -> TracedSpan {
    TracedSpan(tracing::span!(
        target: TARGET,
        parent: None,
        STEPS,
        "step",
        otel.kind = "client",
        lockstep.step = to_i64(id),
        lockstep.epoch = i64::from(epoch),
        lockstep.slices = to_i64(n_slices),
        lockstep.positions = to_i64(n_positions),
    ))
}

/// Starts the coordinator's span from the end of an epoch until the replica serves again.
pub fn recovery(epoch: u32) -> TracedSpan {
    TracedSpan(tracing::span!(
        target: TARGET,
        parent: None,
        REQUESTS,
        "recovery",
        otel.kind = "internal",
        lockstep.epoch = i64::from(epoch),
        lockstep.cause = Empty,
        lockstep.rank = Empty,
        lockstep.host = Empty,
        lockstep.tp = Empty,
        lockstep.pp = Empty,
        lockstep.replayed_tokens = Empty,
    ))
}

impl TracedSpan {
    /// Sets, for a recovery, why the epoch ended, and which rank was lost, if any.
    pub fn record_recovery_cause(&self, cause: &'static str, lost: Option<(u16, &str)>) {
        self.0.record("lockstep.cause", cause);
        if let Some((rank, host)) = lost {
            self.0.record("lockstep.rank", i64::from(rank));
            self.0.record("lockstep.host", host);
        }
    }

    /// Sets, for a recovery, the new grid, and how many tokens it computes again.
    pub fn record_recovery_grid(&self, tp: u16, pp: u16, n_tokens_replayed: u64) {
        self.0.record("lockstep.tp", i64::from(tp));
        self.0.record("lockstep.pp", i64::from(pp));
        self.0.record("lockstep.replayed_tokens", to_i64(n_tokens_replayed));
    }
}

/// Starts a rank's span over its pass of a step.
pub fn pass(traceparent: &str, step: u64, rank: u16) -> TracedSpan {
    let span = tracing::span!(
        target: TARGET,
        parent: None,
        STEPS,
        "pass",
        otel.kind = "server",
        lockstep.step = to_i64(step),
        lockstep.rank = i64::from(rank),
        lockstep.wait_micros = Empty,
    );
    TracedSpan(span).join(traceparent, "")
}

impl TracedSpan {
    /// Sets, for a pass, how long it waited for other ranks.
    pub fn record_wait(&self, waited: Duration) {
        if self.is_recorded() {
            self.0.record("lockstep.wait_micros", i64::try_from(waited.as_micros()).unwrap_or(i64::MAX));
        }
    }
}
