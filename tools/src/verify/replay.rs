//! `replay`: runs all answers of a record again, and counts how many are equal.

use super::compare::{Difference, Verdict, rerun_and_compare};
use super::past::PastAnswer;
use super::server::VerifyClient;
use super::{DIFFERENT, EQUAL, INCOMPARABLE, URL};
use crate::out;
use crate::server_trust::ServerTrust;
use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use serde_json::Value;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use telemetry::logs;

#[derive(Args)]
pub struct ReplayOptions {
    /// Folder of a record, as --record keeps it
    #[arg(index = 1, value_name = "DIR")]
    pub dir: PathBuf,
    /// Running server to use, if no MODEL is given [default: http://127.0.0.1:8000]
    #[arg(long, env = "LOCKSTEP_URL")]
    pub url: Option<String>,
    /// Requests under way at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub concurrency: usize,
    /// Order in which requests are sent
    #[arg(long, value_enum, default_value = "recorded")]
    pub order: ReplayOrder,
    /// Send requests at the times of the record, this many times as fast, such as 1 or 10 [default: without a pause]
    #[arg(long, value_name = "FACTOR")]
    pub speed: Option<f64>,
    #[command(flatten)]
    pub trust: ServerTrust,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReplayOrder {
    /// As in the record
    Recorded,
    /// In reverse
    Reversed,
    /// Shuffled, the same way each time
    Shuffled,
}

/// A line of a record, and the time of its request.
pub struct RecordedLine {
    began_ms: u64,
    text: String,
}

/// The counts of all outcomes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    n_equal: u64,
    n_different: u64,
    n_other_digest: u64,
    n_incomparable: u64,
    n_tokens: u64,
}

/// Prints the result and returns the exit code. There are no counts if only the settings were to be printed.
pub fn exit_code(counts: anyhow::Result<Option<ReplayCounts>>) -> ExitCode {
    match counts {
        Ok(None) => EQUAL.into(),
        Ok(Some(counts)) => {
            out::print_last_line(&counts.to_string());
            counts.code().into()
        }
        Err(error) => {
            logs::write_line(&format!("lockstep: cannot be replayed: {}", out::error_text(&error)));
            INCOMPARABLE.into()
        }
    }
}

impl ReplayOptions {
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(self.concurrency > 0, "--concurrency must be at least 1");
        let is_factor = |speed: &f64| *speed > 0.0 && speed.is_finite();
        ensure!(self.speed.as_ref().is_none_or(is_factor), "--speed must be a number above 0");
        ensure!(
            self.speed.is_none() || self.order == ReplayOrder::Recorded,
            "--speed uses the times of the record: leave out --order"
        );
        Ok(())
    }

    /// Returns the recorded answers in the order in which they are sent.
    pub fn lines(&self) -> anyhow::Result<Vec<RecordedLine>> {
        Ok(in_order(read(&self.dir)?, self.order))
    }

    /// Runs the answers again on the server at `--url`.
    pub fn counts_of_running(&self, lines: Vec<RecordedLine>, key: Option<String>) -> anyhow::Result<ReplayCounts> {
        let server = VerifyClient::from_url(self.url.as_deref().unwrap_or(URL), key).trusting(&self.trust)?;
        Ok(self.replay_all(lines, &server, false))
    }

    /// Runs the answers again on a server of one model, when it is ready. The model may have another name there.
    pub fn counts_of_private(&self, lines: Vec<RecordedLine>, address: SocketAddr) -> anyhow::Result<ReplayCounts> {
        let server = VerifyClient::ready_at(address)?;
        Ok(self.replay_all(lines, &server, true))
    }

    /// Keeps so many requests in flight, and prints each difference when it is found.
    fn replay_all(&self, lines: Vec<RecordedLine>, server: &VerifyClient, any_name: bool) -> ReplayCounts {
        let first_ms = lines.first().map_or(0, |of| of.began_ms);
        let pace = ReplayPace { speed: self.speed, began: Instant::now(), first_ms };
        let n_threads = self.concurrency.min(lines.len());
        let (lines, counts) = (Mutex::new(lines.into_iter()), Mutex::new(ReplayCounts::default()));
        std::thread::scope(|scope| {
            for _ in 0..n_threads {
                scope.spawn(|| {
                    loop {
                        let next = lines.lock().unwrap_or_else(PoisonError::into_inner).next();
                        let Some(line) = next else { break };
                        pace.wait(&line);
                        let (id, verdict) = rerun(&line, server, any_name);
                        counts.lock().unwrap_or_else(PoisonError::into_inner).add(&id, verdict);
                    }
                });
            }
        });
        counts.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(dir: &Path) -> anyhow::Result<Vec<RecordedLine>> {
    let named = || dir.display().to_string();
    let mut lines = Vec::new();
    for line in router::recorded_lines(dir).with_context(named)? {
        let text = line.with_context(named)?;
        let value: Value = serde_json::from_str(&text).with_context(|| format!("{}: a line is not JSON", named()))?;
        lines.push(RecordedLine { began_ms: value["began_ms"].as_u64().unwrap_or(0), text });
    }
    ensure!(!lines.is_empty(), "{} has no recorded answer", named());
    // The file has them in the order of their ends.
    lines.sort_by_key(|line| line.began_ms);
    Ok(lines)
}

fn in_order(mut lines: Vec<RecordedLine>, order: ReplayOrder) -> Vec<RecordedLine> {
    match order {
        ReplayOrder::Recorded => {}
        ReplayOrder::Reversed => lines.reverse(),
        ReplayOrder::Shuffled => {
            let scattered = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut keyed: Vec<(u64, RecordedLine)> =
                lines.into_iter().enumerate().map(|(i, of)| (scattered(i), of)).collect();
            keyed.sort_by_key(|(key, _)| *key);
            lines = keyed.into_iter().map(|(_, of)| of).collect();
        }
    }
    lines
}

/// The time at which each request is sent.
struct ReplayPace {
    speed: Option<f64>,
    began: Instant,
    first_ms: u64,
}

impl ReplayPace {
    fn wait(&self, line: &RecordedLine) {
        let Some(speed) = self.speed else { return };
        let after = (line.began_ms.saturating_sub(self.first_ms)) as f64 / 1000.0 / speed;
        let due = Duration::try_from_secs_f64(after).unwrap_or(Duration::MAX);
        std::thread::sleep(due.saturating_sub(self.began.elapsed()));
    }
}

fn rerun(line: &RecordedLine, server: &VerifyClient, any_name: bool) -> (String, anyhow::Result<Verdict>) {
    let value: Value = serde_json::from_str(&line.text).unwrap_or_default();
    let id = value["id"].as_str().unwrap_or("without an id").to_owned();
    let past = PastAnswer::parse(&line.text).map(|past| if any_name { past.without_model() } else { past });
    (id, past.and_then(|past| rerun_and_compare(&past, server)))
}

impl ReplayCounts {
    fn add(&mut self, id: &str, verdict: anyhow::Result<Verdict>) {
        match verdict {
            Ok(Verdict::Equal { n_tokens, .. }) => {
                self.n_equal += 1;
                self.n_tokens += n_tokens;
            }
            Ok(Verdict::Different(Difference::Digest { .. })) => self.n_other_digest += 1,
            Ok(Verdict::Different(difference)) => {
                self.n_different += 1;
                out::print_last_line(&format!("{id}: different: {difference}"));
            }
            Err(error) => {
                self.n_incomparable += 1;
                out::print_last_line(&format!("{id}: cannot be compared: {error:#}"));
            }
        }
    }

    fn code(&self) -> u8 {
        match (self.n_different, self.n_equal) {
            (0, 0) => INCOMPARABLE,
            (0, _) => EQUAL,
            _ => DIFFERENT,
        }
    }
}

impl fmt::Display for ReplayCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReplayCounts { n_equal, n_different, n_other_digest, n_incomparable, n_tokens } = self;
        write!(f, "{n_equal} equal ({n_tokens} tokens), {n_different} different, ")?;
        write!(f, "{n_other_digest} of another digest, {n_incomparable} not comparable")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(n: u64) -> Vec<RecordedLine> {
        (0..n).map(|began_ms| RecordedLine { began_ms, text: String::new() }).collect()
    }

    #[test]
    fn each_order_has_each_line_once() {
        let times = |order| in_order(lines(50), order).iter().map(|of| of.began_ms).collect::<Vec<_>>();
        let recorded = times(ReplayOrder::Recorded);
        let (mut reversed, mut shuffled) = (times(ReplayOrder::Reversed), times(ReplayOrder::Shuffled));
        assert!(shuffled != recorded && shuffled != reversed && shuffled == times(ReplayOrder::Shuffled));
        reversed.reverse();
        shuffled.sort_unstable();
        assert_eq!((&reversed, &shuffled), (&recorded, &recorded));
    }

    #[test]
    fn one_difference_is_a_difference_and_nothing_compared_is_no_success() {
        let counts = |n_equal, n_different, n_other_digest| ReplayCounts {
            n_equal,
            n_different,
            n_other_digest,
            ..ReplayCounts::default()
        };
        let codes = [counts(9, 0, 1), counts(9, 1, 0), counts(0, 1, 9), counts(0, 0, 9), counts(0, 0, 0)];
        assert_eq!(codes.map(|of| of.code()), [EQUAL, DIFFERENT, DIFFERENT, INCOMPARABLE, INCOMPARABLE]);
        let expected = "9 equal (0 tokens), 1 different, 0 of another digest, 0 not comparable";
        assert_eq!(counts(9, 1, 0).to_string(), expected);
    }
}
