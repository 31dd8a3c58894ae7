//! From claims to rules: each set of claims is a rule, made once.

use super::arrays::write_array;
use super::claims::ClaimRules;
use super::document::SchemaDocument;
use super::expand::expand;
use super::facts::{SchemaClaim, SchemaFacts};
use super::objects::write_object;
use super::places::SchemaPlaces;
use super::solver::ClaimSolver;
use super::structures::{ValueSchemas, schema_of_value, structured_values};
use super::text::{numbers_with, scalar_text};
use super::values::{LITERALS, kind, kinds};
use crate::rules::{GrammarRules, RuleIdx, Symbol};
use crate::words::TextSet;
use crate::{GrammarLimits, GrammarRefused};
use serde_json::Value;

/// The rule for values that satisfy a schema, in `grammar`.
pub(crate) fn write(
    schema: &Value,
    grammar: &mut GrammarRules,
    limits: &GrammarLimits,
) -> Result<RuleIdx, GrammarRefused> {
    write_parts(schema, &[schema], grammar, limits).map(|parts| parts[0])
}

/// The rules for values that satisfy schemas in a document, which may refer to each other.
pub(crate) fn write_parts(
    schema: &Value,
    parts: &[&Value],
    grammar: &mut GrammarRules,
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
    let document = SchemaDocument { places, structures, limits };
    let (mut rules, mut solver) = (ClaimRules::new(&document, grammar), ClaimSolver::new(&document));
    let starts = roots.into_iter().map(|root| rules.rule_of(vec![(root, true)])).collect();
    while let Some((rule, claims)) = rules.pop() {
        let alternatives = alternatives(&mut rules, &mut solver, &claims).map_err(|refused| match claims.first() {
            Some((place, _)) => refused.add_schema_path(document.places.path(*place)),
            None => refused,
        })?;
        rules.grammar.define(rule, alternatives);
        solver.count_step(rules.grammar)?;
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

/// The alternatives of the rule for values of which all claims hold.
fn alternatives(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    claims: &[SchemaClaim],
) -> Result<Vec<Vec<Symbol>>, GrammarRefused> {
    let mut alternatives = Vec::new();
    for facts in expand(solver.document, claims)? {
        solver.count_step(rules.grammar)?;
        match &facts.values {
            Some(values) => write_values(rules, solver, &facts, values, &mut alternatives)?,
            None => write_kinds(rules, solver, &facts, &mut alternatives)?,
        }
    }
    Ok(alternatives)
}

fn write_values(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &SchemaFacts,
    values: &[&Value],
    out: &mut Vec<Vec<Symbol>>,
) -> Result<(), GrammarRefused> {
    let mut scalars = Vec::new();
    for value in values {
        if !solver.fits_beside_list(facts, value, 0)? {
            continue;
        }
        match scalar_text(value) {
            Some(text) => scalars.push(TextSet::Text(text)),
            None => {
                let place = solver.document.structures.place(value)?;
                out.push(vec![Symbol::Rule(rules.rule_of(vec![(place, true)]))]);
            }
        }
    }
    if !scalars.is_empty() {
        out.push(vec![rules.grammar.words(&TextSet::Any(scalars))]);
    }
    Ok(())
}

fn write_kinds(
    rules: &mut ClaimRules,
    solver: &mut ClaimSolver,
    facts: &SchemaFacts,
    out: &mut Vec<Vec<Symbol>>,
) -> Result<(), GrammarRefused> {
    for (bit, text) in LITERALS {
        let is_other = |value: &&Value| kind(value) == bit;
        if facts.kinds & bit != 0 && !facts.unlike.iter().any(is_other) {
            out.push(vec![rules.grammar.words(&TextSet::Text(text.to_owned()))]);
        }
    }
    if facts.kinds & kinds::NUMBER != 0 {
        let words = numbers_with(facts)?;
        out.extend(terminal(rules.grammar, solver, &words)?);
    }
    if facts.kinds & kinds::STRING != 0 {
        let words = solver.texts.strings_with(facts)?;
        out.extend(terminal(rules.grammar, solver, &words)?);
    }
    if facts.kinds & kinds::ARRAY != 0 {
        write_array(rules, solver, &facts.array, out)?;
    }
    if facts.kinds & kinds::OBJECT != 0 {
        write_object(rules, solver, &facts.object, out)?;
    }
    Ok(())
}

fn terminal(
    grammar: &mut GrammarRules,
    solver: &ClaimSolver,
    words: &TextSet,
) -> Result<Option<Vec<Symbol>>, GrammarRefused> {
    Ok((!solver.texts.is_empty(words)?).then(|| vec![grammar.words(words)]))
}
