//! Texts that want to cost time, memory or silence.

use crate::common::{Random, Reader, answer};
use dialect::Piece;

/// Every form that has a name, with a form of thoughts.
pub fn forms() -> Vec<Reader> {
    let known = dialect::Dialect::NONE.tools_named("?").unwrap_err().known;
    let thoughts = |form: &str| match form {
        "openai" => "openai_gptoss",
        "kimi_k2" => "kimi_k2",
        "gemma4" => "gemma4",
        "mistral" => "mistral",
        _ => "qwen3",
    };
    known.into_iter().map(|form| Reader::new(form, thoughts(form))).collect()
}

fn fragments() -> Vec<&'static str> {
    let mut fragments: Vec<&str> = forms().iter().flat_map(|reader| reader.dialect.markers()).collect();
    fragments.extend([
        "{\"name\": \"get_time\", \"arguments\": ",
        "{\"name\": \"",
        "\"arguments\": {",
        "get_weather",
        "functions.f:0",
        "city",
        "call:f{",
        "f(a=",
        "print(",
        "\"",
        "\\",
        "\\u00e9",
        "\\ud83d",
        "'",
        "\"\"\"",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        "=",
        ">",
        "<",
        "1",
        "null",
        "\n",
        " ",
        "é",
        "text",
        "function",
        "```",
        "```json\n",
        " to=functions.f",
    ]);
    fragments.sort_unstable();
    fragments.dedup();
    fragments
}

#[test]
fn any_text_reads_the_same_however_it_is_cut() {
    let fragments = fragments();
    let mut random = Random(11);
    for reader in forms() {
        for _ in 0..60 {
            let n = 1 + random.below(14);
            let text: String = (0..n).map(|_| fragments[random.below(fragments.len())]).collect();
            let (before, said) = reader.read([text.as_str()]);
            reader.check_cuts(&text, &before, &said);
        }
    }
}

/// Without a call and a thought nothing is lost and nothing is doubled.
#[test]
fn text_that_says_no_call_is_content_as_it_is() {
    let fragments = fragments();
    let mut random = Random(12);
    let mut n_plain = 0;
    for reader in forms().into_iter().filter(|reader| !reader.dialect.markers().contains(&"<|channel|>")) {
        for _ in 0..100 {
            let n = 1 + random.below(8);
            let text: String = (0..n).map(|_| fragments[random.below(fragments.len())]).collect();
            let (_, said) = reader.read([text.as_str()]);
            let is_content = |piece: &Piece| matches!(piece, Piece::Content(_));
            // A thought without text says nothing.
            if said.iter().all(is_content) && !text.contains("think") && !text.contains("THINK") {
                assert_eq!(said, [Piece::Content(text)]);
                n_plain += 1;
            }
        }
    }
    assert!(n_plain > 1000, "{n_plain}");
}

#[test]
fn deep_braces_are_given_on() {
    let braces = "{\"a\":[".repeat(50_000);
    let text = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {braces}");
    let (_, said) = Reader::new("hermes", "none").read([text.as_str()]);
    assert_eq!(said[1], Piece::CallArguments { index: 0, text: braces.clone() });
    for form in ["pythonic", "qwen3_coder", "generic", "glm45", "functiongemma", "mistral", "openai"] {
        let reader = Reader::new(form, "qwen3");
        for opener in ["[get_time(a=", "<tool_call><function=f><parameter=a>", "", "<tool_call>f<arg_key>a</arg_key>"] {
            let text = format!("{opener}{}", "[{(".repeat(30_000));
            let (_, said) = reader.read([text.as_str()]);
            assert!(!said.is_empty());
        }
    }
}

/// What would be read again and again if reading began anew behind each marker. A reader that is slow here takes
/// minutes, not a second.
#[test]
fn time_grows_with_the_text_and_no_faster() {
    let patterns = [
        "<tool_call>",
        "<tool_call>{\"name\":\"",
        "<tool_call>{\"arguments\": {\"a\":",
        "<tool_call><function=f><parameter=city>",
        "</parameter",
        "\n",
        " ",
        "<",
        "[",
        "{",
        "\"",
        "\\",
        "<|channel|>",
        "<think>",
        "[get_time(",
        "a=",
        "<｜tool▁call▁begin｜>",
        "``",
        "'''",
    ];
    for reader in forms() {
        for pattern in patterns {
            let text = pattern.repeat(20_000 / pattern.len());
            let (_, whole) = reader.read([text.as_str()]);
            let (_, by_chars) = reader.read(text.split_inclusive(|_| true));
            assert_eq!(whole, by_chars, "{pattern}");
        }
    }
}

#[test]
fn a_literal_marker_is_not_silence() {
    let reader = Reader::new("hermes", "none");
    let (before, _) = reader.read(["Write <tool_call> and", " then"]);
    assert_eq!(before, [Piece::Content("Write <tool_call> and then".into())]);
    let (before, _) = reader.read(["Write <tool_call>"]);
    assert_eq!(before, [Piece::Content("Write ".into())]);
    reader.check("<tool_call>\n{\"x", &answer("", "<tool_call>\n{\"x", &[]));
}
