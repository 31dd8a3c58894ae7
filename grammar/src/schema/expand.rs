//! Expands claims on a value to the ways in which they can hold, each a list of facts. Knows nothing of text.

use super::facts::{Claim, Evaluated, Fact, Facts};
use super::places::{Place, Places};
use super::{Structures, negative, positive};
use crate::{GrammarLimits, GrammarRefused};
use std::collections::HashSet;
use std::rc::Rc;

/// One way in which a keyword can hold.
pub(super) struct Way<'a> {
    pub(super) facts: Vec<Fact<'a>>,
    pub(super) claims: Vec<Claim>,
}

impl<'a> Way<'a> {
    pub(super) fn facts(facts: impl IntoIterator<Item = Fact<'a>>) -> Way<'a> {
        Way { facts: facts.into_iter().collect(), claims: Vec::new() }
    }

    pub(super) fn claims(claims: impl IntoIterator<Item = Claim>) -> Way<'a> {
        Way { facts: Vec::new(), claims: claims.into_iter().collect() }
    }
}

/// One of these holds.
pub(super) type Choice<'a> = Vec<Way<'a>>;

/// Whether a schema around this one needs to know which of its parts held.
#[derive(Clone, Copy)]
pub(super) struct Scope {
    pub(super) is_there: bool,
    /// Whether it needs to know which items they evaluated.
    pub(super) asks_items: bool,
}

/// The requirements of a schema on a value.
#[derive(Default)]
pub(super) struct Asked<'a> {
    /// All of them hold.
    pub(super) choices: Vec<Choice<'a>>,
    pub(super) rest_properties: Option<Claim>,
    pub(super) rest_items: Option<Claim>,
}

/// The claims on the path to this one, about the same value.
struct Above {
    claim: Claim,
    before: Option<Rc<Above>>,
}

#[derive(Clone)]
enum Task<'a> {
    Claim { claim: Claim, scopes: Rc<[usize]>, above: Option<Rc<Above>> },
    Choice { choice: Rc<Choice<'a>>, scopes: Rc<[usize]>, above: Option<Rc<Above>> },
}

#[derive(Clone)]
struct State<'a> {
    facts: Facts<'a>,
    tasks: Vec<Task<'a>>,
    seen: HashSet<(Claim, Rc<[usize]>)>,
}

/// A copy of this many entries costs as much as a step: copies dominate the memory use.
const ENTRIES_A_STEP: usize = 16;

fn too_many(limits: &GrammarLimits) -> GrammarRefused {
    GrammarRefused::too_large("the number of combinations of schemas", limits.nodes_max)
}

/// Returns all ways in which the claims hold together.
pub(super) fn expand<'a>(
    places: &Places<'a>,
    structures: &Structures,
    claims: &[Claim],
    limits: &GrammarLimits,
) -> Result<Vec<Facts<'a>>, GrammarRefused> {
    let none: Rc<[usize]> = Rc::new([]);
    let tasks = claims.iter().rev().map(|claim| Task::Claim { claim: *claim, scopes: none.clone(), above: None });
    let mut states = vec![State { facts: Facts::none(), tasks: tasks.collect(), seen: HashSet::new() }];
    let mut done: Vec<Facts<'a>> = Vec::new();
    let mut n_steps = 0;
    while let Some(mut state) = states.pop() {
        while let Some(task) = state.tasks.pop().filter(|_| state.facts.kinds != 0) {
            n_steps += 1;
            if n_steps > limits.nodes_max || states.len() > limits.nodes_max {
                return Err(too_many(limits));
            }
            match task {
                Task::Claim { claim, scopes, above } => {
                    asked(places, structures, claim, scopes, above, &mut state)?;
                }
                Task::Choice { choice, scopes, above } => {
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
                        branch.take(other, &scopes, &above);
                        states.push(branch);
                    }
                    state.take(first, &scopes, &above);
                }
            }
        }
        if state.facts.kinds != 0 {
            state.facts.settle();
            done.push(state.facts);
        }
    }
    Ok(done)
}

impl<'a> State<'a> {
    fn take(&mut self, way: &Way<'a>, scopes: &Rc<[usize]>, above: &Option<Rc<Above>>) {
        for fact in &way.facts {
            self.facts.add(fact.clone(), scopes);
        }
        let none: Rc<[usize]> = Rc::new([]);
        for claim in way.claims.iter().rev() {
            // A claim that does not hold has evaluated nothing.
            let scopes = if claim.1 { scopes.clone() } else { none.clone() };
            self.tasks.push(Task::Claim { claim: *claim, scopes, above: above.clone() });
        }
    }
}

fn asked<'a>(
    places: &Places<'a>,
    structures: &Structures,
    claim: Claim,
    scopes: Rc<[usize]>,
    above: Option<Rc<Above>>,
    state: &mut State<'a>,
) -> Result<(), GrammarRefused> {
    let mut before = &above;
    while let Some(link) = before {
        if link.claim.0 == claim.0 {
            return Err(GrammarRefused::invalid(places.path(claim.0), "it refers to itself and says nothing"));
        }
        before = &link.before;
    }
    if !state.seen.insert((claim, scopes.clone())) {
        return Ok(());
    }
    let above = Some(Rc::new(Above { claim, before: above }));
    let (place, is) = claim;
    if !is {
        let choice = Rc::new(negative::choice(places, structures, place)?);
        state.tasks.push(Task::Choice { choice, scopes, above });
        return Ok(());
    }
    let is_scope = places.has_unevaluated(place);
    let inner: Rc<[usize]> = if is_scope {
        let asks_items = places.value(place).get("unevaluatedItems").is_some();
        state.facts.evaluated.push(Evaluated { asks_items, ..Evaluated::default() });
        scopes.iter().copied().chain([state.facts.evaluated.len() - 1]).collect()
    } else {
        scopes.clone()
    };
    let scope = Scope {
        is_there: !inner.is_empty(),
        asks_items: inner.iter().any(|scope| state.facts.evaluated[*scope].asks_items),
    };
    let asked = positive::asked(places, place, scope)?;
    for choice in asked.choices.into_iter().rev() {
        state.tasks.push(Task::Choice { choice: Rc::new(choice), scopes: inner.clone(), above: above.clone() });
    }
    if let Some(own) = inner.last().filter(|_| is_scope) {
        let evaluated = &mut state.facts.evaluated[*own];
        evaluated.rest_properties = asked.rest_properties;
        evaluated.rest_items = asked.rest_items;
        for scope in scopes.iter() {
            state.facts.evaluated[*scope].all_properties |= asked.rest_properties.is_some();
            state.facts.evaluated[*scope].all_items |= asked.rest_items.is_some();
        }
    }
    Ok(())
}

impl<'a> Places<'a> {
    fn has_unevaluated(&self, place: Place) -> bool {
        let value = self.value(place);
        value.get("unevaluatedProperties").is_some() || value.get("unevaluatedItems").is_some()
    }
}
