//! `verify`: runs an answer again, on a running server or on one of its own, and compares. Knows the HTTP API, and no
//! role.

mod answer;
mod compare;
mod record;
mod server;

use crate::serve::private::PrivateServer;
use crate::server_trust::ServerTrust;
use crate::settings::{ConfigSource, ServeSettings};
use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use compare::{Verdict, compared};
use record::PastAnswer;
use server::AnsweringServer;
use std::path::PathBuf;
use std::process::ExitCode;
use telemetry::logs;

const URL: &str = "http://127.0.0.1:8000";

#[derive(Args)]
pub struct VerifyCommand {
    /// JSON file with the request and its response
    #[arg(index = 1, value_name = "FILE")]
    pub file: PathBuf,
    /// Running server to ask, if no MODEL is given [default: http://127.0.0.1:8000]
    #[arg(long, env = "LOCKSTEP_URL")]
    pub url: Option<String>,
    #[command(flatten)]
    pub trust: ServerTrust,
    #[command(flatten)]
    pub settings: ServeSettings,
    #[command(flatten)]
    pub source: ConfigSource,
}

/// How the process ends. Whatever keeps two answers from being compared is `INCOMPARABLE`.
const EQUAL: u8 = 0;
const DIFFERENT: u8 = 1;
const INCOMPARABLE: u8 = 2;

impl VerifyCommand {
    pub fn run(self, said: &ArgMatches) -> ExitCode {
        let code = match self.verdict(said) {
            Ok(None) => EQUAL,
            Ok(Some(verdict)) => {
                println!("{verdict}");
                if matches!(verdict, Verdict::Equal { .. }) { EQUAL } else { DIFFERENT }
            }
            Err(error) => {
                logs::say(&format!("lockstep: cannot be compared: {error:#}"));
                INCOMPARABLE
            }
        };
        code.into()
    }

    /// None if only the settings were to be printed.
    fn verdict(self, said: &ArgMatches) -> anyhow::Result<Option<Verdict>> {
        let past = PastAnswer::read(&self.file)?;
        let names_model = said.value_source("model") == Some(ValueSource::CommandLine);
        if names_model && said.value_source("url") == Some(ValueSource::CommandLine) {
            bail!("either MODEL or --url: they are two servers");
        }
        if !names_model && !self.source.print_config {
            let server = AnsweringServer::at(self.url.as_deref().unwrap_or(URL), self.settings.router.api_key)
                .trusting(&self.trust)?;
            return compared(&past, &server).map(Some);
        }
        let Some(private) = PrivateServer::prepare(self.settings, &self.source, said)? else { return Ok(None) };
        let verdict = private.serve_while(async |at| {
            let server = AnsweringServer::at(&format!("http://{}", at.http), None);
            let compare = move || {
                server.until_ready()?;
                // The model may have another name here.
                compared(&past.of_any_name(), &server)
            };
            tokio::task::spawn_blocking(compare).await.context("the comparison panicked")?
        });
        verdict.map(Some)
    }
}
