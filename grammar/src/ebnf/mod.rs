//! EBNF as vLLM and XGrammar read it, and llama.cpp's GBNF, to rules. Both count characters; the engine counts words,
//! the longest first. `lower` makes words only where that is the same.

mod lower;
mod reader;

use crate::rules::{RuleIdx, Rules};
use crate::words::Chars;
use crate::{GrammarLimits, GrammarRefused};
use std::collections::HashMap;

/// Which of the two, for what they write differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EbnfNotation {
    Ebnf,
    Gbnf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Expr {
    Chars(Chars),
    Rule(String),
    Sequence(Vec<Expr>),
    Either(Vec<Expr>),
    Repeat { of: Box<Expr>, min: usize, max: Option<usize> },
}

pub(super) type EbnfRules = HashMap<String, Expr>;

/// The rule that `root` is.
pub(crate) fn write(
    text: &str,
    form: EbnfNotation,
    rules: &mut Rules,
    limits: &GrammarLimits,
) -> Result<RuleIdx, GrammarRefused> {
    limits.check_bytes(text.len())?;
    let grammar = reader::read(text, form, limits)?;
    lower::lower(&grammar, rules, limits)
}
