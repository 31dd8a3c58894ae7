//! Thoughts between two markers at the start of an answer. Has no knowledge of calls. Harmony's channels are a form of
//! their own.
//!
//! `blank · open · label · reasoning · close · newlines · the rest`

use crate::marker::{Begins, Found, begins, blank, find};
use crate::sink::Sink;

/// How thoughts are written. A marker of `until` ends a thought too, and is no part of it.
#[derive(Debug, PartialEq)]
pub(crate) struct ThoughtMarks {
    pub open: &'static [&'static str],
    /// Follows the opening marker, and is no part of the thought.
    pub label: &'static str,
    pub close: &'static [&'static str],
    pub until: &'static [&'static str],
}

pub(crate) const THINK: ThoughtMarks = plain(&["<think>"], &["</think>"]);
pub(crate) const KIMI: ThoughtMarks = ThoughtMarks { until: &["<|tool_calls_section_begin|>"], ..THINK };
pub(crate) const MISTRAL: ThoughtMarks = plain(&["[THINK]"], &["[/THINK]"]);
pub(crate) const SEED: ThoughtMarks = plain(&["<seed:think>"], &["</seed:think>"]);
pub(crate) const COHERE: ThoughtMarks = plain(&["<|START_THINKING|>"], &["<|END_THINKING|>"]);
pub(crate) const GEMMA: ThoughtMarks =
    ThoughtMarks { label: "thought\n", until: &["<|tool_call>"], ..plain(&["<|channel>"], &["<channel|>"]) };
pub(crate) const GRANITE: ThoughtMarks = plain(
    &["Here is my thought process:", "Here's my thought process:"],
    &["Here is my response:", "Here's my response:"],
);

const fn plain(open: &'static [&'static str], close: &'static [&'static str]) -> ThoughtMarks {
    ThoughtMarks { open, label: "", close, until: &[] }
}

impl ThoughtMarks {
    /// Whether a prompt with this end leaves a thought open.
    pub fn is_open_at_end_of(&self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        let unlabelled = prompt.strip_suffix(self.label.trim_end()).unwrap_or(prompt);
        self.open.iter().any(|open| prompt.ends_with(open) || unlabelled.ends_with(open))
    }
}

/// Where an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    Answer,
    /// The prompt ends within a thought, which the answer continues.
    Thought,
}

/// Reads the thought of one answer.
#[derive(Debug)]
pub(crate) struct Thought {
    marks: &'static ThoughtMarks,
    /// The ends of a thought: the closing markers, then those of `until`.
    ends: Vec<&'static str>,
    at: At,
    /// White space before a possible thought.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Start,
    Label,
    Inside,
    Behind,
}

pub(crate) enum Split {
    Took(usize),
    /// The text may continue as a marker.
    More,
    /// The rest is no thought.
    Over,
}

impl Thought {
    pub fn new(marks: &'static ThoughtMarks, opening: Opening) -> Thought {
        let ends = marks.close.iter().chain(marks.until).copied().collect();
        let at = match opening {
            Opening::Answer => At::Start,
            Opening::Thought => At::Label,
        };
        Thought { marks, ends, at, held: String::new() }
    }

    pub fn held(&self) -> &str {
        &self.held
    }

    pub fn step(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Split {
        match self.at {
            At::Start => self.start(rest, last),
            At::Label => self.label(rest, last),
            At::Inside => self.inside(rest, last, sink),
            At::Behind => {
                let n = rest.len() - rest.trim_start_matches('\n').len();
                if n == 0 { Split::Over } else { Split::Took(n) }
            }
        }
    }

    fn start(&mut self, rest: &str, last: bool) -> Split {
        let n = blank(rest);
        if n > 0 {
            self.held.push_str(&rest[..n]);
            return Split::Took(n);
        }
        match begins(rest, self.marks.open, last) {
            Begins::With(i) => {
                self.held.clear();
                self.at = At::Label;
                Split::Took(self.marks.open[i].len())
            }
            Begins::Perhaps => Split::More,
            Begins::No => Split::Over,
        }
    }

    fn label(&mut self, rest: &str, last: bool) -> Split {
        let label = if self.marks.label.is_empty() { Begins::No } else { begins(rest, &[self.marks.label], last) };
        match label {
            Begins::Perhaps => Split::More,
            Begins::With(_) => {
                self.at = At::Inside;
                Split::Took(self.marks.label.len())
            }
            Begins::No => {
                self.at = At::Inside;
                Split::Took(0)
            }
        }
    }

    fn inside(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Split {
        match find(rest, &self.ends, last) {
            Found::At(0, i) => {
                sink.end_reasoning();
                self.at = At::Behind;
                if i < self.marks.close.len() { Split::Took(self.ends[i].len()) } else { Split::Over }
            }
            Found::Perhaps(0) => Split::More,
            Found::At(n, _) | Found::Perhaps(n) => {
                sink.reasoning(&rest[..n]);
                Split::Took(n)
            }
            Found::Nowhere => {
                sink.reasoning(rest);
                Split::Took(rest.len())
            }
        }
    }
}
