//! Converts parameters that are written as text to a JSON object, as they arrive. A parameter that can only be a string
//! is passed on character by character. Any other waits for its end. Has no knowledge of markers.

use crate::json::{escape, quoted};
use crate::sink::PieceSink;
use crate::tools::JsonTypes;

#[derive(Debug, Default)]
pub(super) struct TypedMembers {
    n_members: usize,
    types: JsonTypes,
    /// A value that may be something other than a string.
    held: String,
    /// Whether one newline at the start and one at the end are not part of the value.
    is_framed: bool,
    at_start: bool,
    has_newline: bool,
}

impl TypedMembers {
    pub fn key(&mut self, key: &str, types: JsonTypes, is_framed: bool, sink: &mut PieceSink) {
        let before = if self.n_members == 0 { "{" } else { ", " };
        sink.arguments(&format!("{before}{}: ", quoted(key)));
        self.n_members += 1;
        (self.types, self.is_framed, self.at_start) = (types, is_framed, true);
        if types == JsonTypes::TEXT {
            sink.arguments("\"");
        }
    }

    pub fn push_text(&mut self, text: &str, sink: &mut PieceSink) {
        if text.is_empty() {
            return;
        }
        if self.types != JsonTypes::TEXT {
            self.held.push_str(text);
            return;
        }
        let text = if self.is_framed && self.at_start { text.strip_prefix('\n').unwrap_or(text) } else { text };
        self.at_start = false;
        if text.is_empty() {
            return;
        }
        let mut json = String::new();
        if std::mem::take(&mut self.has_newline) {
            escape("\n", &mut json);
        }
        let body = if self.is_framed { text.strip_suffix('\n').unwrap_or(text) } else { text };
        self.has_newline = body.len() < text.len();
        escape(body, &mut json);
        sink.arguments(&json);
    }

    pub fn end_value(&mut self, sink: &mut PieceSink) {
        self.has_newline = false;
        if self.types == JsonTypes::TEXT {
            sink.arguments("\"");
            return;
        }
        let held = std::mem::take(&mut self.held);
        let text = held.strip_prefix('\n').filter(|_| self.is_framed).unwrap_or(&held);
        let text = text.strip_suffix('\n').filter(|_| self.is_framed).unwrap_or(text);
        sink.arguments(&json_of(text, self.types));
    }

    pub fn end(&mut self, sink: &mut PieceSink) {
        sink.arguments(if self.n_members == 0 { "{}" } else { "}" });
    }

    /// Handles the end of the text within the object.
    pub fn finish(&mut self, sink: &mut PieceSink) {
        sink.arguments(std::mem::take(&mut self.held).trim());
    }
}

/// Returns a text as JSON of one of the types, or else as a string.
pub(super) fn json_of(text: &str, types: JsonTypes) -> String {
    let word = text.trim();
    let word = match word {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        word => word,
    };
    match serde_json::from_str(word) {
        Ok(value) if types.allow(&value) || !types.allow_text() => word.to_owned(),
        _ => quoted(text),
    }
}
