//! Tests of the whole system: its bits on every grid, and its processes on this machine.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/etcd.rs"]
mod etcd;
#[path = "../../worker/backend/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../common/loopback_hub.rs"]
mod loopback_hub;
#[path = "../common/ports.rs"]
mod ports;

mod advisories;
mod choices;
mod conversations;
mod cuda;
mod drafts;
mod encoders;
mod flips;
mod grammars;
mod grids;
mod hub;
mod judge;
mod kv_disk;
mod kv_memory;
mod membership;
mod messages;
mod oracle;
mod processes;
mod recovery;
mod reference;
mod replicas;
mod resume;
mod same_bits;
mod searches;
mod terminal;
mod tracing;
mod verify;
mod wrong;
