//! Files that change while they are read, and damaged files.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../tests/fuzz/harness.rs"]
mod harness;

mod changed;
mod fuzz;
mod groups;
mod pieces;
