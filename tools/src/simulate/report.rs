//! The report of a simulated run: a page for people, JSON for programs. Has no knowledge of the simulation itself.

use super::PlacedReplica;
use super::cluster::SimOutcome;
use super::measure::{MeasurementWindow, Percentiles};
use super::options::{GoalOptions, KernelOptions, LoadOptions, SimulateOptions};
use crate::known_models::SimulatedModel;
use crate::pick::PickChoice;
use clap::ValueEnum;
use serde::Serialize;
use std::fmt;

#[derive(Serialize)]
pub struct SimulationReport {
    /// The assumptions of the run about the GPU.
    pub assumes: String,
    pub model: String,
    pub weights: String,
    pub kv_dtype: &'static str,
    pub gpu: &'static str,
    pub replicas: usize,
    pub tp: u16,
    pub pp: u16,
    pub gpus: usize,
    pub load: String,
    pub policy: PickChoice,
    pub seed: u64,
    pub seconds: f64,
    /// The bytes of weights on the GPU that has most of them.
    pub weight_bytes: u64,
    /// Tokens of the largest pool, per replica; and the context that it serves.
    pub kv_tokens: u64,
    pub context: u32,
    pub requests: RequestTotals,
    pub ttft_ms: Percentiles,
    pub itl_ms: Percentiles,
    pub e2e_ms: Percentiles,
    pub throughput: Throughput,
    pub goodput: Goodput,
    pub utilisation: Utilisation,
    pub cost: Cost,
    pub steps: u64,
    pub events: u64,
}

#[derive(Serialize)]
pub struct RequestTotals {
    /// All requests; some of them arrived in the window.
    pub arrived: u64,
    pub counted: u64,
    pub refused: u64,
    pub preemptions: u64,
    /// Open requests at a time, on average.
    pub open: f64,
}

/// Rates per second.
#[derive(Serialize)]
pub struct Throughput {
    pub output_tokens: f64,
    pub prompt_tokens: f64,
    /// The part of prompt tokens that were in caches.
    pub cached: f64,
}

#[derive(Serialize)]
pub struct Goodput {
    pub slo_ttft_ms: f64,
    pub slo_itl_ms: f64,
    /// The part of requests that arrived in the window and met both limits; rejected ones do not count as met.
    pub share: f64,
    /// Such requests per second.
    pub requests: f64,
    pub tokens: f64,
}

/// Parts between 0 and 1, except the last two.
#[derive(Serialize)]
pub struct Utilisation {
    pub busy: f64,
    /// The part of the data sheet's bandwidth, idle time included.
    pub bandwidth: f64,
    pub flops: f64,
    pub kv_mean: f64,
    pub kv_max: f64,
    /// Running requests per replica.
    pub running: f64,
    pub waiting: f64,
}

#[derive(Serialize)]
pub struct Cost {
    pub per_gpu_hour: f64,
    pub per_hour: f64,
    /// Cost of output tokens at the measured rate; None without output.
    pub per_million_tokens: Option<f64>,
    /// Cost of tokens within the SLO.
    pub per_million_good_tokens: Option<f64>,
}

impl SimulationReport {
    pub fn new(
        options: &SimulateOptions,
        model: &SimulatedModel,
        laid_out: &PlacedReplica,
        window: MeasurementWindow,
        outcome: &SimOutcome,
    ) -> SimulationReport {
        let n_ranks = usize::from(options.replica.tp) * usize::from(options.replica.pp);
        let blueprint = &laid_out.blueprint;
        let largest = blueprint.pools.iter().map(coordinator::PoolSize::n_tokens).max();
        SimulationReport {
            assumes: assumptions(options),
            model: model.name.clone(),
            weights: model.weights.clone(),
            kv_dtype: options.replica.kv_dtype.name(),
            gpu: options.gpu.name,
            replicas: options.replicas,
            tp: options.replica.tp,
            pp: options.replica.pp,
            gpus: n_ranks * options.replicas,
            load: load(&options.load),
            policy: options.policy,
            seed: options.seed,
            seconds: window.seconds(),
            weight_bytes: blueprint.shards.iter().map(|shard| shard.weight_bytes).max().unwrap_or(0),
            kv_tokens: largest.unwrap_or(0),
            context: blueprint.context,
            requests: RequestTotals {
                arrived: outcome.n_arrived,
                counted: outcome.n_counted,
                refused: outcome.n_refused,
                preemptions: outcome.n_preemptions,
                open: outcome.open.mean(&window),
            },
            ttft_ms: outcome.ttft.percentiles(),
            itl_ms: outcome.itl.percentiles(),
            e2e_ms: outcome.e2e.percentiles(),
            throughput: throughput(window, outcome),
            goodput: goodput(&options.goals, window, outcome),
            utilisation: utilisation(options, n_ranks, window, outcome),
            cost: cost(options, n_ranks, window, outcome),
            steps: outcome.n_steps,
            events: outcome.n_events,
        }
    }
}

/// Returns the figures of the data sheet, and the parts of them that the run assumes to be reached.
fn assumptions(options: &SimulateOptions) -> String {
    let (gpu, KernelOptions { bandwidth_efficiency, compute_efficiency, .. }) = (options.gpu, &options.kernels);
    format!(
        "assumed, not measured: a {} has {:.2} TB/s and {:.0} bf16 TFLOP/s by its data sheet, of which it reaches {} \
         and {}",
        gpu.name,
        gpu.bytes_per_s / 1e12,
        gpu.bf16_flops / 1e12,
        percent(*bandwidth_efficiency),
        percent(*compute_efficiency),
    )
}

fn load(options: &LoadOptions) -> String {
    let LoadOptions { rate, prompt, output, prefix_share, prefixes, trace, .. } = options;
    if let Some(path) = trace {
        return format!("the trace {}", path.display());
    }
    let shared = if *prefix_share > 0.0 { format!(", {prefix_share} of it one of {prefixes}") } else { String::new() };
    format!("{rate} requests/s, prompt {prompt}{shared}, output {output}")
}

fn throughput(window: MeasurementWindow, outcome: &SimOutcome) -> Throughput {
    let seconds = window.seconds();
    Throughput {
        output_tokens: outcome.tokens.output as f64 / seconds,
        prompt_tokens: outcome.tokens.prompt as f64 / seconds,
        cached: outcome.tokens.cached as f64 / outcome.tokens.prompt.max(1) as f64,
    }
}

fn goodput(goals: &GoalOptions, window: MeasurementWindow, outcome: &SimOutcome) -> Goodput {
    Goodput {
        slo_ttft_ms: goals.slo_ttft,
        slo_itl_ms: goals.slo_itl,
        share: outcome.n_good as f64 / outcome.n_counted.max(1) as f64,
        requests: outcome.n_good as f64 / window.seconds(),
        tokens: outcome.tokens.good as f64 / window.seconds(),
    }
}

fn utilisation(
    options: &SimulateOptions,
    n_ranks: usize,
    window: MeasurementWindow,
    outcome: &SimOutcome,
) -> Utilisation {
    let n_stages = (usize::from(options.replica.pp) * options.replicas) as f64;
    let gpu_seconds = (n_ranks * options.replicas) as f64 * window.seconds();
    Utilisation {
        busy: outcome.work.busy as f64 / 1e9 / (n_stages * window.seconds()),
        bandwidth: outcome.work.bytes_read / (options.gpu.bytes_per_s * gpu_seconds),
        flops: outcome.work.operations / (options.gpu.bf16_flops * gpu_seconds),
        kv_mean: outcome.samples.cache_used.mean(),
        kv_max: outcome.samples.cache_used.max,
        running: outcome.samples.running.mean(),
        waiting: outcome.samples.waiting.mean(),
    }
}

fn cost(options: &SimulateOptions, n_ranks: usize, window: MeasurementWindow, outcome: &SimOutcome) -> Cost {
    let per_gpu_hour = options.price_per_gpu_hour.unwrap_or(options.gpu.dollars_per_hour);
    let per_hour = per_gpu_hour * (n_ranks * options.replicas) as f64;
    let spent = per_hour * window.seconds() / 3600.0;
    let per_million = |n_tokens: u64| (n_tokens > 0).then(|| spent / (n_tokens as f64 / 1e6));
    Cost {
        per_gpu_hour,
        per_hour,
        per_million_tokens: per_million(outcome.tokens.output),
        per_million_good_tokens: per_million(outcome.tokens.good),
    }
}

impl fmt::Display for SimulationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SimulationReport { model, weights, kv_dtype, gpu, replicas, tp, pp, gpus, load, seed, .. } = self;
        writeln!(f, "{}", self.assumes)?;
        writeln!(
            f,
            "{model}, {weights} weights and {kv_dtype} KV, on {replicas} x {gpu} tp {tp} pp {pp}: {gpus} GPUs"
        )?;
        let (weights, tokens) = (self.weight_bytes as f64 / 1e9, self.kv_tokens);
        writeln!(
            f,
            "{weights:.1} GB of weights on a GPU, {tokens} tokens of KV in a replica, context {}",
            self.context
        )?;
        let policy = self.policy.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        writeln!(f, "{load}; policy {policy}; {} s, seed {seed}\n", self.seconds)?;
        self.write_times(f)?;
        self.write_rates(f)?;
        self.write_machines(f)
    }
}

impl SimulationReport {
    fn write_times(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16}{:>10}{:>10}{:>10}{:>10}", "milliseconds", "p50", "p90", "p99", "mean")?;
        let rows = [("first token", self.ttft_ms), ("between tokens", self.itl_ms), ("end to end", self.e2e_ms)];
        for (what, Percentiles { mean, p50, p90, p99 }) in rows {
            writeln!(f, "{what:<16}{p50:>10.1}{p90:>10.1}{p99:>10.1}{mean:>10.1}")?;
        }
        writeln!(f)
    }

    fn write_rates(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Goodput { slo_ttft_ms, slo_itl_ms, share, requests, tokens } = &self.goodput;
        let share = percent(*share);
        write!(
            f,
            "goodput         {share} of requests within {slo_ttft_ms} ms to the first token and {slo_itl_ms} ms "
        )?;
        writeln!(f, "between: {requests:.1} requests/s, {tokens:.0} tokens/s")?;
        let Throughput { output_tokens, prompt_tokens, cached } = &self.throughput;
        write!(f, "throughput      {output_tokens:.0} output tokens/s, {prompt_tokens:.0} prompt tokens/s, ")?;
        writeln!(f, "of which caches had {}", percent(*cached))?;
        let RequestTotals { arrived, counted, refused, preemptions, open } = &self.requests;
        write!(
            f,
            "requests        {arrived}, of which {counted} counted; {refused} refused, {preemptions} preempted, "
        )?;
        writeln!(f, "{open:.1} open on average")
    }

    fn write_machines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Utilisation { busy, bandwidth, flops, kv_mean, kv_max, running, waiting } = &self.utilisation;
        let [busy, bandwidth, flops] = [busy, bandwidth, flops].map(|part| percent(*part));
        writeln!(f, "utilisation     GPUs busy {busy}; of their bandwidth {bandwidth}, of their bf16 FLOP/s {flops}")?;
        let (mean, max) = (percent(*kv_mean), percent(*kv_max));
        write!(f, "a replica       runs {running:.1} requests, {waiting:.1} wait; its KV cache is used to {mean}, ")?;
        writeln!(f, "at most to {max}")?;
        let Cost { per_gpu_hour, per_hour, per_million_tokens, per_million_good_tokens } = &self.cost;
        let dollars = |price: &Option<f64>| price.map_or("-".to_owned(), |price| format!("${price:.3}"));
        let (all, good) = (dollars(per_million_tokens), dollars(per_million_good_tokens));
        write!(
            f,
            "cost            ${per_hour:.0} an hour at ${per_gpu_hour} a GPU: {all} for a million output tokens, "
        )?;
        writeln!(f, "{good} for a million within the SLO")
    }
}

fn percent(part: f64) -> String {
    format!("{:.1}%", 100.0 * part)
}
