//! `/api/embed`, and `/api/embeddings`, its older form for one text.

use crate::http::error::HttpError;
use crate::http::fields::{Fields, wrong_type};
use crate::http::known::Endpoint;
use crate::http::ollama::options;
use crate::http::ollama::reply::nanos;
use crate::http::ollama::words::served_name;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use axum::Json;
use axum::extract::State;
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::embed::{Readout, ReadoutKind};
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::ParsedRequest;
use router::front::recorder::Recorder;
use router::refusal::Refusal;
use router::replicas::models::table::VersionSelector;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn embed(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, recorder, watch } = request;
    let reply = embed_field(&front, page, recorder, "input").await?;
    let embeddings: Vec<Value> = reply.embeddings.iter().map(|one| one.values.as_slice().into()).collect();
    Ok(Json(json!({
        "model": reply.model,
        "embeddings": embeddings,
        "total_duration": nanos(watch.times().total()),
        "load_duration": 0,
        "prompt_eval_count": reply.usage.unwrap_or_default().prompt_tokens,
    })))
}

pub async fn embeddings(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let reply = embed_field(&front, request.page, request.recorder, "prompt").await?;
    let values = reply.embeddings.first().map(|one| one.values.as_slice()).unwrap_or_default();
    Ok(Json(json!({ "embedding": values })))
}

/// Embeds the texts of a field.
async fn embed_field(
    front: &Arc<Frontend>,
    mut page: ApiRequest,
    mut recorder: Recorder,
    field: &'static str,
) -> Result<v1::EmbedReply, HttpError> {
    let named = |refusal: Refusal| HttpError::of(refusal.renamed(&[("text", field), ("token_ids", field)]));
    let embed_fields = record_refusal(&mut recorder, parse_fields(&mut page.fields, field).map_err(named))?;
    let model = served_name(front, embed_fields.model);
    let prompts = if embed_fields.is_cut {
        truncate_texts(front, &model, embed_fields.texts).await
    } else {
        Ok(to_text_inputs(embed_fields.texts))
    };
    let prompts = record_refusal(&mut recorder, prompts.map_err(named))?;
    let parsed = ParsedRequest { model, prompts, tenant: page.tenant, ..ParsedRequest::default() };
    let readout = Readout { dimensions: embed_fields.dimensions, ..Readout::of(ReadoutKind::Embedding) };
    front.pool(parsed, readout, &mut recorder).await.map_err(named)
}

struct EmbedFields {
    model: Option<String>,
    texts: Vec<String>,
    dimensions: Option<u32>,
    /// Whether texts that are too long are truncated, and not refused.
    is_cut: bool,
}

fn parse_fields(fields: &mut Fields, field: &'static str) -> Result<EmbedFields, Refusal> {
    // They are checked, although none of them changes an embedding.
    options::sampling(fields)?;
    let texts = match fields.take(field) {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(all)) if field == "input" => all.into_iter().map(text).collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong_type(field, "text", &other)),
        None => return Err(Refusal::invalid(field, "is missing")),
    };
    let is_cut = fields.boolean("truncate")?.unwrap_or(true);
    let (model, dimensions) = (fields.string("model")?, fields.unsigned("dimensions")?);
    fields.check(Endpoint::Embeddings)?;
    Ok(EmbedFields { model, texts, dimensions, is_cut })
}

fn text(value: Value) -> Result<String, Refusal> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(wrong_type("input", "text or a list of texts", &other)),
    }
}

fn to_text_inputs(texts: Vec<String>) -> Vec<Input> {
    texts.into_iter().map(Input::Text).collect()
}

/// Truncates texts that are too long. No token has less than one byte, so only texts with more bytes than the context
/// are tokenized here, and only as many as one request may have. Other texts are tokenized later.
async fn truncate_texts(front: &Frontend, model: &str, texts: Vec<String>) -> Result<Vec<Input>, Refusal> {
    let (text, context) = (front.text(model)?, front.model(model, VersionSelector::Weight)?.replica.context as usize);
    let mut inputs = Vec::with_capacity(texts.len());
    for one in texts {
        let is_long = one.len() + 2 > context && inputs.len() < front.config.limits.embeddings_max;
        inputs.push(if is_long {
            let mut ids = front.texts.tokens(&text, Input::Text(one), true, unix_seconds()).await?;
            ids.truncate(context);
            Input::TokenIds(v1::TokenIds { ids })
        } else {
            Input::Text(one)
        });
    }
    Ok(inputs)
}
