//! EBNF as vLLM and XGrammar read it, and llama.cpp's GBNF, to rules. Both count characters; the engine counts words,
//! the longest first. `lower` makes words only where that is the same.

mod lower;
mod reader;

use crate::rules::{GrammarRules, RuleIdx};
use crate::words::CharSet;
use crate::{GrammarLimits, GrammarRefused};
use std::collections::HashMap;

/// Which of the two, for what they write differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EbnfNotation {
    Ebnf,
    Gbnf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EbnfExpr {
    Chars(CharSet),
    Rule(String),
    Sequence(Vec<EbnfExpr>),
    Either(Vec<EbnfExpr>),
    Repeat { of: Box<EbnfExpr>, min: usize, max: Option<usize> },
}

pub(super) type EbnfRules = HashMap<String, EbnfExpr>;

/// The rule that `root` is.
pub(crate) fn write(
    text: &str,
    form: EbnfNotation,
    rules: &mut GrammarRules,
    limits: &GrammarLimits,
) -> Result<RuleIdx, GrammarRefused> {
    limits.check_bytes(text.len())?;
    let grammar = reader::read(text, form, limits)?;
    lower::lower(&grammar, rules, limits)
}
