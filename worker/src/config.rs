//! What a worker is told once: what it says of itself, and its limits. Knows no session.

use crate::load::scrub::Scrubber;
use std::time::Duration;

/// How much memory this machine has to give; None if nobody knows.
pub type MemoryLeft = fn() -> Option<u64>;

/// Where the memory of a KV cache comes from, and when.
#[derive(Clone, Copy, Debug)]
pub struct KvMemory {
    pub left: MemoryLeft,
    /// Whether it is committed as far as requests need it, and given back, or all of it from the start.
    pub grows: bool,
}

/// What the worker tells the coordinator of itself, and its limits.
#[derive(Clone, Debug)]
pub struct Config {
    pub host: String,
    pub pid: u32,
    /// The kind of device: `cpu`, `cuda` or `sim`.
    pub device: String,
    /// Memory that it may use for weights and KV cache.
    pub memory_bytes: u64,
    pub threads: u32,
    /// The host's cores, shared by its workers; zero where the number is not known.
    pub cores: u32,
    /// The address where peers reach this worker's collective.
    pub mesh_address: String,
    /// The most steps queued for the computing thread: as many as a coordinator plans ahead.
    pub steps_queued_max: usize,
    /// The most frames queued for the stream to the coordinator.
    pub frames_up_max: usize,
    pub heartbeat_every: Duration,
    /// How long a coordinator may take to answer the hello.
    pub join_timeout: Duration,
    /// How long a rank that has failed or leaves waits for the coordinator to close the stream.
    pub farewell_timeout: Duration,
    /// The pause before dialling again: it doubles from the first to the second.
    pub redial_min: Duration,
    pub redial_max: Duration,
    /// The least pause after the coordinator told the rank to leave.
    pub redial_after_leave: Duration,
    /// How long the computing thread may take to return from the last session's work. Until then this worker does not
    /// join: it could not take an assignment.
    pub come_back_max: Duration,
    pub kv_memory: KvMemory,
    /// Who looks through the weights in memory; the loader's own.
    pub scrubber: Option<Scrubber>,
    /// What the coordinator is told: this build's own.
    pub speaks: proto::Speaks,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            host: "localhost".into(),
            pid: std::process::id(),
            device: "cpu".into(),
            memory_bytes: 0,
            threads: 1,
            cores: 0,
            mesh_address: String::new(),
            steps_queued_max: 16,
            frames_up_max: 64,
            heartbeat_every: Duration::from_millis(100),
            join_timeout: Duration::from_secs(5),
            farewell_timeout: Duration::from_secs(1),
            redial_min: Duration::from_millis(50),
            redial_max: Duration::from_secs(5),
            redial_after_leave: Duration::from_secs(1),
            come_back_max: Duration::from_secs(120),
            kv_memory: KvMemory { left: || None, grows: false },
            scrubber: None,
            speaks: proto::Speaks::default(),
        }
    }
}

/// Whether a worker computes and beats on threads of its own, or in tasks on modelled time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Footing {
    Threads,
    Tasks,
}
