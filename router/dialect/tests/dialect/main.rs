//! Texts as models write them, and what is read in them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
mod enforced;
mod generic;
mod hermes;
mod thoughts;
