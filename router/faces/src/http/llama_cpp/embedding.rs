//! `/embedding`, and `/embeddings`, which also serves requests in the format of OpenAI's page of that name.

use crate::http::completions::inputs;
use crate::http::embeddings;
use crate::http::error::HttpError;
use crate::http::known::Endpoint;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use router::front::frontend::Frontend;
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn embedding(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let named = |refusal: Refusal| HttpError::of(refusal.renamed(&NAMES));
    let parsed = record_refusal(&mut recorder, parse_request(page).map_err(named))?;
    let reply = front.embed(parsed, &mut recorder).await.map_err(named)?;
    let one = |(i, values): (usize, &[f32])| json!({ "index": i, "embedding": [values] });
    let values = reply.embeddings.iter().map(|embedding| embedding.values.as_slice());
    Ok(Json(values.enumerate().map(one).collect()))
}

pub async fn either(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    match request.page.fields.has("content") {
        true => embedding(State(front), request).await.map(IntoResponse::into_response),
        false => embeddings::embeddings(State(front), request).await,
    }
}

const NAMES: [(&str, &str); 3] = [("text", "content"), ("token_ids", "content"), ("input", "content")];

fn parse_request(page: ApiRequest) -> Result<ParsedRequest, Refusal> {
    let ApiRequest { mut fields, tenant, .. } = page;
    let content = fields.take("content").ok_or_else(|| Refusal::invalid("content", "is missing"))?;
    let model = fields.string("model")?.unwrap_or_default();
    fields.check(Endpoint::Embeddings)?;
    Ok(ParsedRequest { model, prompts: inputs("content", content)?, tenant, ..ParsedRequest::default() })
}
