//! The scheduler: what it plans, and what it never does over thousands of seeds.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod pipelining;
mod planning;
mod room;
mod simulation;
mod tenants;
mod windows;
