//! The tools of a response, which are flat where a chat's are nested, and the tool choice. Functions and custom tools,
//! which the client runs, are supported. Other kinds would run on the server, and are refused by name.

use crate::http::custom::{self, CUSTOM};
use crate::http::fields::{Fields, wrong_type};
use proto::v1;
use proto::v1::tool_choice::Mode;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// How many characters of an unknown kind a refusal repeats.
const KIND_CHARS_MAX: usize = 40;
const MUST: &str = "must be none, auto, required, {\"type\": \"function\" or \"custom\", \"name\": ..} or \
                    {\"type\": \"allowed_tools\", ..}";

/// The tools in the prompt, and those that the reply repeats.
pub struct ToolSettings {
    /// In a chat's format.
    pub chat_tools: Vec<String>,
    /// The names of tools whose calls have a text and no arguments.
    pub custom: HashSet<String>,
    pub choice: Option<v1::ToolChoice>,
    pub is_parallel: bool,
    pub shown: Vec<Value>,
    pub shown_choice: Value,
}

pub fn read(fields: &mut Fields) -> Result<ToolSettings, Refusal> {
    let list = match fields.take("tools") {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type("tools", "a list of objects", &other)),
    };
    let (mut functions, mut names) = (Vec::new(), HashSet::new());
    for (i, value) in list.into_iter().enumerate() {
        let Some(function) = function(i, value)? else { continue };
        if !names.insert(function.name.clone()) {
            return Err(Refusal::invalid(format!("tools[{i}].name"), "another tool has this name"));
        }
        functions.push(function);
    }
    let shown_choice = fields.take("tool_choice").unwrap_or_else(|| "auto".into());
    let ToolSelection { tool_choice, allowed } = choice(&shown_choice)?;
    if let Some(unknown) = allowed.iter().flatten().find(|name| !names.contains(*name)) {
        return Err(Refusal::invalid(
            "tool_choice.tools".to_owned(),
            format!("names {unknown:?}, which is not in `tools`"),
        ));
    }
    let is_allowed = |of: &&FunctionTool| allowed.as_ref().is_none_or(|names| names.contains(&of.name));
    Ok(ToolSettings {
        chat_tools: functions.iter().filter(is_allowed).map(|of| of.chat_tool.to_string()).collect(),
        custom: functions.iter().filter(|of| of.shown["type"] == CUSTOM).map(|of| of.name.clone()).collect(),
        choice: tool_choice,
        is_parallel: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        shown: functions.into_iter().map(|of| of.shown).collect(),
        shown_choice,
    })
}

struct FunctionTool {
    name: String,
    chat_tool: Value,
    shown: Value,
}

/// Returns None for a tool that is accepted and never enters the prompt.
fn function(i: usize, value: Value) -> Result<Option<FunctionTool>, Refusal> {
    let Value::Object(object) = value else { return Err(wrong_type(format!("tools[{i}]"), "an object", &value)) };
    match object.get("type").and_then(Value::as_str) {
        Some("function") => {}
        Some(CUSTOM) => return custom_tool(i, object).map(Some),
        // Codex sends this with every request: a search that may not leave the server, where there is nothing to find.
        Some("web_search") if object.get("external_web_access") == Some(&Value::Bool(false)) => return Ok(None),
        Some(kind) => {
            let kind: String = kind.chars().take(KIND_CHARS_MAX).collect();
            return Err(Refusal::invalid(
                format!("tools[{i}].type"),
                format!("`{kind}` is not supported here; only functions and custom tools are"),
            ));
        }
        None => return Err(Refusal::invalid(format!("tools[{i}].type"), "must be `function` or `custom`")),
    }
    let name = custom::tool_name(&format!("tools[{i}]"), &object)?;
    match object.get("parameters") {
        None | Some(Value::Null | Value::Object(_)) => {}
        Some(other) => {
            return Err(wrong_type(format!("tools[{i}].parameters"), "a JSON schema, which is an object", other));
        }
    }
    let strict = match object.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(other) => return Err(wrong_type(format!("tools[{i}].strict"), "true or false", other)),
    };
    let member = |name: &str| object.get(name).cloned().unwrap_or(Value::Null);
    let shown = json!({
        "type": "function",
        "name": name,
        "description": member("description"),
        "parameters": member("parameters"),
        "strict": strict,
    });
    // Members keep the client's order: a template may print the tool unchanged.
    let of_chat = object.into_iter().filter(|(name, value)| name != "type" && !value.is_null());
    let chat_tool = json!({ "type": "function", "function": of_chat.collect::<Map<String, Value>>() });
    Ok(Some(FunctionTool { name, chat_tool, shown }))
}

/// The model sees it as a strict function with the text as its one argument.
fn custom_tool(i: usize, object: Map<String, Value>) -> Result<FunctionTool, Refusal> {
    let name = custom::tool_name(&format!("tools[{i}]"), &object)?;
    let member = |name: &str| object.get(name).cloned().unwrap_or(Value::Null);
    let chat_tool = custom::chat_tool(&format!("tools[{i}]"), &name, &object)?;
    let format = object.get("format").filter(|format| !format.is_null()).cloned();
    let shown = json!({
        "type": CUSTOM,
        "name": name,
        "description": member("description"),
        "format": format.unwrap_or_else(|| json!({ "type": "text" })),
    });
    Ok(FunctionTool { name, chat_tool, shown })
}

/// The tool choice, and the only tools that it allows.
#[derive(Default)]
struct ToolSelection {
    tool_choice: Option<v1::ToolChoice>,
    allowed: Option<HashSet<String>>,
}

fn choice(value: &Value) -> Result<ToolSelection, Refusal> {
    if let Some(word) = value.as_str() {
        let tool_choice = mode(word).ok_or_else(|| Refusal::invalid("tool_choice", MUST))?;
        return Ok(ToolSelection { tool_choice: Some(tool_choice), allowed: None });
    }
    match value["type"].as_str() {
        Some("function" | CUSTOM) => {
            let name = name_of(value).ok_or_else(|| Refusal::invalid("tool_choice", MUST))?;
            Ok(ToolSelection { tool_choice: Some(v1::ToolChoice { mode: Mode::Required.into(), name }), allowed: None })
        }
        Some("allowed_tools") => parse_allowed_tools(value),
        _ => Err(Refusal::invalid("tool_choice", MUST)),
    }
}

fn parse_allowed_tools(value: &Value) -> Result<ToolSelection, Refusal> {
    let word = value["mode"].as_str().filter(|word| matches!(*word, "auto" | "required"));
    let tool_choice =
        word.and_then(mode).ok_or_else(|| Refusal::invalid("tool_choice.mode", "must be auto or required"))?;
    let names = value["tools"].as_array().filter(|all| !all.is_empty()).and_then(|all| {
        let functions = all.iter().map(|of| name_of(of).filter(|_| of["type"] == "function" || of["type"] == CUSTOM));
        functions.collect::<Option<HashSet<String>>>()
    });
    match names {
        Some(names) => Ok(ToolSelection { tool_choice: Some(tool_choice), allowed: Some(names) }),
        None => Err(Refusal::invalid("tool_choice.tools", "must be a list of {\"type\": \"function\", \"name\": ..}")),
    }
}

fn name_of(value: &Value) -> Option<String> {
    value["name"].as_str().filter(|name| !name.is_empty()).map(str::to_owned)
}

fn mode(word: &str) -> Option<v1::ToolChoice> {
    let mode = match word {
        "none" => Mode::None,
        "auto" => Mode::Auto,
        "required" => Mode::Required,
        _ => return None,
    };
    Some(v1::ToolChoice { mode: mode.into(), name: String::new() })
}
