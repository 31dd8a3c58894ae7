//! The server of all gRPC services: their connections, health and reflection. Has no knowledge of messages.

use crate::doors::gate::GrpcGate;
use crate::doors::gathered::WriteCoalescer;
use crate::doors::socket::LimitedSocket;
use crate::health::SERVICES;
use crate::health::{SERVICE, ServingHealth};
use crate::listeners::Error;
use crate::reflection::{newer, older};
use crate::{grpc, kserve, vllm};
use router::config::Timeouts;
use router::front::frontend::Frontend;
use std::io;
use std::sync::Arc;
use tokio::sync::{Semaphore, watch};
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic_health::pb::health_server::HealthServer;
use wire::{Connection, Incoming};

pub async fn serve(
    front: Arc<Frontend>,
    incoming: Incoming,
    draining: CancellationToken,
    end: CancellationToken,
) -> Result<(), Error> {
    let reporter = front.config.readiness.clone();
    let is_ready = reporter.subscribe();
    let inference = grpc::service(front.clone());
    let reflection = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE)
            .with_service_name("grpc.health.v1.Health");
        SERVICES.iter().fold(builder, |builder, name| builder.with_service_name(*name))
    };
    // An id that one of vLLM's two services gave is aborted by the other.
    let running = vllm::RunningRequests::default();
    let incoming = limit_connections(&front, incoming);
    let served = wire::server()
        .layer(GrpcGate(front.clone()))
        .add_service(inference)
        .add_service(vllm::service(front.clone()))
        .add_service(vllm::inference::service(front.clone(), running.clone()))
        .add_service(vllm::control::service(front.clone(), running))
        .add_service(kserve::service(front.clone()))
        .add_service(HealthServer::new(ServingHealth { is_ready }))
        .add_service(newer::service(reflection().build_v1().map_err(Error::Reflection)?))
        .add_service(older::service(reflection().build_v1alpha().map_err(Error::Reflection)?))
        .serve_with_incoming_shutdown(incoming, end.cancelled_owned());
    tokio::select! {
        biased;
        served = served => served.map_err(Error::Grpc),
        () = report_health(&front, reporter, draining) => Ok(()),
    }
}

/// Yields connections that have a place among the others. Connections beyond the limit are closed before anything is
/// read from them.
fn limit_connections(
    front: &Frontend,
    incoming: Incoming,
) -> impl Stream<Item = io::Result<LimitedSocket<WriteCoalescer<Connection>>>> {
    let Timeouts { unread_max, headers_max, .. } = front.config.timeouts;
    let connections_max = front.config.limits.connections_max.clamp(1, Semaphore::MAX_PERMITS);
    let places = Arc::new(Semaphore::new(connections_max));
    incoming.filter_map(move |accepted| match accepted {
        Ok(connection) => {
            let place = places.clone().try_acquire_owned().ok()?;
            let certificate = connection.client_certificate().cloned();
            let socket = LimitedSocket::new(WriteCoalescer::new(connection), place, unread_max);
            Some(Ok(socket.with_start_deadline(headers_max).with_certificate(certificate)))
        }
        Err(error) => Some(Err(error)),
    })
}

/// Keeps the health service's status up to date. Never ends.
async fn report_health(front: &Frontend, reporter: watch::Sender<bool>, draining: CancellationToken) {
    let mut views = front.replicas.views();
    loop {
        views.mark_unchanged();
        reporter.send_replace(front.replicas.is_any_ready() && !front.admission.is_draining());
        tokio::select! {
            biased;
            Ok(()) = views.changed() => {}
            () = draining.cancelled(), if !draining.is_cancelled() => {}
            else => std::future::pending().await,
        }
    }
}
