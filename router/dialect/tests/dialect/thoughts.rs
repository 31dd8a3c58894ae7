//! Thoughts before an answer.

use crate::common::{Reader, answer};
use dialect::{AnswerStart, Dialect, Tools};

#[track_caller]
fn check(form: &str, opening: AnswerStart, text: &str, reasoning: &str, content: &str) {
    let mut reader = Reader { opening, ..Reader::new("hermes", form) };
    reader.check(text, &answer(reasoning, content, &[]));
    reader.tools = Tools::default();
    reader.check(text, &answer(reasoning, content, &[]));
}

#[test]
fn a_thought_ends_before_the_answer() {
    use AnswerStart::{Answer, Thought};
    check("qwen3", Answer, "<think>\nHm.\n\nYes.\n</think>\n\nIt is.", "Hm.\n\nYes.", "It is.");
    check("qwen3", Answer, "\n<think>a</think>b", "a", "b");
    check("qwen3", Answer, "<think>\n\n</think>\n\nb", "", "b");
    check("deepseek_r1", Thought, "Hm.\n</think>\nIt is.", "Hm.", "It is.");
    check("deepseek_r1", Thought, "Hm. a < b </thin", "Hm. a < b </thin", "");
    check("qwen3", Answer, "It is, <think> or not </think>.", "", "It is, <think> or not </think>.");
    check("qwen3", Answer, "  It is.", "", "  It is.");
    check("qwen3", Answer, "<think>one</think>two</think>", "one", "two</think>");
    check("mistral", Answer, "[THINK]a[b][/THINK]c", "a[b]", "c");
    check("granite", Answer, "Here is my thought process: a\nHere's my response: b", " a", " b");
    check("gemma4", Answer, "<|channel>thought\nHm.<channel|>It is.", "Hm.", "It is.");
    check("gemma4", Answer, "<|channel>Hm.<channel|>It is.", "Hm.", "It is.");
    check("seed_oss", Answer, "<seed:think>a</seed:think>b", "a", "b");
    check("none", Answer, "<think>a</think>b", "", "<think>a</think>b");
}

#[test]
fn calls_follow_a_thought() {
    let text = "<think>\nI say <tool_call>.\n</think>\n\n<tool_call>\n{\"name\": \"f\"}\n</tool_call>";
    Reader::new("hermes", "qwen3").check(text, &answer("I say <tool_call>.", "", &["f({})"]));
}

#[test]
fn prompt_end_determines_whether_thought_is_open() {
    let cases = [
        ("qwen3", "<|im_start|>assistant\n<think>\n", AnswerStart::Thought),
        ("qwen3", "<|im_start|>assistant\n<think>", AnswerStart::Thought),
        ("qwen3", "<|im_start|>assistant\n", AnswerStart::Answer),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", AnswerStart::Answer),
        ("gemma4", "<|turn>model\n<|channel>thought\n", AnswerStart::Thought),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", AnswerStart::Answer),
        ("none", "<think>", AnswerStart::Answer),
    ];
    for (form, prompt, opening) in cases {
        let dialect = Dialect::NONE.with_thought_form(form).unwrap();
        assert_eq!(dialect.opens_thought(prompt), opening, "{form} {prompt}");
    }
}
