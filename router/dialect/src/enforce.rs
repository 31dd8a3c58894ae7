//! The structural tag that makes a model write valid calls: a value of the format that xgrammar and vLLM take for
//! `structural_tag`. Knows no form: each says how its own calls are laid out.

use crate::dialect::{Opening, ThoughtForm};
use crate::thoughts::ThoughtMarks;
use crate::{Tool, ToolChoice, Tools};
use serde_json::{Value, json};

/// What a form writes around its calls, and how it writes one.
pub(crate) struct Layout {
    /// Before the first call, between two, and behind the last.
    pub open: &'static str,
    pub separator: &'static str,
    pub close: &'static str,
    /// What no text but a call, or `open`, begins with.
    pub trigger: &'static str,
    /// A format of type `tag` for a call of the tool, whose arguments conform to the schema.
    pub tag: Box<dyn Fn(&Tool, &Value) -> Value>,
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
        ToolChoice::Auto if tools.iter().any(|tool| tool.strict) => tools.iter().collect(),
        ToolChoice::Auto => return None,
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
    let is_free = tool.parameters.is_null() || (is_auto && !tool.strict);
    if is_free { json!({"type": "object"}) } else { tool.parameters.clone() }
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
    let ThoughtForm::Marked(marks) = thoughts else { return calls };
    match (opening, think) {
        (Opening::Thought, _) => sequence(vec![thought(marks, ""), newlines(), calls]),
        (Opening::Answer, true) => {
            let open = format!("{}{}", marks.open[0], marks.label);
            either(vec![sequence(vec![thought(marks, &open), newlines(), calls.clone()]), calls])
        }
        (Opening::Answer, false) => calls,
    }
}

fn thought(marks: &ThoughtMarks, open: &str) -> Value {
    tag(open, any_text(), marks.close[0])
}

/// What models write between a thought and a call.
fn newlines() -> Value {
    regex("\\n{0,2}")
}

/// The whole value that a request carries.
pub(crate) fn structural_tag(format: Value) -> Value {
    json!({"type": "structural_tag", "format": format})
}
