//! The structural tag that makes a model write valid calls: a value in the format of xgrammar's and vLLM's
//! `structural_tag`. Has no knowledge of forms: each form supplies the layout of its calls.

use crate::families::ThoughtForm;
use crate::forms::harmony;
use crate::tag::{CallLayout, any_text, either, literal_text, regex, sequence, tag};
use crate::thoughts::AnswerStart;
use crate::{Tool, ToolChoice, Tools};
use serde_json::{Value, json};

/// Returns the format that the request requires of an answer, or None if any text is valid.
pub(crate) fn calls(layout: &CallLayout, tools: &Tools, choice: &ToolChoice, parallel: bool) -> Option<Value> {
    let is_auto = *choice == ToolChoice::Auto;
    let allowed: Vec<&Tool> = match choice {
        ToolChoice::None => return None,
        ToolChoice::Auto if layout.trigger.is_empty() || tools.iter().all(|tool| !tool.strict) => return None,
        ToolChoice::Auto => tools.iter().collect(),
        ToolChoice::Required => tools.iter().collect(),
        ToolChoice::Named(name) => tools.get(name).into_iter().collect(),
    };
    if allowed.is_empty() {
        return None;
    }
    let is_single = !parallel || matches!(choice, ToolChoice::Named(_));
    let tags = allowed.iter().map(|tool| (layout.tag)(tool, &arguments_schema(tool, is_auto))).collect();
    Some(if is_auto { triggered_tags(layout, tags, is_single) } else { required_tags(layout, tags, is_single) })
}

/// Returns the schema of a tool's arguments. With a free choice, only a strict tool requires more than an object.
fn arguments_schema(tool: &Tool, is_auto: bool) -> Value {
    match &tool.parameters {
        // A tool that names no parameters has none.
        Value::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        _ if is_auto && !tool.strict => json!({"type": "object"}),
        parameters => parameters.clone(),
    }
}

fn separated_tags(separator: &str, tags: Vec<Value>, is_single: bool) -> Value {
    json!({
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": true,
        "stop_after_first": is_single,
    })
}

fn required_tags(layout: &CallLayout, tags: Vec<Value>, is_single: bool) -> Value {
    let calls = separated_tags(layout.separator, tags, is_single);
    if layout.open.is_empty() && layout.close.is_empty() {
        return calls;
    }
    let framed = [literal_text(layout.open), calls, literal_text(layout.close)];
    sequence(framed.into_iter().filter(|element| element["value"] != "").collect())
}

fn triggered_tags(layout: &CallLayout, tags: Vec<Value>, is_single: bool) -> Value {
    let (tags, is_single) = match layout.open {
        "" => (tags, is_single),
        open => (vec![tag(open, separated_tags(layout.separator, tags, is_single), layout.close)], true),
    };
    json!({
        "type": "triggered_tags",
        "triggers": [layout.trigger],
        "tags": tags,
        "at_least_one": false,
        "stop_after_first": is_single,
    })
}

/// Puts `calls` after the thought that the answer has, or may have.
pub(crate) fn put_after_thought(calls: Value, thoughts: ThoughtForm, opening: AnswerStart, think: bool) -> Value {
    let (open, close, between) = match thoughts {
        ThoughtForm::None => return calls,
        // Models write this between a thought and a call.
        ThoughtForm::Marked(marks) => (format!("{}{}", marks.open[0], marks.label), marks.close[0], "\\n{0,2}"),
        ThoughtForm::Harmony => (harmony::THOUGHT_OPEN.to_owned(), harmony::THOUGHT_CLOSE, ""),
    };
    let behind = |open: &str, calls: Value| {
        let between = (!between.is_empty()).then(|| regex(between));
        sequence([tag(open, any_text(), close)].into_iter().chain(between).chain([calls]).collect())
    };
    match (opening, think) {
        (AnswerStart::Thought, _) => behind("", calls),
        (AnswerStart::Answer, true) => either(vec![behind(&open, calls.clone()), calls]),
        (AnswerStart::Answer, false) => calls,
    }
}

/// Returns the whole value for a request.
pub(crate) fn structural_tag(format: Value) -> Value {
    json!({"type": "structural_tag", "format": format})
}
