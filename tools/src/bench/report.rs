//! The figures of a run: percentiles, a table for people and JSON for programs.

use super::load::{ArrivalPattern, LoadResult, RequestOutcome};
use super::stream::RequestTiming;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

#[derive(Serialize)]
pub struct BenchReport {
    pub url: String,
    pub model: String,
    pub machine: LoadMachine,
    pub prompt: String,
    pub output: String,
    pub shared_prefix: usize,
    pub seed: u64,
    pub runs: Vec<RunReport>,
}

/// The machine that made the load; on loopback it also served it.
#[derive(Serialize)]
pub struct LoadMachine {
    pub cpu: String,
    pub cores: usize,
    pub kernel: String,
}

#[derive(Serialize)]
pub struct RunReport {
    pub load: String,
    pub n_answered: usize,
    pub n_failed: usize,
    pub seconds: f64,
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Time to the first text.
    pub ttft_ms: DurationStats,
    /// Time between one piece of text and the next.
    pub itl_ms: DurationStats,
    /// Time per token after the first, one mean per request.
    pub per_token_ms: DurationStats,
    pub e2e_ms: DurationStats,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DurationStats {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl DurationStats {
    fn of(durations: impl Iterator<Item = Duration>) -> DurationStats {
        let mut sorted: Vec<f64> = durations.map(|d| d.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let Some(max) = sorted.last().copied() else { return DurationStats::default() };
        // The smallest value that `percent` of a hundred do not exceed.
        let at = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        DurationStats { mean, p50: at(50), p90: at(90), p99: at(99), max }
    }
}

impl RunReport {
    pub fn of(arrivals: &ArrivalPattern, measured: &LoadResult) -> RunReport {
        let answered: Vec<&RequestTiming> = measured
            .outcomes
            .iter()
            .filter_map(|outcome| match outcome {
                RequestOutcome::Answered(timed) => Some(timed),
                RequestOutcome::Failed(_) => None,
            })
            .collect();
        let sum = |of: fn(&RequestTiming) -> u64| answered.iter().map(|timed| of(timed)).sum::<u64>();
        let seconds = measured.took.as_secs_f64();
        let output_tokens = sum(|timed| timed.output_tokens);
        RunReport {
            load: arrivals.to_string(),
            n_answered: answered.len(),
            n_failed: measured.outcomes.len() - answered.len(),
            seconds,
            requests_per_s: answered.len() as f64 / seconds,
            output_tokens_per_s: output_tokens as f64 / seconds,
            prompt_tokens: sum(|timed| timed.prompt_tokens),
            cached_tokens: sum(|timed| timed.cached_tokens),
            output_tokens,
            ttft_ms: DurationStats::of(answered.iter().map(|timed| timed.time_to_first_token())),
            itl_ms: DurationStats::of(answered.iter().flat_map(|timed| timed.gaps())),
            per_token_ms: DurationStats::of(answered.iter().filter_map(|timed| timed.per_token())),
            e2e_ms: DurationStats::of(answered.iter().map(|timed| timed.whole)),
        }
    }

    pub fn summary(&self) -> String {
        let RunReport { load, n_answered, n_failed, output_tokens_per_s, .. } = self;
        format!("{load}: {n_answered} answered, {n_failed} failed, {output_tokens_per_s:.1} tokens/s")
    }
}

impl LoadMachine {
    pub fn here() -> LoadMachine {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let (cpu_info, kernel) = (read("/proc/cpuinfo"), read("/proc/sys/kernel/osrelease"));
        let model = cpu_info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        LoadMachine {
            cpu: model.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: kernel.trim().to_owned(),
        }
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BenchReport { model, url, machine, prompt, output, .. } = self;
        writeln!(f, "{model} at {url} · prompts of {prompt} words, answers of {output} tokens")?;
        writeln!(f, "{} · {} cores · kernel {}", machine.cpu, machine.cores, machine.kernel)?;
        let head = ["tokens/s", "requests/s", "failed", "ttft p50", "p99", "itl p50", "p99", "e2e p50", "p99 ms"];
        write!(f, "{:<12}", "load")?;
        head.iter().try_for_each(|cell| write!(f, "{cell:>11}"))?;
        writeln!(f)?;
        for run in &self.runs {
            let RunReport { ttft_ms: ttft, itl_ms: itl, e2e_ms: e2e, .. } = run;
            write!(f, "{:<12}{:>11.1}{:>11.2}", run.load, run.output_tokens_per_s, run.requests_per_s)?;
            write!(f, "{:>11}", run.n_failed)?;
            let times = [ttft.p50, ttft.p99, itl.p50, itl.p99, e2e.p50, e2e.p99];
            times.iter().try_for_each(|ms| write!(f, "{ms:>11.1}"))?;
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let spread = DurationStats::of((1..=200).map(Duration::from_millis));
        assert_eq!((spread.p50, spread.p90, spread.p99, spread.max), (100.0, 180.0, 198.0, 200.0));
        let one = DurationStats::of(std::iter::once(Duration::from_millis(3)));
        assert_eq!((one.p50, one.p99, one.mean), (3.0, 3.0, 3.0));
        assert_eq!(DurationStats::of(std::iter::empty()), DurationStats::default());
    }

    #[test]
    fn a_run_counts_what_failed_apart() {
        let timed =
            RequestTiming { pieces: vec![Duration::from_millis(5)], output_tokens: 4, ..RequestTiming::default() };
        let outcomes = vec![RequestOutcome::Answered(timed), RequestOutcome::Failed("no".into())];
        let run = RunReport::of(
            &ArrivalPattern::Closed { concurrency: 2 },
            &LoadResult { outcomes, took: Duration::from_secs(2) },
        );
        assert_eq!((run.n_answered, run.n_failed, run.output_tokens), (1, 1, 4));
        assert!((run.output_tokens_per_s - 2.0).abs() < 1e-9);
    }
}
