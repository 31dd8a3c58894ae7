//! Lists: the claims on each item, the number of items, and how many of them satisfy a claim.

use super::facts::{ContainsClaim, SchemaClaim, SchemaFacts};
use super::objects::blank;
use super::writer::SchemaWriter;
use crate::GrammarRefused;
use crate::rules::{RuleIdx, Symbol};
use std::collections::HashMap;

/// The claims on an item at its place.
pub(super) fn claims_at(facts: &SchemaFacts, at: usize) -> Vec<SchemaClaim> {
    let own = facts.item.iter().filter(|(i, _)| *i == at).map(|(_, claim)| *claim);
    own.chain(facts.items.iter().filter(|(from, _)| *from <= at).map(|(_, claim)| *claim)).collect()
}

/// A position while a list is written: the place of the next item, and the counts so far. All places that no claim
/// distinguishes count as one.
#[derive(Clone, PartialEq, Eq, Hash)]
struct ListPosition {
    at: usize,
    counts: Vec<usize>,
}

struct CountedList<'f, 'a> {
    facts: &'f SchemaFacts<'a>,
    /// From here on, all places have the same claims.
    same_from: usize,
    known: HashMap<ListPosition, RuleIdx>,
}

impl<'a> SchemaWriter<'_, 'a> {
    pub(super) fn array(&mut self, facts: &SchemaFacts<'a>, out: &mut Vec<Vec<Symbol>>) -> Result<(), GrammarRefused> {
        let (min, max) = facts.n_items;
        if max.is_some_and(|max| max < min) {
            return Ok(());
        }
        if min.max(max.unwrap_or(0)) > self.limits.repeat_max {
            return Err(GrammarRefused::too_large("a count of items", self.limits.repeat_max));
        }
        let open = self.rules.words(&blank::open('['));
        let close = self.rules.words(&blank::close(']'));
        if min == 0 && facts.contains.iter().all(|contains| contains.min == 0) {
            out.push(vec![self.rules.words(&crate::words::TextSet::Text("[]".to_owned()))]);
        }
        let is_unique = facts.is_unique && max.is_none_or(|max| max > 1);
        let inner = match facts.contains.is_empty() {
            _ if is_unique => self.unique_items(facts)?,
            true => self.plain_items(facts),
            false => self.counted_items(facts)?,
        };
        out.extend(inner.into_iter().map(|inner| [vec![open.clone()], inner, vec![close.clone()]].concat()));
        Ok(())
    }

    /// One or more items: those with places of their own, and any number of the others.
    fn plain_items(&mut self, facts: &SchemaFacts<'a>) -> Option<Vec<Symbol>> {
        let (min, max) = facts.n_items;
        let n_own = first_uniform_place(facts);
        let comma = self.rules.words(&blank::comma());
        let n_first = n_own.min(max.unwrap_or(n_own)).max(1);
        if max == Some(0) {
            return None;
        }
        let mut rest: Vec<Symbol> = Vec::new();
        if max.is_none_or(|max| max > n_first) {
            let item = Symbol::Rule(self.rule(claims_at(facts, n_own.max(n_first))));
            let (min, max) = (min.saturating_sub(n_first), max.map(|max| max - n_first));
            rest = vec![Symbol::Many { of: vec![comma.clone(), item], min, max }];
        }
        for at in (0..n_first).rev() {
            let item = Symbol::Rule(self.rule(claims_at(facts, at)));
            let mut here = if at == 0 { vec![item] } else { vec![comma.clone(), item] };
            here.append(&mut rest);
            // From here on the list may end before this item.
            rest = if at > 0 && at >= min {
                vec![Symbol::Maybe(vec![Symbol::Rule(self.rules.add(vec![here]))])]
            } else {
                here
            };
        }
        Some(rest)
    }

    fn counted_items(&mut self, facts: &SchemaFacts<'a>) -> Result<Option<Vec<Symbol>>, GrammarRefused> {
        let (min, max) = facts.n_items;
        let last_from = facts.contains.iter().map(|contains| contains.from).max().unwrap_or(0);
        let same_from = first_uniform_place(facts).max(last_from).max(min).max(max.unwrap_or(0));
        let counts = vec![0; facts.contains.len()];
        let mut list = CountedList { facts, same_from, known: HashMap::new() };
        let start = self.rules.reserve();
        list.known.insert(ListPosition { at: 0, counts: counts.clone() }, start);
        let mut waiting = vec![(start, ListPosition { at: 0, counts })];
        while let Some((rule, point)) = waiting.pop() {
            self.spend(1)?;
            let alternatives = self.item_alternatives(&mut list, &point, &mut waiting)?;
            self.rules.define(rule, alternatives);
        }
        Ok(Some(vec![Symbol::Rule(start)]))
    }

    /// Returns what may follow at a point of a list: its end, or an item and what follows that.
    fn item_alternatives(
        &mut self,
        list: &mut CountedList<'_, 'a>,
        point: &ListPosition,
        waiting: &mut Vec<(RuleIdx, ListPosition)>,
    ) -> Result<Vec<Vec<Symbol>>, GrammarRefused> {
        let facts = list.facts;
        let (min, max) = facts.n_items;
        let mut alternatives = Vec::new();
        let is_enough = |(contains, count): (&ContainsClaim, &usize)| *count >= contains.min;
        if point.at > 0 && point.at >= min && facts.contains.iter().zip(&point.counts).all(is_enough) {
            alternatives.push(Vec::new());
        }
        if max.is_some_and(|max| point.at >= max) {
            return Ok(alternatives);
        }
        let comma = self.rules.words(&blank::comma());
        let own = claims_at(facts, point.at);
        let open: Vec<usize> = (0..facts.contains.len()).filter(|i| facts.contains[*i].from <= point.at).collect();
        if open.len() > 4 {
            return Err(GrammarRefused::unsupported("contains", "more than four of them for one list"));
        }
        for bits in 0..1usize << open.len() {
            let (mut claims, mut counts) = (own.clone(), point.counts.clone());
            let mut is_possible = true;
            for (bit, i) in open.iter().enumerate() {
                let contains = &facts.contains[*i];
                let (claim, is) = (contains.claim, bits >> bit & 1 == 1);
                if is {
                    claims.push(claim);
                    let most = contains.max.unwrap_or(contains.min).max(contains.min);
                    is_possible &= contains.max.is_none_or(|max| counts[*i] < max);
                    counts[*i] = (counts[*i] + 1).min(most);
                } else if contains.max.is_some() {
                    claims.push((claim.0, !claim.1));
                }
            }
            if !is_possible || self.is_unsatisfiable(&claims) {
                continue;
            }
            let next = ListPosition { at: (point.at + 1).min(list.same_from.max(1)), counts };
            let follows = *list.known.entry(next.clone()).or_insert_with(|| {
                let rule = self.rules.reserve();
                waiting.push((rule, next));
                rule
            });
            let item = Symbol::Rule(self.rule(claims));
            let mut step = if point.at == 0 { Vec::new() } else { vec![comma.clone()] };
            step.extend([item, Symbol::Rule(follows)]);
            alternatives.push(step);
        }
        Ok(alternatives)
    }
}

/// Returns the first place from which all items have the same claims.
pub(super) fn first_uniform_place(facts: &SchemaFacts) -> usize {
    let own = facts.item.iter().map(|(at, _)| at + 1);
    own.chain(facts.items.iter().map(|(from, _)| *from)).max().unwrap_or(0)
}
