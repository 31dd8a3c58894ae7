//! Structural tags with `"strict": false` beside a schema: enforces as much of the schema as possible, and leaves the
//! rest to the model. Every value that satisfies the schema also satisfies the relaxed one.

use crate::schema::formats;
use crate::schema::keywords::{self, KeywordValue};
use crate::{GrammarLimits, GrammarRefused};
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// The key under which a format has its schema.
const SCHEMA: &str = "json_schema";

/// A tag whose schemas need not hold in full. Each refusal removes a little of one of them.
pub(crate) struct RelaxedTag<'l> {
    pub(crate) tag: Value,
    limits: &'l GrammarLimits,
    /// The paths of schemas from which parts were removed.
    begun: HashSet<String>,
    /// Whether everything that may make a schema large was removed from all schemas.
    is_lean: bool,
}

impl RelaxedTag<'_> {
    /// Returns the tag without unknown keywords and formats, which are annotations. None if all its schemas must hold
    /// in full.
    pub(crate) fn of<'l>(tag: &Value, limits: &'l GrammarLimits) -> Option<RelaxedTag<'l>> {
        let (mut tag, mut is_relaxed) = (tag.clone(), false);
        each_relaxed(&mut tag, &mut |schema| {
            is_relaxed = true;
            each_schema(schema, limits.depth_max, &mut |schema| {
                schema.retain(|word, value| is_constraint(word, value))
            });
        });
        is_relaxed.then(|| RelaxedTag { tag, limits, begun: HashSet::new(), is_lean: false })
    }

    /// Removes the refused part. Returns false if it is no part of such a schema, or not valid.
    pub(crate) fn remove_refused(&mut self, refused: &GrammarRefused) -> bool {
        match refused {
            GrammarRefused::Unsupported { at, .. } => self.loosen_at(at),
            GrammarRefused::TooLarge { .. } if std::mem::replace(&mut self.is_lean, true) => self.reduce_to_types(),
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
        let Some((path, rest)) = self.enclosing_relaxed_schema(at) else { return false };
        let Some(schema) = self.tag.pointer_mut(&path) else { return false };
        if self.begun.insert(path) {
            each_schema(schema, self.limits.depth_max, &mut |schema| make_monotone(schema, self.limits.repeat_max));
            return true;
        }
        loosen(schema, &rest, self.limits.depth_max) || reduce_to_type(schema)
    }

    /// Reduces all such schemas to their types. Returns false if they contain nothing else.
    pub(crate) fn reduce_to_types(&mut self) -> bool {
        let mut is_changed = false;
        each_relaxed(&mut self.tag, &mut |schema| is_changed |= reduce_to_type(schema));
        is_changed
    }

    /// Returns the path of the outermost relaxed schema on a path, and the rest of the path.
    fn enclosing_relaxed_schema(&self, at: &str) -> Option<(String, String)> {
        let is_relaxed = |path: &str| self.tag.pointer(path).is_some_and(|of| of.get("strict") == Some(&false.into()));
        let mut places = at.match_indices('/').map(|(place, _)| at.split_at(place));
        let (path, rest) = places.find_map(|(path, rest)| {
            let rest = rest.strip_prefix('/')?.strip_prefix(SCHEMA)?;
            (is_relaxed(path) && (rest.is_empty() || rest.starts_with('/'))).then_some((path, rest))
        })?;
        Some((format!("{path}/{SCHEMA}"), rest.to_owned()))
    }
}

/// Whether a keyword restricts which values are valid.
fn is_constraint(word: &str, value: &Value) -> bool {
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
        match (keywords::keyword_value(word, value), value) {
            (KeywordValue::Schema, value) => each_schema(value, depth_left, change),
            (KeywordValue::List, Value::Array(list)) => {
                list.iter_mut().for_each(|value| each_schema(value, depth_left, change));
            }
            (KeywordValue::Named, Value::Object(named)) => {
                named.iter_mut().for_each(|(_, value)| each_schema(value, depth_left, change));
            }
            _ => {}
        }
    }
}

/// Makes the schema monotone: if more values satisfy a part of it, more values satisfy the whole. Also removes counts
/// beyond the limit of repetitions.
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

/// Removes the refused keyword at a path: from the schema or, if it has none, from the schemas within it. Otherwise
/// removes everything but the schema's type. Returns false if nothing is left to remove.
fn loosen(root: &mut Value, at: &str, depth_max: usize) -> bool {
    let Some(path) = at.strip_prefix('/').filter(|path| !path.is_empty()) else { return false };
    let path: Vec<String> = path.split('/').map(|part| part.replace("~1", "/").replace("~0", "~")).collect();
    let Some((last, before)) = path.split_last() else { return false };
    // The last schema on the path, and whether the last part of the path is a keyword of it.
    let (mut value, mut holds) = (root, KeywordValue::Schema);
    for part in before {
        let next = match (&holds, &*value) {
            (KeywordValue::Schema, value) => {
                value.get(part).map_or(KeywordValue::Nothing, |inner| keywords::keyword_value(part, inner))
            }
            (KeywordValue::List | KeywordValue::Named, _) => KeywordValue::Schema,
            (KeywordValue::Nothing, _) => return false,
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
        (KeywordValue::Schema, Value::Object(schema)) if schema.contains_key(last) => {
            // A property whose name was removed must not be refused as additional.
            let is_naming = last.ends_with("roperties");
            schema.retain(|word, _| word != last && !(is_naming && word == "additionalProperties"));
            true
        }
        (KeywordValue::Schema, schema) => drop_word(schema, last, depth_max) || reduce_to_type(schema),
        (KeywordValue::List, Value::Array(list)) => {
            last.parse().ok().and_then(|i: usize| list.get_mut(i)).is_some_and(reduce_to_type)
        }
        (KeywordValue::Named, Value::Object(named)) => named.get_mut(last).is_some_and(reduce_to_type),
        _ => false,
    }
}

/// Removes the keyword from all schemas within this one. Returns whether any had it.
fn drop_word(schema: &mut Value, word: &str, depth_max: usize) -> bool {
    let mut had_word = false;
    each_schema(schema, depth_max, &mut |schema| {
        had_word |= schema.contains_key(word);
        schema.retain(|other, _| other != word);
    });
    had_word
}

fn reduce_to_type(schema: &mut Value) -> bool {
    let bare = type_of(schema);
    let is_changed = *schema != bare;
    *schema = bare;
    is_changed
}

/// Returns a schema that requires the same type, and nothing else.
fn type_of(schema: &Value) -> Value {
    match schema.get("type") {
        Some(kind) => json!({ "type": kind }),
        None => Value::Bool(true),
    }
}
