//! Context-free rules over sets of texts: made by a part that knows what they mean, written as Lark. Rules that no
//! text can satisfy are cut, so that a matcher never runs into one.

use crate::words::TextSet;
use crate::{GrammarLimits, GrammarRefused};
use std::collections::HashMap;
use std::fmt::Write;

pub(crate) type RuleIdx = usize;

#[derive(Clone, Debug)]
pub(crate) enum Symbol {
    Rule(RuleIdx),
    /// One of the sets, by its number.
    Words(usize),
    /// A rule that is defined elsewhere.
    Named(String),
    Maybe(Vec<Symbol>),
    Many {
        of: Vec<Symbol>,
        min: usize,
        max: Option<usize>,
    },
}

#[derive(Default)]
pub(crate) struct GrammarRules {
    /// The alternatives of each.
    rules: Vec<Vec<Vec<Symbol>>>,
    words: Vec<String>,
    known: HashMap<String, usize>,
    n_symbols: usize,
}

impl GrammarRules {
    pub(crate) fn reserve(&mut self) -> RuleIdx {
        self.rules.push(Vec::new());
        self.rules.len() - 1
    }

    pub(crate) fn define(&mut self, rule: RuleIdx, alternatives: Vec<Vec<Symbol>>) {
        self.n_symbols += alternatives.iter().map(Vec::len).sum::<usize>();
        self.rules[rule] = alternatives;
    }

    pub(crate) fn add(&mut self, alternatives: Vec<Vec<Symbol>>) -> RuleIdx {
        let rule = self.reserve();
        self.define(rule, alternatives);
        rule
    }

    pub(crate) fn words(&mut self, words: &TextSet) -> Symbol {
        let text = words.lark();
        let n = self.words.len();
        let index = *self.known.entry(text).or_insert_with_key(|text| {
            self.words.push(text.clone());
            n
        });
        Symbol::Words(index)
    }

    /// Symbols of all alternatives, and rules.
    fn size(&self) -> usize {
        self.n_symbols + self.rules.len()
    }

    pub(crate) fn check_size(&self, limits: &GrammarLimits) -> Result<(), GrammarRefused> {
        match self.size() > limits.symbols_max {
            true => Err(GrammarRefused::too_large("the size of the grammar", limits.symbols_max)),
            false => Ok(()),
        }
    }

    /// As Lark, with names that begin with `prefix`; none if no text satisfies `start`.
    pub(crate) fn write(&self, start: RuleIdx, prefix: &str, out: &mut String) -> Option<()> {
        let can = self.satisfiable();
        if !can[start] {
            return None;
        }
        let mut left = vec![start];
        let mut is_written = vec![false; self.rules.len()];
        let mut is_used = vec![false; self.words.len()];
        is_written[start] = true;
        while let Some(rule) = left.pop() {
            let mut alternatives: Vec<String> = Vec::new();
            for alternative in self.rules[rule].iter().filter(|parts| all_satisfiable(parts, &can)) {
                let mut text = String::new();
                self.sequence(alternative, prefix, &can, &mut text);
                alternatives.push(if text.is_empty() { " \"\"".to_owned() } else { text });
                visit_symbols(alternative, &can, &mut |symbol| match symbol {
                    Symbol::Rule(rule) if !std::mem::replace(&mut is_written[*rule], true) => left.push(*rule),
                    Symbol::Words(index) => is_used[*index] = true,
                    _ => {}
                });
            }
            _ = writeln!(out, "{prefix}{rule}:{}", alternatives.join(" |"));
        }
        for (index, words) in self.words.iter().enumerate().filter(|(index, _)| is_used[*index]) {
            _ = writeln!(out, "{}{index}: {words}", prefix.to_uppercase());
        }
        Some(())
    }

    fn sequence(&self, parts: &[Symbol], prefix: &str, can: &[bool], out: &mut String) {
        for part in parts {
            match part {
                Symbol::Rule(rule) => _ = write!(out, " {prefix}{rule}"),
                Symbol::Words(index) => _ = write!(out, " {}{index}", prefix.to_uppercase()),
                Symbol::Named(name) => _ = write!(out, " {name}"),
                Symbol::Maybe(inner) | Symbol::Many { of: inner, min: 0, .. } if !all_satisfiable(inner, can) => {}
                Symbol::Many { max: Some(0), .. } => {}
                Symbol::Maybe(inner) => {
                    *out += " (";
                    self.sequence(inner, prefix, can, out);
                    *out += " )?";
                }
                Symbol::Many { of, min, max } => {
                    *out += " (";
                    self.sequence(of, prefix, can, out);
                    _ = match max {
                        Some(max) => write!(out, " ){{{min},{max}}}"),
                        None => write!(out, " ){{{min},}}"),
                    };
                }
            }
        }
    }

    /// Which rules some text satisfies: those with an alternative whose parts all are, found from the leaves up.
    fn satisfiable(&self) -> Vec<bool> {
        let mut can = vec![false; self.rules.len()];
        let mut waits: Vec<Vec<RuleIdx>> = vec![Vec::new(); self.rules.len()];
        for (rule, alternatives) in self.rules.iter().enumerate() {
            for alternative in alternatives {
                visit_all_symbols(alternative, &mut |symbol| {
                    if let Symbol::Rule(needed) = symbol {
                        waits[*needed].push(rule);
                    }
                });
            }
        }
        let mut left: Vec<RuleIdx> = (0..self.rules.len()).collect();
        while let Some(rule) = left.pop() {
            if !can[rule] && self.rules[rule].iter().any(|parts| all_satisfiable(parts, &can)) {
                can[rule] = true;
                left.append(&mut waits[rule]);
            }
        }
        can
    }
}

/// Whether every part can be satisfied.
fn all_satisfiable(parts: &[Symbol], can: &[bool]) -> bool {
    parts.iter().all(|part| match part {
        Symbol::Rule(rule) => can[*rule],
        Symbol::Many { of, min, .. } if *min > 0 => all_satisfiable(of, can),
        _ => true,
    })
}

/// Each symbol that is written.
fn visit_symbols(parts: &[Symbol], can: &[bool], see: &mut impl FnMut(&Symbol)) {
    for part in parts {
        match part {
            Symbol::Many { max: Some(0), .. } => {}
            Symbol::Maybe(inner) | Symbol::Many { of: inner, .. } if all_satisfiable(inner, can) => {
                visit_symbols(inner, can, see)
            }
            Symbol::Maybe(_) | Symbol::Many { .. } => {}
            other => see(other),
        }
    }
}

fn visit_all_symbols(parts: &[Symbol], see: &mut impl FnMut(&Symbol)) {
    for part in parts {
        match part {
            Symbol::Maybe(inner) | Symbol::Many { of: inner, .. } => visit_all_symbols(inner, see),
            other => see(other),
        }
    }
}
