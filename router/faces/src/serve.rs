//! Runs a router with its faces: HTTP and gRPC on two listeners, or gRPC alone.

use crate::listeners::{Error, HttpListeners};
use crate::{grpc_server, http};
use router::front::frontend::Frontend;
use router::{Config, Membership, ModelTexts};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use wire::{ConnectionFuture, Incoming};

/// Serves HTTP and gRPC as `router::run` does.
pub fn serve(
    config: Config,
    members: impl Into<Membership>,
    texts: impl Into<ModelTexts>,
    http: impl Into<HttpListeners>,
    grpc: TcpListener,
    shutdown: CancellationToken,
) -> ConnectionFuture<Error> {
    serve_listeners(config, (members.into(), texts.into()), http.into(), grpc, shutdown)
}

fn serve_listeners(
    config: Config,
    (members, texts): (Membership, ModelTexts),
    http: HttpListeners,
    grpc: TcpListener,
    shutdown: CancellationToken,
) -> ConnectionFuture<Error> {
    let config = Config { operators: http.operators.as_ref().and(config.operators.clone()), ..config };
    let tls = config.tls.clone();
    let faces = |front: Arc<Frontend>, draining, end: CancellationToken| async move {
        let http = http::serve(front.clone(), http, end.clone());
        let grpc = async {
            let connections = match tls {
                None => wire::tcp_incoming(grpc),
                Some(tls) => wire::incoming_clients(grpc, tls, wire::AlpnProtocol::Grpc),
            };
            grpc_server::serve(front, connections, draining, end).await
        };
        tokio::try_join!(http, grpc).map(|_| ())
    };
    Box::pin(router::run(config, members, texts, shutdown, faces, http::kept::record_line))
}

/// Does the same over gRPC alone, on incoming connections.
pub fn serve_grpc(
    config: Config,
    members: impl Into<Membership>,
    texts: impl Into<ModelTexts>,
    incoming: Incoming,
    shutdown: CancellationToken,
) -> ConnectionFuture<Error> {
    serve_incoming(config, (members.into(), texts.into()), incoming, shutdown)
}

fn serve_incoming(
    config: Config,
    (members, texts): (Membership, ModelTexts),
    incoming: Incoming,
    shutdown: CancellationToken,
) -> ConnectionFuture<Error> {
    let faces = |front, draining, end| grpc_server::serve(front, incoming, draining, end);
    Box::pin(router::run(config, members, texts, shutdown, faces, http::kept::record_line))
}
