//! Kernels of both devices beside naive references.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../common/mod.rs"]
mod numbers;
#[path = "../on_device/mod.rs"]
mod on_device;

mod attention;
mod cuda;
mod emulator;
mod experts;
mod linear;
mod packing;
mod pointwise;
mod quants;
mod recurrence;
mod shards;
