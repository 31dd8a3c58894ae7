//! A conversation in OpenAI's format: messages with their calls, and vLLM's fields for the template. Has no knowledge
//! of answers.

use crate::http::fields::{Fields, wrong_type};
use crate::http::{thinking, tools};
use proto::v1;
use router::refusal::Refusal;
use serde_json::{Map, Value};

/// Reads all fields that a chat's prompt is made of.
pub fn conversation(fields: &mut Fields) -> Result<v1::Chat, Refusal> {
    let messages = messages(fields.take("messages"))?;
    let documents = match fields.take("documents") {
        None => String::new(),
        Some(list @ Value::Array(_)) => list.to_string(),
        Some(other) => return Err(wrong_type("documents", "a list of objects", &other)),
    };
    let chat = v1::Chat {
        messages,
        add_generation_prompt: fields.boolean("add_generation_prompt")?,
        template_variables: template_variables(fields)?,
        documents,
        continue_final_message: fields.boolean("continue_final_message")?.unwrap_or(false),
        template: fields.string("chat_template")?.unwrap_or_default(),
        include_reasoning: fields.boolean("include_reasoning")?,
        thinking_token_budget: thinking::budget(fields)?,
        reasoning_effort: effort(fields)?.unwrap_or_default(),
        ..v1::Chat::default()
    };
    tools::read(fields, chat)
}

/// Reads the variables that a chat gives its template in addition to its messages.
pub fn template_variables(fields: &mut Fields) -> Result<String, Refusal> {
    let variables = fields.object("chat_template_kwargs")?.map(Fields::rest);
    Ok(variables.map_or_else(String::new, |variables| Value::Object(variables).to_string()))
}

/// Reads several conversations that differ only in their messages.
pub fn conversations(fields: &mut Fields) -> Result<Vec<v1::Chat>, Refusal> {
    let mut lists = match fields.take("messages") {
        Some(Value::Array(lists)) => lists.into_iter(),
        _ => return Err(Refusal::invalid("messages", "must be a list of lists of messages")),
    };
    let first = lists.next().ok_or_else(|| Refusal::invalid("messages", "must not be empty"))?;
    fields.put("messages", first);
    let mut all = vec![conversation(fields)?];
    for list in lists {
        all.push(v1::Chat { messages: messages(Some(list))?, ..all[0].clone() });
    }
    Ok(all)
}

fn messages(list: Option<Value>) -> Result<Vec<v1::ChatMessage>, Refusal> {
    let messages = match list {
        Some(Value::Array(messages)) => messages,
        Some(other) => return Err(wrong_type("messages", "a list of messages", &other)),
        None => return Err(Refusal::invalid("messages", "is missing")),
    };
    if messages.is_empty() {
        return Err(Refusal::invalid("messages", "must not be empty"));
    }
    messages.into_iter().enumerate().map(|(i, value)| message(i, value)).collect()
}

/// Reads OpenAI's field, or `effort` of the object in its newer API.
fn effort(fields: &mut Fields) -> Result<Option<String>, Refusal> {
    let flat_effort = fields.string("reasoning_effort")?;
    let Some(mut reasoning) = fields.object("reasoning")? else { return Ok(flat_effort) };
    let inner = match reasoning.take("effort") {
        None => None,
        Some(Value::String(effort)) => Some(effort),
        Some(other) => return Err(wrong_type("reasoning.effort", "a string", &other)),
    };
    let meant = |value: &Value| !value.is_null() && value != "auto";
    if let Some((name, _)) = reasoning.rest().iter().find(|(_, value)| meant(value)) {
        return Err(Refusal::invalid(format!("reasoning.{name}"), "is not supported; only `effort` is"));
    }
    Ok(flat_effort.or(inner))
}

fn message(i: usize, value: Value) -> Result<v1::ChatMessage, Refusal> {
    let Value::Object(mut message) = value else {
        return Err(wrong_type(format!("messages[{i}]"), "an object", &value));
    };
    if message.get("audio").is_some_and(|value| !value.is_null()) {
        return Err(Refusal::invalid(format!("messages[{i}].audio"), "is not supported yet"));
    }
    let role = role(i, &mut message)?;
    let is_assistant = role == "assistant";
    let tool_calls = if is_assistant { tools::calls(i, &mut message)? } else { Vec::new() };
    let content = match message.remove("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => text_of(i, parts)?,
        // A reply without text, which a client sends back unchanged.
        None | Some(Value::Null) if is_assistant => String::new(),
        other => {
            return Err(wrong_type(format!("messages[{i}].content"), "a string or a list of parts", &other.into()));
        }
    };
    let thought = string(i, &mut message, "reasoning_content")?;
    let reasoning = if thought.is_empty() { string(i, &mut message, "reasoning")? } else { thought };
    Ok(v1::ChatMessage {
        role,
        content,
        tool_calls,
        tool_call_id: string(i, &mut message, "tool_call_id")?,
        name: string(i, &mut message, "name")?,
        reasoning: if is_assistant { reasoning } else { String::new() },
        ..v1::ChatMessage::default()
    })
}

/// Takes a member that is a string or absent.
fn string(i: usize, message: &mut Map<String, Value>, name: &str) -> Result<String, Refusal> {
    match message.remove(name) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(wrong_type(format!("messages[{i}].{name}"), "a string", &other)),
    }
}

fn role(i: usize, message: &mut Map<String, Value>) -> Result<String, Refusal> {
    let role = message.remove("role").unwrap_or_default();
    match role.as_str() {
        // The newer name of the same role.
        Some("developer") => Ok("system".to_owned()),
        // The older name of the same role.
        Some("function") => Ok("tool".to_owned()),
        // The model's template decides which others there are.
        Some(role) => Ok(role.to_owned()),
        None => Err(wrong_type(format!("messages[{i}].role"), "a string", &role)),
    }
}

/// Joins parts of text as lines of one text, as other servers do for templates that take only strings.
fn text_of(i: usize, parts: Vec<Value>) -> Result<String, Refusal> {
    let text = |(j, part): (usize, &Value)| match (part.get("type").and_then(Value::as_str), part.get("text")) {
        (Some("text"), Some(Value::String(text))) => Ok(text.clone()),
        (Some("text"), _) => Err(Refusal::invalid(format!("messages[{i}].content[{j}].text"), "must be a string")),
        _ => Err(Refusal::invalid(format!("messages[{i}].content[{j}].type"), "is not supported yet; only `text` is")),
    };
    let lines: Vec<String> = parts.iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(lines.join("\n"))
}
