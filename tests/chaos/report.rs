//! The table of results: how soon a loss was detected, and how long streams stood still. Has no knowledge of processes.

use crate::machine::{load, machine, n_cores, write_result};
use crate::{FAULTS, N_STREAMS};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

const HEAD: &str = "\
| fault | rounds | detected, ms: median (worst) | longest gap of any stream, ms: median (worst) | allowed, ms \
| gaps beyond | stream of the worst gap | running before, after | tokens to replay | drained | resumed by clients \
| refused, retried | failed | equal |
|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---|
";
/// The longest that a stream may stand still, besides the time of a replay.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The most by which a replay may be slower than a prefill of as many tokens.
const REPLAY_FACTOR: f64 = 1.3;

/// The result of one round.
#[derive(Serialize, Deserialize)]
pub struct Row {
    pub fault: String,
    pub found_out: Option<Duration>,
    pub stood_still: Duration,
    /// The kind of the request that stood still for longest.
    pub kind: String,
    pub n_replayed: u64,
    /// Streams that ran when the fault came.
    #[serde(default)]
    pub n_under_way: usize,
    /// The fewest of them at a router.
    #[serde(default)]
    pub n_at_each_router: usize,
    /// Streams that ran when the fault had its whole effect.
    #[serde(default)]
    pub n_across: usize,
    /// Requests that a process waited for before it ended.
    #[serde(default)]
    pub n_drained: u64,
    /// One replica's prefill speed in tokens a second, while the other one has as much to do.
    pub rate: f64,
    pub n_resumed: usize,
    pub n_refused: usize,
    pub took: Duration,
}

impl Row {
    fn allowed(&self) -> Duration {
        PAUSE_MAX + Duration::from_secs_f64(REPLAY_FACTOR * self.n_replayed as f64 / self.rate)
    }
}

pub struct Report {
    model: &'static str,
    /// Rows kept from earlier runs come first.
    rows: Vec<Row>,
    n_earlier: usize,
    kept: Option<PathBuf>,
}

impl Report {
    pub fn new(model: &'static str, kept: Option<PathBuf>) -> Report {
        let text = kept.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        let rows: Vec<Row> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        Report { model, n_earlier: rows.len(), rows, kept }
    }

    /// The rounds of this run in which a stream stood still for longer than allowed.
    fn beyond(&self) -> Vec<String> {
        let of_this_run = self.rows[self.n_earlier..].iter();
        let beyond = of_this_run.filter(|row| row.stood_still > row.allowed());
        beyond.map(|row| format!("{}: {:?} of {:?}", row.fault, row.stood_still, row.allowed())).collect()
    }

    /// Fails if a round exceeded the limits. It depends on the clock, so it is not for a machine that others use.
    pub fn judge(&self) {
        let beyond = self.beyond();
        assert!(beyond.is_empty(), "streams paused for longer than 1 s and a replay:\n  {}", beyond.join("\n  "));
    }

    pub fn add(&mut self, row: Row) {
        let (found_out, gap, took) = (row.found_out, row.stood_still, row.took);
        let (fault, allowed, n, rate) = (&row.fault, row.allowed(), row.n_replayed, row.rate);
        println!(
            "{fault}: {} streams hit, detected {found_out:?}, gap {gap:?} of {allowed:?} ({}), {n} tokens at \
            {rate:.0}, took {took:?}",
            row.n_under_way, row.kind
        );
        if let Some(path) = &self.kept {
            let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
            writeln!(file, "{}", serde_json::to_string(&row).unwrap()).unwrap();
        }
        self.rows.push(row);
    }

    /// Prints to standard output, which the harness shows on demand.
    pub fn print(&self) {
        println!("{}", self.table());
    }

    pub fn write(&self) {
        let rates: Vec<f64> = self.rows.iter().map(|row| row.rate).collect();
        let text = format!(
            "# Faults under load\n\n\
            Made by `make chaos` with {} on {}, {} at its end. Two routers, two replicas of tp 2 x pp 2 and an etcd of \
            three members run as real processes on one machine. One worker and one whole replica are in network \
            namespaces, and the test cuts their links. Each round runs {N_STREAMS} streams (plain, seeded with \
            logprobs, penalised, two choices, by a schema, a call, a thought), and the fault comes after 10 to 60% of \
            their tokens.\n\n\
            *Detected*: from the signal until the log line that names the loss, by that line's own time; for a \
            coordinator, the later of the two routers. *Gap*: the longest time between two tokens of any stream. If a \
            client loses its router, it includes the time until the stream continues at the other one. *Allowed*: \
            1 s + 1.3 x tokens to replay / prefill rate, for each round (the least is shown). The rate is measured \
            before each round: prompts for both replicas at once, by replica ({:.0} to {:.0} tokens a second here). \
            *Running* are the fewest streams that ran when the fault came, and when it had its whole effect. \
            *Tokens to replay* (the most is shown): those that coordinators report as replayed, and those already sent \
            on streams that continued at another replica. *Drained* (the most): requests that \
            a process waited for before it ended. A round in which the fault hit no stream is repeated, and ends the \
            run if it never does. *Failed* and *equal* are asserted: a stream that differs \
            from the undisturbed one ends the run.\n\n\
            All processes share the {} cores of the machine: other programs make every time longer, and a replay \
            shares the cores with the replica that continues.\n\n{}",
            self.model,
            machine(),
            load(),
            least(&rates),
            most(&rates),
            n_cores(),
            self.table()
        );
        write_result(if self.model == "smollm2" { "chaos.md" } else { "chaos_tiny.md" }, &text);
    }

    fn table(&self) -> String {
        let mut text = HEAD.to_owned();
        let is_there = |name: &&str| self.rows.iter().any(|row| row.fault == *name);
        for name in FAULTS.iter().map(|fault| fault.name).filter(is_there) {
            let of: Vec<&Row> = self.rows.iter().filter(|row| row.fault == name).collect();
            let n_beyond = of.iter().filter(|row| row.stood_still > row.allowed()).count();
            let found_out = of.iter().filter_map(|row| row.found_out).collect();
            let gaps = of.iter().map(|row| row.stood_still).collect();
            let allowed = of.iter().map(|row| row.allowed().as_millis()).min().unwrap_or_default();
            let n_resumed: usize = of.iter().map(|row| row.n_resumed).sum();
            let n_refused: usize = of.iter().map(|row| row.n_refused).sum();
            let worst = of.iter().max_by_key(|row| row.stood_still).map_or("-", |row| &row.kind);
            let n_replayed = of.iter().map(|row| row.n_replayed).max().unwrap_or_default();
            let n_drained = of.iter().map(|row| row.n_drained).max().unwrap_or_default();
            let n_running = of.iter().map(|row| row.n_under_way).min().unwrap_or_default();
            let n_across = of.iter().map(|row| row.n_across).min().unwrap_or_default();
            let (found_out, gaps) = (spread(found_out), spread(gaps));
            let n = of.len();
            writeln!(
                text,
                "| {name} | {n} | {found_out} | {gaps} | {allowed} | {n_beyond} | {worst} | {n_running}, {n_across} \
                | {n_replayed} | {n_drained} | {n_resumed} | {n_refused} | 0 | 100% |"
            )
            .unwrap();
        }
        text
    }
}

fn spread(mut times: Vec<Duration>) -> String {
    times.sort();
    match times.last() {
        Some(worst) => format!("{} ({})", times[times.len() / 2].as_millis(), worst.as_millis()),
        None => "-".into(),
    }
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn most(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
fn row(millis: u64, n_replayed: u64) -> Row {
    Row {
        fault: "worker killed".into(),
        found_out: None,
        stood_still: Duration::from_millis(millis),
        kind: "plain".into(),
        n_replayed,
        n_under_way: 1,
        n_at_each_router: 0,
        n_across: 0,
        n_drained: 0,
        rate: 1000.0,
        n_resumed: 0,
        n_refused: 0,
        took: Duration::ZERO,
    }
}

#[test]
fn a_fault_that_hits_no_stream_is_found() {
    let detected = Row { found_out: Some(Duration::from_millis(9)), ..row(900, 0) };
    let hits = FAULTS.iter().filter(|fault| (fault.has_hit)(&detected));
    let counted: Vec<&str> = hits.map(|fault| fault.name).collect();
    assert_eq!(counted, ["nothing"]);
}

#[test]
fn a_gap_beyond_what_is_allowed_is_found() {
    let check = |n_earlier: usize, rows: Vec<Row>, n_beyond: usize| {
        let report = Report { model: "tiny", rows, n_earlier, kept: None };
        assert_eq!(report.beyond().len(), n_beyond, "{:?}", report.beyond());
    };
    check(0, vec![row(1000, 0), row(2300, 1000)], 0);
    check(0, vec![row(1001, 0), row(2301, 1000), row(5, 0)], 2);
    // Rows of an earlier run were judged by that run.
    check(1, vec![row(9000, 0), row(9, 0)], 0);
}

#[test]
fn a_stream_is_under_way_between_its_first_token_and_its_last() {
    let check = |n_received: &[usize], n: usize| {
        assert_eq!(crate::client::n_under_way(n_received, &[10, 10]), n, "{n_received:?}")
    };
    check(&[0, 0], 0);
    check(&[10, 10], 0);
    check(&[0, 10], 0);
    check(&[1, 9], 2);
    check(&[10, 5], 1);
}
