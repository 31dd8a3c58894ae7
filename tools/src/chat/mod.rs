//! `run`: one answer to stdout, or a chat. A gRPC client of a server of one model; has no knowledge of how it starts.

mod answer;
mod dialogue;
mod input;
mod progress;
mod quiet;
mod saved;
mod signals;
mod terminal;
mod wrap;

pub use quiet::EchoGuard;

use crate::out;
use answer::{AnswerFigures, answer};
use anyhow::{Context, bail};
use clap::Args;
use dialogue::{ASSISTANT, Dialogue};
use indicatif::{HumanBytes, ProgressBar};
use input::{TypedInput, TypedMessage};
use proto::v1;
use proto::v1::inference_client::InferenceClient;
use quiet::columns;
use rustix::fs::FileType;
use signals::{SignalWatch, Signals};
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::time::Duration;
use terminal::{InputLine, LineReader};
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Channel;

/// How to answer. A command with these options has an argument `prompt`.
#[derive(Args)]
pub struct ChatOptions {
    /// Sampling temperature, 0 to 2; 0 is greedy [default: the model's, or 0.8]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Draw from the most likely tokens that together have this probability [default: the model's, or 0.95]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Draw from this many of the most likely tokens [default: the model's, or 40]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Draw from tokens at least this likely, as a part of the most likely one's probability [default: the model's, or
    /// 0.05]
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
}

/// Returns the prompt with the text of standard input: only that text for `-`, otherwise it follows the prompt.
pub fn with_stdin_text(prompt: &str) -> anyhow::Result<String> {
    let is_all = prompt == "-";
    let mut text = String::new();
    if is_all || is_piped()? {
        std::io::stdin().read_to_string(&mut text).context("standard input cannot be read as text")?;
    }
    Ok(match (is_all, text.is_empty()) {
        (true, _) => text,
        (false, true) => prompt.to_owned(),
        (false, false) => format!("{prompt}\n\n{text}"),
    })
}

/// Whether standard input is a pipe or a file: a terminal or `/dev/null` has nothing to add.
fn is_piped() -> anyhow::Result<bool> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(std::io::stdin())?.st_mode);
    Ok(matches!(kind, FileType::Fifo | FileType::RegularFile))
}

/// The interval and the number of checks whether the roles have loaded: a large model takes minutes.
const READY_POLL: Duration = Duration::from_millis(20);
const READY_POLLS_MAX: u32 = 30_000;
const TICK: Duration = Duration::from_millis(100);

/// Waits until the model is listed, so that it can be used. On a terminal a bar shows that it loads.
async fn wait_until_ready(client: &mut InferenceClient<Channel>, model: ServedModel<'_>) -> anyhow::Result<()> {
    let bar = ProgressBar::new_spinner();
    let ServedModel { name, n_bytes } = model;
    bar.set_message(format!("loading {name} ({})", HumanBytes(n_bytes)));
    bar.enable_steady_tick(TICK);
    for _ in 0..READY_POLLS_MAX {
        let listed = client.list_models(v1::ListModelsRequest {}).await;
        if listed.is_ok_and(|models| !models.get_ref().models.is_empty()) {
            bar.finish_and_clear();
            return Ok(());
        }
        tokio::time::sleep(READY_POLL).await;
    }
    bar.finish_and_clear();
    bail!("the model was not ready in time")
}

/// Prints the answer to this prompt.
pub async fn answer_once(
    channel: Channel,
    model: ServedModel<'_>,
    (options, seed): (&ChatOptions, Option<u64>),
    prompt: &str,
) -> anyhow::Result<()> {
    let mut client = InferenceClient::new(channel);
    wait_until_ready(&mut client, model).await?;
    let spoken = answer(&mut client, &mut Dialogue::new(options, seed), prompt).await?;
    if std::io::stderr().is_terminal() {
        eprintln!("{}", spoken.summary());
    }
    Ok(())
}

/// The model of a server, and its bytes on disk.
#[derive(Clone, Copy)]
pub struct ServedModel<'a> {
    pub name: &'a str,
    pub n_bytes: u64,
}

/// A chat, which may outlive the model that it began with.
pub struct Chat {
    dialogue: Dialogue,
    /// None while a line is read.
    lines: Option<LineReader>,
    chats: PathBuf,
    is_terminal: bool,
    verbose: bool,
    client: Option<InferenceClient<Channel>>,
    /// Suppresses the echo between two reads. The editor then shows the typed text once, when it reads it.
    quiet: Option<EchoGuard>,
    /// Catches signals until the chat catches them itself.
    watch: Option<SignalWatch>,
}

impl Chat {
    /// Opens the terminal. The history and saved chats are in the folder `kept`.
    pub fn open(
        (options, seed): (&ChatOptions, Option<u64>),
        kept: Option<PathBuf>,
        (quiet, watch): (Option<EchoGuard>, Option<SignalWatch>),
    ) -> anyhow::Result<Chat> {
        let lines = LineReader::open(kept.as_ref().map(|kept| kept.join("history")))?;
        let is_terminal = lines.is_terminal();
        let chats = kept.map_or_else(|| PathBuf::from("."), |kept| kept.join("chats"));
        let dialogue = Dialogue::new(options, seed);
        Ok(Chat { dialogue, lines: Some(lines), chats, is_terminal, verbose: is_terminal, client: None, quiet, watch })
    }

    /// Waits for the model; a signal ends that.
    pub async fn wait_for_model(&mut self, channel: Channel, model: ServedModel<'_>) -> anyhow::Result<()> {
        let is_first = self.client.is_none();
        let mut client = InferenceClient::new(channel);
        let mut signals = Signals::open()?;
        self.watch = None;
        tokio::select! {
            ready = wait_until_ready(&mut client, model) => ready?,
            _ = signals.next_signal() => bail!("interrupted while the model was loading"),
        }
        if self.is_terminal && is_first {
            eprintln!("/help lists the commands; Ctrl-D leaves.");
        }
        self.client = Some(client);
        Ok(())
    }

    /// Reads messages and answers them until the input ends. Each request has the whole conversation, whose beginning
    /// is in the prefix cache. Returns the server of another model, made by `server_of`, if the chat changes its model.
    pub async fn converse<S>(
        &mut self,
        model: &str,
        server_of: impl Fn(&str) -> anyhow::Result<S>,
    ) -> anyhow::Result<Option<S>> {
        let mut signals = Signals::open()?;
        loop {
            let message = tokio::select! {
                message = self.next() => message?,
                () = signals.wait_for_termination() => bail!("ended by a signal"),
            };
            let Some(message) = message else { return Ok(None) };
            match input::read(&message) {
                TypedInput::Leave => return Ok(None),
                TypedInput::Question(question) => {
                    tokio::select! {
                        answered = self.answer(&question) => answered?,
                        () = signals.wait_for_termination() => bail!("ended by a signal"),
                    }
                }
                TypedInput::Verbose(to) => self.verbose = to,
                TypedInput::Help => eprint!("{}", wrap::clipped(input::HELP, columns().unwrap_or(usize::MAX))),
                TypedInput::Model(name) => match self.prepare_server(|| server_of(&name)) {
                    Ok(other) => return Ok(Some(other)),
                    Err(error) => print_wrapped(&format!("{}\n", out::error_text(&error))),
                },
                other => print_wrapped(&self.dialogue.execute(other, model, &self.chats)),
            }
        }
    }

    /// Prepares a server for another model. Its files may have to be fetched first, which blocks until a signal ends
    /// it.
    fn prepare_server<S>(&self, prepare: impl FnOnce() -> anyhow::Result<S>) -> anyhow::Result<S> {
        let _watch = self.quiet.as_ref().map(EchoGuard::watch).transpose()?;
        tokio::task::block_in_place(prepare)
    }

    /// Reads a message on a blocking thread, which is abandoned when the process ends.
    async fn next(&mut self) -> anyhow::Result<Option<String>> {
        let mut lines = self.lines.take().context("standard input was already read")?;
        let read = move || next_message(&mut lines).map(|message| (message, lines));
        let (message, lines) = tokio::task::spawn_blocking(read).await??;
        self.lines = Some(lines);
        Ok(message)
    }

    /// Prints an answer with its figures or its error. A failed answer does not end the chat.
    async fn answer(&mut self, question: &str) -> anyhow::Result<()> {
        let client = self.client.as_mut().context("no model is loaded")?;
        match answer_until_interrupt(client, &mut self.dialogue, question, self.is_terminal).await {
            Ok(Some(spoken)) => {
                if self.verbose {
                    eprintln!("{}", spoken.summary());
                }
                if spoken.fills_context {
                    print_wrapped("The context is full: /clear forgets the conversation, /save NAME keeps it first.\n");
                }
            }
            Ok(None) => {}
            Err(error) if error.is::<out::ReaderGone>() => return Err(error),
            Err(error) => {
                print_wrapped(&format!("{}\n", out::error_text(&error)));
                if is_too_long(&error) {
                    print_wrapped("/clear forgets the conversation; /save NAME keeps it first.\n");
                }
            }
        }
        Ok(())
    }
}

/// Prints a message of the chat itself, with whole words on each line.
fn print_wrapped(text: &str) {
    match columns() {
        Some(columns) => eprint!("{}", wrap::LineWrapper::default().push(text, columns)),
        None => eprint!("{text}"),
    }
}

fn is_too_long(error: &anyhow::Error) -> bool {
    let message = error.to_string();
    message.contains("too many for a context") || message.contains("the replica cannot hold the request")
}

/// A whole message, or None at the end of the input.
fn next_message(lines: &mut LineReader) -> anyhow::Result<Option<String>> {
    let mut message = TypedMessage::default();
    loop {
        let prompt = if message.is_begun() { "... " } else { ">>> " };
        let whole = match lines.next(prompt)? {
            InputLine::Text(line) => message.add_line(&line),
            InputLine::Dropped if message.is_begun() => {
                message = TypedMessage::default();
                None
            }
            InputLine::Dropped => {
                eprintln!("Ctrl-D or /bye leaves.");
                None
            }
            InputLine::End => match message.take_incomplete() {
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

/// An answer that Ctrl-C stops on a terminal; None if that happened. The text so far stays in the conversation.
async fn answer_until_interrupt(
    client: &mut InferenceClient<Channel>,
    dialogue: &mut Dialogue,
    question: &str,
    is_terminal: bool,
) -> anyhow::Result<Option<AnswerFigures>> {
    let n_before = dialogue.messages.len();
    let mut interrupts = is_terminal.then(|| signal(SignalKind::interrupt())).transpose()?;
    let interrupted = async {
        match &mut interrupts {
            Some(interrupts) => interrupts.recv().await,
            None => std::future::pending().await,
        }
    };
    let answered = tokio::select! {
        answered = answer(client, dialogue, question) => answered.map(Some),
        _ = interrupted => Ok(None),
    };
    if matches!(answered, Ok(None)) {
        out::print("\n")?;
    }
    let has_answer = dialogue.messages.last().is_some_and(|last| last.role == ASSISTANT && !last.content.is_empty());
    if answered.is_err() || !has_answer {
        // The conversation goes on without the question.
        dialogue.messages.truncate(n_before);
    }
    answered
}
