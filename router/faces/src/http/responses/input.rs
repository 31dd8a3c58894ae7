//! The input of a response as messages of a chat. The assistant's thought, text and calls are separate items there, and
//! become one message again. Has no knowledge of answers.

use crate::http::custom;
use crate::http::fields::{Fields, wrong_type};
use crate::http::single::{objects, text_message, text_of};
use proto::v1;
use router::refusal::Refusal;
use serde_json::{Value, json};

const TEXT_KINDS: [&str; 3] = ["input_text", "output_text", "text"];
const NO_ITEM: &str = "is not supported here; only message, reasoning, function_call, function_call_output, \
                       custom_tool_call and custom_tool_call_output are";

/// Takes the items of the field `input`.
pub fn items(fields: &mut Fields) -> Result<Vec<Value>, Refusal> {
    match fields.take("input") {
        Some(Value::String(text)) => {
            let part = json!({ "type": "input_text", "text": text });
            Ok(vec![json!({ "type": "message", "role": "user", "content": [part] })])
        }
        list => Ok(objects("input", list)?.into_iter().map(|item| Value::Object(item.rest())).collect()),
    }
}

/// Converts the items to messages. The first `n_before` items are in another field than the rest.
pub fn messages(
    items: &[Value],
    n_before: usize,
    (before, field): (&str, &str),
) -> Result<Vec<v1::ChatMessage>, Refusal> {
    let mut turns = InputTurns::default();
    for (i, item) in items.iter().enumerate() {
        let own = i.checked_sub(n_before).map(|i| format!("{field}[{i}]"));
        turns.add(own.as_deref().unwrap_or(before), item)?;
    }
    Ok(turns.messages)
}

#[derive(Default)]
struct InputTurns {
    messages: Vec<v1::ChatMessage>,
}

impl InputTurns {
    fn add(&mut self, field: &str, item: &Value) -> Result<(), Refusal> {
        match item.get("type").filter(|kind| !kind.is_null()).map(Value::as_str) {
            None | Some(Some("message")) => self.add_message(field, item),
            Some(Some("reasoning")) => self.add_thought(field, item),
            Some(Some("function_call")) => self.add_call(field, item),
            Some(Some("custom_tool_call")) => self.add_custom_call(field, item),
            Some(Some("function_call_output" | "custom_tool_call_output")) => self.add_result(field, item),
            Some(_) => Err(Refusal::invalid(format!("{field}.type"), NO_ITEM)),
        }
    }

    fn add_message(&mut self, field: &str, item: &Value) -> Result<(), Refusal> {
        let role = match item["role"].as_str() {
            Some(role @ ("system" | "user" | "assistant")) => role,
            // The newer name of the same role.
            Some("developer") => "system",
            _ => return Err(Refusal::invalid(format!("{field}.role"), "must be system, developer, user or assistant")),
        };
        let content = text_of(&format!("{field}.content"), non_null_member(item, "content"), &TEXT_KINDS)?;
        match self.messages.last_mut() {
            Some(last) if role == "assistant" && is_thought_alone(last) => last.content = content,
            _ => self.messages.push(text_message(role, content)),
        }
        Ok(())
    }

    /// Adds a thought, which comes before the assistant's text and calls.
    fn add_thought(&mut self, field: &str, item: &Value) -> Result<(), Refusal> {
        let reasoning = match parts(field, item, "content", "reasoning_text")? {
            text if text.is_empty() => parts(field, item, "summary", "summary_text")?,
            text => text,
        };
        if reasoning.is_empty() && item["encrypted_content"].as_str().is_some_and(|text| !text.is_empty()) {
            let why = "cannot be read: another server encrypted it; leave the item out";
            return Err(Refusal::invalid(format!("{field}.encrypted_content"), why));
        }
        if !reasoning.is_empty() {
            self.messages.push(v1::ChatMessage { role: "assistant".to_owned(), reasoning, ..Default::default() });
        }
        Ok(())
    }

    fn add_call(&mut self, field: &str, item: &Value) -> Result<(), Refusal> {
        let (id, name) = (string(field, item, "call_id")?, string(field, item, "name")?);
        let arguments = string(field, item, "arguments")?;
        if !arguments.trim().is_empty() && serde_json::from_str::<Value>(&arguments).is_err() {
            return Err(Refusal::invalid(format!("{field}.arguments"), "is not JSON"));
        }
        self.push_call(v1::ToolCall { id, name, arguments });
        Ok(())
    }

    fn add_custom_call(&mut self, field: &str, item: &Value) -> Result<(), Refusal> {
        let (id, name) = (string(field, item, "call_id")?, string(field, item, "name")?);
        self.push_call(v1::ToolCall { id, name, arguments: custom::arguments(&string(field, item, "input")?) });
        Ok(())
    }

    fn push_call(&mut self, call: v1::ToolCall) {
        if self.messages.last().is_none_or(|last| last.role != "assistant") {
            self.messages.push(text_message("assistant", String::new()));
        }
        if let Some(last) = self.messages.last_mut() {
            last.tool_calls.push(call);
        }
    }

    fn add_result(&mut self, field: &str, item: &Value) -> Result<(), Refusal> {
        let tool_call_id = string(field, item, "call_id")?;
        let content = text_of(&format!("{field}.output"), non_null_member(item, "output"), &TEXT_KINDS)?;
        self.messages.push(v1::ChatMessage { tool_call_id, ..text_message("tool", content) });
        Ok(())
    }
}

fn is_thought_alone(message: &v1::ChatMessage) -> bool {
    message.role == "assistant"
        && !message.reasoning.is_empty()
        && message.content.is_empty()
        && message.tool_calls.is_empty()
}

fn non_null_member(item: &Value, name: &str) -> Option<Value> {
    item.get(name).filter(|value| !value.is_null()).cloned()
}

fn string(field: &str, item: &Value, name: &str) -> Result<String, Refusal> {
    match item.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        None | Some(Value::Null) => Err(Refusal::invalid(format!("{field}.{name}"), "is missing")),
        Some(other) => Err(wrong_type(format!("{field}.{name}"), "a string", other)),
    }
}

/// Returns the text of a thought's parts. Absent is empty.
fn parts(field: &str, item: &Value, name: &str, kind: &str) -> Result<String, Refusal> {
    match non_null_member(item, name) {
        None => Ok(String::new()),
        content => text_of(&format!("{field}.{name}"), content, &[kind]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    fn read(input: Value) -> Result<Vec<v1::ChatMessage>, Refusal> {
        let mut fields = Fields::of(Map::from_iter([("input".to_owned(), input)]));
        messages(&items(&mut fields)?, 0, ("previous_response_id", "input"))
    }

    #[test]
    fn consecutive_assistant_items_are_one_message() {
        let thought = json!({ "type": "reasoning", "id": "rs_1", "summary": [],
            "content": [{ "type": "reasoning_text", "text": "hm" }] });
        let commentary = json!({ "type": "message", "role": "assistant", "phase": "commentary",
            "content": [{ "type": "output_text", "text": "I look." }] });
        let call = |id: &str| json!({ "type": "function_call", "call_id": id, "name": "f", "arguments": "{}" });
        let result = |id: &str| json!({ "type": "function_call_output", "call_id": id, "output": "21" });
        let user = json!({ "role": "user", "content": "Hi" });
        let input =
            json!([user, thought, commentary, call("a"), call("b"), result("a"), result("b"), commentary, commentary]);
        let messages = read(input).unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["user", "assistant", "tool", "tool", "assistant", "assistant"]);
        let assistant = &messages[1];
        assert_eq!(
            (assistant.reasoning.as_str(), assistant.content.as_str(), assistant.tool_calls.len()),
            ("hm", "I look.", 2)
        );
        assert_eq!((messages[3].tool_call_id.as_str(), messages[3].content.as_str()), ("b", "21"));
        let alone = read(json!([user, call("a"), result("a"), call("b"), result("b")])).unwrap();
        assert_eq!(alone.iter().filter(|message| message.tool_calls.len() == 1).count(), 2);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (item, field) in [
            (json!({ "type": "web_search_call", "id": "ws_1" }), "input[0].type"),
            (json!({ "type": 5 }), "input[0].type"),
            (json!({ "role": "tool", "content": "x" }), "input[0].role"),
            (json!({ "role": "user" }), "input[0].content"),
            (json!({ "role": "user", "content": [{ "type": "input_image" }] }), "input[0].content[0].type"),
            (json!({ "type": "function_call", "name": "f", "arguments": "{}" }), "input[0].call_id"),
            (json!({ "type": "function_call", "call_id": "a", "name": "f", "arguments": "{" }), "input[0].arguments"),
            (json!({ "type": "function_call_output", "call_id": "a" }), "input[0].output"),
            (json!({ "type": "function_call_output", "output": "a" }), "input[0].call_id"),
            (json!({ "type": "custom_tool_call", "call_id": "a", "name": "f" }), "input[0].input"),
            (json!({ "type": "reasoning", "summary": [], "encrypted_content": "x" }), "input[0].encrypted_content"),
            (json!({ "type": "reasoning", "summary": [{ "type": "text" }] }), "input[0].summary[0].type"),
        ] {
            match read(json!([item])) {
                Err(Refusal::Invalid { field: named, .. }) => assert_eq!(named, field, "{item}"),
                other => panic!("{item}: {other:?}"),
            }
        }
    }
}
