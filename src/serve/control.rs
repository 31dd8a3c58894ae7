//! The socket through which an operator reaches a coordinator of `serve`. It forwards changes to a running replica, and
//! accepts neither workers nor routers. Decides nothing.

use anyhow::{Context, ensure};
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::coordinator_server::{Coordinator, CoordinatorServer};
use proto::cluster::{
    GetHashesRequest, GetModelRequest, ModelBytes, ModelFiles, RankFrame, ReadModelRequest, ReloadReply, ReloadRequest,
    ReplicaFrame, RouterFrame, ScaleReply, ScaleRequest, WeightHashes, WorkerFrame,
};
use std::net::{Ipv4Addr, SocketAddr};
use tokio::net::TcpListener;
use tokio_stream::Empty;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use wire::Trust;

/// The default address of `scale` and `reload`.
const DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 50100);

/// Opens one listener per replica, on consecutive ports. Opens none if no address was given and the default one is in
/// use.
pub async fn open(requested: Option<SocketAddr>, n_replicas: u16) -> anyhow::Result<Vec<TcpListener>> {
    let first = requested.unwrap_or(DEFAULT);
    ensure!(
        first.ip().is_loopback(),
        "--control {first} is not loopback: for other machines, run `lockstep coordinator`"
    );
    let mut listeners = Vec::new();
    for n in 0..n_replicas {
        // Port 0 means any free port, for each listener.
        let port = if first.port() == 0 { Some(0) } else { first.port().checked_add(n) };
        let port = port.with_context(|| format!("--control {first}: {n_replicas} replicas need as many ports"))?;
        let address = SocketAddr::new(first.ip(), port);
        match TcpListener::bind(address).await {
            Ok(door) => listeners.push(door),
            Err(why) if requested.is_none() => {
                tracing::warn!(%address, %why, "`scale` and `reload` cannot reach this server: give --control ADDR");
                return Ok(Vec::new());
            }
            Err(why) => return Err(why).with_context(|| format!("cannot listen for --control on {address}")),
        }
    }
    Ok(listeners)
}

/// Serves until `end`.
pub async fn serve(door: TcpListener, coordinator: Channel, end: CancellationToken) -> anyhow::Result<()> {
    let incoming = wire::incoming(door, Trust::default());
    let server = wire::server().add_service(CoordinatorServer::new(ControlService { coordinator }));
    let served = server.serve_with_incoming(incoming);
    // A caller that still waits at the end waits for a draining coordinator, and would get no answer.
    match end.run_until_cancelled(served).await {
        Some(ended) => ended.context("the server at --control has ended"),
        None => Ok(()),
    }
}

struct ControlService {
    coordinator: Channel,
}

fn deny<T>() -> Result<Response<T>, Status> {
    Err(Status::permission_denied(
        "this address is for `scale` and `reload`: the server has its own workers and router",
    ))
}

#[tonic::async_trait]
impl Coordinator for ControlService {
    type AttachStream = Empty<Result<ReplicaFrame, Status>>;
    type JoinStream = Empty<Result<RankFrame, Status>>;
    type ReadModelStream = Empty<Result<ModelBytes, Status>>;

    async fn scale(&self, request: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        CoordinatorClient::new(self.coordinator.clone()).scale(request.into_inner()).await
    }

    async fn reload(&self, request: Request<ReloadRequest>) -> Result<Response<ReloadReply>, Status> {
        CoordinatorClient::new(self.coordinator.clone()).reload(request.into_inner()).await
    }

    async fn attach(&self, _: Request<Streaming<RouterFrame>>) -> Result<Response<Self::AttachStream>, Status> {
        deny()
    }

    async fn join(&self, _: Request<Streaming<WorkerFrame>>) -> Result<Response<Self::JoinStream>, Status> {
        deny()
    }

    async fn get_hashes(&self, _: Request<GetHashesRequest>) -> Result<Response<WeightHashes>, Status> {
        deny()
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<ModelFiles>, Status> {
        deny()
    }

    async fn read_model(&self, _: Request<ReadModelRequest>) -> Result<Response<Self::ReadModelStream>, Status> {
        deny()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requested_control_address_must_be_free() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let error = open(taken.local_addr().ok(), 1).await.unwrap_err();
        assert!(format!("{error:#}").contains("--control"), "{error:#}");
        let error = open(Some("192.0.2.1:1".parse().unwrap()), 1).await.unwrap_err();
        assert!(error.to_string().contains("not loopback"), "{error:#}");
        assert_eq!(open(Some("127.0.0.1:0".parse().unwrap()), 3).await.unwrap().len(), 3);
        assert!(open(Some("127.0.0.1:65535".parse().unwrap()), 2).await.is_err());
    }
}
