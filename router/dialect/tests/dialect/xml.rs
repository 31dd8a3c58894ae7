//! Calls as elements with parameters, whose types come from the tool's schema.

use crate::common::{Reader, answer};

#[track_caller]
fn check(form: &str, text: &str, content: &str, calls: &[&str]) {
    Reader::new(form, "none").check(text, &answer("", content, calls));
}

fn qwen(name: &str, parameters: &[(&str, &str)]) -> String {
    let parameters: String =
        parameters.iter().map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n")).collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

#[test]
fn parameters_have_the_types_of_the_schema() {
    let check = |key: &str, value: &str, json: &str| {
        let expect = format!("get_weather({{\"{key}\": {json}}})");
        check("qwen3_coder", &qwen("get_weather", &[(key, value)]), "", &[&expect]);
    };
    check("city", "Oslo", "\"Oslo\"");
    check("city", "12", "\"12\"");
    check("city", "{\"a\": 1}", r#""{\"a\": 1}""#);
    check("city", "", "\"\"");
    check("city", "\na\n\nb\n", r#""\na\n\nb\n""#);
    check("city", "a < b </para", "\"a < b </para\"");
    check("city", "\"é\\\u{1}", r#""\"é\\\u0001""#);
    check("unit", "celsius", "\"celsius\"");
    check("days", "12", "12");
    check("days", "many", "\"many\"");
    check("days", "123456789012345678901234567890", "123456789012345678901234567890");
    check("exact", "True", "true");
    check("exact", "false", "false");
    check("spots", "[\"a\", \n\"b\"]", "[\"a\", \n\"b\"]");
    check("spots", "[broken", "\"[broken\"");
    check("more", "{\"x\": 1.50}", "{\"x\": 1.50}");
    check("note", "null", "null");
    check("note", "12", "\"12\"");
    check("note", "true", "\"true\"");
    check("other", "12", "12");
    check("other", "a b", "\"a b\"");
}

#[test]
fn qwen_coder_writes_functions() {
    let two = format!("{}\n{}", qwen("get_weather", &[("city", "Oslo"), ("days", "2")]), qwen("get_time", &[]));
    let calls = [r#"get_weather({"city": "Oslo", "days": 2})"#, "get_time({})"];
    check("qwen3_xml", &format!("I look.\n\n{two}"), "I look.\n\n", &calls);
    check("qwen3_xml", "<function=f>\n<parameter=a>1</parameter></function>", "", &["f({\"a\": 1})"]);
    check("qwen3_xml", "<tool_call>\n<function=f>\n</tool_call>", "", &["f({})"]);
    check(
        "qwen3_xml",
        "<tool_call><function=f>\n<parameter=a>\nx\n<parameter=b>\ny\n</function></tool_call>",
        "",
        &[r#"f({"a": "x", "b": "y"})"#],
    );
    check("qwen3_xml", "<tool_call><function=f><parameter=city>Os", "", &[r#"f({"city": Os.."#]);
    check("qwen3_xml", "<tool_call><function=get_weather><parameter=city>Os", "", &[r#"get_weather({"city": "Os.."#]);
    for text in ["<function=", "<function=>", "<function=a b>", "<tool_call>x", "<tool_call><functio", "<tool_call>{}"]
    {
        check("qwen3_xml", text, text, &[]);
    }
    check("qwen3_xml", "<tool_call> <tool_call><function=f></function></tool_call>", "<tool_call> ", &["f({})"]);
}

#[test]
fn glm_writes_keys_and_values() {
    let glm = |line: &str| {
        format!(
            "<tool_call>get_weather{line}<arg_key>city</arg_key>{line}<arg_value>Oslo\n</arg_value>{line}\
             <arg_key>days</arg_key>{line}<arg_value>2</arg_value>{line}</tool_call>"
        )
    };
    let call = r#"get_weather({"city": "Oslo\n", "days": 2})"#;
    check("glm45", &format!("So:{}", glm("\n")), "So:", &[call]);
    check("glm47", &format!("{}\n{}", glm(""), glm("")), "", &[call, call]);
    check("glm47", "<tool_call>get_time</tool_call>", "", &["get_time({})"]);
    check("glm45", "<tool_call>\nget_time\n</tool_call>", "", &["get_time({})"]);
    for text in ["<tool_call> stands before", "<tool_call>\nThen\nmore", "<tool_call></tool_call>", "<tool_call>a"] {
        check("glm45", text, text, &[]);
    }
}

#[test]
fn attributes_hold_names() {
    check(
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Oslo</parameter>\n\
         <parameter name=\"spots\">[\"a\"]</parameter>\n</invoke>\n\
         <invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
        "",
        &[r#"get_weather({"city": "Oslo", "spots": ["a"]})"#, "g({})"],
    );
    check(
        "deepseek_v32",
        "Ok.<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
         <｜DSML｜parameter name=\"a\" string=\"true\">12</｜DSML｜parameter>\n\
         <｜DSML｜parameter name=\"b\" string=\"false\">12</｜DSML｜parameter>\n\
         </｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Ok.",
        &[r#"f({"a": "12", "b": 12})"#],
    );
    check(
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>\n</function>\n</seed:tool_call>",
        "",
        &[r#"f({"a": "x"})"#],
    );
    let text = "<invoke name=\"f\"> alone";
    check("minimax_m2", text, text, &[]);
}
