//! `verify` and `replay`: on a running server, or on a private one for a model that the command line names.

use crate::serve::private::PrivateServer;
use crate::settings::{ConfigSource, ServeSettings};
use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use std::process::ExitCode;
use tokio::task::spawn_blocking;
use tools::verify::replay::{self, ReplayCounts, ReplayOptions};
use tools::verify::{self, Verdict, VerifyOptions, verdict_of_private};

#[derive(Args)]
pub struct VerifyCommand {
    #[command(flatten)]
    pub options: VerifyOptions,
    #[command(flatten)]
    pub settings: ServeSettings,
    #[command(flatten)]
    pub source: ConfigSource,
}

#[derive(Args)]
pub struct ReplayCommand {
    #[command(flatten)]
    pub options: ReplayOptions,
    #[command(flatten)]
    pub settings: ServeSettings,
    #[command(flatten)]
    pub source: ConfigSource,
}

/// Whether the command line names a model, which a private server loads, and no running server.
fn names_model(matches: &ArgMatches) -> anyhow::Result<bool> {
    let is_given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
    if is_given("model") && is_given("url") {
        bail!("either MODEL or --url: they are two servers");
    }
    Ok(is_given("model"))
}

impl VerifyCommand {
    pub fn run(self, matches: &ArgMatches) -> ExitCode {
        verify::exit_code(self.verdict(matches))
    }

    /// Returns None if only the settings were to be printed.
    fn verdict(self, matches: &ArgMatches) -> anyhow::Result<Option<Verdict>> {
        let VerifyCommand { options, settings, source } = self;
        let (key, records) = (settings.router.api_key.clone(), settings.router.answers.record.clone());
        if !names_model(matches)? && !source.print_config {
            return options.verdict_of_running(key, records.as_deref()).map(Some);
        }
        let past = options.past_answer(records.as_deref())?;
        let Some(private) = PrivateServer::prepare(settings, &source, matches)? else { return Ok(None) };
        let verdict = private.serve_while(async |at| {
            spawn_blocking(move || verdict_of_private(past, at.http)).await.context("the comparison panicked")?
        });
        verdict.map(Some)
    }
}

impl ReplayCommand {
    pub fn run(self, matches: &ArgMatches) -> ExitCode {
        replay::exit_code(self.counts(matches))
    }

    /// Returns None if only the settings were to be printed.
    fn counts(self, matches: &ArgMatches) -> anyhow::Result<Option<ReplayCounts>> {
        let ReplayCommand { options, settings, source } = self;
        options.check()?;
        let names_model = names_model(matches)?;
        let lines = options.lines()?;
        if !names_model && !source.print_config {
            return options.counts_of_running(lines, settings.router.api_key).map(Some);
        }
        let Some(private) = PrivateServer::prepare(settings, &source, matches)? else { return Ok(None) };
        let counts = private.serve_while(async |at| {
            spawn_blocking(move || options.counts_of_private(lines, at.http)).await.context("the replay panicked")?
        });
        counts.map(Some)
    }
}
