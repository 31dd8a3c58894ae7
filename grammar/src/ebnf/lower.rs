//! Lowers rules over characters to rules over sets of words.
//!
//! The engine takes the longest word that fits, while a grammar over characters takes any. The two agree where no word
//! is a prefix of another. So a part without recursion becomes one set of words, unless one of its words is a prefix of
//! a word in some set. Then the part is split, down to single characters if necessary. A grammar without recursion is
//! one set.

use super::{EbnfExpr, EbnfRules};
use crate::rules::{GrammarRules, RuleIdx, Symbol};
use crate::words::TextSet;
use crate::{GrammarLimits, GrammarRefused};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A longer expression does not become one set of words.
const EXPRESSION_MAX: usize = 20_000;
/// More sets than this are not compared with each other: all are split.
const SETS_MAX: usize = 80;
/// The work limit for comparing two sets.
const COMPARE_FUEL: u64 = 20_000;

struct EbnfLowering<'g, 'r> {
    grammar: &'g EbnfRules,
    rules: &'r mut GrammarRules,
    /// The expression of each rule without recursion.
    regular: HashMap<&'g str, Option<String>>,
    /// Expressions that are split.
    apart: HashSet<String>,
    known: HashMap<&'g str, RuleIdx>,
    waiting: Vec<(&'g str, RuleIdx)>,
    /// Expressions that are sets of words, and whether each is of single characters.
    sets: BTreeMap<String, bool>,
}

pub(super) fn lower(
    grammar: &EbnfRules,
    rules: &mut GrammarRules,
    limits: &GrammarLimits,
) -> Result<RuleIdx, GrammarRefused> {
    let mut apart = HashSet::new();
    loop {
        // No rules from an earlier round are written.
        let mut lower = EbnfLowering {
            grammar,
            rules,
            regular: regular(grammar),
            apart: std::mem::take(&mut apart),
            known: HashMap::new(),
            waiting: Vec::new(),
            sets: BTreeMap::new(),
        };
        if let Some(Some(whole)) = lower.regular.get("root") {
            let words = lower.rules.words(&TextSet::Regex(whole.clone()));
            return Ok(lower.rules.add(vec![vec![words]]));
        }
        let start = lower.rule("root");
        while let Some((name, rule)) = lower.waiting.pop() {
            let symbols = lower.symbols(&grammar[name]);
            lower.rules.define(rule, vec![symbols]);
            lower.rules.check_size(limits)?;
        }
        let found = ambiguous(&lower.sets);
        apart = lower.apart;
        if found.is_empty() {
            return Ok(start);
        }
        apart.extend(found);
    }
}

/// Returns the sets with a word that is a prefix of another, and the sets of the longer words.
fn ambiguous(sets: &BTreeMap<String, bool>) -> Vec<String> {
    let large = || sets.iter().filter(|(_, is_single)| !**is_single).map(|(set, _)| set.clone());
    if sets.len() > SETS_MAX {
        return large().collect();
    }
    let begins = |a: &String, b: &String| {
        let longer = TextSet::Then(vec![TextSet::Regex(a.clone()), TextSet::regex("(?s:.+)")]);
        !TextSet::All(vec![longer, TextSet::Regex(b.clone())]).is_empty(COMPARE_FUEL).unwrap_or(false)
    };
    let mut found = HashSet::new();
    for set in large() {
        for (other, is_single) in sets {
            if begins(&set, other) || begins(other, &set) {
                found.insert(set.clone());
                if !is_single {
                    found.insert(other.clone());
                }
            }
        }
    }
    found.into_iter().collect()
}

impl<'g> EbnfLowering<'g, '_> {
    fn rule(&mut self, name: &'g str) -> RuleIdx {
        if let Some(rule) = self.known.get(name) {
            return *rule;
        }
        let rule = self.rules.reserve();
        self.known.insert(name, rule);
        self.waiting.push((name, rule));
        rule
    }

    fn symbols(&mut self, expr: &'g EbnfExpr) -> Vec<Symbol> {
        let whole = expr_to_regex(expr, &self.regular).filter(|_| !is_nullable(expr, self.grammar, 0));
        if let Some(whole) = whole.filter(|whole| !self.apart.contains(whole)) {
            let is_single = matches!(expr, EbnfExpr::Chars(_));
            *self.sets.entry(whole.clone()).or_insert(true) &= is_single;
            return vec![self.rules.words(&TextSet::Regex(whole))];
        }
        match expr {
            // Always a set, as nothing is smaller.
            EbnfExpr::Chars(chars) => vec![self.rules.words(&TextSet::Regex(chars.class()))],
            EbnfExpr::Rule(name) => vec![Symbol::Rule(self.rule(name))],
            EbnfExpr::Sequence(parts) => parts.iter().flat_map(|part| self.symbols(part)).collect(),
            EbnfExpr::Either(options) => {
                let options = options.iter().map(|option| self.symbols(option)).collect();
                vec![Symbol::Rule(self.rules.add(options))]
            }
            EbnfExpr::Repeat { of, min, max } => {
                let of = self.symbols(of);
                let of = vec![Symbol::Rule(self.rules.add(vec![of]))];
                vec![Symbol::Many { of, min: *min, max: *max }]
            }
        }
    }
}

/// Returns the expression of each rule that reaches no recursion, if it is not too large.
fn regular(grammar: &EbnfRules) -> HashMap<&str, Option<String>> {
    let mut known: HashMap<&str, Option<String>> = HashMap::new();
    // A rule is spelled out once all rules that it uses are. A rule that never is either recurses or uses one that
    // does.
    loop {
        let mut fresh = Vec::new();
        for (name, expr) in grammar.iter().filter(|(name, _)| !known.contains_key(name.as_str())) {
            if uses(expr).iter().all(|used| known.contains_key(used)) {
                fresh.push((name.as_str(), expr_to_regex(expr, &known)));
            }
        }
        if fresh.is_empty() {
            return known;
        }
        known.extend(fresh);
    }
}

fn uses(expr: &EbnfExpr) -> Vec<&str> {
    match expr {
        EbnfExpr::Chars(_) => Vec::new(),
        EbnfExpr::Rule(name) => vec![name],
        EbnfExpr::Sequence(parts) | EbnfExpr::Either(parts) => parts.iter().flat_map(uses).collect(),
        EbnfExpr::Repeat { of, .. } => uses(of),
    }
}

fn expr_to_regex(expr: &EbnfExpr, known: &HashMap<&str, Option<String>>) -> Option<String> {
    let text = match expr {
        EbnfExpr::Chars(chars) => chars.class(),
        EbnfExpr::Rule(name) => known.get(name.as_str())?.clone()?,
        EbnfExpr::Sequence(parts) => {
            let parts: Option<Vec<String>> = parts.iter().map(|part| expr_to_regex(part, known)).collect();
            parts?.concat()
        }
        EbnfExpr::Either(options) => {
            let options: Option<Vec<String>> = options.iter().map(|option| expr_to_regex(option, known)).collect();
            format!("(?:{})", options?.join("|"))
        }
        EbnfExpr::Repeat { of, min, max } => {
            let max = max.map_or(String::new(), |max| max.to_string());
            format!("(?:{}){{{min},{max}}}", expr_to_regex(of, known)?)
        }
    };
    (text.len() <= EXPRESSION_MAX).then_some(text)
}

/// Whether the expression matches the empty text. Recursion is followed only to a limited depth, as a recursive
/// expression is no set of words.
fn is_nullable(expr: &EbnfExpr, grammar: &EbnfRules, depth: usize) -> bool {
    match expr {
        EbnfExpr::Chars(_) => false,
        EbnfExpr::Rule(name) => {
            depth > 100 || grammar.get(name).is_some_and(|expr| is_nullable(expr, grammar, depth + 1))
        }
        EbnfExpr::Sequence(parts) => parts.iter().all(|part| is_nullable(part, grammar, depth)),
        EbnfExpr::Either(options) => options.iter().any(|option| is_nullable(option, grammar, depth)),
        EbnfExpr::Repeat { of, min, .. } => *min == 0 || is_nullable(of, grammar, depth),
    }
}
