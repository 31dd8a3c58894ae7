//! A set of texts in the engine's form: as Lark, or as an automaton that tests for emptiness and membership.

use crate::lark;
use llguidance::derivre::{Regex, RegexAst, RegexBuilder};

/// A set of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TextSet {
    Text(String),
    /// In the engine's syntax, matched as a whole.
    Regex(String),
    /// One after another.
    Then(Vec<TextSet>),
    All(Vec<TextSet>),
    Any(Vec<TextSet>),
    Not(Box<TextSet>),
}

impl TextSet {
    pub(crate) fn regex(text: impl Into<String>) -> TextSet {
        TextSet::Regex(text.into())
    }

    pub(crate) fn not(words: TextSet) -> TextSet {
        TextSet::Not(Box::new(words))
    }

    /// Returns a Lark expression for use in a terminal.
    pub(crate) fn lark(&self) -> String {
        let many = |all: &[TextSet], between| all.iter().map(TextSet::lark).collect::<Vec<_>>().join(between);
        match self {
            TextSet::Text(text) => lark::literal(text),
            TextSet::Regex(regex) => lark::regex(regex),
            TextSet::Then(all) => format!("({})", many(all, " ")),
            TextSet::All(all) => format!("({})", many(all, " & ")),
            TextSet::Any(all) => format!("({})", many(all, " | ")),
            TextSet::Not(inner) => format!("~({})", inner.lark()),
        }
    }

    fn ast(&self) -> RegexAst {
        let many = |all: &[TextSet]| all.iter().map(TextSet::ast).collect();
        match self {
            TextSet::Text(text) => RegexAst::Literal(text.clone()),
            TextSet::Regex(regex) => RegexAst::Regex(regex.clone()),
            TextSet::Then(all) => RegexAst::Concat(many(all)),
            TextSet::All(all) => RegexAst::And(many(all)),
            TextSet::Any(all) => RegexAst::Or(many(all)),
            TextSet::Not(inner) => RegexAst::Not(Box::new(inner.ast())),
        }
    }

    /// Returns an automaton of the set for queries; an error if the work exceeds `fuel`.
    pub(crate) fn automaton(&self, fuel: u64) -> Result<Automaton, String> {
        let mut builder = RegexBuilder::new();
        let expr = builder.mk(&self.ast()).map_err(|e| e.to_string())?;
        builder.to_regex_limited(expr, fuel).map(Automaton).map_err(|e| e.to_string())
    }

    /// Whether no text is in the set.
    pub(crate) fn is_empty(&self, fuel: u64) -> Result<bool, String> {
        self.automaton(fuel).map(|mut automaton| automaton.0.always_empty())
    }

    #[cfg(test)]
    pub(crate) fn has(&self, text: &str, fuel: u64) -> Result<bool, String> {
        self.automaton(fuel).map(|mut automaton| automaton.has(text))
    }
}

/// A set of texts with a membership test.
pub(crate) struct Automaton(Regex);

impl Automaton {
    pub(crate) fn has(&mut self, text: &str) -> bool {
        self.0.is_match(text)
    }
}
