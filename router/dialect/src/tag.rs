//! The pieces of a structural tag, a format of xgrammar and vLLM, and the layout with which a form describes its calls.
//! Has no knowledge of forms.

use crate::Tool;
use serde_json::{Value, json};

/// A form's markers around its calls, and the tag of one call.
pub(crate) struct CallLayout {
    /// Before the first call, between two, and after the last.
    pub open: &'static str,
    pub separator: &'static str,
    pub close: &'static str,
    /// A beginning that only a call, or `open`, has; empty if any text may begin like a call.
    pub trigger: &'static str,
    pub tag: TagFn,
}

/// Returns a format of type `tag` for a call of the tool, whose arguments conform to the schema.
pub(crate) type TagFn = Box<dyn Fn(&Tool, &Value) -> Value>;

/// Returns a property's schema with the definitions to which it may refer.
pub(crate) fn with_definitions(property: &Value, root: &Value) -> Value {
    let mut property = property.clone();
    let Some(of) = property.as_object_mut() else { return property };
    for key in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(key) {
            of.entry(key).or_insert_with(|| definitions.clone());
        }
    }
    property
}

/// Returns the properties of a schema, each with whether it is required; None if the schema does not list them.
pub(crate) fn properties(schema: &Value) -> Option<Vec<(&str, &Value, bool)>> {
    let required: Vec<&str> = match schema.get("required").and_then(Value::as_array) {
        Some(names) => names.iter().filter_map(Value::as_str).collect(),
        None => Vec::new(),
    };
    let properties = schema.get("properties")?.as_object()?.iter();
    Some(properties.map(|(name, property)| (name.as_str(), property, required.contains(&name.as_str()))).collect())
}

pub(crate) fn optional(format: Value) -> Value {
    either(vec![format, literal_text("")])
}

/// Returns properties with separators: first the required ones, then the others, each in the schema's order.
pub(crate) fn members(
    schema: &Value,
    separator: &str,
    key: impl Fn(&str) -> String,
    value: impl Fn(&Value) -> Value,
) -> Value {
    let Some(properties) = properties(schema) else { return any_text() };
    let member = |before: &str, name: &str, property: &Value| {
        sequence(vec![literal_text(&format!("{before}{}", key(name))), value(property)])
    };
    let (required, others): (Vec<_>, Vec<_>) = properties.into_iter().partition(|(_, _, is_required)| *is_required);
    let behind = |others: &[(&str, &Value, bool)]| -> Vec<Value> {
        others.iter().map(|(name, property, _)| optional(member(separator, name, property))).collect()
    };
    if required.is_empty() {
        // The first one has no separator before it.
        let first = |i: usize| {
            let (name, property, _) = others[i];
            sequence([vec![member("", name, property)], behind(&others[i + 1..])].concat())
        };
        return either((0..others.len()).map(first).chain([literal_text("")]).collect());
    }
    let before = |i: usize| if i == 0 { "" } else { separator };
    let required = required.iter().enumerate().map(|(i, (name, property, _))| member(before(i), name, property));
    sequence(required.chain(behind(&others)).collect())
}

pub(crate) fn any_text() -> Value {
    json!({"type": "any_text"})
}

pub(crate) fn literal_text(value: &str) -> Value {
    json!({"type": "const_string", "value": value})
}

/// Returns a value that satisfies the schema. Without `strict`, it is enforced as far as possible.
pub(crate) fn schema(schema: &Value, is_strict: bool) -> Value {
    match is_strict {
        true => json!({"type": "json_schema", "json_schema": schema}),
        false => json!({"type": "json_schema", "json_schema": schema, "strict": false}),
    }
}

pub(crate) fn regex(pattern: &str) -> Value {
    json!({"type": "regex", "pattern": pattern})
}

pub(crate) fn sequence(elements: Vec<Value>) -> Value {
    json!({"type": "sequence", "elements": elements})
}

pub(crate) fn either(elements: Vec<Value>) -> Value {
    json!({"type": "or", "elements": elements})
}

pub(crate) fn tag(begin: &str, content: Value, end: &str) -> Value {
    json!({"type": "tag", "begin": begin, "content": content, "end": end})
}
