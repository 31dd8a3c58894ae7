//! The tools of a request, and of which type their parameters are. Knows no form.

use serde_json::Value;
use std::sync::Arc;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The JSON Schema of its arguments; `Null` if there is none.
    pub parameters: Value,
    /// Whether the arguments must conform to the schema.
    pub strict: bool,
}

/// All tools of a request. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools(Arc<[Tool]>);

/// What the model must do with the tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    None,
    /// Calls or not, as it likes.
    Auto,
    /// One call at least.
    Required,
    /// A call of this function.
    Named(String),
}

/// How a parameter's text becomes JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParameterType {
    /// Every text is a string.
    Text,
    /// What is JSON of another type is that; any other text is a string.
    Any,
}

impl Tools {
    pub fn new(tools: Vec<Tool>) -> Tools {
        Tools(tools.into())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Tool> {
        self.0.iter()
    }

    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.0.iter().find(|tool| tool.name == name)
    }

    pub(crate) fn parameter_type(&self, tool: &str, parameter: &str) -> ParameterType {
        self.get(tool).map_or(ParameterType::Any, |tool| tool.parameter_type(parameter))
    }
}

impl Tool {
    fn parameter_type(&self, parameter: &str) -> ParameterType {
        let schema = self.parameters.get("properties").and_then(|properties| properties.get(parameter));
        match schema {
            Some(schema) if is_text(schema, &self.parameters, 0) => ParameterType::Text,
            _ => ParameterType::Any,
        }
    }

    /// The name of the parameter that stands at this place, for calls by position.
    pub(crate) fn parameter_at(&self, place: usize) -> Option<&str> {
        let properties = self.parameters.get("properties")?.as_object()?;
        properties.keys().nth(place).map(String::as_str)
    }
}

/// Whether the schema allows strings and nothing else.
fn is_text(schema: &Value, root: &Value, depth: usize) -> bool {
    // A schema may name itself.
    const DEPTH_MAX: usize = 16;
    if depth == DEPTH_MAX {
        return false;
    }
    let all_are_text = |schemas: &Value| {
        let schemas = schemas.as_array();
        schemas.is_some_and(|all| !all.is_empty() && all.iter().all(|one| is_text(one, root, depth + 1)))
    };
    if let Some(of_type) = schema.get("type") {
        return of_type == "string" || of_type.as_array().is_some_and(|types| types.len() == 1 && types[0] == "string");
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return !values.is_empty() && values.iter().all(Value::is_string);
    }
    if let Some(value) = schema.get("const") {
        return value.is_string();
    }
    if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
        let target = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return target.is_some_and(|schema| is_text(schema, root, depth + 1));
    }
    ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.get(*key)).any(all_are_text)
}
