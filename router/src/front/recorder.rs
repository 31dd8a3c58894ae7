//! Counts, times and traces one request. Records no client's name, and a request's content only if an operator has
//! requested that.

use crate::front::frontend::unix_millis;
use crate::front::parsed_request::{ParsedRequest, Purpose};
use crate::history::{ArrivedRequest, History, TimelineRecorder};
use crate::link::view::ReplicaInfo;
use crate::refusal::Refusal;
use http::HeaderMap;
use proto::cluster as wire;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::TokenUsage;
use telemetry::metrics;
use telemetry::spans::{self, RequestAttributes, TracedSpan};
use tonic::metadata::MetadataMap;
use types::TenantId;

/// Which face a request came through.
#[derive(Clone, Copy, Debug)]
pub enum Face {
    Http,
    Grpc,
    /// `vllm.grpc.engine` and `vllm.Inference`.
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

/// The caller's W3C Trace Context. Empty if it has none.
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

/// Records one request from its arrival to its end: metrics, its span, and a line of the log.
#[derive(Debug)]
pub struct Recorder {
    face: Face,
    arrived: Instant,
    last_token: Option<Instant>,
    /// Present from the second token on.
    between: Option<metrics::TokenIntervals>,
    first_token: Option<Duration>,
    ended: bool,
    trace: TracedSpan,
    /// The id in the reply, once there is one.
    id: String,
    used: TokenUsage,
    /// Tokens of the longest choice so far.
    n_longest: u64,
    /// Empty until the request was read; so is the model's name in replies.
    operation: &'static str,
    model: String,
    /// The model's name at its replicas. It differs if a route maps the name.
    version: String,
    /// The model's label in metrics; None if there is one model.
    label: Option<Arc<str>>,
    /// The choices of each prompt.
    n_choices: u32,
    reasons: Vec<&'static str>,
    /// Present if the trace is to contain it.
    content: Option<TraceContent>,
    /// Present from when its tenant is known until its end.
    sighting: Option<TimelineRecorder>,
}

/// Prompts and answers as text.
#[derive(Debug, Default)]
struct TraceContent {
    input: String,
    /// The answers, one per choice.
    output: Vec<String>,
}

/// The most bytes of one prompt or answer in a trace.
const CONTENT_BYTES_MAX: usize = 32 << 10;

impl Recorder {
    pub fn start(face: Face, caller: &Caller<'_>) -> Recorder {
        Recorder {
            face,
            arrived: Instant::now(),
            last_token: None,
            between: None,
            first_token: None,
            ended: false,
            trace: spans::request(face.label(), caller.parent, caller.state),
            id: String::new(),
            used: TokenUsage::default(),
            n_longest: 0,
            operation: "",
            model: String::new(),
            version: String::new(),
            label: None,
            n_choices: 1,
            reasons: Vec::new(),
            content: None,
            sighting: None,
        }
    }

    pub fn trace(&self) -> TracedSpan {
        self.trace.clone()
    }

    /// The request's tenant is known: from now on the pages show the request.
    pub fn show_in_history(&mut self, history: &History, tenant: TenantId, label: Arc<str>) {
        let arrival = ArrivedRequest { face: self.face.label(), tenant, label, unix_millis: unix_millis() };
        self.sighting = Some(history.add_request(arrival));
    }

    /// The request was read.
    pub fn record_request(&mut self, parsed: &ParsedRequest) {
        let is_chat = matches!(parsed.prompts.first(), Some(Input::Chat(_)));
        let (operation, sampling) = match &parsed.purpose {
            Purpose::Pool => ("embeddings", None),
            Purpose::Read(_) => ("decisions", None),
            Purpose::Generate(sampling) if is_chat => ("chat", Some(sampling)),
            Purpose::Generate(sampling) => ("text_completion", Some(sampling)),
        };
        self.operation = operation;
        self.n_choices = parsed.n_choices;
        if let Some(sampling) = sampling {
            metrics::record_request_params(sampling.max_tokens, parsed.n_choices);
        }
        if !self.trace.is_recorded() {
            return;
        }
        let nonzero = |n: f32| (n != 0.0).then_some(f64::from(n));
        let attributes = RequestAttributes {
            operation,
            model: cut_model_name(&parsed.model),
            n_choices: parsed.n_choices.into(),
            ..RequestAttributes::default()
        };
        self.trace.record_request(&sampling.map_or(attributes.clone(), |sampling| RequestAttributes {
            max_tokens: sampling.max_tokens.map(u64::from),
            temperature: sampling.temperature.map(f64::from),
            top_p: sampling.top_p.map(f64::from),
            top_k: sampling.top_k.map(u64::from),
            seed: sampling.seed,
            frequency_penalty: nonzero(sampling.frequency_penalty),
            presence_penalty: nonzero(sampling.presence_penalty),
            stops: sampling.stop.clone(),
            ..attributes
        }));
        if sampling.is_some() && self.trace.wants_content() {
            self.content = Some(TraceContent { input: messages(&parsed.prompts), output: Vec::new() });
        }
    }

    /// Records the request as it was read.
    pub fn record_begun(&mut self, started: &v1::Started, label: Option<&Arc<str>>, replica: &ReplicaInfo) {
        let version = &replica.model;
        if let Some(sighting) = &self.sighting {
            let n_prompt = u64::from(started.prompt_tokens);
            sighting.record_placed(&started.id, &started.model, &replica.name, (n_prompt, self.n_choices));
        }
        self.id.clone_from(&started.id);
        self.model.clone_from(&started.model);
        self.label = label.cloned();
        if self.label.is_some() {
            self.version.clone_from(version);
        }
        self.trace.record_dispatch(&started.id, self.operation, &started.model);
    }

    pub fn embedded(&mut self, reply: &v1::EmbedReply) {
        self.model.clone_from(&reply.model);
        self.trace.record_dispatch("", self.operation, &reply.model);
        self.used.n_prompt = reply.usage.map_or(0, |usage| usage.prompt_tokens.into());
    }

    /// Adds a piece of a choice's text.
    pub fn record_text(&mut self, choice_idx: u32, text: &str) {
        let Some(content) = &mut self.content else { return };
        let choice_idx = choice_idx as usize;
        if content.output.len() <= choice_idx {
            content.output.resize_with(choice_idx + 1, String::new);
        }
        let output = &mut content.output[choice_idx];
        if output.len() + text.len() <= CONTENT_BYTES_MAX {
            output.push_str(text);
        }
    }

    /// Records what happened to a choice on its way.
    pub fn record_passages(&self, choice_idx: u32, passages: &[wire::Passage]) {
        self.sighting.iter().for_each(|sighting| sighting.record_passages(choice_idx, passages));
    }

    /// Records that so many tokens of the prompt are computed or cached.
    pub fn record_computed(&self, n_tokens: u32) {
        self.sighting.iter().for_each(|sighting| sighting.record_computed(n_tokens));
    }

    pub fn record_tokens(&mut self, choice_idx: u32, n_tokens: usize) {
        if let Some(sighting) = &mut self.sighting {
            sighting.record_tokens(choice_idx, n_tokens as u32);
        }
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => {
                self.first_token = Some(now - self.arrived);
                self.trace.record_first_token(now - self.arrived);
                metrics::first_token(self.label.as_ref(), now - self.arrived);
            }
            Some(last) => {
                let of_a_stream = || metrics::between_tokens_of_a_stream(self.label.as_ref());
                let between = self.between.get_or_insert_with(of_a_stream);
                between.observe((now - last) / n_tokens.max(1) as u32);
            }
        }
    }

    /// Records the end of a choice. The choices of one prompt share its tokens.
    pub fn record_finish(&mut self, choice_idx: u32, finished: &v1::Finished) {
        let usage = finished.usage.unwrap_or_default();
        if choice_idx.is_multiple_of(self.n_choices) {
            self.used.n_prompt += u64::from(usage.prompt_tokens);
            self.used.n_cached += u64::from(usage.cached_tokens);
        }
        self.used.n_output += u64::from(usage.completion_tokens);
        self.n_longest = self.n_longest.max(usage.completion_tokens.into());
        self.reasons.push(match finished.reason() {
            v1::finished::Reason::Length => "length",
            v1::finished::Reason::Stop | v1::finished::Reason::Unspecified => "stop",
        });
    }

    pub fn record_outcome(&mut self, reason: &'static str) {
        self.end(reason);
    }

    pub fn record_refusal(&mut self, refusal: &Refusal) {
        self.end(refusal.label());
    }

    /// Records that a face refuses the request in its own terms, with a metric's label.
    pub fn record_refusal_as(&mut self, label: &'static str) {
        self.end(label);
    }

    fn end(&mut self, outcome: &'static str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let took = self.arrived.elapsed();
        if let Some(sighting) = self.sighting.take() {
            sighting.ended(outcome, (self.used.n_prompt, self.used.n_cached));
        }
        metrics::request(self.label.as_ref(), self.face.label(), outcome, took);
        self.report_metrics(outcome, took);
        self.trace.record_end(outcome, self.used, &self.reasons);
        let TokenUsage { n_prompt, n_cached, n_output } = self.used;
        let (id, face, millis) = (&*self.id, self.face.label(), took.as_millis() as u64);
        let first_token_millis = self.first_token.map(|after| after.as_millis() as u64);
        self.trace.log_within(|| {
            tracing::debug!(id, face, outcome, n_prompt, n_cached, n_output, millis, first_token_millis, "request");
        });
    }

    fn report_metrics(&self, outcome: &'static str, took: Duration) {
        if self.operation.is_empty() {
            return;
        }
        metrics::answered(&metrics::RequestMetrics {
            operation: self.operation,
            label: self.label.as_ref(),
            model: Some(&*self.model).filter(|model| !model.is_empty()),
            version: Some(&*self.version).filter(|version| !version.is_empty()),
            outcome,
            took,
            first_token: self.first_token,
            last_token: self.last_token.map(|last| last - self.arrived),
            n_choices: self.reasons.len() as u64,
            usage: self.used,
            n_longest: self.n_longest,
        });
        if let Some(content) = &self.content {
            self.trace.record_content(&content.input, &content.answers(&self.reasons));
        }
    }
}

/// Cuts a model's name, because a client may send any.
fn cut_model_name(model: &str) -> String {
    model.chars().take(MODEL_CHARS_MAX).collect()
}

const MODEL_CHARS_MAX: usize = 100;

/// Returns the prompts, as OpenTelemetry's conventions write them. Prompts of token ids have no text.
fn messages(prompts: &[Input]) -> String {
    let mut entries = Vec::new();
    for prompt in prompts {
        match prompt {
            Input::Text(text) => entries.push(message("user", text)),
            Input::Chat(chat) => entries.extend(chat.messages.iter().map(|of| message(&of.role, &of.content))),
            Input::Pair(pair) => entries.extend([&pair.first, &pair.second].map(|text| message("user", text))),
            Input::TokenIds(_) => {}
        }
    }
    if entries.is_empty() { String::new() } else { serde_json::Value::from(entries).to_string() }
}

fn message(role: &str, text: &str) -> serde_json::Value {
    let end = text.floor_char_boundary(CONTENT_BYTES_MAX);
    json!({ "role": role, "parts": [{ "type": "text", "content": &text[..end] }] })
}

impl TraceContent {
    fn answers(&self, reasons: &[&'static str]) -> String {
        let of = |(i, text): (usize, &String)| {
            let mut entry = message("assistant", text);
            // Several choices may end in a different order.
            if let ([reason], 0) = (reasons, i) {
                entry["finish_reason"] = (*reason).into();
            }
            entry
        };
        match self.output.is_empty() {
            true => String::new(),
            false => serde_json::Value::from_iter(self.output.iter().enumerate().map(of)).to_string(),
        }
    }
}

impl Drop for Recorder {
    /// A request that neither finished nor was refused was cancelled: the client left.
    fn drop(&mut self) {
        self.end("cancelled");
    }
}
