//! A set of texts in the engine's form: as Lark, or as an automaton that tests for emptiness and membership.

use crate::lark;
use llguidance::derivre::{Regex, RegexAst, RegexBuilder};

/// A set of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Words {
    Text(String),
    /// In the engine's syntax, matched as a whole.
    Regex(String),
    /// One after another.
    Then(Vec<Words>),
    All(Vec<Words>),
    Any(Vec<Words>),
    Not(Box<Words>),
}

impl Words {
    pub(crate) fn regex(text: impl Into<String>) -> Words {
        Words::Regex(text.into())
    }

    pub(crate) fn not(words: Words) -> Words {
        Words::Not(Box::new(words))
    }

    /// Returns a Lark expression for use in a terminal.
    pub(crate) fn lark(&self) -> String {
        let many = |all: &[Words], between| all.iter().map(Words::lark).collect::<Vec<_>>().join(between);
        match self {
            Words::Text(text) => lark::literal(text),
            Words::Regex(regex) => lark::regex(regex),
            Words::Then(all) => format!("({})", many(all, " ")),
            Words::All(all) => format!("({})", many(all, " & ")),
            Words::Any(all) => format!("({})", many(all, " | ")),
            Words::Not(inner) => format!("~({})", inner.lark()),
        }
    }

    fn ast(&self) -> RegexAst {
        let many = |all: &[Words]| all.iter().map(Words::ast).collect();
        match self {
            Words::Text(text) => RegexAst::Literal(text.clone()),
            Words::Regex(regex) => RegexAst::Regex(regex.clone()),
            Words::Then(all) => RegexAst::Concat(many(all)),
            Words::All(all) => RegexAst::And(many(all)),
            Words::Any(all) => RegexAst::Or(many(all)),
            Words::Not(inner) => RegexAst::Not(Box::new(inner.ast())),
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
