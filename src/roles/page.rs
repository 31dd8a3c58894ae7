//! The health page of a role without clients: liveness, readiness and metrics, over HTTP and by gRPC's health service
//! on the same port. Has no knowledge of the role. Needs no trust, because it only answers.

use anyhow::Context;
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_stream::wrappers::IntervalStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// Prometheus's text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4";
/// How soon watchers receive a change.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// The value in gRPC's health protocol.
const SERVICE_UNKNOWN: i32 = 3;

/// Answers for as long as the process lives, also while it drains, so that observers see the drain.
pub async fn open(
    address: SocketAddr,
    metrics: router::Render,
    is_ready: impl Fn() -> bool + Clone + Send + Sync + 'static,
) -> anyhow::Result<SocketAddr> {
    let bound = TcpListener::bind(address).await.with_context(|| format!("cannot listen for health on {address}"))?;
    let address = bound.local_addr()?;
    let health = HealthServer::new(HealthService { is_ready: is_ready.clone() });
    let ready = move || {
        let is_ready = is_ready();
        let answer =
            if is_ready { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") };
        async move { answer }
    };
    let page = Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/health", get(ready.clone()))
        .route("/ready", get(ready))
        .route_service("/grpc.health.v1.Health/{method}", health)
        .route("/metrics", get(move || async move { ([(header::CONTENT_TYPE, METRICS_TYPE)], metrics()) }));
    tokio::spawn(async move { axum::serve(bound, page).await });
    Ok(address)
}

/// gRPC's health service: the empty name is serving when the role is ready, `live` as long as the process answers.
#[derive(Clone)]
struct HealthService<F> {
    is_ready: F,
}

impl<F: Fn() -> bool> HealthService<F> {
    fn status(&self, service: &str) -> Option<ServingStatus> {
        match service {
            "" if (self.is_ready)() => Some(ServingStatus::Serving),
            "" => Some(ServingStatus::NotServing),
            faces::LIVE => Some(ServingStatus::Serving),
            _ => None,
        }
    }
}

#[tonic::async_trait]
impl<F: Fn() -> bool + Clone + Send + Sync + 'static> Health for HealthService<F> {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = &request.get_ref().service;
        let status = self.status(service).ok_or_else(|| Status::not_found(format!("there is no service {service}")))?;
        Ok(Response::new(HealthCheckResponse { status: status as i32 }))
    }

    /// Sends a status for an unknown service too, as gRPC requires: the service could appear later.
    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (pulse, service) = (self.clone(), request.into_inner().service);
        let mut last_sent = None;
        let changes = IntervalStream::new(tokio::time::interval(WATCH_EVERY)).filter_map(move |_| {
            let status = pulse.status(&service).map_or(SERVICE_UNKNOWN, |status| status as i32);
            (last_sent.replace(status) != Some(status)).then_some(Ok(HealthCheckResponse { status }))
        });
        Ok(Response::new(Box::pin(changes)))
    }
}

/// Returns whether a coordinator's metrics show ranks that take steps.
pub fn has_ready_ranks(metrics: &str) -> bool {
    let counts = metrics.lines().filter(|line| line.starts_with("lockstep:ranks_ready{"));
    counts.filter_map(|line| line.rsplit(' ').next()).any(|count| count.parse().is_ok_and(|n: f64| n > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tonic::Code;
    use tonic_health::pb::health_client::HealthClient;

    async fn check(address: SocketAddr, path: &str, status: &str, end: &str) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: page\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.ends_with(end), "{path}: {answer}");
    }

    #[tokio::test]
    async fn page_shows_the_current_state() {
        let is_ready = Arc::new(AtomicBool::new(false));
        let now = is_ready.clone();
        let metrics: router::Render = Arc::new(|| "lockstep:epoch 3\n".into());
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let address = open(any_port, metrics, move || now.load(Ordering::Relaxed)).await.unwrap();
        for page in ["/health", "/ready"] {
            check(address, page, "503", "not ready\n").await;
        }
        check(address, "/livez", "200", "alive\n").await;
        is_ready.store(true, Ordering::Relaxed);
        for page in ["/health", "/ready"] {
            check(address, page, "200", "ready\n").await;
        }
        check(address, "/metrics", "200", "lockstep:epoch 3\n").await;
        check(address, "/elsewhere", "404", "").await;
    }

    #[tokio::test]
    async fn grpc_health_distinguishes_live_from_ready() {
        let is_ready = Arc::new(AtomicBool::new(false));
        let now = is_ready.clone();
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let address = open(any_port, Arc::new(String::new), move || now.load(Ordering::Relaxed)).await.unwrap();
        let channel = wire::tcp(&address.to_string()).unwrap();
        let mut health = HealthClient::new(channel);
        let request = |service: &str| HealthCheckRequest { service: service.into() };
        let mut watched = health.watch(request("")).await.unwrap().into_inner();
        let mut check =
            async |service: &str| health.check(request(service)).await.map(|response| response.get_ref().status);
        assert_eq!(watched.message().await.unwrap().unwrap().status, 2);
        assert_eq!((check("").await.unwrap(), check("live").await.unwrap()), (2, 1));
        assert_eq!(check("other").await.unwrap_err().code(), Code::NotFound);
        is_ready.store(true, Ordering::Relaxed);
        assert_eq!((check("").await.unwrap(), check("live").await.unwrap()), (1, 1));
        assert_eq!(watched.message().await.unwrap().unwrap().status, 1);
    }

    #[test]
    fn ranks_are_ready_by_the_gauge() {
        assert!(has_ready_ranks("# x\nlockstep:ranks_ready{model_name=\"toy\",replica=\"one\"} 4\n"));
        assert!(!has_ready_ranks("lockstep:ranks_ready{replica=\"one\"} 0\nlockstep:epoch{replica=\"one\"} 1\n"));
        assert!(!has_ready_ranks("# TYPE lockstep:ranks_ready gauge\n"));
    }
}
