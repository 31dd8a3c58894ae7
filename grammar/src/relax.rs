//! Structural tags with `"strict": false` beside a schema: what can be enforced of it is, and the rest is left to the
//! model. Every value that satisfies a schema satisfies what is left of it.

use crate::schema::formats;
use crate::schema::keywords::{self, Holds};
use crate::{GrammarLimits, GrammarRefused};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Where a format has its schema.
const SCHEMA: &str = "json_schema";

/// A tag whose schemas need not hold in full. Each refusal of it takes a little of one of them away.
pub(crate) struct Relaxed<'l> {
    pub(crate) tag: Value,
    limits: &'l GrammarLimits,
    /// The paths of schemas of which parts were taken away.
    begun: HashSet<String>,
    /// Whether all schemas are without what may make them large.
    is_lean: bool,
}

impl Relaxed<'_> {
    /// The tag without unknown keywords and formats, which are annotations. None, if all its schemas must hold in full.
    pub(crate) fn of<'l>(tag: &Value, limits: &'l GrammarLimits) -> Option<Relaxed<'l>> {
        let (mut tag, mut is_relaxed) = (tag.clone(), false);
        each_relaxed(&mut tag, &mut |schema| {
            is_relaxed = true;
            each_schema(schema, limits.depth_max, &mut |schema| schema.retain(|word, value| is_meant(word, value)));
        });
        is_relaxed.then(|| Relaxed { tag, limits, begun: HashSet::new(), is_lean: false })
    }

    /// Takes away what was refused. False where that is no part of such a schema, or not valid.
    pub(crate) fn take_away(&mut self, refused: &GrammarRefused) -> bool {
        match refused {
            GrammarRefused::Unsupported { at, .. } => self.loosen_at(at),
            GrammarRefused::TooLarge { .. } if std::mem::replace(&mut self.is_lean, true) => self.keep_types(),
            GrammarRefused::TooLarge { .. } => {
                let GrammarLimits { depth_max, repeat_max, .. } = *self.limits;
                let lean = &mut |schema: &mut Map<String, Value>| make_monotone(schema, repeat_max);
                each_relaxed(&mut self.tag, &mut |schema| each_schema(schema, depth_max, lean));
                true
            }
            GrammarRefused::Invalid { .. } | GrammarRefused::Unsatisfiable { .. } => false,
        }
    }

    fn loosen_at(&mut self, at: &str) -> bool {
        let Some((path, rest)) = self.schema_at(at) else { return false };
        let Some(schema) = self.tag.pointer_mut(&path) else { return false };
        if self.begun.insert(path) {
            each_schema(schema, self.limits.depth_max, &mut |schema| make_monotone(schema, self.limits.repeat_max));
            return true;
        }
        loosen(schema, &rest, self.limits.depth_max) || replace(schema)
    }

    /// Leaves all such schemas their types alone. False if they have nothing else.
    pub(crate) fn keep_types(&mut self) -> bool {
        let mut is_changed = false;
        each_relaxed(&mut self.tag, &mut |schema| is_changed |= replace(schema));
        is_changed
    }

    /// The path of the schema in which a path ends, and the rest of it.
    fn schema_at(&self, at: &str) -> Option<(String, String)> {
        let is_relaxed = |path: &str| self.tag.pointer(path).is_some_and(|of| of.get("strict") == Some(&false.into()));
        let mut places = at.match_indices('/').map(|(place, _)| at.split_at(place));
        let (path, rest) = places.find_map(|(path, rest)| {
            let rest = rest.strip_prefix('/')?.strip_prefix(SCHEMA)?;
            (is_relaxed(path) && (rest.is_empty() || rest.starts_with('/'))).then_some((path, rest))
        })?;
        Some((format!("{path}/{SCHEMA}"), rest.to_owned()))
    }
}

/// Whether a keyword says something of which values are valid.
fn is_meant(word: &str, value: &Value) -> bool {
    let is_format = |value: &Value| value.as_str().is_none_or(formats::is_known);
    word != "$schema" && keywords::is_known(word) && (word != "format" || is_format(value))
}

fn each_relaxed(value: &mut Value, change: &mut dyn FnMut(&mut Value)) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|value| each_relaxed(value, change)),
        Value::Object(format) => {
            let is_relaxed = format.get("strict") == Some(&Value::Bool(false));
            if let Some(schema) = format.get_mut(SCHEMA).filter(|_| is_relaxed) {
                change(schema);
            }
            for name in ["format", "content", "elements", "tags"] {
                if let Some(inner) = format.get_mut(name) {
                    each_relaxed(inner, change);
                }
            }
        }
        _ => {}
    }
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
        let is_gone = TURNED.contains(&word) || (word == "oneOf" && one.is_some());
        !is_gone && (!COUNTS.contains(&word) || !is_large(value))
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
