//! Shared by pages whose requests have one prompt, mostly a chat. Has no knowledge of any page's own fields.

use crate::http::fields::{Fields, wrong_type};
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::parsed_request::{ParsedRequest, Purpose};
use router::refusal::Refusal;
use serde_json::Value;

/// How many characters of an unknown kind a refusal repeats.
const KIND_CHARS_MAX: usize = 40;

/// Builds a request for an answer to one prompt.
pub fn prompt_request(
    fields: &mut Fields,
    model: String,
    prompt: Input,
    sampling: v1::Sampling,
) -> Result<ParsedRequest, Refusal> {
    Ok(ParsedRequest {
        model,
        prompts: vec![prompt],
        purpose: Purpose::Generate(Box::new(sampling)),
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        ..ParsedRequest::default()
    })
}

/// Returns a message of text.
pub fn text_message(role: &str, content: String) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content, ..v1::ChatMessage::default() }
}

/// Reads a text, or parts of text, which become its lines. `kinds` are the allowed names for parts of text.
pub fn text_of(field: &str, content: Option<Value>, kinds: &[&str]) -> Result<String, Refusal> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        None => return Err(Refusal::invalid(field.to_owned(), "is missing")),
        Some(other) => return Err(wrong_type(field.to_owned(), "a string or a list of parts", &other)),
    };
    let text = |(j, part): (usize, &Value)| match (part["type"].as_str(), &part["text"]) {
        (Some(kind), Value::String(text)) if kinds.contains(&kind) => Ok(text.clone()),
        (Some(kind), _) if kinds.contains(&kind) => {
            Err(Refusal::invalid(format!("{field}[{j}].text"), "must be a string"))
        }
        (Some(kind), _) => Err(unserved(format!("{field}[{j}].type"), kind)),
        (None, _) => Err(Refusal::invalid(format!("{field}[{j}].type"), "is missing")),
    };
    let lines: Vec<String> = parts.iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(lines.join("\n"))
}

/// Refuses a kind that other servers support and this one does not.
pub fn unserved(field: String, kind: &str) -> Refusal {
    let kind: String = kind.chars().take(KIND_CHARS_MAX).collect();
    Refusal::invalid(field, format!("`{kind}` is not supported yet; only text is"))
}

/// Reads a list of objects that is not empty.
pub fn objects(field: &'static str, list: Option<Value>) -> Result<Vec<Fields>, Refusal> {
    let list = match list {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(Refusal::invalid(field, "must not be empty")),
        Some(other) => return Err(wrong_type(field, "a list", &other)),
        None => return Err(Refusal::invalid(field, "is missing")),
    };
    let object = |(i, value): (usize, Value)| match value {
        Value::Object(members) => Ok(Fields::of(members)),
        other => Err(wrong_type(format!("{field}[{i}]"), "an object", &other)),
    };
    list.into_iter().enumerate().map(object).collect()
}
