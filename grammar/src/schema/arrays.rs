//! Lists: the claims on each item, the number of items, and how many of them satisfy a claim.

use super::blank;
use super::claims::{ClaimRules, RuleQueue};
use super::facts::{ArrayFacts, ContainsClaim, SchemaClaim};
use super::solver::ClaimSolver;
use super::unique::unique_items;
use crate::GrammarRefused;
use crate::rules::Symbol;
use crate::words::TextSet;

/// Adds the lists that satisfy the facts to `out`.
pub(super) fn write_array(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &ArrayFacts,
    out: &mut Vec<Vec<Symbol>>,
) -> Result<(), GrammarRefused> {
    let (min, max) = facts.n_items;
    if max.is_some_and(|max| max < min) {
        return Ok(());
    }
    let repeat_max = solver.document.limits.repeat_max;
    if min.max(max.unwrap_or(0)) > repeat_max {
        return Err(GrammarRefused::too_large("a count of items", repeat_max));
    }
    let open = rules.grammar.words(&blank::open('['));
    let close = rules.grammar.words(&blank::close(']'));
    if min == 0 && facts.contains.iter().all(|contains| contains.min == 0) {
        out.push(vec![rules.grammar.words(&TextSet::Text("[]".to_owned()))]);
    }
    let is_unique = facts.is_unique && max.is_none_or(|max| max > 1);
    let inner = match facts.contains.is_empty() {
        _ if is_unique => Some(unique_items(rules.grammar, solver, facts)?),
        true => plain_items(rules, facts),
        false => Some(counted_items(rules, solver, facts)?),
    };
    out.extend(inner.into_iter().map(|inner| [vec![open.clone()], inner, vec![close.clone()]].concat()));
    Ok(())
}

/// One or more items: those with places of their own, and any number of the others.
fn plain_items(rules: &mut ClaimRules, facts: &ArrayFacts) -> Option<Vec<Symbol>> {
    let (min, max) = facts.n_items;
    let n_own = facts.first_uniform_place();
    let comma = rules.grammar.words(&blank::comma());
    let n_first = n_own.min(max.unwrap_or(n_own)).max(1);
    if max == Some(0) {
        return None;
    }
    let mut rest: Vec<Symbol> = Vec::new();
    if max.is_none_or(|max| max > n_first) {
        let item = Symbol::Rule(rules.rule_of(facts.claims_at(n_own.max(n_first))));
        let (min, max) = (min.saturating_sub(n_first), max.map(|max| max - n_first));
        rest = vec![Symbol::Many { of: vec![comma.clone(), item], min, max }];
    }
    for at in (0..n_first).rev() {
        let item = Symbol::Rule(rules.rule_of(facts.claims_at(at)));
        let mut here = if at == 0 { vec![item] } else { vec![comma.clone(), item] };
        here.append(&mut rest);
        // From here on the list may end before this item.
        rest = if at > 0 && at >= min {
            vec![Symbol::Maybe(vec![Symbol::Rule(rules.grammar.add(vec![here]))])]
        } else {
            here
        };
    }
    Some(rest)
}

/// A position while a list is written: the place of the next item, and the counts so far. All places that no claim
/// distinguishes count as one.
#[derive(Clone, PartialEq, Eq, Hash)]
struct ListPosition {
    at: usize,
    counts: Vec<usize>,
}

struct CountedList<'f> {
    facts: &'f ArrayFacts,
    /// From here on, all places have the same claims.
    same_from: usize,
    queue: RuleQueue<ListPosition>,
}

fn counted_items(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &ArrayFacts,
) -> Result<Vec<Symbol>, GrammarRefused> {
    let (min, max) = facts.n_items;
    let last_from = facts.contains.iter().map(|contains| contains.from).max().unwrap_or(0);
    let same_from = facts.first_uniform_place().max(last_from).max(min).max(max.unwrap_or(0));
    let mut list = CountedList { facts, same_from, queue: RuleQueue::new() };
    let first = ListPosition { at: 0, counts: vec![0; facts.contains.len()] };
    let start = list.queue.rule_of(first, rules.grammar);
    while let Some((rule, position)) = list.queue.pop() {
        solver.count_step(rules.grammar)?;
        let alternatives = list.alternatives_at(&position, rules, solver)?;
        rules.grammar.define(rule, alternatives);
    }
    Ok(vec![Symbol::Rule(start)])
}

impl CountedList<'_> {
    /// Returns what may follow at a position: the end of the list, or an item and what follows that.
    fn alternatives_at(
        &mut self,
        position: &ListPosition,
        rules: &mut ClaimRules,
        solver: &ClaimSolver,
    ) -> Result<Vec<Vec<Symbol>>, GrammarRefused> {
        let facts = self.facts;
        let (min, max) = facts.n_items;
        let mut alternatives = Vec::new();
        let is_enough = |(contains, count): (&ContainsClaim, &usize)| *count >= contains.min;
        if position.at > 0 && position.at >= min && facts.contains.iter().zip(&position.counts).all(is_enough) {
            alternatives.push(Vec::new());
        }
        if max.is_some_and(|max| position.at >= max) {
            return Ok(alternatives);
        }
        let comma = rules.grammar.words(&blank::comma());
        let open: Vec<usize> = (0..facts.contains.len()).filter(|i| facts.contains[*i].from <= position.at).collect();
        if open.len() > 4 {
            return Err(GrammarRefused::unsupported("contains", "more than four of them for one list"));
        }
        for bits in 0..1usize << open.len() {
            let satisfied = open.iter().enumerate().map(|(bit, i)| (*i, bits >> bit & 1 == 1));
            let Some((claims, counts)) = self.claims_and_counts(position, satisfied) else { continue };
            if solver.document.is_unsatisfiable(&claims) {
                continue;
            }
            let next = ListPosition { at: (position.at + 1).min(self.same_from.max(1)), counts };
            let follows = self.queue.rule_of(next, rules.grammar);
            let item = Symbol::Rule(rules.rule_of(claims));
            let mut step = if position.at == 0 { Vec::new() } else { vec![comma.clone()] };
            step.extend([item, Symbol::Rule(follows)]);
            alternatives.push(step);
        }
        Ok(alternatives)
    }

    /// The claims on an item that satisfies these `contains` or not, and the counts after it. None if that is one too
    /// many.
    fn claims_and_counts(
        &self,
        position: &ListPosition,
        satisfied: impl Iterator<Item = (usize, bool)>,
    ) -> Option<(Vec<SchemaClaim>, Vec<usize>)> {
        let (mut claims, mut counts) = (self.facts.claims_at(position.at), position.counts.clone());
        for (i, is) in satisfied {
            let contains = &self.facts.contains[i];
            let (place, holds) = contains.claim;
            if is {
                if contains.max.is_some_and(|max| counts[i] >= max) {
                    return None;
                }
                claims.push(contains.claim);
                counts[i] = (counts[i] + 1).min(contains.max.unwrap_or(contains.min).max(contains.min));
            } else if contains.max.is_some() {
                claims.push((place, !holds));
            }
        }
        Some((claims, counts))
    }
}
