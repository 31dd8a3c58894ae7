//! How fast a blueprint should be for one sequence, and what limits it. Estimated from a small table of what devices of
//! a class do with a number of threads; shown beside measurements, and used only to decide which of two machines is the
//! faster.

use super::blueprint::{Blueprint, PlacementPolicy, Shard};
use super::machine::{Inventory, Machine, class_of};
use super::roofline::{Link, Links, Roofline, Speed, StageTime, StepWork};
use super::shape::ModelShape;
use super::unplaceable::UnplaceableReason;
use std::collections::BTreeMap;
use std::fmt;
use types::{DeviceClass, DeviceKind};

/// Tokens a second of one sequence, as a range: the table knows classes of machines, not this machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub low: f64,
    pub high: f64,
    pub bottleneck: Bottleneck,
    /// One pass through all stages: reading weights or computing with them, and exchanging between ranks.
    pub work_micros: f64,
    pub exchange_micros: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    MemoryBandwidth,
    Compute,
    Collective,
}

/// The performance of one device of a class, as orders of magnitude.
struct DevicePerformance {
    /// Bytes a second that one thread reads, and that all threads of a host read together.
    thread_bytes: u64,
    host_bytes: u64,
    /// Fused multiply-adds a second, per thread.
    thread_operations: f64,
    /// The time of a step however small the model is, and of each of its layers: planning, drawing, waking threads.
    step_micros: f64,
    layer_micros: f64,
}

/// As one token at a time was measured on two cores each of Zen 3 and Zen 4: 15 to 18 GB/s of packed weights, and 5,800
/// tokens/s where there is next to nothing to read.
const CPU: DevicePerformance = DevicePerformance {
    thread_bytes: 8_000_000_000,
    host_bytes: 40_000_000_000,
    thread_operations: 40e9,
    step_micros: 100.0,
    layer_micros: 15.0,
};
/// A GPU counts as one thread with its own memory. Further costs of its steps are not measured.
const CUDA: DevicePerformance = DevicePerformance {
    thread_bytes: 2_000_000_000_000,
    host_bytes: u64::MAX,
    thread_operations: 100e12,
    step_micros: 0.0,
    layer_micros: 0.0,
};

/// One exchange among ranks of a host, and among hosts.
const EXCHANGE_HOST_MICROS: f64 = 8.0;
const EXCHANGE_NET_MICROS: f64 = 60.0;
/// One exchange among more threads than their host has cores: a waiting thread sleeps, and must be woken.
const EXCHANGE_CROWDED_MICROS: f64 = 50.0;
/// The range around the estimate: what a busy machine gives, and what a better one would.
const BAND: (f64, f64) = (1.0 / 1.5, 1.5);

fn device_performance(device: &DeviceKind) -> DevicePerformance {
    match device.class() {
        DeviceClass::Cuda => CUDA,
        DeviceClass::Cpu | DeviceClass::Sim => CPU,
    }
}

/// Bytes that each machine reads in a second, by the table.
pub(super) fn speeds(machines: &[&Machine]) -> Vec<u64> {
    machines.iter().map(|machine| speed(machine)).collect()
}

fn speed(machine: &Machine) -> u64 {
    let class = device_performance(&machine.device);
    class.thread_bytes.saturating_mul(machine.threads.max(1).into()).min(class.host_bytes)
}

/// How fast the blueprint is on the machines that it names.
pub fn predict(
    inventory: &Inventory,
    shape: &ModelShape,
    policy: &PlacementPolicy,
    blueprint: &Blueprint,
) -> Result<Prediction, UnplaceableReason> {
    let machine = |worker| inventory.iter().find(|machine: &&Machine| machine.worker == worker);
    let machines: Vec<&Machine> = blueprint.shards.iter().filter_map(|shard| machine(shard.worker)).collect();
    if machines.len() < blueprint.shards.len() {
        let (needed, there) = (blueprint.shards.len(), machines.len());
        return Err(UnplaceableReason::TooFew { tp: blueprint.grid.tp, pp: blueprint.grid.pp, needed, there });
    }
    let crowding = crowding(blueprint, &machines);
    let of_ranks = (&rank_speeds(blueprint, &machines, &crowding)[..], &links(blueprint, &crowding)[..]);
    let roofline = Roofline::new(shape, class_of(machines.first().copied()), policy, blueprint, of_ranks);
    let StageTime { memory, compute, work, exchange, .. } = roofline.step(&StepWork::one_row());
    let of = machines.first().map_or(CPU, |machine| device_performance(&machine.device));
    let work = work + of.step_micros + of.layer_micros * f64::from(shape.n_layers);
    let bottleneck = match () {
        () if exchange > work => Bottleneck::Collective,
        () if compute > memory => Bottleneck::Compute,
        () => Bottleneck::MemoryBandwidth,
    };
    let tokens_per_s = 1e6 / (work + exchange).max(0.01);
    let (low, high) = (tokens_per_s * BAND.0, tokens_per_s * BAND.1);
    Ok(Prediction { low, high, bottleneck, work_micros: work, exchange_micros: exchange })
}

/// The speed that is left to each rank beside those that share its cores and its host's memory bandwidth.
fn rank_speeds(blueprint: &Blueprint, machines: &[&Machine], crowding: &[f64]) -> Vec<Speed> {
    let speed = |((machine, bytes_per_s), crowding): ((&&Machine, f64), &f64)| {
        let flops =
            2.0 * device_performance(&machine.device).thread_operations * f64::from(machine.threads.max(1)) / crowding;
        Speed { bytes_per_s: bytes_per_s / crowding, flops, attention_flops: flops }
    };
    machines.iter().zip(shared_speeds(blueprint, machines)).zip(crowding).map(speed).collect()
}

/// For each rank, how many threads of its stage share a core of its host: other stages wait meanwhile.
fn crowding(blueprint: &Blueprint, machines: &[&Machine]) -> Vec<f64> {
    let mut threads: BTreeMap<(u16, &str), u32> = BTreeMap::new();
    for (shard, machine) in blueprint.shards.iter().zip(machines) {
        *threads.entry((shard.place.stage, &shard.host)).or_default() += machine.threads.max(1);
    }
    let of = |(shard, machine): (&Shard, &&Machine)| match machine.cores {
        0 => 1.0,
        cores => (f64::from(threads[&(shard.place.stage, shard.host.as_str())]) / f64::from(cores)).max(1.0),
    };
    blueprint.shards.iter().zip(machines).map(of).collect()
}

/// Ranks of one stage and host read at the same time, through the same memory bus.
fn shared_speeds(blueprint: &Blueprint, machines: &[&Machine]) -> Vec<f64> {
    let alone = speeds(machines);
    let mut demands: BTreeMap<(u16, &str), u64> = BTreeMap::new();
    for (shard, speed) in blueprint.shards.iter().zip(&alone) {
        let sum = demands.entry((shard.place.stage, &shard.host)).or_default();
        *sum = sum.saturating_add(*speed);
    }
    let share = |(shard, speed): (&Shard, &u64)| {
        let there = device_performance(&machines[usize::from(shard.rank.0)].device).host_bytes.max(*speed) as f64;
        let demand = demands[&(shard.place.stage, shard.host.as_str())] as f64;
        *speed as f64 * (there / demand).min(1.0)
    };
    blueprint.shards.iter().zip(&alone).map(share).collect()
}

/// One entry per stage. One row is so small that only the latency counts.
fn links(blueprint: &Blueprint, crowding: &[f64]) -> Vec<Links> {
    let stages: Vec<_> = blueprint.shards.chunks(usize::from(blueprint.grid.tp)).collect();
    let link = |shards: &mut dyn Iterator<Item = &Shard>| {
        let shards: Vec<&Shard> = shards.collect();
        let is_crowded = shards.iter().any(|shard| crowding[usize::from(shard.rank.0)] > 1.0);
        let latency_micros = match shards.iter().all(|shard| shard.host == shards[0].host) {
            false => EXCHANGE_NET_MICROS,
            true if is_crowded => EXCHANGE_CROWDED_MICROS,
            true => EXCHANGE_HOST_MICROS,
        };
        Link { latency_micros, bytes_per_s: f64::INFINITY }
    };
    let of = |(i, stage): (usize, &&[Shard])| {
        let next = stages[(i + 1) % stages.len()];
        Links { within: link(&mut stage.iter()), onward: link(&mut stage.iter().chain(next)) }
    };
    stages.iter().enumerate().map(of).collect()
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Prediction { low, high, bottleneck, .. } = self;
        write!(f, "{low:.0} to {high:.0} tokens/s for one sequence, limited by {bottleneck}")
    }
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bottleneck::MemoryBandwidth => "memory bandwidth",
            Bottleneck::Compute => "compute",
            Bottleneck::Collective => "exchanges between ranks",
        })
    }
}
