//! Answers which values satisfy claims: for a value that a schema names, for the names of properties, and for claims
//! that only a few values satisfy. Knows nothing of rules, except how large they may be.

use super::decimal::Decimal;
use super::document::SchemaDocument;
use super::expand::expand;
use super::facts::{ArrayFacts, ObjectFacts, PropertyNames, SchemaClaim, SchemaFacts};
use super::text::{SchemaTexts, numbers_with, quoted, scalar_text};
use super::values::{LITERALS, json_equal, kind, kinds};
use crate::GrammarRefused;
use crate::rules::GrammarRules;
use crate::words::TextSet;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Counts the work for one document, because an answer may take many steps.
pub(super) struct ClaimSolver<'d> {
    pub(super) texts: SchemaTexts<'d>,
    pub(super) document: &'d SchemaDocument<'d>,
    n_steps: usize,
}

impl<'d> ClaimSolver<'d> {
    pub(super) fn new(document: &'d SchemaDocument<'d>) -> ClaimSolver<'d> {
        ClaimSolver { texts: SchemaTexts::new(document.limits), document, n_steps: 0 }
    }

    /// Counts a step that may have added rules. Refuses too many steps, and too large a grammar.
    pub(super) fn count_step(&mut self, grammar: &GrammarRules) -> Result<(), GrammarRefused> {
        self.count_own_step()?;
        grammar.check_size(self.document.limits)
    }

    fn count_own_step(&mut self) -> Result<(), GrammarRefused> {
        self.n_steps += 1;
        if self.n_steps > self.document.limits.nodes_max {
            return Err(GrammarRefused::too_large("the work for the schema", self.document.limits.nodes_max));
        }
        Ok(())
    }

    /// The sets of names that a fact distinguishes.
    pub(super) fn sets_of(&mut self, names: &PropertyNames) -> Result<Vec<TextSet>, GrammarRefused> {
        match names {
            PropertyNames::Pattern(pattern) => Ok(vec![self.texts.pattern(pattern)?]),
            PropertyNames::Rest { patterns, .. } => {
                patterns.iter().map(|pattern| self.texts.pattern(pattern)).collect()
            }
            PropertyNames::Claimed(claim) => Ok(vec![self.strings_of(&[*claim])?]),
        }
    }

    /// The strings of which the claims hold.
    fn strings_of(&mut self, claims: &[SchemaClaim]) -> Result<TextSet, GrammarRefused> {
        let mut any = Vec::new();
        for facts in expand(self.document, claims)? {
            if facts.kinds & kinds::STRING == 0 {
                continue;
            }
            let Some(values) = &facts.values else {
                any.push(self.texts.strings_with(&facts)?);
                continue;
            };
            for value in values {
                if value.is_string() && self.fits_beside_list(&facts, value, 0)? {
                    any.extend(scalar_text(value).map(TextSet::Text));
                }
            }
        }
        Ok(if any.len() == 1 { any.remove(0) } else { TextSet::Any(any) })
    }

    /// The texts of all values of which the claims hold. None if there are others than listed ones, or some that are no
    /// scalars.
    pub(super) fn scalars_of(&mut self, claims: &[SchemaClaim]) -> Result<Option<BTreeSet<String>>, GrammarRefused> {
        if self.document.is_unsatisfiable(claims) {
            return Ok(Some(BTreeSet::new()));
        }
        let few = LITERALS.iter().fold(0, |few, (bit, _)| few | bit);
        let mut texts = BTreeSet::new();
        for facts in expand(self.document, claims)? {
            match &facts.values {
                None if facts.kinds & !few == 0 => {
                    let unlike: Vec<String> = facts.unlike.iter().filter_map(|value| scalar_text(value)).collect();
                    let kept = LITERALS.iter().filter(|(bit, _)| facts.kinds & bit != 0).map(|(_, text)| *text);
                    texts.extend(kept.filter(|text| !unlike.iter().any(|other| other == text)).map(str::to_owned));
                }
                None => return Ok(None),
                Some(values) => {
                    for value in values {
                        if self.fits_beside_list(&facts, value, 0)? {
                            let Some(text) = scalar_text(value) else { return Ok(None) };
                            texts.insert(text);
                        }
                    }
                }
            }
        }
        Ok(Some(texts))
    }

    /// Whether all claims hold for the value.
    fn holds(&mut self, claims: &[SchemaClaim], value: &Value, depth: usize) -> Result<bool, GrammarRefused> {
        if depth > self.document.limits.depth_max {
            return Err(GrammarRefused::too_large("the depth of a value", self.document.limits.depth_max));
        }
        self.count_own_step()?;
        for facts in expand(self.document, claims)? {
            if self.fits(&facts, value, depth)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn fits(&mut self, facts: &SchemaFacts, value: &Value, depth: usize) -> Result<bool, GrammarRefused> {
        let is_listed = facts.values.as_ref().is_none_or(|values| values.iter().any(|other| json_equal(value, other)));
        Ok(is_listed && self.fits_beside_list(facts, value, depth)?)
    }

    /// Whether a value from the list of values satisfies everything but the list.
    pub(super) fn fits_beside_list(
        &mut self,
        facts: &SchemaFacts,
        value: &Value,
        depth: usize,
    ) -> Result<bool, GrammarRefused> {
        if facts.kinds & kind(value) == 0 || facts.unlike.iter().any(|other| json_equal(value, other)) {
            return Ok(false);
        }
        match value {
            Value::Number(number) => {
                let text = Decimal::of(number)
                    .ok_or_else(|| GrammarRefused::unsupported("", "a number with so many digits as a value"))?;
                let words = numbers_with(facts)?;
                self.texts.has(&words, &text.shortest_notation())
            }
            Value::String(text) => {
                let words = self.texts.strings_with(facts)?;
                self.texts.has(&words, &quoted(text))
            }
            Value::Array(list) => self.fits_array(&facts.array, list, depth),
            Value::Object(object) => self.fits_object(&facts.object, object, depth),
            _ => Ok(true),
        }
    }

    fn fits_array(&mut self, facts: &ArrayFacts, list: &[Value], depth: usize) -> Result<bool, GrammarRefused> {
        if list.len() < facts.n_items.0 || facts.n_items.1.is_some_and(|max| list.len() > max) {
            return Ok(false);
        }
        for (i, value) in list.iter().enumerate() {
            if !self.holds(&facts.claims_at(i), value, depth + 1)? {
                return Ok(false);
            }
        }
        if facts.is_unique && (1..list.len()).any(|i| list[..i].iter().any(|other| json_equal(other, &list[i]))) {
            return Ok(false);
        }
        for contains in &facts.contains {
            let mut n = 0;
            for value in list.iter().skip(contains.from) {
                n += usize::from(self.holds(&[contains.claim], value, depth + 1)?);
            }
            if n < contains.min || contains.max.is_some_and(|max| n > max) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn fits_object(
        &mut self,
        facts: &ObjectFacts,
        object: &Map<String, Value>,
        depth: usize,
    ) -> Result<bool, GrammarRefused> {
        let n = object.len();
        if n < facts.n_properties.0
            || facts.n_properties.1.is_some_and(|max| n > max)
            || facts.required.iter().any(|name| !object.contains_key(*name))
        {
            return Ok(false);
        }
        for (name, value) in object {
            let claims = self.claims_on(facts, name)?;
            if !self.holds(&claims, value, depth + 1)? {
                return Ok(false);
            }
        }
        for (names, claim) in &facts.exists {
            let mut is_there = false;
            for (name, value) in object {
                is_there |= self.names_have(names, name)? && self.holds(&[*claim], value, depth + 1)?;
            }
            if !is_there {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the claims on the value of a property.
    fn claims_on(&mut self, facts: &ObjectFacts, name: &str) -> Result<Vec<SchemaClaim>, GrammarRefused> {
        let own = facts.property.iter().filter(|(other, _)| *other == name).map(|(_, claim)| *claim);
        let mut claims: Vec<SchemaClaim> = own.collect();
        for (names, claim) in &facts.properties {
            if self.names_have(names, name)? {
                claims.push(*claim);
            }
        }
        Ok(claims)
    }

    /// Whether a name is one of these.
    pub(super) fn names_have(&mut self, names: &PropertyNames, name: &str) -> Result<bool, GrammarRefused> {
        match names {
            PropertyNames::Pattern(pattern) => {
                let words = self.texts.pattern(pattern)?;
                self.texts.has(&words, &quoted(name))
            }
            PropertyNames::Rest { names, patterns } => {
                if names.contains(&name) {
                    return Ok(false);
                }
                for pattern in patterns {
                    let words = self.texts.pattern(pattern)?;
                    if self.texts.has(&words, &quoted(name))? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            PropertyNames::Claimed(claim) => self.holds(&[*claim], &Value::from(name), 0),
        }
    }
}
