//! `run`: one answer to stdout, or a chat. A gRPC client of the same roles that `serve` starts, within this process.

use crate::args::Run;
use anyhow::{Context, bail};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use std::io::{BufRead, IsTerminal, Write};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// How often the roles are asked whether they have loaded, and how many times: a large model takes minutes.
const READY_POLL: Duration = Duration::from_millis(20);
const READY_POLLS_MAX: u32 = 30_000;

/// Answers the prompt, or holds a chat where there is none.
pub async fn answer_all(channel: Channel, run: &Run) -> anyhow::Result<()> {
    let mut client = InferenceClient::new(channel);
    until_ready(&mut client).await?;
    match &run.prompt {
        Some(prompt) => once(client, Ask::new(run), prompt).await,
        None => chat(client, Ask::new(run)).await,
    }
}

/// The model is listed from the moment on in which it can be asked.
async fn until_ready(client: &mut InferenceClient<Channel>) -> anyhow::Result<()> {
    for _ in 0..READY_POLLS_MAX {
        let listed = client.list_models(v1::ListModelsRequest {}).await;
        if listed.is_ok_and(|models| !models.get_ref().models.is_empty()) {
            return Ok(());
        }
        tokio::time::sleep(READY_POLL).await;
    }
    bail!("the model was not ready in time")
}

/// What stays the same from one question to the next.
struct Ask {
    sampling: v1::Sampling,
    messages: Vec<v1::ChatMessage>,
}

impl Ask {
    fn new(run: &Run) -> Ask {
        let sampling = v1::Sampling {
            temperature: run.temperature,
            seed: run.seed,
            max_tokens: run.max_tokens,
            ..v1::Sampling::default()
        };
        let messages = run.system.iter().map(|text| message("system", text)).collect();
        Ask { sampling, messages }
    }
}

fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.into(), content: content.into() }
}

async fn once(mut client: InferenceClient<Channel>, mut ask: Ask, prompt: &str) -> anyhow::Result<()> {
    let spoken = answer(&mut client, &mut ask, prompt).await?;
    if std::io::stderr().is_terminal() {
        eprintln!("{}", spoken.summary());
    }
    Ok(())
}

/// Asks for questions until the input ends. The conversation is sent whole each time: the prefix cache knows it.
async fn chat(mut client: InferenceClient<Channel>, mut ask: Ask) -> anyhow::Result<()> {
    eprintln!("A line is a question; an empty line or the end of input leaves.");
    loop {
        eprint!("> ");
        let Some(question) = tokio::task::spawn_blocking(read_line).await?? else { return Ok(()) };
        match answer(&mut client, &mut ask, &question).await {
            Ok(spoken) => eprintln!("{}", spoken.summary()),
            Err(error) => {
                // The conversation goes on without the question.
                ask.messages.pop();
                eprintln!("{error:#}");
            }
        }
    }
}

fn read_line() -> std::io::Result<Option<String>> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let line = line.trim();
    Ok((!line.is_empty()).then(|| line.to_owned()))
}

/// How an answer went, in figures.
struct Spoken {
    n_tokens: u32,
    first_token: Duration,
    rest: Duration,
}

impl Spoken {
    fn summary(&self) -> String {
        let rate = f64::from(self.n_tokens.saturating_sub(1)) / self.rest.as_secs_f64().max(1e-9);
        format!(
            "[{} tokens, first after {:.0} ms, then {rate:.1} tokens/s]",
            self.n_tokens,
            self.first_token.as_secs_f64() * 1e3
        )
    }
}

/// Streams one answer to stdout, and remembers it in the conversation.
async fn answer(client: &mut InferenceClient<Channel>, ask: &mut Ask, prompt: &str) -> anyhow::Result<Spoken> {
    ask.messages.push(message("user", prompt));
    let chat = v1::Chat { messages: ask.messages.clone(), add_generation_prompt: None };
    let request = v1::GenerateRequest {
        input: Some(Input::Chat(chat)),
        sampling: Some(ask.sampling.clone()),
        ..v1::GenerateRequest::default()
    };
    let asked = Instant::now();
    let mut replies = match client.generate(request).await {
        Ok(replies) => replies.into_inner(),
        Err(status) => bail!("{}", status.message()),
    };
    let mut text = String::new();
    let mut first_token = None;
    while let Some(reply) = replies.message().await.map_err(|status| anyhow::anyhow!("{}", status.message()))? {
        match reply.event.context("a reply without an event")? {
            Event::Started(_) | Event::PromptLogprobs(_) => {}
            Event::Delta(delta) => {
                first_token.get_or_insert_with(|| asked.elapsed());
                show(&delta.text)?;
                text.push_str(&delta.text);
            }
            Event::Finished(finished) => {
                show("\n")?;
                ask.messages.push(message("assistant", &text));
                let first_token = first_token.unwrap_or_else(|| asked.elapsed());
                let n_tokens = finished.usage.map_or(0, |usage| usage.completion_tokens);
                return Ok(Spoken { n_tokens, first_token, rest: asked.elapsed() - first_token });
            }
        }
    }
    bail!("the stream ended before the answer did")
}

fn show(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
