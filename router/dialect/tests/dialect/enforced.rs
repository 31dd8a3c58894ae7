//! The structural tags, as values.

use dialect::{Dialect, Opening, Tool, ToolChoice, Tools};
use serde_json::{Value, json};

fn one_tool(strict: bool) -> Tools {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    Tools::new(vec![Tool { name: "f".into(), parameters, strict }])
}

fn dialect(calls: &str, thoughts: &str) -> Dialect {
    Dialect::NONE.tools_named(calls).unwrap().thoughts_named(thoughts).unwrap()
}

fn hermes_call(schema: Value) -> Value {
    json!({
        "type": "tag",
        "begin": "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    })
}

fn hermes_calls(is_single: bool) -> Value {
    json!({
        "type": "tags_with_separator",
        "tags": [hermes_call(one_tool(true).get("f").unwrap().parameters.clone())],
        "separator": "\n",
        "at_least_one": true,
        "stop_after_first": is_single,
    })
}

#[test]
fn a_required_call_is_the_whole_answer() {
    let hermes = dialect("hermes", "none");
    let tag =
        |choice: &ToolChoice, parallel| hermes.enforced(&one_tool(false), choice, parallel, Opening::Answer, false);
    let of = |format: Value| Some(json!({"type": "structural_tag", "format": format}));
    assert_eq!(tag(&ToolChoice::Required, true), of(hermes_calls(false)));
    assert_eq!(tag(&ToolChoice::Required, false), of(hermes_calls(true)));
    assert_eq!(tag(&ToolChoice::Named("f".into()), true), of(hermes_calls(true)));
    assert_eq!(tag(&ToolChoice::Named("g".into()), true), None);
    assert_eq!(tag(&ToolChoice::None, true), None);
}

#[test]
fn a_thought_may_come_first() {
    let hermes = dialect("hermes", "qwen3");
    let tag = |opening, think| {
        hermes.enforced(&one_tool(false), &ToolChoice::Required, false, opening, think).unwrap()["format"].take()
    };
    let calls = hermes_calls(true);
    let behind = |begin: &str| {
        json!({"type": "sequence", "elements": [
            {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "regex", "pattern": "\\n{0,2}"},
            calls,
        ]})
    };
    assert_eq!(tag(Opening::Answer, false), calls);
    assert_eq!(tag(Opening::Thought, true), behind(""));
    assert_eq!(tag(Opening::Answer, true), json!({"type": "or", "elements": [behind("<think>"), calls]}));
}

#[test]
fn auto_enforces_strict_tools_from_the_trigger_on() {
    let hermes = dialect("hermes", "none");
    let tag = |tools: &Tools| hermes.enforced(tools, &ToolChoice::Auto, true, Opening::Answer, false);
    assert_eq!(tag(&one_tool(false)), None);
    let expect = json!({"type": "structural_tag", "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [hermes_call(one_tool(true).get("f").unwrap().parameters.clone())],
        "at_least_one": false,
        "stop_after_first": false,
    }});
    assert_eq!(tag(&one_tool(true)), Some(expect));
}
