//! What an answer must be and whether its model thinks, in Ollama's words: `format` and `think`; and how it says calls.
//! Knows no page.

use crate::faces::http::fields::{Fields, wrong};
use crate::refusal::Refusal;
use proto::v1;
use proto::v1::structure::Form;
use serde_json::{Map, Value, json};

/// Reads `format`: the word `json`, or a JSON schema.
pub fn structure(fields: &mut Fields) -> Result<Option<v1::Structure>, Refusal> {
    let form = match fields.take("format") {
        None => return Ok(None),
        Some(Value::String(word)) if word.is_empty() => return Ok(None),
        Some(Value::String(word)) if word == "json" => Form::JsonObject(true),
        Some(schema @ Value::Object(_)) => Form::JsonSchema(schema.to_string()),
        Some(other) => return Err(wrong("format", "`json` or a JSON schema", &other)),
    };
    Ok(Some(v1::Structure { form: Some(form) }))
}

/// Reads `think`, into the fields of OpenAI's page that say the same: whether, or how much.
pub fn think(fields: &mut Fields) -> Result<Map<String, Value>, Refusal> {
    let (name, value) = match fields.take("think") {
        None => return Ok(Map::new()),
        Some(Value::Bool(thinks)) => ("chat_template_kwargs", json!({ "enable_thinking": thinks })),
        Some(Value::String(effort)) => ("reasoning_effort", effort.into()),
        Some(other) => return Err(wrong("think", "true, false, or how much", &other)),
    };
    Ok(Map::from_iter([(name.to_owned(), value)]))
}

/// A message of a chat as OpenAI has it. Images have no place there.
pub fn message(i: usize, mut message: Value) -> Value {
    let Some(members) = message.as_object_mut() else { return message };
    for (theirs, ours) in [("tool_name", "name"), ("thinking", "reasoning_content")] {
        if let Some(value) = members.remove(theirs) {
            members.entry(ours).or_insert(value);
        }
    }
    // Calls have no names of their own there; templates may ask for them.
    for (j, call) in members.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten().enumerate() {
        if let Some(call) = call.as_object_mut() {
            call.entry("id").or_insert_with(|| format!("call_{i}_{j}").into());
        }
    }
    message
}

/// A whole call. Its arguments are an object there, and not text.
pub fn call(call: &v1::ToolCall) -> Value {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    json!({ "id": call.id, "function": { "name": call.name, "arguments": arguments } })
}
