//! `/v1/decisions` in OpenAI's form, and `/v1/systemone` in vLLM's: questions behind one state, each answered by the
//! probabilities of its labels. Has no knowledge of replicas.

mod evidence;
mod openai;
mod systemone;

pub use openai::decisions;
pub use systemone::systemone;

use proto::v1;
use router::front::decide::{LabelQuestion, LabelRead};
use serde_json::{Value, json};

/// Turns off a model's thoughts, where its template has a switch.
const NO_THINKING: &str = r#"{"enable_thinking": false}"#;

/// Returns the question as a chat of one message behind the instructions, if there are any.
fn label_question(system: &str, text: String, labels: Vec<String>, name: String) -> LabelQuestion {
    let message =
        |role: &str, content: String| v1::ChatMessage { role: role.to_owned(), content, ..v1::ChatMessage::default() };
    let system = (!system.is_empty()).then(|| message("system", system.to_owned()));
    let messages = system.into_iter().chain([message("user", text)]).collect();
    let template_variables = NO_THINKING.to_owned();
    LabelQuestion { chat: v1::Chat { messages, template_variables, ..v1::Chat::default() }, labels, name }
}

/// Writes a question: its instructions, a line for each option, and how to answer. Empty instructions have no line.
fn question_text(state: &str, instructions: &str, options: &[String], ends: &str) -> String {
    let heading = (!instructions.is_empty()).then(|| format!("Question: {instructions}"));
    let lines: Vec<String> = heading.into_iter().chain(options.iter().cloned()).chain([ends.to_owned()]).collect();
    format!("{state}\n\n{}", lines.join("\n"))
}

/// A line of an option, and what it means if that is described.
fn option_line(label: &str, option: &str, description: &str) -> String {
    match description {
        "" => format!("{label}: {option}"),
        described => format!("{label}: {option} - {described}"),
    }
}

const BY_LETTER: &str = "Answer with the letter of one option only.";

/// The mean of the levels' numbers.
fn mean_level(read: &LabelRead) -> f64 {
    (0..).zip(&read.probabilities).map(|(level, probability)| f64::from(level) * probability).sum()
}

fn usage(usage: &v1::Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens, "cache_write_tokens": 0 },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}
