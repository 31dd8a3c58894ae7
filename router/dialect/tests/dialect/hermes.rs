//! `<tool_call>` around a JSON object.

use crate::common::{Reader, answer};
use dialect::{AnswerPiece, AnswerStart, Dialect, Tool, Tools};
use serde_json::json;

#[track_caller]
fn check(text: &str, content: &str, calls: &[&str]) {
    Reader::new("hermes", "none").check(text, &answer("", content, calls));
}

#[test]
fn calls_are_read() {
    check(
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
        "",
        &["get_weather({\"city\": \"Oslo\"})"],
    );
    check(
        "I look.\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"days\": [1, {\"a\": \"}\"}]}}\n</tool_call>\nDone.",
        "I look.\n\nDone.",
        &["get_time({})", "get_weather({\"days\": [1, {\"a\": \"}\"}]})"],
    );
    check("<tool_call>{\"name\": \"f\"}</tool_call>", "", &["f({})"]);
    check("<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", "", &["f({})"]);
    check("<tool_call>{\"name\": \"f\", \"arguments\": 12}</tool_call>", "", &["f(12)"]);
    check("<tool_call>[{\"name\": \"f\"}, {\"name\": \"g\"}]</tool_call>", "", &["f({})", "g({})"]);
    check("<tool_call>{\"name\": \"f\"}\n{\"name\": \"g\"}</tool_call>", "", &["f({})", "g({})"]);
}

#[test]
fn members_come_in_any_order() {
    check("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>", "", &["f({\"a\": 1})"]);
    check(
        "<tool_call>{\"id\": \"1\", \"type\": \"function\", \"function\": {\"name\": \"f\", \
         \"arguments\": \"{\\\"a\\\": \
         \\\"\\u00e9\\ud83d\\ude00\\\"}\"}}</tool_call>",
        "",
        &["f({\"a\": \"é😀\"})"],
    );
    check(
        "<tool_call>{\"parameters\": \"{\\\"a\\\":1}\", \"name\": \"f\", \"x\": [\"}\", {}]}</tool_call>.",
        ".",
        &["f({\"a\":1})"],
    );
}

#[test]
fn names_are_decoded() {
    check("<tool_call>{\"name\": \"a\\\"b\\nc\\u0041\"}</tool_call>", "", &["a\"b\ncA({})"]);
    check("<tool_call>{\"name\": \"größe\"}</tool_call>", "", &["größe({})"]);
}

#[test]
fn a_marker_within_a_string_is_text() {
    check(
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>\\\"<tool_call>\"}}</tool_call>",
        "",
        &["f({\"a\": \"</tool_call>\\\"<tool_call>\"})"],
    );
}

#[test]
fn what_is_no_call_is_content() {
    for text in [
        "The marker <tool_call> begins a call.",
        "<tool_call><tool_call> twice",
        "<tool_call>\n\n",
        "<tool_call>{\"nam\": 1}</tool_call>",
        "<tool_call>{\"name\": 1}</tool_call>",
        "<tool_call>{\"name\": \"\"}</tool_call>",
        "<tool_call>{\"name\": \"\\x\"}</tool_call>",
        "<tool_call>{\"arguments\": {\"name\": \"f\"}}</tool_call>",
        "<tool_call>[]</tool_call>",
        "a < b, <tool, <tool_call",
        "</tool_call>",
        "  ",
        "",
    ] {
        check(text, text, &[]);
    }
    let long = format!("<tool_call>{{\"name\": \"{}\"}}", "é".repeat(300));
    check(&long, &long, &[]);
}

#[test]
fn a_call_behind_what_is_none_is_read() {
    check("<tool_call> <tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call> ", &["f({})"]);
    check("<tool_call>{<tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>{", &["f({})"]);
}

#[test]
fn broken_arguments_stay_as_written() {
    let call = |arguments: &str| format!("<tool_call>{{\"name\": \"f\", \"arguments\": {arguments}</tool_call>");
    check(&call("{\"a\": 1,}}"), "", &["f({\"a\": 1,})"]);
    check(&call("{'a': <b>}}"), "", &["f({'a': <b>})"]);
    check(&call("{\"a\": 1"), "", &["f({\"a\": 1)"]);
    check(&call("{\"a\": 1}"), "", &["f({\"a\": 1})"]);
    check(&call("{\"a\": [1}, é}"), "", &["f({\"a\": [1}, é})"]);
}

#[test]
fn unfinished_call_is_emitted_so_far() {
    check("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x</tool_call>", "", &["f({\"a\": \"x</tool_call>.."]);
    check("<tool_call>{\"name\": \"f\"", "", &["f(.."]);
    check("<tool_call>{\"name\": \"f\", \"arguments\": 12", "", &["f(12.."]);
    check("<tool_call>{\"name\": \"f", "<tool_call>{\"name\": \"f", &[]);
}

#[test]
fn calls_of_known_tools_need_no_marker() {
    let call = "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}";
    let calls = ["get_weather({\"city\": \"Oslo\"})"];
    for (text, content) in [
        (call.to_owned(), ""),
        (format!("I look.\n{call}\n"), "I look.\n"),
        (format!("```json\n{call}\n```"), ""),
        (format!("```\n{call}\n```\n\nWait."), "\n\nWait."),
        (format!("<tools>\n{call}\n</tools>"), ""),
        (format!("<tool_call>{call}</tool_call>\n```python\nx\n```"), "\n```python\nx\n```"),
        (format!("```json\n{call}\n```\n```\nx\n```"), "\n```\nx\n```"),
        (format!("{call}\n```"), "\n```"),
    ] {
        check(&text, content, &calls);
    }
    for text in [
        "```json\n{\"name\": \"unknown\", \"arguments\": {}}\n```",
        "{\"name\": \"get_time\", \"age\": 3}",
        "{\"name\": \"get_time\"}",
        "```\n[1, 2]\n```\n<tools>none</tools>",
        "As in: {\"name\": \"get_time\", \"arguments\": {}}",
    ] {
        check(text, text, &[]);
    }
}

#[test]
fn a_strict_tool_is_called_in_the_form_that_is_enforced_alone() {
    let text = "{\"name\": \"f\", \"arguments\": {}}\n```json\n{\"name\": \"f\", \"arguments\": {}}\n```";
    let read = |strict: bool| {
        let tool = Tool { name: "f".into(), parameters: json!({"type": "object"}), strict };
        let dialect = Dialect::NONE.with_call_form("hermes").unwrap();
        let mut speech = dialect.answer_parser(&Tools::new(vec![tool]), AnswerStart::Answer);
        let mut output = Vec::new();
        speech.push(text, &mut output);
        speech.finish(&mut output);
        output.iter().filter(|piece| matches!(piece, AnswerPiece::CallEnd { .. })).count()
    };
    assert_eq!((read(false), read(true)), (2, 0));
}
