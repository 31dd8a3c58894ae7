//! The answer of `/api/chat` and `/api/generate`: one object, or one line for each piece. Its end has the finish
//! reason, the numbers of tokens and the times.

use crate::http::answer_content::AnswerContent;
use crate::http::error::HttpError;
use crate::http::format::{TokenNames, add_reuse, finish_reason, token_logprob_values};
use crate::http::ollama::shape;
use crate::http::ollama::words::{error_value, to_http_error};
use crate::http::sse::{self, EventWriter};
use crate::http::stopwatch::{AnswerTimes, Stopwatch, rfc3339};
use crate::http::{certificate, fields::Fields};
use axum::Json;
use axum::response::{IntoResponse, Response};
use proto::v1;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::generation::{Generation, GenerationEvent};
use router::front::parsed_request::ParsedRequest;
use router::front::recorder::Recorder;
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::StreamExt;
use types::TenantId;

/// The parts that a client requests in addition to the text.
pub struct ReplyOptions {
    pub shape: ReplyShape,
    pub is_stream: bool,
    pub logprobs: bool,
    /// Includes the prompt's and the answer's token ids, for a request that continues from there.
    pub context: bool,
}

#[derive(Clone, Copy)]
pub enum ReplyShape {
    Chat,
    Generate,
}

impl ReplyShape {
    /// Writes text, thoughts and whole calls into an answer's members.
    fn write_content(self, value: &mut Value, content: &AnswerContent) {
        let to = match self {
            ReplyShape::Chat => {
                value["message"] = json!({ "role": "assistant", "content": content.text });
                &mut value["message"]
            }
            ReplyShape::Generate => {
                value["response"] = content.text.as_str().into();
                value
            }
        };
        if !content.reasoning.is_empty() {
            to["thinking"] = content.reasoning.as_str().into();
        }
        if !content.calls.is_empty() {
            to["tool_calls"] = content.calls.iter().enumerate().map(shape::call).collect();
        }
    }
}

/// Reads `stream`, which is true by default on these pages.
pub fn is_stream(fields: &mut Fields) -> Result<bool, Refusal> {
    Ok(fields.boolean("stream")?.unwrap_or(true))
}

/// Reads `logprobs` and `top_logprobs`: the number of likely tokens beside each token, if any.
pub fn logprobs(fields: &mut Fields, top_max: u32) -> Result<Option<u32>, Refusal> {
    let needs_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    match (needs_logprobs, fields.unsigned("top_logprobs")?) {
        (_, Some(top_n)) if top_n > top_max => {
            Err(Refusal::invalid("top_logprobs", format!("must be at most {top_max}, got {top_n}")))
        }
        (true, top_n) => Ok(Some(top_n.unwrap_or(0))),
        (false, Some(1..)) => Err(Refusal::invalid("top_logprobs", "needs `logprobs` to be true")),
        (false, _) => Ok(None),
    }
}

pub async fn answer(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    options: ReplyOptions,
    recorder: Recorder,
    watch: Stopwatch,
) -> Result<Response, HttpError> {
    let mut generation = front.generate(parsed, recorder).await.map_err(to_http_error)?;
    let is_stream = options.is_stream;
    let mut reply = ReplyWriter::of(&generation, options, watch);
    if is_stream {
        return Ok(sse::stream(reply, generation, front));
    }
    let (mut logprobs, mut last) = (Vec::new(), v1::Finished::default());
    while let Some(event) = generation.next().await {
        match event.map_err(to_http_error)?.1 {
            GenerationEvent::Delta(delta) => {
                reply.add_delta(&delta);
                logprobs.extend(delta.logprobs);
            }
            GenerationEvent::Finished(finished) => last = finished,
            GenerationEvent::Aside(_) => {}
        }
    }
    let answer = reply.take_content(&last);
    let whole = reply.final_value(&answer, &logprobs, &last);
    Ok(certificate::with_headers(Json(whole).into_response(), &generation.started))
}

/// Reports that a model is present, to a client that requests no answer.
pub fn report_loaded(
    front: &Frontend,
    tenant: TenantId,
    shape: ReplyShape,
    model: &str,
    mut recorder: Recorder,
) -> Result<Response, HttpError> {
    let found = front.visit(tenant).and_then(|_visit| front.text(model));
    found.inspect_err(|refusal| recorder.record_refusal(refusal)).map_err(to_http_error)?;
    recorder.record_outcome("ok");
    let mut value = json!({ "model": model, "created_at": rfc3339(unix_seconds()), "done": true });
    shape.write_content(&mut value, &AnswerContent::default());
    value["done_reason"] = "load".into();
    Ok(Json(value).into_response())
}

struct ReplyWriter {
    options: ReplyOptions,
    model: String,
    text: Arc<ModelText>,
    watch: Stopwatch,
    /// Token ids so far; empty unless the client requested them.
    context: Vec<u32>,
    /// For a stream, only the calls: a call is sent when it is complete.
    content: AnswerContent,
}

impl ReplyWriter {
    fn of(generation: &Generation, options: ReplyOptions, watch: Stopwatch) -> ReplyWriter {
        let prompt = generation.prompts.first().filter(|_| options.context);
        let context = prompt.map(|prompt| prompt.ids.clone()).unwrap_or_default();
        ReplyWriter {
            options,
            model: generation.started.model.clone(),
            text: generation.text.clone(),
            watch,
            context,
            content: AnswerContent::default(),
        }
    }

    fn add_delta(&mut self, delta: &v1::Delta) {
        self.watch.mark_first_token();
        self.content.add(delta);
        if self.options.context {
            self.context.extend_from_slice(&delta.token_ids);
        }
    }

    /// Returns the whole answer, with the calls that are complete.
    fn take_content(&mut self, finished: &v1::Finished) -> AnswerContent {
        let mut content = std::mem::take(&mut self.content);
        content.calls.truncate(finished.tool_calls as usize);
        content
    }

    fn value(&self, content: &AnswerContent, logprobs: &[v1::Logprob], is_done: bool) -> Value {
        let mut value = json!({ "model": self.model, "created_at": rfc3339(unix_seconds()), "done": is_done });
        self.options.shape.write_content(&mut value, content);
        if self.options.logprobs && !logprobs.is_empty() {
            value["logprobs"] = token_logprob_values(TokenNames::texts(&self.text.tokenizer), logprobs).into();
        }
        value
    }

    fn final_value(&self, content: &AnswerContent, logprobs: &[v1::Logprob], finished: &v1::Finished) -> Value {
        let mut value = self.value(content, logprobs, true);
        value["done_reason"] = finish_reason(finished).into();
        if self.options.context {
            value["context"] = self.context.as_slice().into();
        }
        add_durations(&mut value, &self.watch.times(), &finished.usage.unwrap_or_default());
        certificate::add(&mut value, finished);
        value
    }
}

fn add_durations(value: &mut Value, times: &AnswerTimes, usage: &v1::Usage) {
    value["total_duration"] = nanos(times.total());
    // No request waits for a model to load.
    value["load_duration"] = 0.into();
    value["prompt_eval_count"] = usage.prompt_tokens.into();
    add_reuse(value, usage.reuse());
    value["prompt_eval_duration"] = nanos(times.prompt);
    value["eval_count"] = usage.completion_tokens.into();
    value["eval_duration"] = nanos(times.answer);
}

pub fn nanos(time: Duration) -> Value {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).into()
}

fn write(out: &mut String, value: &Value) {
    out.push_str(&value.to_string());
    out.push('\n');
}

impl EventWriter for ReplyWriter {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn append_opening(&mut self, _: &Generation, _: &mut String) {}

    fn append_event(&mut self, _: u32, event: GenerationEvent, _: &Generation, out: &mut String) {
        match event {
            GenerationEvent::Delta(delta) => {
                self.add_delta(&delta);
                let v1::Delta { text, reasoning, logprobs, .. } = delta;
                let has_text = !text.is_empty() || !reasoning.is_empty();
                if has_text || (self.options.logprobs && !logprobs.is_empty()) {
                    let piece = AnswerContent { text, reasoning, calls: Vec::new() };
                    write(out, &self.value(&piece, &logprobs, false));
                }
            }
            GenerationEvent::Finished(finished) => {
                let calls = self.take_content(&finished).calls;
                if !calls.is_empty() {
                    write(out, &self.value(&AnswerContent { calls, ..AnswerContent::default() }, &[], false));
                }
                write(out, &self.final_value(&AnswerContent::default(), &[], &finished));
            }
            GenerationEvent::Aside(_) => {}
        }
    }

    fn append_ending(&mut self, _: &mut String) {}

    fn append_failure(&mut self, refusal: Refusal, out: &mut String) {
        write(out, &error_value(&to_http_error(refusal)));
    }

    /// Returns nothing, because clients parse every line as an object.
    fn keep_alive(&self) -> &'static str {
        ""
    }
}
