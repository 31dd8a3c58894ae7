//! How fast a blueprint should be for one sequence, and what holds it back. An estimate from a small table of what
//! devices of a class do with so many threads; shown beside what is measured, and used to decide nothing but which of
//! two machines is the faster.

use super::shape::Measure;
use super::{Blueprint, Machine, ModelShape, Policy, Why, class_of};
use std::collections::BTreeMap;
use std::fmt;

/// Tokens a second of one sequence, as a band: a table knows a class of machines and not this one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub low: f64,
    pub high: f64,
    pub bottleneck: Bottleneck,
    /// Of one pass through all stages: reading weights or computing with them, and exchanging between ranks.
    pub work_micros: f64,
    pub exchange_micros: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    MemoryBandwidth,
    Compute,
    Collective,
}

/// What one device of a class does, as orders of magnitude.
struct Class {
    /// Bytes a second that a thread reads, and that all threads of a host read together.
    thread_bytes: u64,
    host_bytes: u64,
    /// Multiplications with an addition a second, per thread.
    thread_operations: f64,
}

const CPU: Class = Class { thread_bytes: 10_000_000_000, host_bytes: 40_000_000_000, thread_operations: 40e9 };
/// A device is one thread of its own memory.
const CUDA: Class = Class { thread_bytes: 2_000_000_000_000, host_bytes: u64::MAX, thread_operations: 100e12 };

/// One exchange among ranks of a host, and among hosts.
const EXCHANGE_HOST_MICROS: f64 = 8.0;
const EXCHANGE_NET_MICROS: f64 = 60.0;
/// Among more threads than their host has cores: who waits sleeps, and must be woken.
const EXCHANGE_CROWDED_MICROS: f64 = 50.0;
/// Of the estimate, from what a busy machine gives to what a better one would.
const BAND: (f64, f64) = (0.5, 1.4);

fn class(device: &str) -> Class {
    match device {
        "cuda" => CUDA,
        _ => CPU,
    }
}

/// Bytes that each machine reads in a second, as the table has it.
pub(super) fn speeds(machines: &[&Machine]) -> Vec<u64> {
    machines.iter().map(|machine| speed(machine)).collect()
}

fn speed(machine: &Machine) -> u64 {
    let class = class(&machine.device);
    class.thread_bytes.saturating_mul(machine.threads.max(1).into()).min(class.host_bytes)
}

/// How fast the blueprint is on the machines that it names.
pub fn predict(
    inventory: &super::Inventory,
    shape: &ModelShape,
    policy: &Policy,
    blueprint: &Blueprint,
) -> Result<Prediction, Why> {
    let machine = |worker| inventory.iter().find(|machine: &&Machine| machine.worker == worker);
    let machines: Vec<&Machine> = blueprint.shards.iter().filter_map(|shard| machine(shard.worker)).collect();
    if machines.len() < blueprint.shards.len() {
        let (needed, there) = (blueprint.shards.len(), machines.len());
        return Err(Why::TooFew { tp: blueprint.grid.tp, pp: blueprint.grid.pp, needed, there });
    }
    let measure = Measure::new(shape, class_of(machines.first().copied()), &policy.kv_dtype)?;
    let crowding = crowding(blueprint, &machines);
    let (memory, compute) = work_micros(&measure, blueprint, &machines, &crowding);
    let (work, exchange) = (memory.max(compute), exchange_micros(blueprint, &crowding));
    let bottleneck = match () {
        () if exchange > work => Bottleneck::Collective,
        () if compute > memory => Bottleneck::Compute,
        () => Bottleneck::MemoryBandwidth,
    };
    let tokens_per_s = 1e6 / (work + exchange).max(0.01);
    let (low, high) = (tokens_per_s * BAND.0, tokens_per_s * BAND.1);
    Ok(Prediction { low, high, bottleneck, work_micros: work, exchange_micros: exchange })
}

/// Of all stages, each as slow as its slowest rank: reading, and computing.
fn work_micros(measure: &Measure, blueprint: &Blueprint, machines: &[&Machine], crowding: &[f64]) -> (f64, f64) {
    let n_layers = measure.shape.n_layers;
    let per_byte = operations(measure.shape) / measure.stage(0, 1, 0..n_layers).read.max(1) as f64;
    let speeds = shared_speeds(blueprint, machines);
    let tp = usize::from(blueprint.grid.tp);
    let (mut memory, mut compute) = (0.0, 0.0);
    for stage in blueprint.shards.chunks(tp) {
        let of = |shard: &super::Shard| {
            let rank = usize::from(shard.rank.0);
            let read = measure.part(&blueprint.layout.part(shard.rank)).read as f64;
            let operations = class(&machines[rank].device).thread_operations * f64::from(machines[rank].threads.max(1));
            let (reading, computing) = (read / speeds[rank] * 1e6, read * per_byte / operations * 1e6);
            (reading * crowding[rank], computing * crowding[rank])
        };
        let slowest = stage.iter().map(of).fold((0.0, 0.0), |a: (f64, f64), b| (a.0.max(b.0), a.1.max(b.1)));
        (memory, compute) = (memory + slowest.0, compute + slowest.1);
    }
    (memory, compute)
}

/// For each rank, how many threads of its stage share a core of its host: those of other stages wait meanwhile.
fn crowding(blueprint: &Blueprint, machines: &[&Machine]) -> Vec<f64> {
    let mut threads: BTreeMap<(u16, &str), u32> = BTreeMap::new();
    for (shard, machine) in blueprint.shards.iter().zip(machines) {
        *threads.entry((shard.place.stage, &shard.host)).or_default() += machine.threads.max(1);
    }
    let of = |(shard, machine): (&super::Shard, &&Machine)| match machine.cores {
        0 => 1.0,
        cores => (f64::from(threads[&(shard.place.stage, shard.host.as_str())]) / f64::from(cores)).max(1.0),
    };
    blueprint.shards.iter().zip(machines).map(of).collect()
}

/// Ranks of one stage and host read at the same time, through the same wires.
fn shared_speeds(blueprint: &Blueprint, machines: &[&Machine]) -> Vec<f64> {
    let alone = speeds(machines);
    let mut asked: BTreeMap<(u16, &str), u64> = BTreeMap::new();
    for (shard, speed) in blueprint.shards.iter().zip(&alone) {
        let sum = asked.entry((shard.place.stage, &shard.host)).or_default();
        *sum = sum.saturating_add(*speed);
    }
    let share = |(shard, speed): (&super::Shard, &u64)| {
        let there = class(&machines[usize::from(shard.rank.0)].device).host_bytes.max(*speed) as f64;
        let asked = asked[&(shard.place.stage, shard.host.as_str())] as f64;
        *speed as f64 * (there / asked).min(1.0)
    };
    blueprint.shards.iter().zip(&alone).map(share).collect()
}

/// Multiplications of one row's pass.
fn operations(shape: &ModelShape) -> f64 {
    let of = |a: u32, b: u32| f64::from(a) * f64::from(b);
    let attention = 2.0 * of((shape.n_heads + shape.n_kv_heads) * shape.head_dim, shape.hidden);
    let inner = shape.experts.map_or(shape.inner, |experts| experts.n_used * experts.inner);
    let mlp = 3.0 * of(shape.hidden, inner);
    f64::from(shape.n_layers) * (attention + mlp) + of(shape.vocab, shape.hidden)
}

/// Two sums in each layer, the embedding's rows and the logits within a stage; a hop between stages and back.
fn exchange_micros(blueprint: &Blueprint, crowding: &[f64]) -> f64 {
    let tp = usize::from(blueprint.grid.tp);
    let stages: Vec<_> = blueprint.shards.chunks(tp).collect();
    let cost = |shards: &mut dyn Iterator<Item = &super::Shard>| {
        let shards: Vec<&super::Shard> = shards.collect();
        let is_crowded = shards.iter().any(|shard| crowding[usize::from(shard.rank.0)] > 1.0);
        match shards.iter().all(|shard| shard.host == shards[0].host) {
            false => EXCHANGE_NET_MICROS,
            true if is_crowded => EXCHANGE_CROWDED_MICROS,
            true => EXCHANGE_HOST_MICROS,
        }
    };
    let mut micros = 0.0;
    if tp > 1 {
        for stage in &stages {
            micros += 2.0 * stage[0].layers.len() as f64 * cost(&mut stage.iter());
        }
        // The embedding's rows in the first stage, the logits in the last.
        micros += cost(&mut stages[0].iter()) + cost(&mut stages[stages.len() - 1].iter());
    }
    for (i, stage) in stages.iter().enumerate().filter(|_| stages.len() > 1) {
        let next = stages[(i + 1) % stages.len()];
        micros += cost(&mut stage.iter().chain(next));
    }
    micros
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Prediction { low, high, bottleneck, .. } = self;
        write!(f, "{low:.0} to {high:.0} tokens/s for one sequence, held back by {bottleneck}")
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
