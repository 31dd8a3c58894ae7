//! Tools in Anthropic's format. Tools that run on Anthropic's servers, or that only its models were trained on, are
//! refused by name.

use crate::http::fields::{Fields, wrong_type};
use proto::v1;
use proto::v1::tool_choice::Mode;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};

/// How many characters of an unknown kind a refusal repeats.
const KIND_CHARS_MAX: usize = 40;

/// Reads the tools and the tool choice into a chat.
pub fn read(fields: &mut Fields, chat: v1::Chat) -> Result<v1::Chat, Refusal> {
    let list = match fields.take("tools") {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type("tools", "a list of objects", &other)),
    };
    let tools = list.into_iter().enumerate().map(|(i, one)| tool(i, one)).collect::<Result<_, _>>()?;
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok(v1::Chat { tools, ..chat }) };
    let is_single = boolean(&mut choice, "disable_parallel_tool_use", "tool_choice.disable_parallel_tool_use")?;
    let tool_choice = Some(read_choice(choice)?);
    Ok(v1::Chat { tools, tool_choice, parallel_tool_calls: is_single.map(|is_single| !is_single), ..chat })
}

/// Returns a tool in the JSON format of `lockstep.v1`.
fn tool(i: usize, value: Value) -> Result<String, Refusal> {
    let Value::Object(members) = value else { return Err(wrong_type(format!("tools[{i}]"), "an object", &value)) };
    let at = |name: &str| format!("tools[{i}].{name}");
    check_kind(at("type"), members.get("type"))?;
    check_tool_members(i, &members)?;
    let mut tool = Fields::of(members);
    let name = match tool.take("name") {
        Some(Value::String(name)) if !name.is_empty() => name,
        _ => return Err(Refusal::invalid(at("name"), "must be a name")),
    };
    let schema = match tool.take("input_schema") {
        Some(schema @ Value::Object(_)) => schema,
        _ => return Err(Refusal::invalid(at("input_schema"), "must be a JSON schema, which is an object")),
    };
    let mut function = json!({ "name": name, "parameters": schema });
    for (name, is_right) in [("description", Value::is_string as fn(&Value) -> bool), ("strict", Value::is_boolean)] {
        match tool.take(name) {
            None => {}
            Some(value) if is_right(&value) => function[name] = value,
            Some(other) => {
                return Err(wrong_type(at(name), if name == "strict" { "true or false" } else { "a string" }, &other));
            }
        }
    }
    Ok(json!({ "type": "function", "function": function }).to_string())
}

fn check_kind(field: String, kind: Option<&Value>) -> Result<(), Refusal> {
    match kind {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(kind)) if kind == "custom" => Ok(()),
        Some(Value::String(kind)) => {
            let kind: String = kind.chars().take(KIND_CHARS_MAX).collect();
            Err(Refusal::invalid(
                field,
                format!("`{kind}` is not supported here: only `custom` tools with a schema are"),
            ))
        }
        Some(other) => Err(wrong_type(field, "a string", other)),
    }
}

/// Refuses members that would change the model's prompt or the caller of the tool. Other members of Anthropic's
/// (`cache_control`, `eager_input_streaming`) change no token.
fn check_tool_members(i: usize, tool: &Map<String, Value>) -> Result<(), Refusal> {
    let is_neutral = |name: &str, value: &Value| match name {
        "defer_loading" => *value == false,
        "allowed_callers" => *value == json!(["direct"]),
        "input_examples" => *value == json!([]),
        _ => true,
    };
    match tool.iter().find(|(name, value)| !value.is_null() && !is_neutral(name, value)) {
        Some((name, _)) => Err(Refusal::invalid(format!("tools[{i}].{name}"), "is not supported with this value")),
        None => Ok(()),
    }
}

fn read_choice(mut choice: Fields) -> Result<v1::ToolChoice, Refusal> {
    const MUST: &str = "must be auto, any, tool or none";
    let kind = choice.take("type");
    let name = match choice.take("name") {
        Some(Value::String(name)) => name,
        _ => String::new(),
    };
    let (mode, name) = match kind.as_ref().and_then(Value::as_str) {
        Some("auto") => (Mode::Auto, String::new()),
        Some("none") => (Mode::None, String::new()),
        Some("any") => (Mode::Required, String::new()),
        Some("tool") if name.is_empty() => return Err(Refusal::invalid("tool_choice.name", "must be a tool's name")),
        Some("tool") => (Mode::Required, name),
        _ => return Err(Refusal::invalid("tool_choice.type", MUST)),
    };
    Ok(v1::ToolChoice { mode: mode.into(), name })
}

fn boolean(fields: &mut Fields, name: &'static str, full_name: &'static str) -> Result<Option<bool>, Refusal> {
    fields.boolean(name).map_err(|refusal| refusal.renamed(&[(name, full_name)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: Value) -> String {
        let Value::Object(members) = body else { panic!("no object") };
        read(&mut Fields::of(members), v1::Chat::default()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_not_done_is_named() {
        let with = |more: Value| {
            let mut tool = json!({ "name": "f", "input_schema": { "type": "object" } });
            tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ "tools": [tool] })
        };
        for (body, part) in [
            (json!({ "tools": 5 }), "tools: "),
            (json!({ "tools": [5] }), "tools[0]: "),
            (json!({ "tools": [{ "type": "web_search_20250305", "name": "web_search" }] }), "`web_search_20250305`"),
            (json!({ "tools": [{ "type": "bash_20250124", "name": "bash" }] }), "tools[0].type: `bash_20250124`"),
            (json!({ "tools": [{ "name": "f" }] }), "tools[0].input_schema"),
            (json!({ "tools": [{ "input_schema": {} }] }), "tools[0].name"),
            (with(json!({ "description": 5 })), "tools[0].description"),
            (with(json!({ "strict": "yes" })), "tools[0].strict"),
            (with(json!({ "defer_loading": true })), "tools[0].defer_loading"),
            (with(json!({ "allowed_callers": ["code_execution_20250825"] })), "tools[0].allowed_callers"),
            (with(json!({ "input_examples": [{}] })), "tools[0].input_examples"),
            (json!({ "tool_choice": "any" }), "tool_choice: "),
            (json!({ "tool_choice": { "type": "required" } }), "tool_choice.type"),
            (json!({ "tool_choice": { "type": "tool" } }), "tool_choice.name"),
            (
                json!({ "tool_choice": { "type": "auto", "disable_parallel_tool_use": 1 } }),
                "tool_choice.disable_parallel",
            ),
        ] {
            let message = refused(body.clone());
            assert!(message.contains(part), "{body}: {message}");
        }
    }
}
