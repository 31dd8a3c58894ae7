//! A call as a function's name and its arguments in brackets: Python's `f(a="x")`, and Gemma's
//! `call:f{a:<escape>x<escape>}`. Reads the brackets and the text before the name. Has no knowledge of how values are
//! written.

use super::loose::{ArgumentSyntax, LooseArguments};
use super::{CallRule, CallStep, NAME_MAX};
use crate::marker::{MarkerPrefix, blank, match_prefix};
use crate::sink::PieceSink;
use crate::tag::{any_text, either, literal_text, members, schema, tag, with_definitions};
use crate::tools::{JsonTypes, types_of};
use crate::{Tool, Tools};
use serde_json::Value;

#[derive(Debug, PartialEq)]
pub(crate) struct FunctionStyle {
    /// The text before the name.
    pub begin: &'static str,
    syntax: ArgumentSyntax,
}

pub(crate) const PYTHON: FunctionStyle = FunctionStyle {
    begin: "",
    syntax: ArgumentSyntax { assign: '=', open: '(', quotes: &["\"\"\"", "'''", "\"", "'"], has_places: true },
};
pub(crate) const FUNCTION_GEMMA: FunctionStyle = FunctionStyle {
    begin: "call:",
    syntax: ArgumentSyntax { assign: ':', open: '{', quotes: &["<escape>", "\""], has_places: false },
};
pub(crate) const GEMMA4: FunctionStyle = FunctionStyle {
    begin: "call:",
    syntax: ArgumentSyntax { assign: ':', open: '{', quotes: &["<|\"|>", "\""], has_places: false },
};

impl FunctionStyle {
    /// Returns the markers around strings.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        self.syntax.quotes.iter().copied().filter(|quote| quote.starts_with('<'))
    }

    /// Returns the tag of a call, in the form that a model must write.
    pub fn tag(&self, tool: &Tool, arguments: &Value, before: &str, after: &str) -> Value {
        let (open, assign) = (self.syntax.open, self.syntax.assign);
        let (close, separator) = if open == '(' { (')', ", ") } else { ('}', ",") };
        let key = |name: &str| format!("{name}{assign}");
        let value = |property: &Value| self.value(property, arguments, tool.strict);
        let begin = format!("{before}{}{}{open}", self.begin, tool.name);
        tag(&begin, members(arguments, separator, key, value), &format!("{close}{after}"))
    }

    fn value(&self, property: &Value, root: &Value, is_strict: bool) -> Value {
        let quote = self.syntax.quotes[0];
        let has_markers = quote.starts_with('<');
        match property.get("enum").and_then(Value::as_array) {
            Some(values) if has_markers && values.iter().all(Value::is_string) => {
                let values = values.iter().filter_map(Value::as_str);
                either(values.map(|value| literal_text(&format!("{quote}{value}{quote}"))).collect())
            }
            _ if has_markers && types_of(property, root, 0) == JsonTypes::TEXT => tag(quote, any_text(), quote),
            _ => schema(&with_definitions(property, root), is_strict),
        }
    }
}

/// Reads one call.
#[derive(Debug)]
pub(super) struct FunctionCall {
    style: &'static FunctionStyle,
    rule: CallRule,
    held: String,
    at: FunctionState,
    name: String,
    arguments: Option<LooseArguments>,
    /// Whether the call is within `print(..)`.
    is_printed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum FunctionState {
    Begin,
    Name,
    Arguments,
    Printed,
}

impl FunctionCall {
    pub fn new(style: &'static FunctionStyle, rule: CallRule, held: String) -> FunctionCall {
        let (at, name) = (FunctionState::Begin, String::new());
        FunctionCall { style, rule, held, at, name, arguments: None, is_printed: false }
    }

    pub fn held(&self) -> &str {
        &self.held
    }

    pub fn finish(&mut self, sink: &mut PieceSink) {
        match &mut self.arguments {
            Some(arguments) => arguments.finish(sink),
            None => sink.add_content(&self.held),
        }
    }

    pub fn step(&mut self, rest: &str, last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        match self.at {
            FunctionState::Begin => self.begin(rest, last),
            FunctionState::Name => self.read_name(rest, tools, sink),
            FunctionState::Arguments => self.read_arguments(rest, last, tools, sink),
            FunctionState::Printed => match blank(rest) {
                0 => CallStep::Done(usize::from(rest.starts_with(')'))),
                n => CallStep::Took(n),
            },
        }
    }

    fn begin(&mut self, rest: &str, last: bool) -> CallStep {
        match match_prefix(rest, &[self.style.begin], last) {
            MarkerPrefix::With(_) => {
                self.held.push_str(self.style.begin);
                self.at = FunctionState::Name;
                CallStep::Took(self.style.begin.len())
            }
            MarkerPrefix::Perhaps => CallStep::More,
            MarkerPrefix::No => CallStep::Failed(0),
        }
    }

    fn read_name(&mut self, rest: &str, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let is_of_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        let n = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
        let n = n.min(floor(rest, (NAME_MAX + 1).saturating_sub(self.name.len())));
        self.name.push_str(&rest[..n]);
        self.held.push_str(&rest[..n]);
        if n == rest.len() && self.name.len() <= NAME_MAX {
            return CallStep::Took(n);
        }
        if self.name.is_empty() || self.name.len() > NAME_MAX || !rest[n..].starts_with(self.style.syntax.open) {
            return CallStep::Failed(n);
        }
        self.read_open_bracket(n, tools, sink)
    }

    /// Reads the bracket after the name.
    fn read_open_bracket(&mut self, n: usize, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let is_known = tools.get(&self.name).is_some();
        if self.name == "print" && !is_known && !self.is_printed {
            self.is_printed = true;
            self.name.clear();
            self.held.push(self.style.syntax.open);
            return CallStep::Took(n + 1);
        }
        if self.rule == CallRule::Bare && !is_known {
            return CallStep::Failed(n);
        }
        sink.begin_call(&self.name, None);
        self.arguments = Some(LooseArguments::new(&self.style.syntax, &self.name));
        self.at = FunctionState::Arguments;
        CallStep::Took(n + 1)
    }

    fn read_arguments(&mut self, rest: &str, last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let Some(arguments) = &mut self.arguments else { return CallStep::Failed(0) };
        match arguments.step(rest, last, tools, sink) {
            CallStep::Done(n) if self.is_printed => {
                self.at = FunctionState::Printed;
                CallStep::Took(n)
            }
            member => member,
        }
    }
}

/// Returns the last boundary of a character at or before `at`.
fn floor(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
