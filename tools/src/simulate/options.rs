//! The options of `lockstep simulate`, in the order of its help text.

use super::hardware::{self, GpuSpec};
use super::measure::MeasurementWindow;
use super::traffic::{RandomTraffic, Traffic, nanos};
use crate::bench::lengths::LengthDistribution;
use crate::known_models::WeightFormat;
use crate::pick::PickChoice;
use crate::words;
use anyhow::ensure;
use clap::Args;
use std::path::PathBuf;
use types::KvDtype;

#[derive(Args, Clone)]
pub struct SimulateOptions {
    /// Name of a model (llama-3.1-70b, qwen3-32b, mixtral-8x7b, ..), a config.json, or a model on this machine
    #[arg(long, default_value = "llama-3.1-8b")]
    pub model: String,
    /// GPU: h100, h200, b200, a100, a100-40gb, h20, l40s, l4 or a10
    #[arg(long, default_value = "h100", value_parser = hardware::find)]
    pub gpu: GpuSpec,
    /// Data parallel size: number of replicas
    #[arg(long, default_value_t = 1)]
    pub replicas: usize,
    #[command(flatten)]
    pub replica: ReplicaOptions,
    #[command(flatten)]
    pub load: LoadOptions,
    /// Which replica gets a request; requests with the same prefix are a session
    #[arg(long, value_enum, default_value = "prefix")]
    pub policy: PickChoice,
    #[command(flatten)]
    pub goals: GoalOptions,
    /// Price of a GPU in dollars per hour [default: a typical one of 2025]
    #[arg(long, value_name = "DOLLARS")]
    pub price_per_gpu_hour: Option<f64>,
    #[command(flatten)]
    pub kernels: KernelOptions,
    /// Seed of arrivals and lengths
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How each replica is laid out, and its limits.
#[derive(Args, Clone)]
pub struct ReplicaOptions {
    /// Tensor parallel size: number of ranks that share each layer
    #[arg(long, default_value_t = 1)]
    pub tp: u16,
    /// Pipeline parallel size: number of stages, each with its own run of layers
    #[arg(long, default_value_t = 1)]
    pub pp: u16,
    /// Format of the weights [default: the file's; bf16 for a name or a config.json]
    #[arg(long)]
    pub weights: Option<WeightFormat>,
    /// Type of the KV cache
    #[arg(long, default_value = "bf16", value_parser = words::parser(KV_DTYPES, KvDtype::name))]
    pub kv_dtype: KvDtype,
    /// Context length [default: the model's, or as much of it as memory holds]
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<u32>,
    /// Fraction of each GPU's memory for weights and KV cache
    #[arg(long, default_value_t = 0.9, value_name = "PART")]
    pub memory_utilization: f64,
    /// Maximum tokens of one step
    #[arg(long, default_value_t = 2048, value_name = "TOKENS")]
    pub max_batch_tokens: u32,
    /// Maximum number of requests that run at once, per replica
    #[arg(long, default_value_t = 256, value_name = "REQUESTS")]
    pub max_running: u32,
    /// Maximum number of requests that wait, per replica; more are refused
    #[arg(long, default_value_t = 1024, value_name = "REQUESTS")]
    pub max_waiting: u32,
}

/// The requests, and how long they are measured.
#[derive(Args, Clone)]
pub struct LoadOptions {
    /// Requests per second for all replicas together, as Poisson arrivals
    #[arg(long, default_value_t = 1.0)]
    pub rate: f64,
    /// Length of the measurement in seconds
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS")]
    pub duration: f64,
    /// Seconds of the same load before the measurement
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    pub warm_up: f64,
    /// Tokens of a prompt: 1024, uniform:64..256, normal:128,32 or lognormal:1024,800 (mean, deviation)
    #[arg(long, default_value = "1024")]
    pub prompt: LengthDistribution,
    /// Tokens of an answer, written as for --prompt
    #[arg(long, default_value = "256")]
    pub output: LengthDistribution,
    /// Fraction of each prompt that is a shared prefix
    #[arg(long, default_value_t = 0.0, value_name = "PART")]
    pub prefix_share: f64,
    /// Number of different shared prefixes, all equally likely
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub prefixes: u64,
    /// File of recorded requests to replay in place of random ones, as lines of JSON
    ///
    /// A line is {"at": SECONDS, "prompt": TOKENS, "output": TOKENS}. For a prompt with a shared prefix it has also
    /// "prefix": NUMBER and "prefix_tokens": TOKENS.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rate", "prompt", "output", "prefix_share", "duration"])]
    pub trace: Option<PathBuf>,
}

/// What a request must reach to count as good.
#[derive(Args, Clone)]
pub struct GoalOptions {
    /// Goal for the time to the first token, in milliseconds
    #[arg(long, default_value_t = 1000.0, value_name = "MS")]
    pub slo_ttft: f64,
    /// Goal for the mean time between tokens of a request, in milliseconds
    #[arg(long, default_value_t = 50.0, value_name = "MS")]
    pub slo_itl: f64,
}

/// How close steps come to what the hardware can do.
#[derive(Args, Clone)]
pub struct KernelOptions {
    /// Fraction of a GPU's memory bandwidth that kernels reach
    #[arg(long, default_value_t = 0.75, value_name = "PART")]
    pub bandwidth_efficiency: f64,
    /// Fraction of a GPU's dense FLOP/s that kernels reach
    #[arg(long, default_value_t = 0.55, value_name = "PART")]
    pub compute_efficiency: f64,
    /// Microseconds of overhead per step and stage, for launches and sampling
    #[arg(long, default_value_t = 100.0, value_name = "MICROS")]
    pub overhead: f64,
}

/// KV types that can be simulated.
const KV_DTYPES: &[KvDtype] = &[KvDtype::Bf16, KvDtype::Fp8];

/// More replicas are untested, and would not fit this machine's memory.
const REPLICAS_MAX: usize = 4096;

impl SimulateOptions {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!((1..=REPLICAS_MAX).contains(&self.replicas), "--replicas must be from 1 to {REPLICAS_MAX}");
        self.load.check()?;
        self.goals.check()?;
        ensure!(is_within(self.kernels.overhead, 1e9), "--overhead must be a number of microseconds");
        ensure!(
            self.price_per_gpu_hour.is_none_or(|price| is_within(price, 1e6)),
            "--price-per-gpu-hour must be a number of dollars"
        );
        let KernelOptions { bandwidth_efficiency, compute_efficiency, .. } = self.kernels;
        let is_part = |part: f64| part > 0.0 && part <= 1.0;
        ensure!(
            [self.replica.memory_utilization, bandwidth_efficiency, compute_efficiency].into_iter().all(is_part),
            "--memory-utilization and both efficiencies must be above 0 and at most 1"
        );
        Ok(())
    }
}

impl LoadOptions {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rate > 0.0 && is_within(self.rate, 1e6), "--rate must be a positive number of requests a second");
        ensure!(
            self.duration > 0.0 && is_within(self.duration, 86_400.0),
            "--duration must be a number of seconds, at most a day"
        );
        ensure!(is_within(self.warm_up, 86_400.0), "--warm-up must be a number of seconds, at most a day");
        ensure!(is_within(self.prefix_share, 1.0), "--prefix-share must be from 0 to 1");
        ensure!(self.prefixes > 0, "--prefixes must be at least 1");
        Ok(())
    }

    /// Returns the requests, and the time in which they are measured.
    pub(super) fn traffic(&self, seed: u64) -> anyhow::Result<(Traffic, MeasurementWindow)> {
        let from = nanos(self.warm_up);
        if let Some(path) = &self.trace {
            let (traffic, last) = Traffic::trace(path)?;
            ensure!(from <= last, "the trace ends before the warm-up does: give --warm-up 0");
            return Ok((traffic, MeasurementWindow { from, until: last + 1 }));
        }
        let until = from + nanos(self.duration);
        let crowd = RandomTraffic {
            rate: self.rate,
            until,
            prompt: self.prompt,
            output: self.output,
            prefix_share: self.prefix_share,
            n_prefixes: self.prefixes,
        };
        Ok((Traffic::random_traffic(crowd, seed), MeasurementWindow { from, until }))
    }
}

impl GoalOptions {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            is_within(self.slo_ttft, 1e9) && is_within(self.slo_itl, 1e9),
            "--slo-ttft and --slo-itl must be numbers of milliseconds"
        );
        Ok(())
    }
}

fn is_within(n: f64, max: f64) -> bool {
    n.is_finite() && (0.0..=max).contains(&n)
}
