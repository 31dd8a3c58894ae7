//! The coordinator as its peers meet it: its streams, and the model's files. Decides nothing.

mod grpc;
mod library;
pub mod serve;
