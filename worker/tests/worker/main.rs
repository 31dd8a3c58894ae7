//! Tests of ranks: sessions, runners and grids, and the same over a fake CUDA driver.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../backend/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../../backend/tests/common/mod.rs"]
mod numbers;
#[path = "../../backend/tests/on_device/mod.rs"]
mod on_device;
#[path = "../../examples/gpu_check/parts/mod.rs"]
mod parts;
#[allow(dead_code, reason = "shared with tests that need other parts of it")]
#[path = "../../model/tests/whole/mod.rs"]
mod whole;

mod ahead;
mod cuda;
mod draft_models;
mod grammars;
mod grids;
mod model_runner;
mod mtp;
mod packed;
mod session;
mod tiers;
mod windows;
