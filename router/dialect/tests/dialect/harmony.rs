//! Messages on channels.

use crate::common::{Reader, answer};
use dialect::{AnswerStart, Tools};

#[track_caller]
fn check(opening: AnswerStart, text: &str, reasoning: &str, content: &str, calls: &[&str]) {
    Reader { opening, ..Reader::new("openai", "openai_gptoss") }.check(text, &answer(reasoning, content, calls));
}

const CALL: &str =
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"<|end|>\"}<|call|>";

#[test]
fn each_harmony_channel_has_its_own_output() {
    use AnswerStart::{Answer, Thought};
    let thought = "<|channel|>analysis<|message|>Hm.\n<|end|>";
    let last = "<|channel|>final<|message|>It is.";
    let call = r#"get_weather({"city": "<|end|>"})"#;
    check(Answer, &format!("{thought}<|start|>assistant{last}<|return|>"), "Hm.", "It is.", &[]);
    check(Answer, &format!("{thought}<|start|>assistant{last}"), "Hm.", "It is.", &[]);
    check(Answer, &format!("{thought}<|start|>assistant{CALL}"), "Hm.", "", &[call]);
    check(Answer, &format!("{thought}<|start|>assistant{thought}{last}"), "Hm.\nHm.", "It is.", &[]);
    check(Answer, &format!("{CALL}<|start|>assistant{CALL}"), "", "", &[call, call]);
    check(Thought, &format!("Hm.<|end|><|start|>assistant{last}"), "Hm.", "It is.", &[]);
    check(
        Answer,
        &format!("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}"),
        "",
        "I look.",
        &[call],
    );
    check(Answer, " to=functions.f<|channel|>commentary json<|message|>{}", "", "", &["f({})"]);
    check(
        Answer,
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|> {\"a\": 1<|call|>",
        "",
        "",
        &["f({\"a\": 1)"],
    );
    check(Answer, "<|channel|>commentary to=python<|message|>1 + 1<|call|>", "1 + 1", "", &[]);
}

#[test]
fn text_without_channels_is_content() {
    check(AnswerStart::Answer, "It is < that.", "", "It is < that.", &[]);
    check(AnswerStart::Answer, " to be", "", " to be", &[]);
    check(AnswerStart::Answer, "<|channel|>anal", "", "", &[]);
    let reader = Reader { tools: Tools::default(), ..Reader::new("openai", "openai_gptoss") };
    reader.check(&CALL.replace("<|end|>", ""), &answer("", "{\"city\": \"\"}", &[]));
}
