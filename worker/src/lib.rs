//! A rank: joins a coordinator, loads its slice of the model, runs steps. Knows nothing of text, of the cluster store or
//! of other requests than those that steps name.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod runner;

pub use runner::{Assignment, Load, LoadError, Ready, RunError, Runner};
