//! A coordinator with workers and routers that are tasks of the test.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;

mod adopt;
mod cancels;
mod faults;
mod few;
mod names;
mod progress;
mod protocols;
mod recovery;
mod tenants;
mod windows;
