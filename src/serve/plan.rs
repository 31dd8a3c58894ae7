//! How a model would be placed on this machine, and its expected speed, without loading it.

use crate::roles::coordinator::policy;
use crate::roles::drafts;
use crate::settings::{ServeSettings, machine};
use checkpoint::Checkpoint;
use coordinator::{Blueprint, Machine, ModelShape, Unplaceable, WorkerId};

/// Returns the placement of this model on this machine, with the expected speed, as a table.
pub fn table(settings: &ServeSettings, checkpoint: &Checkpoint) -> anyhow::Result<String> {
    let (shape, _) = drafts::shape(settings.coordinator(), checkpoint)?;
    table_of(settings, &checkpoint.spec().name, &shape)
}

/// Returns the same table for a model of this shape.
pub fn table_of(settings: &ServeSettings, model: &str, shape: &ModelShape) -> anyhow::Result<String> {
    let (blueprint, policy) = (place_shape(settings, shape)??, policy(settings.coordinator()));
    let prediction = coordinator::predict(&machines(settings)?, shape, &policy, &blueprint)?;
    let replicas = settings.local.replicas;
    let each = if replicas > 1 { format!("{replicas} replicas, each ") } else { String::new() };
    Ok(format!("{model} · {each}{blueprint}\npredicted: {prediction} (a table's figures for machines of this class)\n"))
}

/// Returns the placement on this machine, or why there is none. Checked before anything starts.
pub fn blueprint(settings: &ServeSettings, checkpoint: &Checkpoint) -> anyhow::Result<Blueprint> {
    let (shape, _) = drafts::shape(settings.coordinator(), checkpoint)?;
    Ok(place_shape(settings, &shape)??)
}

/// Returns the placement of a model of this shape on this machine, or why there is none.
pub fn place_shape(settings: &ServeSettings, shape: &ModelShape) -> anyhow::Result<Result<Blueprint, Unplaceable>> {
    Ok(coordinator::plan(&machines(settings)?, shape, &policy(settings.coordinator()), None))
}

/// Returns the workers that `serve` would start for one replica.
fn machines(settings: &ServeSettings) -> anyhow::Result<Vec<Machine>> {
    let memory_bytes = settings.worker_memory()?;
    let machine = |i: u16| -> anyhow::Result<Machine> {
        Ok(Machine {
            worker: WorkerId(i.into()),
            host: machine::host(),
            device: settings.device.device.of_worker(i)?.device_kind()?,
            memory_bytes,
            threads: u32::try_from(settings.threads()).unwrap_or(u32::MAX),
            cores: u32::try_from(machine::cores()).unwrap_or(u32::MAX),
        })
    };
    (0..settings.coordinator.n_ranks()).map(machine).collect()
}
