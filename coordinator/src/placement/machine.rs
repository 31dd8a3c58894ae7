//! The planner's facts about a worker.

use crate::WorkerId;
use types::{DeviceClass, DeviceKind};

/// A worker that could take a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    pub worker: WorkerId,
    pub host: String,
    pub device: DeviceKind,
    pub memory_bytes: u64,
    pub threads: u32,
    /// Cores of its host, which may have more workers; zero if unknown.
    pub cores: u32,
}

/// Machines in the order in which they joined.
pub type Inventory = [Machine];

/// Ranks of one replica must agree in every bit, so they have one device class and, on GPUs, one architecture: those of
/// the machine that joined first.
pub(super) fn compatible_machines(inventory: &Inventory) -> Vec<&Machine> {
    let first = inventory.first();
    inventory.iter().filter(|machine| first.is_some_and(|first| machine.device == first.device)).collect()
}

/// The device class of machines of which this is the first.
pub(super) fn class_of(first: Option<&Machine>) -> DeviceClass {
    first.map_or(DeviceClass::Cpu, |machine| machine.device.class())
}
