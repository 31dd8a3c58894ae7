//! `/tokenize` and `/detokenize`, as vLLM has them.

use crate::faces::http::conversation::conversation;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::Fields;
use crate::faces::http::format::token_text;
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::read;
use crate::front::frontend::{Frontend, TOKEN_TEXT_BYTES, unix_seconds};
use crate::refusal::Refusal;
use crate::replicas::models::table::VersionBy;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn tokenize(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let page = read(&front, request).await?;
    let _visit = front.visit(page.tenant)?;
    let mut fields = page.fields;
    fields.check(Endpoint::Tokenize)?;
    let model = fields.string("model")?.unwrap_or_default();
    let text = front.text(&model)?;
    let input = match fields.string("prompt")? {
        Some(_) if fields.take("messages").is_some() => {
            return Err(Refusal::invalid("messages", "give a prompt or messages, not both").into());
        }
        Some(text) => Input::Text(text),
        None => Input::Chat(chat(&mut fields)?),
    };
    let add_special = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let with_texts = fields.boolean("return_token_strs")?.unwrap_or(false);
    let tokens = front.tokens(&text, input, add_special, unix_seconds()).await?;
    let context = front.model(&model, VersionBy::Weight).map_or(text.spec.context, |model| model.replica.context);
    let n_tokens = tokens.len();
    let answer = move || {
        let texts = || tokens.iter().map(|token| token_text(&text.tokenizer, *token)).collect::<Vec<_>>();
        let texts = with_texts.then(texts);
        let told = json!({ "count": tokens.len(), "max_model_len": context, "tokens": tokens, "token_strs": texts });
        Json(told).into_response()
    };
    Ok(front.off_runtime(TOKEN_TEXT_BYTES * n_tokens, answer).await?)
}

/// A conversation, of which nothing is taken that a chat would refuse.
fn chat(fields: &mut Fields) -> Result<v1::Chat, Refusal> {
    fields.check(Endpoint::Chat)?;
    conversation(fields)
}

pub async fn detokenize(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let page = read(&front, request).await?;
    let _visit = front.visit(page.tenant)?;
    let mut fields = page.fields;
    fields.check(Endpoint::Detokenize)?;
    let text = front.text(&fields.string("model")?.unwrap_or_default())?;
    let tokens = fields.token_ids("tokens")?.ok_or_else(|| Refusal::invalid("tokens", "is missing"))?;
    text.check_ids("tokens", &tokens)?;
    Ok(Json(json!({ "prompt": front.detokenized(&text, tokens).await? })))
}
