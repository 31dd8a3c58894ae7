//! Ollama's formats of constraints and thinking, `format` and `think`, and of calls. Has no knowledge of pages.

use crate::http::fields::{Fields, wrong_type};
use proto::v1;
use proto::v1::structure::Form;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};

/// Reads `format`: the word `json`, or a JSON schema.
pub fn structure(fields: &mut Fields) -> Result<Option<v1::Structure>, Refusal> {
    let form = match fields.take("format") {
        None => return Ok(None),
        Some(Value::String(word)) if word.is_empty() => return Ok(None),
        Some(Value::String(word)) if word == "json" => Form::JsonObject(true),
        Some(schema @ Value::Object(_)) => Form::JsonSchema(schema.to_string()),
        Some(other) => return Err(wrong_type("format", "`json` or a JSON schema", &other)),
    };
    Ok(Some(v1::Structure { form: Some(form) }))
}

/// Reads `think` into the equivalent fields of OpenAI's page: whether to think, or how much.
pub fn think(fields: &mut Fields) -> Result<Map<String, Value>, Refusal> {
    let (name, value) = match fields.take("think") {
        None => return Ok(Map::new()),
        Some(Value::Bool(thinks)) => ("chat_template_kwargs", json!({ "enable_thinking": thinks })),
        Some(Value::String(effort)) => ("reasoning_effort", effort.into()),
        Some(other) => return Err(wrong_type("think", "true, false, or a level of effort", &other)),
    };
    Ok(Map::from_iter([(name.to_owned(), value)]))
}

/// Converts a chat's message to OpenAI's format. Ollama puts images elsewhere.
pub fn message(i: usize, mut message: Value) -> Value {
    let Some(members) = message.as_object_mut() else { return message };
    for (theirs, ours) in [("tool_name", "name"), ("thinking", "reasoning_content")] {
        if let Some(value) = members.remove(theirs) {
            members.entry(ours).or_insert(value);
        }
    }
    // Ollama's calls have no ids, which templates may require.
    for (j, call) in members.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten().enumerate() {
        if let Some(call) = call.as_object_mut() {
            call.entry("id").or_insert_with(|| format!("call_{i}_{j}").into());
        }
    }
    message
}

/// Returns a complete call. Ollama's arguments are an object, and not text.
pub fn call(call: &v1::ToolCall) -> Value {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    json!({ "id": call.id, "function": { "name": call.name, "arguments": arguments } })
}
