//! The coordinator's gRPC services: its streams, and the model's files. Decides nothing.

mod grpc;
mod library;
pub mod serve;
