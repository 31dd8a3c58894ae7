//! Decides whether a value satisfies a claim, for the few values that a schema names.

use super::decimal::Decimal;
use super::expand::expand;
use super::facts::{PropertyNames, SchemaClaim, SchemaFacts};
use super::values::{json_equal, kind};
use super::writer::SchemaWriter;
use crate::GrammarRefused;
use serde_json::Value;

impl<'a> SchemaWriter<'_, 'a> {
    /// Whether all claims hold for the value.
    pub(super) fn holds(
        &mut self,
        claims: &[SchemaClaim],
        value: &Value,
        depth: usize,
    ) -> Result<bool, GrammarRefused> {
        if depth > self.limits.depth_max {
            return Err(GrammarRefused::too_large("the depth of a value", self.limits.depth_max));
        }
        self.spend(1)?;
        for facts in expand(self.places, self.structures, claims, self.limits)? {
            if self.fits(&facts, value, depth)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn fits(&mut self, facts: &SchemaFacts<'a>, value: &Value, depth: usize) -> Result<bool, GrammarRefused> {
        let is_listed = facts.values.as_ref().is_none_or(|values| values.iter().any(|other| json_equal(value, other)));
        Ok(is_listed && self.fits_beside_list(facts, value, depth)?)
    }

    /// Whether a value from the list of values satisfies everything but the list.
    pub(super) fn fits_beside_list(
        &mut self,
        facts: &SchemaFacts<'a>,
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
                let words = self.number(facts)?;
                self.has(&words, &text.shortest_notation())
            }
            Value::String(text) => {
                let words = self.text(facts)?;
                self.has(&words, &super::text::quoted(text))
            }
            Value::Array(list) => self.fits_list(facts, list, depth),
            Value::Object(object) => {
                let n = object.len();
                if n < facts.n_properties.0
                    || facts.n_properties.1.is_some_and(|max| n > max)
                    || facts.required.iter().any(|name| !object.contains_key(*name))
                {
                    return Ok(false);
                }
                for (name, value) in object {
                    let claims = self.claims_of(facts, name)?;
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
            _ => Ok(true),
        }
    }

    fn fits_list(&mut self, facts: &SchemaFacts<'a>, list: &[Value], depth: usize) -> Result<bool, GrammarRefused> {
        if list.len() < facts.n_items.0 || facts.n_items.1.is_some_and(|max| list.len() > max) {
            return Ok(false);
        }
        for (i, value) in list.iter().enumerate() {
            let claims: Vec<SchemaClaim> = super::arrays::claims_at(facts, i);
            if !self.holds(&claims, value, depth + 1)? {
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

    /// Returns the claims on the value of a property.
    pub(super) fn claims_of(
        &mut self,
        facts: &SchemaFacts<'a>,
        name: &str,
    ) -> Result<Vec<SchemaClaim>, GrammarRefused> {
        let own = facts.property.iter().filter(|(other, _)| *other == name).map(|(_, claim)| *claim);
        let mut claims: Vec<SchemaClaim> = own.collect();
        for (names, claim) in &facts.properties {
            if self.names_have(names, name)? {
                claims.push(*claim);
            }
        }
        Ok(claims)
    }

    pub(super) fn names_have(&mut self, names: &PropertyNames<'a>, name: &str) -> Result<bool, GrammarRefused> {
        match names {
            PropertyNames::Pattern(pattern) => {
                let words = self.pattern(pattern)?;
                self.has(&words, &super::text::quoted(name))
            }
            PropertyNames::Rest { names, patterns } => {
                if names.contains(&name) {
                    return Ok(false);
                }
                for pattern in patterns {
                    let words = self.pattern(pattern)?;
                    if self.has(&words, &super::text::quoted(name))? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            PropertyNames::Claimed(claim) => self.holds(&[*claim], &Value::from(name), 0),
        }
    }
}
