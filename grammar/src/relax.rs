//! Structural tags with `"strict": false` beside a schema: what can be enforced of it is, and the rest is left to the
//! model. Every value that satisfies a schema satisfies what is left of it.

use crate::schema::keywords::{self, Holds};
use crate::{GrammarLimits, GrammarRefused};
use serde_json::{Map, Value, json};

/// So many times a keyword is taken away, and then all but the type.
const ROUNDS_MAX: usize = 32;

/// Whether a schema compiles by itself.
type Check<'c> = &'c dyn Fn(&Value) -> Result<(), GrammarRefused>;

/// The tag, with schemas that need not hold in full as far as they compile.
pub(crate) fn relaxed_tag(tag: &Value, limits: &GrammarLimits, check: Check) -> Value {
    let mut tag = tag.clone();
    each_format(&mut tag, &mut |format| {
        if format.get("strict") == Some(&Value::Bool(false))
            && let Some(schema) = format.get_mut("json_schema")
        {
            *schema = relaxed(schema, limits, check);
        }
    });
    tag
}

fn each_format(value: &mut Value, change: &mut dyn FnMut(&mut Map<String, Value>)) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|value| each_format(value, change)),
        Value::Object(object) => {
            change(object);
            for name in ["format", "content", "elements", "tags"] {
                if let Some(inner) = object.get_mut(name) {
                    each_format(inner, change);
                }
            }
        }
        _ => {}
    }
}

/// The schema without what cannot be enforced. One that is not valid is left as it is.
fn relaxed(schema: &Value, limits: &GrammarLimits, check: Check) -> Value {
    let mut left = schema.clone();
    each_schema(&mut left, limits.depth_max, &mut |schema| {
        schema.retain(|word, _| word != "$schema" && keywords::is_known(word));
    });
    if check(&left).is_ok() {
        return left;
    }
    each_schema(&mut left, limits.depth_max, &mut |schema| make_monotone(schema, limits.repeat_max));
    for _ in 0..ROUNDS_MAX {
        match check(&left) {
            Ok(()) | Err(GrammarRefused::Invalid { .. } | GrammarRefused::Unsatisfiable { .. }) => return left,
            Err(GrammarRefused::Unsupported { at, .. }) if loosen(&mut left, &at, limits.depth_max) => {}
            Err(GrammarRefused::Unsupported { .. } | GrammarRefused::TooLarge { .. }) => break,
        }
    }
    type_of(&left)
}

fn each_schema(schema: &mut Value, depth_left: usize, change: &mut dyn FnMut(&mut Map<String, Value>)) {
    let (Some(object), Some(depth_left)) = (schema.as_object_mut(), depth_left.checked_sub(1)) else { return };
    change(object);
    for (word, value) in object {
        match (keywords::holds(word, value), value) {
            (Holds::Schema, value) => each_schema(value, depth_left, change),
            (Holds::List, Value::Array(list)) => {
                list.iter_mut().for_each(|value| each_schema(value, depth_left, change));
            }
            (Holds::Named, Value::Object(named)) => {
                named.iter_mut().for_each(|(_, value)| each_schema(value, depth_left, change));
            }
            _ => {}
        }
    }
}

/// Afterwards more values satisfy a schema if more satisfy a part of it. Counts beyond all repetitions are gone too.
fn make_monotone(schema: &mut Map<String, Value>, repeat_max: usize) {
    const TURNED: &[&str] = &["not", "if", "then", "else", "maxContains", "unevaluatedProperties", "unevaluatedItems"];
    const COUNTS: &[&str] =
        &["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains"];
    let is_large = |value: &Value| value.as_f64().is_some_and(|n| n > repeat_max as f64);
    let one = schema.get("oneOf").filter(|list| list.is_array()).cloned();
    schema.retain(|word, value| {
        let word = word.as_str();
        !TURNED.contains(&word) && !(COUNTS.contains(&word) && is_large(value)) && (word != "oneOf" || one.is_none())
    });
    if let Some(list) = one
        && let Value::Array(all) = schema.entry("allOf").or_insert_with(|| json!([]))
    {
        all.push(json!({ "anyOf": list }));
    }
}

/// Takes away what is refused at a path: a keyword of a schema or, where that has none, of those within it; or else all
/// of the schema but the type. False if nothing is left to take.
fn loosen(root: &mut Value, at: &str, depth_max: usize) -> bool {
    let Some(path) = at.strip_prefix('/').filter(|path| !path.is_empty()) else { return false };
    let path: Vec<String> = path.split('/').map(|part| part.replace("~1", "/").replace("~0", "~")).collect();
    let Some((last, before)) = path.split_last() else { return false };
    // The last schema on the way, and whether the last part of the path is a keyword of it.
    let (mut value, mut holds) = (root, Holds::Schema);
    for part in before {
        let next = match (&holds, &*value) {
            (Holds::Schema, value) => value.get(part).map_or(Holds::Nothing, |inner| keywords::holds(part, inner)),
            (Holds::List | Holds::Named, _) => Holds::Schema,
            (Holds::Nothing, _) => return false,
        };
        let inner = match value {
            Value::Array(list) => part.parse().ok().and_then(|i: usize| list.get_mut(i)),
            Value::Object(object) => object.get_mut(part),
            _ => None,
        };
        let Some(inner) = inner else { return false };
        (value, holds) = (inner, next);
    }
    match (holds, value) {
        (Holds::Schema, Value::Object(schema)) if schema.contains_key(last) => {
            // What is no longer named is not refused as additional.
            let is_naming = last.ends_with("roperties");
            schema.retain(|word, _| word != last && !(is_naming && word == "additionalProperties"));
            true
        }
        (Holds::Schema, schema) => drop_word(schema, last, depth_max) || replace(schema),
        (Holds::List, Value::Array(list)) => {
            last.parse().ok().and_then(|i: usize| list.get_mut(i)).is_some_and(replace)
        }
        (Holds::Named, Value::Object(named)) => named.get_mut(last).is_some_and(replace),
        _ => false,
    }
}

/// Whether a schema within this one had the keyword.
fn drop_word(schema: &mut Value, word: &str, depth_max: usize) -> bool {
    let mut had_word = false;
    each_schema(schema, depth_max, &mut |schema| {
        had_word |= schema.contains_key(word);
        schema.retain(|other, _| other != word);
    });
    had_word
}

fn replace(schema: &mut Value) -> bool {
    let bare = type_of(schema);
    let is_changed = *schema != bare;
    *schema = bare;
    is_changed
}

/// A schema that asks for the same type, and for nothing else.
fn type_of(schema: &Value) -> Value {
    match schema.get("type") {
        Some(kind) => json!({ "type": kind }),
        None => Value::Bool(true),
    }
}
