//! The APIs for clients: HTTP in OpenAI's and Anthropic's formats, `lockstep.v1`, and the protocols of gateways. A face
//! only translates: it reads a request in its client's format, passes it to `router::front`, and writes the events in
//! that format. The caller owns sockets and the stop signal.
//!
//! Has no knowledge of links, and of replicas only for lists of models. Read `doors/` (shared by all connections), then
//! a face: `grpc` is the shortest and `http/` the largest; `kserve` and `vllm` are other projects' protocols.
//! `grpc_server` serves everything over gRPC, including `health` and `reflection`. `serve` joins both.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod doors;
mod grpc;
mod grpc_server;
mod health;
mod http;
mod kserve;
mod listeners;
mod reflection;
mod serve;
mod vllm;

pub use health::LIVE;
pub use http::known::{Endpoint, KNOWN_FIELDS, KnownField, NeutralValues};
pub use listeners::{Error, HttpListeners};
pub use serve::{serve, serve_grpc};
