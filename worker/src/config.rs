//! What a worker is told once: what it says of itself, and its limits. Knows no session.

use std::time::Duration;

/// What the worker says of itself, and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub host: String,
    pub pid: u32,
    /// `cpu`, `cuda` or `sim`.
    pub device: String,
    /// What it may use for weights and KV.
    pub memory_bytes: u64,
    pub threads: u32,
    /// Of the host, whose workers share them; zero where it is not known.
    pub cores: u32,
    /// Where peers reach this worker's collective.
    pub mesh_address: String,
    /// Steps that wait for the computing thread. More than a coordinator plans ahead are never there.
    pub steps_queued_max: usize,
    /// Frames that wait for the stream to the coordinator.
    pub frames_up_max: usize,
    pub heartbeat_every: Duration,
    /// How long a coordinator may take to answer the hello.
    pub join_timeout: Duration,
    /// How long a rank that has failed or leaves waits for the coordinator to close the stream.
    pub farewell_timeout: Duration,
    /// The wait before dialling again doubles from the first to the second.
    pub redial_min: Duration,
    pub redial_max: Duration,
    /// And is at least this when the coordinator told the rank to leave.
    pub redial_after_leave: Duration,
    /// How long the computing thread may take to come back from what the last session left it in. Until then this
    /// worker does not join: it could take no place.
    pub come_back_max: Duration,
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
        }
    }
}

/// On what a worker computes and beats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Footing {
    Threads,
    Tasks,
}
