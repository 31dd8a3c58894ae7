//! Harmony, the form of gpt-oss: messages on channels, one for thoughts, one for calls, and one for the answer.
//!
//! `<|channel|> · header · <|message|> · body · <|end|> · <|start|> · header · ..`

use super::raw::RawValue;
use super::{Form, FormStep};
use crate::marker::{MarkerMatch, MarkerPrefix, blank, find, match_prefix};
use crate::sink::PieceSink;
use crate::tag::{CallLayout, schema, tag};

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

pub(crate) fn layout() -> CallLayout {
    CallLayout {
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

pub(crate) struct HarmonyForm {
    has_tools: bool,
    at: HarmonyState,
}

enum HarmonyState {
    /// At the answer's start, which may continue a header that the prompt began.
    Start,
    Text,
    /// In a header, with its text so far.
    Header(String),
    Reasoning,
    Content,
    Arguments(RawValue),
}

impl HarmonyForm {
    pub fn new(has_tools: bool, in_thought: bool) -> HarmonyForm {
        HarmonyForm { has_tools, at: if in_thought { HarmonyState::Reasoning } else { HarmonyState::Start } }
    }

    fn start(&mut self, rest: &str, last: bool) -> FormStep {
        self.at = match match_prefix(rest, &[" to="], last) {
            MarkerPrefix::With(_) => HarmonyState::Header(String::new()),
            MarkerPrefix::Perhaps => return FormStep::More,
            MarkerPrefix::No => HarmonyState::Text,
        };
        FormStep::Took(0)
    }

    /// Between messages, where no text belongs: any text is content.
    fn read_text(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        match find(rest, &[CHANNEL, START], last) {
            MarkerMatch::At(0, _) => {
                self.at = HarmonyState::Header(String::new());
                FormStep::Took(0)
            }
            MarkerMatch::Perhaps(0) => FormStep::More,
            MarkerMatch::At(n, _) | MarkerMatch::Perhaps(n) => emit_content(&rest[..n], sink),
            MarkerMatch::Nowhere => emit_content(rest, sink),
        }
    }

    fn read_header(&mut self, mut header: String, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        match find(rest, &[MESSAGE, ENDS[0], ENDS[1], ENDS[2]], last) {
            MarkerMatch::At(0, 0) => {
                self.at = self.state_after_header(&header, sink);
                FormStep::Took(MESSAGE.len())
            }
            // A message without a body has no content.
            MarkerMatch::At(0, i) => {
                self.at = HarmonyState::Text;
                FormStep::Took(ENDS[i - 1].len())
            }
            MarkerMatch::Perhaps(0) => {
                self.at = HarmonyState::Header(header);
                FormStep::More
            }
            MarkerMatch::At(n, _) | MarkerMatch::Perhaps(n) => {
                header.push_str(&rest[..n]);
                self.at = HarmonyState::Header(header);
                FormStep::Took(n)
            }
            MarkerMatch::Nowhere => {
                header.push_str(rest);
                self.at = HarmonyState::Header(header);
                FormStep::Took(rest.len())
            }
        }
    }

    /// Returns the state for the body of a message with this header.
    fn state_after_header(&self, header: &str, sink: &mut PieceSink) -> HarmonyState {
        let is_end = |c: char| c.is_whitespace() || c == '<';
        let word = |text: &str| text.split(is_end).next().unwrap_or_default().to_owned();
        let channel = header.rsplit_once(CHANNEL).map(|(_, channel)| word(channel.trim_start()));
        let recipient = header.split_once("to=").map(|(_, recipient)| word(recipient));
        match (recipient, channel.as_deref()) {
            (Some(recipient), _) => match recipient.strip_prefix("functions.") {
                Some(name) if self.has_tools && !name.is_empty() => {
                    sink.begin_call(name, None);
                    HarmonyState::Arguments(RawValue::default())
                }
                Some(_) => HarmonyState::Content,
                // A message to a tool of the model's own is not for the client.
                None => HarmonyState::Reasoning,
            },
            (None, Some("analysis")) => HarmonyState::Reasoning,
            _ => HarmonyState::Content,
        }
    }

    /// Reads a body up to its end, and returns how much of it is text.
    fn read_body(&mut self, rest: &str, last: bool) -> (usize, FormStep) {
        match find(rest, &ENDS, last) {
            MarkerMatch::At(0, i) => {
                let n = if i < N_OWN_ENDS { ENDS[i].len() } else { 0 };
                self.at = HarmonyState::Text;
                (0, FormStep::Took(n))
            }
            MarkerMatch::Perhaps(0) => (0, FormStep::More),
            MarkerMatch::At(n, _) | MarkerMatch::Perhaps(n) => (n, FormStep::Took(n)),
            MarkerMatch::Nowhere => (rest.len(), FormStep::Took(rest.len())),
        }
    }

    fn read_reasoning(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        self.at = HarmonyState::Reasoning;
        let (n, turn) = self.read_body(rest, last);
        sink.add_reasoning(&rest[..n]);
        if matches!(self.at, HarmonyState::Text) {
            sink.end_reasoning();
        }
        turn
    }

    fn read_content(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        self.at = HarmonyState::Content;
        let (n, turn) = self.read_body(rest, last);
        sink.add_content(&rest[..n]);
        turn
    }

    fn read_arguments(&mut self, mut raw: RawValue, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        let n = if raw.is_begun() { 0 } else { blank(rest) };
        if n > 0 {
            self.at = HarmonyState::Arguments(raw);
            return FormStep::Took(n);
        }
        let Some(step) = raw.step(rest, &ENDS, last) else {
            self.at = HarmonyState::Arguments(raw);
            return FormStep::More;
        };
        sink.arguments(&step.text);
        self.at = if step.is_whole { HarmonyState::Content } else { HarmonyState::Arguments(raw) };
        if step.is_whole {
            sink.end_call();
        }
        FormStep::Took(step.n)
    }
}

fn emit_content(text: &str, sink: &mut PieceSink) -> FormStep {
    sink.add_content(text);
    FormStep::Took(text.len())
}

impl Form for HarmonyForm {
    fn step(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep {
        match std::mem::replace(&mut self.at, HarmonyState::Text) {
            HarmonyState::Start => {
                self.at = HarmonyState::Start;
                self.start(rest, last)
            }
            HarmonyState::Text => self.read_text(rest, last, sink),
            HarmonyState::Header(header) => self.read_header(header, rest, last, sink),
            HarmonyState::Reasoning => self.read_reasoning(rest, last, sink),
            HarmonyState::Content => self.read_content(rest, last, sink),
            HarmonyState::Arguments(raw) => self.read_arguments(raw, rest, last, sink),
        }
    }

    /// An unfinished header is no text, and is dropped.
    fn finish(&mut self, sink: &mut PieceSink) {
        if let HarmonyState::Arguments(raw) = &mut self.at {
            sink.arguments(&raw.rest());
        }
    }
}
