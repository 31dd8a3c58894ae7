//! `/v1/responses`: OpenAI's newer API, for text and function calls.
//!
//! Read `input` (items to a chat), `tools` and `settings` (the rest of a request), then `output` (a chat's deltas to
//! items and events), `reply` (the object, to which `raw` adds tokens) and `voice` (the stream). `background` runs a
//! response without its client, and `follow` streams its events. `afterwards` stores a response that has ended, and
//! `stored` has the pages for stored responses. `conversations` has those that clients store themselves, made of
//! `items`, and `lists` shows both.

mod afterwards;
mod background;
pub mod conversations;
mod follow;
mod input;
mod items;
mod lists;
mod output;
mod raw;
mod reply;
mod settings;
pub mod stored;
mod tools;
mod voice;

use crate::faces::http::certificate;
use crate::faces::http::conversation::template_variables;
use crate::faces::http::door::KeyRevoked;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::{Fields, Streaming};
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, counted, read};
use crate::faces::http::responses::afterwards::{Afterwards, ToConversation, ToStore};
use crate::faces::http::responses::output::{ItemEvents, OutputItems};
use crate::faces::http::responses::raw::RawMessages;
use crate::faces::http::responses::reply::ResponseReply;
use crate::faces::http::responses::stored::items_before;
use crate::faces::http::responses::voice::ResponseVoice;
use crate::faces::http::stopwatch::Stopwatch;
use crate::faces::http::{single, sse, thinking, tokens};
use crate::front::ask::Ask;
use crate::front::frontend::Frontend;
use crate::front::generation::{Generation, GenerationEvent};
use crate::front::recorder::{Caller, Face, Recorder};
use crate::front::stored::Turn;
use crate::front::structure::FIELD;
use crate::refusal::Refusal;
use crate::replicas::models::talk::PARAMETERS;
use crate::replicas::models::text::ModelText;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio_stream::StreamExt;
use types::{TenantId, Tokens};

pub async fn responses(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let watch = Stopwatch::start();
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let revoked = request.extensions().get::<KeyRevoked>().cloned().unwrap_or_default();
    let read = read(&front, request).await;
    let mut page = counted(&mut recorder, read)?;
    let tenant = page.tenant;
    let mut before = counted(&mut recorder, Before::read(&front, &mut page).await)?;
    counted(&mut recorder, before.take_turn(&front, tenant))?;
    let asked = counted(&mut recorder, Asked::read(&front, page, before).map_err(said))?;
    let Asked { ask, is_stream, is_background, wishes, settings, afterwards, said } = asked;
    let mut generation = match is_background {
        true => front.begin(ask, recorder).await.map_err(said)?,
        false => front.generate(ask, recorder).await.map_err(said)?,
    };
    let tells_times = wishes.tells_times;
    let reply = ResponseReply::of(&generation, settings);
    let (id, text) = (generation.started.id.clone(), generation.text.clone());
    let prompt = generation.prompts.first().filter(|_| wishes.has_raw).map(|prompt| prompt.ids.clone());
    let mut output = wishes.output(&front, id, text, prompt).await.map_err(said)?;
    if is_background {
        return background::start(&front, generation, (reply, output), afterwards, (is_stream, revoked), said);
    }
    if is_stream {
        let voice = ResponseVoice::new(reply, output, afterwards, &generation, said).timed(watch, tells_times);
        return Ok(sse::stream(voice, generation, &front));
    }
    let finished = whole(&mut generation, &mut output).await.map_err(said)?;
    let mut whole = reply.ended(&output, &finished);
    afterwards.keep(&mut whole);
    Ok(certificate::with_headers(Json(whole).into_response(), &generation.started))
}

/// Returns the request to a replica, for callers that do not send it.
pub fn rendered(front: &Arc<Frontend>, page: Page) -> Result<Ask, HttpError> {
    let before = Before::default();
    Ok(Asked::read(front, page, before).map_err(said)?.ask)
}

/// Counts the tokens of a response's prompt.
pub async fn input_tokens(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let mut page = read(&front, request).await?;
    let before = Before::read(&front, &mut page).await?;
    let Asked { ask, said, .. } = Asked::read(&front, page, before).map_err(said)?;
    tokens::counted(&front, ask).await.map_err(said)
}

/// The response or the conversation that this one continues.
#[derive(Default)]
struct Before {
    response: Option<String>,
    conversation: Option<String>,
    turn: Option<Turn>,
    /// All items before this request.
    items: Vec<Value>,
}

impl Before {
    async fn read(front: &Frontend, page: &mut Page) -> Result<Before, HttpError> {
        let id = page.fields.string("previous_response_id").map_err(said)?.filter(|id| !id.is_empty());
        let conversation = conversations::named(&mut page.fields).map_err(said)?;
        let items = match (&id, &conversation) {
            (Some(_), Some(_)) => {
                return Err(HttpError::mutually_exclusive("previous_response_id", "conversation"));
            }
            (_, Some(of)) => conversations::items_of(front, page, of).await?,
            (of, None) => items_before(front, page, of.as_deref()).await?,
        };
        Ok(Before { response: id, conversation, turn: None, items })
    }

    /// Until this response has ended, no other one can continue the conversation.
    fn take_turn(&mut self, front: &Frontend, tenant: TenantId) -> Result<(), HttpError> {
        let turn = self.conversation.as_deref().map(|id| conversations::turn(front, tenant, id));
        self.turn = turn.transpose()?;
        Ok(())
    }

    /// Returns both as the reply repeats them.
    fn told(&self) -> (Option<String>, Option<Value>) {
        (self.response.clone(), self.conversation.as_ref().map(|id| json!({ "id": id })))
    }

    /// The field of the request that names it.
    fn field(&self) -> &'static str {
        if self.conversation.is_some() { "conversation" } else { "previous_response_id" }
    }
}

/// Reads an answer to its end.
async fn whole(generation: &mut Generation, output: &mut OutputItems) -> Result<v1::Finished, Refusal> {
    let (mut events, mut last) = (ItemEvents::untold(), v1::Finished::default());
    while let Some(event) = generation.next().await {
        match event?.1 {
            GenerationEvent::Delta(delta) => output.add(&delta, &mut events),
            GenerationEvent::Finished(finished) => last = finished,
            GenerationEvent::Aside(_) => {}
        }
    }
    output.end(&last, &mut events);
    Ok(last)
}

/// Renames a refused field to its name on this page.
fn said(refusal: Refusal) -> HttpError {
    let refusal = refusal.renamed_end(PARAMETERS, "parameters");
    HttpError::of(refusal.renamed(&[("chat", "input"), ("max_tokens", "max_output_tokens")]))
}

/// The same for a refusal after the request was read. If the request constrains no text, the constraint comes from the
/// tools.
fn said_of_tools(refusal: Refusal) -> HttpError {
    said(refusal.renamed(&[(FIELD, "tools"), ("reasoning_effort", "reasoning.effort"), ("logprobs", "top_logprobs")]))
}

fn said_of_text(refusal: Refusal) -> HttpError {
    let names = [(FIELD, "text.format"), ("reasoning_effort", "reasoning.effort"), ("logprobs", "top_logprobs")];
    said(refusal.renamed(&names))
}

/// A request after this page has read it.
struct Asked {
    ask: Ask,
    is_stream: bool,
    is_background: bool,
    wishes: OutputWishes,
    /// The parts of the request that the reply repeats.
    settings: Value,
    afterwards: Afterwards,
    /// Renames a refused field of the request.
    said: fn(Refusal) -> HttpError,
}

impl Asked {
    fn read(front: &Arc<Frontend>, mut page: Page, mut before: Before) -> Result<Asked, Refusal> {
        let fields = &mut page.fields;
        fields.check(Endpoint::Responses)?;
        let model = fields.string("model")?.unwrap_or_default();
        let logprobs = settings::include(fields)?;
        let mut settings = settings::repeated(fields);
        let instructions = fields.string("instructions")?;
        let own = input::items(fields)?;
        let (n_before, n_own, field) = (before.items.len(), own.len(), before.field());
        let mut items = std::mem::take(&mut before.items);
        items.extend(own);
        let mut messages = input::messages(&items, n_before, (field, "input"))?;
        if let Some(content) = instructions.clone() {
            messages.insert(0, single::said("system", content));
        }
        let tools = tools::read(fields)?;
        let (text, reasoning) = (settings::text(fields)?, settings::reasoning(fields)?);
        let mut sampling = fields.sampling()?;
        sampling.logprobs = logprobs;
        sampling.max_tokens = fields.unsigned("max_output_tokens")?.or(sampling.max_tokens);
        let is_stream = fields.boolean("stream")?.unwrap_or(false);
        // These options only pad a stream against observers that count bytes on the network. No answer depends on them.
        fields.object("stream_options")?;
        let has_raw = fields.boolean("enable_response_messages")?.unwrap_or(false);
        let (previous, conversation) = before.told();
        let Kept { afterwards, is_background } = Kept::read(front, &mut page, before, items, n_own)?;
        let fields = &mut page.fields;
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
            "store": afterwards.to_store.is_some(),
            "previous_response_id": previous,
            "conversation": conversation,
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
        let (tells_progress, tells_times) = times(fields, is_stream, is_background)?;
        let ask = Ask { tells_progress, ..single::ask(fields, model, Input::Chat(chat), sampling)? };
        // The stream of a background response is resumed by its number of events.
        let ask = match is_background {
            true => page.finished_anew(ask, &front.config.limits)?,
            false => page.finished(ask, is_stream.then(Streaming::default), &front.config.limits)?,
        };
        let (thoughts_in_summary, has_logprobs) = (reasoning.in_summary, logprobs.is_some());
        let wishes = OutputWishes { thoughts_in_summary, has_logprobs, has_raw, tells_times };
        Ok(Asked { ask, is_stream, is_background, wishes, settings, afterwards, said })
    }
}

/// Returns whether the answer includes the progress of its prompt, and its times. Refuses both for a background
/// response.
fn times(fields: &mut Fields, is_stream: bool, is_background: bool) -> Result<(bool, bool), Refusal> {
    let tells_progress = fields.tells_progress(is_stream)?;
    let tells_times = fields.boolean("timings_per_token")?.unwrap_or(false);
    for (name, is_asked) in [("return_progress", tells_progress), ("timings_per_token", tells_times)] {
        if is_asked && is_background {
            return Err(Refusal::invalid(name, "an answer in the background tells neither progress nor times"));
        }
    }
    Ok((tells_progress, tells_times))
}

/// The options for storage of a response.
struct Kept {
    afterwards: Afterwards,
    /// It runs without its client.
    is_background: bool,
}

impl Kept {
    /// `items` are all items of the prompt; the last `n_own` are the request's own.
    fn read(
        front: &Arc<Frontend>,
        page: &mut Page,
        before: Before,
        mut items: Vec<Value>,
        n_own: usize,
    ) -> Result<Kept, Refusal> {
        let is_stored = page.fields.boolean("store")?.unwrap_or(true);
        let is_background = page.fields.boolean("background")?.unwrap_or(false);
        if is_background && !is_stored {
            return Err(Refusal::invalid("background", "background can only be used when `store` is true"));
        }
        let to_store = is_stored.then(|| ToStore::of(front, page.tenant, &items, n_own)).flatten();
        if is_background && to_store.is_none() {
            return Err(unstored(front, &items));
        }
        let own = items.split_off(items.len() - n_own);
        let to_conversation = before.conversation.map(|id| ToConversation {
            front: front.clone(),
            tenant: page.tenant,
            id,
            own,
            turn: before.turn,
        });
        Ok(Kept { afterwards: Afterwards { to_store, to_conversation }, is_background })
    }
}

/// Returns why a response that must be stored is not. If there is no room, the client may retry.
fn unstored(front: &Frontend, items: &[Value]) -> Refusal {
    let limits = &front.config.limits;
    let n_bytes = serde_json::to_string(items).map_or(usize::MAX, |text| text.len());
    match limits.stored.responses_max {
        0 => Refusal::invalid("background", "this server stores no responses (`--stored-responses 0`)"),
        _ if n_bytes > limits.body_bytes_max => {
            Refusal::invalid("background", "the conversation is too large to be stored, and can only be waited for")
        }
        _ => Refusal::Full { retry_after: front.config.timeouts.retry_after },
    }
}

/// The client's options for the answer.
struct OutputWishes {
    thoughts_in_summary: bool,
    has_logprobs: bool,
    has_raw: bool,
    /// Each event of text includes the times so far.
    tells_times: bool,
}

impl OutputWishes {
    /// Builds the output. `prompt` is present if the client requested it.
    async fn output(
        self,
        front: &Frontend,
        id: String,
        text: Arc<ModelText>,
        prompt: Option<Tokens>,
    ) -> Result<OutputItems, Refusal> {
        let raw = match prompt {
            Some(prompt) => Some(RawMessages::of(front, text.clone(), prompt).await?),
            None => None,
        };
        let names = self.has_logprobs.then_some(text);
        Ok(OutputItems::new(id, self.thoughts_in_summary).with_logprobs(names).with_raw(raw))
    }
}
