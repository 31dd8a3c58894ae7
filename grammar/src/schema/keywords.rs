//! The keywords of JSON Schema: which hold schemas, which are annotations for people, and which are refused by name.

use crate::GrammarRefused;
use serde_json::Value;

/// Each has one schema.
pub(super) const ONE: &[&str] = &[
    "additionalProperties",
    "propertyNames",
    "items",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedProperties",
    "unevaluatedItems",
];
/// Each has a list of schemas.
pub(super) const LIST: &[&str] = &["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// Each has schemas by name.
pub(super) const NAMED: &[&str] =
    &["$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies"];
/// Keywords that do not affect which values are valid.
const FOR_PEOPLE: &[&str] = &[
    "$schema",
    "$id",
    "$anchor",
    "$dynamicAnchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    // OpenAI's keyword for a tool, which clients often write into its schema. It promises what this crate always does.
    "strict",
];
/// Keywords that restrict values, and are enforced in full.
const ENFORCED: &[&str] = &[
    "$ref",
    "$dynamicRef",
    "type",
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minContains",
    "maxContains",
    "required",
    "minProperties",
    "maxProperties",
    "dependentRequired",
];
/// The supported values of `$schema`. Other drafts have keywords of their own.
const DRAFTS: &[&str] = &[
    "json-schema.org/draft/2020-12/schema",
    "json-schema.org/draft/2019-09/schema",
    "json-schema.org/draft-07/schema",
    "json-schema.org/draft-06/schema",
];

pub(super) fn is_annotation(key: &str) -> bool {
    FOR_PEOPLE.contains(&key) || key.starts_with("x-")
}

/// The kind of value that a keyword has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeywordValue {
    Schema,
    List,
    Named,
    /// No schema.
    Nothing,
}

pub(crate) fn keyword_value(word: &str, value: &Value) -> KeywordValue {
    match value {
        Value::Array(_) if LIST.contains(&word) => KeywordValue::List,
        Value::Object(_) if NAMED.contains(&word) => KeywordValue::Named,
        Value::Object(_) | Value::Bool(_) if ONE.contains(&word) => KeywordValue::Schema,
        _ => KeywordValue::Nothing,
    }
}

pub(crate) fn is_known(word: &str) -> bool {
    let tables = [ONE, LIST, NAMED, ENFORCED];
    is_annotation(word) || tables.iter().any(|words| words.contains(&word))
}

/// Returns the schemas within a schema, with their paths. Refuses an unknown keyword wherever it is.
pub(super) fn subschemas<'a>(schema: &'a Value, path: &str) -> Result<Vec<(String, &'a Value)>, GrammarRefused> {
    let object = match schema {
        Value::Bool(_) => return Ok(Vec::new()),
        Value::Object(object) => object,
        _ => return Err(GrammarRefused::invalid(path, "a schema is an object, true or false")),
    };
    let mut found = Vec::new();
    for (key, value) in object {
        let at = format!("{path}/{}", escaped(key));
        match (key.as_str(), value) {
            ("$schema", value) => known_draft(value, &at)?,
            (key, Value::Array(list)) if LIST.contains(&key) => {
                found.extend(list.iter().enumerate().map(|(i, schema)| (format!("{at}/{i}"), schema)));
            }
            (key, value) if ONE.contains(&key) => found.push((at, value)),
            (key, Value::Object(named)) if NAMED.contains(&key) => {
                let schemas = named.iter().filter(|(_, schema)| key != "dependencies" || !schema.is_array());
                found.extend(schemas.map(|(name, schema)| (format!("{at}/{}", escaped(name)), schema)));
            }
            (key, _) if LIST.contains(&key) => return Err(GrammarRefused::invalid(at, "it is not a list of schemas")),
            (key, _) if NAMED.contains(&key) => {
                return Err(GrammarRefused::invalid(at, "it is not an object of schemas"));
            }
            (key, _) if ENFORCED.contains(&key) || is_annotation(key) => {}
            (key, _) => return Err(GrammarRefused::unsupported(at, format!("the keyword {key:?}"))),
        }
    }
    Ok(found)
}

fn known_draft(value: &Value, at: &str) -> Result<(), GrammarRefused> {
    let text = value.as_str().ok_or_else(|| GrammarRefused::invalid(at, "it is not a string"))?;
    let name = text.trim_start_matches("https://").trim_start_matches("http://").trim_end_matches('#');
    if DRAFTS.contains(&name) { Ok(()) } else { Err(GrammarRefused::unsupported(at, format!("the dialect {text:?}"))) }
}

/// Escapes a name as JSON pointers do.
pub(super) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}
