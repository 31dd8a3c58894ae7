//! Lists whose items all differ, where each item can only be one of a few values: a rule for each place and each set of
//! values that were written. Of other items no grammar can remember which there were.

use super::arrays::{claims_at, first_uniform_place};
use super::expand::expand;
use super::facts::{SchemaClaim, SchemaFacts};
use super::objects::blank;
use super::values::kinds;
use super::writer::SchemaWriter;
use crate::GrammarRefused;
use crate::rules::{RuleIdx, Symbol};
use crate::words::TextSet;
use std::collections::{BTreeSet, HashMap};

/// More values have too many sets.
const VALUES_MAX: usize = 64;

/// Before an item: its place, and the values that were written, a bit each.
type ItemState = (usize, u64);

struct UniqueList<'f, 'a> {
    facts: &'f SchemaFacts<'a>,
    /// No place from here on differs from the next.
    same_from: usize,
    /// The values of any place. Equal values have one text.
    values: Vec<String>,
    /// Those of each place, a bit each.
    at: Vec<u64>,
    known: HashMap<ItemState, RuleIdx>,
    waiting: Vec<(RuleIdx, ItemState)>,
}

impl<'a> SchemaWriter<'_, 'a> {
    /// One item and more.
    pub(super) fn unique_items(&mut self, facts: &SchemaFacts<'a>) -> Result<Option<Vec<Symbol>>, GrammarRefused> {
        let unsupported = |what: &str| GrammarRefused::unsupported("uniqueItems", what);
        if !facts.contains.is_empty() {
            return Err(unsupported("uniqueItems beside contains"));
        }
        let same_from = first_uniform_place(facts);
        let mut of_places = Vec::new();
        for at in 0..=same_from {
            let values = self.enumerate_values(&claims_at(facts, at))?;
            of_places.push(values.ok_or_else(|| unsupported("uniqueItems of items without a small set of values"))?);
        }
        let values: Vec<String> = of_places.iter().flatten().cloned().collect::<BTreeSet<_>>().into_iter().collect();
        if values.len() > VALUES_MAX {
            return Err(GrammarRefused::too_large("the number of values of unique items", VALUES_MAX));
        }
        let bits = |of: &BTreeSet<String>| (0..values.len()).filter(|i| of.contains(&values[*i])).map(|i| 1 << i).sum();
        let at = of_places.iter().map(bits).collect();
        let start = self.rules.reserve();
        let known = HashMap::from([((0, 0), start)]);
        let mut list = UniqueList { facts, same_from, values, at, known, waiting: vec![(start, (0, 0))] };
        while let Some((rule, before)) = list.waiting.pop() {
            self.spend(1)?;
            let alternatives = self.items_behind(&mut list, before)?;
            self.rules.define(rule, alternatives);
        }
        Ok(Some(vec![Symbol::Rule(start)]))
    }

    /// The end, or a value that was not written, and what follows that.
    fn items_behind(
        &mut self,
        list: &mut UniqueList<'_, 'a>,
        (at, written): ItemState,
    ) -> Result<Vec<Vec<Symbol>>, GrammarRefused> {
        let (min, max) = list.facts.n_items;
        let n_written = written.count_ones() as usize;
        let mut alternatives = Vec::new();
        if n_written > 0 && n_written >= min {
            alternatives.push(Vec::new());
        }
        if max.is_some_and(|max| n_written >= max) {
            return Ok(alternatives);
        }
        let left = list.at[at] & !written;
        for i in (0..list.values.len()).filter(|i| left >> i & 1 == 1) {
            self.spend(1)?;
            let next = ((at + 1).min(list.same_from), written | 1 << i);
            let UniqueList { known, waiting, .. } = list;
            let follows = *known.entry(next).or_insert_with(|| {
                let rule = self.rules.reserve();
                waiting.push((rule, next));
                rule
            });
            let mut item = if at == 0 && written == 0 { Vec::new() } else { vec![self.rules.words(&blank::comma())] };
            item.push(self.rules.words(&TextSet::Text(list.values[i].clone())));
            item.push(Symbol::Rule(follows));
            alternatives.push(item);
        }
        Ok(alternatives)
    }

    /// The texts of all values of which the claims hold. None if there are others than listed ones, or some that are no
    /// scalars.
    fn enumerate_values(&mut self, claims: &[SchemaClaim]) -> Result<Option<BTreeSet<String>>, GrammarRefused> {
        if self.is_unsatisfiable(claims) {
            return Ok(Some(BTreeSet::new()));
        }
        let words = [(kinds::NULL, "null"), (kinds::FALSE, "false"), (kinds::TRUE, "true")];
        let few = words.iter().fold(0, |few, (bit, _)| few | bit);
        let mut texts = BTreeSet::new();
        for facts in expand(self.places, self.structures, claims, self.limits)? {
            match &facts.values {
                None if facts.kinds & !few == 0 => {
                    let unlike: Vec<String> = facts.unlike.iter().filter_map(|value| Self::scalar(value)).collect();
                    let kept = words.iter().filter(|(bit, _)| facts.kinds & bit != 0).map(|(_, text)| *text);
                    texts.extend(kept.filter(|text| !unlike.iter().any(|other| other == text)).map(str::to_owned));
                }
                None => return Ok(None),
                Some(values) => {
                    for value in values.clone() {
                        if self.fits_beside_list(&facts, value, 0)? {
                            let Some(text) = Self::scalar(value) else { return Ok(None) };
                            texts.insert(text);
                        }
                    }
                }
            }
        }
        Ok(Some(texts))
    }
}
