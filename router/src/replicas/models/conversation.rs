//! A chat of `lockstep.v1` as a template gets it: its JSON is read and checked here. Knows no template and no dialect.

use crate::refusal::Refusal;
use crate::replicas::models::talk::PARAMETERS;
use checkpoint::{Conversation, TEMPLATE_NAMES};
use dialect::{Tool, ToolChoice, Tools};
use proto::v1;
use proto::v1::content_part::Part;
use proto::v1::tool_choice::Mode;
use serde_json::{Map, Value, json};

/// The most tools of one chat.
pub(super) const TOOLS_MAX: usize = 512;
/// The most bytes of a tool's name.
const NAME_BYTES_MAX: usize = 256;

const MUST_BE_ROLE: &str = "must be system, developer, user, assistant, tool, or another name of letters and digits";
const ONLY_TEXT: &str = "is not supported yet; only `text` is";

/// The roles that every API has. Some templates know others (`ipython`, `observation`); some write nothing for them.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];
/// The most bytes of a role's name.
const ROLE_BYTES_MAX: usize = 64;

/// A chat that was read.
pub(super) struct ParsedChat {
    pub conversation: Conversation,
    /// Empty if no calls are to be read.
    pub tools: Tools,
    pub choice: ToolChoice,
    pub is_parallel: bool,
    pub includes_reasoning: bool,
    /// A template that the client sent.
    pub template: Option<String>,
    /// How much the model is to think, if the client sets it.
    pub effort: Option<String>,
    /// The most tokens of thought, if the client limits them.
    pub thinking_token_budget: Option<u32>,
}

pub(super) fn read(chat: v1::Chat) -> Result<ParsedChat, Refusal> {
    if chat.messages.is_empty() {
        return Err(Refusal::invalid("chat", "there are no messages"));
    }
    let continued = chat.continue_final_message;
    let (shown, tools) = tools(&chat.tools)?;
    let choice = choice(chat.tool_choice.unwrap_or_default(), &tools)?;
    let has_tools = choice != ToolChoice::None && !shown.is_empty();
    let conversation = Conversation {
        messages: chat
            .messages
            .into_iter()
            .enumerate()
            .map(|(i, chat_message)| message(i, chat_message))
            .collect::<Result<_, _>>()?,
        tools: has_tools.then(|| Value::Array(shown)),
        documents: documents(&chat.documents)?,
        variables: variables(&chat.template_variables)?,
        add_generation_prompt: chat.add_generation_prompt.unwrap_or(!continued),
        continue_final_message: continued,
    };
    Ok(ParsedChat {
        conversation,
        tools: if has_tools { tools } else { Tools::default() },
        choice,
        is_parallel: chat.parallel_tool_calls.unwrap_or(true),
        includes_reasoning: chat.include_reasoning.unwrap_or(true),
        template: Some(chat.template).filter(|template| !template.is_empty()),
        effort: Some(chat.reasoning_effort).filter(|effort| !effort.is_empty()),
        thinking_token_budget: chat.thinking_token_budget,
    })
}

/// Returns the tools as a template shows them, and as a dialect reads their calls.
fn tools(texts: &[String]) -> Result<(Vec<Value>, Tools), Refusal> {
    if texts.len() > TOOLS_MAX {
        return Err(Refusal::invalid("tools", format!("has {} tools, more than {TOOLS_MAX}", texts.len())));
    }
    let (mut shown, mut read): (Vec<Value>, Vec<Tool>) = (Vec::new(), Vec::new());
    for (i, text) in texts.iter().enumerate() {
        let value = json_of(&format!("tools[{i}]"), text)?;
        let one = tool(i, &value)?;
        if read.iter().any(|other| other.name == one.name) {
            return Err(Refusal::invalid(format!("tools[{i}].function.name"), "another tool has this name"));
        }
        shown.push(value);
        read.push(one);
    }
    Ok((shown, Tools::new(read)))
}

fn tool(i: usize, value: &Value) -> Result<Tool, Refusal> {
    if value["type"] != "function" {
        return Err(Refusal::invalid(format!("tools[{i}].type"), "must be `function`; no other tools are supported"));
    }
    let function = &value["function"];
    let name = function["name"].as_str().unwrap_or_default();
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        return Err(Refusal::invalid(format!("tools[{i}].function.name"), "must be a name of 1 to 256 bytes"));
    }
    let parameters = function["parameters"].clone();
    if !parameters.is_null() && !parameters.is_object() {
        return Err(Refusal::invalid(format!("tools[{i}].{PARAMETERS}"), "must be a JSON schema, which is an object"));
    }
    let strict = match &function["strict"] {
        Value::Null => false,
        Value::Bool(strict) => *strict,
        _ => return Err(Refusal::invalid(format!("tools[{i}].function.strict"), "must be true or false")),
    };
    Ok(Tool { name: name.to_owned(), parameters, strict })
}

fn choice(requested: v1::ToolChoice, tools: &Tools) -> Result<ToolChoice, Refusal> {
    let is_named = !requested.name.is_empty();
    let needs_tool = requested.mode() == Mode::Required;
    if needs_tool && tools.is_empty() {
        return Err(Refusal::invalid("tool_choice", "needs `tools`, but there are none"));
    }
    if is_named && (!needs_tool || tools.get(&requested.name).is_none()) {
        return Err(Refusal::invalid("tool_choice", "names a function that is not in `tools`"));
    }
    Ok(match requested.mode() {
        Mode::None => ToolChoice::None,
        Mode::Required if is_named => ToolChoice::Named(requested.name),
        Mode::Required => ToolChoice::Required,
        Mode::Auto | Mode::Unspecified => ToolChoice::Auto,
    })
}

/// Whether a template may get this as a role, which it writes between tokens of its own.
fn is_role(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=ROLE_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_plain)
}

/// Whether a message has a role that not every template knows.
pub(super) fn has_other_role(message: &Value) -> bool {
    message["role"].as_str().is_some_and(|role| !ROLES.contains(&role))
}

/// Returns a message in transformers' form: arguments are objects, and absent values have no member. The content always
/// has one, because templates read it without a check.
fn message(i: usize, chat_message: v1::ChatMessage) -> Result<Value, Refusal> {
    let v1::ChatMessage { role, content, tool_calls, tool_call_id, name, reasoning, parts } = chat_message;
    if !is_role(&role) {
        return Err(Refusal::invalid(format!("messages[{i}].role"), MUST_BE_ROLE));
    }
    let calls = tool_calls.into_iter().enumerate().map(|(j, tool_call)| call(i, j, tool_call));
    let calls: Vec<Value> = calls.collect::<Result<_, _>>()?;
    let content = joined(i, content, parts)?;
    let mut message = Map::from_iter([("role".to_owned(), role.into()), ("content".to_owned(), content.into())]);
    let members = [
        ("name", text(name)),
        ("reasoning_content", text(reasoning)),
        ("tool_calls", (!calls.is_empty()).then(|| calls.into())),
        ("tool_call_id", text(tool_call_id)),
    ];
    message.extend(members.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    Ok(Value::Object(message))
}

/// Joins parts of text as lines of one text, as the HTTP APIs do.
fn joined(i: usize, content: String, parts: Vec<v1::ContentPart>) -> Result<String, Refusal> {
    if parts.is_empty() {
        return Ok(content);
    }
    if !content.is_empty() {
        return Err(Refusal::invalid(format!("messages[{i}].parts"), "needs an empty `content`"));
    }
    let text = |(j, part): (usize, v1::ContentPart)| match part.part {
        Some(Part::Text(text)) => Ok(text),
        None => Err(Refusal::invalid(format!("messages[{i}].parts[{j}]"), "must have `text`")),
        Some(Part::Image(_)) => Err(Refusal::invalid(format!("messages[{i}].parts[{j}].image"), ONLY_TEXT)),
        Some(Part::Audio(_)) => Err(Refusal::invalid(format!("messages[{i}].parts[{j}].audio"), ONLY_TEXT)),
    };
    let lines: Vec<String> = parts.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(lines.join("\n"))
}

fn text(text: String) -> Option<Value> {
    Some(text).filter(|text| !text.is_empty()).map(Value::String)
}

fn call(i: usize, j: usize, tool_call: v1::ToolCall) -> Result<Value, Refusal> {
    let field = format!("messages[{i}].tool_calls[{j}].function.arguments");
    let arguments = match tool_call.arguments.trim().is_empty() {
        true => Value::Object(Map::new()),
        false => json_of(&field, &tool_call.arguments)?,
    };
    let function = json!({ "name": tool_call.name, "arguments": arguments });
    Ok(json!({ "id": tool_call.id, "type": "function", "function": function }))
}

fn documents(source: &str) -> Result<Option<Value>, Refusal> {
    if source.is_empty() {
        return Ok(None);
    }
    match json_of("documents", source)? {
        Value::Array(all) if all.iter().all(Value::is_object) => Ok(Some(all.into())),
        _ => Err(Refusal::invalid("documents", "must be a list of objects")),
    }
}

fn variables(source: &str) -> Result<Map<String, Value>, Refusal> {
    const FIELD: &str = "chat_template_kwargs";
    if source.is_empty() {
        return Ok(Map::new());
    }
    let Value::Object(variables) = json_of(FIELD, source)? else {
        return Err(Refusal::invalid(FIELD, "must be an object"));
    };
    match TEMPLATE_NAMES.iter().find(|name| variables.contains_key(**name)) {
        Some(name) => Err(Refusal::invalid(FIELD, format!("`{name}` comes from the request's own fields"))),
        None => Ok(variables),
    }
}

fn json_of(field: &str, text: &str) -> Result<Value, Refusal> {
    serde_json::from_str(text).map_err(|error| Refusal::invalid(field.to_owned(), format!("is not JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> v1::ChatMessage {
        v1::ChatMessage { role: "user".into(), content: "Hi".into(), ..v1::ChatMessage::default() }
    }

    fn refused(change: impl FnOnce(&mut v1::Chat)) -> String {
        let mut chat = v1::Chat { messages: vec![user()], ..v1::Chat::default() };
        change(&mut chat);
        read(chat).err().unwrap().to_string()
    }

    fn function(name: &str) -> String {
        json!({ "type": "function", "function": { "name": name } }).to_string()
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |change: fn(&mut v1::Chat), part: &str| {
            let error = refused(change);
            assert!(error.contains(part), "{error}, expected {part}");
        };
        check(|chat| chat.messages.clear(), "no messages");
        check(|chat| chat.tools = vec!["{".into()], "tools[0]: is not JSON");
        check(|chat| chat.tools = vec![r#"{"type": "retrieval"}"#.into()], "tools[0].type");
        check(|chat| chat.tools = vec![function("a"), function("")], "tools[1].function.name");
        check(|chat| chat.tools = vec![function("a"), function("a")], "another tool");
        check(|chat| chat.tools = vec![function("a"); TOOLS_MAX + 1], "more than 512");
        let named = |name: &str| v1::ToolChoice { mode: Mode::Required.into(), name: name.into() };
        assert!(refused(|chat| chat.tool_choice = Some(named(""))).contains("needs `tools`"));
        let other = refused(|chat| (chat.tools, chat.tool_choice) = (vec![function("a")], Some(named("b"))));
        assert!(other.contains("not in `tools`"), "{other}");
        check(|chat| chat.template_variables = "[1]".into(), "chat_template_kwargs: must be an object");
        check(|chat| chat.template_variables = r#"{"tools": []}"#.into(), "`tools` comes from");
        check(|chat| chat.documents = "[1]".into(), "documents");
        let call = v1::ToolCall { id: "1".into(), name: "f".into(), arguments: "{\"a\":".into() };
        let error = refused(|chat| chat.messages[0].tool_calls = vec![call]);
        assert!(error.contains("messages[0].tool_calls[0].function.arguments: is not JSON"), "{error}");
    }

    #[test]
    fn arguments_are_objects_and_absent_members_are_absent() {
        let call = v1::ToolCall { id: "a1".into(), name: "f".into(), arguments: "{\"x\": 1}".into() };
        let chat_message =
            v1::ChatMessage { role: "assistant".into(), tool_calls: vec![call], ..v1::ChatMessage::default() };
        let function = json!({ "name": "f", "arguments": { "x": 1 } });
        let expected = json!({
            "role": "assistant", "content": "",
            "tool_calls": [{ "id": "a1", "type": "function", "function": function }],
        });
        assert_eq!(message(0, chat_message).unwrap(), expected);
        assert_eq!(message(0, user()).unwrap(), json!({ "role": "user", "content": "Hi" }));
    }

    #[test]
    fn parts_of_text_are_lines_of_one_text() {
        let part = |part: Part| v1::ContentPart { part: Some(part) };
        let of = |parts: Vec<v1::ContentPart>| v1::ChatMessage { content: String::new(), parts, ..user() };
        let texts = vec![part(Part::Text("a".into())), part(Part::Text(String::new())), part(Part::Text("b".into()))];
        assert_eq!(message(0, of(texts.clone())).unwrap(), json!({ "role": "user", "content": "a\n\nb" }));
        let image = || part(Part::Image(v1::content_part::Media::default()));
        let audio = || part(Part::Audio(v1::content_part::Media::default()));
        let both = v1::ChatMessage { parts: texts.clone(), ..user() };
        for (refused, expect) in [
            (of(vec![texts[0].clone(), image()]), "messages[2].parts[1].image: is not supported yet; only `text` is"),
            (of(vec![audio()]), "messages[2].parts[0].audio: is not supported yet; only `text` is"),
            (of(vec![v1::ContentPart::default()]), "messages[2].parts[0]: must have `text`"),
            (both, "messages[2].parts: needs an empty `content`"),
        ] {
            assert_eq!(message(2, refused).unwrap_err().to_string(), expect);
        }
    }

    #[test]
    fn tool_choice_none_hides_the_tools() {
        let tool_choice = Some(v1::ToolChoice { mode: Mode::None.into(), name: String::new() });
        let chat = v1::Chat { messages: vec![user()], tools: vec![function("a")], tool_choice, ..v1::Chat::default() };
        let read = read(chat).unwrap();
        assert!(read.conversation.tools.is_none() && read.tools.is_empty());
    }
}
