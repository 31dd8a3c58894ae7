//! Tools of the kind `custom`, whose calls have a text instead of arguments. The model calls a strict function with one
//! argument, and the text is read out of it while it grows. Has no knowledge of items and events.

use crate::http::fields::wrong_type;
use dialect::StringDecoder;
use proto::v1;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

pub const CUSTOM: &str = "custom";

/// The only argument of the function.
const INPUT: &str = "input";
const NO_LARK: &str = "`lark` is not supported: the text is part of a JSON string; `regex` is supported";

/// Returns the name of a tool, which is one of these members.
pub fn tool_name(field: &str, tool: &Map<String, Value>) -> Result<String, Refusal> {
    match tool.get("name").and_then(Value::as_str) {
        Some(name) if !name.is_empty() => Ok(name.to_owned()),
        _ => Err(Refusal::invalid(format!("{field}.name"), "must be a name")),
    }
}

/// Returns a chat's tool for the function that stands for this custom tool.
pub fn chat_tool(field: &str, name: &str, tool: &Map<String, Value>) -> Result<Value, Refusal> {
    let parameters = parameters(&format!("{field}.format"), tool.get("format"))?;
    let mut function = Map::from_iter([("name".to_owned(), Value::from(name))]);
    function.extend(tool.get_key_value("description").map(|(key, value)| (key.clone(), value.clone())));
    function.extend([("parameters".to_owned(), parameters), ("strict".to_owned(), true.into())]);
    Ok(json!({ "type": "function", "function": function }))
}

/// Returns the parameters of the function for a tool with this format.
fn parameters(field: &str, format: Option<&Value>) -> Result<Value, Refusal> {
    let mut text = json!({ "type": "string" });
    if let Some(pattern) = format.map(|format| pattern(field, format)).transpose()?.flatten() {
        text["pattern"] = format!("^(?:{pattern})$").into();
    }
    Ok(json!({
        "type": "object", "properties": { INPUT: text }, "required": [INPUT], "additionalProperties": false,
    }))
}

/// Returns the regular expression that a format requires; None for free text.
fn pattern(field: &str, format: &Value) -> Result<Option<String>, Refusal> {
    match format["type"].as_str() {
        None if format.is_null() => Ok(None),
        Some("text") => Ok(None),
        // A chat's format has an object of its own for the grammar.
        Some("grammar") if format["grammar"].is_object() => {
            regex(&format!("{field}.grammar"), &format["grammar"]).map(Some)
        }
        Some("grammar") => regex(field, format).map(Some),
        _ => Err(Refusal::invalid(format!("{field}.type"), "must be `text` or `grammar`")),
    }
}

fn regex(field: &str, grammar: &Value) -> Result<String, Refusal> {
    match (grammar["syntax"].as_str(), &grammar["definition"]) {
        (Some("regex"), Value::String(pattern)) => Ok(pattern.clone()),
        (Some("regex"), other) => Err(wrong_type(format!("{field}.definition"), "a regular expression", other)),
        (Some("lark"), _) => Err(Refusal::invalid(format!("{field}.syntax"), NO_LARK)),
        _ => Err(Refusal::invalid(format!("{field}.syntax"), "must be `regex`")),
    }
}

/// Returns the arguments of a call with this text.
pub fn arguments(input: &str) -> String {
    Value::Object(Map::from_iter([(INPUT.to_owned(), input.into())])).to_string()
}

/// Reads the text out of arguments that arrive in parts.
#[derive(Default)]
pub struct InputReader {
    n_quotes: usize,
    decoder: StringDecoder,
}

impl InputReader {
    /// Two quotes are around the argument's name. The text is between the third and the fourth.
    const OPENING_QUOTE: usize = 3;

    /// Takes the next part of the arguments, and returns the text in it.
    pub fn push(&mut self, mut part: &str) -> String {
        while self.n_quotes < Self::OPENING_QUOTE {
            let Some((_, rest)) = part.split_once('"') else { return String::new() };
            (self.n_quotes, part) = (self.n_quotes + 1, rest);
        }
        let mut text = String::new();
        if self.n_quotes == Self::OPENING_QUOTE && self.decoder.read(part, &mut text).1 {
            self.n_quotes += 1;
        }
        text
    }
}

/// The calls of custom tools in the answers of a chat.
#[derive(Default)]
pub struct CustomCalls {
    /// The tools' names.
    names: HashSet<String>,
    /// The calls that have begun, by choice and index.
    readers: HashMap<(u32, u32), InputReader>,
}

impl CustomCalls {
    pub fn new(names: HashSet<String>) -> CustomCalls {
        CustomCalls { names, readers: HashMap::new() }
    }

    /// Returns the text in a part of a call; None for a call of a function.
    pub fn next_input(&mut self, choice: u32, part: &v1::ToolCallDelta) -> Option<String> {
        let key = (choice, part.index);
        // Only a call's first part has its name.
        if self.names.contains(&part.name) {
            self.readers.insert(key, InputReader::default());
        }
        self.readers.get_mut(&key).map(|reader| reader.push(&part.arguments))
    }

    /// Returns the text of a whole call; None for a call of a function.
    pub fn whole_input(&self, call: &v1::ToolCall) -> Option<String> {
        self.names.contains(&call.name).then(|| InputReader::default().push(&call.arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_the_same_in_any_parts() {
        for text in ["", "plain", "a \"b\"\\ \n\t/", "é ☃ 😀", "\u{1}\u{7f}", "{\"input\": \"x\"}"] {
            let written = arguments(text);
            let escaped: String = written.chars().map(escape).collect();
            for arguments in [written.clone(), written.replace(':', " : "), escaped] {
                let letters: Vec<char> = arguments.chars().collect();
                for n in [1, 2, 3, 5, letters.len()] {
                    let mut reader = InputReader::default();
                    let read: String =
                        letters.chunks(n).map(|part| reader.push(&part.iter().collect::<String>())).collect();
                    let expected = if arguments.contains(" : ") { text.replace(':', " : ") } else { text.to_owned() };
                    assert_eq!(read, expected, "{arguments} in parts of {n}");
                }
            }
        }
    }

    #[test]
    fn half_a_pair_stays_as_it_is_written() {
        for (arguments, text) in [
            ("{\"input\": \"a\\ud83db\"}", "a\\ud83db"),
            ("{\"input\": \"\\ud83d\\nb\"}", "\\ud83d\nb"),
            ("{\"input\": \"\\udc00b\"}", "\\udc00b"),
        ] {
            let letters: Vec<char> = arguments.chars().collect();
            for n in [1, letters.len()] {
                let mut reader = InputReader::default();
                let read: String =
                    letters.chunks(n).map(|part| reader.push(&part.iter().collect::<String>())).collect();
                assert_eq!(read, text, "in parts of {n}");
            }
        }
    }

    /// Writes letters beyond ASCII as escapes, in pairs where one is not enough.
    fn escape(letter: char) -> String {
        if letter.is_ascii() {
            return letter.to_string();
        }
        letter.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
    }

    #[test]
    fn a_regular_expression_is_a_pattern_of_the_whole_text() {
        let format = json!({ "type": "grammar", "syntax": "regex", "definition": "a|b" });
        let parameters = parameters("tools[0].format", Some(&format)).unwrap();
        assert_eq!(parameters["properties"]["input"]["pattern"], "^(?:a|b)$");
        assert_eq!(super::parameters("tools[0].format", None).unwrap()["properties"]["input"]["pattern"], Value::Null);
        for (format, named) in [
            (json!({ "type": "grammar", "syntax": "lark", "definition": "start: A" }), "tools[0].format.syntax"),
            (json!({ "type": "grammar", "syntax": "regex" }), "tools[0].format.definition"),
            (json!({ "type": "json" }), "tools[0].format.type"),
            (json!({ "type": "grammar", "grammar": { "syntax": "ebnf" } }), "tools[0].format.grammar.syntax"),
        ] {
            match super::parameters("tools[0].format", Some(&format)) {
                Err(Refusal::Invalid { field, .. }) => assert_eq!(field, named),
                other => panic!("{format}: {other:?}"),
            }
        }
    }
}
