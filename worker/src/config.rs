//! The configuration of a worker: what it reports of itself, and its limits. Has no knowledge of a session.

use crate::load::scrub::Scrubber;
use std::time::Duration;

/// How much memory this machine can still give; None if that is unknown.
pub type MemoryLeft = fn() -> Option<u64>;

/// Where the memory of a KV cache comes from, and when.
#[derive(Clone, Copy, Debug)]
pub struct KvMemory {
    pub left: MemoryLeft,
    /// Whether memory is committed as far as requests need it and then given back, or all of it from the start.
    pub grows: bool,
}

/// What the worker reports of itself to the coordinator, and its limits.
#[derive(Clone, Debug)]
pub struct Config {
    pub host: String,
    pub pid: u32,
    /// The kind of device: `cpu`, `cuda` or `sim`.
    pub device: String,
    /// Memory that the worker may use for weights and KV cache.
    pub memory_bytes: u64,
    pub threads: u32,
    /// The host's cores, shared by its workers; zero where the number is not known.
    pub cores: u32,
    /// The address at which peers reach this worker's collective.
    pub mesh_address: String,
    /// The most steps queued for the computing thread: as many as a coordinator plans ahead.
    pub steps_queued_max: usize,
    /// The most frames queued for the stream to the coordinator.
    pub frames_up_max: usize,
    pub heartbeat_every: Duration,
    /// How long a coordinator may take to answer the hello.
    pub join_timeout: Duration,
    /// How long a rank that fails or leaves waits for the coordinator to close the stream.
    pub farewell_timeout: Duration,
    /// The pause before the next dial. It doubles from the first limit to the second.
    pub redial_min: Duration,
    pub redial_max: Duration,
    /// The shortest pause after the coordinator dismissed the rank.
    pub redial_after_leave: Duration,
    /// How long the computing thread may take to return from the last session's work. Until then the worker does not
    /// join, because it could not take an assignment.
    pub come_back_max: Duration,
    pub kv_memory: KvMemory,
    /// Checks the weights in memory; the loader's own.
    pub scrubber: Option<Scrubber>,
    /// What the worker reports of this build to the coordinator.
    pub speaks: proto::ProtocolRange,
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
            speaks: proto::ProtocolRange::default(),
        }
    }
}

/// Whether a worker computes and sends heartbeats on threads of its own, or in tasks on modelled time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExecutionMode {
    Threads,
    Tasks,
}
