//! A client of a cluster's routers: the generated code of `lockstep.v1`, how to reach routers, and answers that
//! continue if their stream breaks off. Knows no other API.
//!
//! `LockstepClient::connect` takes the addresses of the routers, `generate` streams an answer, and `inference` gives
//! the generated client for all other calls.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod v1 {
    #![allow(clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    tonic::include_proto!("lockstep.v1");
}

mod answer;
mod connect;

pub use answer::AnswerStream;
pub use connect::{ApiKeyHeader, ConnectOptions, InvalidOption, LockstepClient, RouterClient};
