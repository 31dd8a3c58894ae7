//! Telemetry for operators: logs, and the name of every metric and span in one place. Has no knowledge of the code that
//! measures.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

pub mod exporter;
pub mod llama_cpp;
pub mod logs;
pub mod metrics;
mod otlp;
pub mod spans;
mod usage;

pub use otlp::{Collector, ExportHeaders, Protocol, TraceHeaders, flush};
pub use usage::TokenUsage;

/// Why telemetry cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{filter:?} is not a log filter: {source}")]
    Filter { filter: String, source: tracing_subscriber::filter::ParseError },
    #[error("logs are already set up")]
    LogsTwice,
    #[error("cannot send to {endpoint}: {why}")]
    Collector { endpoint: String, why: String },
    #[error("the collector's header number {nth} is not name=value")]
    Headers { nth: usize },
    #[error("metrics cannot be set up: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    #[error("a thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}
