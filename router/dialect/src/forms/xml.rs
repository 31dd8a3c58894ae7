//! A call as elements with a name and parameters: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, Seed. Reads the markers of
//! one call. Has no knowledge of those around all calls.
//!
//! `begin · name · ( parameter · key · value )* · end`

use super::typed::TypedMembers;
use super::{CallStep, NAME_MAX};
use crate::marker::{MarkerMatch, MarkerPrefix, blank, find, match_prefix};
use crate::sink::PieceSink;
use crate::tag::{any_text, either, literal_text, optional, properties, schema, sequence, tag, with_definitions};
use crate::tools::{JsonTypes, types_of};
use crate::{Tool, Tools};
use serde_json::Value;

#[derive(Debug, PartialEq)]
pub(crate) struct XmlStyle {
    pub begin: &'static str,
    /// Follows the name. If it is empty, a parameter or a closing marker ends the name.
    pub name_end: &'static str,
    pub parameter: &'static str,
    pub key_end: &'static str,
    /// Follows the key, if a value has a marker of its own.
    pub value: &'static str,
    /// The first one ends the value. The others end a value that lacks it, and are read again afterwards.
    pub value_ends: &'static [&'static str],
    pub end: &'static str,
    /// Whether names are quoted, and attributes may follow them up to `>`.
    pub has_attributes: bool,
    /// Whether a value has lines of its own.
    pub is_framed: bool,
}

pub(crate) const QWEN: XmlStyle = XmlStyle {
    begin: "<function=",
    name_end: ">",
    parameter: "<parameter=",
    key_end: ">",
    value: "",
    value_ends: &["</parameter>", "\n<parameter=", "\n</function>"],
    end: "</function>",
    has_attributes: false,
    is_framed: true,
};
pub(crate) const SEED: XmlStyle = XmlStyle { is_framed: false, ..QWEN };
pub(crate) const GLM: XmlStyle = XmlStyle {
    begin: "",
    name_end: "",
    parameter: "<arg_key>",
    key_end: "</arg_key>",
    value: "<arg_value>",
    value_ends: &["</arg_value>"],
    end: "",
    has_attributes: false,
    is_framed: false,
};
pub(crate) const MINIMAX: XmlStyle = XmlStyle {
    begin: "<invoke name=\"",
    name_end: "\"",
    parameter: "<parameter name=\"",
    key_end: "\"",
    value: "",
    value_ends: &["</parameter>"],
    end: "</invoke>",
    has_attributes: true,
    is_framed: false,
};
pub(crate) const DEEPSEEK_V32: XmlStyle = XmlStyle {
    begin: "<｜DSML｜invoke name=\"",
    parameter: "<｜DSML｜parameter name=\"",
    value_ends: &["</｜DSML｜parameter>"],
    end: "</｜DSML｜invoke>",
    ..MINIMAX
};

impl XmlStyle {
    /// Returns the tag of a call, in the form that a model must write.
    pub fn tag(&self, tool: &Tool, arguments: &Value, before: &str, after: &str) -> Value {
        let attributes = if self.has_attributes { ">" } else { "" };
        let begin = format!("{before}{}{}{}{attributes}\n", self.begin, tool.name, self.name_end);
        let content = match properties(arguments) {
            None => any_text(),
            Some(properties) => {
                let parameters = properties.iter().map(|(name, property, is_required)| {
                    let parameter =
                        sequence(vec![self.parameter_tag(name, property, arguments, tool.strict), literal_text("\n")]);
                    if *is_required { parameter } else { optional(parameter) }
                });
                sequence(parameters.collect())
            }
        };
        tag(&begin, content, &format!("{}{after}", self.end))
    }

    fn parameter_tag(&self, name: &str, property: &Value, root: &Value, is_strict: bool) -> Value {
        let is_text = types_of(property, root, 0) == JsonTypes::TEXT;
        let line = if self.is_framed { "\n" } else { "" };
        let behind = match (self.has_attributes, self.value) {
            // DeepSeek writes whether the value is a string.
            (true, _) if self.begin == DEEPSEEK_V32.begin => format!(" string=\"{is_text}\">"),
            (true, _) => ">".to_owned(),
            (false, "") => line.to_owned(),
            (false, value) => format!("\n{value}"),
        };
        let begin = format!("{}{name}{}{behind}", self.parameter, self.key_end);
        let end = self.value_ends[0];
        let texts = property.get("enum").and_then(Value::as_array).filter(|_| is_text);
        match texts {
            Some(texts) => {
                let texts = texts.iter().filter_map(Value::as_str).map(literal_text);
                tag(&begin, either(texts.collect()), &format!("{line}{end}"))
            }
            // Only the marker ends a text, wherever it is; the model writes the newline before it.
            None if is_text => tag(&begin, any_text(), end),
            None => tag(&begin, schema(&with_definitions(property, root), is_strict), &format!("{line}{end}")),
        }
    }

    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let markers = [self.begin, self.parameter, self.key_end, self.value, self.value_ends[0], self.end];
        markers.into_iter().filter(|marker| marker.len() > 1)
    }
}

/// Reads one call.
#[derive(Debug)]
pub(super) struct XmlCall {
    style: &'static XmlStyle,
    held: String,
    at: XmlState,
    name: String,
    /// Whether white space has followed the name.
    is_ended: bool,
    key: String,
    attributes: String,
    members: TypedMembers,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum XmlState {
    Begin,
    Name,
    NameAttributes,
    Between,
    Key,
    KeyAttributes,
    ValueMarker,
    Value,
}

impl XmlCall {
    pub fn new(style: &'static XmlStyle, held: String) -> XmlCall {
        XmlCall {
            style,
            held,
            at: XmlState::Begin,
            name: String::new(),
            is_ended: false,
            key: String::new(),
            attributes: String::new(),
            members: TypedMembers::default(),
        }
    }

    pub fn held(&self) -> &str {
        &self.held
    }

    pub fn finish(&mut self, sink: &mut PieceSink) {
        match self.at {
            XmlState::Begin | XmlState::Name | XmlState::NameAttributes => sink.add_content(&self.held),
            _ => self.members.finish(sink),
        }
    }

    pub fn step(&mut self, rest: &str, closers: &[&str], last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        match self.at {
            XmlState::Begin => self.begin(rest, last),
            XmlState::Name => self.read_name(rest, closers, last, sink),
            XmlState::NameAttributes => self.read_name_attributes(rest, sink),
            XmlState::Between => self.read_between_parameters(rest, closers, last, sink),
            XmlState::Key => self.read_key(rest, last, tools, sink),
            XmlState::KeyAttributes => self.read_key_attributes(rest, tools, sink),
            XmlState::ValueMarker => self.read_value_marker(rest, last),
            XmlState::Value => self.read_value(rest, last, sink),
        }
    }

    fn hold(&mut self, text: &str) -> CallStep {
        self.held.push_str(text);
        CallStep::Took(text.len())
    }

    fn go(&mut self, at: XmlState, n: usize) -> CallStep {
        self.at = at;
        CallStep::Took(n)
    }

    fn begin(&mut self, rest: &str, last: bool) -> CallStep {
        match match_prefix(rest, &[self.style.begin], last) {
            MarkerPrefix::With(_) => {
                self.at = XmlState::Name;
                self.hold(self.style.begin)
            }
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => CallStep::Failed(0),
        }
    }

    fn read_name(&mut self, rest: &str, closers: &[&str], last: bool, sink: &mut PieceSink) -> CallStep {
        let end = self.style.name_end;
        let is_over = if end.is_empty() {
            match_prefix(rest, &[&[self.style.parameter], closers].concat(), last)
        } else {
            match_prefix(rest, &[end], last)
        };
        match is_over {
            MarkerPrefix::With(_) if self.name.is_empty() => CallStep::Failed(0),
            MarkerPrefix::With(_) if self.style.has_attributes => {
                self.at = XmlState::NameAttributes;
                self.hold(end)
            }
            MarkerPrefix::With(_) => self.begin_call(end.len(), sink),
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => self.spell(rest),
        }
    }

    /// Reads a character of the name. White space may only follow a name that has no end marker.
    fn spell(&mut self, rest: &str) -> CallStep {
        let Some(c) = rest.chars().next() else { return CallStep::More };
        let is_blank = matches!(c, ' ' | '\t' | '\n' | '\r');
        let may_end = self.style.name_end.is_empty() && !self.name.is_empty();
        let is_of_name = !is_blank && !matches!(c, '<' | '>' | '{' | '}' | '"' | '`');
        if is_of_name && !self.is_ended && self.name.len() < NAME_MAX {
            self.name.push(c);
        } else if is_blank && may_end {
            self.is_ended = true;
        } else {
            return CallStep::Failed(0);
        }
        self.hold(&rest[..c.len_utf8()])
    }

    fn begin_call(&mut self, n: usize, sink: &mut PieceSink) -> CallStep {
        sink.begin_call(&self.name, None);
        self.go(XmlState::Between, n)
    }

    fn read_name_attributes(&mut self, rest: &str, sink: &mut PieceSink) -> CallStep {
        match rest.chars().next() {
            Some('>') => self.begin_call(1, sink),
            Some(c) if c != '<' && c != '\n' && self.held.len() < 2 * NAME_MAX => self.hold(&rest[..c.len_utf8()]),
            _ => CallStep::Failed(0),
        }
    }

    fn read_between_parameters(&mut self, rest: &str, closers: &[&str], last: bool, sink: &mut PieceSink) -> CallStep {
        let n = blank(rest);
        if n > 0 {
            return CallStep::Took(n);
        }
        let own = [self.style.parameter, self.style.end, self.style.begin];
        let markers: Vec<&str> = own.iter().chain(closers).copied().filter(|marker| !marker.is_empty()).collect();
        match match_prefix(rest, &markers, last) {
            MarkerPrefix::With(0) => {
                self.key.clear();
                self.go(XmlState::Key, self.style.parameter.len())
            }
            MarkerPrefix::With(i) => {
                self.members.end(sink);
                let is_own = markers[i] == self.style.end;
                CallStep::Done(if is_own { self.style.end.len() } else { 0 })
            }
            MarkerPrefix::Perhaps => CallStep::More,
            // Text between parameters belongs to none of them.
            MarkerPrefix::No => CallStep::Took(rest.chars().next().map_or(0, char::len_utf8)),
        }
    }

    fn read_key(&mut self, rest: &str, last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        match find(rest, &[self.style.key_end], last) {
            MarkerMatch::Perhaps(0) => CallStep::More,
            MarkerMatch::At(n, _) => {
                self.key.push_str(&rest[..n]);
                self.attributes.clear();
                let n = n + self.style.key_end.len();
                if self.style.has_attributes {
                    return self.go(XmlState::KeyAttributes, n);
                }
                self.begin_value(tools, sink);
                CallStep::Took(n)
            }
            MarkerMatch::Perhaps(n) => {
                self.key.push_str(&rest[..n]);
                CallStep::Took(n)
            }
            MarkerMatch::Nowhere => {
                self.key.push_str(rest);
                CallStep::Took(rest.len())
            }
        }
    }

    fn read_key_attributes(&mut self, rest: &str, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let Some(n) = rest.find('>') else {
            self.attributes.push_str(rest);
            return CallStep::Took(rest.len());
        };
        self.attributes.push_str(&rest[..n]);
        self.begin_value(tools, sink);
        CallStep::Took(n + 1)
    }

    fn begin_value(&mut self, tools: &Tools, sink: &mut PieceSink) {
        let types = match self.attributes.trim() {
            "string=\"true\"" => JsonTypes::TEXT,
            "string=\"false\"" => JsonTypes::ANY,
            _ => tools.types(&self.name, self.key.trim()),
        };
        self.members.key(self.key.trim(), types, self.style.is_framed, sink);
        self.at = if self.style.value.is_empty() { XmlState::Value } else { XmlState::ValueMarker };
    }

    fn read_value_marker(&mut self, rest: &str, last: bool) -> CallStep {
        let n = blank(rest);
        if n > 0 {
            return CallStep::Took(n);
        }
        match match_prefix(rest, &[self.style.value], last) {
            MarkerPrefix::With(_) => self.go(XmlState::Value, self.style.value.len()),
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => self.go(XmlState::Value, 0),
        }
    }

    fn read_value(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> CallStep {
        match find(rest, self.style.value_ends, last) {
            MarkerMatch::At(0, i) => {
                self.members.end_value(sink);
                self.go(XmlState::Between, if i == 0 { self.style.value_ends[0].len() } else { 0 })
            }
            MarkerMatch::Perhaps(0) => CallStep::More,
            MarkerMatch::At(n, _) | MarkerMatch::Perhaps(n) => {
                self.members.push_text(&rest[..n], sink);
                CallStep::Took(n)
            }
            MarkerMatch::Nowhere => {
                self.members.push_text(rest, sink);
                CallStep::Took(rest.len())
            }
        }
    }
}
