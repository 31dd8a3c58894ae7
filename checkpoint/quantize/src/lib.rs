//! Writes a model again with fewer bits for each weight.
//!
//! `file` reads a GGUF and writes another with the types of a `Recipe`; its tensors are decoded and encoded a few rows
//! at a time. `encode_row` and `decode_row` do the same with single rows. Knows types of numbers and the container, and
//! nothing of devices, requests or how a model computes.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod convert;
mod decode;
mod encode;
mod error;
mod recipe;
mod writer;

pub use convert::{QuantizeProgress, QuantizeReport, file};
pub use decode::{can_decode, decode_row};
pub use encode::{EncodeError, encode_row};
pub use error::{Error, Result};
pub use recipe::Recipe;
