//! A chat in the form that a template receives: messages, tools and variables as JSON. Prepares them as transformers
//! does, but knows nothing of a template's language.

use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// Names that a template reserves, so that no variable of a client may use them.
pub const TEMPLATE_NAMES: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "strftime_now"];
/// Marks the end of the final message during rendering: the prompt ends where it is found.
const CONTINUE_HERE: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// The names under which templates look for the model's thought.
const THOUGHT_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A chat, with all variables that a template may read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// Objects, as transformers takes them: the arguments of calls are objects too.
    pub messages: Vec<Value>,
    /// A list of tools, as OpenAI's API writes them.
    pub tools: Option<Value>,
    pub documents: Option<Value>,
    /// Further variables.
    pub variables: Map<String, Value>,
    /// Whether the prompt ends where an assistant's turn begins.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends with the final message, which the answer continues.
    pub continue_final_message: bool,
}

impl Conversation {
    /// A chat that the assistant is to answer.
    pub fn new(messages: Vec<Value>) -> Conversation {
        Conversation { messages, add_generation_prompt: true, ..Conversation::default() }
    }

    /// Returns the messages in a template's view: without members that are null, and with the thought under each of the
    /// names that templates use.
    pub(crate) fn template_messages(&self) -> Result<Vec<Value>> {
        let mut messages: Vec<Value> = self.messages.iter().map(template_message).collect();
        if self.continue_final_message {
            self.check_continued()?;
            let last = messages.last_mut().and_then(text_of).ok_or_else(nothing_to_continue)?;
            last.push_str(CONTINUE_HERE);
        }
        Ok(messages)
    }

    fn check_continued(&self) -> Result<()> {
        if self.add_generation_prompt {
            let both = "continue_final_message and add_generation_prompt exclude each other";
            return Err(Error::Template(both.to_owned()));
        }
        Ok(())
    }

    /// Cuts the prompt that was rendered from the messages as `seen`.
    pub(crate) fn cut_at_continuation(&self, mut rendered: String) -> Result<String> {
        if !self.continue_final_message {
            return Ok(rendered);
        }
        let mut last = self.messages.last().cloned().ok_or_else(nothing_to_continue)?;
        let last = text_of(&mut last).ok_or_else(nothing_to_continue)?;
        let at = rendered.rfind(CONTINUE_HERE.trim_end()).filter(|_| rendered.contains(last.trim()));
        let at = at.ok_or_else(|| Error::Template("it does not render the final message unchanged".to_owned()))?;
        // A template that trims messages has also trimmed the mark's own space.
        let keeps_space = rendered[at..].starts_with(CONTINUE_HERE);
        rendered.truncate(at);
        if !keeps_space {
            rendered.truncate(rendered.trim_end().len());
        }
        Ok(rendered)
    }
}

fn nothing_to_continue() -> Error {
    Error::Template("continue_final_message is set, but the final message has no text".to_owned())
}

/// Returns the text of a message, or the last text among its parts.
fn text_of(message: &mut Value) -> Option<&mut String> {
    let content = match message.get_mut("content")? {
        Value::Array(parts) => parts.iter_mut().rev().find_map(|part| part.get_mut("text"))?,
        content => content,
    };
    match content {
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn template_message(message: &Value) -> Value {
    let Value::Object(members) = message else { return message.clone() };
    let given = || members.iter().filter(|(_, value)| !value.is_null());
    let thought = THOUGHT_FIELDS.iter().find_map(|name| given().find(|(given, _)| given == name));
    // A template may show a whole message as JSON: members are in transformers' order.
    let thinking = thought.map(|(_, thought)| ("thinking".to_owned(), thought.clone()));
    let mut seen: Map<String, Value> = thinking.into_iter().collect();
    seen.extend(given().map(|(name, value)| (name.clone(), value.clone())));
    if let Some((_, thought)) = thought {
        seen.insert("reasoning_content".to_owned(), thought.clone());
    }
    Value::Object(seen)
}
