//! Expands claims on a value to the ways in which they can hold, each a list of facts. Knows nothing of text.

use super::document::SchemaDocument;
use super::facts::{EvaluatedParts, SchemaClaim, SchemaFact, SchemaFacts};
use super::places::{SchemaIdx, SchemaPlaces};
use super::{negative, positive};
use crate::{GrammarLimits, GrammarRefused};
use std::collections::HashSet;
use std::rc::Rc;

/// One way in which a keyword can hold.
pub(super) struct Alternative<'a> {
    pub(super) facts: Vec<SchemaFact<'a>>,
    pub(super) claims: Vec<SchemaClaim>,
}

impl<'a> Alternative<'a> {
    pub(super) fn facts(facts: impl IntoIterator<Item = SchemaFact<'a>>) -> Alternative<'a> {
        Alternative { facts: facts.into_iter().collect(), claims: Vec::new() }
    }

    pub(super) fn claims(claims: impl IntoIterator<Item = SchemaClaim>) -> Alternative<'a> {
        Alternative { facts: Vec::new(), claims: claims.into_iter().collect() }
    }
}

/// One of these holds.
pub(super) type Alternatives<'a> = Vec<Alternative<'a>>;

/// Whether a schema around this one needs to know which of its parts held.
#[derive(Clone, Copy)]
pub(super) struct EvaluationScope {
    pub(super) is_there: bool,
    /// Whether it needs to know which items they evaluated.
    pub(super) needs_items: bool,
}

/// The requirements of a schema on a value.
#[derive(Default)]
pub(super) struct SchemaConstraints<'a> {
    /// All of them hold.
    pub(super) choices: Vec<Alternatives<'a>>,
    pub(super) rest_properties: Option<SchemaClaim>,
    pub(super) rest_items: Option<SchemaClaim>,
}

/// The claims on the path to this one, about the same value.
struct ClaimPath {
    claim: SchemaClaim,
    before: Option<Rc<ClaimPath>>,
}

#[derive(Clone)]
enum ExpansionTask<'a> {
    Claim { claim: SchemaClaim, scopes: Rc<[usize]>, above: Option<Rc<ClaimPath>> },
    Choice { choice: Rc<Alternatives<'a>>, scopes: Rc<[usize]>, above: Option<Rc<ClaimPath>> },
}

#[derive(Clone)]
struct ExpansionState<'a> {
    facts: SchemaFacts<'a>,
    tasks: Vec<ExpansionTask<'a>>,
    seen: HashSet<(SchemaClaim, Rc<[usize]>)>,
}

/// A copy of this many entries costs as much as a step: copies dominate the memory use.
const ENTRIES_A_STEP: usize = 16;

fn too_many(limits: &GrammarLimits) -> GrammarRefused {
    GrammarRefused::too_large("the number of combinations of schemas", limits.nodes_max)
}

/// Returns all ways in which the claims hold together.
pub(super) fn expand<'a>(
    document: &SchemaDocument<'a>,
    claims: &[SchemaClaim],
) -> Result<Vec<SchemaFacts<'a>>, GrammarRefused> {
    let limits = document.limits;
    let none: Rc<[usize]> = Rc::new([]);
    let tasks =
        claims.iter().rev().map(|claim| ExpansionTask::Claim { claim: *claim, scopes: none.clone(), above: None });
    let mut states = vec![ExpansionState { facts: SchemaFacts::none(), tasks: tasks.collect(), seen: HashSet::new() }];
    let mut done: Vec<SchemaFacts<'a>> = Vec::new();
    let mut n_steps = 0;
    while let Some(mut state) = states.pop() {
        while let Some(task) = state.tasks.pop().filter(|_| state.facts.kinds != 0) {
            n_steps += 1;
            if n_steps > limits.nodes_max || states.len() > limits.nodes_max {
                return Err(too_many(limits));
            }
            match task {
                ExpansionTask::Claim { claim, scopes, above } => {
                    expand_claim(document, claim, scopes, above, &mut state)?;
                }
                ExpansionTask::Choice { choice, scopes, above } => {
                    let Some(first) = choice.first() else {
                        state.facts.kinds = 0;
                        break;
                    };
                    for other in choice[1..].iter().rev() {
                        n_steps += state.facts.n_entries() / ENTRIES_A_STEP;
                        if n_steps > limits.nodes_max {
                            return Err(too_many(limits));
                        }
                        let mut branch = state.clone();
                        branch.apply_alternative(other, &scopes, &above);
                        states.push(branch);
                    }
                    state.apply_alternative(first, &scopes, &above);
                }
            }
        }
        if state.facts.kinds != 0 {
            state.facts.apply_unevaluated();
            done.push(state.facts);
        }
    }
    Ok(done)
}

impl<'a> ExpansionState<'a> {
    fn apply_alternative(&mut self, way: &Alternative<'a>, scopes: &Rc<[usize]>, above: &Option<Rc<ClaimPath>>) {
        for fact in &way.facts {
            self.facts.add(fact.clone(), scopes);
        }
        let none: Rc<[usize]> = Rc::new([]);
        for claim in way.claims.iter().rev() {
            // A claim that does not hold has evaluated nothing.
            let scopes = if claim.1 { scopes.clone() } else { none.clone() };
            self.tasks.push(ExpansionTask::Claim { claim: *claim, scopes, above: above.clone() });
        }
    }
}

fn expand_claim<'a>(
    document: &SchemaDocument<'a>,
    claim: SchemaClaim,
    scopes: Rc<[usize]>,
    above: Option<Rc<ClaimPath>>,
    state: &mut ExpansionState<'a>,
) -> Result<(), GrammarRefused> {
    let places = &document.places;
    let mut before = &above;
    while let Some(link) = before {
        if link.claim.0 == claim.0 {
            return Err(GrammarRefused::invalid(places.path(claim.0), "it refers only to itself"));
        }
        before = &link.before;
    }
    if !state.seen.insert((claim, scopes.clone())) {
        return Ok(());
    }
    let above = Some(Rc::new(ClaimPath { claim, before: above }));
    let (place, is) = claim;
    if !is {
        let choice = Rc::new(negative::read_negation(places, &document.structures, place)?);
        state.tasks.push(ExpansionTask::Choice { choice, scopes, above });
        return Ok(());
    }
    let is_scope = places.has_unevaluated(place);
    let inner: Rc<[usize]> = if is_scope {
        let needs_items = places.value(place).get("unevaluatedItems").is_some();
        state.facts.evaluated.push(EvaluatedParts { needs_items, ..EvaluatedParts::default() });
        scopes.iter().copied().chain([state.facts.evaluated.len() - 1]).collect()
    } else {
        scopes.clone()
    };
    let scope = EvaluationScope {
        is_there: !inner.is_empty(),
        needs_items: inner.iter().any(|scope| state.facts.evaluated[*scope].needs_items),
    };
    let constraints = positive::read_constraints(places, place, scope)?;
    for choice in constraints.choices.into_iter().rev() {
        state.tasks.push(ExpansionTask::Choice {
            choice: Rc::new(choice),
            scopes: inner.clone(),
            above: above.clone(),
        });
    }
    if let Some(own) = inner.last().filter(|_| is_scope) {
        let evaluated = &mut state.facts.evaluated[*own];
        evaluated.rest_properties = constraints.rest_properties;
        evaluated.rest_items = constraints.rest_items;
        for scope in scopes.iter() {
            state.facts.evaluated[*scope].all_properties |= constraints.rest_properties.is_some();
            state.facts.evaluated[*scope].all_items |= constraints.rest_items.is_some();
        }
    }
    Ok(())
}

impl<'a> SchemaPlaces<'a> {
    fn has_unevaluated(&self, place: SchemaIdx) -> bool {
        let value = self.value(place);
        value.get("unevaluatedProperties").is_some() || value.get("unevaluatedItems").is_some()
    }
}
