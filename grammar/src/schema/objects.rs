//! Objects: named properties in their order, and then any others.

use super::facts::{PropertyNames, SchemaClaim, SchemaFacts};
use super::text::{quoted, strings};
use super::writer::SchemaWriter;
use crate::GrammarRefused;
use crate::rules::{RuleIdx, Symbol};
use crate::words::TextSet;
use std::collections::{HashMap, HashSet};

/// The signs between values, with the whitespace that may surround them.
pub(super) mod blank {
    use crate::words::TextSet;

    /// A space, or an indented new line. The length is bounded, so that an answer cannot consist of endless whitespace.
    const BLANK: &str = "(?: |\\n {0,32}|\\n\\t{0,8})?";

    pub(in crate::schema) fn open(sign: char) -> TextSet {
        TextSet::regex(format!("\\{sign}{BLANK}"))
    }

    pub(in crate::schema) fn close(sign: char) -> TextSet {
        TextSet::regex(format!("{BLANK}\\{sign}"))
    }

    pub(in crate::schema) fn comma() -> TextSet {
        TextSet::regex(format!(",{BLANK}"))
    }

    pub(in crate::schema) fn colon() -> TextSet {
        TextSet::regex(": ?")
    }
}

/// A property, or the run of properties without a name in the schema.
#[derive(Clone)]
struct PropertyEntry {
    parts: Vec<Symbol>,
    is_required: bool,
    /// A name denotes one property; a run denotes one or more.
    is_run: bool,
}

/// The limit of sets of names in facts, beside the named properties.
const SETS_MAX: usize = 6;

impl<'a> SchemaWriter<'_, 'a> {
    pub(super) fn object(&mut self, facts: &SchemaFacts<'a>, out: &mut Vec<Vec<Symbol>>) -> Result<(), GrammarRefused> {
        let (min, max) = facts.n_properties;
        if max.is_some_and(|max| max < min) {
            return Ok(());
        }
        let Some((names, exists)) = facts.exists.split_first() else {
            return self.one_object(facts, None, out);
        };
        if !exists.is_empty() {
            return Err(GrammarRefused::unsupported("not", "a schema that requires two properties by negation"));
        }
        // The required property is a named one, or the last of the others: a later one of the same name would replace
        // it.
        for name in names_in(facts) {
            if self.names_have(&names.0, name)? {
                let mut with = facts.clone();
                with.exists.clear();
                with.required.push(name);
                with.property.push((name, names.1));
                self.one_object(&with, None, out)?;
            }
        }
        self.one_object(facts, Some(names), out)
    }

    fn one_object(
        &mut self,
        facts: &SchemaFacts<'a>,
        last: Option<&(PropertyNames<'a>, SchemaClaim)>,
        out: &mut Vec<Vec<Symbol>>,
    ) -> Result<(), GrammarRefused> {
        let comma = self.rules.words(&blank::comma());
        let Some(mut entries) = self.entries(facts)? else { return Ok(()) };
        let others = self.other_property(facts, None)?;
        if let Some(item) = others {
            let more = Symbol::Many { of: vec![comma.clone(), item.clone()], min: 0, max: None };
            entries.push(PropertyEntry { parts: vec![item, more], is_required: false, is_run: true });
        }
        if let Some(last) = last {
            let Some(item) = self.other_property(facts, Some(last))? else { return Ok(()) };
            entries.push(PropertyEntry { parts: vec![item], is_required: true, is_run: false });
        }
        let (min, max) = facts.n_properties;
        let n_required = entries.iter().filter(|entry| entry.is_required).count();
        if max.is_some_and(|max| max < n_required) {
            return Ok(());
        }
        let open = self.rules.words(&blank::open('{'));
        let close = self.rules.words(&blank::close('}'));
        if n_required == 0 && min == 0 {
            out.push(vec![self.rules.words(&TextSet::Text("{}".to_owned()))]);
        }
        let inner = match min <= n_required.max(1) && max.is_none() {
            true => self.joined(&entries, &comma),
            false => self.counted(&entries, facts, &comma)?,
        };
        out.extend(inner.map(|inner| [vec![open], inner, vec![close]].concat()));
        Ok(())
    }

    /// Returns the named properties; None if one of them is required and impossible.
    fn entries(&mut self, facts: &SchemaFacts<'a>) -> Result<Option<Vec<PropertyEntry>>, GrammarRefused> {
        let colon = self.rules.words(&blank::colon());
        let required: HashSet<&str> = facts.required.iter().copied().collect();
        let mut own: HashMap<&str, Vec<SchemaClaim>> = HashMap::new();
        for (name, claim) in &facts.property {
            own.entry(name).or_default().push(*claim);
        }
        let mut entries = Vec::new();
        for name in names_in(facts) {
            let mut claims = own.remove(name).unwrap_or_default();
            for (names, claim) in &facts.properties {
                if self.names_have(names, name)? {
                    claims.push(*claim);
                }
            }
            let is_required = required.contains(name);
            if self.is_unsatisfiable(&claims) {
                if is_required {
                    return Ok(None);
                }
                continue;
            }
            let key = self.rules.words(&TextSet::Text(quoted(name)));
            let value = Symbol::Rule(self.rule(claims));
            entries.push(PropertyEntry { parts: vec![key, colon.clone(), value], is_required, is_run: false });
        }
        Ok(Some(entries))
    }

    /// One property without a name in the schema: one value for each combination of sets that contain its name. With
    /// `last`, its name is in those sets, and the claim holds for its value.
    fn other_property(
        &mut self,
        facts: &SchemaFacts<'a>,
        last: Option<&(PropertyNames<'a>, SchemaClaim)>,
    ) -> Result<Option<Symbol>, GrammarRefused> {
        let mut sets: Vec<(TextSet, String)> = Vec::new();
        let all = facts.properties.iter().map(|(names, _)| names).chain(last.map(|(names, _)| names));
        for names in all.clone() {
            for words in self.sets_of(names)? {
                let key = words.lark();
                if !sets.iter().any(|(_, known)| *known == key) {
                    sets.push((words, key));
                }
            }
        }
        if sets.len() > SETS_MAX {
            return Err(GrammarRefused::unsupported(
                "patternProperties",
                format!("more than {SETS_MAX} sets of names"),
            ));
        }
        let named: Vec<TextSet> = names_in(facts).map(|name| TextSet::Text(quoted(name))).collect();
        let colon = self.rules.words(&blank::colon());
        let mut alternatives = Vec::new();
        for bits in 0..1usize << sets.len() {
            let is_in = |key: &str| sets.iter().position(|(_, known)| known == key).is_some_and(|i| bits >> i & 1 == 1);
            let mut claims = Vec::new();
            for (names, claim) in &facts.properties {
                let keys: Vec<String> = self.sets_of(names)?.iter().map(TextSet::lark).collect();
                let speaks = match names {
                    PropertyNames::Rest { .. } => !keys.iter().any(|key| is_in(key)),
                    _ => keys.iter().all(|key| is_in(key)),
                };
                claims.extend(speaks.then_some(*claim));
            }
            if let Some((names, claim)) = last {
                let keys: Vec<String> = self.sets_of(names)?.iter().map(TextSet::lark).collect();
                let speaks = match names {
                    PropertyNames::Rest { .. } => !keys.iter().any(|key| is_in(key)),
                    _ => keys.iter().all(|key| is_in(key)),
                };
                if !speaks {
                    continue;
                }
                claims.push(*claim);
            }
            if self.is_unsatisfiable(&claims) {
                continue;
            }
            let mut words = vec![strings(0, None)];
            for (i, (set, _)) in sets.iter().enumerate() {
                words.push(if bits >> i & 1 == 1 { set.clone() } else { TextSet::not(set.clone()) });
            }
            if !named.is_empty() {
                words.push(TextSet::not(TextSet::Any(named.clone())));
            }
            let words = if words.len() == 1 { words.remove(0) } else { TextSet::All(words) };
            if self.is_empty(&words)? {
                continue;
            }
            let key = self.rules.words(&words);
            let value = Symbol::Rule(self.rule(claims));
            alternatives.push(vec![key, colon.clone(), value]);
        }
        Ok((!alternatives.is_empty()).then(|| Symbol::Rule(self.rules.add(alternatives))))
    }

    /// Returns the sets of names that a fact distinguishes.
    fn sets_of(&mut self, names: &PropertyNames<'a>) -> Result<Vec<TextSet>, GrammarRefused> {
        match names {
            PropertyNames::Pattern(pattern) => Ok(vec![self.pattern(pattern)?]),
            PropertyNames::Rest { patterns, .. } => patterns.iter().map(|pattern| self.pattern(pattern)).collect(),
            PropertyNames::Claimed(claim) => Ok(vec![self.strings_of(&[*claim])?]),
        }
    }

    /// One or more properties in order, with commas between them. Halves are joined, so that rules nest only as deep as
    /// the logarithm of their number.
    fn joined(&mut self, entries: &[PropertyEntry], comma: &Symbol) -> Option<Vec<Symbol>> {
        match entries {
            [] => None,
            [entry] => Some(entry.parts.clone()),
            _ => {
                let (left, right) = entries.split_at(entries.len() / 2);
                let must = |entries: &[PropertyEntry]| entries.iter().any(|entry| entry.is_required);
                let (first, second) = (self.joined(left, comma)?, self.joined(right, comma)?);
                let first = vec![Symbol::Rule(self.rules.add(vec![first]))];
                let second = vec![Symbol::Rule(self.rules.add(vec![second]))];
                let after = || [vec![comma.clone()], second.clone()].concat();
                let before = || [first.clone(), vec![comma.clone()]].concat();
                Some(match (must(left), must(right)) {
                    (true, true) => [first.clone(), after()].concat(),
                    (true, false) => [first.clone(), vec![Symbol::Maybe(after())]].concat(),
                    (false, true) => [vec![Symbol::Maybe(before())], second.clone()].concat(),
                    (false, false) => {
                        let some = vec![[first.clone(), vec![Symbol::Maybe(after())]].concat(), second.clone()];
                        vec![Symbol::Rule(self.rules.add(some))]
                    }
                })
            }
        }
    }

    /// Does the same where the number of properties matters: one rule for each entry and each count so far.
    fn counted(
        &mut self,
        entries: &[PropertyEntry],
        facts: &SchemaFacts<'a>,
        comma: &Symbol,
    ) -> Result<Option<Vec<Symbol>>, GrammarRefused> {
        let (min, max) = facts.n_properties;
        let n_required = entries.iter().filter(|entry| entry.is_required).count();
        let has_run = entries.iter().any(|entry| entry.is_run);
        // Two properties of a run may have the same name, and then are one property.
        if has_run && min > n_required + 1 {
            return Err(GrammarRefused::unsupported("minProperties", "a minimum of unnamed properties"));
        }
        let most = max.unwrap_or(min).min(entries.len() + self.limits.repeat_max);
        if most > self.limits.repeat_max {
            return Err(GrammarRefused::too_large("a count of properties", self.limits.repeat_max));
        }
        // `after[count]`: what may follow after this many properties. `most` also stands for more if there is no
        // maximum.
        let enough = |count: usize| if count >= min && count > 0 { vec![Vec::new()] } else { Vec::new() };
        let mut after: Vec<RuleIdx> = (0..=most).map(|count| self.rules.add(enough(count))).collect();
        for entry in entries.iter().rev() {
            let mut here = Vec::with_capacity(most + 1);
            for count in 0..=most {
                self.spend(1)?;
                let mut alternatives = Vec::new();
                if !entry.is_required {
                    alternatives.push(vec![Symbol::Rule(after[count])]);
                }
                let lead = if count == 0 { Vec::new() } else { vec![comma.clone()] };
                let left = max.map(|max| max - count);
                match entry.is_run {
                    true if left != Some(0) => {
                        let more = vec![comma.clone(), entry.parts[0].clone()];
                        let more = Symbol::Many { of: more, min: 0, max: left.map(|left| left - 1) };
                        let then = Symbol::Rule(after[(count + 1).min(most)]);
                        alternatives.push([lead, vec![entry.parts[0].clone(), more, then]].concat());
                    }
                    false if left != Some(0) => {
                        let then = Symbol::Rule(after[(count + 1).min(most)]);
                        alternatives.push([lead, entry.parts.clone(), vec![then]].concat());
                    }
                    _ => {}
                }
                here.push(self.rules.add(alternatives));
            }
            after = here;
        }
        Ok(Some(vec![Symbol::Rule(after[0])]))
    }
}

/// Returns the names in all facts, in their order.
fn names_in<'f, 'a>(facts: &'f SchemaFacts<'a>) -> impl Iterator<Item = &'a str> + use<'f, 'a> {
    let rest = facts.properties.iter().chain(&facts.exists).filter_map(|(names, _)| match names {
        PropertyNames::Rest { names, .. } => Some(names),
        _ => None,
    });
    let own = facts.property.iter().map(|(name, _)| *name).chain(facts.required.iter().copied());
    let mut seen = HashSet::new();
    own.chain(rest.flatten().copied()).filter(move |name| seen.insert(*name))
}
