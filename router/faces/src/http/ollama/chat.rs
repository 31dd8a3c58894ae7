//! `/api/chat`. Has no knowledge of replicas.

use crate::http::conversation;
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::known::{Endpoint, NeutralValues};
use crate::http::ollama::reply::{self, ReplyOptions, ReplyShape, answer, report_loaded};
use crate::http::ollama::words::{served_name, to_http_error};
use crate::http::ollama::{options, shape};
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::single;
use axum::extract::State;
use axum::response::Response;
use proto::v1;
use proto::v1::generate_request::Input;
use router::config::RouterLimits;
use router::front::frontend::Frontend;
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use serde_json::{Map, Value};
use std::sync::Arc;

pub async fn chat(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { mut page, mut recorder, watch } = request;
    let requested_model = record_refusal(&mut recorder, page.fields.string("model").map_err(to_http_error))?;
    let model = served_name(&front, requested_model);
    let Some(messages) = page.fields.take("messages").filter(|messages| !NeutralValues::Empty.contain(messages)) else {
        return report_loaded(&front, page.tenant, ReplyShape::Chat, &model, recorder);
    };
    let result = parse_request(page, model, messages, &front.config.limits).map_err(to_http_error);
    let (parsed, reply_options) = record_refusal(&mut recorder, result)?;
    answer(&front, parsed, reply_options, recorder, watch).await
}

fn parse_request(
    mut page: ApiRequest,
    model: String,
    messages: Value,
    limits: &RouterLimits,
) -> Result<(ParsedRequest, ReplyOptions), Refusal> {
    let fields = &mut page.fields;
    let chat = conversation(fields, messages)?;
    let mut sampling = options::sampling(fields)?;
    sampling.structure = shape::structure(fields)?;
    sampling.logprobs = reply::logprobs(fields, limits.logprobs_max)?;
    let (is_stream, logprobs) = (reply::is_stream(fields)?, sampling.logprobs.is_some());
    let reply_options = ReplyOptions { shape: ReplyShape::Chat, is_stream, logprobs, context: false };
    let parsed = single::prompt_request(fields, model, Input::Chat(chat), sampling)?;
    // The remaining fields are checked like those of OpenAI's page.
    fields.check(Endpoint::Chat)?;
    fields.refuse(&["truncate_prompt_tokens"])?;
    Ok((page.complete_unresumable_request(parsed, limits)?, reply_options))
}

/// Reads messages, tools and `think` into the format of OpenAI's page.
fn conversation(fields: &mut Fields, mut messages: Value) -> Result<v1::Chat, Refusal> {
    for (i, message) in messages.as_array().into_iter().flatten().enumerate() {
        if message.get("images").is_some_and(|images| !NeutralValues::Empty.contain(images)) {
            return Err(Refusal::invalid(format!("messages[{i}].images"), "is not supported; only text is"));
        }
    }
    if let Some(messages) = messages.as_array_mut() {
        shape::convert_messages(messages);
    }
    let mut named = Map::from_iter([("messages".to_owned(), messages)]);
    if let Some(tools) = fields.take("tools") {
        named.insert("tools".to_owned(), tools);
    }
    named.extend(shape::think(fields)?);
    conversation::conversation(&mut Fields::of(named))
}
