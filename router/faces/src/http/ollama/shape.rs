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

/// Converts a chat's messages to OpenAI's format. Ollama puts images elsewhere.
pub fn convert_messages(messages: &mut [Value]) {
    let mut calls = OpenCalls::default();
    for members in messages.iter_mut().filter_map(Value::as_object_mut) {
        for (theirs, ours) in [("tool_name", "name"), ("thinking", "reasoning_content")] {
            if let Some(value) = members.remove(theirs) {
                members.entry(ours).or_insert(value);
            }
        }
        match members.get("role").and_then(Value::as_str) {
            Some("assistant") => calls.complete_calls(members),
            Some("tool") => calls.complete_result(members),
            _ => {}
        }
    }
}

/// The ids of calls. Ollama's messages may be without them: a result then names only its tool. Templates may require
/// them, and Mistral's requires nine letters and digits.
#[derive(Default)]
struct OpenCalls {
    n_generated: usize,
    /// The id and the tool of each call that has no result yet.
    open: Vec<(String, Value)>,
}

impl OpenCalls {
    fn complete_calls(&mut self, message: &mut Map<String, Value>) {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        self.open.clear();
        for call in calls.into_iter().flatten().filter_map(Value::as_object_mut) {
            let id = text(call, "id").map_or_else(|| self.generate_id(), str::to_owned);
            call.insert("id".to_owned(), id.as_str().into());
            self.open.push((id, call.get("function").map_or(Value::Null, |function| function["name"].clone())));
        }
    }

    fn generate_id(&mut self) -> String {
        self.n_generated += 1;
        format!("call{:05}", self.n_generated)
    }

    /// Gives a result the id of the first open call of its tool.
    fn complete_result(&mut self, message: &mut Map<String, Value>) {
        let (id, name) = (text(message, "tool_call_id"), text(message, "name"));
        let is_answered = |(of, tool): &(String, Value)| match id {
            Some(id) => of == id,
            None => name.is_none_or(|name| tool == name),
        };
        let Some(at) = self.open.iter().position(is_answered) else { return };
        let (id, _) = self.open.remove(at);
        message.insert("tool_call_id".to_owned(), id.into());
    }
}

/// Returns a member that is a text and not empty.
fn text<'a>(members: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    members.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
}

/// Returns a complete call and its index. Ollama's arguments are an object, and not text.
pub fn call((i, call): (usize, &v1::ToolCall)) -> Value {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    json!({ "id": call.id, "function": { "index": i, "name": call.name, "arguments": arguments } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_has_the_id_of_its_call() {
        let call = |name: &str| json!({ "function": { "name": name, "arguments": {} } });
        let result = |name: &str| json!({ "role": "tool", "tool_name": name, "content": "" });
        let mut messages = [
            json!({ "role": "assistant", "tool_calls": [call("f"), call("g"), call("f")] }),
            result("g"),
            result("f"),
            json!({ "role": "tool", "content": "" }),
            result("f"),
            json!({ "role": "assistant", "tool_calls": [{ "id": "own", "function": { "name": "f" } }, call("f")] }),
            json!({ "role": "tool", "tool_call_id": "own", "content": "" }),
            result("f"),
            result("h"),
        ];
        convert_messages(&mut messages);
        let ids = |i: usize| -> Vec<&Value> {
            messages[i]["tool_calls"].as_array().unwrap().iter().map(|call| &call["id"]).collect()
        };
        assert_eq!(ids(0), ["call00001", "call00002", "call00003"]);
        assert_eq!(ids(5), ["own", "call00004"]);
        let results: Vec<Option<&str>> = messages.iter().map(|message| message["tool_call_id"].as_str()).collect();
        let expected = ["", "call00002", "call00001", "call00003", "", "", "own", "call00004", ""];
        assert_eq!(results, expected.map(|id| Some(id).filter(|id| !id.is_empty())));
        assert_eq!(messages[1]["name"], "g");
    }
}
