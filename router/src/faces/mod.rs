//! The APIs for clients: HTTP in OpenAI's and Anthropic's formats, `lockstep.v1`, and the protocols of gateways. A face
//! only translates: it reads a request in its client's format, passes it to `front`, and writes the events in that
//! format.
//!
//! Has no knowledge of links, and of replicas only for lists of models. Read `doors/` (shared by all connections), then
//! a face: `grpc` is the shortest and `http/` the largest; `kserve` and `vllm` are other projects' protocols.
//! `grpc_server` serves everything over gRPC, including `health` and `reflection`.

pub mod doors;
pub mod grpc;
pub mod grpc_server;
pub mod health;
pub mod http;
pub mod kserve;
pub mod reflection;
pub mod vllm;

use tokio::net::TcpListener;

/// The names of other projects' services, for the health service.
pub const SERVICES: [&str; 2] = ["vllm.grpc.engine.VllmEngine", "inference.GRPCInferenceService"];

/// The header of a request's session, over HTTP and gRPC.
pub const SESSION: &str = "x-session-id";

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
    #[error("the folder for records cannot be used")]
    Record(#[source] std::io::Error),
    #[error("the reflection service cannot be made")]
    Reflection(#[source] tonic_reflection::server::Error),
}
