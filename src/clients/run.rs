//! `run`: a chat or one answer, with a private server.

use crate::serve::private::PrivateServer;
use crate::settings::{ConfigSource, ServeSettings, hub};
use clap::{ArgMatches, Args};
use tools::chat::{Chat, ChatOptions, EchoGuard, answer_once, with_stdin_text};
use wire::tcp;

#[derive(Args)]
pub struct RunCommand {
    #[command(flatten)]
    pub options: ChatOptions,
    #[command(flatten)]
    pub settings: ServeSettings,
    /// Prompt, or - to read it from standard input; without it a chat begins. Piped input is added to it
    #[arg(index = 2)]
    pub prompt: Vec<String>,
    #[command(flatten)]
    pub source: ConfigSource,
}

impl RunCommand {
    /// Starts the roles on ports of their own, runs the client, and stops the roles. Starts again if the chat changes
    /// its model.
    pub fn run(self, matches: &ArgMatches) -> anyhow::Result<()> {
        let RunCommand { options, settings, prompt, source } = self;
        // The model of a chat may have to be fetched first.
        let quiet = if prompt.is_empty() { EchoGuard::begin() } else { None };
        let watch = quiet.as_ref().map(EchoGuard::watch).transpose()?;
        let sampling = (&options, settings.router.seed);
        let Some(mut server) = PrivateServer::prepare(settings, &source, matches)? else { return Ok(()) };
        if !prompt.is_empty() {
            let prompt = with_stdin_text(&prompt.join(" "))?;
            return server.serve_while(async |at| {
                answer_once(tcp(&at.grpc.to_string())?, server.model(), sampling, &prompt).await
            });
        }
        // Without a home folder there is no history, and chats are saved in the working folder.
        let mut chat = Chat::open(sampling, hub::cache(&source.hub).ok(), (quiet, watch))?;
        loop {
            let other = server.serve_while(async |at| {
                chat.wait_for_model(tcp(&at.grpc.to_string())?, server.model()).await?;
                chat.converse(server.model().name, |name| server.with_other_model(name, &source)).await
            })?;
            let Some(other) = other else { return Ok(()) };
            server = other;
        }
    }
}
