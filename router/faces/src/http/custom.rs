//! Tools of the kind `custom`, whose calls have a text instead of arguments. The model calls a strict function with one
//! argument, and the text is read out of it while it grows. Has no knowledge of items and events.

use crate::http::fields::wrong_type;
use crate::http::single::invalid;
use router::refusal::Refusal;
use serde_json::{Map, Value, json};

/// The only argument of the function.
const INPUT: &str = "input";
const NO_LARK: &str = "`lark` is not supported: the text is part of a JSON string; `regex` is supported";

/// Returns the parameters of the function for a tool with this format.
pub fn parameters(field: &str, format: Option<&Value>) -> Result<Value, Refusal> {
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
        Some("grammar") => match (format["syntax"].as_str(), &format["definition"]) {
            (Some("regex"), Value::String(pattern)) => Ok(Some(pattern.clone())),
            (Some("regex"), other) => Err(wrong_type(format!("{field}.definition"), "a regular expression", other)),
            (Some("lark"), _) => Err(invalid(format!("{field}.syntax"), NO_LARK)),
            _ => Err(invalid(format!("{field}.syntax"), "must be `regex`")),
        },
        _ => Err(invalid(format!("{field}.type"), "must be `text` or `grammar`")),
    }
}

/// Returns the arguments of a call with this text.
pub fn arguments(input: &str) -> String {
    Value::Object(Map::from_iter([(INPUT.to_owned(), input.into())])).to_string()
}

/// Reads the text out of arguments that arrive in parts.
#[derive(Default)]
pub struct InputReader {
    place: TextPart,
    /// A part that may continue: an escape, or half of a pair of them.
    held: String,
}

#[derive(Default, PartialEq)]
enum TextPart {
    #[default]
    Before,
    Within,
    After,
}

impl InputReader {
    /// Takes the next part of the arguments, and returns the text in it.
    pub fn push(&mut self, part: &str) -> String {
        let mut text = String::new();
        for letter in part.chars() {
            match self.place {
                TextPart::Before => self.look_for_text(letter),
                TextPart::Within => self.read_letter(letter, &mut text),
                TextPart::After => {}
            }
        }
        text
    }

    /// The text begins at the third quotation mark: two are around the argument's name.
    fn look_for_text(&mut self, letter: char) {
        if letter == '"' {
            self.held.push(letter);
        }
        if self.held.len() == 3 {
            self.held.clear();
            self.place = TextPart::Within;
        }
    }

    fn read_letter(&mut self, letter: char, text: &mut String) {
        match (self.held.is_empty(), letter) {
            (true, '"') => self.place = TextPart::After,
            (true, '\\') => self.held.push(letter),
            (true, _) => text.push(letter),
            (false, _) => self.read_escape(letter, text),
        }
    }

    fn read_escape(&mut self, letter: char, text: &mut String) {
        // The first half of a pair needs the second one behind it.
        let is_alone = match self.held.len() {
            6 => letter != '\\',
            7 => letter != 'u',
            _ => false,
        };
        if is_alone {
            text.push(char::REPLACEMENT_CHARACTER);
            self.held = self.held.split_off(6);
        }
        if self.held.is_empty() {
            return self.read_letter(letter, text);
        }
        self.held.push(letter);
        if let Some(unescaped) = unescape(&self.held) {
            text.push(unescaped);
            self.held.clear();
        }
    }
}

/// Returns what an escape, or a pair of them, stands for. None if it is not complete.
fn unescape(escape: &str) -> Option<char> {
    let is_complete = match escape.as_bytes() {
        [b'\\', b'u', ..] => escape.len() == if begins_pair(escape) { 12 } else { 6 },
        other => other.len() >= 2,
    };
    let parsed = || serde_json::from_str(&format!("\"{escape}\"")).unwrap_or(char::REPLACEMENT_CHARACTER);
    is_complete.then(parsed)
}

/// Whether an escape is the first half of a letter beyond the first 65,536.
fn begins_pair(escape: &str) -> bool {
    let code = escape.get(2..6).and_then(|digits| u32::from_str_radix(digits, 16).ok());
    code.is_some_and(|code| (0xd800..0xdc00).contains(&code))
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
    fn half_a_pair_is_replaced() {
        for (arguments, text) in [
            ("{\"input\": \"a\\ud83db\"}", "a\u{fffd}b"),
            ("{\"input\": \"\\ud83d\\nb\"}", "\u{fffd}\nb"),
            ("{\"input\": \"\\udc00b\"}", "\u{fffd}b"),
        ] {
            assert_eq!(InputReader::default().push(arguments), text);
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
        ] {
            match super::parameters("tools[0].format", Some(&format)) {
                Err(Refusal::Invalid { field, .. }) => assert_eq!(field, named),
                other => panic!("{format}: {other:?}"),
            }
        }
    }
}
