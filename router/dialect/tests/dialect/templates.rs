//! The forms that the chat templates of known families show, by the texts about calls and thoughts in each template.

use dialect::{Dialect, UnknownDialect};

fn dialect(calls: &str, thoughts: &str) -> Dialect {
    Dialect::NONE.with_call_form(calls).unwrap().with_thought_form(thoughts).unwrap()
}

#[test]
fn a_template_shows_its_dialect() {
    let cases = [
        (
            "{% if tools %}<tools>..</tools> within <tool_call></tool_call> tags: {\"name\": ..}{% endif %}",
            "hermes",
            "none",
        ),
        ("{%- if tools %}<tool_call>\\n{{ content.split('</think>')[-1] }}", "hermes", "qwen3"),
        ("{% if tools %}<tool_call>\n<function=example>\n<parameter=p>\nv\n</parameter>", "qwen3_coder", "none"),
        (
            "{% if tools %}Environment: ipython <|python_tag|> {\"name\": function name, \"parameters\": ..}",
            "llama3_json",
            "none",
        ),
        ("{% if tools %}[func_name1(params_name1=params_value1, ..)]", "pythonic", "none"),
        ("{% if tools %}<|python_start|>[func_name1(a=b)]<|python_end|>", "llama4_pythonic", "none"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][{\"name\": ..}]", "mistral_list", "none"),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]name[ARGS]{}", "mistral", "none"),
        ("[THINK]..[/THINK] {{ tools }} [TOOL_CALLS] + name + '[ARGS]'", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json", "deepseek_v3", "none"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜> </think>", "deepseek_v31", "deepseek_r1"),
        ("<｜DSML｜function_calls><think>", "deepseek_v32", "deepseek_r1"),
        ("{% if tools %}<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>..<think>", "glm45", "glm45"),
        ("{% if tools %}<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "none"),
        ("<|tool_calls_section_begin|><|tool_call_begin|> <think></think>", "kimi_k2", "kimi_k2"),
        (
            "<start_function_declaration>{{ tools }}<start_function_call>call:f{a:<escape>b<escape>}",
            "functiongemma",
            "none",
        ),
        ("{{ tools }}<|tool_call>call:f{}<tool_call|> <|channel>thought\n<channel|>", "gemma4", "gemma4"),
        ("write a ```tool_code block {{ tools }}", "gemma3", "none"),
        ("<|tool|>{{ tools }}<|/tool|> <|tool_call|>[..]<|/tool_call|>", "phi4_mini_json", "none"),
        ("write functools[{\"name\": ..}, ..] {{ tools }}", "phi4_mini_functools", "none"),
        ("{{ tools }} <TOOLCALL>[..]</TOOLCALL> <think></think>", "nemotron_json", "nemotron_v3"),
        ("output <function_call> {\"name\": \"no_function\"} {{ tools }}", "granite-20b-fc", "none"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json", "none"),
        ("{{ tools }} <|tool_list_start|>[..]<|tool_list_end|>", "lfm2", "none"),
        ("{{ tools }} <longcat_tool_call>{}</longcat_tool_call>", "longcat", "none"),
        ("<tool_calls>[{{ tools }}]</tool_calls>", "jamba", "none"),
        ("<|action_start|><|plugin|>{{ tools }}<|action_end|>", "internlm", "none"),
        ("granite: write <|tool_call|> then a JSON list of {{ tools }}", "granite", "none"),
        ("granite {{ tools }} <tool_call>..; Here is my thought process:", "granite4", "granite"),
        (
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
            "openai",
            "openai_gptoss",
        ),
        ("<minimax:tool_call><invoke name=..> <think>\n", "minimax_m2", "minimax_m2"),
        ("<seed:tool_call><function=f><parameter=a> <seed:think>", "seed_oss", "seed_oss"),
        ("{{ tools }} <|tool_call_start|>[f()]<|tool_call_end|>", "lfm2", "none"),
        ("{{ tools }} <function_calls>f()</function_calls>", "olmo3", "none"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", "generic", "none"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "none", "none"),
        ("", "none", "none"),
    ];
    for (template, calls, thoughts) in cases {
        assert_eq!(Dialect::of_template(template), dialect(calls, thoughts), "{template}");
    }
}

#[test]
fn unknown_dialect_name_is_refused() {
    let error = Dialect::NONE.with_call_form("hermess").unwrap_err();
    assert_eq!(error.name, "hermess");
    assert!(error.to_string().contains("hermes, hunyuan_a13b"), "{error}");
    let known = Dialect::NONE.with_thought_form("").unwrap_err().known;
    assert!(known.contains(&"deepseek_r1"));
    assert!(known.iter().all(|name| Dialect::NONE.with_thought_form(name).is_ok()));
    assert!(error.known.iter().all(|name| Dialect::NONE.with_call_form(name).is_ok()));
    let _: &UnknownDialect = &error;
}

#[test]
fn markers_are_what_must_be_shown() {
    let markers = |calls, thoughts| dialect(calls, thoughts).markers();
    assert_eq!(markers("hermes", "none"), ["</tool_call>", "</tools>", "<tool_call>", "<tools>"]);
    assert_eq!(markers("none", "qwen3"), ["</think>", "<think>"]);
    assert_eq!(markers("none", "none"), Vec::<&str>::new());
    for (calls, marker) in [
        ("mistral", "[ARGS]"),
        ("kimi_k2", "<|tool_call_argument_begin|>"),
        ("gemma4", "<|\"|>"),
        ("functiongemma", "<escape>"),
        ("glm45", "<arg_value>"),
        ("deepseek_v3", "<｜tool▁sep｜>"),
        ("openai", "<|constrain|>"),
    ] {
        assert!(markers(calls, "none").contains(&marker), "{calls} {marker}");
    }
}
