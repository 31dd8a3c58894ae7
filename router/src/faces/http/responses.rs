//! `/v1/responses`: OpenAI's newer API, for text. Nothing is stored: a response cannot be fetched again.

use crate::faces::http::certificate;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::Fields;
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, counted, read};
use crate::faces::http::single::{self, invalid, objects, text_of, unserved, whole};
use crate::faces::http::sse::{self, Position, Voice};
use crate::front::ask::Ask;
use crate::front::frontend::Frontend;
use crate::front::generation::{Generation, GenerationEvent};
use crate::front::recorder::{Caller, Face, Recorder};
use crate::front::resume::ReadMark;
use crate::refusal::Refusal;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use proto::v1;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub async fn responses(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let read = read(&front, request).await;
    let page = counted(&mut recorder, read)?;
    let (ask, is_stream, settings) = counted(&mut recorder, ask(&front, page).map_err(said))?;
    let mut generation = front.generate(ask, recorder).await.map_err(said)?;
    let reply = Reply::of(&generation, settings);
    if is_stream {
        let voice = ResponseVoice { reply, position: Position::of(&generation), text: String::new(), n_events: 0 };
        return Ok(sse::stream(voice, generation, &front));
    }
    let (text, finished) = whole(&mut generation).await.map_err(said)?;
    let whole = Json(reply.ended(&text, &finished)).into_response();
    Ok(certificate::with_headers(whole, &generation.started))
}

/// Names the refused field as this page does.
fn said(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[("chat", "input"), ("max_tokens", "max_output_tokens")]))
}

/// Returns the request, whether it is to be streamed, and the fields that a reply repeats.
fn ask(front: &Frontend, mut page: Page) -> Result<(Ask, bool, Value), Refusal> {
    let fields = &mut page.fields;
    fields.check(Endpoint::Responses)?;
    let metadata = fields.take("metadata").unwrap_or_else(|| Value::Object(Map::new()));
    let instructions = fields.string("instructions")?;
    let mut messages = input(fields)?;
    if let Some(content) = instructions.clone() {
        messages.insert(0, single::said("system", content));
    }
    let mut sampling = fields.sampling()?;
    let most = fields.unsigned("max_output_tokens")?;
    sampling.max_tokens = most.or(sampling.max_tokens);
    let settings = json!({
        "instructions": instructions,
        "max_output_tokens": sampling.max_tokens,
        "metadata": metadata,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    });
    // These options only pad a stream against readers that count bytes on the way. No answer depends on them.
    fields.object("stream_options")?;
    let (ask, is_stream) = single::ask(front, page, messages, sampling)?;
    Ok((ask, is_stream, settings))
}

fn input(fields: &mut Fields) -> Result<Vec<v1::ChatMessage>, Refusal> {
    match fields.take("input") {
        Some(Value::String(content)) => Ok(vec![single::said("user", content)]),
        list => objects("input", list)?.into_iter().enumerate().map(|(i, item)| message(i, item)).collect(),
    }
}

fn message(i: usize, mut item: Fields) -> Result<v1::ChatMessage, Refusal> {
    match item.take("type").as_ref().map(Value::as_str) {
        None | Some(Some("message")) => {}
        Some(Some(kind)) => return Err(unserved(format!("input[{i}].type"), kind)),
        Some(None) => return Err(invalid(format!("input[{i}].type"), "must be a string")),
    }
    let role = match item.take("role").as_ref().and_then(Value::as_str) {
        Some(role @ ("system" | "user" | "assistant")) => role.to_owned(),
        // The newer name of the same role.
        Some("developer") => "system".to_owned(),
        _ => return Err(invalid(format!("input[{i}].role"), "must be system, developer, user or assistant")),
    };
    let kinds = ["input_text", "output_text", "text"];
    let content = text_of(&format!("input[{i}].content"), item.take("content"), &kinds)?;
    Ok(single::said(&role, content))
}

/// The fields of a reply that are known when it begins.
struct Reply {
    id: String,
    item_id: String,
    /// All members that stay the same during the reply.
    value: Value,
}

impl Reply {
    fn of(generation: &Generation, settings: Value) -> Reply {
        let started = &generation.started;
        let (id, item_id) = (format!("resp_{}", started.id), format!("msg_{}", started.id));
        let mut value = json!({
            "id": id,
            "object": "response",
            "created_at": generation.created,
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": started.model,
            "output": [],
            "parallel_tool_calls": true,
            "previous_response_id": null,
            "reasoning": { "effort": null, "summary": null },
            "seed": started.seed,
            "store": false,
            "text": { "format": { "type": "text" } },
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": null,
        });
        if let (Value::Object(all), Value::Object(settings)) = (&mut value, settings) {
            all.extend(settings);
        }
        let defaults = &generation.text.defaults;
        for (name, default) in [("temperature", defaults.temperature), ("top_p", defaults.top_p)] {
            if value[name].is_null() {
                value[name] = default.unwrap_or(1.0).into();
            }
        }
        Reply { id, item_id, value }
    }

    fn ended(&self, text: &str, finished: &v1::Finished) -> Value {
        let mut value = self.value.clone();
        let status = status(finished);
        value["status"] = status.into();
        if status == "incomplete" {
            value["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        value["output"] = json!([self.item(status, Some(text))]);
        value["usage"] = usage_value(&finished.usage.unwrap_or_default());
        certificate::add(&mut value, finished);
        value
    }

    fn failed(&self, error: &HttpError) -> Value {
        let mut value = self.value.clone();
        value["status"] = "failed".into();
        value["error"] = json!({ "code": "server_error", "message": error.message() });
        value
    }

    /// The one message of the output; without text if none has come.
    fn item(&self, status: &str, text: Option<&str>) -> Value {
        let content: Vec<Value> = text.into_iter().map(part).collect();
        json!({ "id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content })
    }
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn status(finished: &v1::Finished) -> &'static str {
    match finished.reason() {
        v1::finished::Reason::Length => "incomplete",
        _ => "completed",
    }
}

fn usage_value(usage: &v1::Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

/// A streamed reply. Only events that advance the client carry a position.
struct ResponseVoice {
    reply: Reply,
    position: Position,
    /// The whole text, including what the client had before.
    text: String,
    n_events: u64,
}

/// How many events come before the first piece of text.
const N_OPENING: u64 = 4;

impl ResponseVoice {
    fn mark(&mut self) -> &mut ReadMark {
        &mut self.position.marks.choices[0]
    }

    /// Numbers an event and adds the id of the one output item.
    fn numbered(&mut self, mut data: Value) -> Value {
        data["sequence_number"] = self.n_events.into();
        self.n_events += 1;
        data
    }

    fn say(&mut self, out: &mut String, data: Value) {
        let data = self.numbered(data);
        sse::write(out, data["type"].as_str(), &data);
    }

    fn say_with_position(&mut self, out: &mut String, data: Value) {
        let data = self.numbered(data);
        self.position.write(out, data["type"].as_str(), &data);
    }

    /// Makes an event about the output's text.
    fn of_text(&self, kind: &str, name: &str, value: Value) -> Value {
        json!({
            "type": format!("response.{kind}"), "item_id": self.reply.item_id, "output_index": 0,
            "content_index": 0, name: value,
        })
    }

    fn end(&mut self, finished: &v1::Finished, out: &mut String) {
        *self.mark() = ReadMark::Tokens { n: self.mark().n_tokens(), ended: true };
        let status = status(finished);
        let mut done = self.of_text("output_text.done", "text", self.text.as_str().into());
        done["logprobs"] = json!([]);
        self.say(out, done);
        self.say(out, self.of_text("content_part.done", "part", part(&self.text)));
        let item = self.reply.item(status, Some(&self.text));
        self.say(out, json!({ "type": "response.output_item.done", "output_index": 0, "item": item }));
        let response = self.reply.ended(&self.text, finished);
        self.say_with_position(out, json!({ "type": format!("response.{status}"), "response": response }));
    }
}

impl Voice for ResponseVoice {
    fn opening(&mut self, _: &Generation, out: &mut String) {
        let mark = *self.mark();
        if mark != ReadMark::Nothing {
            // Each token has at most one event, so no number is used twice.
            self.n_events = N_OPENING + u64::from(mark.n_tokens());
            return;
        }
        *self.mark() = ReadMark::at(0);
        self.say(out, json!({ "type": "response.created", "response": self.reply.value }));
        self.say(out, json!({ "type": "response.in_progress", "response": self.reply.value }));
        let item = self.reply.item("in_progress", None);
        self.say(out, json!({ "type": "response.output_item.added", "output_index": 0, "item": item }));
        self.say_with_position(out, self.of_text("content_part.added", "part", part("")));
    }

    fn event(&mut self, _: u32, event: GenerationEvent, _: &Generation, out: &mut String) {
        match event {
            GenerationEvent::Replayed(delta) => self.text.push_str(&delta.text),
            GenerationEvent::Delta(delta) => {
                *self.mark() = ReadMark::at(delta.position + delta.token_ids.len() as u32);
                if !delta.text.is_empty() {
                    self.text.push_str(&delta.text);
                    let mut data = self.of_text("output_text.delta", "delta", delta.text.into());
                    data["logprobs"] = json!([]);
                    self.say_with_position(out, data);
                }
            }
            GenerationEvent::Finished(finished) => self.end(&finished, out),
            GenerationEvent::Prompt(_) | GenerationEvent::Pooled(_) => {}
        }
    }

    fn ending(&mut self, _: &mut String) {}

    fn fail(&mut self, refusal: Refusal, out: &mut String) {
        tracing::debug!(id = self.reply.id, %refusal, "a response failed while it was told");
        let response = self.reply.failed(&said(refusal));
        self.say(out, json!({ "type": "response.failed", "response": response }));
    }
}
