//! What pages share whose answer is one text: a chat with one choice. Knows no page's own words.

use crate::faces::http::fields::{Fields, Streaming, wrong};
use crate::faces::http::page::Page;
use crate::front::ask::{Ask, Purpose};
use crate::front::frontend::Frontend;
use crate::front::generation::{Generation, GenerationEvent};
use crate::refusal::Refusal;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::Value;
use tokio_stream::StreamExt;

/// How many characters of an unknown kind a refusal repeats.
const KIND_CHARS_MAX: usize = 40;

/// Reads the fields that every such page has. Also returns whether the answer is to be streamed.
pub fn ask(
    front: &Frontend,
    mut page: Page,
    messages: Vec<v1::ChatMessage>,
    sampling: v1::Sampling,
) -> Result<(Ask, bool), Refusal> {
    let fields = &mut page.fields;
    let (model, priority, deadline) = (fields.string("model")?, fields.priority()?, fields.deadline()?);
    let is_stream = fields.boolean("stream")?.unwrap_or(false);
    let streaming = is_stream.then(Streaming::default);
    let ask = Ask {
        model: model.unwrap_or_default(),
        prompts: vec![Input::Chat(v1::Chat { messages, ..v1::Chat::default() })],
        purpose: Purpose::Generate(Box::new(sampling)),
        priority,
        deadline,
        ..Ask::default()
    };
    Ok((page.finished(ask, streaming, &front.config.limits)?, is_stream))
}

/// A message of text.
pub fn said(role: &str, content: String) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content, ..v1::ChatMessage::default() }
}

/// Returns the whole answer and how it ended.
pub async fn whole(generation: &mut Generation) -> Result<(String, v1::Finished), Refusal> {
    let (mut text, mut last) = (String::new(), v1::Finished::default());
    while let Some(event) = generation.next().await {
        match event?.1 {
            GenerationEvent::Delta(delta) => text.push_str(&delta.text),
            GenerationEvent::Finished(finished) => last = finished,
            GenerationEvent::Prompt(_) | GenerationEvent::Replayed(_) | GenerationEvent::Pooled(_) => {}
        }
    }
    Ok((text, last))
}

/// Reads a text, or parts of text, which become its lines. `kinds` are the allowed names for parts of text.
pub fn text_of(field: &str, content: Option<Value>, kinds: &[&str]) -> Result<String, Refusal> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        None => return Err(invalid(field.to_owned(), "is missing")),
        Some(other) => return Err(wrong(field.to_owned(), "a string or a list of parts", &other)),
    };
    let text = |(j, part): (usize, &Value)| match (part["type"].as_str(), &part["text"]) {
        (Some(kind), Value::String(text)) if kinds.contains(&kind) => Ok(text.clone()),
        (Some(kind), _) if kinds.contains(&kind) => Err(invalid(format!("{field}[{j}].text"), "must be a string")),
        (Some(kind), _) => Err(unserved(format!("{field}[{j}].type"), kind)),
        (None, _) => Err(invalid(format!("{field}[{j}].type"), "is missing")),
    };
    let lines: Vec<String> = parts.iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(lines.join("\n"))
}

/// Refuses a kind that other servers serve and this one does not.
pub fn unserved(field: String, kind: &str) -> Refusal {
    let kind: String = kind.chars().take(KIND_CHARS_MAX).collect();
    invalid(field, &format!("`{kind}` is not supported yet; only text is"))
}

pub fn invalid(field: String, message: &str) -> Refusal {
    Refusal::Invalid { field: field.into(), message: message.to_owned() }
}

/// Reads a list of objects that is not empty.
pub fn objects(field: &'static str, list: Option<Value>) -> Result<Vec<Fields>, Refusal> {
    let list = match list {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(Refusal::invalid(field, "there are none")),
        Some(other) => return Err(wrong(field, "a list", &other)),
        None => return Err(Refusal::invalid(field, "is missing")),
    };
    let object = |(i, value): (usize, Value)| match value {
        Value::Object(members) => Ok(Fields::of(members)),
        other => Err(wrong(format!("{field}[{i}]"), "an object", &other)),
    };
    list.into_iter().enumerate().map(object).collect()
}
