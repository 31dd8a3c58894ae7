//! Lists and objects that a schema names as values, as schemas that only they satisfy.

use super::places::{SchemaIdx, SchemaPlaces};
use crate::{GrammarLimits, GrammarRefused};
use serde_json::{Value, json};
use std::collections::HashMap;

/// The schema that stands for each list and object of an `enum` or a `const`.
pub(crate) struct ValueSchemas(HashMap<*const Value, SchemaIdx>);

impl ValueSchemas {
    pub(crate) fn of<'a>(values: &[&Value], schemas: &'a [Value], places: &SchemaPlaces<'a>) -> ValueSchemas {
        let pairs = values.iter().zip(schemas);
        let at = pairs.filter_map(|(value, schema)| Some((*value as *const Value, places.place(schema)?)));
        ValueSchemas(at.collect())
    }

    pub(crate) fn place(&self, value: &Value) -> Result<SchemaIdx, GrammarRefused> {
        let place = self.0.get(&(value as *const Value)).copied();
        place.ok_or_else(|| GrammarRefused::unsupported("", "a list or an object as a value here"))
    }
}

/// The lists and objects that are named as values anywhere.
pub(crate) fn structured_values<'a>(
    document: &'a Value,
    limits: &GrammarLimits,
) -> Result<Vec<&'a Value>, GrammarRefused> {
    let (mut found, mut left, mut n_values) = (Vec::new(), vec![document], 0);
    while let Some(value) = left.pop() {
        n_values += 1;
        if n_values > limits.nodes_max * 8 {
            return Err(GrammarRefused::too_large("the number of values in the schema", limits.nodes_max * 8));
        }
        match value {
            Value::Array(list) => left.extend(list),
            Value::Object(object) => {
                let named = object.get("enum").and_then(Value::as_array).into_iter().flatten();
                let named = named.chain(object.get("const"));
                found.extend(named.filter(|value| value.is_array() || value.is_object()));
                left.extend(object.values());
            }
            _ => {}
        }
    }
    Ok(found)
}

/// A schema that this value satisfies, and no other.
pub(crate) fn schema_of_value(value: &Value) -> Value {
    match value {
        Value::Array(list) => {
            let items: Vec<Value> = list.iter().map(schema_of_value).collect();
            let bare = json!({"type": "array", "minItems": list.len(), "maxItems": list.len()});
            let mut schema = bare;
            if !items.is_empty() {
                schema["prefixItems"] = Value::Array(items);
            }
            schema
        }
        Value::Object(object) => {
            let properties: Value = object
                .iter()
                .map(|(name, value)| (name.clone(), schema_of_value(value)))
                .collect::<serde_json::Map<_, _>>()
                .into();
            let names: Vec<&String> = object.keys().collect();
            json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false})
        }
        scalar => json!({"const": scalar}),
    }
}
