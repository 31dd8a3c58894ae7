//! What an operator says of a collector. Reaches nobody.

use super::reach::Headers;
use std::time::Duration;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    #[default]
    Grpc,
    /// Protobuf over HTTP.
    Http,
}

/// Where a process sends what it tells of itself, and how much of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    /// `http://host:4317`, or `https://host:4317`
    pub endpoint: String,
    pub protocol: Protocol,
    /// What it wants to be told with each batch, as a key.
    pub headers: Headers,
    /// Of its certificate, as PEM. None: one of the web's.
    pub authority: Option<Vec<u8>>,
    /// Of the traces that begin here, this part is recorded; those of a caller who says are as the caller says.
    pub sample: f64,
    /// Spans of every step, not only of every request.
    pub steps: bool,
    /// Prompts and answers, in the spans of requests.
    pub content: bool,
    /// None sends no metrics.
    pub metrics_every: Option<Duration>,
}

impl Default for Collector {
    fn default() -> Collector {
        Collector {
            endpoint: String::new(),
            protocol: Protocol::Grpc,
            headers: Headers::default(),
            authority: None,
            sample: 1.0,
            steps: false,
            content: false,
            metrics_every: Some(Duration::from_secs(15)),
        }
    }
}
