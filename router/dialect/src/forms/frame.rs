//! Calls within markers: a marker opens, calls of some kind follow, alone or in a list, and a marker closes. Without a
//! marker calls may begin a line. Has no knowledge of the contents of a call.
//!
//! `text · opener · [ · call · , · call · ] · closer · text`

use super::function::{FunctionCall, FunctionStyle};
use super::headed::{HeadedCall, HeadedStyle};
use super::object::CallObject;
use super::xml::{XmlCall, XmlStyle};
use super::{CallRule, CallStep, Form, FormStep};
use crate::json::quoted;
use crate::marker::{MarkerPrefix, blank, match_prefix};
use crate::sink::PieceSink;
use crate::tag::{CallLayout, schema, tag};
use crate::{Tool, Tools};
use serde_json::Value;

/// A family's markers around its calls, and the kinds of its calls.
#[derive(Debug, PartialEq)]
pub(crate) struct FrameStyle {
    /// Precede a call or a list of them. An opener that is a call's own beginning opens a frame that lacks its opener.
    pub openers: &'static [&'static str],
    /// Follow the calls. They are optional.
    pub closers: &'static [&'static str],
    /// Other markers around calls of known tools: models write them in addition to their own form, or instead.
    pub fences: &'static [FenceMarkers],
    /// Whether a call or a list in the family's own form needs no opener at the start of a line.
    pub is_bare: bool,
    /// The kinds that are read. The first one is written.
    pub kinds: &'static [CallKind],
    pub written: FrameMarkup,
}

/// A marker after which text is a call only if it names a tool, and the markers that end it.
#[derive(Debug, PartialEq)]
pub(crate) struct FenceMarkers {
    pub open: &'static str,
    pub close: &'static [&'static str],
}

/// How a call is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CallKind {
    Object,
    Function(&'static FunctionStyle),
    Headed(&'static HeadedStyle),
    Xml(&'static XmlStyle),
}

/// The form in which a model must write a required call: of the readable forms, the one of its training.
#[derive(Debug, PartialEq)]
pub(crate) struct FrameMarkup {
    /// Around all calls, and between two.
    pub open: &'static str,
    pub separator: &'static str,
    pub close: &'static str,
    /// Around each call.
    pub before: &'static str,
    pub after: &'static str,
    /// The key of an object's arguments.
    pub key: &'static str,
    /// The beginning of `open`, or else of every call.
    pub trigger: &'static str,
}

impl FrameStyle {
    pub fn layout(&'static self) -> CallLayout {
        let FrameMarkup { open, separator, close, trigger, .. } = self.written;
        let kind = self.kinds[0];
        let tag = move |tool: &Tool, arguments: &Value| kind.tag(tool, arguments, &self.written);
        CallLayout { open, separator, close, trigger, tag: Box::new(tag) }
    }

    pub fn markers(&self) -> Vec<&'static str> {
        let of_kinds = self.kinds.iter().flat_map(|kind| kind.markers());
        // Code fences are not special tokens of any model.
        let of_fences = self.fences.iter().flat_map(|fence| fence.close.iter().copied().chain([fence.open]));
        let of_fences = of_fences.filter(|marker| marker.starts_with('<'));
        self.openers.iter().chain(self.closers).copied().chain(of_kinds).chain(of_fences).collect()
    }
}

impl CallKind {
    fn tag(self, tool: &Tool, arguments: &Value, written: &FrameMarkup) -> Value {
        let (before, after) = (written.before, written.after);
        match self {
            CallKind::Object => {
                let name = quoted(&tool.name);
                let begin = format!("{before}{{\"name\": {name}, \"{}\": ", written.key);
                tag(&begin, schema(arguments, tool.strict), &format!("}}{after}"))
            }
            CallKind::Function(style) => style.tag(tool, arguments, before, after),
            CallKind::Headed(style) => style.tag(tool, arguments, before, after),
            CallKind::Xml(style) => style.tag(tool, arguments, before, after),
        }
    }

    fn markers(self) -> Vec<&'static str> {
        match self {
            CallKind::Object => Vec::new(),
            CallKind::Function(style) => style.markers().collect(),
            CallKind::Headed(style) => style.markers().collect(),
            CallKind::Xml(style) => style.markers().collect(),
        }
    }

    /// Returns the beginning of every call; empty if a call begins with a name.
    fn begin(self) -> &'static str {
        match self {
            CallKind::Object => "{",
            CallKind::Function(style) => style.begin,
            CallKind::Headed(style) => style.begin,
            CallKind::Xml(style) => style.begin,
        }
    }

    fn match_opening(self, rest: &str, last: bool) -> MarkerPrefix {
        match self.begin() {
            "" if rest.starts_with(|c: char| c.is_alphabetic() || c == '_') => MarkerPrefix::With(0),
            "" => MarkerPrefix::No,
            begin => match_prefix(rest, &[begin], last),
        }
    }

    fn new_reader(self, rule: CallRule, held: String) -> CallReader {
        match self {
            CallKind::Object => CallReader::Object(Box::new(CallObject::new(rule, held))),
            CallKind::Function(style) => CallReader::Function(Box::new(FunctionCall::new(style, rule, held))),
            CallKind::Headed(style) => CallReader::Headed(Box::new(HeadedCall::new(style, held))),
            CallKind::Xml(style) => CallReader::Xml(Box::new(XmlCall::new(style, held))),
        }
    }
}

enum CallReader {
    Object(Box<CallObject>),
    Function(Box<FunctionCall>),
    Headed(Box<HeadedCall>),
    Xml(Box<XmlCall>),
}

impl CallReader {
    fn step(&mut self, rest: &str, last: bool, frame: &FrameForm, sink: &mut PieceSink) -> CallStep {
        let (closers, tools) = (frame.closers, &frame.tools);
        match self {
            CallReader::Object(call) => call.step(rest, closers, last, tools, sink),
            CallReader::Function(call) => call.step(rest, last, tools, sink),
            CallReader::Headed(call) => call.step(rest, closers, last, sink),
            CallReader::Xml(call) => call.step(rest, closers, last, tools, sink),
        }
    }

    /// Returns the text that was read and is not part of a call.
    fn held(&self) -> &str {
        match self {
            CallReader::Object(call) => call.held(),
            CallReader::Function(call) => call.held(),
            CallReader::Headed(call) => call.held(),
            CallReader::Xml(call) => call.held(),
        }
    }

    /// Handles the end of the text within the call: emits the call so far, or content.
    fn finish(&mut self, sink: &mut PieceSink) {
        match self {
            CallReader::Object(call) => call.finish(sink),
            CallReader::Function(call) => call.finish(sink),
            CallReader::Headed(call) => call.finish(sink),
            CallReader::Xml(call) => call.finish(sink),
        }
    }
}

pub(crate) struct FrameForm {
    style: &'static FrameStyle,
    tools: Tools,
    /// The openers of the style, then those of fences.
    openers: Vec<&'static str>,
    /// The closers of the open frame.
    closers: &'static [&'static str],
    /// Whether a call or a list at a line's start is read without an opener.
    reads_bare: bool,
    at: FrameState,
    in_list: bool,
    at_line_start: bool,
}

enum FrameState {
    Text,
    /// After an opener or a bracket, which are held.
    Opened(CallRule, String),
    Call(CallRule, CallReader),
    /// After a call. Text that may precede the next call is held.
    Behind(CallRule, String),
    /// After a closer. White space is held, and other closers may follow.
    Closed(String),
}

/// The kind of the call that begins here.
enum CallStart {
    Call(CallKind),
    Perhaps,
    None,
}

impl FrameForm {
    /// Returns a reader of the family's own form. It also reads bare and fenced calls, unless a tool is strict: strict
    /// arguments are enforced only in the family's own form.
    pub fn new(style: &'static FrameStyle, tools: Tools) -> FrameForm {
        let is_lenient = style.is_bare || tools.iter().all(|tool| !tool.strict);
        let fences = if is_lenient { style.fences } else { &[] };
        let openers = style.openers.iter().copied().chain(fences.iter().map(|fence| fence.open)).collect();
        let reads_bare = style.is_bare || !fences.is_empty();
        let closers = style.closers;
        FrameForm {
            style,
            tools,
            openers,
            closers,
            reads_bare,
            at: FrameState::Text,
            in_list: false,
            at_line_start: true,
        }
    }

    fn read_text(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        let is_first = |byte: u8| self.openers.iter().any(|opener| opener.as_bytes()[0] == byte);
        let mut at_line_start = self.at_line_start;
        for (at, byte) in rest.bytes().enumerate() {
            let may_open = is_first(byte) && match_prefix(&rest[at..], &self.openers, last) != MarkerPrefix::No;
            if may_open || (self.reads_bare && at_line_start && matches!(byte, b'{' | b'[')) {
                self.at_line_start = at_line_start;
                return if at == 0 { self.read_opener(rest, last) } else { emit_content(&rest[..at], sink) };
            }
            at_line_start = byte == b'\n' || (at_line_start && matches!(byte, b' ' | b'\t' | b'\r'));
        }
        self.at_line_start = at_line_start;
        emit_content(rest, sink)
    }

    /// Reads an opener, or a text that may become one.
    fn read_opener(&mut self, rest: &str, last: bool) -> FormStep {
        let (rule, held) = match match_prefix(rest, &self.openers, last) {
            MarkerPrefix::With(i) => match i.checked_sub(self.style.openers.len()) {
                Some(fence) => {
                    self.closers = self.style.fences[fence].close;
                    (CallRule::Bare, self.openers[i])
                }
                None => {
                    self.closers = self.style.closers;
                    let is_of_call = self.style.kinds.iter().any(|kind| kind.begin() == self.openers[i]);
                    (CallRule::Marked, if is_of_call { "" } else { self.openers[i] })
                }
            },
            MarkerPrefix::Perhaps => return FormStep::More,
            MarkerPrefix::No => {
                self.closers = self.style.closers;
                (CallRule::Bare, "")
            }
        };
        self.at = FrameState::Opened(rule, held.to_owned());
        FormStep::Took(held.len())
    }

    fn next_call(&self, rest: &str, last: bool) -> CallStart {
        let mut next = CallStart::None;
        for kind in self.style.kinds {
            match kind.match_opening(rest, last) {
                MarkerPrefix::With(_) => return CallStart::Call(*kind),
                MarkerPrefix::Perhaps => next = CallStart::Perhaps,
                MarkerPrefix::No => {}
            }
        }
        next
    }

    fn read_after_opener(
        &mut self,
        rule: CallRule,
        mut held: String,
        rest: &str,
        last: bool,
        sink: &mut PieceSink,
    ) -> FormStep {
        let n = blank(rest).max(usize::from(!self.in_list && rest.starts_with('[')));
        if n > 0 {
            self.in_list |= rest.starts_with('[');
            held.push_str(&rest[..n]);
            self.at = FrameState::Opened(rule, held);
            return FormStep::Took(n);
        }
        match self.next_call(rest, last) {
            CallStart::Call(kind) => self.begin_call(kind, rule, held),
            CallStart::Perhaps => {
                self.at = FrameState::Opened(rule, held);
                FormStep::More
            }
            // Without an opener nothing is held: the first character begins neither a list nor a call.
            CallStart::None if held.is_empty() => {
                let n = rest.chars().next().map_or(0, char::len_utf8);
                (self.at, self.at_line_start) = (FrameState::Text, false);
                emit_content(&rest[..n], sink)
            }
            CallStart::None => self.back_to_text(&held, sink),
        }
    }

    fn begin_call(&mut self, kind: CallKind, rule: CallRule, held: String) -> FormStep {
        self.at = FrameState::Call(rule, kind.new_reader(rule, held));
        FormStep::Took(0)
    }

    fn read_call(
        &mut self,
        rule: CallRule,
        mut call: CallReader,
        rest: &str,
        last: bool,
        sink: &mut PieceSink,
    ) -> FormStep {
        match call.step(rest, last, self, sink) {
            CallStep::Took(n) => {
                self.at = FrameState::Call(rule, call);
                FormStep::Took(n)
            }
            CallStep::More => {
                self.at = FrameState::Call(rule, call);
                FormStep::More
            }
            CallStep::Done(n) => {
                sink.end_call();
                self.at = FrameState::Behind(rule, String::new());
                FormStep::Took(n)
            }
            CallStep::Failed(n) => {
                self.back_to_text(call.held(), sink);
                FormStep::Took(n)
            }
        }
    }

    fn read_after_call(
        &mut self,
        rule: CallRule,
        mut held: String,
        rest: &str,
        last: bool,
        sink: &mut PieceSink,
    ) -> FormStep {
        let n = blank(rest).max(usize::from(rest.starts_with([',', ';'])));
        if n > 0 {
            held.push_str(&rest[..n]);
            self.at = FrameState::Behind(rule, held);
            return FormStep::Took(n);
        }
        if self.in_list && rest.starts_with(']') {
            self.in_list = false;
            self.at = FrameState::Behind(rule, String::new());
            return FormStep::Took(1);
        }
        match match_prefix(rest, self.closers, last) {
            MarkerPrefix::With(i) => return self.close(i),
            MarkerPrefix::Perhaps => {
                self.at = FrameState::Behind(rule, held);
                return FormStep::More;
            }
            MarkerPrefix::No => {}
        }
        match self.next_call(rest, last) {
            CallStart::Call(kind) => self.begin_call(kind, rule, held),
            CallStart::Perhaps => {
                self.at = FrameState::Behind(rule, held);
                FormStep::More
            }
            CallStart::None => self.back_to_text(&held, sink),
        }
    }

    fn close(&mut self, closer: usize) -> FormStep {
        (self.at, self.in_list) = (FrameState::Closed(String::new()), false);
        FormStep::Took(self.closers[closer].len())
    }

    fn read_after_closer(&mut self, mut held: String, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        let n = blank(rest);
        if n > 0 {
            held.push_str(&rest[..n]);
            self.at = FrameState::Closed(held);
            return FormStep::Took(n);
        }
        // An opener may begin with a closer's text, and has precedence.
        let opener = match_prefix(rest, &self.openers, last);
        let closer = match_prefix(rest, self.closers, last);
        match (opener, closer) {
            (MarkerPrefix::With(_), _) | (MarkerPrefix::No, MarkerPrefix::No) => self.back_to_text(&held, sink),
            (MarkerPrefix::No, MarkerPrefix::With(i)) => self.close(i),
            (MarkerPrefix::Perhaps, _) | (_, MarkerPrefix::Perhaps) => {
                self.at = FrameState::Closed(held);
                FormStep::More
            }
        }
    }

    fn back_to_text(&mut self, held: &str, sink: &mut PieceSink) -> FormStep {
        sink.add_content(held);
        let line = held.trim_end_matches([' ', '\t', '\r']);
        self.at_line_start = line.is_empty() || line.ends_with('\n');
        self.in_list = false;
        self.at = FrameState::Text;
        FormStep::Took(0)
    }
}

fn emit_content(text: &str, sink: &mut PieceSink) -> FormStep {
    sink.add_content(text);
    FormStep::Took(text.len())
}

impl Form for FrameForm {
    fn step(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        match std::mem::replace(&mut self.at, FrameState::Text) {
            FrameState::Text => self.read_text(rest, last, sink),
            FrameState::Opened(rule, held) => self.read_after_opener(rule, held, rest, last, sink),
            FrameState::Call(rule, call) => self.read_call(rule, call, rest, last, sink),
            FrameState::Behind(rule, held) => self.read_after_call(rule, held, rest, last, sink),
            FrameState::Closed(held) => self.read_after_closer(held, rest, last, sink),
        }
    }

    fn finish(&mut self, sink: &mut PieceSink) {
        match &mut self.at {
            FrameState::Text => {}
            FrameState::Opened(_, held) | FrameState::Behind(_, held) | FrameState::Closed(held) => {
                sink.add_content(held)
            }
            FrameState::Call(_, call) => call.finish(sink),
        }
    }
}
