//! `/v1/responses`: OpenAI's newer API, for text and the calls of functions.
//!
//! Read `input` (items to a chat), `tools` and `settings` (the rest of a request), then `output` (a chat's deltas to
//! items and events), `reply` (the object) and `voice` (the stream); `stored` is what happens to a response afterwards.

mod input;
mod output;
mod reply;
mod settings;
pub mod stored;
mod tools;
mod voice;

use crate::faces::http::certificate;
use crate::faces::http::conversation::template_variables;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::Streaming;
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, counted, read};
use crate::faces::http::responses::output::{ItemEvents, OutputItems};
use crate::faces::http::responses::reply::ResponseReply;
use crate::faces::http::responses::stored::{ToStore, items_before};
use crate::faces::http::responses::voice::ResponseVoice;
use crate::faces::http::{single, sse, thinking, tokens};
use crate::front::ask::Ask;
use crate::front::frontend::Frontend;
use crate::front::generation::{Generation, GenerationEvent};
use crate::front::recorder::{Caller, Face, Recorder};
use crate::front::structure::FIELD;
use crate::refusal::Refusal;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio_stream::StreamExt;

pub async fn responses(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let read = read(&front, request).await;
    let mut page = counted(&mut recorder, read)?;
    let before = counted(&mut recorder, Before::read(&front, &mut page).await)?;
    let asked = counted(&mut recorder, Asked::read(&front, page, before).map_err(said))?;
    let Asked { ask, is_stream, thoughts_in_summary, has_logprobs, settings, to_store, said } = asked;
    let mut generation = front.generate(ask, recorder).await.map_err(said)?;
    let reply = ResponseReply::of(&generation, settings);
    let names = has_logprobs.then(|| generation.text.clone());
    let mut output = OutputItems::new(generation.started.id.clone(), thoughts_in_summary).with_logprobs(names);
    if is_stream {
        let voice = ResponseVoice::new(reply, output, to_store, &generation, said);
        return Ok(sse::stream(voice, generation, &front));
    }
    let finished = whole(&mut generation, &mut output).await.map_err(said)?;
    let whole = reply.ended(&output, &finished);
    if let Some(to_store) = to_store {
        to_store.keep(&whole);
    }
    Ok(certificate::with_headers(Json(whole).into_response(), &generation.started))
}

/// What a request asks of a replica, for who does not ask one.
pub fn rendered(front: &Arc<Frontend>, page: Page) -> Result<Ask, HttpError> {
    let before = Before { id: None, items: Vec::new() };
    Ok(Asked::read(front, page, before).map_err(said)?.ask)
}

/// How many tokens the prompt of a response has.
pub async fn input_tokens(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let mut page = read(&front, request).await?;
    let before = Before::read(&front, &mut page).await?;
    let Asked { ask, said, .. } = Asked::read(&front, page, before).map_err(said)?;
    tokens::counted(&front, ask).await.map_err(said)
}

/// The response that this one goes on with.
struct Before {
    id: Option<String>,
    /// All that was said until then.
    items: Vec<Value>,
}

impl Before {
    async fn read(front: &Frontend, page: &mut Page) -> Result<Before, HttpError> {
        let id = page.fields.string("previous_response_id").map_err(said)?.filter(|id| !id.is_empty());
        let items = items_before(front, page, id.as_deref()).await?;
        Ok(Before { id, items })
    }
}

/// Hears an answer to its end.
async fn whole(generation: &mut Generation, output: &mut OutputItems) -> Result<v1::Finished, Refusal> {
    let (mut events, mut last) = (ItemEvents::untold(), v1::Finished::default());
    while let Some(event) = generation.next().await {
        match event?.1 {
            GenerationEvent::Delta(delta) => output.add(&delta, &mut events),
            GenerationEvent::Finished(finished) => last = finished,
            GenerationEvent::Prompt(_) | GenerationEvent::Replayed(_) | GenerationEvent::Pooled(_) => {}
        }
    }
    output.end(&last, &mut events);
    Ok(last)
}

/// Names a refused field as this page does.
fn said(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[("chat", "input"), ("max_tokens", "max_output_tokens")]))
}

/// The same for what is refused once the request was read. Where no text is asked for in a form, a form is that of the
/// tools.
fn said_of_tools(refusal: Refusal) -> HttpError {
    said(refusal.renamed(&[(FIELD, "tools"), ("reasoning_effort", "reasoning.effort"), ("logprobs", "top_logprobs")]))
}

fn said_of_text(refusal: Refusal) -> HttpError {
    let names = [(FIELD, "text.format"), ("reasoning_effort", "reasoning.effort"), ("logprobs", "top_logprobs")];
    said(refusal.renamed(&names))
}

/// A request as this page reads it.
struct Asked {
    ask: Ask,
    is_stream: bool,
    thoughts_in_summary: bool,
    has_logprobs: bool,
    /// What of it the reply repeats.
    settings: Value,
    /// None if it is not to be stored, or there is no room.
    to_store: Option<ToStore>,
    /// Names a refused field of it.
    said: fn(Refusal) -> HttpError,
}

impl Asked {
    fn read(front: &Arc<Frontend>, mut page: Page, before: Before) -> Result<Asked, Refusal> {
        let fields = &mut page.fields;
        fields.check(Endpoint::Responses)?;
        let model = fields.string("model")?.unwrap_or_default();
        let logprobs = settings::include(fields)?;
        let mut settings = settings::repeated(fields);
        let instructions = fields.string("instructions")?;
        let own = input::items(fields)?;
        let (n_before, n_own) = (before.items.len(), own.len());
        let mut items = before.items;
        items.extend(own);
        let mut messages = input::messages(&items, n_before)?;
        if let Some(content) = instructions.clone() {
            messages.insert(0, single::said("system", content));
        }
        let tools = tools::read(fields)?;
        let (text, reasoning) = (settings::text(fields)?, settings::reasoning(fields)?);
        let mut sampling = fields.sampling()?;
        sampling.logprobs = logprobs;
        sampling.max_tokens = fields.unsigned("max_output_tokens")?.or(sampling.max_tokens);
        let is_stream = fields.boolean("stream")?.unwrap_or(false);
        // These options only pad a stream against readers that count bytes on the way. No answer depends on them.
        fields.object("stream_options")?;
        let is_stored = fields.boolean("store")?.unwrap_or(true);
        let to_store = is_stored.then(|| ToStore::of(front, page.tenant, &items, n_own)).flatten();
        let of_request = json!({
            "instructions": instructions,
            "max_output_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": logprobs.unwrap_or(0),
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "tools": tools.shown,
            "tool_choice": tools.shown_choice,
            "parallel_tool_calls": tools.is_parallel,
            "text": text.shown,
            "reasoning": reasoning.shown,
            "store": to_store.is_some(),
            "previous_response_id": before.id,
        });
        if let (Value::Object(settings), Value::Object(more)) = (&mut settings, of_request) {
            settings.extend(more);
        }
        let said = if text.form.is_some() { said_of_text } else { said_of_tools };
        sampling.structure = text.form.map(|form| v1::Structure { form: Some(form) });
        let chat = v1::Chat {
            messages,
            tools: tools.told,
            tool_choice: tools.choice,
            parallel_tool_calls: Some(tools.is_parallel),
            reasoning_effort: reasoning.effort,
            template_variables: template_variables(fields)?,
            thinking_token_budget: thinking::budget(fields)?,
            ..v1::Chat::default()
        };
        let ask = single::ask(fields, model, Input::Chat(chat), sampling)?;
        let ask = page.finished(ask, is_stream.then(Streaming::default), &front.config.limits)?;
        let (thoughts_in_summary, has_logprobs) = (reasoning.in_summary, logprobs.is_some());
        Ok(Asked { ask, is_stream, thoughts_in_summary, has_logprobs, settings, to_store, said })
    }
}
