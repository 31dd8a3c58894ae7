//! Calls as a function's name with arguments in brackets.

use crate::common::{Reader, answer};

#[track_caller]
fn check(form: &str, text: &str, content: &str, calls: &[&str]) {
    Reader::new(form, "none").check(text, &answer("", content, calls));
}

#[test]
fn python_becomes_json() {
    let call = |arguments: &str| format!("[get_weather({arguments})]");
    let check = |arguments: &str, expect: &str| {
        check("pythonic", &call(arguments), "", &[&format!("get_weather({expect})")]);
    };
    check("", "{}");
    check("city=\"Oslo\", days=3", r#"{"city": "Oslo", "days": 3}"#);
    check("city='it\\'s', note=\"say \\\"hi\\\"\"", r#"{"city": "it's", "note": "say \"hi\""}"#);
    check("exact=True, note=None, days=-1.5e3", r#"{"exact": true, "note": null, "days": -1.5e3}"#);
    check("exact=false,note=null", r#"{"exact": false, "note": null}"#);
    check(
        "spots=['a', \"b\",], more={'x': [1, (2, 3)], 'y': {}}",
        r#"{"spots": ["a", "b"], "more": {"x": [1, [2, 3]], "y": {}}}"#,
    );
    check("more={1: 'a', True: []}", r#"{"more": {"1": "a", "True": []}}"#);
    check("city=\"\"\"a\n\"b\" c\"\"\"", r#"{"city": "a\n\"b\" c"}"#);
    check("city=\"\", days=2", r#"{"city": "", "days": 2}"#);
    check("city = 'é\\x41\\u00e9\\ud83d\\ude00\\U0001F600\\n\\q'", r#"{"city": "éAé😀😀\n\\q"}"#);
    check("days=today() + 1, city=Oslo", r#"{"days": "today() + 1", "city": "Oslo"}"#);
    check("'Oslo', 3", r#"{"city": "Oslo", "days": 3}"#);
    check("Oslo, days=3", r#"{"city": "Oslo", "days": 3}"#);
    check("city=", r#"{"city": null}"#);
    check("city=\"a)], b\"", r#"{"city": "a)], b"}"#);
}

#[test]
fn python_lists_calls() {
    let two = "[get_time(), get_weather(city=\"Oslo\")]";
    let calls = ["get_time({})", "get_weather({\"city\": \"Oslo\"})"];
    check("pythonic", two, "", &calls);
    check("pythonic", &format!("Sure:\n{two}\nDone."), "Sure:\n\nDone.", &calls);
    check("llama4_pythonic", &format!("<|python_start|>{two}<|python_end|>"), "", &calls);
    check("lfm2", &format!("<|tool_call_start|>{two}<|tool_call_end|>It runs."), "It runs.", &calls);
    check("olmo3", "<function_calls>\na.b(x=1)\ng()\n</function_calls>", "", &["a.b({\"x\": 1})", "g({})"]);
    let block = "I look:\n```tool_code\nprint(get_weather(city='Oslo'))\nget_time()\n```\n";
    check("gemma3", block, "I look:\n", &["get_weather({\"city\": \"Oslo\"})", "get_time({})"]);
    let block = "```json\n{\"name\": \"get_time\", \"parameters\": {}}\n```";
    check("gemma3", block, "", &["get_time({})"]);
}

#[test]
fn what_is_no_list_of_calls_is_content() {
    for text in [
        "[1, 2, 3]",
        "[unknown(a=1)]",
        "[get_time, get_weather]",
        "[get_time ()]",
        "[]",
        "[",
        "[get_ti",
        "a [get_time()]",
        "[x](http://y) and [get_time](z)",
    ] {
        check("pythonic", text, text, &[]);
    }
    let code = "```tool_code\nx = 1\n```\n";
    check("gemma3", code, code, &[]);
    let code = "```python\nprint(1)\n```";
    check("gemma3", code, code, &[]);
}

#[test]
fn unfinished_python_call_is_emitted_so_far() {
    check("pythonic", "[get_weather(city=\"Os", "", &["get_weather({\"city\": \"Os.."]);
    check("pythonic", "[get_weather(days=3", "", &["get_weather({\"days\": 3.."]);
    check("pythonic", "[get_weather(days=3)", "", &["get_weather({\"days\": 3})"]);
}

#[test]
fn gemma_writes_strings_between_markers() {
    let gemma = |call: &str| format!("<start_function_call>call:{call}<end_function_call>");
    let check3 = |call: &str, expect: &str| check("functiongemma", &gemma(call), "", &[expect]);
    check3("get_weather{city:<escape>New York<escape>}", r#"get_weather({"city": "New York"})"#);
    check3("get_time{}", "get_time({})");
    check3(
        "f{a:<escape>x, \"y\"}\\<escape>,b:5,c:true,d:[1,<escape>z<escape>],e:{k:<escape>v<escape>,n:null}}",
        r#"f({"a": "x, \"y\"}\\", "b": 5, "c": true, "d": [1, "z"], "e": {"k": "v", "n": null}})"#,
    );
    check3("get_weather{city:12,days:12,note:null}", r#"get_weather({"city": "12", "days": 12, "note": null})"#);
    check3("get_weather{\"city\":\"a\\\"<\",days:x}", r#"get_weather({"city": "a\"<", "days": "x"})"#);
    check("functiongemma", &format!("{}{}", gemma("f{}"), gemma("g{a:1}")), "", &["f({})", "g({\"a\": 1})"]);
    check(
        "gemma4",
        "<|tool_call>call:f{a:<|\"|>x<y<|\"|>,b:[<|\"|><|\"|>]}<tool_call|>",
        "",
        &[r#"f({"a": "x<y", "b": [""]})"#],
    );
    check("functiongemma", &format!("{}<start_function_response>", gemma("f{}")), "", &["f({})"]);
    check("functiongemma", &format!("{}\n<start_function", gemma("f{}")), "\n<start_function", &["f({})"]);
    let text = "The marker <start_function_call> stands before call:f{}.";
    check("functiongemma", text, text, &[]);
}
