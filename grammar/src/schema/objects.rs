//! Objects: named properties in their order, and then any others.

use super::blank;
use super::claims::ClaimRules;
use super::facts::{ObjectFacts, PropertyNames, SchemaClaim};
use super::solver::ClaimSolver;
use super::text::{quoted, strings};
use crate::GrammarRefused;
use crate::rules::{GrammarRules, RuleIdx, Symbol};
use crate::words::TextSet;
use std::collections::{HashMap, HashSet};

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

/// Adds the objects that satisfy the facts to `out`.
pub(super) fn write_object(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &ObjectFacts,
    out: &mut Vec<Vec<Symbol>>,
) -> Result<(), GrammarRefused> {
    let (min, max) = facts.n_properties;
    if max.is_some_and(|max| max < min) {
        return Ok(());
    }
    let Some(((names, claim), exists)) = facts.exists.split_first() else {
        out.extend(one_object(rules, solver, facts, None)?);
        return Ok(());
    };
    if !exists.is_empty() {
        return Err(GrammarRefused::unsupported("not", "a schema that requires two properties by negation"));
    }
    // The required property is a named one, or the last of the others: a later one of the same name would replace it.
    for name in facts.names() {
        // Each name adds a whole object, so the rules grow with the square of the number of names.
        rules.grammar.check_size(solver.document.limits)?;
        if solver.names_have(names, name)? {
            let mut with = facts.clone();
            with.exists.clear();
            with.required.push(name);
            with.property.push((name, *claim));
            out.extend(one_object(rules, solver, &with, None)?);
        }
    }
    out.extend(one_object(rules, solver, facts, facts.exists.first())?);
    Ok(())
}

/// The objects that satisfy the facts, except that a property exists: with `last`, it is their last one.
fn one_object(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &ObjectFacts,
    last: Option<&(PropertyNames, SchemaClaim)>,
) -> Result<Vec<Vec<Symbol>>, GrammarRefused> {
    let comma = rules.grammar.words(&blank::comma());
    let Some(mut entries) = named_properties(rules, solver, facts)? else { return Ok(Vec::new()) };
    if let Some(item) = other_property(rules, solver, facts, None)? {
        let more = Symbol::Many { of: vec![comma.clone(), item.clone()], min: 0, max: None };
        entries.push(PropertyEntry { parts: vec![item, more], is_required: false, is_run: true });
    }
    if last.is_some() {
        let Some(item) = other_property(rules, solver, facts, last)? else { return Ok(Vec::new()) };
        entries.push(PropertyEntry { parts: vec![item], is_required: true, is_run: false });
    }
    let (min, max) = facts.n_properties;
    let n_required = entries.iter().filter(|entry| entry.is_required).count();
    if max.is_some_and(|max| max < n_required) {
        return Ok(Vec::new());
    }
    let open = rules.grammar.words(&blank::open('{'));
    let close = rules.grammar.words(&blank::close('}'));
    let mut alternatives = Vec::new();
    if n_required == 0 && min == 0 {
        alternatives.push(vec![rules.grammar.words(&TextSet::Text("{}".to_owned()))]);
    }
    let inner = match min <= n_required.max(1) && max.is_none() {
        true => joined(&entries, &comma, rules.grammar),
        false => Some(counted(&entries, facts.n_properties, &comma, rules.grammar, solver)?),
    };
    alternatives.extend(inner.map(|inner| [vec![open], inner, vec![close]].concat()));
    Ok(alternatives)
}

/// Returns the named properties; None if one of them is required and impossible.
fn named_properties(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &ObjectFacts,
) -> Result<Option<Vec<PropertyEntry>>, GrammarRefused> {
    let colon = rules.grammar.words(&blank::colon());
    let required: HashSet<&str> = facts.required.iter().copied().collect();
    let mut own: HashMap<&str, Vec<SchemaClaim>> = HashMap::new();
    for (name, claim) in &facts.property {
        own.entry(name).or_default().push(*claim);
    }
    let mut entries = Vec::new();
    for name in facts.names() {
        let mut claims = own.remove(name).unwrap_or_default();
        for (names, claim) in &facts.properties {
            if solver.names_have(names, name)? {
                claims.push(*claim);
            }
        }
        let is_required = required.contains(name);
        if solver.document.is_unsatisfiable(&claims) {
            if is_required {
                return Ok(None);
            }
            continue;
        }
        let key = rules.grammar.words(&TextSet::Text(quoted(name)));
        let value = Symbol::Rule(rules.rule_of(claims));
        entries.push(PropertyEntry { parts: vec![key, colon.clone(), value], is_required, is_run: false });
    }
    Ok(Some(entries))
}

/// A claim on the values of properties, by the sets that have their names, a bit each.
struct NameSetClaim {
    claim: SchemaClaim,
    sets: usize,
    /// The claim is on names in none of the sets, and not on names in all of them.
    is_rest: bool,
}

impl NameSetClaim {
    fn covers(&self, sets: usize) -> bool {
        sets & self.sets == if self.is_rest { 0 } else { self.sets }
    }
}

/// One property without a name in the schema: one value for each combination of sets that contain its name. With
/// `last`, its name is in those sets, and the claim holds for its value.
fn other_property(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &ObjectFacts,
    last: Option<&(PropertyNames, SchemaClaim)>,
) -> Result<Option<Symbol>, GrammarRefused> {
    let (sets, claims) = name_sets(solver, facts.properties.iter().chain(last))?;
    let of_last = &claims[facts.properties.len()..];
    let named: Vec<TextSet> = facts.names().map(|name| TextSet::Text(quoted(name))).collect();
    let colon = rules.grammar.words(&blank::colon());
    let mut alternatives = Vec::new();
    for bits in 0..1usize << sets.len() {
        let claims: Vec<SchemaClaim> = claims.iter().filter(|of| of.covers(bits)).map(|of| of.claim).collect();
        if !of_last.iter().all(|of| of.covers(bits)) || solver.document.is_unsatisfiable(&claims) {
            continue;
        }
        let mut words = vec![strings(0, None)];
        for (i, set) in sets.iter().enumerate() {
            words.push(if bits >> i & 1 == 1 { set.clone() } else { TextSet::not(set.clone()) });
        }
        if !named.is_empty() {
            words.push(TextSet::not(TextSet::Any(named.clone())));
        }
        let words = if words.len() == 1 { words.remove(0) } else { TextSet::All(words) };
        if solver.texts.is_empty(&words)? {
            continue;
        }
        let key = rules.grammar.words(&words);
        let value = Symbol::Rule(rules.rule_of(claims));
        alternatives.push(vec![key, colon.clone(), value]);
    }
    Ok((!alternatives.is_empty()).then(|| Symbol::Rule(rules.grammar.add(alternatives))))
}

/// The sets of names that facts distinguish, and each fact's claim.
fn name_sets<'f, 'a: 'f>(
    solver: &mut ClaimSolver,
    facts: impl Iterator<Item = &'f (PropertyNames<'a>, SchemaClaim)>,
) -> Result<(Vec<TextSet>, Vec<NameSetClaim>), GrammarRefused> {
    let (mut sets, mut keys, mut indices) = (Vec::new(), Vec::new(), Vec::new());
    for (names, claim) in facts {
        let mut of_names = Vec::new();
        for words in solver.sets_of(names)? {
            let key = words.lark();
            let known = keys.iter().position(|other| *other == key);
            of_names.push(known.unwrap_or(keys.len()));
            if known.is_none() {
                keys.push(key);
                sets.push(words);
            }
        }
        indices.push((of_names, matches!(names, PropertyNames::Rest { .. }), *claim));
    }
    if sets.len() > SETS_MAX {
        return Err(GrammarRefused::unsupported("patternProperties", format!("more than {SETS_MAX} sets of names")));
    }
    let bits = |indices: Vec<usize>| indices.into_iter().fold(0, |sets, i| sets | 1 << i);
    let claims = indices.into_iter();
    Ok((sets, claims.map(|(of, is_rest, claim)| NameSetClaim { claim, sets: bits(of), is_rest }).collect()))
}

/// One or more properties in order, with commas between them. Halves are joined, so that rules nest only as deep as
/// the logarithm of their number.
fn joined(entries: &[PropertyEntry], comma: &Symbol, grammar: &mut GrammarRules) -> Option<Vec<Symbol>> {
    match entries {
        [] => None,
        [entry] => Some(entry.parts.clone()),
        _ => {
            let (left, right) = entries.split_at(entries.len() / 2);
            let must = |entries: &[PropertyEntry]| entries.iter().any(|entry| entry.is_required);
            let (first, second) = (joined(left, comma, grammar)?, joined(right, comma, grammar)?);
            let first = vec![Symbol::Rule(grammar.add(vec![first]))];
            let second = vec![Symbol::Rule(grammar.add(vec![second]))];
            let after = || [vec![comma.clone()], second.clone()].concat();
            let before = || [first.clone(), vec![comma.clone()]].concat();
            Some(match (must(left), must(right)) {
                (true, true) => [first.clone(), after()].concat(),
                (true, false) => [first.clone(), vec![Symbol::Maybe(after())]].concat(),
                (false, true) => [vec![Symbol::Maybe(before())], second.clone()].concat(),
                (false, false) => {
                    let some = vec![[first.clone(), vec![Symbol::Maybe(after())]].concat(), second.clone()];
                    vec![Symbol::Rule(grammar.add(some))]
                }
            })
        }
    }
}

/// Does the same where the number of properties matters: one rule for each entry and each count so far.
fn counted(
    entries: &[PropertyEntry],
    n_properties: (usize, Option<usize>),
    comma: &Symbol,
    grammar: &mut GrammarRules,
    solver: &mut ClaimSolver,
) -> Result<Vec<Symbol>, GrammarRefused> {
    let (min, max) = n_properties;
    let n_required = entries.iter().filter(|entry| entry.is_required).count();
    let has_run = entries.iter().any(|entry| entry.is_run);
    // Two properties of a run may have the same name, and then are one property.
    if has_run && min > n_required + 1 {
        return Err(GrammarRefused::unsupported("minProperties", "a minimum of unnamed properties"));
    }
    let repeat_max = solver.document.limits.repeat_max;
    let most = max.unwrap_or(min).min(entries.len() + repeat_max);
    if most > repeat_max {
        return Err(GrammarRefused::too_large("a count of properties", repeat_max));
    }
    // `after[count]`: what may follow after this many properties. `most` also stands for more if there is no
    // maximum.
    let enough = |count: usize| if count >= min && count > 0 { vec![Vec::new()] } else { Vec::new() };
    let mut after: Vec<RuleIdx> = (0..=most).map(|count| grammar.add(enough(count))).collect();
    for entry in entries.iter().rev() {
        let mut here = Vec::with_capacity(most + 1);
        for count in 0..=most {
            solver.count_step(grammar)?;
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
            here.push(grammar.add(alternatives));
        }
        after = here;
    }
    Ok(vec![Symbol::Rule(after[0])])
}
