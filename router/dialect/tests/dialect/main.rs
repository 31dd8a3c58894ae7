//! Texts as models write them, and their pieces.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
mod enforced;
mod function;
mod generic;
mod harmony;
mod headed;
mod hermes;
mod hostile;
mod templates;
mod thoughts;
mod xml;
