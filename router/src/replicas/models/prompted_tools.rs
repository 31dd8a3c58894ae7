//! Tools for templates without support for them: a text of our own describes the tools, and calls and their answers
//! become plain messages. Knows JSON, and neither templates nor how an answer is read.

use checkpoint::Conversation;
use serde_json::{Value, json};

const BEFORE: &str = "You can call functions. Each of these lines describes one, in JSON:";
const BEHIND: &str = "To call a function, write a JSON object with its name and its arguments, and nothing else:\n\
     {\"name\": \"the function's name\", \"arguments\": {\"an argument's name\": \"its value\"}}\n\
     You get the result in the next message. If no function is of use, answer in plain text.";

/// Returns the chat as a template without tools can show it. With `is_in_system` the system message describes the
/// tools, or else the first message of all begins with them.
pub(super) fn without_tools(chat: &Conversation, is_in_system: bool) -> Conversation {
    let mut messages: Vec<Value> = chat.messages.iter().map(plain_message).collect();
    if let Some(text) = chat.tools.as_ref().and_then(Value::as_array).map(|tools| instructions(tools)) {
        insert_instructions(&mut messages, text, is_in_system);
    }
    Conversation { messages, tools: None, ..chat.clone() }
}

/// Whether something in it would be lost in a template without tools.
pub(super) fn is_needed(chat: &Conversation) -> bool {
    let is_foreign = |message: &Value| message["role"] == "tool" || message.get("tool_calls").is_some();
    chat.tools.is_some() || chat.messages.iter().any(is_foreign)
}

fn instructions(tools: &[Value]) -> String {
    let lines: Vec<String> = tools.iter().map(|tool| tool["function"].to_string()).collect();
    format!("{BEFORE}\n{}\n\n{BEHIND}", lines.join("\n"))
}

fn insert_instructions(messages: &mut Vec<Value>, text: String, is_in_system: bool) {
    match messages.first_mut() {
        Some(first) if !is_in_system || first["role"] == "system" => {
            let content = first["content"].as_str().unwrap_or_default();
            first["content"] = format!("{text}\n\n{content}").into();
        }
        _ => messages.insert(0, json!({ "role": "system", "content": text })),
    }
}

fn plain_message(message: &Value) -> Value {
    let content = message["content"].as_str().unwrap_or_default();
    if message["role"] == "tool" {
        let name = message["name"].as_str().map_or_else(String::new, |name| format!(" of {name}"));
        return json!({ "role": "user", "content": format!("The result{name}:\n{content}") });
    }
    let Some(calls) = message["tool_calls"].as_array() else { return message.clone() };
    let mut lines: Vec<String> = Some(content).filter(|text| !text.is_empty()).map(str::to_owned).into_iter().collect();
    lines.extend(calls.iter().map(|call| call["function"].to_string()));
    let mut plain = message.clone();
    if let Some(members) = plain.as_object_mut() {
        members.remove("tool_calls");
        members.insert("content".to_owned(), lines.join("\n").into());
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_calls_and_results_become_text() {
        let function = json!({ "name": "f", "arguments": { "x": 1 } });
        let chat = Conversation {
            tools: Some(json!([{ "type": "function", "function": { "name": "f" } }])),
            ..Conversation::new(vec![
                json!({ "role": "user", "content": "Hi" }),
                json!({ "role": "assistant", "tool_calls": [{ "id": "1", "function": function }] }),
                json!({ "role": "tool", "name": "f", "content": "2" }),
            ])
        };
        assert!(is_needed(&chat) && !is_needed(&Conversation::new(chat.messages[..1].to_vec())));
        let plain_chat = without_tools(&chat, true);
        assert!(plain_chat.tools.is_none());
        assert_eq!(plain_chat.messages[0]["role"], "system");
        assert!(plain_chat.messages[0]["content"].as_str().unwrap().contains("\n{\"name\":\"f\"}\n"));
        assert_eq!(plain_chat.messages[1], chat.messages[0]);
        let called = json!({ "role": "assistant", "content": "{\"name\":\"f\",\"arguments\":{\"x\":1}}" });
        assert_eq!(plain_chat.messages[2], called);
        assert_eq!(plain_chat.messages[3], json!({ "role": "user", "content": "The result of f:\n2" }));
        // A template without system messages has them before the first of the user's.
        let folded = without_tools(&chat, false);
        assert_eq!((folded.messages.len(), &folded.messages[0]["role"]), (3, &json!("user")));
        assert!(folded.messages[0]["content"].as_str().unwrap().ends_with("\n\nHi"));
    }
}
