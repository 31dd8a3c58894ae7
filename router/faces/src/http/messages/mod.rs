//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.
//!
//! Has no knowledge of replicas. Read `request` (the client's request; `turns`, `tools` and `thinking` read parts of
//! it), then `blocks` (the parts of an answer) and `reply`, which sends it whole or in events.

mod blocks;
pub mod models;
mod partial;
mod reply;
mod request;
mod thinking;
mod tools;
mod turns;

use crate::http::certificate;
use crate::http::door::RequestIdHeader;
use crate::http::error::{HttpError, with_error_body};
use crate::http::known::Endpoint;
use crate::http::messages::reply::{MessageWriter, collect_message};
use crate::http::messages::request::{MessageOptions, MessagesRequest};
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::sse;
use axum::Json;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::HeaderName;
use proto::v1::generate_request::Input;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::ParsedRequest;
use router::front::structure::FIELD;
use router::refusal::Refusal;
use router::replicas::models::talk::PARAMETERS;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn messages(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let messages_request = record_refusal(&mut recorder, request::parse_request(&front, page).map_err(to_http_error))?;
    let MessagesRequest { parsed, options } = messages_request;
    let MessageOptions { is_stream, shows_thoughts, structure_field } = options;
    let generation = front.generate(parsed, recorder).await;
    let mut generation =
        generation.map_err(|refusal| to_http_error(refusal.renamed(&[(FIELD, structure_field), SWITCHED])))?;
    if is_stream {
        return Ok(sse::stream(MessageWriter::new(&generation, shows_thoughts), generation, &front));
    }
    let message = collect_message(&mut generation, shows_thoughts).await.map_err(to_http_error)?;
    Ok(certificate::with_headers(Json(message).into_response(), &generation.started))
}

/// Returns the request to a replica, for callers that do not send it.
pub fn to_parsed_request(front: &Frontend, page: ApiRequest) -> Result<ParsedRequest, HttpError> {
    Ok(request::parse_request(front, page).map_err(to_http_error)?.parsed)
}

pub async fn count_tokens(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let _visit = front.visit(page.tenant).map_err(to_http_error)?;
    let mut fields = page.fields;
    let checked = fields.check(Endpoint::CountTokens);
    let read =
        checked.and_then(|()| Ok((fields.string("model")?.unwrap_or_default(), request::read_chat(&mut fields)?)));
    let (model, chat_input) = read.map_err(to_http_error)?;
    let text = front.text(&model).map_err(to_http_error)?;
    let tokens = front.texts.tokens(&text, Input::Chat(chat_input.chat), false, unix_seconds()).await;
    let tokens = tokens.map_err(|refusal| to_http_error(refusal.renamed(&[SWITCHED])))?;
    Ok(Json(json!({ "input_tokens": tokens.len() })))
}

/// A chat's field for thinking, and its name on this page.
const SWITCHED: (&str, &str) = ("reasoning_effort", "thinking");
/// The header in which Anthropic's clients expect a request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Rewrites a refusal of any inner layer into Anthropic's format, and copies the request id into the header that its
/// clients read.
pub async fn rewrite_errors(request: Request, next: Next) -> Response {
    let name = request.extensions().get::<RequestIdHeader>().cloned();
    let id = name.as_ref().and_then(|name| name.0.to_str().ok());
    let named = |error: &HttpError| {
        let mut value = error_value(error);
        value["request_id"] = id.into();
        value
    };
    let mut response = with_error_body(next.run(request).await, named);
    if let Some(RequestIdHeader(id)) = name {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// The same on pages that clients of other APIs also use.
pub async fn rewrite_errors_for_anthropic(request: Request, next: Next) -> Response {
    match models::is_anthropic(request.headers()) {
        true => rewrite_errors(request, next).await,
        false => next.run(request).await,
    }
}

/// Rewrites the error for an unknown page into Anthropic's format.
pub fn with_anthropic_error(response: Response) -> Response {
    with_error_body(response, error_value)
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
    let mut value = json!({ "type": "error", "error": { "type": kind, "message": error.message() } });
    // This makes clients send the whole conversation.
    if error.body()["error"]["param"] == THREAD {
        value["error"]["details"] = json!({ "error_code": "thread_unsupported_request", "unsupported": [THREAD] });
    }
    value
}

/// The field for a conversation that the server stores.
const THREAD: &str = "thread";

/// Renames refused fields to the names of this page.
fn to_http_error(refusal: Refusal) -> HttpError {
    let refusal = refusal.renamed_end(PARAMETERS, "input_schema");
    HttpError::of(refusal.renamed(&[("chat", "messages"), ("stop", "stop_sequences")]))
}
