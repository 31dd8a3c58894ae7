//! The scheduler: what it plans, and what it never does over thousands of seeds.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod by_hand;
mod keeping;
mod pace;
mod pipelining;
mod planning;
mod reuse;
mod room;
mod sharing;
mod simulation;
mod states;
mod tenants;
mod tier;
mod windows;
