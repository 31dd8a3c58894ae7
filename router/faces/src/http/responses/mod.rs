//! `/v1/responses`: OpenAI's newer API, for text, and for calls of functions and custom tools.
//!
//! Read `input` (items to a chat), `tools` and `settings` (the rest of a request), then `output` (a chat's deltas to
//! items and events), `reply` (the object, to which `raw` adds tokens) and `writer` (the stream). `background` runs a
//! response without its client, and `follow` streams its events. `finalizer` stores a response that has ended, and
//! `stored` has the pages for stored responses. `conversations` has those that clients store themselves, made of
//! `items`, and `lists` shows both. `references` finds single stored items of either.

mod background;
pub mod conversations;
mod finalizer;
mod follow;
mod input;
mod items;
mod lists;
mod output;
mod raw;
mod references;
mod reply;
mod settings;
pub mod stored;
mod tools;
mod writer;

use crate::http::certificate;
use crate::http::conversation::template_variables;
use crate::http::door::KeyRevoked;
use crate::http::error::HttpError;
use crate::http::fields::{Fields, StreamOptions};
use crate::http::known::Endpoint;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::responses::background::BackgroundResponse;
use crate::http::responses::finalizer::{ContinuedConversation, PendingStorage, ResponseFinalizer};
use crate::http::responses::output::{ItemEvents, OutputItems};
use crate::http::responses::raw::RawMessages;
use crate::http::responses::reply::ResponseReply;
use crate::http::responses::stored::items_before;
use crate::http::responses::writer::ResponseWriter;
use crate::http::{single, sse, thinking, tokens};
use axum::Json;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent};
use router::front::parsed_request::ParsedRequest;
use router::front::stored::ConversationTurn;
use router::front::structure::FIELD;
use router::refusal::Refusal;
use router::replicas::models::talk::PARAMETERS;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Arc;
use tokio_stream::StreamExt;
use types::{TenantId, Tokens};

pub async fn responses(
    State(front): State<Arc<Frontend>>,
    revoked: Option<Extension<KeyRevoked>>,
    request: AnswerRequest,
) -> Result<Response, HttpError> {
    let AnswerRequest { mut page, mut recorder, watch } = request;
    let revoked = revoked.map(|Extension(revoked)| revoked).unwrap_or_default();
    let tenant = page.tenant;
    let mut before = record_refusal(&mut recorder, PriorContext::read(&front, &mut page).await)?;
    record_refusal(&mut recorder, before.take_turn(&front, tenant))?;
    let response_request =
        record_refusal(&mut recorder, ResponseRequest::read(&front, page, before).map_err(to_http_error))?;
    let ResponseRequest { parsed, is_stream, is_background, options, settings, finalizer, to_error } = response_request;
    let mut generation = match is_background {
        true => front.begin(parsed, recorder).await.map_err(to_error)?,
        false => front.generate(parsed, recorder).await.map_err(to_error)?,
    };
    let timings_in_each = options.timings_in_each;
    let reply = ResponseReply::of(&generation, settings);
    let (id, text) = (generation.started.id.clone(), generation.text.clone());
    let prompt = generation.prompts.first().filter(|_| options.has_raw).map(|prompt| prompt.ids.clone());
    let mut output = options.output(&front, id, text, prompt).await.map_err(to_error)?;
    if is_background {
        let response = BackgroundResponse { reply, output, finalizer, is_stream, to_error };
        return response.start(&front, generation, revoked);
    }
    if is_stream {
        let writer =
            ResponseWriter::new(reply, output, finalizer, &generation, to_error).with_timings(watch, timings_in_each);
        return Ok(sse::stream(writer, generation, &front));
    }
    let finished = collect_answer(&mut generation, &mut output).await.map_err(to_error)?;
    let mut whole = reply.ended_reply(&output, &finished);
    finalizer.finish(&mut whole);
    Ok(certificate::with_headers(Json(whole).into_response(), &generation.started))
}

/// Returns the request to a replica, for callers that do not send it.
pub fn to_parsed_request(front: &Arc<Frontend>, page: ApiRequest) -> Result<ParsedRequest, HttpError> {
    let before = PriorContext::default();
    Ok(ResponseRequest::read(front, page, before).map_err(to_http_error)?.parsed)
}

/// Counts the tokens of a response's prompt.
pub async fn input_tokens(State(front): State<Arc<Frontend>>, mut page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let before = PriorContext::read(&front, &mut page).await?;
    let ResponseRequest { parsed, to_error, .. } =
        ResponseRequest::read(&front, page, before).map_err(to_http_error)?;
    tokens::count_prompt_tokens(&front, parsed).await.map_err(to_error)
}

/// The response or the conversation that this one continues.
#[derive(Default)]
struct PriorContext {
    response: Option<String>,
    conversation: Option<String>,
    turn: Option<ConversationTurn>,
    /// All items before this request.
    items: Vec<Value>,
}

impl PriorContext {
    /// Reads what comes before the request, and the stored items in its input.
    async fn read(front: &Frontend, page: &mut ApiRequest) -> Result<PriorContext, HttpError> {
        let id = page.fields.string("previous_response_id").map_err(to_http_error)?.filter(|id| !id.is_empty());
        let conversation = conversations::take_conversation_id(&mut page.fields).map_err(to_http_error)?;
        let items = match (&id, &conversation) {
            (Some(_), Some(_)) => {
                return Err(HttpError::mutually_exclusive("previous_response_id", "conversation"));
            }
            (_, Some(of)) => conversations::items_of(front, page, of).await?,
            (of, None) => items_before(front, page, of.as_deref()).await?,
        };
        references::resolve(front, page).await?;
        Ok(PriorContext { response: id, conversation, turn: None, items })
    }

    /// Until this response has ended, no other one can continue the conversation.
    fn take_turn(&mut self, front: &Frontend, tenant: TenantId) -> Result<(), HttpError> {
        let turn = self.conversation.as_deref().map(|id| conversations::take_turn(front, tenant, id));
        self.turn = turn.transpose()?;
        Ok(())
    }

    /// Returns both as the reply repeats them.
    fn reply_ids(&self) -> (Option<String>, Option<Value>) {
        (self.response.clone(), self.conversation.as_ref().map(|id| json!({ "id": id })))
    }

    /// The field of the request that names it.
    fn field(&self) -> &'static str {
        if self.conversation.is_some() { "conversation" } else { "previous_response_id" }
    }
}

/// Reads an answer to its end.
async fn collect_answer(generation: &mut Generation, output: &mut OutputItems) -> Result<v1::Finished, Refusal> {
    let (mut events, mut last) = (ItemEvents::disabled(), v1::Finished::default());
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
fn to_http_error(refusal: Refusal) -> HttpError {
    let refusal = refusal.renamed_end(PARAMETERS, "parameters");
    HttpError::of(refusal.renamed(&[("chat", "input"), ("max_tokens", "max_output_tokens")]))
}

/// The same for a refusal after the request was read. If the request constrains no text, the constraint comes from the
/// tools.
fn to_tools_http_error(refusal: Refusal) -> HttpError {
    to_http_error(refusal.renamed(&[
        (FIELD, "tools"),
        ("reasoning_effort", "reasoning.effort"),
        ("logprobs", "top_logprobs"),
    ]))
}

fn to_text_http_error(refusal: Refusal) -> HttpError {
    let names = [(FIELD, "text.format"), ("reasoning_effort", "reasoning.effort"), ("logprobs", "top_logprobs")];
    to_http_error(refusal.renamed(&names))
}

/// A request after this page has read it.
struct ResponseRequest {
    parsed: ParsedRequest,
    is_stream: bool,
    is_background: bool,
    options: OutputOptions,
    /// The parts of the request that the reply repeats.
    settings: Value,
    finalizer: ResponseFinalizer,
    /// Renames a refused field of the request.
    to_error: fn(Refusal) -> HttpError,
}

impl ResponseRequest {
    fn read(front: &Arc<Frontend>, mut page: ApiRequest, mut before: PriorContext) -> Result<ResponseRequest, Refusal> {
        let fields = &mut page.fields;
        fields.check(Endpoint::Responses)?;
        let model = fields.string("model")?.unwrap_or_default();
        let logprobs = settings::include(fields)?;
        let mut settings = settings::repeated_settings(fields);
        let instructions = fields.string("instructions")?;
        let own = input::items(fields)?;
        let (n_before, n_own, field) = (before.items.len(), own.len(), before.field());
        let mut items = std::mem::take(&mut before.items);
        items.extend(own);
        let mut messages = input::messages(&items, n_before, (field, "input"))?;
        messages.splice(..0, instructions.clone().map(|content| single::text_message("system", content)));
        let tools = tools::read(fields)?;
        let (text, reasoning) = (settings::text(fields)?, settings::reasoning(fields)?);
        let mut sampling = fields.sampling()?;
        sampling.logprobs = logprobs;
        sampling.max_tokens = fields.unsigned("max_output_tokens")?.or(sampling.max_tokens);
        let is_stream = fields.boolean("stream")?.unwrap_or(false);
        // These options only pad a stream against observers that count bytes on the network. No answer depends on them.
        fields.object("stream_options")?;
        let has_raw = fields.boolean("enable_response_messages")?.unwrap_or(false);
        let (previous, conversation) = before.reply_ids();
        let StorageOptions { finalizer, is_background } = StorageOptions::read(front, &mut page, before, items, n_own)?;
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
            "store": finalizer.to_store.is_some(),
            "previous_response_id": previous,
            "conversation": conversation,
        });
        if let (Value::Object(settings), Value::Object(more)) = (&mut settings, of_request) {
            settings.extend(more);
        }
        let to_error = if text.form.is_some() { to_text_http_error } else { to_tools_http_error };
        sampling.structure = text.form.map(|form| v1::Structure { form: Some(form) });
        let chat = v1::Chat {
            messages,
            tools: tools.chat_tools,
            tool_choice: tools.choice,
            parallel_tool_calls: Some(tools.is_parallel),
            reasoning_effort: reasoning.effort,
            template_variables: template_variables(fields)?,
            thinking_token_budget: thinking::budget(fields)?,
            ..v1::Chat::default()
        };
        let (needs_progress, timings_in_each) = read_timing_options(fields, is_stream, is_background)?;
        let parsed =
            ParsedRequest { needs_progress, ..single::prompt_request(fields, model, Input::Chat(chat), sampling)? };
        // The stream of a background response is resumed by its number of events.
        let parsed = match is_background {
            true => page.complete_unresumable_request(parsed, &front.config.limits)?,
            false => page.complete_request(parsed, is_stream.then(StreamOptions::default), &front.config.limits)?,
        };
        let (thoughts_in_summary, has_logprobs) = (reasoning.in_summary, logprobs.is_some());
        let custom = tools.custom;
        let options = OutputOptions { thoughts_in_summary, has_logprobs, has_raw, timings_in_each, custom };
        Ok(ResponseRequest { parsed, is_stream, is_background, options, settings, finalizer, to_error })
    }
}

/// Returns whether the answer includes the progress of its prompt, and its times. Refuses both for a background
/// response.
fn read_timing_options(fields: &mut Fields, is_stream: bool, is_background: bool) -> Result<(bool, bool), Refusal> {
    let needs_progress = fields.needs_progress(is_stream)?;
    let timings_in_each = fields.boolean("timings_per_token")?.unwrap_or(false);
    for (name, is_set) in [("return_progress", needs_progress), ("timings_per_token", timings_in_each)] {
        if is_set && is_background {
            return Err(Refusal::invalid(name, "is not supported for a background response"));
        }
    }
    Ok((needs_progress, timings_in_each))
}

/// The options for storage of a response.
struct StorageOptions {
    finalizer: ResponseFinalizer,
    /// It runs without its client.
    is_background: bool,
}

impl StorageOptions {
    /// `items` are all items of the prompt; the last `n_own` are the request's own.
    fn read(
        front: &Arc<Frontend>,
        page: &mut ApiRequest,
        before: PriorContext,
        mut items: Vec<Value>,
        n_own: usize,
    ) -> Result<StorageOptions, Refusal> {
        let is_stored = page.fields.boolean("store")?.unwrap_or(true);
        let is_background = page.fields.boolean("background")?.unwrap_or(false);
        if is_background && !is_stored {
            return Err(Refusal::invalid("background", "background can only be used when `store` is true"));
        }
        let to_store = is_stored.then(|| PendingStorage::of(front, page.tenant, &items, n_own)).flatten();
        if is_background && to_store.is_none() {
            return Err(storage_refusal(front, &items));
        }
        let own = items.split_off(items.len() - n_own);
        let to_conversation = before.conversation.map(|id| ContinuedConversation {
            front: front.clone(),
            tenant: page.tenant,
            id,
            own,
            turn: before.turn,
        });
        Ok(StorageOptions { finalizer: ResponseFinalizer { to_store, to_conversation }, is_background })
    }
}

/// Returns why a response that must be stored is not. If there is no room, the client may retry.
fn storage_refusal(front: &Frontend, items: &[Value]) -> Refusal {
    let limits = &front.config.limits;
    let n_bytes = serde_json::to_string(items).map_or(usize::MAX, |text| text.len());
    match limits.stored.responses_max {
        0 => Refusal::invalid("background", "this server stores no responses (`--stored-responses 0`)"),
        _ if n_bytes > limits.body_bytes_max => {
            Refusal::invalid("background", "the conversation is too large to be stored: send it without `background`")
        }
        _ => Refusal::Full { retry_after: front.config.timeouts.retry_after },
    }
}

/// The client's options for the answer.
struct OutputOptions {
    thoughts_in_summary: bool,
    has_logprobs: bool,
    has_raw: bool,
    /// Each event of text includes the times so far.
    timings_in_each: bool,
    /// The names of tools whose calls have a text instead of arguments.
    custom: HashSet<String>,
}

impl OutputOptions {
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
        let output = OutputItems::new(id, self.thoughts_in_summary).with_logprobs(names).with_raw(raw);
        Ok(output.with_custom_tools(self.custom))
    }
}
