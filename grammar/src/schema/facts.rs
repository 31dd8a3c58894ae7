//! The facts about a value on one way through a schema: every fact must hold. Knows nothing of documents or text.

use super::decimal::Decimal;
use super::places::SchemaIdx;
use super::values::{json_equal, kinds};
use serde_json::Value;
use std::collections::HashSet;

/// A schema that a value satisfies (true) or does not (false).
pub(crate) type SchemaClaim = (SchemaIdx, bool);

/// Items from a place on, a given number of which satisfy a claim.
#[derive(Clone, Debug)]
pub(crate) struct ContainsClaim {
    pub(crate) from: usize,
    pub(crate) claim: SchemaClaim,
    pub(crate) min: usize,
    pub(crate) max: Option<usize>,
}

/// Names of properties.
#[derive(Clone, Debug)]
pub(crate) enum PropertyNames<'a> {
    Pattern(&'a str),
    /// All but these, and those that match one of the patterns.
    Rest {
        names: Vec<&'a str>,
        patterns: Vec<&'a str>,
    },
    /// A string for which the claim holds.
    Claimed(SchemaClaim),
}

#[derive(Clone, Debug)]
pub(crate) enum SchemaFact<'a> {
    Kinds(u8),
    Values(Vec<&'a Value>),
    /// No array and no object.
    Unlike(&'a Value),
    Lower(Decimal, bool),
    Upper(Decimal, bool),
    Multiple(Decimal, bool),
    Pattern(&'a str, bool),
    Format(&'a str, bool),
    MinLength(usize),
    MaxLength(usize),
    Item(usize, SchemaClaim),
    Items(usize, SchemaClaim),
    MinItems(usize),
    MaxItems(usize),
    Contains(ContainsClaim),
    Unique,
    Property(&'a str, SchemaClaim),
    Properties(PropertyNames<'a>, SchemaClaim),
    Required(&'a str),
    MinProperties(usize),
    MaxProperties(usize),
    /// A property with such a name exists, and the claim holds for its value.
    Exists(PropertyNames<'a>, SchemaClaim),
}

/// The facts together.
#[derive(Clone, Debug)]
pub(crate) struct SchemaFacts<'a> {
    pub(crate) kinds: u8,
    pub(crate) values: Option<Vec<&'a Value>>,
    pub(crate) unlike: Vec<&'a Value>,
    pub(crate) lower: Option<(Decimal, bool)>,
    pub(crate) upper: Option<(Decimal, bool)>,
    pub(crate) multiples: Vec<(Decimal, bool)>,
    pub(crate) patterns: Vec<(&'a str, bool)>,
    pub(crate) formats: Vec<(&'a str, bool)>,
    pub(crate) length: (usize, Option<usize>),
    pub(crate) array: ArrayFacts,
    pub(crate) object: ObjectFacts<'a>,
    pub(crate) evaluated: Vec<EvaluatedParts<'a>>,
}

/// What a value satisfies if it is an array.
#[derive(Clone, Debug, Default)]
pub(crate) struct ArrayFacts {
    /// Claims on one place each.
    pub(crate) item: Vec<(usize, SchemaClaim)>,
    /// Claims on all places from one on.
    pub(crate) items: Vec<(usize, SchemaClaim)>,
    pub(crate) n_items: (usize, Option<usize>),
    pub(crate) contains: Vec<ContainsClaim>,
    pub(crate) is_unique: bool,
}

/// What a value satisfies if it is an object.
#[derive(Clone, Debug, Default)]
pub(crate) struct ObjectFacts<'a> {
    pub(crate) property: Vec<(&'a str, SchemaClaim)>,
    pub(crate) properties: Vec<(PropertyNames<'a>, SchemaClaim)>,
    pub(crate) required: Vec<&'a str>,
    pub(crate) n_properties: (usize, Option<usize>),
    pub(crate) exists: Vec<(PropertyNames<'a>, SchemaClaim)>,
}

/// The parts that the keywords of a schema with `unevaluated..` have evaluated on this way.
#[derive(Clone, Debug, Default)]
pub(crate) struct EvaluatedParts<'a> {
    pub(crate) names: Vec<&'a str>,
    pub(crate) patterns: Vec<&'a str>,
    pub(crate) all_properties: bool,
    pub(crate) n_items: usize,
    pub(crate) all_items: bool,
    /// Whether it needs the rest of the items.
    pub(crate) needs_items: bool,
    pub(crate) rest_properties: Option<SchemaClaim>,
    pub(crate) rest_items: Option<SchemaClaim>,
}

impl ArrayFacts {
    /// The claims on the item at a place.
    pub(crate) fn claims_at(&self, at: usize) -> Vec<SchemaClaim> {
        let own = self.item.iter().filter(|(i, _)| *i == at).map(|(_, claim)| *claim);
        own.chain(self.items.iter().filter(|(from, _)| *from <= at).map(|(_, claim)| *claim)).collect()
    }

    /// The first place from which all items have the same claims.
    pub(crate) fn first_uniform_place(&self) -> usize {
        let own = self.item.iter().map(|(at, _)| at + 1);
        own.chain(self.items.iter().map(|(from, _)| *from)).max().unwrap_or(0)
    }
}

impl<'a> ObjectFacts<'a> {
    /// The names in all facts, in their order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> + use<'_, 'a> {
        let rest = self.properties.iter().chain(&self.exists).filter_map(|(names, _)| match names {
            PropertyNames::Rest { names, .. } => Some(names),
            _ => None,
        });
        let own = self.property.iter().map(|(name, _)| *name).chain(self.required.iter().copied());
        let mut seen = HashSet::new();
        own.chain(rest.flatten().copied()).filter(move |name| seen.insert(*name))
    }
}

impl<'a> SchemaFacts<'a> {
    pub(crate) fn none() -> SchemaFacts<'a> {
        SchemaFacts {
            kinds: kinds::ALL,
            values: None,
            unlike: Vec::new(),
            lower: None,
            upper: None,
            multiples: Vec::new(),
            patterns: Vec::new(),
            formats: Vec::new(),
            length: (0, None),
            array: ArrayFacts::default(),
            object: ObjectFacts::default(),
            evaluated: Vec::new(),
        }
    }

    /// The number of entries in a copy.
    pub(crate) fn n_entries(&self) -> usize {
        let values = self.values.as_ref().map_or(0, Vec::len) + self.unlike.len();
        let ArrayFacts { item, items, contains, .. } = &self.array;
        let ObjectFacts { property, properties, required, .. } = &self.object;
        let n_items = item.len() + items.len() + contains.len();
        values + n_items + property.len() + properties.len() + required.len()
    }

    /// Adds one fact. `scopes` are the schemas with `unevaluated..` that it is a part of.
    pub(crate) fn add(&mut self, fact: SchemaFact<'a>, scopes: &[usize]) {
        self.note_evaluated(&fact, scopes);
        match fact {
            SchemaFact::Kinds(kinds) => self.kinds &= kinds,
            SchemaFact::Values(values) => match &mut self.values {
                Some(known) => known.retain(|value| values.iter().any(|other| json_equal(value, other))),
                None => self.values = Some(values),
            },
            SchemaFact::Unlike(value) => self.unlike.push(value),
            SchemaFact::Lower(bound, or_equal) => {
                let is_tighter = |(known, equal): &(Decimal, bool)| bound > *known || bound == *known && *equal;
                if self.lower.as_ref().is_none_or(is_tighter) {
                    self.lower = Some((bound, or_equal));
                }
            }
            SchemaFact::Upper(bound, or_equal) => {
                let is_tighter = |(known, equal): &(Decimal, bool)| bound < *known || bound == *known && *equal;
                if self.upper.as_ref().is_none_or(is_tighter) {
                    self.upper = Some((bound, or_equal));
                }
            }
            SchemaFact::Multiple(of, is) => self.multiples.push((of, is)),
            SchemaFact::Pattern(pattern, is) => self.patterns.push((pattern, is)),
            SchemaFact::Format(format, is) => self.formats.push((format, is)),
            SchemaFact::MinLength(n) => self.length.0 = self.length.0.max(n),
            SchemaFact::MaxLength(n) => tighten_max(&mut self.length.1, n),
            SchemaFact::Item(at, claim) => self.array.item.push((at, claim)),
            SchemaFact::Items(from, claim) => self.array.items.push((from, claim)),
            SchemaFact::MinItems(n) => self.array.n_items.0 = self.array.n_items.0.max(n),
            SchemaFact::MaxItems(n) => tighten_max(&mut self.array.n_items.1, n),
            SchemaFact::Contains(contains) => self.array.contains.push(contains),
            SchemaFact::Unique => self.array.is_unique = true,
            SchemaFact::Property(name, claim) => self.object.property.push((name, claim)),
            SchemaFact::Properties(names, claim) => self.object.properties.push((names, claim)),
            SchemaFact::Required(name) => self.object.required.push(name),
            SchemaFact::MinProperties(n) => self.object.n_properties.0 = self.object.n_properties.0.max(n),
            SchemaFact::MaxProperties(n) => tighten_max(&mut self.object.n_properties.1, n),
            SchemaFact::Exists(names, claim) => self.object.exists.push((names, claim)),
        }
    }

    fn note_evaluated(&mut self, fact: &SchemaFact<'a>, scopes: &[usize]) {
        for scope in scopes {
            let evaluated = &mut self.evaluated[*scope];
            match fact {
                SchemaFact::Property(name, (_, true)) => evaluated.names.push(name),
                SchemaFact::Properties(PropertyNames::Pattern(pattern), _) => evaluated.patterns.push(pattern),
                SchemaFact::Properties(PropertyNames::Rest { .. }, _) => evaluated.all_properties = true,
                SchemaFact::Item(at, _) => evaluated.n_items = evaluated.n_items.max(at + 1),
                SchemaFact::Items(..) => evaluated.all_items = true,
                _ => {}
            }
        }
    }

    /// Fixes the rest: everything that no keyword has evaluated.
    pub(crate) fn apply_unevaluated(&mut self) {
        for scope in std::mem::take(&mut self.evaluated) {
            let rest = PropertyNames::Rest { names: scope.names, patterns: scope.patterns };
            if let Some(claim) = scope.rest_properties.filter(|_| !scope.all_properties) {
                self.object.properties.push((rest, claim));
            }
            if let Some(claim) = scope.rest_items.filter(|_| !scope.all_items) {
                self.array.items.push((scope.n_items, claim));
            }
        }
    }
}

fn tighten_max(bound: &mut Option<usize>, n: usize) {
    *bound = Some(bound.map_or(n, |known| known.min(n)));
}
