//! Thoughts between two markers at the start of an answer. Has no knowledge of calls. Harmony's channels are a form of
//! their own.
//!
//! `blank · open · label · reasoning · close · newlines · the rest`

use crate::marker::{MarkerMatch, MarkerPrefix, blank, find, match_prefix};
use crate::sink::PieceSink;

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
pub enum AnswerStart {
    Answer,
    /// The prompt ends within a thought, which the answer continues.
    Thought,
}

/// Reads the thought of one answer.
#[derive(Debug)]
pub(crate) struct ThoughtReader {
    marks: &'static ThoughtMarks,
    /// The ends of a thought: the closing markers, then those of `until`.
    ends: Vec<&'static str>,
    at: ThoughtState,
    /// White space before a possible thought.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ThoughtState {
    Start,
    Label,
    Inside,
    Behind,
}

pub(crate) enum ThoughtStep {
    Took(usize),
    /// The text may continue as a marker.
    More,
    /// The rest is no thought.
    Over,
}

impl ThoughtReader {
    pub fn new(marks: &'static ThoughtMarks, opening: AnswerStart) -> ThoughtReader {
        let ends = marks.close.iter().chain(marks.until).copied().collect();
        let at = match opening {
            AnswerStart::Answer => ThoughtState::Start,
            AnswerStart::Thought => ThoughtState::Label,
        };
        ThoughtReader { marks, ends, at, held: String::new() }
    }

    pub fn held(&self) -> &str {
        &self.held
    }

    pub fn step(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> ThoughtStep {
        match self.at {
            ThoughtState::Start => self.start(rest, last),
            ThoughtState::Label => self.label(rest, last),
            ThoughtState::Inside => self.read_thought(rest, last, sink),
            ThoughtState::Behind => {
                let n = rest.len() - rest.trim_start_matches('\n').len();
                if n == 0 { ThoughtStep::Over } else { ThoughtStep::Took(n) }
            }
        }
    }

    fn start(&mut self, rest: &str, last: bool) -> ThoughtStep {
        let n = blank(rest);
        if n > 0 {
            self.held.push_str(&rest[..n]);
            return ThoughtStep::Took(n);
        }
        match match_prefix(rest, self.marks.open, last) {
            MarkerPrefix::With(i) => {
                self.held.clear();
                self.at = ThoughtState::Label;
                ThoughtStep::Took(self.marks.open[i].len())
            }
            MarkerPrefix::Perhaps => ThoughtStep::More,
            MarkerPrefix::No => ThoughtStep::Over,
        }
    }

    fn label(&mut self, rest: &str, last: bool) -> ThoughtStep {
        let label =
            if self.marks.label.is_empty() { MarkerPrefix::No } else { match_prefix(rest, &[self.marks.label], last) };
        match label {
            MarkerPrefix::Perhaps => ThoughtStep::More,
            MarkerPrefix::With(_) => {
                self.at = ThoughtState::Inside;
                ThoughtStep::Took(self.marks.label.len())
            }
            MarkerPrefix::No => {
                self.at = ThoughtState::Inside;
                ThoughtStep::Took(0)
            }
        }
    }

    fn read_thought(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> ThoughtStep {
        match find(rest, &self.ends, last) {
            MarkerMatch::At(0, i) => {
                sink.end_reasoning();
                self.at = ThoughtState::Behind;
                if i < self.marks.close.len() { ThoughtStep::Took(self.ends[i].len()) } else { ThoughtStep::Over }
            }
            MarkerMatch::Perhaps(0) => ThoughtStep::More,
            MarkerMatch::At(n, _) | MarkerMatch::Perhaps(n) => {
                sink.add_reasoning(&rest[..n]);
                ThoughtStep::Took(n)
            }
            MarkerMatch::Nowhere => {
                sink.add_reasoning(rest);
                ThoughtStep::Took(rest.len())
            }
        }
    }
}
