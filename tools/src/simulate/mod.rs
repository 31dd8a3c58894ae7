//! `lockstep simulate`: how a cluster of named GPUs would serve a load, simulated on this machine within a minute. The
//! router's pick, the placement and the planner of steps are the real ones; ranks are a roofline, and time is virtual.

mod cluster;
mod front;
mod hardware;
mod measure;
mod options;
mod report;
#[cfg(test)]
mod tests;
mod traffic;

pub use options::SimulateOptions;

use crate::known_models::SimulatedModel;
use crate::out;
use anyhow::Context;
use checkpoint::catalogue::ModelSources;
use cluster::{SimOutcome, SimSetup, SimulatedCluster, Slo};
use coordinator::{Blueprint, Limits, Machine, PlacementPolicy, Roofline, WorkerId};
use hardware::{Efficiency, GPUS_PER_NODE};
use measure::MeasurementWindow;
use options::ReplicaOptions;
use report::SimulationReport;
use std::path::PathBuf;
use traffic::{Nanos, Traffic, nanos};
use types::{Activations, DeviceClass, Grid, PolicyDigest};

/// Simulates, and prints the report. Local models are looked for in `sources`.
pub fn run(options: &SimulateOptions, sources: impl FnOnce() -> anyhow::Result<ModelSources>) -> anyhow::Result<()> {
    let report = simulate(options, sources, |at, until| {
        if !options.json && at % nanos(5.0) == 0 {
            eprintln!("{:.0} of {:.0} virtual seconds", at as f64 / 1e9, until as f64 / 1e9);
        }
    })?;
    match options.json {
        true => out::print_line(&serde_json::to_string_pretty(&report)?),
        false => out::print(&report.to_string()),
    }
}

fn simulate(
    options: &SimulateOptions,
    sources: impl FnOnce() -> anyhow::Result<ModelSources>,
    progress: impl Fn(Nanos, Nanos),
) -> anyhow::Result<SimulationReport> {
    options.check()?;
    let model = SimulatedModel::find(&options.model, options.replica.weights, sources)?;
    let laid_out = PlacedReplica::new(options, &model)?;
    let (traffic, window) = options.load.traffic(options.seed)?;
    let until = window.until;
    let outcome = laid_out.run(options, traffic, window, |at| progress(at, until))?;
    Ok(SimulationReport::new(options, &model, &laid_out, window, &outcome))
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
        let mut policy = policy(&options.replica, KV_LEAST);
        let lean = lay_out(&PlacementPolicy { context: None, ..policy.clone() })?;
        let weights = lean.shards.iter().map(|shard| shard.weight_bytes).max().unwrap_or(0);
        let usable = (gpu.memory_bytes as f64 * options.replica.memory_utilization) as u64;
        let left = usable.checked_sub(weights).filter(|left| *left >= KV_LEAST);
        policy.kv_memory = Some(left.with_context(|| {
            let gigabytes = |n: u64| n as f64 / 1e9;
            let (weights, usable) = (gigabytes(weights), gigabytes(usable));
            format!("{weights:.1} GB of weights leave no room for KV in {usable:.1} GB of a {}: more ranks", gpu.name)
        })?);
        let blueprint = lay_out(&policy)?;
        let n_ranks = usize::from(blueprint.grid.n_ranks());
        let efficiency =
            Efficiency { bandwidth: options.kernels.bandwidth_efficiency, compute: options.kernels.compute_efficiency };
        let speeds = vec![gpu.speed(efficiency, model.is_fp8); n_ranks];
        let links = gpu.links(options.replica.tp, options.replica.pp);
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
            overhead: nanos(options.kernels.overhead / 1e6),
            window,
            slo: Slo { ttft: nanos(options.goals.slo_ttft / 1e3), itl: nanos(options.goals.slo_itl / 1e3) },
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
    (0..u32::from(options.replica.tp) * u32::from(options.replica.pp)).map(machine).collect()
}

fn policy(replica: &ReplicaOptions, kv_memory: u64) -> PlacementPolicy {
    PlacementPolicy {
        grid: Grid { tp: replica.tp, pp: replica.pp },
        activations: Activations::Bf16,
        kv_dtype: replica.kv_dtype,
        kv_memory: Some(kv_memory),
        memory_permille: None,
        state_cache: None,
        context: replica.context,
        running_max: replica.max_running,
        slice_max: replica.max_batch_tokens,
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
            waiting_max: options.replica.max_waiting,
            batch_tokens_max: options.replica.max_batch_tokens,
            chunk_tokens_max: options.replica.max_batch_tokens,
            ..Limits::default()
        },
        waits: coordinator::Timings::default(),
    }
}
