//! The served models in the format of Anthropic's API. Has no knowledge of requests.

use crate::http::stopwatch::rfc3339;
use http::HeaderMap;
use router::front::frontend::unix_seconds;
use serde_json::{Value, json};

/// Whether a client sends the version header of Anthropic's API, as all of its clients do.
pub fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// Lists all models with their contexts on one page.
pub fn list<'a>(models: impl Iterator<Item = (&'a str, u32)>) -> Value {
    let data: Vec<Value> = models.map(|(name, context)| model(name, context)).collect();
    let id = |model: Option<&Value>| model.map_or(Value::Null, |model| model["id"].clone());
    json!({ "data": data, "first_id": id(data.first()), "last_id": id(data.last()), "has_more": false })
}

pub fn model(name: &str, context: u32) -> Value {
    json!({
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": rfc3339(unix_seconds()),
        "max_input_tokens": context,
        "max_tokens": context,
    })
}
