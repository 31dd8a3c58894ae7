//! From claims to rules: each set of claims is a rule, made once.

use super::expand::expand;
use super::facts::{SchemaClaim, SchemaFacts};
use super::places::SchemaPlaces;
use super::structures::{ValueSchemas, schema_of_value, structured_values};
use super::values::{kind, kinds};
use crate::rules::{GrammarRules, RuleIdx, Symbol};
use crate::words::{Automaton, TextSet};
use crate::{GrammarLimits, GrammarRefused};
use serde_json::Value;
use std::collections::HashMap;

/// Makes the rules of one document.
pub(super) struct SchemaWriter<'p, 'a> {
    pub(super) places: &'p SchemaPlaces<'a>,
    pub(super) structures: &'p ValueSchemas,
    pub(super) limits: &'p GrammarLimits,
    pub(super) rules: &'p mut GrammarRules,
    pub(super) patterns: HashMap<String, TextSet>,
    automata: HashMap<String, Automaton>,
    known: HashMap<Vec<SchemaClaim>, RuleIdx>,
    waiting: Vec<(RuleIdx, Vec<SchemaClaim>)>,
    n_steps: usize,
}

/// The rule for values that satisfy a schema, among `rules`.
pub(crate) fn write(
    schema: &Value,
    rules: &mut GrammarRules,
    limits: &GrammarLimits,
) -> Result<RuleIdx, GrammarRefused> {
    write_parts(schema, &[schema], rules, limits).map(|parts| parts[0])
}

/// The rules for values that satisfy schemas in a document, which may refer to each other.
pub(crate) fn write_parts(
    schema: &Value,
    parts: &[&Value],
    rules: &mut GrammarRules,
    limits: &GrammarLimits,
) -> Result<Vec<RuleIdx>, GrammarRefused> {
    check_depth_and_size(schema, limits)?;
    let nothing = Value::Bool(false);
    let values = structured_values(schema, limits)?;
    let shapes: Vec<Value> = values.iter().map(|value| schema_of_value(value)).collect();
    let mut documents = vec![(&nothing, "false"), (schema, "")];
    documents.extend(shapes.iter().map(|shape| (shape, "value")));
    let places = SchemaPlaces::of(&documents, limits)?;
    let structures = ValueSchemas::of(&values, &shapes, &places);
    let roots: Vec<_> = parts.iter().map(|part| places.schema_of(part)).collect::<Result<_, _>>()?;
    let mut writer = SchemaWriter {
        places: &places,
        structures: &structures,
        limits,
        rules,
        patterns: HashMap::new(),
        automata: HashMap::new(),
        known: HashMap::new(),
        waiting: Vec::new(),
        n_steps: 0,
    };
    let starts = roots.into_iter().map(|root| writer.rule(vec![(root, true)])).collect();
    while let Some((rule, claims)) = writer.waiting.pop() {
        let alternatives = writer.alternatives(&claims).map_err(|refused| match claims.first() {
            Some((place, _)) => refused.add_schema_path(places.path(*place)),
            None => refused,
        })?;
        writer.rules.define(rule, alternatives);
        writer.spend(1)?;
    }
    Ok(starts)
}

/// Before anything walks through it: what is too deep would be too deep for the walk, and what is too large too long.
fn check_depth_and_size(schema: &Value, limits: &GrammarLimits) -> Result<(), GrammarRefused> {
    let (mut left, mut n_bytes) = (vec![(schema, 0)], 0);
    while let Some((value, depth)) = left.pop() {
        if depth > limits.depth_max * 2 {
            return Err(GrammarRefused::too_large("the depth of the schema", limits.depth_max * 2));
        }
        n_bytes += value.as_str().map_or(1, str::len);
        match value {
            Value::Array(list) => left.extend(list.iter().map(|value| (value, depth + 1))),
            Value::Object(object) => {
                n_bytes += object.keys().map(String::len).sum::<usize>();
                left.extend(object.values().map(|value| (value, depth + 1)));
            }
            _ => {}
        }
        if n_bytes > limits.bytes_max {
            return Err(GrammarRefused::too_large("the bytes of the schema", limits.bytes_max));
        }
    }
    Ok(())
}

impl<'a> SchemaWriter<'_, 'a> {
    pub(super) fn spend(&mut self, n: usize) -> Result<(), GrammarRefused> {
        self.n_steps += n;
        if self.n_steps > self.limits.nodes_max {
            return Err(GrammarRefused::too_large("the work for the schema", self.limits.nodes_max));
        }
        if self.rules.size() > self.limits.symbols_max {
            return Err(GrammarRefused::too_large("the size of the grammar", self.limits.symbols_max));
        }
        Ok(())
    }

    /// The rule for values of which all claims hold.
    pub(super) fn rule(&mut self, mut claims: Vec<SchemaClaim>) -> RuleIdx {
        claims.sort_unstable();
        claims.dedup();
        let everything = (self.places.false_schema(), false);
        claims.retain(|claim| *claim != everything && self.places.value(claim.0) != &Value::Bool(claim.1));
        if let Some(rule) = self.known.get(&claims) {
            return *rule;
        }
        let rule = self.rules.reserve();
        self.known.insert(claims.clone(), rule);
        self.waiting.push((rule, claims));
        rule
    }

    /// Whether it is plain that nothing satisfies them.
    pub(super) fn is_unsatisfiable(&self, claims: &[SchemaClaim]) -> bool {
        claims.iter().any(|(place, is)| self.places.value(*place) == &Value::Bool(!is))
    }

    pub(super) fn has(&mut self, words: &TextSet, text: &str) -> Result<bool, GrammarRefused> {
        let key = words.lark();
        if !self.automata.contains_key(&key) {
            let automaton = words.automaton(self.limits.compile_fuel);
            let automaton = automaton.map_err(|why| GrammarRefused::unsupported("pattern", first_line(&why)))?;
            self.automata.insert(key.clone(), automaton);
        }
        Ok(self.automata.get_mut(&key).is_some_and(|automaton| automaton.has(text)))
    }

    pub(super) fn is_empty(&mut self, words: &TextSet) -> Result<bool, GrammarRefused> {
        if matches!(words, TextSet::Text(_) | TextSet::Regex(_)) {
            return Ok(false);
        }
        words.is_empty(self.limits.compile_fuel).map_err(|why| {
            GrammarRefused::unsupported("pattern", format!("such a complex set of texts ({})", first_line(&why)))
        })
    }

    /// The names that are strings of which the claims hold.
    pub(super) fn strings_of(&mut self, claims: &[SchemaClaim]) -> Result<TextSet, GrammarRefused> {
        let mut any = Vec::new();
        for facts in expand(self.places, self.structures, claims, self.limits)? {
            if facts.kinds & kinds::STRING == 0 {
                continue;
            }
            match &facts.values {
                None => any.push(self.text(&facts)?),
                Some(values) => {
                    for value in values.clone() {
                        if value.is_string() && self.fits_beside_list(&facts, value, 0)? {
                            any.extend(Self::scalar(value).map(TextSet::Text));
                        }
                    }
                }
            }
        }
        Ok(if any.len() == 1 { any.remove(0) } else { TextSet::Any(any) })
    }

    fn alternatives(&mut self, claims: &[SchemaClaim]) -> Result<Vec<Vec<Symbol>>, GrammarRefused> {
        let mut alternatives = Vec::new();
        for facts in expand(self.places, self.structures, claims, self.limits)? {
            self.spend(1)?;
            match facts.values.clone() {
                Some(values) => self.values(&values, &facts, &mut alternatives)?,
                None => self.kinds(&facts, &mut alternatives)?,
            }
        }
        Ok(alternatives)
    }

    fn values(
        &mut self,
        values: &[&'a Value],
        facts: &SchemaFacts<'a>,
        out: &mut Vec<Vec<Symbol>>,
    ) -> Result<(), GrammarRefused> {
        let mut scalars = Vec::new();
        for value in values {
            if !self.fits_beside_list(facts, value, 0)? {
                continue;
            }
            match Self::scalar(value) {
                Some(text) => scalars.push(TextSet::Text(text)),
                None => {
                    let place = self.structures.place(value)?;
                    out.push(vec![Symbol::Rule(self.rule(vec![(place, true)]))]);
                }
            }
        }
        if !scalars.is_empty() {
            out.push(vec![self.rules.words(&TextSet::Any(scalars))]);
        }
        Ok(())
    }

    fn kinds(&mut self, facts: &SchemaFacts<'a>, out: &mut Vec<Vec<Symbol>>) -> Result<(), GrammarRefused> {
        let words = [(kinds::NULL, "null"), (kinds::FALSE, "false"), (kinds::TRUE, "true")];
        for (bit, text) in words {
            let is_other = |value: &&Value| kind(value) == bit;
            if facts.kinds & bit != 0 && !facts.unlike.iter().any(is_other) {
                out.push(vec![self.rules.words(&TextSet::Text(text.to_owned()))]);
            }
        }
        if facts.kinds & kinds::NUMBER != 0 {
            let words = self.number(facts)?;
            self.terminal(&words, out)?;
        }
        if facts.kinds & kinds::STRING != 0 {
            let words = self.text(facts)?;
            self.terminal(&words, out)?;
        }
        if facts.kinds & kinds::ARRAY != 0 {
            self.array(facts, out)?;
        }
        if facts.kinds & kinds::OBJECT != 0 {
            self.object(facts, out)?;
        }
        Ok(())
    }

    fn terminal(&mut self, words: &TextSet, out: &mut Vec<Vec<Symbol>>) -> Result<(), GrammarRefused> {
        if !self.is_empty(words)? {
            out.push(vec![self.rules.words(words)]);
        }
        Ok(())
    }
}

fn first_line(text: &str) -> String {
    crate::engine::first_line(text)
}
