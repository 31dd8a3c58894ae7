//! Selects a model's format of calls and format of thoughts, by name or from its chat template. Has no knowledge of
//! answers.

use crate::families::{CallForm, ThoughtForm};
use crate::forms::frame::FrameForm;
use crate::forms::harmony::{self, HarmonyForm};
use crate::forms::{Form, PlainForm};
use crate::names::{CALLS, TEMPLATE_CALLS, TEMPLATE_THOUGHTS, THOUGHTS};
use crate::sink::PieceSink;
use crate::thoughts::{AnswerStart, ThoughtReader};
use crate::{AnswerParser, ToolChoice, Tools, enforce};
use serde_json::Value;

/// How a family writes calls and thoughts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dialect {
    calls: CallForm,
    thoughts: ThoughtForm,
}

/// Where thoughts begin and end in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThoughtTexts {
    pub opens: Vec<&'static str>,
    /// A model writes the first one to end a thought and answer.
    pub closes: Vec<&'static str>,
    /// Whether one answer may contain several thoughts.
    pub repeats: bool,
}

/// No form has this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDialect {
    pub name: String,
    pub known: Vec<&'static str>,
}

impl std::fmt::Display for UnknownDialect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} is not a known format; use one of {}", self.name, self.known.join(", "))
    }
}

impl std::error::Error for UnknownDialect {}

fn by_name<T: Copy>(table: &[(&'static str, T)], name: &str) -> Result<T, UnknownDialect> {
    let found = table.iter().find(|(known, _)| *known == name).map(|(_, form)| *form);
    let known = || table.iter().map(|(known, _)| *known).collect();
    found.ok_or_else(|| UnknownDialect { name: name.to_owned(), known: known() })
}

impl Dialect {
    /// A dialect without calls and thoughts.
    pub const NONE: Dialect = Dialect { calls: CallForm::None, thoughts: ThoughtForm::None };

    /// Detects the dialect from a chat template's text.
    pub fn of_template(template: &str) -> Dialect {
        let shows = |words: &&[&str]| words.iter().all(|word| template.contains(word));
        let calls = TEMPLATE_CALLS.iter().find(|(words, _)| shows(words));
        let thoughts = TEMPLATE_THOUGHTS.iter().find(|(words, _)| shows(words));
        Dialect::of(
            calls.map_or(CallForm::None, |(_, form)| *form),
            thoughts.map_or(ThoughtForm::None, |(_, form)| *form),
        )
    }

    /// In harmony calls and thoughts are both messages, so neither combines with another form.
    fn of(calls: CallForm, thoughts: ThoughtForm) -> Dialect {
        match (calls, thoughts) {
            (CallForm::Harmony, _) | (CallForm::Framed(_), ThoughtForm::Harmony) => {
                Dialect { calls: CallForm::Harmony, thoughts: ThoughtForm::Harmony }
            }
            _ => Dialect { calls, thoughts },
        }
    }

    /// Returns this dialect with the calls of that name.
    pub fn with_call_form(self, name: &str) -> Result<Dialect, UnknownDialect> {
        by_name(CALLS, name).map(|calls| Dialect::of(calls, self.thoughts))
    }

    /// Returns this dialect with the thoughts of that name.
    pub fn with_thought_form(self, name: &str) -> Result<Dialect, UnknownDialect> {
        by_name(THOUGHTS, name).map(|thoughts| Dialect::of(self.calls, thoughts))
    }

    /// Whether its calls have a form, including the generic one.
    pub fn has_calls(&self) -> bool {
        self.calls != CallForm::None
    }

    pub fn has_thoughts(&self) -> bool {
        self.thoughts != ThoughtForm::None
    }

    /// Returns the special tokens whose text a [`AnswerParser`] must receive.
    pub fn markers(&self) -> Vec<&'static str> {
        let mut markers = match self.thoughts {
            ThoughtForm::None => Vec::new(),
            ThoughtForm::Marked(marks) => [marks.open, marks.close].concat(),
            ThoughtForm::Harmony => harmony::MARKERS.to_vec(),
        };
        match self.calls {
            CallForm::None => {}
            CallForm::Framed(style) => markers.extend(style.markers()),
            CallForm::Harmony => markers.extend(harmony::MARKERS),
        }
        markers.sort_unstable();
        markers.dedup();
        markers
    }

    /// Returns where an answer begins, after a prompt with this end.
    pub fn opens_thought(&self, prompt_tail: &str) -> AnswerStart {
        let is_open = match self.thoughts {
            ThoughtForm::None => false,
            ThoughtForm::Marked(marks) => marks.is_open_at_end_of(prompt_tail),
            ThoughtForm::Harmony => prompt_tail.ends_with(harmony::THOUGHT_OPEN),
        };
        if is_open { AnswerStart::Thought } else { AnswerStart::Answer }
    }

    /// Returns a reader for one answer. Without tools the answer contains no calls.
    pub fn answer_parser(&self, tools: &Tools, opening: AnswerStart) -> AnswerParser {
        let in_thought = opening == AnswerStart::Thought;
        let sink = if tools.is_empty() { PieceSink::plain() } else { PieceSink::default() };
        if self.thoughts == ThoughtForm::Harmony {
            let has_tools = self.calls == CallForm::Harmony && !tools.is_empty();
            return AnswerParser::new(None, Box::new(HarmonyForm::new(has_tools, in_thought)), sink);
        }
        let form: Box<dyn Form> = match self.calls {
            CallForm::Framed(style) if !tools.is_empty() => Box::new(FrameForm::new(style, tools.clone())),
            _ => Box::new(PlainForm),
        };
        let thought = match self.thoughts {
            ThoughtForm::Marked(marks) => Some(ThoughtReader::new(marks, opening)),
            _ => None,
        };
        AnswerParser::new(thought, form, sink)
    }

    /// Returns the structural tag that makes a text contain the required calls, or None if any text is valid. `opening`
    /// is where the answer begins; `think` allows a thought first.
    pub fn structural_tag(
        &self,
        tools: &Tools,
        choice: &ToolChoice,
        parallel: bool,
        opening: AnswerStart,
        think: bool,
    ) -> Option<Value> {
        let calls = enforce::calls(&self.calls.layout()?, tools, choice, parallel)?;
        Some(enforce::structural_tag(self.put_after_thought(calls, opening, think)))
    }

    /// Returns the texts around a thought. None if the dialect has no thoughts.
    pub fn thought_texts(&self) -> Option<ThoughtTexts> {
        match self.thoughts {
            ThoughtForm::None => None,
            ThoughtForm::Marked(marks) => {
                let closes = marks.close.iter().chain(marks.until).copied().collect();
                Some(ThoughtTexts { opens: marks.open.to_vec(), closes, repeats: false })
            }
            ThoughtForm::Harmony => {
                Some(ThoughtTexts { opens: vec![harmony::THOUGHT_OPEN], closes: harmony::ENDS.to_vec(), repeats: true })
            }
        }
    }

    /// Puts a format of a structural tag after the thought that the answer has, or may have.
    pub fn put_after_thought(&self, format: Value, opening: AnswerStart, think: bool) -> Value {
        enforce::put_after_thought(format, self.thoughts, opening, think)
    }
}
