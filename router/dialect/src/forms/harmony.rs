//! Harmony, the form of gpt-oss: messages on channels, one for thoughts, one for calls, and one for the answer.
//!
//! `<|channel|> · header · <|message|> · body · <|end|> · <|start|> · header · ..`

use super::raw::Raw;
use super::{Form, Turn};
use crate::marker::{Begins, Found, begins, blank, find};
use crate::sink::Sink;
use crate::tag::{Layout, schema, tag};

const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
/// These end a message; the first three are part of it.
pub(crate) const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];
const N_OWN_ENDS: usize = 3;

pub(crate) const THOUGHT_OPEN: &str = "<|channel|>analysis<|message|>";
/// The end of a thought, and the start of the next message.
pub(crate) const THOUGHT_CLOSE: &str = "<|end|><|start|>assistant";

pub(crate) const MARKERS: &[&str] = &[CHANNEL, START, MESSAGE, CONSTRAIN, ENDS[0], ENDS[1], ENDS[2]];

pub(crate) fn layout() -> Layout {
    Layout {
        open: "",
        separator: "<|start|>assistant",
        close: "",
        trigger: "<|channel|>commentary to=functions.",
        tag: Box::new(|tool, arguments| {
            let begin = format!("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", tool.name);
            tag(&begin, schema(arguments, tool.strict), "<|call|>")
        }),
    }
}

pub(crate) struct Harmony {
    has_tools: bool,
    at: At,
}

enum At {
    /// At the answer's start, which may continue a header that the prompt began.
    Start,
    Text,
    /// In a header, with its text so far.
    Header(String),
    Reasoning,
    Content,
    Arguments(Raw),
}

impl Harmony {
    pub fn new(has_tools: bool, in_thought: bool) -> Harmony {
        Harmony { has_tools, at: if in_thought { At::Reasoning } else { At::Start } }
    }

    fn start(&mut self, rest: &str, last: bool) -> Turn {
        self.at = match begins(rest, &[" to="], last) {
            Begins::With(_) => At::Header(String::new()),
            Begins::Perhaps => return Turn::More,
            Begins::No => At::Text,
        };
        Turn::Took(0)
    }

    /// Between messages, where no text belongs: any text is content.
    fn text(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        match find(rest, &[CHANNEL, START], last) {
            Found::At(0, _) => {
                self.at = At::Header(String::new());
                Turn::Took(0)
            }
            Found::Perhaps(0) => Turn::More,
            Found::At(n, _) | Found::Perhaps(n) => say(&rest[..n], sink),
            Found::Nowhere => say(rest, sink),
        }
    }

    fn header(&mut self, mut header: String, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        match find(rest, &[MESSAGE, ENDS[0], ENDS[1], ENDS[2]], last) {
            Found::At(0, 0) => {
                self.at = self.message(&header, sink);
                Turn::Took(MESSAGE.len())
            }
            // A message without a body has no content.
            Found::At(0, i) => {
                self.at = At::Text;
                Turn::Took(ENDS[i - 1].len())
            }
            Found::Perhaps(0) => {
                self.at = At::Header(header);
                Turn::More
            }
            Found::At(n, _) | Found::Perhaps(n) => {
                header.push_str(&rest[..n]);
                self.at = At::Header(header);
                Turn::Took(n)
            }
            Found::Nowhere => {
                header.push_str(rest);
                self.at = At::Header(header);
                Turn::Took(rest.len())
            }
        }
    }

    /// Returns the state for the body of a message with this header.
    fn message(&self, header: &str, sink: &mut Sink) -> At {
        let is_end = |c: char| c.is_whitespace() || c == '<';
        let word = |text: &str| text.split(is_end).next().unwrap_or_default().to_owned();
        let channel = header.rsplit_once(CHANNEL).map(|(_, channel)| word(channel.trim_start()));
        let recipient = header.split_once("to=").map(|(_, recipient)| word(recipient));
        match (recipient, channel.as_deref()) {
            (Some(recipient), _) => match recipient.strip_prefix("functions.") {
                Some(name) if self.has_tools && !name.is_empty() => {
                    sink.begin_call(name, None);
                    At::Arguments(Raw::default())
                }
                Some(_) => At::Content,
                // A message to a tool of the model's own is not for the client.
                None => At::Reasoning,
            },
            (None, Some("analysis")) => At::Reasoning,
            _ => At::Content,
        }
    }

    /// Reads a body up to its end, and returns how much of it is text.
    fn body(&mut self, rest: &str, last: bool) -> (usize, Turn) {
        match find(rest, &ENDS, last) {
            Found::At(0, i) => {
                let n = if i < N_OWN_ENDS { ENDS[i].len() } else { 0 };
                self.at = At::Text;
                (0, Turn::Took(n))
            }
            Found::Perhaps(0) => (0, Turn::More),
            Found::At(n, _) | Found::Perhaps(n) => (n, Turn::Took(n)),
            Found::Nowhere => (rest.len(), Turn::Took(rest.len())),
        }
    }

    fn reasoning(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        self.at = At::Reasoning;
        let (n, turn) = self.body(rest, last);
        sink.reasoning(&rest[..n]);
        if matches!(self.at, At::Text) {
            sink.end_reasoning();
        }
        turn
    }

    fn content(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        self.at = At::Content;
        let (n, turn) = self.body(rest, last);
        sink.content(&rest[..n]);
        turn
    }

    fn arguments(&mut self, mut raw: Raw, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        let n = if raw.is_begun() { 0 } else { blank(rest) };
        if n > 0 {
            self.at = At::Arguments(raw);
            return Turn::Took(n);
        }
        let Some(step) = raw.step(rest, &ENDS, last) else {
            self.at = At::Arguments(raw);
            return Turn::More;
        };
        sink.arguments(&step.text);
        self.at = if step.is_whole { At::Content } else { At::Arguments(raw) };
        if step.is_whole {
            sink.end_call();
        }
        Turn::Took(step.n)
    }
}

fn say(text: &str, sink: &mut Sink) -> Turn {
    sink.content(text);
    Turn::Took(text.len())
}

impl Form for Harmony {
    fn step(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Turn {
        match std::mem::replace(&mut self.at, At::Text) {
            At::Start => {
                self.at = At::Start;
                self.start(rest, last)
            }
            At::Text => self.text(rest, last, sink),
            At::Header(header) => self.header(header, rest, last, sink),
            At::Reasoning => self.reasoning(rest, last, sink),
            At::Content => self.content(rest, last, sink),
            At::Arguments(raw) => self.arguments(raw, rest, last, sink),
        }
    }

    /// An unfinished header is no text, and is dropped.
    fn finish(&mut self, sink: &mut Sink) {
        if let At::Arguments(raw) = &mut self.at {
            sink.arguments(&raw.rest());
        }
    }
}
