//! The ways in which a value can fail a schema: each keyword's own.

use super::expand::{Alternative, Alternatives};
use super::facts::{ContainsClaim, PropertyNames, SchemaFact};
use super::keywords;
use super::places::{SchemaIdx, SchemaPlaces};
use super::positive::{additional_names, contains_bounds, first_items};
use super::read::{Keyword, texts};
use super::structures::ValueSchemas;
use super::values::kinds;
use crate::GrammarRefused;
use serde_json::{Map, Value};

struct NegativeReader<'p, 'a> {
    places: &'p SchemaPlaces<'a>,
    structures: &'p ValueSchemas,
    place: SchemaIdx,
    schema: &'a Map<String, Value>,
}

/// One of these holds for a value that does not satisfy the schema.
pub(super) fn read_negation<'a>(
    places: &SchemaPlaces<'a>,
    structures: &ValueSchemas,
    place: SchemaIdx,
) -> Result<Alternatives<'a>, GrammarRefused> {
    let schema = match places.value(place) {
        Value::Object(schema) => schema,
        Value::Bool(true) => return Ok(Vec::new()),
        _ => return Ok(vec![Alternative::facts([])]),
    };
    let reader = NegativeReader { places, structures, place, schema };
    let mut choice = Vec::new();
    for (name, value) in schema {
        let at = format!("{}/{}", places.path(place), keywords::escaped(name));
        choice.extend(reader.keyword(&Keyword { name, value, at })?);
    }
    Ok(choice)
}

fn choice_of_kinds<'a>(kinds: u8, facts: impl IntoIterator<Item = SchemaFact<'a>>) -> Alternatives<'a> {
    vec![Alternative::facts([SchemaFact::Kinds(kinds)].into_iter().chain(facts))]
}

impl<'a> NegativeReader<'_, 'a> {
    fn keyword(&self, word: &Keyword<'a>) -> Result<Alternatives<'a>, GrammarRefused> {
        let fewer = |n: usize, fact: fn(usize) -> SchemaFact<'a>, kind| {
            n.checked_sub(1).map(|n| choice_of_kinds(kind, [fact(n)]))
        };
        let array = |facts: Option<SchemaFact<'a>>| choice_of_kinds(kinds::ARRAY, facts);
        Ok(match word.name {
            "type" => choice_of_kinds(!word.kinds()?, []),
            "enum" => self.differs_from_values(word.list()?)?,
            "const" => self.differs_from_values(std::slice::from_ref(word.value))?,
            "minimum" => choice_of_kinds(kinds::NUMBER, [SchemaFact::Upper(word.number()?, false)]),
            "exclusiveMinimum" => choice_of_kinds(kinds::NUMBER, [SchemaFact::Upper(word.number()?, true)]),
            "maximum" => choice_of_kinds(kinds::NUMBER, [SchemaFact::Lower(word.number()?, false)]),
            "exclusiveMaximum" => choice_of_kinds(kinds::NUMBER, [SchemaFact::Lower(word.number()?, true)]),
            "multipleOf" => choice_of_kinds(kinds::NUMBER, [SchemaFact::Multiple(word.number()?, false)]),
            "minLength" => fewer(word.count()?, SchemaFact::MaxLength, kinds::STRING).unwrap_or_default(),
            "maxLength" => choice_of_kinds(kinds::STRING, [SchemaFact::MinLength(word.count()? + 1)]),
            "pattern" => choice_of_kinds(kinds::STRING, [SchemaFact::Pattern(word.text()?, false)]),
            "format" => choice_of_kinds(kinds::STRING, [SchemaFact::Format(word.text()?, false)]),
            "minItems" => fewer(word.count()?, SchemaFact::MaxItems, kinds::ARRAY).unwrap_or_default(),
            "maxItems" => array(Some(SchemaFact::MinItems(word.count()? + 1))),
            "uniqueItems" if word.flag()? => return Err(word.unsupported("uniqueItems in a negated schema")),
            "minProperties" => fewer(word.count()?, SchemaFact::MaxProperties, kinds::OBJECT).unwrap_or_default(),
            "maxProperties" => choice_of_kinds(kinds::OBJECT, [SchemaFact::MinProperties(word.count()? + 1)]),
            "prefixItems" | "items" | "additionalItems" | "contains" => self.of_arrays(word)?,
            "unevaluatedItems" | "unevaluatedProperties" => {
                return Err(word.unsupported("this keyword in a negated schema"));
            }
            "required" | "properties" | "patternProperties" | "additionalProperties" | "propertyNames" => {
                self.of_objects(word)?
            }
            "dependentRequired" | "dependentSchemas" | "dependencies" => self.dependent(word)?,
            _ => self.combining(word)?,
        })
    }

    /// A list or an object differs from another as from a schema that only that one satisfies.
    fn differs_from_values(&self, values: &'a [Value]) -> Result<Alternatives<'a>, GrammarRefused> {
        let mut way = Alternative::facts([]);
        for value in values {
            match value {
                Value::Array(_) | Value::Object(_) => way.claims.push((self.structures.place(value)?, false)),
                scalar => way.facts.push(SchemaFact::Unlike(scalar)),
            }
        }
        Ok(vec![way])
    }

    fn of_arrays(&self, word: &Keyword<'a>) -> Result<Alternatives<'a>, GrammarRefused> {
        let n_first = first_items(self.schema).len();
        let beyond = |item: &'a Value| -> Result<Alternatives<'a>, GrammarRefused> {
            let contains = ContainsClaim { from: n_first, claim: (self.inner(item)?, false), min: 1, max: None };
            Ok(choice_of_kinds(kinds::ARRAY, [SchemaFact::Contains(contains)]))
        };
        match (word.name, word.value) {
            ("prefixItems" | "items", Value::Array(list)) => {
                let way = |(i, item)| {
                    let fact = SchemaFact::Item(i, (self.inner(item)?, false));
                    Ok(Alternative::facts([SchemaFact::Kinds(kinds::ARRAY), SchemaFact::MinItems(i + 1), fact]))
                };
                list.iter().enumerate().map(way).collect()
            }
            ("items", item) => beyond(item),
            ("additionalItems", item) if self.schema.get("items").is_some_and(Value::is_array) => beyond(item),
            ("contains", item) => {
                let claim = (self.inner(item)?, true);
                let (min, max) = contains_bounds(self.places, self.place, self.schema)?;
                let of = |min, max| {
                    choice_of_kinds(kinds::ARRAY, [SchemaFact::Contains(ContainsClaim { from: 0, claim, min, max })])
                };
                let fewer = min.checked_sub(1).map(|most| of(0, Some(most))).unwrap_or_default();
                let more = max.map(|max| of(max + 1, None)).unwrap_or_default();
                Ok(fewer.into_iter().chain(more).collect())
            }
            _ => Ok(Vec::new()),
        }
    }

    fn of_objects(&self, word: &Keyword<'a>) -> Result<Alternatives<'a>, GrammarRefused> {
        let object = SchemaFact::Kinds(kinds::OBJECT);
        let nothing = (self.places.false_schema(), true);
        let exists = |names, claim| Alternative::facts([object.clone(), SchemaFact::Exists(names, claim)]);
        Ok(match word.name {
            "required" => {
                let without = |name| Alternative::facts([object.clone(), SchemaFact::Property(name, nothing)]);
                word.texts()?.into_iter().map(without).collect()
            }
            "properties" => {
                let way = |(name, schema): (&'a String, &'a Value)| {
                    let fact = SchemaFact::Property(name, (self.inner(schema)?, false));
                    Ok(Alternative::facts([object.clone(), SchemaFact::Required(name), fact]))
                };
                word.object()?.iter().map(way).collect::<Result<_, GrammarRefused>>()?
            }
            "patternProperties" => {
                let way = |(pattern, schema): (&'a String, &'a Value)| {
                    Ok(exists(PropertyNames::Pattern(pattern), (self.inner(schema)?, false)))
                };
                word.object()?.iter().map(way).collect::<Result<_, GrammarRefused>>()?
            }
            "additionalProperties" => vec![exists(additional_names(self.schema), (self.inner(word.value)?, false))],
            _ => vec![exists(
                PropertyNames::Claimed((self.inner(word.value)?, false)),
                (self.places.false_schema(), false),
            )],
        })
    }

    fn dependent(&self, word: &Keyword<'a>) -> Result<Alternatives<'a>, GrammarRefused> {
        let nothing = (self.places.false_schema(), true);
        let mut choice = Vec::new();
        for (name, value) in word.object()? {
            let with = || Alternative::facts([SchemaFact::Kinds(kinds::OBJECT), SchemaFact::Required(name)]);
            match texts(value).filter(|_| word.name != "dependentSchemas") {
                Some(required) => choice.extend(required.into_iter().map(|required| {
                    let mut way = with();
                    way.facts.push(SchemaFact::Property(required, nothing));
                    way
                })),
                None => {
                    let mut way = with();
                    way.claims.push((self.inner(value)?, false));
                    choice.push(way);
                }
            }
        }
        Ok(choice)
    }

    fn combining(&self, word: &Keyword<'a>) -> Result<Alternatives<'a>, GrammarRefused> {
        let fails = |place: SchemaIdx| Alternative::claims([(place, false)]);
        Ok(match word.name {
            "$ref" => vec![fails(self.places.resolve_ref(self.place, word.text()?)?)],
            "$dynamicRef" => vec![fails(self.places.resolve_dynamic_ref(self.place, word.text()?)?)],
            "allOf" => self.list(word)?.into_iter().map(fails).collect(),
            "anyOf" => vec![Alternative::claims(self.list(word)?.into_iter().map(|place| (place, false)))],
            "oneOf" => {
                let one = self.list(word)?;
                let mut choice = vec![Alternative::claims(one.iter().map(|place| (*place, false)))];
                for (i, first) in one.iter().enumerate() {
                    choice.extend(
                        one[i + 1..].iter().map(|second| Alternative::claims([(*first, true), (*second, true)])),
                    );
                }
                choice
            }
            "not" => vec![Alternative::claims([(self.inner(word.value)?, true)])],
            "if" => {
                let condition = self.inner(word.value)?;
                let way = |key: &str, holds| {
                    let branch = self.schema.get(key).map(|schema| self.inner(schema)).transpose()?;
                    Ok(branch.map(|branch| Alternative::claims([(condition, holds), (branch, false)])))
                };
                way("then", true)?.into_iter().chain(way("else", false)?).collect()
            }
            _ => Vec::new(),
        })
    }

    fn list(&self, word: &Keyword<'a>) -> Result<Vec<SchemaIdx>, GrammarRefused> {
        word.list()?.iter().map(|schema| self.inner(schema)).collect()
    }

    fn inner(&self, schema: &'a Value) -> Result<SchemaIdx, GrammarRefused> {
        self.places.schema_of(schema)
    }
}
