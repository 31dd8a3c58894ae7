//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, for text.

use crate::faces::http::certificate;
use crate::faces::http::error::{HttpError, reworded};
use crate::faces::http::fields::Fields;
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, counted, read};
use crate::faces::http::single::{self, invalid, objects, text_of, whole};
use crate::faces::http::sse::{self, Position, Voice};
use crate::front::ask::Ask;
use crate::front::frontend::{Frontend, unix_seconds};
use crate::front::generation::{Generation, GenerationEvent};
use crate::front::recorder::{Caller, Face, Recorder};
use crate::front::resume::ReadMark;
use crate::refusal::Refusal;
use axum::Json;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn messages(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let read = read(&front, request).await;
    let page = counted(&mut recorder, read)?;
    let (ask, is_stream) = counted(&mut recorder, ask(&front, page).map_err(said))?;
    let mut generation = front.generate(ask, recorder).await.map_err(said)?;
    if is_stream {
        let voice = MessageVoice { message: Message::of(&generation), position: Position::of(&generation) };
        return Ok(sse::stream(voice, generation, &front));
    }
    let (text, finished) = whole(&mut generation).await.map_err(said)?;
    let mut message = Message::of(&generation).value(Some((&text, &finished)));
    certificate::add(&mut message, &finished);
    Ok(certificate::with_headers(Json(message).into_response(), &generation.started))
}

pub async fn count_tokens(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let page = read(&front, request).await?;
    let _visit = front.visit(page.tenant).map_err(said)?;
    let mut fields = page.fields;
    let checked = fields.check(Endpoint::CountTokens);
    let read = checked
        .and_then(|()| conversation(&mut fields))
        .and_then(|messages| Ok((front.text(&fields.string("model")?.unwrap_or_default())?, messages)));
    let (text, messages) = read.map_err(said)?;
    let chat = v1::Chat { messages, ..v1::Chat::default() };
    let tokens = front.tokens(&text, Input::Chat(chat), false, unix_seconds()).await.map_err(said)?;
    Ok(Json(json!({ "input_tokens": tokens.len() })))
}

/// Writes a refusal of any inner layer in Anthropic's form.
pub async fn in_its_words(request: Request, next: Next) -> Response {
    reworded(next.run(request).await, error_value)
}

fn error_value(error: &HttpError) -> Value {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    json!({ "type": "error", "error": { "type": kind, "message": error.message() } })
}

/// Names the refused field as this page does.
fn said(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[("chat", "messages"), ("stop", "stop_sequences")]))
}

fn ask(front: &Frontend, mut page: Page) -> Result<(Ask, bool), Refusal> {
    let fields = &mut page.fields;
    fields.check(Endpoint::Messages)?;
    let messages = conversation(fields)?;
    let mut sampling = fields.sampling()?;
    sampling.stop.extend(fields.strings("stop_sequences")?);
    if sampling.max_tokens.is_none() {
        return Err(Refusal::invalid("max_tokens", "is missing"));
    }
    single::ask(front, page, messages, sampling)
}

fn conversation(fields: &mut Fields) -> Result<Vec<v1::ChatMessage>, Refusal> {
    let system = fields.take("system").map(|system| text_of("system", Some(system), &["text"])).transpose()?;
    let list = objects("messages", fields.take("messages"))?;
    let turns = list.into_iter().enumerate().map(|(i, turn)| message(i, turn)).collect::<Result<Vec<_>, _>>()?;
    if turns.last().is_some_and(|last| last.role == "assistant") {
        return Err(Refusal::invalid("messages", "the last is the assistant's, and going on with it is not supported"));
    }
    let system = system.map(|content| single::said("system", content));
    Ok(system.into_iter().chain(turns).collect())
}

fn message(i: usize, mut turn: Fields) -> Result<v1::ChatMessage, Refusal> {
    let role = match turn.take("role").as_ref().and_then(Value::as_str) {
        Some(role @ ("user" | "assistant")) => role.to_owned(),
        _ => return Err(invalid(format!("messages[{i}].role"), "must be user or assistant")),
    };
    let content = text_of(&format!("messages[{i}].content"), turn.take("content"), &["text"])?;
    Ok(single::said(&role, content))
}

/// The fields of an answer that are known when it begins.
struct Message {
    id: String,
    model: String,
    n_prompt: u32,
}

impl Message {
    fn of(generation: &Generation) -> Message {
        let v1::Started { id, model, prompt_tokens, .. } = &generation.started;
        Message { id: format!("msg_{id}"), model: model.clone(), n_prompt: *prompt_tokens }
    }

    /// The message, with its end if that has come.
    fn value(&self, end: Option<(&str, &v1::Finished)>) -> Value {
        let content = end.iter().map(|(text, _)| json!({ "type": "text", "text": text, "citations": null }));
        let usage = v1::Usage { prompt_tokens: self.n_prompt, ..v1::Usage::default() };
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content.collect::<Vec<_>>(),
            "stop_reason": end.map(|(_, finished)| stop_reason(finished)),
            "stop_sequence": end.and_then(|(_, finished)| stop_sequence(finished)),
            "usage": usage_value(&end.and_then(|(_, finished)| finished.usage).unwrap_or(usage)),
        })
    }
}

fn stop_reason(finished: &v1::Finished) -> &'static str {
    match finished.reason() {
        v1::finished::Reason::Length => "max_tokens",
        _ if !finished.stop.is_empty() => "stop_sequence",
        _ => "end_turn",
    }
}

fn stop_sequence(finished: &v1::Finished) -> Option<&str> {
    Some(finished.stop.as_str()).filter(|stop| !stop.is_empty())
}

/// Anthropic counts cached prompt tokens apart from the others.
fn usage_value(usage: &v1::Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    })
}

/// A streamed answer. Only events that advance the client carry a position.
struct MessageVoice {
    message: Message,
    position: Position,
}

impl MessageVoice {
    fn mark(&mut self) -> &mut ReadMark {
        &mut self.position.marks.choices[0]
    }

    fn say(&self, out: &mut String, data: &Value) {
        sse::write(out, data["type"].as_str(), data);
    }

    fn say_with_position(&self, out: &mut String, data: &Value) {
        self.position.write(out, data["type"].as_str(), data);
    }
}

impl Voice for MessageVoice {
    fn opening(&mut self, _: &Generation, out: &mut String) {
        if *self.mark() != ReadMark::Nothing {
            return;
        }
        *self.mark() = ReadMark::at(0);
        self.say(out, &json!({ "type": "message_start", "message": self.message.value(None) }));
        let block = json!({ "type": "text", "text": "" });
        self.say_with_position(out, &json!({ "type": "content_block_start", "index": 0, "content_block": block }));
        out.push_str(self.still_here());
    }

    fn event(&mut self, _: u32, event: GenerationEvent, _: &Generation, out: &mut String) {
        match event {
            GenerationEvent::Delta(delta) => {
                *self.mark() = ReadMark::at(delta.position + delta.token_ids.len() as u32);
                if !delta.text.is_empty() {
                    let delta = json!({ "type": "text_delta", "text": delta.text });
                    let data = json!({ "type": "content_block_delta", "index": 0, "delta": delta });
                    self.say_with_position(out, &data);
                }
            }
            GenerationEvent::Finished(finished) => {
                *self.mark() = ReadMark::Tokens { n: self.mark().n_tokens(), ended: true };
                self.say(out, &json!({ "type": "content_block_stop", "index": 0 }));
                let delta = json!({ "stop_reason": stop_reason(&finished), "stop_sequence": stop_sequence(&finished) });
                let usage = usage_value(&finished.usage.unwrap_or_default());
                let mut data = json!({ "type": "message_delta", "delta": delta, "usage": usage });
                certificate::add(&mut data, &finished);
                self.say(out, &data);
                self.say_with_position(out, &json!({ "type": "message_stop" }));
            }
            GenerationEvent::Prompt(_) | GenerationEvent::Replayed(_) | GenerationEvent::Pooled(_) => {}
        }
    }

    fn ending(&mut self, _: &mut String) {}

    fn fail(&mut self, refusal: Refusal, out: &mut String) {
        self.say(out, &error_value(&said(refusal)));
    }

    fn still_here(&self) -> &'static str {
        "event: ping\ndata: {\"type\":\"ping\"}\n\n"
    }
}
