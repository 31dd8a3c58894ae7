//! A call as a header and JSON: DeepSeek, Kimi, Mistral. Reads the markers of one call. Has no knowledge of those
//! around all calls.
//!
//! `begin · header · separator · [name] · [fence] · arguments · end`

use super::raw::RawValue;
use super::{CallStep, NAME_MAX};
use crate::Tool;
use crate::marker::{MarkerPrefix, blank, match_prefix};
use crate::sink::PieceSink;
use crate::tag::{literal_text, regex, schema, sequence, tag};
use serde_json::Value;

#[derive(Debug, PartialEq)]
pub(crate) struct HeadedStyle {
    pub begin: &'static str,
    /// Follow the header. The first one is written.
    pub separators: &'static [&'static str],
    pub end: &'static str,
    pub header: Header,
}

/// The contents of a header.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Header {
    /// The name; or `function`, and then the name is a line after the separator.
    Name,
    /// The same, but written with that line and with a fence around the arguments.
    Typed,
    /// The call's own id, `functions.NAME:INDEX`.
    Numbered,
    /// The name, which a brace may follow without a separator.
    Direct,
}

const MISTRAL_ID: &str = "[CALL_ID]";
const FENCE: &str = "```";

pub(crate) const MISTRAL: HeadedStyle =
    HeadedStyle { begin: "", separators: &["[ARGS]", MISTRAL_ID], end: "", header: Header::Direct };
pub(crate) const KIMI: HeadedStyle = HeadedStyle {
    begin: "<|tool_call_begin|>",
    separators: &["<|tool_call_argument_begin|>"],
    end: "<|tool_call_end|>",
    header: Header::Numbered,
};
pub(crate) const DEEPSEEK_V31: HeadedStyle = HeadedStyle {
    begin: "<｜tool▁call▁begin｜>",
    separators: &["<｜tool▁sep｜>"],
    end: "<｜tool▁call▁end｜>",
    header: Header::Name,
};
pub(crate) const DEEPSEEK_V3: HeadedStyle = HeadedStyle { header: Header::Typed, ..DEEPSEEK_V31 };

impl HeadedStyle {
    /// Returns the tag of a call, in the form that a model must write.
    pub fn tag(&self, tool: &Tool, arguments: &Value, before: &str, after: &str) -> Value {
        let (begin, separator, end, name) = (self.begin, self.separators[0], self.end, &tool.name);
        let after = format!("{end}{after}");
        let arguments = schema(arguments, tool.strict);
        match self.header {
            Header::Name | Header::Direct => tag(&format!("{before}{begin}{name}{separator}"), arguments, &after),
            Header::Typed => {
                let begin = format!("{before}{begin}function{separator}{name}\n{FENCE}json\n");
                tag(&begin, arguments, &format!("\n{FENCE}{after}"))
            }
            Header::Numbered => {
                let content = sequence(vec![regex("[0-9]+"), literal_text(separator), arguments]);
                tag(&format!("{before}{begin}functions.{name}:"), content, &after)
            }
        }
    }

    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let around = [self.begin, self.end];
        self.separators.iter().copied().chain(around).filter(|marker| !marker.is_empty())
    }
}

/// Reads one call.
#[derive(Debug)]
pub(super) struct HeadedCall {
    style: &'static HeadedStyle,
    held: String,
    at: HeadedState,
    word: String,
    /// Whether white space has followed the word.
    is_ended: bool,
    name: String,
    raw: RawValue,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum HeadedState {
    Begin,
    Header,
    /// After `function`: the name, unless `function` was the name.
    Typed,
    Line,
    Id,
    Before,
    Arguments,
    Behind,
}

impl HeadedCall {
    pub fn new(style: &'static HeadedStyle, held: String) -> HeadedCall {
        let (word, name) = (String::new(), String::new());
        HeadedCall { style, held, at: HeadedState::Begin, word, is_ended: false, name, raw: RawValue::default() }
    }

    pub fn held(&self) -> &str {
        &self.held
    }

    pub fn finish(&mut self, sink: &mut PieceSink) {
        match self.at {
            HeadedState::Before | HeadedState::Behind => {}
            HeadedState::Arguments => sink.arguments(&self.raw.rest()),
            _ => sink.add_content(&self.held),
        }
    }

    pub fn step(&mut self, rest: &str, closers: &[&str], last: bool, sink: &mut PieceSink) -> CallStep {
        match self.at {
            HeadedState::Begin => self.begin(rest, last),
            HeadedState::Header => self.read_header(rest, last, sink),
            HeadedState::Typed => self.read_after_type(rest, sink),
            HeadedState::Line => self.read_name_line(rest, sink),
            HeadedState::Id => self.read_id(rest, last, sink),
            HeadedState::Before => self.read_before_arguments(rest, last),
            HeadedState::Arguments => self.read_arguments(rest, closers, last, sink),
            HeadedState::Behind => self.read_after_arguments(rest, last),
        }
    }

    fn hold(&mut self, text: &str) -> CallStep {
        self.held.push_str(text);
        CallStep::Took(text.len())
    }

    fn begin(&mut self, rest: &str, last: bool) -> CallStep {
        match match_prefix(rest, &[self.style.begin], last) {
            MarkerPrefix::With(_) => {
                self.at = HeadedState::Header;
                self.hold(self.style.begin)
            }
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => CallStep::Failed(0),
        }
    }

    fn read_header(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> CallStep {
        if self.style.header == Header::Direct && rest.starts_with('{') {
            return self.begin_call(None, "", sink);
        }
        match match_prefix(rest, self.style.separators, last) {
            MarkerPrefix::With(i) => self.take_separator(self.style.separators[i], sink),
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => self.spell(rest),
        }
    }

    /// Reads a character of a name.
    fn spell(&mut self, rest: &str) -> CallStep {
        let Some(c) = rest.chars().next() else { return CallStep::More };
        let is_blank = matches!(c, ' ' | '\t' | '\n' | '\r');
        let is_of_name = c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | ':' | '/');
        let fits = is_of_name && !self.is_ended && self.word.len() < NAME_MAX;
        if !is_blank && !fits {
            return CallStep::Failed(0);
        }
        self.is_ended |= is_blank && !self.word.is_empty();
        if !is_blank {
            self.word.push(c);
        }
        self.hold(&rest[..c.len_utf8()])
    }

    fn take_separator(&mut self, separator: &'static str, sink: &mut PieceSink) -> CallStep {
        let is_typed = matches!(self.style.header, Header::Name | Header::Typed);
        if is_typed && self.word == "function" {
            self.at = HeadedState::Typed;
            return self.hold(separator);
        }
        if separator == MISTRAL_ID {
            self.name = std::mem::take(&mut self.word);
            (self.at, self.is_ended) = (HeadedState::Id, false);
            return self.hold(separator);
        }
        self.begin_call(None, separator, sink)
    }

    /// Takes the word before `separator` as the name.
    fn begin_call(&mut self, id: Option<&str>, separator: &str, sink: &mut PieceSink) -> CallStep {
        let word = std::mem::take(&mut self.word);
        if word.is_empty() {
            return CallStep::Failed(0);
        }
        let (name, id) = match self.style.header {
            Header::Numbered => (strip_call_number(&word), Some(word.as_str())),
            _ => (word.as_str(), id),
        };
        sink.begin_call(name, id);
        self.at = HeadedState::Before;
        CallStep::Took(separator.len())
    }

    fn read_after_type(&mut self, rest: &str, sink: &mut PieceSink) -> CallStep {
        if rest.starts_with(['{', '`']) {
            return self.begin_call(None, "", sink);
        }
        self.word.clear();
        self.is_ended = false;
        self.at = HeadedState::Line;
        CallStep::Took(0)
    }

    fn read_name_line(&mut self, rest: &str, sink: &mut PieceSink) -> CallStep {
        if rest.starts_with('\n') && !self.word.is_empty() {
            return self.begin_call(None, "\n", sink);
        }
        self.spell(rest)
    }

    fn read_id(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> CallStep {
        let separator = match match_prefix(rest, &self.style.separators[..1], last) {
            MarkerPrefix::With(_) => self.style.separators[0],
            MarkerPrefix::Perhaps => return CallStep::More,
            MarkerPrefix::No if rest.starts_with('{') => "",
            MarkerPrefix::No => return self.spell(rest),
        };
        let id = std::mem::replace(&mut self.word, std::mem::take(&mut self.name));
        self.begin_call(Some(&id), separator, sink)
    }

    fn read_before_arguments(&mut self, rest: &str, last: bool) -> CallStep {
        let n = blank(rest);
        if n > 0 {
            return CallStep::Took(n);
        }
        match match_prefix(rest, &["```json"], last) {
            MarkerPrefix::With(_) => CallStep::Took("```json".len()),
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => {
                self.at = HeadedState::Arguments;
                CallStep::Took(0)
            }
        }
    }

    fn read_arguments(&mut self, rest: &str, closers: &[&str], last: bool, sink: &mut PieceSink) -> CallStep {
        let ends = [self.style.end];
        let closers = if self.style.end.is_empty() { closers } else { &ends };
        let Some(step) = self.raw.step(rest, closers, last) else { return CallStep::More };
        sink.arguments(&step.text);
        if !step.is_whole {
            return CallStep::Took(step.n);
        }
        self.at = HeadedState::Behind;
        if self.style.end.is_empty() { CallStep::Done(step.n) } else { CallStep::Took(step.n) }
    }

    fn read_after_arguments(&mut self, rest: &str, last: bool) -> CallStep {
        let n = blank(rest);
        if n > 0 {
            return CallStep::Took(n);
        }
        match match_prefix(rest, &[FENCE, self.style.end], last) {
            MarkerPrefix::With(0) => CallStep::Took(FENCE.len()),
            MarkerPrefix::With(_) => CallStep::Done(self.style.end.len()),
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => CallStep::Done(0),
        }
    }
}

/// Returns the name in `functions.NAME:INDEX`.
fn strip_call_number(word: &str) -> &str {
    let word = word.strip_prefix("functions.").unwrap_or(word);
    match word.rsplit_once(':') {
        Some((name, number)) if !name.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => word,
    }
}
