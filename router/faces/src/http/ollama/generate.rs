//! `/api/generate`: a prompt that is rendered by the model's template, or used unchanged (`raw`).

use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::infill::{self, Infill};
use crate::http::known::Endpoint;
use crate::http::ollama::reply::{self, ReplyOptions, ReplyShape, answer, report_loaded};
use crate::http::ollama::words::{served_name, to_http_error};
use crate::http::ollama::{options, shape};
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::single;
use axum::extract::State;
use axum::response::Response;
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::{Map, Value};
use std::sync::Arc;
use types::{Token, Tokens};

pub async fn generate(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { mut page, mut recorder, watch } = request;
    let read = parse_fields(&mut page.fields).map_err(to_http_error);
    let prompt_fields = record_refusal(&mut recorder, read)?;
    let model = served_name(&front, prompt_fields.model.clone());
    if prompt_fields.prompt.is_empty() && prompt_fields.suffix.is_empty() {
        return report_loaded(&front, page.tenant, ReplyShape::Generate, &model, recorder);
    }
    let is_raw = prompt_fields.is_raw;
    let prompt = prompt(&front, &model, prompt_fields).await.map_err(to_http_error);
    let prompt = record_refusal(&mut recorder, prompt)?;
    let read = parse_request(page, model, prompt, is_raw, &front).map_err(to_http_error);
    let (parsed, reply_options) = record_refusal(&mut recorder, read)?;
    answer(&front, parsed, reply_options, recorder, watch).await
}

/// The fields that make the prompt.
struct PromptFields {
    model: Option<String>,
    prompt: String,
    suffix: String,
    system: Option<String>,
    is_raw: bool,
    /// The token ids of the conversation so far.
    context: Tokens,
    /// Whether the model thinks, or how much, in the fields of OpenAI's page.
    thinking: Map<String, Value>,
}

fn parse_fields(fields: &mut Fields) -> Result<PromptFields, Refusal> {
    let prompt_fields = PromptFields {
        model: fields.string("model")?,
        prompt: fields.string("prompt")?.unwrap_or_default(),
        suffix: fields.string("suffix")?.unwrap_or_default(),
        system: fields.string("system")?.filter(|system| !system.is_empty()),
        is_raw: fields.boolean("raw")?.unwrap_or(false),
        context: fields.token_ids("context")?.unwrap_or_default(),
        thinking: shape::think(fields)?,
    };
    let is_bare = prompt_fields.is_raw || !prompt_fields.suffix.is_empty();
    let needs_template = || Refusal::invalid("system", "cannot be combined with `raw` or `suffix`");
    match (&prompt_fields.system, prompt_fields.context.is_empty()) {
        (Some(_), _) if is_bare => Err(needs_template()),
        (_, false) if is_bare => Err(Refusal::invalid("context", "cannot be combined with `raw` or `suffix`")),
        _ if is_bare && !prompt_fields.thinking.is_empty() => {
            Err(Refusal::invalid("think", "cannot be combined with `raw` or `suffix`"))
        }
        _ => Ok(prompt_fields),
    }
}

async fn prompt(front: &Frontend, model: &str, prompt_fields: PromptFields) -> Result<Input, Refusal> {
    let PromptFields { prompt, suffix, system, is_raw, mut context, thinking, .. } = prompt_fields;
    let text = front.text(model)?;
    if !suffix.is_empty() {
        return infill::prompt(front, &text, Infill { before: prompt, after: suffix, ..Infill::default() }, "suffix")
            .await;
    }
    let input = if is_raw { Input::Text(prompt) } else { render_turn(&text, prompt, system, &thinking)? };
    if context.is_empty() {
        return Ok(input);
    }
    text.check_ids("context", &context)?;
    let tokens = front.texts.tokens(&text, input, false, unix_seconds()).await?;
    context.extend_from_slice(without_bos(&text, &tokens));
    Ok(Input::TokenIds(v1::TokenIds { ids: context }))
}

/// Removes the leading BOS token, which the context already has. If the tokens contain it again it opens turns, as in
/// ChatML, and stays.
fn without_bos<'a>(text: &ModelText, tokens: &'a [Token]) -> &'a [Token] {
    match (tokens, text.spec.bos) {
        ([first, rest @ ..], Some(bos)) if *first == bos && !rest.contains(&bos) => rest,
        _ => tokens,
    }
}

/// Renders the prompt as a user's turn. A model without a template gets the prompt alone.
fn render_turn(
    text: &ModelText,
    prompt: String,
    system: Option<String>,
    thinking: &Map<String, Value>,
) -> Result<Input, Refusal> {
    match (&text.template, &system) {
        (None, None) => return Ok(Input::Text(prompt)),
        (None, Some(_)) => return Err(Refusal::invalid("system", "the model has no chat template for it")),
        (Some(_), _) => {}
    }
    let system = system.map(|system| single::text_message("system", system));
    let messages = system.into_iter().chain([single::text_message("user", prompt)]).collect();
    Ok(Input::Chat(v1::Chat {
        messages,
        template_variables: thinking.get("chat_template_kwargs").map(Value::to_string).unwrap_or_default(),
        reasoning_effort: thinking.get("reasoning_effort").and_then(Value::as_str).unwrap_or_default().to_owned(),
        ..v1::Chat::default()
    }))
}

fn parse_request(
    mut page: ApiRequest,
    model: String,
    prompt: Input,
    is_raw: bool,
    front: &Frontend,
) -> Result<(ParsedRequest, ReplyOptions), Refusal> {
    let (fields, limits) = (&mut page.fields, &front.config.limits);
    let mut sampling = options::sampling(fields)?;
    sampling.structure = shape::structure(fields)?;
    sampling.logprobs = reply::logprobs(fields, limits.logprobs_max)?;
    let (is_stream, logprobs) = (reply::is_stream(fields)?, sampling.logprobs.is_some());
    let reply_options = ReplyOptions { shape: ReplyShape::Generate, is_stream, logprobs, context: !is_raw };
    let parsed = single::prompt_request(fields, model, prompt, sampling)?;
    // The remaining fields are checked like those of OpenAI's page.
    fields.check(Endpoint::Completions)?;
    fields.refuse(&["truncate_prompt_tokens"])?;
    Ok((page.complete_unresumable_request(parsed, limits)?, reply_options))
}
