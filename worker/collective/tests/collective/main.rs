//! Ranks that exchange over every carrier, and the errors they return when one is gone.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/device_sums.rs"]
mod device_sums;
#[path = "../../../backend/tests/fake_cuda/mod.rs"]
mod fake_cuda;

mod faults;
mod join;
mod nccl;
mod one_shot;
mod ops;
