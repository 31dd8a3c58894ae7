//! The requirements of a schema on a value that satisfies it, keyword by keyword.

use super::expand::{Alternative, Alternatives, EvaluationScope, SchemaConstraints};
use super::facts::{ContainsClaim, PropertyNames, SchemaFact};
use super::keywords;
use super::places::{SchemaIdx, SchemaPlaces};
use super::read::{Keyword, texts};
use super::values::kinds;
use crate::GrammarRefused;
use serde_json::{Map, Value};

/// The limit of schemas of an `anyOf` that are distinguished exactly, where `unevaluated..` needs to know which of them
/// held.
const EXACT_MAX: usize = 6;

struct PositiveReader<'p, 'a> {
    places: &'p SchemaPlaces<'a>,
    place: SchemaIdx,
    schema: &'a Map<String, Value>,
    scope: EvaluationScope,
    constraints: SchemaConstraints<'a>,
}

/// Returns the requirements of a schema. Distinguishes which parts held where a schema around it needs to know.
pub(super) fn read_constraints<'a>(
    places: &SchemaPlaces<'a>,
    place: SchemaIdx,
    scope: EvaluationScope,
) -> Result<SchemaConstraints<'a>, GrammarRefused> {
    let schema = match places.value(place) {
        Value::Object(schema) => schema,
        Value::Bool(true) => return Ok(SchemaConstraints::default()),
        _ => return Ok(SchemaConstraints { choices: vec![Vec::new()], ..SchemaConstraints::default() }),
    };
    let mut reader = PositiveReader { places, place, schema, scope, constraints: SchemaConstraints::default() };
    for (name, value) in schema {
        let at = format!("{}/{}", places.path(place), keywords::escaped(name));
        reader.keyword(&Keyword { name, value, at })?;
    }
    Ok(reader.constraints)
}

impl<'a> PositiveReader<'_, 'a> {
    fn add_fact(&mut self, fact: SchemaFact<'a>) {
        self.constraints.choices.push(vec![Alternative::facts([fact])]);
    }

    fn add_facts(&mut self, facts: impl IntoIterator<Item = SchemaFact<'a>>) {
        self.constraints.choices.push(vec![Alternative::facts(facts)]);
    }

    fn add_choice(&mut self, choice: Alternatives<'a>) {
        self.constraints.choices.push(choice);
    }

    fn keyword(&mut self, word: &Keyword<'a>) -> Result<(), GrammarRefused> {
        match word.name {
            "type" => self.add_fact(SchemaFact::Kinds(word.kinds()?)),
            "enum" => self.add_fact(SchemaFact::Values(word.list()?.iter().collect())),
            "const" => self.add_fact(SchemaFact::Values(vec![word.value])),
            "minimum" => self.add_fact(SchemaFact::Lower(word.number()?, true)),
            "exclusiveMinimum" => self.add_fact(SchemaFact::Lower(word.number()?, false)),
            "maximum" => self.add_fact(SchemaFact::Upper(word.number()?, true)),
            "exclusiveMaximum" => self.add_fact(SchemaFact::Upper(word.number()?, false)),
            "multipleOf" => self.add_fact(SchemaFact::Multiple(word.number()?, true)),
            "minLength" => self.add_fact(SchemaFact::MinLength(word.count()?)),
            "maxLength" => self.add_fact(SchemaFact::MaxLength(word.count()?)),
            "pattern" => self.add_fact(SchemaFact::Pattern(word.text()?, true)),
            "format" => self.add_fact(SchemaFact::Format(word.text()?, true)),
            "minItems" => self.add_fact(SchemaFact::MinItems(word.count()?)),
            "maxItems" => self.add_fact(SchemaFact::MaxItems(word.count()?)),
            "uniqueItems" if word.flag()? => self.add_fact(SchemaFact::Unique),
            "minProperties" => self.add_fact(SchemaFact::MinProperties(word.count()?)),
            "maxProperties" => self.add_fact(SchemaFact::MaxProperties(word.count()?)),
            "required" => self.add_facts(word.texts()?.into_iter().map(SchemaFact::Required)),
            "prefixItems" | "items" | "additionalItems" | "contains" | "unevaluatedItems" => self.of_arrays(word)?,
            "properties" | "patternProperties" | "additionalProperties" | "propertyNames" | "unevaluatedProperties" => {
                self.of_objects(word)?;
            }
            "dependentRequired" | "dependentSchemas" | "dependencies" => self.dependent(word)?,
            _ => self.combining(word)?,
        }
        Ok(())
    }

    fn of_arrays(&mut self, word: &Keyword<'a>) -> Result<(), GrammarRefused> {
        let n_first = first_items(self.schema).len();
        match (word.name, word.value) {
            ("prefixItems", Value::Array(list)) | ("items", Value::Array(list)) => {
                let facts: Result<Vec<_>, _> = list
                    .iter()
                    .enumerate()
                    .map(|(i, item)| Ok(SchemaFact::Item(i, (self.inner(item)?, true))))
                    .collect();
                self.add_facts(facts?);
            }
            ("items", item) => self.add_fact(SchemaFact::Items(n_first, (self.inner(item)?, true))),
            ("additionalItems", item) if self.schema.get("items").is_some_and(Value::is_array) => {
                self.add_fact(SchemaFact::Items(n_first, (self.inner(item)?, true)));
            }
            ("contains", item) => {
                if self.scope.needs_items {
                    return Err(word.unsupported("contains beside unevaluatedItems"));
                }
                let claim = (self.inner(item)?, true);
                let (min, max) = contains_bounds(self.places, self.place, self.schema)?;
                self.add_facts((min > 0 || max.is_some()).then_some(SchemaFact::Contains(ContainsClaim {
                    from: 0,
                    claim,
                    min,
                    max,
                })));
            }
            ("unevaluatedItems", item) => self.constraints.rest_items = Some((self.inner(item)?, true)),
            _ => {}
        }
        Ok(())
    }

    fn of_objects(&mut self, word: &Keyword<'a>) -> Result<(), GrammarRefused> {
        match word.name {
            "properties" => {
                let named = word.object()?.iter();
                let facts: Result<Vec<_>, _> =
                    named.map(|(name, schema)| Ok(SchemaFact::Property(name, (self.inner(schema)?, true)))).collect();
                self.add_facts(facts?);
            }
            "patternProperties" => {
                let named = word.object()?.iter();
                let fact = |(pattern, schema): (&'a String, &'a Value)| {
                    Ok(SchemaFact::Properties(PropertyNames::Pattern(pattern), (self.inner(schema)?, true)))
                };
                let facts: Result<Vec<_>, GrammarRefused> = named.map(fact).collect();
                self.add_facts(facts?);
            }
            "additionalProperties" => {
                self.add_fact(SchemaFact::Properties(additional_names(self.schema), (self.inner(word.value)?, true)));
            }
            "unevaluatedProperties" => self.constraints.rest_properties = Some((self.inner(word.value)?, true)),
            _ => {
                // A property whose name is not such a string has no valid value.
                let claim = (self.inner(word.value)?, false);
                let nothing = (self.places.false_schema(), true);
                self.add_fact(SchemaFact::Properties(PropertyNames::Claimed(claim), nothing));
            }
        }
        Ok(())
    }

    fn dependent(&mut self, word: &Keyword<'a>) -> Result<(), GrammarRefused> {
        let nothing = (self.places.false_schema(), true);
        for (name, value) in word.object()? {
            let without = Alternative::facts([SchemaFact::Property(name, nothing)]);
            let mut with = Alternative::facts([SchemaFact::Kinds(kinds::OBJECT), SchemaFact::Required(name)]);
            match texts(value).filter(|_| word.name != "dependentSchemas") {
                Some(required) => with.facts.extend(required.into_iter().map(SchemaFact::Required)),
                None if word.name == "dependentRequired" => {
                    return Err(word.unsupported("a value that is not a list of names"));
                }
                None => with.claims.push((self.inner(value)?, true)),
            }
            self.add_choice(vec![without, with]);
        }
        Ok(())
    }

    fn combining(&mut self, word: &Keyword<'a>) -> Result<(), GrammarRefused> {
        match word.name {
            "$ref" => {
                let target = self.places.resolve_ref(self.place, word.text()?)?;
                self.add_choice(vec![Alternative::claims([(target, true)])]);
            }
            "$dynamicRef" => {
                let target = self.places.resolve_dynamic_ref(self.place, word.text()?)?;
                self.add_choice(vec![Alternative::claims([(target, true)])]);
            }
            "allOf" => {
                let all = self.list(word)?;
                self.add_choice(vec![Alternative::claims(all.into_iter().map(|place| (place, true)))]);
            }
            "anyOf" => {
                let any = self.list(word)?;
                let choice = match self.scope.is_there {
                    false => any.into_iter().map(|place| Alternative::claims([(place, true)])).collect(),
                    true if any.len() <= EXACT_MAX => any_of_combinations(&any),
                    true => return Err(word.unsupported("a long anyOf beside unevaluatedProperties")),
                };
                self.add_choice(choice);
            }
            "oneOf" => {
                let one = self.list(word)?;
                let only = |place: &SchemaIdx| Alternative::claims(one.iter().map(|other| (*other, other == place)));
                self.add_choice(one.iter().map(only).collect());
            }
            "not" => {
                let claim = (self.inner(word.value)?, false);
                self.add_choice(vec![Alternative::claims([claim])]);
            }
            "if" => {
                let condition = self.inner(word.value)?;
                let branch = |key| self.schema.get(key).map(|schema| self.inner(schema)).transpose();
                let then = branch("then")?.map(|place| (place, true));
                let otherwise = branch("else")?.map(|place| (place, true));
                if then.is_some() || otherwise.is_some() || self.scope.is_there {
                    let yes = Alternative::claims([(condition, true)].into_iter().chain(then));
                    let no = Alternative::claims([(condition, false)].into_iter().chain(otherwise));
                    self.add_choice(vec![yes, no]);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn list(&self, word: &Keyword<'a>) -> Result<Vec<SchemaIdx>, GrammarRefused> {
        word.list()?.iter().map(|schema| self.inner(schema)).collect()
    }

    fn inner(&self, schema: &'a Value) -> Result<SchemaIdx, GrammarRefused> {
        self.places.schema_of(schema)
    }
}

/// Returns every way in which at least one of them holds. Each way fixes for every schema whether it holds.
fn any_of_combinations<'a>(any: &[SchemaIdx]) -> Alternatives<'a> {
    let ways = 1..1usize << any.len();
    let way = |bits: usize| Alternative::claims(any.iter().enumerate().map(|(i, place)| (*place, bits >> i & 1 == 1)));
    ways.map(way).collect()
}

/// Returns the schemas of the first items, under either name of the keyword.
pub(super) fn first_items(schema: &Map<String, Value>) -> &[Value] {
    let older = || schema.get("items").and_then(Value::as_array);
    schema.get("prefixItems").and_then(Value::as_array).or_else(older).map_or(&[], Vec::as_slice)
}

/// Returns the number of items that `contains` requires.
pub(super) fn contains_bounds<'a>(
    places: &SchemaPlaces<'a>,
    place: SchemaIdx,
    schema: &'a Map<String, Value>,
) -> Result<(usize, Option<usize>), GrammarRefused> {
    let count = |name: &'static str| {
        let word = schema.get(name).map(|value| Keyword { name, value, at: format!("{}/{name}", places.path(place)) });
        word.map(|word| word.count()).transpose()
    };
    Ok((count("minContains")?.unwrap_or(1), count("maxContains")?))
}

/// Returns the names that `additionalProperties` covers.
pub(super) fn additional_names<'a>(schema: &'a Map<String, Value>) -> PropertyNames<'a> {
    let keys = |word: &str| schema.get(word).and_then(Value::as_object);
    let names = |word| keys(word).into_iter().flat_map(Map::keys).map(String::as_str).collect();
    PropertyNames::Rest { names: names("properties"), patterns: names("patternProperties") }
}
