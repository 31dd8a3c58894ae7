//! `lockstep bench`: puts load on any server with OpenAI's completions API, and reports how it did. Knows only the
//! server's address, so peers are measured in the same way.

pub(crate) mod lengths;
mod load;
mod report;
mod stream;

use crate::out;
use crate::server_trust::ServerTrust;
use anyhow::{Context, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use lengths::{LengthDistribution, SplitMix64};
use load::{ArrivalPattern, RequestOutcome};
use report::{BenchReport, LoadMachine, RunReport};
use std::path::PathBuf;
use std::time::Duration;
use stream::{BenchClient, BenchRequest};

#[derive(Args)]
pub struct BenchOptions {
    /// URL of the server, without /v1
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Model to request [default: the first that the server lists]
    #[arg(long)]
    pub model: Option<String>,
    /// File with the API key [default: no key]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub trust: ServerTrust,
    /// Number of requests in flight, with one run for each number given
    #[arg(long, value_delimiter = ',', default_value = "1,8,32", conflicts_with = "rate")]
    pub concurrency: Vec<usize>,
    /// Requests per second, as Poisson arrivals, with one run for each rate given
    #[arg(long, value_delimiter = ',')]
    pub rate: Vec<f64>,
    /// Number of requests of each run
    #[arg(long, default_value_t = 64)]
    pub requests: usize,
    /// Number of requests before the first run, which are not measured
    #[arg(long, default_value_t = 2)]
    pub warm_up: usize,
    /// Words of a prompt, about a token each: 128, uniform:64..256, normal:128,32 or lognormal:128,96 (mean, deviation)
    #[arg(long, default_value = "128")]
    pub prompt: LengthDistribution,
    /// Tokens of an answer, written as for --prompt
    #[arg(long, default_value = "64")]
    pub output: LengthDistribution,
    /// Number of words at the beginning that all prompts share
    #[arg(long, default_value_t = 0)]
    pub shared_prefix: usize,
    /// Let answers end at the model's end token, which is ignored by default
    #[arg(long)]
    pub stop_early: bool,
    /// Seconds after which a request counts as failed
    #[arg(long, default_value_t = 600)]
    pub timeout: u64,
    /// Seed of prompts, lengths and arrivals
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// File to write the report to as JSON, besides printing it
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Each open request is a thread of this process.
const OPEN_MAX: usize = 4096;

pub fn run(options: &BenchOptions) -> anyhow::Result<()> {
    let server = server(options)?;
    let mut random = SplitMix64::new(options.seed);
    let prefix = lengths::words(options.shared_prefix, &mut random);
    let warm_up = draw_requests(options, options.warm_up, &prefix, &mut random);
    load::run(&server, &warm_up, &ArrivalPattern::Closed { concurrency: 1 }, &mut random, &|_| {});

    let mut runs = Vec::new();
    for arrivals in arrivals(options)? {
        let requests = draw_requests(options, options.requests, &prefix, &mut random);
        let bar = bar(&arrivals, requests.len());
        let measured = load::run(&server, &requests, &arrivals, &mut random, &|outcome| advance_bar(&bar, outcome));
        bar.finish_and_clear();
        let run = RunReport::of(&arrivals, &measured);
        eprintln!("{}", run.summary());
        runs.push(run);
    }
    let report = BenchReport {
        url: options.url.clone(),
        model: server.model.clone(),
        machine: LoadMachine::here(),
        prompt: options.prompt.to_string(),
        output: options.output.to_string(),
        shared_prefix: options.shared_prefix,
        seed: options.seed,
        runs,
    };
    out::print(&report.to_string())?;
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let n_failed: usize = report.runs.iter().map(|run| run.n_failed).sum();
    ensure!(n_failed == 0, "{n_failed} requests failed");
    Ok(())
}

fn server(options: &BenchOptions) -> anyhow::Result<BenchClient> {
    let key = match &options.api_key_file {
        None => None,
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            Some(text.trim().to_owned())
        }
    };
    let timeout = Duration::from_secs(options.timeout);
    let config = ureq::Agent::config_builder().timeout_global(Some(timeout)).http_status_as_error(false);
    BenchClient::find(&options.url, options.model.as_deref(), key, options.trust.agent(config)?)
}

fn arrivals(options: &BenchOptions) -> anyhow::Result<Vec<ArrivalPattern>> {
    let is_rate = |rate: &f64| rate.is_finite() && *rate > 0.0;
    ensure!(options.rate.iter().all(is_rate), "--rate must be a positive number of requests a second");
    let within = |n: &usize| (1..=OPEN_MAX).contains(n);
    ensure!(options.concurrency.iter().all(within), "--concurrency must be from 1 to {OPEN_MAX}");
    let closed = options.concurrency.iter().map(|&concurrency| ArrivalPattern::Closed { concurrency });
    let open = options.rate.iter().map(|&rate| ArrivalPattern::Open { rate, open_max: OPEN_MAX });
    Ok(if options.rate.is_empty() { closed.collect() } else { open.collect() })
}

fn draw_requests(options: &BenchOptions, n: usize, prefix: &str, random: &mut SplitMix64) -> Vec<BenchRequest> {
    let draw_request = |_| {
        let n_words = options.prompt.draw(random).saturating_sub(options.shared_prefix).max(1);
        let own = lengths::words(n_words, random);
        BenchRequest {
            prompt: if prefix.is_empty() { own } else { format!("{prefix} {own}") },
            tokens_max: options.output.draw(random).max(1),
            stop_early: options.stop_early,
        }
    };
    (0..n).map(draw_request).collect()
}

fn bar(arrivals: &ArrivalPattern, n: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
    let bar = ProgressBar::new(n as u64).with_message(arrivals.to_string());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn advance_bar(bar: &ProgressBar, outcome: &RequestOutcome) {
    if let RequestOutcome::Failed(why) = outcome {
        bar.suspend(|| eprintln!("a request failed: {why}"));
    }
    bar.inc(1);
}
