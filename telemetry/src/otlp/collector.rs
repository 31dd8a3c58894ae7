//! An operator's settings for a collector. Opens no connection.

use super::reach::ExportHeaders;
use std::time::Duration;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    #[default]
    Grpc,
    /// Protobuf over HTTP.
    Http,
}

/// The destination of a process's spans, metrics and logs, and how much of them it gets.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    /// `http://host:4317` or `https://host:4317`.
    pub endpoint: String,
    pub protocol: Protocol,
    /// Headers that go with each batch, such as a key.
    pub headers: ExportHeaders,
    /// The authority of its certificate, as PEM. None means the web's authorities.
    pub authority: Option<Vec<u8>>,
    /// The fraction of the traces begun here that is recorded; for a caller's trace the caller's sampling flag decides.
    pub sample: f64,
    /// Whether every step gets spans, not only every request.
    pub steps: bool,
    /// Whether the spans of requests contain prompts and answers.
    pub content: bool,
    /// None sends no metrics.
    pub metrics_every: Option<Duration>,
}

impl Default for Collector {
    fn default() -> Collector {
        Collector {
            endpoint: String::new(),
            protocol: Protocol::Grpc,
            headers: ExportHeaders::default(),
            authority: None,
            sample: 1.0,
            steps: false,
            content: false,
            metrics_every: Some(Duration::from_secs(15)),
        }
    }
}
