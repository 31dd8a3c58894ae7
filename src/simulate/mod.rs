//! `lockstep simulate`: how a cluster of named GPUs would serve a load, simulated on this machine within a minute. The
//! router's pick, the placement and the planner of steps are the real ones; ranks are a roofline, and time is virtual.

mod cluster;
mod front;
mod hardware;
mod measure;
mod report;
#[cfg(test)]
mod tests;
mod traffic;

use crate::bench::lengths::LengthDistribution;
use crate::known_models::{SimulatedModel, WeightFormat};
use crate::out;
use crate::settings::hub::HubSettings;
use crate::settings::{PickChoice, words};
use anyhow::{Context, ensure};
use clap::Args;
use cluster::{SimOutcome, SimSetup, SimulatedCluster, Slo};
use coordinator::{Blueprint, Limits, Machine, PlacementPolicy, Roofline, WorkerId};
use hardware::{Efficiency, GPUS_PER_NODE, GpuSpec};
use measure::MeasurementWindow;
use report::SimulationReport;
use std::path::PathBuf;
use traffic::{Nanos, RandomTraffic, Traffic, nanos};
use types::{Activations, DeviceClass, Grid, KvDtype, PolicyDigest};

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
    /// Which replica gets a request; requests with the same prefix are a session
    #[arg(long, value_enum, default_value = "prefix")]
    pub policy: PickChoice,
    /// Goal for the time to the first token, in milliseconds
    #[arg(long, default_value_t = 1000.0, value_name = "MS")]
    pub slo_ttft: f64,
    /// Goal for the mean time between tokens of a request, in milliseconds
    #[arg(long, default_value_t = 50.0, value_name = "MS")]
    pub slo_itl: f64,
    /// Price of a GPU in dollars per hour [default: a typical one of 2025]
    #[arg(long, value_name = "DOLLARS")]
    pub price_per_gpu_hour: Option<f64>,
    /// Fraction of a GPU's memory bandwidth that kernels reach
    #[arg(long, default_value_t = 0.75, value_name = "PART")]
    pub bandwidth_efficiency: f64,
    /// Fraction of a GPU's dense FLOP/s that kernels reach
    #[arg(long, default_value_t = 0.55, value_name = "PART")]
    pub compute_efficiency: f64,
    /// Microseconds of overhead per step and stage, for launches and sampling
    #[arg(long, default_value_t = 100.0, value_name = "MICROS")]
    pub overhead: f64,
    /// Seed of arrivals and lengths
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub hub: HubSettings,
}

/// KV types that can be simulated.
const KV_DTYPES: &[KvDtype] = &[KvDtype::Bf16, KvDtype::Fp8];

/// More replicas are untested, and would not fit this machine's memory.
const REPLICAS_MAX: usize = 4096;

pub fn run(options: &SimulateOptions) -> anyhow::Result<()> {
    let report = simulate(options, |at, until| {
        if !options.json && at % nanos(5.0) == 0 {
            eprintln!("{:.0} of {:.0} virtual seconds", at as f64 / 1e9, until as f64 / 1e9);
        }
    })?;
    match options.json {
        true => out::print_line(&serde_json::to_string_pretty(&report)?),
        false => out::print(&report.to_string()),
    }
}

fn simulate(options: &SimulateOptions, progress: impl Fn(Nanos, Nanos)) -> anyhow::Result<SimulationReport> {
    check(options)?;
    let model = SimulatedModel::find(&options.model, options.weights, &options.hub)?;
    let laid_out = PlacedReplica::new(options, &model)?;
    let (traffic, window) = traffic(options)?;
    let until = window.until;
    let outcome = laid_out.run(options, traffic, window, |at| progress(at, until))?;
    Ok(SimulationReport::new(options, &model, &laid_out, window, &outcome))
}

fn check(options: &SimulateOptions) -> anyhow::Result<()> {
    let is_part = |part: f64| part > 0.0 && part <= 1.0;
    let within = |n: f64, max: f64| n.is_finite() && (0.0..=max).contains(&n);
    ensure!((1..=REPLICAS_MAX).contains(&options.replicas), "--replicas must be from 1 to {REPLICAS_MAX}");
    ensure!(options.rate > 0.0 && within(options.rate, 1e6), "--rate must be a positive number of requests a second");
    ensure!(
        options.duration > 0.0 && within(options.duration, 86_400.0),
        "--duration must be a number of seconds, at most a day"
    );
    ensure!(within(options.warm_up, 86_400.0), "--warm-up must be a number of seconds, at most a day");
    ensure!(within(options.prefix_share, 1.0), "--prefix-share must be from 0 to 1");
    ensure!(options.prefixes > 0, "--prefixes must be at least 1");
    ensure!(
        within(options.slo_ttft, 1e9) && within(options.slo_itl, 1e9),
        "--slo-ttft and --slo-itl must be numbers of milliseconds"
    );
    ensure!(within(options.overhead, 1e9), "--overhead must be a number of microseconds");
    ensure!(
        options.price_per_gpu_hour.is_none_or(|price| within(price, 1e6)),
        "--price-per-gpu-hour must be a number of dollars"
    );
    let parts = [options.memory_utilization, options.bandwidth_efficiency, options.compute_efficiency];
    ensure!(parts.into_iter().all(is_part), "--memory-utilization and both efficiencies must be above 0 and at most 1");
    Ok(())
}

fn traffic(options: &SimulateOptions) -> anyhow::Result<(Traffic, MeasurementWindow)> {
    let from = nanos(options.warm_up);
    if let Some(path) = &options.trace {
        let (traffic, last) = Traffic::trace(path)?;
        ensure!(from <= last, "the trace ends before the warm-up does: give --warm-up 0");
        return Ok((traffic, MeasurementWindow { from, until: last + 1 }));
    }
    let until = from + nanos(options.duration);
    let (prefix_share, n_prefixes) = (options.prefix_share, options.prefixes);
    let crowd = RandomTraffic {
        rate: options.rate,
        until,
        prompt: options.prompt,
        output: options.output,
        prefix_share,
        n_prefixes,
    };
    Ok((Traffic::random_traffic(crowd, options.seed), MeasurementWindow { from, until }))
}

/// A replica placed on its GPUs.
struct PlacedReplica {
    blueprint: Blueprint,
    config: coordinator::Config,
    roofline: Roofline,
}

impl PlacedReplica {
    fn new(options: &SimulateOptions, model: &SimulatedModel) -> anyhow::Result<PlacedReplica> {
        let gpu = &options.gpu;
        let machines = machines(options);
        let lay_out = |policy: &PlacementPolicy| coordinator::plan(&machines, &model.shape, policy, None);
        // First with hardly any KV cache, to compute how much memory the weights leave.
        let mut policy = policy(options, KV_LEAST);
        let lean = lay_out(&PlacementPolicy { context: None, ..policy.clone() })?;
        let weights = lean.shards.iter().map(|shard| shard.weight_bytes).max().unwrap_or(0);
        let usable = (gpu.memory_bytes as f64 * options.memory_utilization) as u64;
        let left = usable.checked_sub(weights).filter(|left| *left >= KV_LEAST);
        policy.kv_memory = Some(left.with_context(|| {
            let gigabytes = |n: u64| n as f64 / 1e9;
            let (weights, usable) = (gigabytes(weights), gigabytes(usable));
            format!("{weights:.1} GB of weights leave no room for KV in {usable:.1} GB of a {}: more ranks", gpu.name)
        })?);
        let blueprint = lay_out(&policy)?;
        let n_ranks = usize::from(blueprint.grid.n_ranks());
        let efficiency = Efficiency { bandwidth: options.bandwidth_efficiency, compute: options.compute_efficiency };
        let speeds = vec![gpu.speed(efficiency, model.is_fp8); n_ranks];
        let links = gpu.links(options.tp, options.pp);
        let roofline = Roofline::new(&model.shape, DeviceClass::Cuda, &policy, &blueprint, (&speeds, &links));
        Ok(PlacedReplica { blueprint, config: config(options, model, policy), roofline })
    }

    fn run(
        &self,
        options: &SimulateOptions,
        traffic: Traffic,
        window: MeasurementWindow,
        progress: impl FnMut(Nanos),
    ) -> anyhow::Result<SimOutcome> {
        let setup = SimSetup {
            n_replicas: options.replicas,
            policy: options.policy.into(),
            planner: self.config.scheduler(&self.blueprint, PolicyDigest::default()),
            roofline: self.roofline.clone(),
            overhead: nanos(options.overhead / 1e6),
            window,
            slo: Slo { ttft: nanos(options.slo_ttft / 1e3), itl: nanos(options.slo_itl / 1e3) },
        };
        Ok(SimulatedCluster::new(setup, traffic)?.run(progress))
    }
}

/// The least KV memory. With less a cache is useless.
const KV_LEAST: u64 = 256 << 20;

/// Returns the GPUs of one replica, on nodes of eight.
fn machines(options: &SimulateOptions) -> Vec<Machine> {
    let machine = |rank: u32| Machine {
        worker: WorkerId(rank.into()),
        host: format!("node-{}", rank / u32::from(GPUS_PER_NODE)),
        device: DeviceClass::Cuda.into(),
        memory_bytes: options.gpu.memory_bytes,
        threads: 1,
        cores: 0,
    };
    (0..u32::from(options.tp) * u32::from(options.pp)).map(machine).collect()
}

fn policy(options: &SimulateOptions, kv_memory: u64) -> PlacementPolicy {
    PlacementPolicy {
        grid: Grid { tp: options.tp, pp: options.pp, ep: 1 },
        activations: Activations::Bf16,
        kv_dtype: options.kv_dtype,
        kv_memory: Some(kv_memory),
        memory_permille: None,
        state_cache: None,
        context: options.context,
        running_max: options.max_running,
        slice_max: options.max_batch_tokens,
    }
}

/// Returns the configuration of such a replica's coordinator.
fn config(options: &SimulateOptions, model: &SimulatedModel, policy: PlacementPolicy) -> coordinator::Config {
    coordinator::Config {
        replica: String::new(),
        model: model.name.clone(),
        model_path: PathBuf::new(),
        shape: model.shape.clone(),
        policy,
        policy_digest: None,
        prefix_cache: true,
        zero_kv: false,
        salt: [0; 16],
        mesh_seed: [0; 32],
        speaks: proto::ProtocolRange::default(),
        limits: Limits {
            waiting_max: options.max_waiting,
            batch_tokens_max: options.max_batch_tokens,
            chunk_tokens_max: options.max_batch_tokens,
            ..Limits::default()
        },
        waits: coordinator::Timings::default(),
    }
}
