//! Chat templates, as transformers runs them.

use super::*;
use serde_json::json;
use std::fmt::Write as _;

#[test]
fn renders_chats() {
    let folder = Temporary::folder("chat");
    let checkpoint = Checkpoint::open(&folder.write("t.gguf", &tiny().bytes())).unwrap();
    let template = checkpoint.chat_template().unwrap().unwrap();
    let conversation = Conversation::new(vec![json!({ "role": "user", "content": " Hi {{ 1 }} <b> " })]);
    assert_eq!(
        template.render(&conversation, 0).unwrap(),
        "<|im_start|>user\nHi {{ 1 }} <b><|im_end|>\n<|im_start|>assistant\n"
    );
    let shown = Conversation { add_generation_prompt: false, ..conversation };
    let tokens = checkpoint.tokenizer().unwrap().encode(&template.render(&shown, 0).unwrap(), false).unwrap();
    assert_eq!(tokens[0], 260);
}

/// Noon of the 29th of February 2000, in Unix seconds.
const LEAP_DAY: u64 = 951_825_600;

#[test]
fn templates_as_transformers_runs_them() {
    let check = |source: &str, expect: std::result::Result<&str, &str>| {
        let chat = Conversation::new(vec![json!({ "role": "user", "content": "é\"\n" })]);
        let template = ChatTemplate::new(source, Some("<s>".into()), None);
        match (template.and_then(|template| template.render(&chat, LEAP_DAY)), expect) {
            (Ok(text), Ok(expect)) => assert_eq!(text, expect),
            (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
            (found, expect) => panic!("{source}: {found:?}, expected {expect:?}"),
        }
    };
    check("{{ bos_token }}{{ eos_token }}|{{ tools is none }}", Ok("<s>|True"));
    check("{{ messages[0] | tojson }}", Ok(r#"{"role": "user", "content": "é\"\n"}"#));
    check("{{ [1, {'a': none}] | tojson(indent=2) }}", Ok("[\n  1,\n  {\n    \"a\": null\n  }\n]"));
    check("{{ '<&>' | tojson }}{{ [] | tojson }}", Ok("\"<&>\"[]"));
    check("a\n  {% if true %}\nb\n  {% endif %}\nc\n", Ok("a\nb\nc"));
    check("a {%- generation %}b{% endgeneration -%} c", Ok("abc"));
    check("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", Ok("01"));
    check("{{ raise_exception('roles must alternate') }}", Err("roles must alternate"));
    check("{{ strftime_now('%d %b %Y') }}", Ok("29 Feb 2000"));
    check("{% macro f() %}{{ strftime_now('%H') }}{% endmacro %}{{ f() }}", Ok("12"));
    check("{{ strftime_now is defined }}", Ok("True"));
    check("{{ strftime_now('%Q') }}", Err("%Q"));
    check("{% for", Err("line 1"));
    check("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", Err("recursion"));
    check(
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}\
         {% endfor %}{% endfor %}{% endfor %}",
        Err("instructions"),
    );
    check(&"x".repeat(2 << 20), Err("bytes are more"));
    check("{{ ''[::-1] }}", Err("panicked"));
    for huge in [
        "{{ 'x' | indent(9999999999) }}",
        "{{ 'x' | indent(width=9999999999) }}",
        "{{ [1] | slice(9999999999) }}",
        "{{ [1] | batch(9999999999, 0) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
    ] {
        check(huge, Err("at most 10000 at once"));
    }
    for huge in ["{{ 'x' * 9999999999 }}", "{{ [1] * 9999999999 }}", "{{ range(9999999999) }}"] {
        check(huge, Err("too"));
    }
    check("{{ 'a\nb' | indent(2) }}{{ '%5.1f' | format(2.25) }}", Ok("a\n  b  2.2"));
}

/// A GGUF's template gets the dates that llama.cpp gives to it, and a template of transformers gets none.
#[test]
fn templates_of_a_gguf_get_dates() {
    let folder = Temporary::folder("dates");
    let of_gguf = Checkpoint::open(&folder.write("t.gguf", &tiny().bytes())).unwrap().chat_template().unwrap().unwrap();
    let chat = Conversation::new(vec![json!({ "role": "user", "content": "Hi" })]);
    let source = "{{ date_string }}|{{ datetime }}";
    let given = of_gguf.with_source(source).unwrap();
    assert_eq!(given.render(&chat, LEAP_DAY).unwrap(), "29 Feb 2000|Feb 29 2000");
    let variables = json!({ "date_string": "1 Jan" }).as_object().cloned().unwrap();
    let own = Conversation { variables, ..chat.clone() };
    assert_eq!(given.render(&own, LEAP_DAY).unwrap(), "1 Jan|Feb 29 2000");
    assert_eq!(ChatTemplate::new(source, None, None).unwrap().render(&chat, LEAP_DAY).unwrap(), "|");
}

/// The expected texts come from transformers, by `tests/reference/make_templates.py`.
#[test]
fn templates_of_models_render_as_in_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/templates");
    let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let expected = expected.as_object().unwrap();
    assert!(expected.len() >= 13);
    let mut wrong = String::new();
    for (name, cases) in expected {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(&source, Some("<s>".into()), Some("</s>".into())).unwrap();
        for case in cases.as_array().unwrap() {
            let list = |key: &str| Some(case[key].clone()).filter(|value| !value.is_null());
            let chat = Conversation {
                messages: case["messages"].as_array().unwrap().clone(),
                tools: list("tools"),
                documents: list("documents"),
                variables: case["variables"].as_object().cloned().unwrap_or_default(),
                add_generation_prompt: case["prompt"] == true,
                continue_final_message: case["continue"] == true,
            };
            let rendered = template.render(&chat, 0);
            match (&rendered, case["text"].as_str(), case["text"]["error"].as_str()) {
                (Ok(rendered), Some(expected), _) if rendered == expected => {}
                (Err(error), _, Some(expected)) if error.to_string().contains(expected) => {}
                // Python's own words for a message without content.
                (Err(_), _, Some("'dict object' has no attribute 'content'")) => {}
                _ => {
                    writeln!(wrong, "{name} {}: {rendered:?}\n  transformers {:?}", case["name"], case["text"]).unwrap()
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
