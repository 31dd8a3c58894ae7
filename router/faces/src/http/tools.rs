//! Tools in OpenAI's format, also the older `functions`, and the calls of a conversation. Has no knowledge of dialects.

use crate::http::custom::{self, CUSTOM};
use crate::http::fields::{Fields, wrong_type};
use proto::v1;
use proto::v1::tool_choice::Mode;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Whether the client uses `functions`, the API before `tools`.
pub fn uses_functions(fields: &Fields) -> bool {
    fields.has("functions") && !fields.has("tools")
}

/// Returns the names of the tools whose calls have a text instead of arguments.
pub fn custom_names(fields: &Fields) -> HashSet<String> {
    let tools = fields.get("tools").and_then(Value::as_array).into_iter().flatten();
    let custom = tools.filter(|tool| tool["type"] == CUSTOM);
    custom.filter_map(|tool| tool[CUSTOM]["name"].as_str()).map(str::to_owned).collect()
}

/// Reads the tools and the tool choice into a chat.
pub fn read(fields: &mut Fields, chat: v1::Chat) -> Result<v1::Chat, Refusal> {
    let is_older = uses_functions(fields);
    let functions = list(fields, "functions")?.into_iter();
    let functions = functions.map(|function| json!({ "type": "function", "function": function }).to_string());
    let tools = list(fields, "tools")?;
    let mut tools: Vec<String> = tools.iter().enumerate().map(tool).collect::<Result<_, _>>()?;
    let choice = fields.take("tool_choice").map(|value| restrict_to_choice(value, &mut tools)).transpose()?;
    let older_choice = fields.take("function_call").map(older_choice).transpose()?;
    let is_parallel = fields.boolean("parallel_tool_calls")?;
    if is_older {
        tools = functions.collect();
    }
    Ok(v1::Chat {
        tools,
        tool_choice: if is_older { older_choice } else { choice },
        parallel_tool_calls: if is_older { Some(false) } else { is_parallel },
        ..chat
    })
}

fn list(fields: &mut Fields, name: &'static str) -> Result<Vec<Value>, Refusal> {
    let list = match fields.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type(name, "a list of objects", &other)),
    };
    match list.iter().enumerate().find(|(_, one)| !one.is_object()) {
        Some((i, one)) => Err(wrong_type(format!("{name}[{i}]"), "an object", one)),
        None => Ok(list),
    }
}

/// Returns the tool for the chat. A custom tool becomes a function.
fn tool((i, tool): (usize, &Value)) -> Result<String, Refusal> {
    if tool["type"] != CUSTOM {
        return Ok(tool.to_string());
    }
    let field = format!("tools[{i}].{CUSTOM}");
    let custom = tool[CUSTOM].as_object().ok_or_else(|| wrong_type(field.clone(), "an object", &tool[CUSTOM]))?;
    let name = custom::tool_name(&field, custom)?;
    Ok(custom::chat_tool(&field, &name, custom)?.to_string())
}

/// Reads the choice. A choice that allows only some of the tools removes the others.
fn restrict_to_choice(value: Value, tools: &mut Vec<String>) -> Result<v1::ToolChoice, Refusal> {
    if value["type"] != "allowed_tools" {
        return choice(value);
    }
    const MUST: &str = "must be {\"mode\": \"auto\" or \"required\", \"tools\": [..]}";
    let wrong = |why: String| Refusal::invalid("tool_choice.allowed_tools".to_owned(), &why);
    let allowed = &value["allowed_tools"];
    let mode = allowed["mode"].as_str().and_then(mode).filter(|mode| *mode != Mode::None);
    let (Some(mode), Some(list)) = (mode, allowed["tools"].as_array()) else { return Err(wrong(MUST.to_owned())) };
    let name_of = |tool: &Value| chosen_name(tool).map(str::to_owned);
    let names: HashSet<String> =
        list.iter().map(name_of).collect::<Option<_>>().ok_or_else(|| wrong(MUST.to_owned()))?;
    let own = |tool: &String| serde_json::from_str::<Value>(tool).ok().as_ref().and_then(name_of);
    let known: HashSet<String> = tools.iter().filter_map(own).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(*name)) {
        return Err(wrong(format!("names {unknown:?}, which is not in `tools`")));
    }
    tools.retain(|tool| own(tool).is_some_and(|name| names.contains(&name)));
    Ok(tool_choice(mode, ""))
}

fn choice(value: Value) -> Result<v1::ToolChoice, Refusal> {
    const MUST: &str = "must be none, auto, required, {\"type\": \"function\", \"function\": {\"name\": ..}} or \
                        {\"type\": \"custom\", \"custom\": {\"name\": ..}}";
    let named = chosen_name(&value).filter(|_| value["type"] == "function" || value["type"] == CUSTOM);
    match (value.as_str(), named) {
        (Some(word), _) => {
            mode(word).map(|mode| tool_choice(mode, "")).ok_or_else(|| Refusal::invalid("tool_choice", MUST))
        }
        (None, Some(name)) if !name.is_empty() => Ok(tool_choice(Mode::Required, name)),
        _ => Err(Refusal::invalid("tool_choice", MUST)),
    }
}

/// Returns the name in an object that has a kind, and a member of that name with the rest.
fn chosen_name(value: &Value) -> Option<&str> {
    let kind = if value["type"] == CUSTOM { CUSTOM } else { "function" };
    value[kind]["name"].as_str()
}

fn older_choice(value: Value) -> Result<v1::ToolChoice, Refusal> {
    let word = value.as_str().and_then(mode).filter(|mode| *mode != Mode::Required);
    match (word, value["name"].as_str()) {
        (Some(mode), _) => Ok(tool_choice(mode, "")),
        (None, Some(name)) if !name.is_empty() => Ok(tool_choice(Mode::Required, name)),
        _ => Err(Refusal::invalid("function_call", "must be none, auto or {\"name\": ..}")),
    }
}

fn mode(word: &str) -> Option<Mode> {
    match word {
        "none" => Some(Mode::None),
        "auto" => Some(Mode::Auto),
        "required" => Some(Mode::Required),
        _ => None,
    }
}

fn tool_choice(mode: Mode, name: &str) -> v1::ToolChoice {
    v1::ToolChoice { mode: mode.into(), name: name.to_owned() }
}

/// Takes the calls of an assistant's message.
pub fn calls(i: usize, message: &mut Map<String, Value>) -> Result<Vec<v1::ToolCall>, Refusal> {
    if let Some(older) = message.remove("function_call").filter(|value| !value.is_null()) {
        return Ok(vec![call(format!("messages[{i}].function_call"), &older, String::new())?]);
    }
    let calls = match message.remove("tool_calls") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(calls)) => calls,
        Some(other) => return Err(wrong_type(format!("messages[{i}].tool_calls"), "a list", &other)),
    };
    let one = |(j, value): (usize, Value)| {
        let field = format!("messages[{i}].tool_calls[{j}]");
        let id = value["id"].as_str().unwrap_or_default().to_owned();
        match value.get("type").unwrap_or(&Value::Null).as_str().unwrap_or("function") {
            "function" => call(format!("{field}.function"), &value["function"], id),
            CUSTOM => custom_call(&format!("{field}.{CUSTOM}"), &value[CUSTOM], id),
            _ => Err(Refusal::invalid(format!("{field}.type"), "must be `function` or `custom`")),
        }
    };
    calls.into_iter().enumerate().map(one).collect()
}

fn call(field: String, function: &Value, id: String) -> Result<v1::ToolCall, Refusal> {
    let Some(name) = function["name"].as_str() else {
        return Err(Refusal::invalid(format!("{field}.name"), "must be a string"));
    };
    let arguments = match &function["arguments"] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        // Some clients send back the parsed object.
        object @ Value::Object(_) => object.to_string(),
        other => return Err(wrong_type(format!("{field}.arguments"), "a string with JSON in it", other)),
    };
    Ok(v1::ToolCall { id, name: name.to_owned(), arguments })
}

fn custom_call(field: &str, call: &Value, id: String) -> Result<v1::ToolCall, Refusal> {
    let member = |name: &str| match call[name].as_str() {
        Some(text) => Ok(text),
        None => Err(Refusal::invalid(format!("{field}.{name}"), "must be a string")),
    };
    Ok(v1::ToolCall { id, name: member("name")?.to_owned(), arguments: custom::arguments(member("input")?) })
}
