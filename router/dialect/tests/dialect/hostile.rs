//! Hostile texts that would cost time or memory, or hold back the answer.

use crate::common::{Random, Reader, answer};
use dialect::AnswerPiece;

/// Every form that has a name, with a form of thoughts.
pub fn forms() -> Vec<Reader> {
    let known = dialect::Dialect::NONE.with_call_form("?").unwrap_err().known;
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
            let (before, output) = reader.read([text.as_str()]);
            reader.check_cuts(&text, &before, &output);
        }
    }
}

/// Without a call nothing is lost and nothing is doubled.
#[test]
fn text_without_calls_is_unchanged_content() {
    let fragments = fragments();
    let mut random = Random(12);
    let mut n_plain = 0;
    let known = dialect::Dialect::NONE.with_call_form("?").unwrap_err().known;
    let readers = known.into_iter().map(|form| Reader::new(form, "none"));
    for reader in readers.filter(|reader| !reader.dialect.has_thoughts()) {
        for _ in 0..100 {
            let n = 1 + random.below(8);
            let text: String = (0..n).map(|_| fragments[random.below(fragments.len())]).collect();
            let (_, output) = reader.read([text.as_str()]);
            if output.iter().all(|piece| matches!(piece, AnswerPiece::Content(_))) {
                assert_eq!(output, [AnswerPiece::Content(text)]);
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
    let (_, output) = Reader::new("hermes", "none").read([text.as_str()]);
    assert_eq!(output[1], AnswerPiece::CallArguments { index: 0, text: braces.clone() });
    for form in ["pythonic", "qwen3_coder", "generic", "glm45", "functiongemma", "mistral", "openai"] {
        let reader = Reader::new(form, "qwen3");
        for opener in ["[get_time(a=", "<tool_call><function=f><parameter=a>", "", "<tool_call>f<arg_key>a</arg_key>"] {
            let text = format!("{opener}{}", "[{(".repeat(30_000));
            let (_, pieces) = reader.read([text.as_str()]);
            assert!(!pieces.is_empty());
        }
    }
}

/// Texts that would take quadratic time if the reader restarted after each marker.
const PATTERNS: [&str; 19] = [
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
    "\n[get_time(",
    "a=",
    "<｜tool▁call▁begin｜>",
    "``",
    "'''",
];

#[test]
fn patterns_read_the_same_by_characters() {
    for reader in forms() {
        for pattern in PATTERNS {
            let text = pattern.repeat(3_000 / pattern.len());
            let (_, whole) = reader.read([text.as_str()]);
            let (_, by_chars) = reader.read(text.split_inclusive(|_| true));
            assert_eq!(whole, by_chars, "{pattern}");
        }
    }
}

/// Sixteen times the text must take about sixteen times as long. A reader that restarts would take 256 times. Each time
/// is the best of three, because other programs run too.
#[test]
fn time_grows_with_the_text_and_no_faster() {
    let seconds = |reader: &Reader, text: &str, piece: usize| {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(piece).map(|piece| piece.iter().collect()).collect();
        let once = || {
            let mut speech = reader.dialect.answer_parser(&reader.tools, reader.opening);
            let mut output = Vec::new();
            let start = std::time::Instant::now();
            pieces.iter().for_each(|piece| speech.push(piece, &mut output));
            speech.finish(&mut output);
            start.elapsed().as_secs_f64()
        };
        (0..3).map(|_| once()).fold(f64::INFINITY, f64::min)
    };
    for reader in forms() {
        for pattern in PATTERNS {
            for piece in [usize::MAX, 5] {
                let short = seconds(&reader, &pattern.repeat(2_000 / pattern.len()), piece);
                let long = seconds(&reader, &pattern.repeat(32_000 / pattern.len()), piece);
                let dialect = reader.dialect;
                assert!(long < 80.0 * short + 0.01, "{pattern:?} takes {short} s, then {long} s: {dialect:?}");
            }
        }
    }
}

#[test]
fn a_literal_marker_is_not_silence() {
    let reader = Reader::new("hermes", "none");
    let (before, _) = reader.read(["Write <tool_call> and", " then"]);
    assert_eq!(before, [AnswerPiece::Content("Write <tool_call> and then".into())]);
    let (before, _) = reader.read(["Write <tool_call>"]);
    assert_eq!(before, [AnswerPiece::Content("Write ".into())]);
    reader.check("<tool_call>\n{\"x", &answer("", "<tool_call>\n{\"x", &[]));
}
