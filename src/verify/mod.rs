//! `verify` and `replay`: run an answer, or all answers of a record, again on a running server or on a private one, and
//! compare. They use only the HTTP API.

mod answer;
mod compare;
mod past;
pub mod replay;
mod server;

use crate::serve::private::PrivateServer;
use crate::settings::{ConfigSource, ServeSettings};
use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use compare::{Verdict, rerun_and_compare};
use past::PastAnswer;
use server::VerifyClient;
use std::path::Path;
use std::process::ExitCode;
use telemetry::logs;
use tools::out;
use tools::server_trust::ServerTrust;

const URL: &str = "http://127.0.0.1:8000";

#[derive(Args)]
pub struct VerifyCommand {
    /// JSON file with the request and its response, or the id of an answer that was recorded
    #[arg(index = 1, value_name = "FILE|ID")]
    pub answer: String,
    /// Running server to use, if no MODEL is given [default: http://127.0.0.1:8000]
    #[arg(long, env = "LOCKSTEP_URL")]
    pub url: Option<String>,
    #[command(flatten)]
    pub trust: ServerTrust,
    #[command(flatten)]
    pub settings: ServeSettings,
    #[command(flatten)]
    pub source: ConfigSource,
}

/// The exit codes. `INCOMPARABLE` stands for everything that prevents a comparison.
const EQUAL: u8 = 0;
const DIFFERENT: u8 = 1;
const INCOMPARABLE: u8 = 2;

impl VerifyCommand {
    pub fn run(self, matches: &ArgMatches) -> ExitCode {
        let code = match self.verdict(matches) {
            Ok(None) => EQUAL,
            Ok(Some(verdict)) => {
                out::print_last_line(&verdict.to_string());
                if matches!(verdict, Verdict::Equal { .. }) { EQUAL } else { DIFFERENT }
            }
            Err(error) => {
                logs::write_line(&format!("lockstep: cannot be compared: {}", out::error_text(&error)));
                INCOMPARABLE
            }
        };
        code.into()
    }

    /// Returns None if only the settings were to be printed.
    fn verdict(self, matches: &ArgMatches) -> anyhow::Result<Option<Verdict>> {
        let names_model = matches.value_source("model") == Some(ValueSource::CommandLine);
        if names_model && matches.value_source("url") == Some(ValueSource::CommandLine) {
            bail!("either MODEL or --url: they are two servers");
        }
        if !names_model && !self.source.print_config {
            let key = self.settings.router.api_key.clone();
            let server = VerifyClient::from_url(self.url.as_deref().unwrap_or(URL), key).trusting(&self.trust)?;
            let past = self.find_past_answer(Some(&server))?;
            return rerun_and_compare(&past, &server).map(Some);
        }
        let past = self.find_past_answer(None)?;
        let Some(private) = PrivateServer::prepare(self.settings, &self.source, matches)? else { return Ok(None) };
        let verdict = private.serve_while(async |at| {
            let server = VerifyClient::from_url(&format!("http://{}", at.http), None);
            let compare = move || {
                server.wait_until_ready()?;
                // The model may have another name here.
                rerun_and_compare(&past.without_model(), &server)
            };
            tokio::task::spawn_blocking(compare).await.context("the comparison panicked")?
        });
        verdict.map(Some)
    }

    /// Returns the recorded answer: from a file, from a folder of records, or from the server's record.
    fn find_past_answer(&self, server: Option<&VerifyClient>) -> anyhow::Result<PastAnswer> {
        let (id, file) = (&self.answer, Path::new(&self.answer));
        if file.exists() {
            return PastAnswer::read(file);
        }
        if let Some(dir) = &self.settings.router.answers.record {
            let dir_named = || dir.display().to_string();
            let line = router::find_record(dir, id).with_context(dir_named)?;
            let line = line.with_context(|| format!("{} has no record of {id}", dir_named()))?;
            return PastAnswer::parse(&line).with_context(|| format!("the record of {id}"));
        }
        let server =
            server.with_context(|| format!("{id} is not a file; give --record DIR, the folder with its record"))?;
        let record = server.record(id).with_context(|| format!("{id} is not a file"))?;
        PastAnswer::of(&record).with_context(|| format!("the record of {id}"))
    }
}
