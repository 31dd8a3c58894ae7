//! One answer: its request, its stream to standard output, and its figures. Has no knowledge of a chat's commands.

use super::dialogue::{ASSISTANT, Dialogue, USER, message};
use super::progress::ProgressLine;
use super::quiet::columns;
use super::wrap::LineWrapper;
use crate::out;
use anyhow::{Context, anyhow, bail};
use proto::v1;
use proto::v1::finished::Reason;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use tonic::Status;
use tonic::transport::Channel;

/// The figures of an answer.
pub struct AnswerFigures {
    n_tokens: u32,
    first_token: Duration,
    rest: Duration,
    /// Whether the answer ended because the model's context is full.
    pub fills_context: bool,
}

impl AnswerFigures {
    pub fn summary(&self) -> String {
        let rate = f64::from(self.n_tokens.saturating_sub(1)) / self.rest.as_secs_f64().max(1e-9);
        let first = self.first_token.as_secs_f64() * 1e3;
        format!("[{} tokens, first after {first:.0} ms, then {rate:.1} tokens/s]", self.n_tokens)
    }
}

/// Streams one answer to stdout, and adds it to the conversation.
pub async fn answer(
    client: &mut InferenceClient<Channel>,
    dialogue: &mut Dialogue,
    prompt: &str,
) -> anyhow::Result<AnswerFigures> {
    dialogue.messages.push(message(USER, prompt));
    let chat = || v1::Chat { messages: dialogue.messages.clone(), ..v1::Chat::default() };
    let request = v1::GenerateRequest {
        input: Some(if dialogue.raw { Input::Text(prompt.to_owned()) } else { Input::Chat(chat()) }),
        sampling: Some(dialogue.sampling.clone()),
        progress: true,
        ..v1::GenerateRequest::default()
    };
    let started = Instant::now();
    let mut progress = ProgressLine::default();
    let mut replies = client.generate(request).await.map_err(refusal_error)?.into_inner();
    dialogue.messages.push(message(ASSISTANT, ""));
    let (mut first_token, mut terminal) = (None, LineWrapper::default());
    while let Some(reply) = replies.message().await.map_err(refusal_error)? {
        match reply.event.context("a reply without an event")? {
            Event::Started(_) | Event::PromptLogprobs(_) => {}
            Event::PromptProgress(prompt) => progress.show(&prompt),
            Event::Delta(delta) => {
                progress.clear();
                first_token.get_or_insert_with(|| started.elapsed());
                // Thoughts go to stderr, so that a pipe on stdout receives the answer alone.
                match std::io::stderr().is_terminal() {
                    true => eprint!("{}", terminal.push(&delta.reasoning, columns().unwrap_or(usize::MAX))),
                    false => eprint!("{}", delta.reasoning),
                }
                show(&mut terminal, &delta.text)?;
                // The text is stored at once, because the answer may be stopped.
                if let Some(last_message) = dialogue.messages.last_mut() {
                    last_message.content.push_str(&delta.text);
                }
            }
            Event::Finished(finished) => {
                progress.clear();
                out::print("\n")?;
                let first_token = first_token.unwrap_or_else(|| started.elapsed());
                let n_tokens = finished.usage.map_or(0, |usage| usage.completion_tokens);
                let is_cut = finished.reason() == Reason::Length;
                let fills_context = is_cut && dialogue.sampling.max_tokens.is_none_or(|max| n_tokens < max);
                return Ok(AnswerFigures {
                    n_tokens,
                    first_token,
                    rest: started.elapsed() - first_token,
                    fills_context,
                });
            }
        }
    }
    bail!("the stream ended before the answer did")
}

fn refusal_error(status: Status) -> anyhow::Error {
    anyhow!("{}", status.message())
}

/// Prints a part of the answer; in a pipe without any change.
fn show(terminal: &mut LineWrapper, text: &str) -> anyhow::Result<()> {
    match columns() {
        Some(columns) => out::print(&terminal.push(text, columns)),
        None => out::print(text),
    }
}
