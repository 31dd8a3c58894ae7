//! `/v1/rerank` and its other paths, in the forms of Jina, Cohere, vLLM and llama.cpp; and `/v1/score`. Has no
//! knowledge of models: `front::rank` decides how a pair gets its score.

use crate::http::error::HttpError;
use crate::http::fields::{Fields, wrong_type};
use crate::http::known::Endpoint;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::pooled;
use axum::Json;
use axum::extract::State;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::ParsedRequest;
use router::front::rank::{PairScores, TextPairs, score_pairs};
use router::front::sampling::random_seed;
use router::refusal::Refusal;
use router::replicas::models::truncation::CutSide;
use serde_json::{Value, json};
use std::cmp::Ordering;
use std::sync::Arc;

/// The documents by how well they fit a question, the best first.
pub async fn rerank(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let (parsed, requested) = record_refusal(&mut recorder, rerank_request(page).map_err(HttpError::from))?;
    let documents = requested.documents.clone();
    let texts = (vec![requested.query.clone()], requested.documents.clone());
    let pairs = TextPairs { tokens_max: requested.tokens_max, ..TextPairs::of(texts.0, texts.1) };
    let scored = score_pairs(&front, parsed, pairs, requested.is_raw, &mut recorder).await.map_err(named)?;
    Ok(Json(requested.reply(&documents, &scored)))
}

/// A score for each pair of texts.
pub async fn score(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let (parsed, pairs, is_raw) = record_refusal(&mut recorder, score_request(page).map_err(HttpError::from))?;
    let scored = score_pairs(&front, parsed, pairs, is_raw, &mut recorder).await.map_err(named)?;
    let scores = scored.scores.iter().enumerate();
    let data: Vec<Value> = scores.map(|(i, score)| json!({ "index": i, "object": "score", "score": score })).collect();
    Ok(Json(json!({
        "id": reply_id("score"),
        "object": "list",
        "created": unix_seconds(),
        "model": scored.model,
        "data": data,
        "usage": usage(scored.n_tokens),
    })))
}

/// The id of a reply that nothing stores.
pub fn reply_id(kind: &str) -> String {
    format!("{kind}-{:016x}", random_seed())
}

pub fn usage(n_tokens: u32) -> Value {
    json!({ "prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0 })
}

/// These endpoints have other names for prompts.
fn named(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[("text", "documents"), ("pair", "documents"), ("input", "documents")]))
}

struct RerankFields {
    query: String,
    documents: Vec<String>,
    top_n: usize,
    /// The results repeat the documents.
    has_documents: bool,
    /// A plain list, as text-embeddings-inference writes it.
    is_list: bool,
    is_raw: bool,
    /// The most tokens of the query and of a document that count. Zero: all.
    tokens_max: [u32; 2],
}

impl RerankFields {
    fn reply(&self, documents: &[String], scored: &PairScores) -> Value {
        let mut order: Vec<usize> = (0..scored.scores.len()).collect();
        // The earlier of two with the same score comes first.
        order.sort_by(|a, b| scored.scores[*b].partial_cmp(&scored.scores[*a]).unwrap_or(Ordering::Equal));
        order.truncate(self.top_n);
        let result = |i: &usize| match (self.is_list, self.has_documents) {
            (true, true) => json!({ "index": i, "score": scored.scores[*i], "text": documents[*i] }),
            (true, false) => json!({ "index": i, "score": scored.scores[*i] }),
            (false, true) => {
                json!({ "index": i, "relevance_score": scored.scores[*i], "document": { "text": documents[*i] } })
            }
            (false, false) => json!({ "index": i, "relevance_score": scored.scores[*i] }),
        };
        let results: Vec<Value> = order.iter().map(result).collect();
        if self.is_list {
            return results.into();
        }
        json!({
            "id": reply_id("rerank"),
            "object": "list",
            "model": scored.model,
            "results": results,
            "usage": usage(scored.n_tokens),
            // As Cohere counts.
            "meta": { "api_version": { "version": "2" }, "billed_units": { "search_units": 1 } },
        })
    }
}

fn rerank_request(page: ApiRequest) -> Result<(ParsedRequest, RerankFields), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    fields.check(Endpoint::Rank)?;
    let query = match fields.take("query") {
        Some(Value::String(query)) => query,
        Some(other) => return Err(wrong_type("query", "text", &other)),
        None => return Err(Refusal::invalid("query", "is missing")),
    };
    let is_list = fields.has("texts") && !fields.has("documents");
    let name = if is_list { "texts" } else { "documents" };
    let documents = texts(&mut fields, name)?;
    let top_n = match fields.unsigned("top_n")? {
        None | Some(0) => documents.len(),
        Some(n) => n as usize,
    };
    let has_documents = match is_list {
        true => fields.boolean("return_text")?.unwrap_or(false),
        false => fields.boolean("return_documents")?.unwrap_or(true),
    };
    let (is_raw, tokens_max) = (is_raw(&mut fields)?, tokens_max(&mut fields)?);
    let parsed = ParsedRequest { tenant, body, ..common(&mut fields)? };
    Ok((parsed, RerankFields { query, documents, top_n, has_documents, is_list, is_raw, tokens_max }))
}

fn score_request(page: ApiRequest) -> Result<(ParsedRequest, TextPairs, bool), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    fields.check(Endpoint::Rank)?;
    const NAMES: [[&str; 2]; 4] =
        [["text_1", "text_2"], ["queries", "documents"], ["queries", "items"], ["data_1", "data_2"]];
    let Some([first, second]) = NAMES.into_iter().find(|[first, second]| fields.has(first) && fields.has(second))
    else {
        return Err(Refusal::invalid("text_1", "is missing: send `text_1` and `text_2`, or `queries` and `documents`"));
    };
    let (firsts, seconds) = (texts(&mut fields, first)?, texts(&mut fields, second)?);
    if firsts.len() > 1 && firsts.len() != seconds.len() {
        return Err(Refusal::invalid(second, "Input lengths must be either 1:1, 1:N or N:N"));
    }
    let (is_raw, tokens_max) = (is_raw(&mut fields)?, tokens_max(&mut fields)?);
    let parsed = ParsedRequest { tenant, body, ..common(&mut fields)? };
    Ok((parsed, TextPairs { tokens_max, ..TextPairs::of(firsts, seconds) }, is_raw))
}

/// The fields that these endpoints share.
fn common(fields: &mut Fields) -> Result<ParsedRequest, Refusal> {
    Ok(ParsedRequest {
        model: fields.string("model")?.unwrap_or_default(),
        truncation: fields.truncation(CutSide::Right)?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        cache_salt: fields.cache_salt()?,
        ..ParsedRequest::default()
    })
}

/// Reads the most tokens of the first text and of the second one of a pair. Zero: all.
fn tokens_max(fields: &mut Fields) -> Result<[u32; 2], Refusal> {
    let mut limit = |name: &'static str| match fields.integer(name)?.map_or(Ok(0), u32::try_from) {
        Ok(n) => Ok(n),
        Err(_) => Err(Refusal::invalid(name, format!("{name} must be a non-negative integer"))),
    };
    Ok([limit("max_tokens_per_query")?, limit("max_tokens_per_doc")?])
}

/// Whether scores are a classifier's outputs, without an activation. TEI's clients have a name of their own for it.
fn is_raw(fields: &mut Fields) -> Result<bool, Refusal> {
    let by_tei = fields.boolean("raw_scores")?.unwrap_or(false);
    Ok(by_tei || pooled::is_raw(fields)?)
}

/// Reads a text, or a list of texts and of objects with one.
fn texts(fields: &mut Fields, name: &'static str) -> Result<Vec<String>, Refusal> {
    let text = |value: Value| match value {
        Value::String(text) => Ok(text),
        Value::Object(mut object) => match object.remove("text") {
            Some(Value::String(text)) => Ok(text),
            _ => Err(Refusal::invalid(name, "must be texts, or objects with `text`")),
        },
        other => Err(wrong_type(name, "a text or a list of texts", &other)),
    };
    let all = match fields.take(name) {
        None => return Err(Refusal::invalid(name, "is missing")),
        Some(Value::Array(all)) => all.into_iter().map(text).collect::<Result<Vec<_>, _>>()?,
        Some(one) => vec![text(one)?],
    };
    if all.is_empty() { Err(Refusal::invalid(name, "must have at least one text")) } else { Ok(all) }
}
