//! Calls as a header and JSON.

use crate::common::{Reader, answer};

#[track_caller]
fn check(form: &str, text: &str, content: &str, calls: &[&str]) {
    Reader::new(form, "none").check(text, &answer("", content, calls));
}

#[test]
fn mistral_writes_lists_or_names() {
    for form in ["mistral", "mistral_list"] {
        let check = |text: &str, content: &str, calls: &[&str]| check(form, text, content, calls);
        check(
            "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": 3.5}}, \
             {\"name\": \"g\", \"arguments\": {}, \"id\": \"x\"}]",
            "",
            &["add({\"a\": 3.5})", "g({})"],
        );
        check(
            "I add.[TOOL_CALLS]add[ARGS]{\"a\": \"[TOOL_CALLS]\"}[TOOL_CALLS]g[ARGS]{}",
            "I add.",
            &["add({\"a\": \"[TOOL_CALLS]\"})", "g({})"],
        );
        check("[TOOL_CALLS]add{\"a\": {\"b\": 1}}", "", &["add({\"a\": {\"b\": 1}})"]);
        check("[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{}", "", &["a1B2c3D4e=add({})"]);
        check("[TOOL_CALLS] are marked so.", "[TOOL_CALLS] are marked so.", &[]);
        check("a[TOOL_CALLS]", "a[TOOL_CALLS]", &[]);
        check("[TOOL_CALLS]add[ARGS]{\"a\": 1", "", &["add({\"a\": 1.."]);
    }
}

#[test]
fn deepseek_writes_a_type_or_a_name() {
    let v3 = |name: &str, json: &str| {
        format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>")
    };
    let text =
        format!("Well.<｜tool▁calls▁begin｜>{}\n{}<｜tool▁calls▁end｜>", v3("f", "{\"a\": \"```\"}"), v3("g", "{}"));
    check("deepseek_v3", &text, "Well.", &["f({\"a\": \"```\"})", "g({})"]);
    let v31 = |name: &str, json: &str| format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>");
    let two = [v31("f", "{\"a\": 1}"), v31("function", "{}")].concat();
    for form in ["deepseek_v3", "deepseek_v31"] {
        check(
            form,
            &format!("<｜tool▁calls▁begin｜>{two}<｜tool▁calls▁end｜>"),
            "",
            &["f({\"a\": 1})", "function({})"],
        );
        check(form, &two, "", &["f({\"a\": 1})", "function({})"]);
        check(form, "<｜tool▁calls▁begin｜> is a marker", "<｜tool▁calls▁begin｜> is a marker", &[]);
        let broken = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": [<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
        check(form, broken, "", &["f({\"a\": [)"]);
    }
}

#[test]
fn kimi_numbers_calls() {
    let call =
        |id: &str, json: &str| format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{json}<|tool_call_end|>");
    let two = [call("functions.get_weather:0", "{\"city\": \"Oslo\"}"), call("functions.a.b:1", "{}")].concat();
    check(
        "kimi_k2",
        &format!("I look. <|tool_calls_section_begin|>{two}<|tool_calls_section_end|>"),
        "I look. ",
        &["functions.get_weather:0=get_weather({\"city\": \"Oslo\"})", "functions.a.b:1=a.b({})"],
    );
    check("kimi_k2", &call("get_time:12", "{}"), "", &["get_time:12=get_time({})"]);
    check("kimi_k2", &call("get_time", ""), "", &["get_time=get_time({})"]);
    check("kimi_k2", "<|tool_call_begin|>two words", "<|tool_call_begin|>two words", &[]);
}
