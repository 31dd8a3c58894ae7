//! Dialling: channels that connect when they are used, and again when the connection is lost.

use crate::connection::Connection;
use crate::greeting::{PROOF_MAX, Trust};
use crate::limits::with_limits;
use crate::refused::ConnectError;
use crate::until::CancellableIo;
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::codegen::Service;
use tonic::transport::{Channel, Endpoint, Uri};

const CONNECT_MAX: Duration = Duration::from_secs(3);

/// A channel to a role at `host:port` that connects when it is used and again when the connection is lost.
pub fn channel(address: &str, trust: Trust) -> Channel {
    let address = address.to_owned();
    let never = CancellationToken::new();
    channel_to_where(move || Ok(DialTarget { address: address.clone(), trust: trust.clone(), until: never.clone() }))
}

/// The present place of a role.
pub struct DialTarget {
    pub address: String,
    pub trust: Trust,
    /// A connection to it ends when this is cancelled; the next one goes to the role's address at that time.
    pub until: CancellationToken,
}

/// A channel to a role that may move: reads its address and trust again for each connection.
pub fn channel_to_where(peer: impl Fn() -> Result<DialTarget, String> + Send + Sync + 'static) -> Channel {
    let connector = Connector { peer: Arc::new(peer), reason: Arc::new(Mutex::new(String::new())) };
    with_limits(Endpoint::from_static("http://lockstep.cluster")).connect_with_connector_lazy(connector)
}

#[derive(Clone)]
struct Connector {
    peer: Arc<dyn Fn() -> Result<DialTarget, String> + Send + Sync>,
    /// Why the last attempt failed, so that the same reason is not logged again and again.
    reason: Arc<Mutex<String>>,
}

impl Connector {
    async fn connect(self) -> Result<TokioIo<CancellableIo<Connection>>, ConnectError> {
        let DialTarget { address, trust, until } = (self.peer)().map_err(ConnectError::Nowhere)?;
        let connected = dial(&address, &trust).await;
        let now = connected.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if !now.is_empty() && *reason != now {
            tracing::warn!(address, why = now, "no connection to this address");
        }
        *reason = now;
        connected.map(|io| TokioIo::new(CancellableIo::new(io, until)))
    }
}

pub(crate) async fn dial(address: &str, trust: &Trust) -> Result<Connection, ConnectError> {
    let stream = timeout(CONNECT_MAX, TcpStream::connect(address)).await.map_err(|_| ConnectError::Late)??;
    timeout(PROOF_MAX, trust.connect(stream)).await.unwrap_or(Err(ConnectError::Late))
}

impl Service<Uri> for Connector {
    type Response = TokioIo<CancellableIo<Connection>>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        Box::pin(self.clone().connect())
    }
}

/// A channel to `host:port` without TLS or token, as outside clients use it.
pub fn tcp(address: &str) -> Result<Channel, tonic::transport::Error> {
    Ok(with_limits(Endpoint::from_shared(format!("http://{address}"))?).connect_lazy())
}

/// A channel over connections that `connector` makes.
pub fn channel_over<C, IO>(connector: C) -> Channel
where
    C: Service<Uri, Response = TokioIo<IO>, Error = io::Error> + Send + 'static,
    C::Future: Send,
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    with_limits(Endpoint::from_static("http://peer")).connect_with_connector_lazy(connector)
}
