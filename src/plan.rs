//! `plan`: what would lie where, and how fast it should be, without loading it.

use crate::config::{Config, cores};
use crate::roles;
use checkpoint::Checkpoint;
use coordinator::{Blueprint, Machine, ModelShape, WorkerId};

/// The shard table of this model on this machine, and what to expect of it.
pub fn table(config: &Config, checkpoint: &Checkpoint) -> anyhow::Result<String> {
    let blueprint = blueprint(config, checkpoint)?;
    let (shape, policy) = (ModelShape::of(checkpoint), roles::policy(config));
    let prediction = coordinator::predict(&machines(config)?, &shape, &policy, &blueprint)?;
    let model = &checkpoint.spec().name;
    let each = if config.replicas > 1 { format!("{} replicas, each ", config.replicas) } else { String::new() };
    Ok(format!("{model} · {each}{blueprint}\npredicted: {prediction} (a table's figures for machines of this class)\n"))
}

/// How this machine would be placed, or why it cannot be: known before anything is started.
pub fn blueprint(config: &Config, checkpoint: &Checkpoint) -> anyhow::Result<Blueprint> {
    Ok(coordinator::plan(&machines(config)?, &ModelShape::of(checkpoint), &roles::policy(config), None)?)
}

/// The workers that `serve` would start for one replica.
fn machines(config: &Config) -> anyhow::Result<Vec<Machine>> {
    let memory_bytes = roles::worker_memory(config)?;
    let machine = |i: u16| -> anyhow::Result<Machine> {
        Ok(Machine {
            worker: WorkerId(i.into()),
            host: roles::host(),
            device: config.device.of_worker(i)?.told()?,
            memory_bytes,
            threads: u32::try_from(config.threads).unwrap_or(u32::MAX),
            cores: u32::try_from(cores()).unwrap_or(u32::MAX),
        })
    };
    (0..config.n_ranks()).map(machine).collect()
}
