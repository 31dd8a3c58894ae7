//! JSON that is a call because it names a tool.

use crate::common::{Reader, answer};

#[track_caller]
fn check(text: &str, content: &str, calls: &[&str]) {
    Reader::new("generic", "none").check(text, &answer("", content, calls));
}

#[test]
fn an_object_that_names_a_tool_is_a_call() {
    check("{\"name\": \"get_time\", \"arguments\": {}}", "", &["get_time({})"]);
    check(
        "Well:\n  {\"name\": \"get_time\", \"parameters\": {\"a\": 1}}\nSo.",
        "Well:\n  \nSo.",
        &["get_time({\"a\": 1})"],
    );
    check(
        "[{\"name\": \"get_time\", \"arguments\": {}}, {\"arguments\": {\"days\": 2}, \"name\": \"get_weather\"}]",
        "",
        &["get_time({})", "get_weather({\"days\": 2})"],
    );
    check("Here:\n```json\n{\"name\": \"get_time\", \"arguments\": {}}\n```", "Here:\n", &["get_time({})"]);
}

#[test]
fn any_other_object_is_content() {
    for text in [
        "{\"name\": \"Ada\", \"age\": 36}",
        "{\"name\": \"get_time\"}",
        "{\"name\": \"Ada\", \"arguments\": {}}",
        "{\"arguments\": {\"name\": \"get_time\"}}",
        "[1, 2, {\"name\": \"get_time\"}]",
        "[link](http://a)",
        "x {\"name\": \"get_time\", \"arguments\": {}}",
        "```json\n{\"a\": 1}\n```\n",
        "```rust\nfn main() {}\n```",
    ] {
        check(text, text, &[]);
    }
}

#[test]
fn llama_separates_calls_by_semicolons() {
    let check = |text: &str, content: &str, calls: &[&str]| {
        Reader::new("llama3_json", "none").check(text, &answer("", content, calls));
    };
    check(
        "{\"name\": \"get_time\", \"parameters\": {}}; \
         {\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\"}}",
        "",
        &["get_time({})", "get_weather({\"city\": \"Oslo\"})"],
    );
    check("<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "", &["f({})"]);
    check("<|python_tag|>search.call(query=\"x\")", "<|python_tag|>search.call(query=\"x\")", &[]);
    check("{\"type\": \"function\", \"name\": \"get_time\", \"parameters\": {}}", "", &["get_time({})"]);
    check("{\"a\": {\"b\": 1}}", "{\"a\": {\"b\": 1}}", &[]);
}

#[test]
fn lists_stand_behind_a_marker() {
    let check = |form: &str, text: &str, content: &str, calls: &[&str]| {
        Reader::new(form, "none").check(text, &answer("", content, calls));
    };
    let two = "[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]";
    let calls = ["f({\"a\": 1})", "g({})"];
    check("phi4_mini_json", &format!("<|tool_call|>{two}<|/tool_call|>"), "", &calls);
    check("phi4_mini_json", &format!("functools{two}"), "", &calls);
    check("phi4_mini_json", "import functools\n", "import functools\n", &[]);
    check("granite", &format!("<|tool_call|>{two}"), "", &calls);
    check("nemotron_json", &format!("<TOOLCALL>{two}</TOOLCALL>\n"), "", &calls);
    check("jamba", &format!("<tool_calls>{two}</tool_calls>"), "", &calls);
    let [f, g] = ["{\"name\": \"f\", \"arguments\": {\"a\": 1}}", "{\"name\": \"g\", \"parameters\": {}}"];
    check("minimax", &format!("<tool_calls>\n{f}\n{g}\n</tool_calls>"), "", &calls);
    check("longcat", &format!("<longcat_tool_call>{f}</longcat_tool_call>"), "", &calls[..1]);
    check("granite-20b-fc", &format!("<function_call> {f}\n<function_call> {g}"), "", &calls);
    check("internlm", &format!("So.<|action_start|><|plugin|>\n{g}<|action_end|>\n"), "So.", &calls[1..]);
    check("granite", &format!("Sure. <tool_call> {two}"), "Sure. ", &calls);
}
