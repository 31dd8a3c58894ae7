//! Converts values in other notations to JSON, character by character: Python's literals, and Gemma's values between
//! markers. Reads the text within a call's brackets. Has no knowledge of the text before them.

use super::typed::json_of;
use super::{CallStep, NAME_MAX};
use crate::Tools;
use crate::json::{escape, quoted};
use crate::marker::{MarkerPrefix, blank, match_prefix};
use crate::sink::PieceSink;
use crate::tools::JsonTypes;

/// How arguments are written.
#[derive(Debug, PartialEq)]
pub(super) struct ArgumentSyntax {
    /// Between an argument's name and its value.
    pub assign: char,
    /// Precedes the first argument. Any bracket closes after the last.
    pub open: char,
    /// Around strings. Within quotes of one character a backslash escapes.
    pub quotes: &'static [&'static str],
    /// Whether arguments may be positional.
    pub has_places: bool,
}

#[derive(Debug)]
pub(super) struct LooseArguments {
    syntax: &'static ArgumentSyntax,
    tool: String,
    n_arguments: usize,
    types: JsonTypes,
    /// For each open bracket, whether it belongs to a dictionary.
    open: Vec<bool>,
    at: LooseState,
    /// Whether the innermost open dictionary or list is still empty.
    is_empty: bool,
    word: String,
    /// How many brackets are open in a word that is no literal.
    word_depth: usize,
    quote: &'static str,
    escape: Option<String>,
    is_key: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum LooseState {
    /// Before a name, or before a positional value.
    Argument,
    /// In a name, or in a positional value.
    Name,
    /// Before a dictionary's key.
    Key,
    Assign,
    Value,
    Word,
    Text,
    Comma,
}

impl LooseArguments {
    pub fn new(syntax: &'static ArgumentSyntax, tool: &str) -> LooseArguments {
        LooseArguments {
            syntax,
            tool: tool.to_owned(),
            n_arguments: 0,
            types: JsonTypes::ANY,
            open: Vec::new(),
            at: LooseState::Argument,
            is_empty: true,
            word: String::new(),
            word_depth: 0,
            quote: "",
            escape: None,
            is_key: false,
        }
    }

    pub fn step(&mut self, rest: &str, last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        match self.at {
            LooseState::Text => self.read_string(rest, last, sink),
            LooseState::Word => self.read_word(rest, sink),
            LooseState::Name => self.read_name(rest, tools, sink),
            _ => self.read_between(rest, last, tools, sink),
        }
    }

    /// Handles the end of the text within the arguments.
    pub fn finish(&mut self, sink: &mut PieceSink) {
        if self.at == LooseState::Word {
            sink.arguments(self.word.trim());
        }
    }

    fn go(&mut self, at: LooseState, n: usize) -> CallStep {
        self.at = at;
        CallStep::Took(n)
    }

    fn read_between(&mut self, rest: &str, last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let n = blank(rest);
        if n > 0 {
            return CallStep::Took(n);
        }
        let Some(c) = rest.chars().next() else { return CallStep::More };
        match (self.at, c) {
            (LooseState::Argument, ')' | ']' | '}') => self.close(sink),
            (LooseState::Argument | LooseState::Comma | LooseState::Key, ',') => self.comma(),
            (LooseState::Argument, _) => self.read_argument_start(rest, last, tools, sink),
            (LooseState::Comma | LooseState::Value | LooseState::Key, ')' | ']' | '}') => self.close(sink),
            (LooseState::Assign, ':') => {
                sink.arguments(": ");
                self.go(LooseState::Value, 1)
            }
            (LooseState::Value | LooseState::Key, _) => self.read_value(rest, last, sink),
            // Text after a value is part of no literal.
            _ => CallStep::Took(c.len_utf8()),
        }
    }

    fn comma(&mut self) -> CallStep {
        let at = match self.open.last() {
            None => LooseState::Argument,
            Some(true) => LooseState::Key,
            Some(false) => LooseState::Value,
        };
        self.go(at, 1)
    }

    /// Closes the innermost bracket.
    fn close(&mut self, sink: &mut PieceSink) -> CallStep {
        if self.at == LooseState::Value && self.open.last() != Some(&false) {
            // A name without a value.
            sink.arguments("null");
        }
        let Some(is_dictionary) = self.open.pop() else {
            sink.arguments(if self.n_arguments == 0 { "{}" } else { "}" });
            return CallStep::Done(1);
        };
        sink.arguments(if is_dictionary { "}" } else { "]" });
        self.is_empty = false;
        self.go(LooseState::Comma, 1)
    }

    fn read_argument_start(&mut self, rest: &str, last: bool, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let is_name = rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        if is_name || !self.syntax.has_places {
            self.word.clear();
            return self.go(LooseState::Name, 0);
        }
        if self.quote_of(rest, last).is_none() {
            return CallStep::More;
        }
        self.place(tools, sink);
        self.go(LooseState::Value, 0)
    }

    /// Begins a positional argument.
    fn place(&mut self, tools: &Tools, sink: &mut PieceSink) {
        let tool = tools.get(&self.tool);
        let name = tool.and_then(|tool| tool.parameter_at(self.n_arguments)).map(str::to_owned);
        let name = name.unwrap_or_else(|| self.n_arguments.to_string());
        self.begin_argument(&name, tools, sink);
    }

    fn begin_argument(&mut self, name: &str, tools: &Tools, sink: &mut PieceSink) {
        let before = if self.n_arguments == 0 { "{" } else { ", " };
        sink.arguments(&format!("{before}{}: ", quoted(name)));
        self.n_arguments += 1;
        self.types = tools.types(&self.tool, name);
    }

    fn read_name(&mut self, rest: &str, tools: &Tools, sink: &mut PieceSink) -> CallStep {
        let has_places = self.syntax.has_places;
        let ends = |c: char| match c {
            ',' | ')' | '}' => true,
            '(' | '[' | '{' | '"' | '\'' => has_places,
            c => c == self.syntax.assign,
        };
        let n = rest.find(ends).unwrap_or(rest.len());
        let room = NAME_MAX.saturating_sub(self.word.len());
        if n > room && self.syntax.has_places {
            // No name is this long, so it is a value.
            self.place(tools, sink);
            return self.go(LooseState::Word, 0);
        }
        self.word.push_str(&rest[..n]);
        if n == rest.len() {
            return CallStep::Took(n);
        }
        let is_named = rest[n..].starts_with(self.syntax.assign);
        if is_named || !self.syntax.has_places {
            let name = std::mem::take(&mut self.word);
            self.begin_argument(name.trim().trim_matches('"'), tools, sink);
            return self.go(LooseState::Value, n + usize::from(is_named));
        }
        self.place(tools, sink);
        self.go(LooseState::Word, n)
    }

    /// Returns the quote at the start of a text: an empty one if there is none, None if more text is necessary.
    fn quote_of(&self, rest: &str, last: bool) -> Option<&'static str> {
        let quotes = self.syntax.quotes;
        let may_be = |quote: &&&str| quote.len() > rest.len() && quote.starts_with(rest) && !last;
        if quotes.iter().any(|quote| may_be(&quote)) {
            return None;
        }
        // The longest one counts: three quotes are one marker.
        let fitting = quotes.iter().filter(|quote| rest.starts_with(**quote));
        Some(fitting.max_by_key(|quote| quote.len()).copied().unwrap_or(""))
    }

    fn read_value(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> CallStep {
        let Some(quote) = self.quote_of(rest, last) else { return CallStep::More };
        self.separate(sink);
        self.is_key = self.at == LooseState::Key;
        if !quote.is_empty() {
            self.quote = quote;
            sink.arguments("\"");
            return self.go(LooseState::Text, quote.len());
        }
        let is_dictionary = rest.starts_with('{');
        if !self.is_key && rest.starts_with(['{', '[', '(']) {
            sink.arguments(if is_dictionary { "{" } else { "[" });
            self.open.push(is_dictionary);
            self.is_empty = true;
            return self.go(if is_dictionary { LooseState::Key } else { LooseState::Value }, 1);
        }
        self.word.clear();
        self.go(LooseState::Word, 0)
    }

    /// Writes the comma before each member except the first of a list or dictionary.
    fn separate(&mut self, sink: &mut PieceSink) {
        let is_in_dictionary = self.open.last() == Some(&true);
        let is_element = self.open.last() == Some(&false) || (is_in_dictionary && self.at == LooseState::Key);
        if is_element && !std::mem::take(&mut self.is_empty) {
            sink.arguments(", ");
        }
    }

    fn read_word(&mut self, rest: &str, sink: &mut PieceSink) -> CallStep {
        for (at, c) in rest.char_indices() {
            let ends = self.word_depth == 0
                && (matches!(c, ',' | ')' | ']' | '}') || (self.is_key && self.at == LooseState::Word && c == ':'));
            if ends {
                self.word.push_str(&rest[..at]);
                self.end_word(sink);
                return CallStep::Took(at);
            }
            match c {
                '(' | '[' | '{' => self.word_depth += 1,
                ')' | ']' | '}' => self.word_depth -= 1,
                _ => {}
            }
        }
        self.word.push_str(rest);
        CallStep::Took(rest.len())
    }

    fn end_word(&mut self, sink: &mut PieceSink) {
        let word = std::mem::take(&mut self.word);
        let word = word.trim();
        if std::mem::take(&mut self.is_key) {
            sink.arguments(&quoted(word));
            self.at = LooseState::Assign;
            return;
        }
        let types = if self.open.is_empty() { self.types } else { JsonTypes::ANY };
        sink.arguments(&json_of(word, types));
        self.at = LooseState::Comma;
    }

    fn read_string(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> CallStep {
        let mut json = String::new();
        let member = self.read_string_into(rest, last, &mut json);
        sink.arguments(&json);
        member
    }

    fn read_string_into(&mut self, rest: &str, last: bool, json: &mut String) -> CallStep {
        let has_escapes = self.quote.starts_with(['"', '\'']);
        for (at, c) in rest.char_indices() {
            if self.escape.as_ref().is_some_and(|escape| belongs(escape, c)) {
                self.escaped(c, json);
                continue;
            }
            self.flush(json);
            if c == '\\' && has_escapes {
                self.escape = Some(String::new());
            } else if self.quote.starts_with(c) {
                match match_prefix(&rest[at..], &[self.quote], last) {
                    MarkerPrefix::With(_) => {
                        json.push('"');
                        let is_key = std::mem::take(&mut self.is_key);
                        return self
                            .go(if is_key { LooseState::Assign } else { LooseState::Comma }, at + self.quote.len());
                    }
                    MarkerPrefix::Perhaps if at == 0 => return CallStep::More,
                    MarkerPrefix::Perhaps => return CallStep::Took(at),
                    MarkerPrefix::No => escape(&rest[at..at + c.len_utf8()], json),
                }
            } else {
                escape(&rest[at..at + c.len_utf8()], json);
            }
        }
        CallStep::Took(rest.len())
    }

    fn escaped(&mut self, c: char, json: &mut String) {
        let Some(escape) = &mut self.escape else { return };
        escape.push(c);
        if is_whole(escape) {
            self.flush(json);
        }
    }

    /// Keeps an escape that Python does not have as it is written.
    fn flush(&mut self, json: &mut String) {
        if let Some(written) = self.escape.take() {
            match decode_escape(&written) {
                Some(text) => escape(&text, json),
                None => escape(&format!("\\{written}"), json),
            }
        }
    }
}

/// Whether `c` continues the escape whose text after the backslash is `escape`. A pair of surrogates is one escape.
fn belongs(escape: &str, c: char) -> bool {
    match (escape.as_bytes().first(), escape.len()) {
        (None, _) => true,
        (Some(b'u'), 5) => c == '\\',
        (Some(b'u'), 6) => c == 'u',
        _ => c.is_ascii_hexdigit(),
    }
}

fn is_whole(escape: &str) -> bool {
    match (escape.as_bytes()[0], escape.len()) {
        (b'x', n) => n == 3,
        (b'U', n) => n == 9,
        (b'u', 5) => !matches!(escape.as_bytes()[1..3], [b'd' | b'D', b'8' | b'9' | b'a' | b'b' | b'A' | b'B']),
        (b'u', n) => n == 11,
        _ => true,
    }
}

/// Returns the meaning of the escape whose text after the backslash is `escape`.
fn decode_escape(escape: &str) -> Option<String> {
    let of_code = |digits: &str| u32::from_str_radix(digits, 16).ok().and_then(char::from_u32);
    let c = match *escape.as_bytes().first()? {
        b'n' => '\n',
        b't' => '\t',
        b'r' => '\r',
        b'0' => '\0',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'\n' => return Some(String::new()),
        b'\\' | b'\'' | b'"' | b'/' => return Some(escape.to_owned()),
        b'u' if escape.len() >= 5 => return crate::json::decoded(&format!("\\{escape}")),
        b'x' if escape.len() == 3 => of_code(&escape[1..])?,
        b'U' if escape.len() == 9 => of_code(&escape[1..])?,
        _ => return None,
    };
    Some(c.to_string())
}
