//! Prompts in llama.cpp's formats: text, tokens, objects with a text, and lists of these. One prompt may also mix texts
//! and tokens.

use crate::http::fields::{token_ids, wrong_type};
use crate::http::known::NeutralValues;
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::frontend::{Frontend, unix_seconds};
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::Value;
use std::sync::Arc;
use types::Tokens;

const FIELD: &str = "prompt";

/// Reads prompts. A list that contains a number is one prompt.
pub async fn prompts(front: &Frontend, model: &str, value: Value) -> Result<Vec<Input>, Refusal> {
    let all = match value {
        Value::Array(all) if !all.is_empty() && !all.iter().any(Value::is_number) => all,
        one => vec![one],
    };
    let mut inputs = Vec::with_capacity(all.len().min(front.config.limits.prompts_max));
    for one in all {
        inputs.push(match one {
            Value::String(text) => Input::Text(text),
            Value::Object(_) => Input::Text(text_of(one)?),
            Value::Array(parts) if parts.iter().any(|part| !part.is_number()) => {
                let ids = join_parts(front, &front.text(model)?, parts).await?;
                Input::TokenIds(v1::TokenIds { ids })
            }
            Value::Array(_) => Input::TokenIds(v1::TokenIds { ids: token_ids(FIELD, one)? }),
            other => return Err(wrong_type(FIELD, "text, token ids, or a list of these", &other)),
        });
    }
    Ok(inputs)
}

/// Returns the text of an object that may also have images.
fn text_of(mut object: Value) -> Result<String, Refusal> {
    if !NeutralValues::Empty.contain(&object["multimodal_data"]) {
        return Err(Refusal::invalid("multimodal_data", "is not supported; only text is"));
    }
    match object["prompt_string"].take() {
        Value::String(text) => Ok(text),
        other => Err(wrong_type("prompt_string", "a string", &other)),
    }
}

/// Joins alternating texts and tokens to one prompt. A text at its beginning gets the tokenizer's leading tokens.
async fn join_parts(front: &Frontend, of: &Arc<ModelText>, parts: Vec<Value>) -> Result<Tokens, Refusal> {
    let mut ids = Tokens::new();
    for part in parts {
        match part {
            Value::String(text) if text.is_empty() => {}
            Value::String(text) => {
                let begins = ids.is_empty();
                ids.extend(front.texts.tokens(of, Input::Text(text), begins, unix_seconds()).await?);
            }
            other => ids.extend(token_ids(FIELD, Value::Array(vec![other]))?),
        }
    }
    Ok(ids)
}
