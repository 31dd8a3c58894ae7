//! How roles reach each other: TCP between machines, pipes in memory within a process. The same frames either way.
//!
//! Here because this is the one crate that all roles share and that already owns the wire; it knows nothing of what is
//! sent.

use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::codegen::Service;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server, Uri};

/// Bytes on their way in each direction of a pipe.
const PIPE_BYTES_MAX: usize = 256 << 10;
/// Connections that were dialled and not yet accepted.
const PIPES_WAITING_MAX: usize = 64;
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Calls under way on one connection; more wait at the client.
pub const STREAMS_MAX: u32 = 256;
/// Streams of one connection that were opened and reset before anybody looked at them. Who resets more is hung up on:
/// it costs a client nothing, and a server the work.
pub const RESETS_PENDING_MAX: usize = 20;
/// Streams that this side had to reset, for what was wrong with them.
pub const RESETS_OWN_MAX: usize = 1024;
/// Of one request's headers together.
pub const HEADERS_BYTES_MAX: u32 = 16 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A peer that does not answer a ping for so long has lost its connection.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// A server's limits and timers, the same for every role.
pub fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_pending_accept_reset_streams(Some(RESETS_PENDING_MAX))
        .http2_max_local_error_reset_streams(Some(RESETS_OWN_MAX))
        .http2_max_header_list_size(HEADERS_BYTES_MAX)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}

/// A channel to `host:port` that connects when it is used and again when the connection is lost.
pub fn tcp(address: &str) -> Result<Channel, tonic::transport::Error> {
    Ok(with_limits(Endpoint::from_shared(format!("http://{address}"))?).connect_lazy())
}

/// The same over connections that somebody else makes.
pub fn over<C, IO>(connector: C) -> Channel
where
    C: Service<Uri, Response = TokioIo<IO>, Error = io::Error> + Send + 'static,
    C::Future: Send,
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    with_limits(Endpoint::from_static("http://peer")).connect_with_connector_lazy(connector)
}

/// A listener's connections, each without Nagle's delay.
pub fn tcp_incoming(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

/// Both ends of a place to meet within this process.
pub fn in_memory() -> (Dialer, Pipes) {
    let (dialled, pipes) = mpsc::channel(PIPES_WAITING_MAX);
    (Dialer { dialled }, Pipes { pipes })
}

/// Dials the server that accepts the other end's `Pipes`.
#[derive(Clone, Debug)]
pub struct Dialer {
    dialled: mpsc::Sender<DuplexStream>,
}

impl Dialer {
    pub fn channel(&self) -> Channel {
        over(self.clone())
    }
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<DuplexStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, io::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let dialled = self.dialled.clone();
        Box::pin(async move {
            let (ours, theirs) = tokio::io::duplex(PIPE_BYTES_MAX);
            let refused = |_| io::Error::new(io::ErrorKind::ConnectionRefused, "nobody accepts in this process");
            dialled.send(theirs).await.map_err(refused)?;
            Ok(TokioIo::new(ours))
        })
    }
}

/// What a server accepts in place of a socket's connections.
#[derive(Debug)]
pub struct Pipes {
    pipes: mpsc::Receiver<DuplexStream>,
}

impl Stream for Pipes {
    type Item = io::Result<DuplexStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.pipes.poll_recv(cx).map(|pipe| pipe.map(Ok))
    }
}

pub(crate) fn with_limits(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
}
