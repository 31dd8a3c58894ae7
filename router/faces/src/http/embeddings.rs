//! `/v1/embeddings`. Has no knowledge of replicas.

use crate::http::completions::inputs;
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::known::Endpoint;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use axum::Json;
use axum::extract::State;
use checkpoint::base64;
use proto::v1;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::{CutSide, ParsedRequest};
use router::front::recorder::Recorder;
use router::refusal::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn embeddings(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    answer(&front, request.page, request.recorder).await
}

/// Answers a request whose body has been read.
pub async fn answer(front: &Arc<Frontend>, page: ApiRequest, mut recorder: Recorder) -> Result<Json<Value>, HttpError> {
    let (parsed, encoding) = record_refusal(&mut recorder, parse_request(front, page).map_err(HttpError::from))?;
    // This endpoint's name for prompts is `input`.
    let named = |refusal: Refusal| refusal.renamed(&[("text", "input"), ("token_ids", "input")]);
    let reply = front.embed(parsed, &mut recorder).await.map_err(named)?;
    let usage = reply.usage.unwrap_or_default();
    let data = reply.embeddings.iter().enumerate().map(
        |(i, embedding)| json!({ "object": "embedding", "index": i, "embedding": encoding.value(&embedding.values) }),
    );
    let data: Vec<Value> = data.collect();
    Ok(Json(json!({
        "object": "list",
        "created": unix_seconds(),
        "model": reply.model,
        "data": data,
        "usage": usage_value(&usage),
    })))
}

fn usage_value(usage: &v1::Usage) -> Value {
    json!({ "prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens })
}

fn parse_request(front: &Frontend, page: ApiRequest) -> Result<(ParsedRequest, EmbeddingEncoding), Refusal> {
    let ApiRequest { mut fields, tenant, .. } = page;
    fields.check(Endpoint::Embeddings)?;
    let encoding = encoding(&mut fields)?;
    let input = fields.take("input").ok_or_else(|| Refusal::invalid("input", "is missing"))?;
    let model = fields.string("model")?.unwrap_or_default();
    let prompts = inputs("input", input)?;
    if let Some(dimensions) = fields.unsigned("dimensions")? {
        check_dimensions(dimensions, front.text(&model)?.embedding_length())?;
    }
    let (priority, deadline, cache_salt) = (fields.priority()?, fields.deadline()?, fields.cache_salt()?);
    // The default of vLLM's encoders.
    let truncation = fields.truncation(CutSide::Right)?;
    Ok((
        ParsedRequest {
            model,
            prompts,
            truncation,
            tenant,
            priority,
            deadline,
            cache_salt,
            ..ParsedRequest::default()
        },
        encoding,
    ))
}

/// Refuses to shorten an embedding: for most models, a prefix of the vector is not an embedding.
pub fn check_dimensions(requested: u32, own: u32) -> Result<(), Refusal> {
    match requested == own {
        true => Ok(()),
        false => Err(Refusal::invalid("dimensions", format!("must be {own}, the model's size, got {requested}"))),
    }
}

#[derive(Clone, Copy)]
pub enum EmbeddingEncoding {
    Float,
    /// Base64 of the little-endian bytes: the `openai` client requests this format by default.
    Base64,
}

pub fn encoding(fields: &mut Fields) -> Result<EmbeddingEncoding, Refusal> {
    match fields.string("encoding_format")?.as_deref() {
        None | Some("float") => Ok(EmbeddingEncoding::Float),
        Some("base64") => Ok(EmbeddingEncoding::Base64),
        Some(_) => Err(Refusal::invalid("encoding_format", "must be float or base64")),
    }
}

impl EmbeddingEncoding {
    pub fn value(self, values: &[f32]) -> Value {
        match self {
            EmbeddingEncoding::Float => values.into(),
            EmbeddingEncoding::Base64 => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                base64::encode(&bytes).into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_base64() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("\u{3ff}?", "z78/")]
        {
            assert_eq!(base64::encode(bytes.as_bytes()), text, "{bytes:?}");
        }
    }
}
