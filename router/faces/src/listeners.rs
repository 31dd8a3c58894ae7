//! The listeners for HTTP, and why serving ends.

use router::RecordError;
use tokio::net::TcpListener;

/// The listeners for HTTP.
pub struct HttpListeners {
    pub clients: TcpListener,
    /// For the keys of `Config::operators`. If present, the clients' port has no operators' pages.
    pub operators: Option<TcpListener>,
}

impl From<TcpListener> for HttpListeners {
    fn from(clients: TcpListener) -> HttpListeners {
        HttpListeners { clients, operators: None }
    }
}

/// Why a face cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the HTTP listener failed")]
    Http(#[source] std::io::Error),
    #[error("the gRPC listener failed")]
    Grpc(#[source] tonic::transport::Error),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("the reflection service cannot be made")]
    Reflection(#[source] tonic_reflection::server::Error),
}
