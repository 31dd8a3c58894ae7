//! `/tokenize` and `/detokenize` of both vLLM and llama.cpp: the fields of the request show which one the client uses.

use crate::http::conversation::conversation;
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::known::Endpoint;
use crate::http::page::ApiRequest;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::ParsedRequest;
use router::front::text_work::TOKEN_TEXT_BYTES;
use router::refusal::Refusal;
use router::replicas::models::table::VersionSelector;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::sync::Arc;
use types::Tokens;

pub async fn tokenize(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Response, HttpError> {
    let _visit = front.visit(page.tenant)?;
    let mut fields = page.fields;
    fields.check(Endpoint::Tokenize)?;
    let model = fields.string("model")?.unwrap_or_default();
    let text = front.text(&model)?;
    let (adds, with_pieces) = (fields.boolean("add_special")?, fields.boolean("with_pieces")?.unwrap_or(false));
    if let Some(content) = fields.string("content")? {
        return Ok(content_tokens(&front, &text, content, adds.unwrap_or(false), with_pieces).await?);
    }
    let add_special = fields.boolean("add_special_tokens")?;
    let input = match fields.string("prompt")? {
        Some(_) if fields.take("messages").is_some() => {
            return Err(Refusal::invalid("messages", "give a prompt or messages, not both").into());
        }
        Some(text) => Input::Text(text),
        // A template writes the leading tokens itself. A client that sends `true` gets them twice.
        None if add_special == Some(true) => {
            Input::Text(front.texts.render_chat(&text, chat(&mut fields)?, unix_seconds()).await?)
        }
        None => Input::Chat(chat(&mut fields)?),
    };
    let add_special = add_special.unwrap_or(true);
    let with_texts = fields.boolean("return_token_strs")?.unwrap_or(false);
    let tokens = front.texts.tokens(&text, input, add_special, unix_seconds()).await?;
    let context = front.model(&model, VersionSelector::Weight).map_or(text.spec.context, |model| model.replica.context);
    let n_tokens = tokens.len();
    let answer = move || {
        let spelled = || tokens.iter().map(|token| text.tokenizer.token_spelled(*token)).collect::<Vec<_>>();
        let spelled = with_texts.then(spelled);
        let body = json!({ "count": tokens.len(), "max_model_len": context, "tokens": tokens, "token_strs": spelled });
        Json(body).into_response()
    };
    Ok(front.texts.off_runtime(TOKEN_TEXT_BYTES * n_tokens, answer).await?)
}

/// Takes a conversation, and refuses the fields that a chat would refuse.
fn chat(fields: &mut Fields) -> Result<v1::Chat, Refusal> {
    fields.check(Endpoint::Chat)?;
    conversation(fields)
}

pub async fn detokenize(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let _visit = front.visit(page.tenant)?;
    let mut fields = page.fields;
    fields.check(Endpoint::Detokenize)?;
    let model = fields.string("model")?;
    let text = front.text(model.as_deref().unwrap_or_default())?;
    let tokens = fields.token_ids("tokens")?.ok_or_else(|| Refusal::invalid("tokens", "is missing"))?;
    text.check_ids("tokens", &tokens)?;
    let text = front.texts.detokenize(&text, tokens).await?;
    // vLLM's name, and llama.cpp's, whose clients name no model.
    Ok(Json(if model.is_some() { json!({ "prompt": text }) } else { json!({ "prompt": text, "content": text }) }))
}

/// Counts the tokens of a request's prompt, in the format of OpenAI's pages.
pub async fn count_prompt_tokens(front: &Frontend, parsed: ParsedRequest) -> Result<Json<Value>, Refusal> {
    let _visit = front.visit(parsed.tenant)?;
    let text = front.text(&parsed.model)?;
    let mut n_tokens = 0;
    for prompt in parsed.prompts {
        n_tokens += front.texts.tokens(&text, prompt, true, unix_seconds()).await?.len();
    }
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": n_tokens })))
}

/// Returns the data for tokenization on the client, as far as each is one line.
pub async fn tokenizer_info(State(front): State<Arc<Frontend>>) -> Result<Json<Value>, HttpError> {
    let model = front.model("", VersionSelector::Weight)?;
    let text = &model.text;
    let spelled = |token: Option<&u32>| token.map(|token| text.tokenizer.token_spelled(*token));
    Ok(Json(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": spelled(text.spec.bos.as_ref()),
        "eos_token": spelled(text.spec.eos.first()),
        "chat_template": text.template.as_ref().map(|template| template.source()),
        "model_max_length": model.replica.context,
        "vocab_size": text.tokenizer.n_vocab(),
    })))
}

/// Returns the tokens of llama.cpp's `content`, which may be empty. Each may come with its text, or with its bytes if
/// they are no text.
async fn content_tokens(
    front: &Frontend,
    text: &Arc<ModelText>,
    content: String,
    adds_special: bool,
    with_pieces: bool,
) -> Result<Response, Refusal> {
    let tokens = match content.is_empty() {
        true => Tokens::new(),
        false => front.texts.tokens(text, Input::Text(content), adds_special, unix_seconds()).await?,
    };
    let (text, n_tokens) = (text.clone(), tokens.len());
    let piece = move |id: &u32| {
        let bytes = text.tokenizer.token_bytes(*id);
        let piece: Value = std::str::from_utf8(bytes).map_or_else(|_| bytes.into(), Value::from);
        json!({ "id": id, "piece": piece })
    };
    let answer = move || {
        let values: Value = if with_pieces { tokens.iter().map(piece).collect() } else { tokens.into() };
        Json(json!({ "tokens": values })).into_response()
    };
    front.texts.off_runtime(TOKEN_TEXT_BYTES * n_tokens, answer).await
}
