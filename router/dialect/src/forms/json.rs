//! Calls as JSON objects behind a marker, or at a line's start: Hermes, Llama 3, Phi, Granite, Gemma, and whoever has
//! no form of its own. Knows the markers of a style, and not what a call's object holds.
//!
//! `text · opener · [ · object · , · object · ] · closer · text`

use super::object::{CallObject, Member, Rule};
use super::{Form, Turn};
use crate::enforce::{Layout, schema, tag};
use crate::json::quoted;
use crate::marker::{Begins, begins, blank};
use crate::sink::Sink;
use crate::{Tool, Tools};
use serde_json::Value;

/// What stands around the objects.
#[derive(Debug, PartialEq)]
pub(crate) struct JsonStyle {
    /// Before an object or a list of them.
    pub openers: &'static [&'static str],
    /// Behind them; they are optional.
    pub closers: &'static [&'static str],
    /// Whether what stands behind an opener must be a known tool's call.
    pub opened: Rule,
    /// Whether an object or a list at a line's start may be calls.
    pub is_bare: bool,
    pub written: Written,
}

/// How a model that must call writes it: of what is read, the form that it was trained on.
#[derive(Debug, PartialEq)]
pub(crate) struct Written {
    pub open: &'static str,
    pub separator: &'static str,
    pub close: &'static str,
    /// Around each object.
    pub before: &'static str,
    pub after: &'static str,
    /// The key of the arguments.
    pub key: &'static str,
    pub trigger: &'static str,
}

impl JsonStyle {
    pub fn layout(&'static self) -> Layout {
        let written = &self.written;
        let call = move |tool: &Tool, arguments: &Value| {
            let name = quoted(&tool.name);
            let begin = format!("{}{{\"name\": {name}, \"{}\": ", written.before, written.key);
            tag(&begin, schema(arguments), &format!("}}{}", written.after))
        };
        Layout {
            open: written.open,
            separator: written.separator,
            close: written.close,
            trigger: written.trigger,
            tag: Box::new(call),
        }
    }
}

pub(crate) struct JsonCalls {
    style: &'static JsonStyle,
    tools: Tools,
    at: At,
    in_list: bool,
    at_line_start: bool,
}

enum At {
    Text,
    /// Behind an opener or a bracket.
    Opened {
        rule: Rule,
        held: String,
    },
    Call {
        rule: Rule,
        call: Box<CallObject>,
    },
    /// Behind a call.
    Behind {
        rule: Rule,
        held: String,
    },
}

impl JsonCalls {
    pub fn new(style: &'static JsonStyle, tools: Tools) -> JsonCalls {
        JsonCalls { style, tools, at: At::Text, in_list: false, at_line_start: true }
    }

    fn text(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        let is_first = |byte: u8| self.style.openers.iter().any(|opener| opener.as_bytes()[0] == byte);
        let mut at_line_start = self.at_line_start;
        for (at, byte) in rest.bytes().enumerate() {
            let may_open = is_first(byte) && begins(&rest[at..], self.style.openers, last) != Begins::No;
            if may_open || (self.style.is_bare && at_line_start && matches!(byte, b'{' | b'[')) {
                self.at_line_start = at_line_start;
                return if at == 0 { self.open(rest, last) } else { say(&rest[..at], sink) };
            }
            at_line_start = byte == b'\n' || (at_line_start && matches!(byte, b' ' | b'\t' | b'\r'));
        }
        self.at_line_start = at_line_start;
        say(rest, sink)
    }

    /// Something opens here, or may open once more has come.
    fn open(&mut self, rest: &str, last: bool) -> Turn {
        match begins(rest, self.style.openers, last) {
            Begins::With(i) => {
                let opener = self.style.openers[i];
                self.at = At::Opened { rule: self.style.opened, held: opener.to_owned() };
                Turn::Took(opener.len())
            }
            Begins::Perhaps => Turn::More,
            Begins::No => {
                self.at = At::Opened { rule: Rule::Bare, held: String::new() };
                Turn::Took(0)
            }
        }
    }

    fn opened(&mut self, rule: Rule, mut held: String, rest: &str, sink: &mut Sink) -> Turn {
        let n = blank(rest).max(usize::from(!self.in_list && rest.starts_with('[')));
        if n > 0 {
            self.in_list |= rest.starts_with('[');
            held.push_str(&rest[..n]);
            self.at = At::Opened { rule, held };
            return Turn::Took(n);
        }
        if rest.starts_with('{') {
            return self.call(rule, held);
        }
        self.back_to_text(&held, sink)
    }

    fn call(&mut self, rule: Rule, held: String) -> Turn {
        self.at = At::Call { rule, call: Box::new(CallObject::new(rule, held)) };
        Turn::Took(0)
    }

    fn in_call(&mut self, rule: Rule, mut call: Box<CallObject>, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        match call.step(rest, self.style.closers, last, &self.tools, sink) {
            Member::Took(n) => {
                self.at = At::Call { rule, call };
                Turn::Took(n)
            }
            Member::More => {
                self.at = At::Call { rule, call };
                Turn::More
            }
            Member::Done(n) => {
                sink.end_call();
                self.at = At::Behind { rule, held: String::new() };
                Turn::Took(n)
            }
            Member::Failed(n) => {
                call.give_up(sink);
                (self.at, self.in_list, self.at_line_start) = (At::Text, false, false);
                Turn::Took(n)
            }
        }
    }

    fn behind(&mut self, rule: Rule, mut held: String, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        let n = blank(rest).max(usize::from(rest.starts_with([',', ';'])));
        if n > 0 {
            held.push_str(&rest[..n]);
            self.at = At::Behind { rule, held };
            return Turn::Took(n);
        }
        if rest.starts_with('{') {
            return self.call(rule, held);
        }
        if self.in_list && rest.starts_with(']') {
            self.in_list = false;
            self.at = At::Behind { rule, held: String::new() };
            return Turn::Took(1);
        }
        match begins(rest, self.style.closers, last) {
            Begins::With(i) => {
                self.back_to_text("", sink);
                Turn::Took(self.style.closers[i].len())
            }
            Begins::Perhaps => {
                self.at = At::Behind { rule, held };
                Turn::More
            }
            Begins::No => self.back_to_text(&held, sink),
        }
    }

    fn back_to_text(&mut self, held: &str, sink: &mut Sink) -> Turn {
        sink.content(held);
        let line = held.trim_end_matches([' ', '\t', '\r']);
        self.at_line_start = line.is_empty() || line.ends_with('\n');
        self.in_list = false;
        self.at = At::Text;
        Turn::Took(0)
    }
}

fn say(text: &str, sink: &mut Sink) -> Turn {
    sink.content(text);
    Turn::Took(text.len())
}

impl Form for JsonCalls {
    fn step(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        match std::mem::replace(&mut self.at, At::Text) {
            At::Text => self.text(rest, last, sink),
            At::Opened { rule, held } => self.opened(rule, held, rest, sink),
            At::Call { rule, call } => self.in_call(rule, call, rest, last, sink),
            At::Behind { rule, held } => self.behind(rule, held, rest, last, sink),
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.at {
            At::Text => {}
            At::Opened { held, .. } | At::Behind { held, .. } => sink.content(held),
            At::Call { call, .. } => call.finish(sink),
        }
    }
}
