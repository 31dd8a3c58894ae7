//! Lists whose items all differ, where each item can only be one of a few values: a rule for each place and each set of
//! values that were written. Of other items no grammar can remember which there were.

use super::blank;
use super::claims::RuleQueue;
use super::facts::ArrayFacts;
use super::solver::ClaimSolver;
use crate::GrammarRefused;
use crate::rules::{GrammarRules, Symbol};
use crate::words::TextSet;
use std::collections::BTreeSet;

/// More values have too many sets.
const VALUES_MAX: usize = 64;

/// Before an item: its place, and the values that were written, a bit each.
type ItemState = (usize, u64);

struct UniqueList {
    n_items: (usize, Option<usize>),
    /// The values of any place. Equal values have one text.
    values: Vec<String>,
    /// Those of each place, a bit each. The last is for all places from there on.
    at: Vec<u64>,
    queue: RuleQueue<ItemState>,
}

/// One item and more.
pub(super) fn unique_items(
    grammar: &mut GrammarRules,
    solver: &mut ClaimSolver,
    facts: &ArrayFacts,
) -> Result<Vec<Symbol>, GrammarRefused> {
    let mut list = UniqueList::of(facts, solver)?;
    let start = list.queue.rule_of((0, 0), grammar);
    while let Some((rule, before)) = list.queue.pop() {
        solver.count_step(grammar)?;
        let alternatives = list.alternatives_after(before, grammar, solver)?;
        grammar.define(rule, alternatives);
    }
    Ok(vec![Symbol::Rule(start)])
}

impl UniqueList {
    fn of(facts: &ArrayFacts, solver: &mut ClaimSolver) -> Result<UniqueList, GrammarRefused> {
        let unsupported = |what: &str| GrammarRefused::unsupported("uniqueItems", what);
        if !facts.contains.is_empty() {
            return Err(unsupported("uniqueItems beside contains"));
        }
        let mut of_places = Vec::new();
        for at in 0..=facts.first_uniform_place() {
            let values = solver.scalars_of(&facts.claims_at(at))?;
            of_places.push(values.ok_or_else(|| unsupported("uniqueItems of items without a small set of values"))?);
        }
        let values: Vec<String> = of_places.iter().flatten().cloned().collect::<BTreeSet<_>>().into_iter().collect();
        if values.len() > VALUES_MAX {
            return Err(GrammarRefused::too_large("the number of values of unique items", VALUES_MAX));
        }
        let bits = |of: &BTreeSet<String>| (0..values.len()).filter(|i| of.contains(&values[*i])).map(|i| 1 << i).sum();
        let at = of_places.iter().map(bits).collect();
        Ok(UniqueList { n_items: facts.n_items, values, at, queue: RuleQueue::new() })
    }

    /// The end, or a value that was not written, and what follows that.
    fn alternatives_after(
        &mut self,
        (at, written): ItemState,
        grammar: &mut GrammarRules,
        solver: &mut ClaimSolver,
    ) -> Result<Vec<Vec<Symbol>>, GrammarRefused> {
        let (min, max) = self.n_items;
        let n_written = written.count_ones() as usize;
        let mut alternatives = Vec::new();
        if n_written > 0 && n_written >= min {
            alternatives.push(Vec::new());
        }
        if max.is_some_and(|max| n_written >= max) {
            return Ok(alternatives);
        }
        let left = self.at[at] & !written;
        for i in (0..self.values.len()).filter(|i| left >> i & 1 == 1) {
            solver.count_step(grammar)?;
            let next = ((at + 1).min(self.at.len() - 1), written | 1 << i);
            let follows = self.queue.rule_of(next, grammar);
            let mut item = if at == 0 && written == 0 { Vec::new() } else { vec![grammar.words(&blank::comma())] };
            item.push(grammar.words(&TextSet::Text(self.values[i].clone())));
            item.push(Symbol::Rule(follows));
            alternatives.push(item);
        }
        Ok(alternatives)
    }
}
