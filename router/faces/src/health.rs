//! gRPC's health service: whether the router serves requests now, and that the process is alive. Has no knowledge
//! except whether the router is ready.

use std::pin::Pin;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// The service name of the process itself: it is serving while the process lives, also while the router drains or has
/// no replica.
pub const LIVE: &str = "live";
pub const SERVICE: &str = "lockstep.v1.Inference";
/// The names of other projects' services, for the health service.
pub const SERVICES: [&str; 4] =
    ["vllm.grpc.engine.VllmEngine", "inference.GRPCInferenceService", "vllm.Inference", "vllm.Control"];
/// The value in gRPC's health protocol.
const SERVICE_UNKNOWN: i32 = 3;

pub struct ServingHealth {
    pub is_ready: watch::Receiver<bool>,
}

fn status(service: &str, is_ready: bool) -> Option<ServingStatus> {
    let is_ours = service.is_empty() || service == SERVICE || SERVICES.contains(&service);
    match service {
        LIVE => Some(ServingStatus::Serving),
        _ if is_ours && is_ready => Some(ServingStatus::Serving),
        _ => is_ours.then_some(ServingStatus::NotServing),
    }
}

#[tonic::async_trait]
impl Health for ServingHealth {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = &request.get_ref().service;
        let status = status(service, *self.is_ready.borrow());
        let status = status.ok_or_else(|| Status::not_found(format!("there is no service {service}")))?;
        Ok(Response::new(HealthCheckResponse { status: status as i32 }))
    }

    /// An unknown service also gets a status, and its stream stays open, as gRPC requires: the service could appear
    /// later.
    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let service = request.into_inner().service;
        let mut last_sent = None;
        let changes = WatchStream::new(self.is_ready.clone()).filter_map(move |is_ready| {
            let status = status(&service, is_ready).map_or(SERVICE_UNKNOWN, |status| status as i32);
            (last_sent.replace(status) != Some(status)).then_some(Ok(HealthCheckResponse { status }))
        });
        Ok(Response::new(Box::pin(changes)))
    }
}
