//! The structural tag that makes a model write valid calls: a value of the format that xgrammar and vLLM take for
//! `structural_tag`. Knows no form: each says how its own calls are laid out.

use crate::dialect::{Opening, ThoughtForm};
use crate::forms::harmony;
use crate::{Tool, ToolChoice, Tools};
use serde_json::{Value, json};

/// What a form writes around its calls, and how it writes one.
pub(crate) struct Layout {
    /// Before the first call, between two, and behind the last.
    pub open: &'static str,
    pub separator: &'static str,
    pub close: &'static str,
    /// What no text but a call, or `open`, begins with; empty, where any text may begin as a call does.
    pub trigger: &'static str,
    pub tag: TagOf,
}

/// A format of type `tag` for a call of the tool, whose arguments conform to the schema.
pub(crate) type TagOf = Box<dyn Fn(&Tool, &Value) -> Value>;

/// A property's schema, with the definitions to which it may refer.
pub(crate) fn within(property: &Value, root: &Value) -> Value {
    let mut property = property.clone();
    let Some(of) = property.as_object_mut() else { return property };
    for key in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(key) {
            of.entry(key).or_insert_with(|| definitions.clone());
        }
    }
    property
}

/// The properties of a schema, each with whether it must be there; none, if it does not list them.
pub(crate) fn properties(schema: &Value) -> Option<Vec<(&str, &Value, bool)>> {
    let required: Vec<&str> = match schema.get("required").and_then(Value::as_array) {
        Some(names) => names.iter().filter_map(Value::as_str).collect(),
        None => Vec::new(),
    };
    let properties = schema.get("properties")?.as_object()?.iter();
    Some(properties.map(|(name, property)| (name.as_str(), property, required.contains(&name.as_str()))).collect())
}

pub(crate) fn optional(format: Value) -> Value {
    either(vec![format, text("")])
}

/// Properties with something between them: first those that must be there, then the others, each in the schema's order.
pub(crate) fn members(
    schema: &Value,
    separator: &str,
    key: impl Fn(&str) -> String,
    value: impl Fn(&Value) -> Value,
) -> Value {
    let Some(properties) = properties(schema) else { return any_text() };
    let member = |before: &str, name: &str, property: &Value| {
        sequence(vec![text(&format!("{before}{}", key(name))), value(property)])
    };
    let (required, others): (Vec<_>, Vec<_>) = properties.into_iter().partition(|(_, _, is_required)| *is_required);
    let behind = |others: &[(&str, &Value, bool)]| -> Vec<Value> {
        others.iter().map(|(name, property, _)| optional(member(separator, name, property))).collect()
    };
    if required.is_empty() {
        // Whichever comes first has nothing before it.
        let first = |i: usize| {
            let (name, property, _) = others[i];
            sequence([vec![member("", name, property)], behind(&others[i + 1..])].concat())
        };
        return either((0..others.len()).map(first).chain([text("")]).collect());
    }
    let before = |i: usize| if i == 0 { "" } else { separator };
    let required = required.iter().enumerate().map(|(i, (name, property, _))| member(before(i), name, property));
    sequence(required.chain(behind(&others)).collect())
}

pub(crate) fn any_text() -> Value {
    json!({"type": "any_text"})
}

pub(crate) fn text(value: &str) -> Value {
    json!({"type": "const_string", "value": value})
}

pub(crate) fn schema(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": schema})
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

/// The format of what a request wants of an answer; none where every text will do.
pub(crate) fn calls(layout: &Layout, tools: &Tools, choice: &ToolChoice, parallel: bool) -> Option<Value> {
    let is_auto = *choice == ToolChoice::Auto;
    let wanted: Vec<&Tool> = match choice {
        ToolChoice::None => return None,
        ToolChoice::Auto if layout.trigger.is_empty() || tools.iter().all(|tool| !tool.strict) => return None,
        ToolChoice::Auto => tools.iter().collect(),
        ToolChoice::Required => tools.iter().collect(),
        ToolChoice::Named(name) => tools.get(name).into_iter().collect(),
    };
    if wanted.is_empty() {
        return None;
    }
    let is_single = !parallel || matches!(choice, ToolChoice::Named(_));
    let tags = wanted.iter().map(|tool| (layout.tag)(tool, &arguments_schema(tool, is_auto))).collect();
    Some(if is_auto { triggered(layout, tags, is_single) } else { required(layout, tags, is_single) })
}

/// Where the model may choose, only a strict tool has more than an object for arguments.
fn arguments_schema(tool: &Tool, is_auto: bool) -> Value {
    match &tool.parameters {
        // Who names no parameters has none.
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        _ if is_auto && !tool.strict => json!({"type": "object"}),
        parameters => parameters.clone(),
    }
}

fn several(separator: &str, tags: Vec<Value>, is_single: bool) -> Value {
    json!({
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": true,
        "stop_after_first": is_single,
    })
}

fn required(layout: &Layout, tags: Vec<Value>, is_single: bool) -> Value {
    let calls = several(layout.separator, tags, is_single);
    if layout.open.is_empty() && layout.close.is_empty() {
        return calls;
    }
    let framed = [text(layout.open), calls, text(layout.close)];
    sequence(framed.into_iter().filter(|element| element["value"] != "").collect())
}

fn triggered(layout: &Layout, tags: Vec<Value>, is_single: bool) -> Value {
    let (tags, is_single) = match layout.open {
        "" => (tags, is_single),
        open => (vec![tag(open, several(layout.separator, tags, is_single), layout.close)], true),
    };
    json!({
        "type": "triggered_tags",
        "triggers": [layout.trigger],
        "tags": tags,
        "at_least_one": false,
        "stop_after_first": is_single,
    })
}

/// `calls` behind the thought that the answer has, or may have.
pub(crate) fn behind_thought(calls: Value, thoughts: ThoughtForm, opening: Opening, think: bool) -> Value {
    let (open, close, between) = match thoughts {
        ThoughtForm::None => return calls,
        // What models write between a thought and a call.
        ThoughtForm::Marked(marks) => (format!("{}{}", marks.open[0], marks.label), marks.close[0], "\\n{0,2}"),
        ThoughtForm::Harmony => (harmony::THOUGHT_OPEN.to_owned(), harmony::THOUGHT_CLOSE, ""),
    };
    let behind = |open: &str, calls: Value| {
        let between = (!between.is_empty()).then(|| regex(between));
        sequence([tag(open, any_text(), close)].into_iter().chain(between).chain([calls]).collect())
    };
    match (opening, think) {
        (Opening::Thought, _) => behind("", calls),
        (Opening::Answer, true) => either(vec![behind(&open, calls.clone()), calls]),
        (Opening::Answer, false) => calls,
    }
}

/// The whole value that a request carries.
pub(crate) fn structural_tag(format: Value) -> Value {
    json!({"type": "structural_tag", "format": format})
}
