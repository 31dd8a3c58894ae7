//! Rows and whole models, written with fewer bits.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod files;
mod rows;
