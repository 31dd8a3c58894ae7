//! `run`: one answer to stdout, or a chat. A gRPC client of the same roles that `serve` starts, within this process.

mod said;
mod terminal;

use crate::serve::private::PrivateServer;
use crate::settings::hub;
use crate::settings::{ConfigSource, ServeSettings};
use anyhow::{Context, anyhow, bail};
use checkpoint::catalogue::card_sampling;
use clap::{ArgMatches, Args};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use said::{Typed, TypedMessage};
use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use terminal::{InputLine, Lines};
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Channel;

#[derive(Args)]
pub struct RunCommand {
    /// Prompt, or - to read it from standard input; without it a chat begins
    #[arg(index = 2)]
    pub prompt: Option<String>,
    /// Sampling temperature, 0 to 2; 0 is greedy [default: the model card's, or the model's, or 1]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Draw from the most likely tokens that together have this probability [default: as of the temperature]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Draw from so many most likely tokens [default: the model's, or all]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Draw from tokens at least this likely, as a part of the most likely one's probability
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Complete the prompt as it is, without the chat template
    #[arg(long, requires = "prompt", conflicts_with = "system")]
    pub raw: bool,
    /// Most tokens of an answer [default: the rest of the context]
    #[arg(long)]
    pub max_tokens: Option<u32>,
    /// System message for the model
    #[arg(long)]
    pub system: Option<String>,
    #[command(flatten)]
    pub settings: ServeSettings,
    #[command(flatten)]
    pub source: ConfigSource,
}

impl RunCommand {
    fn says_sampling(&self) -> bool {
        let said = [self.temperature.is_some(), self.top_p.is_some(), self.top_k.is_some(), self.min_p.is_some()];
        said.contains(&true)
    }

    /// Starts the roles on ports of their own, asks, and stops them.
    pub fn run(self, said: &ArgMatches) -> anyhow::Result<()> {
        let Some(server) = PrivateServer::prepare(self.settings.clone(), &self.source, said)? else {
            return Ok(());
        };
        let history = hub::cache(&self.source.hub)?.join("history");
        server.serve_while(async |at| answer_all(wire::tcp(&at.grpc.to_string())?, &self, history).await)
    }
}

const SYSTEM: &str = "system";
const USER: &str = "user";
const ASSISTANT: &str = "assistant";

/// How often the roles are asked whether they have loaded, and how many times: a large model takes minutes.
const READY_POLL: Duration = Duration::from_millis(20);
const READY_POLLS_MAX: u32 = 30_000;

/// Answers the prompt, or holds a chat where there is none. A history is kept at `history`.
async fn answer_all(channel: Channel, run: &RunCommand, history: PathBuf) -> anyhow::Result<()> {
    let mut client = InferenceClient::new(channel);
    until_ready(&mut client).await?;
    match run.prompt.as_deref() {
        Some("-") => {
            let mut prompt = String::new();
            let read = || std::io::stdin().read_to_string(&mut prompt).map(|_| prompt);
            let prompt = read().context("standard input cannot be read as text")?;
            once(client, Ask::new(run), &prompt).await
        }
        Some(prompt) => once(client, Ask::new(run), prompt).await,
        None => chat(client, Ask::new(run), Lines::open(history)?).await,
    }
}

/// Waits until the model is listed: from then on it can be asked.
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

/// The parts of a request that stay the same from one question to the next.
struct Ask {
    sampling: v1::Sampling,
    messages: Vec<v1::ChatMessage>,
    /// The prompt is completed as it is.
    raw: bool,
}

impl Ask {
    fn new(run: &RunCommand) -> Ask {
        // A card's figures belong together: whoever says one of them says all.
        let card = card_sampling(&run.settings.model.model).filter(|_| !run.says_sampling());
        let sampling = v1::Sampling {
            temperature: run.temperature.or(card.map(|card| card.temperature)),
            top_p: run.top_p.or(card.map(|card| card.top_p)),
            top_k: run.top_k,
            min_p: run.min_p,
            seed: run.settings.router.seed,
            max_tokens: run.max_tokens,
            ..v1::Sampling::default()
        };
        let messages = run.system.iter().map(|text| message(SYSTEM, text)).collect();
        Ask { sampling, messages, raw: run.raw }
    }
}

fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.into(), content: content.into(), ..v1::ChatMessage::default() }
}

async fn once(mut client: InferenceClient<Channel>, mut ask: Ask, prompt: &str) -> anyhow::Result<()> {
    let spoken = answer(&mut client, &mut ask, prompt).await?;
    if std::io::stderr().is_terminal() {
        eprintln!("{}", spoken.summary());
    }
    Ok(())
}

/// Asks for messages until the input ends. The whole conversation is sent each time: its beginning is in the prefix
/// cache.
async fn chat(mut client: InferenceClient<Channel>, mut ask: Ask, mut lines: Lines) -> anyhow::Result<()> {
    let is_terminal = lines.is_terminal();
    let mut verbose = is_terminal;
    if is_terminal {
        eprintln!("/help lists the commands; Ctrl-D leaves.");
    }
    loop {
        // A blocking read. Its thread is abandoned when the process ends.
        let read = move || next_message(&mut lines).map(|message| (message, lines));
        let (message, back) = tokio::task::spawn_blocking(read).await??;
        lines = back;
        let Some(message) = message else { return Ok(()) };
        match said::read(&message) {
            Typed::Leave => return Ok(()),
            Typed::Question(question) => match interruptible(&mut client, &mut ask, &question, is_terminal).await {
                Ok(Some(spoken)) if verbose => eprintln!("{}", spoken.summary()),
                Ok(_) => {}
                Err(error) => eprintln!("{error:#}"),
            },
            Typed::Verbose(to) => verbose = to,
            other => eprint!("{}", ask.change(other)),
        }
    }
}

/// A whole message, or None at the end of the input.
fn next_message(lines: &mut Lines) -> anyhow::Result<Option<String>> {
    let mut message = TypedMessage::default();
    loop {
        let prompt = if message.is_begun() { "... " } else { ">>> " };
        let whole = match lines.next(prompt)? {
            InputLine::Text(line) => message.line(&line),
            InputLine::Dropped if message.is_begun() => {
                message = TypedMessage::default();
                None
            }
            InputLine::Dropped => {
                eprintln!("Ctrl-D or /bye leaves.");
                None
            }
            InputLine::End => match message.end() {
                None => return Ok(None),
                whole => whole,
            },
        };
        if let Some(message) = whole {
            lines.remember(&message);
            return Ok(Some(message));
        }
    }
}

impl Ask {
    /// Carries out a command and returns the text to print.
    fn change(&mut self, said: Typed) -> String {
        match said {
            Typed::Help => return said::HELP.to_owned(),
            Typed::Wrong(why) => return format!("{why}\n"),
            Typed::Show => return self.show(),
            Typed::Clear => self.messages.retain(|message| message.role == SYSTEM),
            Typed::Set(setting) => setting.apply(&mut self.sampling),
            Typed::System(text) => {
                self.messages.retain(|message| message.role != SYSTEM);
                let instructions = Some(text).filter(|text| !text.is_empty());
                self.messages.splice(0..0, instructions.map(|text| message(SYSTEM, &text)));
            }
            Typed::Question(_) | Typed::Leave | Typed::Verbose(_) => {}
        }
        String::new()
    }

    fn show(&self) -> String {
        let v1::Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed, max_tokens, .. } =
            &self.sampling;
        let shown = |name: &str, value: Option<String>| {
            format!("{name:<16} {}\n", value.unwrap_or_else(|| "the model's default".into()))
        };
        let system = self.messages.iter().find(|message| message.role == SYSTEM);
        [
            shown("system", system.map(|message| message.content.clone())),
            shown("temperature", temperature.map(|value| value.to_string())),
            shown("top_k", top_k.map(|value| value.to_string())),
            shown("top_p", top_p.map(|value| value.to_string())),
            shown("min_p", min_p.map(|value| value.to_string())),
            shown("repeat_penalty", repetition_penalty.map(|value| value.to_string())),
            shown("presence_penalty", Some(self.sampling.presence_penalty.to_string())),
            shown("frequency_penalty", Some(self.sampling.frequency_penalty.to_string())),
            shown("seed", seed.map(|value| value.to_string())),
            shown("max_tokens", max_tokens.map(|value| value.to_string())),
            format!("{:<16} {:?}\n", "stop", self.sampling.stop),
            format!("{:<16} {}\n", "messages", self.messages.len()),
        ]
        .concat()
    }
}

/// An answer that Ctrl-C stops on a terminal; None if that happened. The text so far stays in the conversation.
async fn interruptible(
    client: &mut InferenceClient<Channel>,
    ask: &mut Ask,
    question: &str,
    is_terminal: bool,
) -> anyhow::Result<Option<Spoken>> {
    let n_before = ask.messages.len();
    let mut interrupts = is_terminal.then(|| signal(SignalKind::interrupt())).transpose()?;
    let interrupted = async {
        match &mut interrupts {
            Some(interrupts) => interrupts.recv().await,
            None => std::future::pending().await,
        }
    };
    let answered = tokio::select! {
        answered = answer(client, ask, question) => answered.map(Some),
        _ = interrupted => Ok(None),
    };
    if matches!(answered, Ok(None)) {
        show("\n")?;
    }
    let has_answer = ask.messages.last().is_some_and(|last| last.role == ASSISTANT && !last.content.is_empty());
    if answered.is_err() || !has_answer {
        // The conversation goes on without the question.
        ask.messages.truncate(n_before);
    }
    answered
}

/// The figures of an answer.
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

/// Streams one answer to stdout, and adds it to the conversation.
async fn answer(client: &mut InferenceClient<Channel>, ask: &mut Ask, prompt: &str) -> anyhow::Result<Spoken> {
    ask.messages.push(message(USER, prompt));
    let chat = || v1::Chat { messages: ask.messages.clone(), ..v1::Chat::default() };
    let request = v1::GenerateRequest {
        input: Some(if ask.raw { Input::Text(prompt.to_owned()) } else { Input::Chat(chat()) }),
        sampling: Some(ask.sampling.clone()),
        ..v1::GenerateRequest::default()
    };
    let asked = Instant::now();
    let mut replies = match client.generate(request).await {
        Ok(replies) => replies.into_inner(),
        Err(status) => bail!("{}", status.message()),
    };
    ask.messages.push(message(ASSISTANT, ""));
    let mut first_token = None;
    while let Some(reply) = replies.message().await.map_err(|status| anyhow!("{}", status.message()))? {
        match reply.event.context("a reply without an event")? {
            Event::Started(_) | Event::PromptLogprobs(_) => {}
            Event::Delta(delta) => {
                first_token.get_or_insert_with(|| asked.elapsed());
                // The answer alone can be piped on.
                eprint!("{}", delta.reasoning);
                show(&delta.text)?;
                // The text is kept at once, because the answer may be stopped.
                if let Some(said) = ask.messages.last_mut() {
                    said.content.push_str(&delta.text);
                }
            }
            Event::Finished(finished) => {
                show("\n")?;
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
