//! `/v1/embeddings`. Has no knowledge of replicas.

use crate::http::error::HttpError;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::pooled::{is_raw, pooled_request, with_prompts};
use crate::http::ranking::{reply_id, usage};
use crate::http::vectors::VectorForm;
use axum::extract::State;
use axum::response::Response;
use proto::v1;
use router::front::embed::{Readout, ReadoutKind};
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn embeddings(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let (parsed, readout, form) = record_refusal(&mut recorder, parse_request(&front, page).map_err(HttpError::from))?;
    // This endpoint's name for prompts is `input`.
    let named = |refusal: Refusal| refusal.renamed(&[("text", "input"), ("token_ids", "input"), ("chat", "messages")]);
    let reply = front.pool(parsed, readout, &mut recorder).await.map_err(named)?;
    Ok(form.reply(head("embd", &reply), "embedding", "embedding", &reply))
}

/// Returns a list without its items.
pub fn head(kind: &str, reply: &v1::EmbedReply) -> Value {
    json!({
        "id": reply_id(kind),
        "object": "list",
        "created": unix_seconds(),
        "model": reply.model,
        "data": [],
        "usage": usage(reply.usage.unwrap_or_default().prompt_tokens),
    })
}

fn parse_request(front: &Frontend, page: ApiRequest) -> Result<(ParsedRequest, Readout, VectorForm), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    let (form, is_raw) = (VectorForm::parse(&mut fields)?, is_raw(&mut fields)?);
    let (dimensions, input_type) = (fields.unsigned("dimensions")?, fields.string("input_type")?);
    let mut parsed = ParsedRequest { tenant, body, ..pooled_request(&mut fields)? };
    if input_type.is_some() {
        let text = front.text(&parsed.model)?;
        with_prompts(&text, input_type.as_deref(), &mut parsed.prompts)?;
    }
    Ok((parsed, Readout { kind: ReadoutKind::Embedding, is_raw, dimensions }, form))
}
