//! The tools of a request, and the types of their parameters. Has no knowledge of forms.

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

/// The tool choice of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    None,
    /// The model may call a tool or not.
    Auto,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

/// The JSON types that a parameter may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JsonTypes(u8);

impl Default for JsonTypes {
    fn default() -> JsonTypes {
        JsonTypes::ANY
    }
}

impl JsonTypes {
    pub const ANY: JsonTypes = JsonTypes(0b11_1111);
    pub const TEXT: JsonTypes = JsonTypes(0b00_0001);

    fn named(name: &str) -> JsonTypes {
        JsonTypes(match name {
            "string" => 0b00_0001,
            "integer" | "number" => 0b00_0010,
            "boolean" => 0b00_0100,
            "null" => 0b00_1000,
            "object" => 0b01_0000,
            "array" => 0b10_0000,
            _ => return JsonTypes::ANY,
        })
    }

    fn of(value: &Value) -> JsonTypes {
        JsonTypes::named(match value {
            Value::String(_) => "string",
            Value::Number(_) => "number",
            Value::Bool(_) => "boolean",
            Value::Null => "null",
            Value::Object(_) => "object",
            Value::Array(_) => "array",
        })
    }

    fn all(types: impl Iterator<Item = JsonTypes>) -> JsonTypes {
        match types.fold(0, |all, types| all | types.0) {
            0 => JsonTypes::ANY,
            types => JsonTypes(types),
        }
    }

    pub fn allow(self, value: &Value) -> bool {
        self.0 & JsonTypes::of(value).0 != 0
    }

    pub fn allow_text(self) -> bool {
        self.0 & JsonTypes::TEXT.0 != 0
    }
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

    pub(crate) fn types(&self, tool: &str, parameter: &str) -> JsonTypes {
        self.get(tool).map_or(JsonTypes::ANY, |tool| tool.types(parameter))
    }
}

impl Tool {
    fn types(&self, parameter: &str) -> JsonTypes {
        let schema = self.parameters.get("properties").and_then(|properties| properties.get(parameter));
        schema.map_or(JsonTypes::ANY, |schema| types_of(schema, &self.parameters, 0))
    }

    /// Returns the name of the parameter at this position, for calls with positional arguments.
    pub(crate) fn parameter_at(&self, place: usize) -> Option<&str> {
        let properties = self.parameters.get("properties")?.as_object()?;
        properties.keys().nth(place).map(String::as_str)
    }
}

/// Returns the types that a schema allows; all, if it names none.
pub(crate) fn types_of(schema: &Value, root: &Value, depth: usize) -> JsonTypes {
    // A schema may refer to itself.
    const DEPTH_MAX: usize = 16;
    if depth == DEPTH_MAX {
        return JsonTypes::ANY;
    }
    match schema.get("type") {
        Some(Value::String(name)) => return JsonTypes::named(name),
        Some(Value::Array(names)) => {
            return JsonTypes::all(names.iter().filter_map(Value::as_str).map(JsonTypes::named));
        }
        _ => {}
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return JsonTypes::all(values.iter().map(JsonTypes::of));
    }
    if let Some(value) = schema.get("const") {
        return JsonTypes::of(value);
    }
    if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
        let target = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return target.map_or(JsonTypes::ANY, |schema| types_of(schema, root, depth + 1));
    }
    let several = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(*key)?.as_array());
    several.map_or(JsonTypes::ANY, |all| JsonTypes::all(all.iter().map(|one| types_of(one, root, depth + 1))))
}
