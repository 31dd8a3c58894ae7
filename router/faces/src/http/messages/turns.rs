//! A conversation in Anthropic's format: system prompt, turns, and the blocks of a turn. Has no knowledge of templates.

use crate::http::fields::{Fields, wrong_type};
use proto::v1;
use router::refusal::Refusal;
use serde_json::Value;
use std::collections::HashMap;

/// How many characters of an unknown kind a refusal repeats.
const KIND_CHARS_MAX: usize = 40;

/// Some clients begin their system prompt with a line for Anthropic's accounting, which differs in each request. It has
/// no meaning for a model, and as the first line it would leave nothing to share in the prefix cache.
const BILLING: &str = "x-anthropic-billing-header:";

/// Reads the system prompt, a text or blocks of text. None if it is empty.
pub fn system(content: Option<Value>) -> Result<Option<v1::ChatMessage>, Refusal> {
    let mut texts = match content {
        None => return Ok(None),
        Some(Value::Array(blocks)) => blocks
            .into_iter()
            .enumerate()
            .map(|(i, block)| text_of(&format!("system[{i}]"), &mut object(format!("system[{i}]"), block)?))
            .collect::<Result<Vec<_>, _>>()?,
        Some(Value::String(text)) => vec![text],
        Some(other) => return Err(wrong_type("system", "a string or a list of blocks", &other)),
    };
    if texts.first().is_some_and(|first| first.starts_with(BILLING)) {
        let first = texts.remove(0);
        let rest = first.split_once('\n').map(|(_, rest)| rest.trim_start_matches('\n').to_owned());
        texts.splice(..0, rest.filter(|rest| !rest.is_empty()));
    }
    Ok((!texts.is_empty()).then(|| message("system", texts)))
}

/// Converts turns to messages. Tool results become messages of their own, and consecutive turns of one role become one
/// message, as in Anthropic's API.
pub fn messages(list: Vec<Fields>) -> Result<Vec<v1::ChatMessage>, Refusal> {
    let mut turns = MessageTurns::default();
    for (i, mut turn) in list.into_iter().enumerate() {
        let at = format!("messages[{i}]");
        let role = turn.take("role");
        let blocks = blocks(format!("{at}.content"), turn.take("content"))?;
        match role.as_ref().and_then(Value::as_str) {
            Some("user") => turns.add_user(&at, blocks)?,
            Some("assistant") => turns.add_assistant(&at, blocks)?,
            Some("system") => turns.add_system(&at, blocks)?,
            _ => return Err(Refusal::invalid(format!("{at}.role"), "must be user, assistant or system")),
        }
    }
    Ok(turns.messages)
}

/// Makes an assistant's turn at the end the beginning of the answer.
pub fn continue_last_turn(chat: v1::Chat) -> Result<v1::Chat, Refusal> {
    match chat.messages.last() {
        Some(last) if last.role == "assistant" && !last.tool_calls.is_empty() => {
            Err(Refusal::invalid("messages", "the last one has tool_use blocks, but their results are missing"))
        }
        last => {
            let continue_final_message = last.is_some_and(|last| last.role == "assistant");
            Ok(v1::Chat { continue_final_message, ..chat })
        }
    }
}

#[derive(Default)]
struct MessageTurns {
    messages: Vec<v1::ChatMessage>,
    /// The tools' names by the ids of their calls.
    called: HashMap<String, String>,
}

impl MessageTurns {
    fn add_user(&mut self, at: &str, blocks: Vec<Fields>) -> Result<(), Refusal> {
        let (mut texts, is_empty) = (Vec::new(), blocks.is_empty());
        let mut has_results = false;
        for (j, mut block) in blocks.into_iter().enumerate() {
            let at = format!("{at}.content[{j}]");
            if kind(&at, &block)? == "tool_result" {
                self.add_text("user", std::mem::take(&mut texts));
                self.add_tool_result(&at, block)?;
                has_results = true;
            } else {
                texts.push(text_of(&at, &mut block)?);
            }
        }
        if is_empty || !texts.is_empty() || !has_results {
            self.add(message("user", texts));
        }
        Ok(())
    }

    /// Adds a tool result. A result that is an error is marked in its text, because templates have no other place for
    /// it.
    fn add_tool_result(&mut self, at: &str, mut block: Fields) -> Result<(), Refusal> {
        let id = string(format!("{at}.tool_use_id"), block.take("tool_use_id"))?;
        let Some(name) = self.called.get(&id).cloned() else {
            return Err(Refusal::invalid(
                format!("{at}.tool_use_id"),
                "does not match the id of an earlier tool_use block",
            ));
        };
        let is_error = match block.take("is_error") {
            None => false,
            Some(Value::Bool(is_error)) => is_error,
            Some(other) => return Err(wrong_type(format!("{at}.is_error"), "true or false", &other)),
        };
        let parts = match block.take("content") {
            None => Vec::new(),
            content => blocks_of_text(&format!("{at}.content"), content)?,
        };
        let content = if is_error { format!("Error: {}", parts.join("\n")) } else { parts.join("\n") };
        self.messages.push(v1::ChatMessage {
            role: "tool".to_owned(),
            content,
            tool_call_id: id,
            name,
            ..v1::ChatMessage::default()
        });
        Ok(())
    }

    fn add_assistant(&mut self, at: &str, blocks: Vec<Fields>) -> Result<(), Refusal> {
        let (mut texts, mut thoughts, mut tool_calls) = (Vec::new(), Vec::new(), Vec::new());
        for (j, mut block) in blocks.into_iter().enumerate() {
            let at = format!("{at}.content[{j}]");
            match kind(&at, &block)?.as_str() {
                "thinking" => thoughts.push(string(format!("{at}.thinking"), block.take("thinking"))?),
                // Only Anthropic can decrypt it.
                "redacted_thinking" => {}
                "tool_use" => tool_calls.push(self.call(&at, block)?),
                _ => texts.push(text_of(&at, &mut block)?),
            }
        }
        let reasoning = thoughts.join("\n");
        self.add(v1::ChatMessage { tool_calls, reasoning, ..message("assistant", texts) });
        Ok(())
    }

    fn call(&mut self, at: &str, mut block: Fields) -> Result<v1::ToolCall, Refusal> {
        let id = string(format!("{at}.id"), block.take("id"))?;
        let name = string(format!("{at}.name"), block.take("name"))?;
        let arguments = match block.take("input") {
            Some(input @ Value::Object(_)) => input.to_string(),
            Some(other) => return Err(wrong_type(format!("{at}.input"), "an object", &other)),
            None => return Err(Refusal::invalid(format!("{at}.input"), "is missing")),
        };
        self.called.insert(id.clone(), name.clone());
        Ok(v1::ToolCall { id, name, arguments })
    }

    fn add_system(&mut self, at: &str, blocks: Vec<Fields>) -> Result<(), Refusal> {
        let text = |(j, mut block): (usize, Fields)| text_of(&format!("{at}.content[{j}]"), &mut block);
        let texts = blocks.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
        self.messages.push(message("system", texts));
        Ok(())
    }

    fn add_text(&mut self, role: &str, texts: Vec<String>) {
        if !texts.is_empty() {
            self.add(message(role, texts));
        }
    }

    fn add(&mut self, next: v1::ChatMessage) {
        match self.messages.last_mut() {
            Some(last) if last.role == next.role && last.tool_calls.is_empty() => {
                append(&mut last.content, &next.content);
                append(&mut last.reasoning, &next.reasoning);
                last.tool_calls = next.tool_calls;
            }
            _ => self.messages.push(next),
        }
    }
}

fn append(to: &mut String, more: &str) {
    if !to.is_empty() && !more.is_empty() {
        to.push('\n');
    }
    to.push_str(more);
}

fn message(role: &str, texts: Vec<String>) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content: texts.join("\n"), ..v1::ChatMessage::default() }
}

/// Returns a text as one block, or the blocks unchanged.
fn blocks(field: String, content: Option<Value>) -> Result<Vec<Fields>, Refusal> {
    match content {
        Some(text @ Value::String(_)) => {
            let block = [("type".to_owned(), "text".into()), ("text".to_owned(), text)];
            Ok(vec![Fields::of(block.into_iter().collect())])
        }
        Some(Value::Array(list)) => {
            list.into_iter().enumerate().map(|(j, block)| object(format!("{field}[{j}]"), block)).collect()
        }
        None => Err(Refusal::invalid(field, "is missing")),
        Some(other) => Err(wrong_type(field, "a string or a list of blocks", &other)),
    }
}

fn blocks_of_text(field: &str, content: Option<Value>) -> Result<Vec<String>, Refusal> {
    let blocks = blocks(field.to_owned(), content)?.into_iter().enumerate();
    blocks.map(|(k, mut block)| text_of(&format!("{field}[{k}]"), &mut block)).collect()
}

fn object(field: String, value: Value) -> Result<Fields, Refusal> {
    match value {
        Value::Object(members) => Ok(Fields::of(members)),
        other => Err(wrong_type(field, "an object", &other)),
    }
}

/// Returns the kind of a block, without taking it.
fn kind(at: &str, block: &Fields) -> Result<String, Refusal> {
    match block.get("type") {
        Some(Value::String(kind)) => Ok(kind.clone()),
        None => Err(Refusal::invalid(format!("{at}.type"), "is missing")),
        Some(other) => Err(wrong_type(format!("{at}.type"), "a string", other)),
    }
}

fn text_of(at: &str, block: &mut Fields) -> Result<String, Refusal> {
    let kind = kind(at, block)?;
    if kind != "text" {
        let kind: String = kind.chars().take(KIND_CHARS_MAX).collect();
        return Err(Refusal::invalid(format!("{at}.type"), format!("`{kind}` is not supported here")));
    }
    string(format!("{at}.text"), block.take("text"))
}

fn string(field: String, value: Option<Value>) -> Result<String, Refusal> {
    match value {
        Some(Value::String(text)) => Ok(text),
        None => Err(Refusal::invalid(field, "is missing")),
        Some(other) => Err(wrong_type(field, "a string", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(list: Value) -> Result<Vec<v1::ChatMessage>, Refusal> {
        let Value::Array(list) = list else { panic!("no list") };
        messages(list.into_iter().map(|one| object("messages".into(), one).unwrap()).collect())
    }

    fn text(text: &str) -> Value {
        json!({ "type": "text", "text": text, "cache_control": { "type": "ephemeral" } })
    }

    fn role_and_content(message: &v1::ChatMessage) -> (&str, &str) {
        (&message.role, &message.content)
    }

    #[test]
    fn blocks_become_messages_in_their_order() {
        let call = json!({ "type": "tool_use", "id": "t1", "name": "look", "input": { "at": 1 } });
        let other = json!({ "type": "tool_use", "id": "t2", "name": "hear", "input": {} });
        let thought = json!({ "type": "thinking", "thinking": "hm", "signature": "x" });
        let redacted = json!({ "type": "redacted_thinking", "data": "AAAA" });
        let failed = json!({ "type": "tool_result", "tool_use_id": "t2", "content": "deaf", "is_error": true });
        let results = json!([
            { "type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")] },
            failed,
            text("Go on."),
        ]);
        let result = read(json!([
            { "role": "user", "content": "Hi" },
            { "role": "user", "content": [text("you"), text("there")] },
            { "role": "assistant", "content": [thought, redacted, text("I look."), call, other] },
            { "role": "user", "content": results },
            { "role": "assistant", "content": "Seen." },
            { "role": "assistant", "content": [] },
            { "role": "system", "content": "Be brief." },
        ]));
        let messages = result.unwrap();
        let expected = [
            ("user", "Hi\nyou\nthere"),
            ("assistant", "I look."),
            ("tool", "a\nb"),
            ("tool", "Error: deaf"),
            ("user", "Go on."),
            ("assistant", "Seen."),
            ("system", "Be brief."),
        ];
        assert_eq!(messages.iter().map(role_and_content).collect::<Vec<_>>(), expected);
        assert_eq!(messages[1].reasoning, "hm");
        let calls: Vec<_> =
            messages[1].tool_calls.iter().map(|call| (&*call.id, &*call.name, &*call.arguments)).collect();
        assert_eq!(calls, [("t1", "look", "{\"at\":1}"), ("t2", "hear", "{}")]);
        let answered = [2, 3].map(|i: usize| (&*messages[i].tool_call_id, &*messages[i].name));
        assert_eq!(answered, [("t1", "look"), ("t2", "hear")]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let user = |block: Value| json!([{ "role": "user", "content": [block] }]);
        let assistant = |block: Value| json!([{ "role": "assistant", "content": [block] }]);
        for (list, field) in [
            (json!([{ "role": "tool", "content": "a" }]), "messages[0].role"),
            (json!([{ "role": "user" }]), "messages[0].content"),
            (json!([{ "role": "user", "content": [5] }]), "messages[0].content[0]"),
            (user(json!({ "text": "a" })), "messages[0].content[0].type"),
            (user(json!({ "type": "text" })), "messages[0].content[0].text"),
            (user(json!({ "type": "image" })), "messages[0].content[0].type"),
            (user(json!({ "type": "tool_use" })), "messages[0].content[0].type"),
            (user(json!({ "type": "tool_result", "tool_use_id": "a" })), "messages[0].content[0].tool_use_id"),
            (assistant(json!({ "type": "server_tool_use" })), "messages[0].content[0].type"),
            (assistant(json!({ "type": "thinking" })), "messages[0].content[0].thinking"),
            (assistant(json!({ "type": "tool_use", "id": 1 })), "messages[0].content[0].id"),
            (
                assistant(json!({ "type": "tool_use", "id": "a", "name": "f", "input": "{}" })),
                "messages[0].content[0].input",
            ),
        ] {
            match read(list.clone()) {
                Err(Refusal::Invalid { field: named, .. }) => assert_eq!(named, field, "{list}"),
                _ => panic!("{list} was taken"),
            }
        }
    }

    #[test]
    fn a_line_for_accounting_is_dropped_at_the_head_alone() {
        let check = |content: Value, expected: Option<&str>| {
            let system_message = system(Some(content.clone())).unwrap();
            assert_eq!(system_message.as_ref().map(|message| &*message.content), expected, "{content}");
        };
        let billing = "x-anthropic-billing-header: cc_version=2.1.7; cch=0a1b2;";
        check(json!([text(billing), text("You are"), text("brief.")]), Some("You are\nbrief."));
        check(json!([text(&format!("{billing}\n\nYou are")), text("brief.")]), Some("You are\nbrief."));
        check(json!(format!("{billing}\nYou are")), Some("You are"));
        check(json!([text(billing)]), None);
        check(json!([]), None);
        check(json!(""), Some(""));
        check(json!([text("You are"), text(billing)]), Some(&format!("You are\n{billing}")));
    }
}
