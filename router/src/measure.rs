//! What the router counts, times and traces. Knows no request's content and no client's name.

use crate::generation::Generation;
use crate::http::HttpError;
use crate::refusal::Refusal;
use http::HeaderMap;
use proto::v1;
use std::time::{Duration, Instant};
use telemetry::metrics;
use telemetry::spans::{self, Traced, Usage};
use tonic::metadata::MetadataMap;

/// Which face a request came through.
#[derive(Clone, Copy, Debug)]
pub enum Face {
    Http,
    Grpc,
    /// `vllm.grpc.engine`.
    Vllm,
    /// The Open Inference Protocol.
    Kserve,
}

impl Face {
    fn label(self) -> &'static str {
        match self {
            Face::Http => "http",
            Face::Grpc => "grpc",
            Face::Vllm => "vllm",
            Face::Kserve => "kserve",
        }
    }
}

/// What a caller says of a trace of its own, as W3C Trace Context has it. Empty where it says nothing.
#[derive(Default)]
pub struct Caller<'a> {
    parent: &'a str,
    state: &'a str,
}

impl Caller<'_> {
    pub fn of_http(headers: &HeaderMap) -> Caller<'_> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        Caller { parent: text("traceparent"), state: text("tracestate") }
    }

    pub fn of_grpc(metadata: &MetadataMap) -> Caller<'_> {
        let text = |name| metadata.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        Caller { parent: text("traceparent"), state: text("tracestate") }
    }
}

/// One request from its arrival to its end.
#[derive(Debug)]
pub struct Clock {
    face: Face,
    arrived: Instant,
    last_token: Option<Instant>,
    first_token: Option<Duration>,
    ended: bool,
    trace: Traced,
    /// As its reply carries it, from when there is one.
    id: String,
    used: Usage,
}

impl Clock {
    pub fn start(face: Face, caller: &Caller<'_>) -> Clock {
        Clock {
            face,
            arrived: Instant::now(),
            last_token: None,
            first_token: None,
            ended: false,
            trace: spans::request(face.label(), caller.parent, caller.state),
            id: String::new(),
            used: Usage::default(),
        }
    }

    pub fn trace(&self) -> Traced {
        self.trace.clone()
    }

    /// It has been read, and goes to the replica.
    pub fn begun(&mut self, generation: &Generation) {
        let started = &generation.started;
        self.id.clone_from(&started.id);
        self.trace.begun(&started.id, &started.model, generation.choices.len() as u64);
    }

    pub fn tokens(&mut self, n_tokens: usize) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => {
                self.first_token = Some(now - self.arrived);
                self.trace.first_token(now - self.arrived);
                metrics::first_token(now - self.arrived);
            }
            Some(last) => metrics::between_tokens((now - last) / n_tokens.max(1) as u32),
        }
    }

    /// What one of its choices has read and written.
    pub fn used(&mut self, usage: Option<&v1::Usage>) {
        let usage = usage.copied().unwrap_or_default();
        self.used.n_prompt += u64::from(usage.prompt_tokens);
        self.used.n_cached += u64::from(usage.cached_tokens);
        self.used.n_output += u64::from(usage.completion_tokens);
    }

    pub fn finished(&mut self, reason: &'static str) {
        self.end(reason);
    }

    pub fn refused(&mut self, refusal: &Refusal) {
        self.end(refusal.label());
    }

    /// Counts what a face refuses before it is a request.
    pub fn counted<T>(&mut self, read: Result<T, HttpError>) -> Result<T, HttpError> {
        read.inspect_err(|error| self.end(error.label()))
    }

    fn end(&mut self, outcome: &'static str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let took = self.arrived.elapsed();
        metrics::request(self.face.label(), outcome, took);
        self.trace.ended(outcome, self.used);
        let Usage { n_prompt, n_cached, n_output } = self.used;
        let (id, face, millis) = (&*self.id, self.face.label(), took.as_millis() as u64);
        let first_token_millis = self.first_token.map(|after| after.as_millis() as u64);
        tracing::debug!(id, face, outcome, n_prompt, n_cached, n_output, millis, first_token_millis, "request");
    }
}

impl Drop for Clock {
    /// Neither finished nor refused: the client left.
    fn drop(&mut self) {
        self.end("cancelled");
    }
}
