//! vLLM's pages beyond OpenAI's: its version and load, prompts as tokens, answers from tokens to tokens, and their
//! text.

mod derender;
mod generate;
pub mod params;
mod pieces;
mod render;

use crate::http::error::{HttpError, with_error_body};
use crate::http::page::AnswerRequest;
use crate::http::table::{Route, get, post};
use crate::http::{chat, completions, decisions, embeddings, pooling, ranking, tokens};
use axum::Json;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use router::front::frontend::Frontend;
use serde_json::{Value, json};
use std::sync::Arc;

pub fn routes() -> Vec<Route> {
    vec![
        post("/inference/v1/generate", "an answer to a prompt of tokens, as tokens", generate::generate),
        post("/v1/chat/completions/render", "the token request that a chat renders to", render::chat),
        post("/v1/completions/render", "the token requests that texts render to", render::completions),
        post("/v1/messages/render", "the same for a request to /v1/messages", render::messages),
        post("/v1/responses/render", "the same for a request to /v1/responses", render::responses),
        post("/v1/chat/completions/derender", "tokens as the answer to a chat", pieces::chat),
        post("/v1/completions/derender", "tokens as answers to texts", pieces::completions),
        post("/v1/chat/completions/batch", "answers to several chats", chat::batch),
        post("/v1/rerank", "documents by how well they fit a question", ranking::rerank),
        post("/v2/rerank", "the same, in Cohere's form", ranking::rerank),
        post("/v1/score", "a score for each pair of texts", ranking::score),
        post("/score", "the same", ranking::score),
        post("/classify", "the most likely label of each text", pooling::classify),
        post("/pooling", "a vector or the scores of each text", pooling::pooling),
        post("/v2/embed", "a vector for each text, in Cohere's form", pooling::cohere_embed),
        post("/v1/systemone", "the probabilities of answers to named questions about a state", decisions::systemone),
        post("/invocations", "a chat, a text, vectors or scores, by the request's fields", invocations),
        get("/tokenizer_info", "the tokenizer's special tokens and template", tokens::tokenizer_info),
        get("/version", "this server's release", version),
        get("/load", "the number of running requests", load),
    ]
}

/// Rewrites the refusals of the pages that only vLLM has in its format.
pub async fn rewrite_errors(request: Request, next: Next) -> Response {
    with_error_body(next.run(request).await, HttpError::vllm_body)
}

/// SageMaker's one page for all requests.
async fn invocations(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let has = |name| request.page.fields.has(name);
    let pairs = [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")];
    if has("query") && (has("documents") || has("texts")) {
        return ranking::rerank(State(front), request).await.map(IntoResponse::into_response);
    }
    if pairs.into_iter().any(|(first, second)| has(first) && has(second)) {
        return ranking::score(State(front), request).await.map(IntoResponse::into_response);
    }
    let (is_chat, is_pooled) = (has("messages"), has("input"));
    let name = request.page.fields.get("model").and_then(Value::as_str).unwrap_or_default();
    let spec = front.text(name).ok().map(|text| text.spec.clone());
    if spec.as_ref().is_some_and(|spec| spec.pooling.is_classifier()) {
        return pooling::classify(State(front), request).await.map(IntoResponse::into_response);
    }
    if is_pooled || (is_chat && spec.is_some_and(|spec| spec.encoder.is_some())) {
        return embeddings::embeddings(State(front), request).await;
    }
    let AnswerRequest { page, recorder, .. } = request;
    if is_chat {
        return chat::answer_page(front, page, recorder, false).await;
    }
    completions::answer_page(front, page, recorder).await
}

async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn load(State(front): State<Arc<Frontend>>) -> Json<Value> {
    Json(json!({ "server_load": front.streams.len() }))
}
