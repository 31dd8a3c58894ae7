//! Chats whose last message is the assistant's: the answer continues that message. Has no knowledge of replicas.

use crate::http::fields::Fields;
use router::refusal::Refusal;
use serde_json::Value;

const FIELD: &str = "messages";

/// Whether a chat ends with the beginning of its answer. Joins that message's parts to one text, with an empty line
/// between them.
pub fn join_begun_answer(fields: &mut Fields) -> Result<bool, Refusal> {
    let Some(mut messages) = fields.take(FIELD) else { return Ok(false) };
    let begins = match messages.as_array_mut().map(Vec::as_mut_slice) {
        Some([.., before, last]) if is_of_assistant(before) && is_of_assistant(last) => {
            return Err(Refusal::invalid(FIELD, "two messages of the assistant at the end cannot both be continued"));
        }
        Some([.., last]) if is_of_assistant(last) && last["tool_calls"].is_null() => {
            join(&mut last["content"]);
            true
        }
        _ => false,
    };
    fields.put(FIELD, messages);
    Ok(begins)
}

fn is_of_assistant(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// Leaves parts that are not text as they are; a later check refuses them.
fn join(content: &mut Value) {
    let text = |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(str::to_owned);
    let texts: Option<Vec<String>> = content.as_array().and_then(|parts| parts.iter().map(text).collect());
    if let Some(texts) = texts {
        *content = texts.join("\n\n").into();
    }
}
