//! Model families beside transformers, on both devices.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../backend/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "../whole/mod.rs"]
mod whole;

mod cuda;
mod encoders;
mod folders;
mod mtp;
mod packed;
mod pieces;
mod reference;
