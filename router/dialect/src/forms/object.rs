//! A call as a JSON object: `{"name": .., "arguments": ..}` in any order, or that object under the key `function`.
//! Reads member by member, and holds the original text while it may be no call. Has no knowledge of the text around the
//! object.

use super::raw::RawValue;
use super::{CallRule, CallStep, NAME_MAX};
use crate::Tools;
use crate::json::{StringDecoder, decoded};
use crate::marker::blank;
use crate::sink::PieceSink;

#[derive(Debug)]
pub(super) struct CallObject {
    rule: CallRule,
    /// The text so far, while it may be no call.
    held: String,
    at: ObjectState,
    key: CallKey,
    in_function: bool,
    name: Option<String>,
    has_arguments: bool,
    /// Arguments that came before the name.
    early: String,
    is_begun: bool,
    /// The key or the name that is being read.
    word: String,
    is_escaped: bool,
    raw: RawValue,
    unescape: StringDecoder,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ObjectState {
    Open,
    Key,
    InKey,
    Colon,
    Value,
    InName,
    /// In arguments that are JSON.
    InArguments,
    /// In arguments that are a string, which contains a JSON text.
    InText,
    InOther,
    Comma,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum CallKey {
    Name,
    Arguments,
    Function,
    Other,
}

impl CallObject {
    /// `held` is the text before the object. If the object is no call, both are content.
    pub fn new(rule: CallRule, held: String) -> CallObject {
        CallObject {
            rule,
            held,
            at: ObjectState::Open,
            key: CallKey::Other,
            in_function: false,
            name: None,
            has_arguments: false,
            early: String::new(),
            is_begun: false,
            word: String::new(),
            is_escaped: false,
            raw: RawValue::default(),
            unescape: StringDecoder::default(),
        }
    }

    /// Handles the end of the text within the object: emits the call so far, or content.
    pub fn finish(&mut self, sink: &mut PieceSink) {
        if !self.is_begun {
            sink.add_content(&self.held);
        } else if self.at == ObjectState::InArguments {
            sink.arguments(&self.raw.rest());
        }
    }

    /// Returns the held text of an object that is no call.
    pub fn held(&self) -> &str {
        &self.held
    }

    pub fn step(&mut self, rest: &str, closers: &[&str], last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let member = match self.at {
            ObjectState::InKey => self.read_key(rest),
            ObjectState::InName => self.read_name(rest, tools, sink),
            ObjectState::InText => self.read_text(rest, sink),
            ObjectState::InArguments | ObjectState::InOther => match self.read_value(rest, closers, last, sink) {
                Some(member) => member,
                None => return CallStep::More,
            },
            _ => self.read_between(rest, tools, sink),
        };
        self.hold(rest, member);
        match member {
            CallStep::Failed(n) if self.is_begun => CallStep::Done(n),
            CallStep::Done(n) if !self.is_begun => CallStep::Failed(n),
            member => member,
        }
    }

    fn hold(&mut self, rest: &str, member: CallStep) {
        let (CallStep::Took(n) | CallStep::Done(n) | CallStep::Failed(n)) = member else { return };
        if self.is_begun {
            self.held.clear();
        } else {
            self.held.push_str(&rest[..n]);
        }
    }

    fn read_between(&mut self, rest: &str, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let n = blank(rest);
        if n > 0 {
            return CallStep::Took(n);
        }
        let byte = rest.as_bytes()[0];
        match (self.at, byte) {
            (ObjectState::Open, b'{') => self.go(ObjectState::Key, 1),
            (ObjectState::Key, b'"') => self.go(ObjectState::InKey, 1),
            (ObjectState::Key | ObjectState::Comma, b'}') => self.close(),
            (ObjectState::Colon, b':') => self.go(ObjectState::Value, 1),
            (ObjectState::Comma, b',') => self.go(ObjectState::Key, 1),
            (ObjectState::Value, _) => self.begin_value(byte, tools, sink),
            _ => CallStep::Failed(0),
        }
    }

    fn go(&mut self, at: ObjectState, n: usize) -> CallStep {
        self.at = at;
        CallStep::Took(n)
    }

    fn close(&mut self) -> CallStep {
        if !self.in_function {
            return CallStep::Done(1);
        }
        self.in_function = false;
        self.go(ObjectState::Comma, 1)
    }

    /// Reads up to the closing quote, and returns the text before it.
    fn read_quoted(&mut self, rest: &str) -> Result<(usize, String), CallStep> {
        for (at, c) in rest.char_indices() {
            match c {
                _ if self.word.len() + at > NAME_MAX => return Err(CallStep::Failed(at)),
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => {
                    self.word.push_str(&rest[..at]);
                    return Ok((at + 1, std::mem::take(&mut self.word)));
                }
                _ => {}
            }
        }
        self.word.push_str(rest);
        Err(CallStep::Took(rest.len()))
    }

    fn read_key(&mut self, rest: &str) -> CallStep {
        let (n, key) = match self.read_quoted(rest) {
            Ok(key) => key,
            Err(member) => return member,
        };
        self.key = match key.as_str() {
            "name" if self.name.is_none() => CallKey::Name,
            "arguments" | "parameters" if !self.has_arguments => CallKey::Arguments,
            "function" if !self.in_function && self.name.is_none() => CallKey::Function,
            "id" | "type" | "index" => CallKey::Other,
            // A call has no other members, unless a marker identifies it as a call.
            _ if self.is_begun => CallKey::Other,
            _ => return CallStep::Failed(n),
        };
        self.go(ObjectState::Colon, n)
    }

    fn begin_value(&mut self, byte: u8, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        match (self.key, byte) {
            (CallKey::Name, b'"') => self.go(ObjectState::InName, 1),
            (CallKey::Name, _) => CallStep::Failed(0),
            (CallKey::Function, b'{') => {
                self.in_function = true;
                self.go(ObjectState::Key, 1)
            }
            (CallKey::Arguments, _) => {
                self.has_arguments = true;
                self.begin(tools, sink);
                if byte == b'"' { self.go(ObjectState::InText, 1) } else { self.scan_value(ObjectState::InArguments) }
            }
            _ => self.scan_value(ObjectState::InOther),
        }
    }

    fn scan_value(&mut self, at: ObjectState) -> CallStep {
        self.raw = RawValue::default();
        self.go(at, 0)
    }

    fn read_name(&mut self, rest: &str, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let (n, name) = match self.read_quoted(rest) {
            Ok(name) => name,
            Err(member) => return member,
        };
        let name = decoded(&name).filter(|name| !name.is_empty());
        let Some(name) = name.filter(|name| self.rule == CallRule::Marked || tools.get(name).is_some()) else {
            return CallStep::Failed(n);
        };
        self.name = Some(name);
        self.begin(tools, sink);
        self.go(ObjectState::Comma, n)
    }

    /// Begins the call, if it is certain to be one.
    fn begin(&mut self, tools: &Tools, sink: &mut PieceSink) {
        let Some(name) = &self.name else { return };
        let is_call = self.rule == CallRule::Marked || (self.has_arguments && tools.get(name).is_some());
        if is_call && !self.is_begun {
            self.is_begun = true;
            sink.begin_call(name, None);
            sink.arguments(&std::mem::take(&mut self.early));
        }
    }

    fn emit_arguments(&mut self, text: &str, sink: &mut PieceSink) {
        if self.is_begun { sink.arguments(text) } else { self.early.push_str(text) }
    }

    fn read_text(&mut self, rest: &str, sink: &mut PieceSink) -> CallStep {
        let mut meant = String::new();
        let (n, is_whole) = self.unescape.read(rest, &mut meant);
        self.emit_arguments(&meant, sink);
        if is_whole { self.go(ObjectState::Comma, n) } else { CallStep::Took(n) }
    }

    /// Reads a value without parsing it. Reads nothing where a closing marker may begin.
    fn read_value(&mut self, rest: &str, closers: &[&str], last: bool, sink: &mut PieceSink) -> Option<CallStep> {
        let step = self.raw.step(rest, closers, last)?;
        if self.at == ObjectState::InArguments {
            self.emit_arguments(&step.text, sink);
        }
        if step.is_whole {
            return Some(self.go(ObjectState::Comma, step.n));
        }
        Some(CallStep::Took(step.n))
    }
}
