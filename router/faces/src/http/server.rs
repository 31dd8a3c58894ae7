//! The server of HTTP connections: their number, and how long one may take to send a request. Has no knowledge of
//! pages.

use crate::doors::lines::StrictLines;
use crate::doors::socket::LimitedSocket;
use crate::http::prefix::with_path;
use crate::listeners::Error;
use axum::Router;
use http::Uri;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use router::config::{RouterLimits, Timeouts};
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service;
use wire::{AlpnProtocol, ClientCertificate, Connection, OfferedTls};
use wire::{HEADERS_BYTES_MAX, RESETS_OWN_MAX, RESETS_PENDING_MAX, STREAMS_MAX};

/// The answer to a connection beyond the limit.
const FULL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
/// The bytes of a request's head in HTTP/1, whose headers no other limit counts.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// The pause after a failed accept: file descriptors may have run out, and become free again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The connections of a listener; with TLS, those whose handshake has finished.
pub enum HttpConnections {
    Plain(TcpListener),
    Tls(wire::Incoming),
}

impl HttpConnections {
    pub fn of(listener: TcpListener, tls: Option<OfferedTls>) -> HttpConnections {
        match tls {
            None => HttpConnections::Plain(listener),
            Some(tls) => HttpConnections::Tls(wire::incoming_clients(listener, tls, AlpnProtocol::Http)),
        }
    }

    async fn next(&mut self) -> io::Result<Connection> {
        match self {
            HttpConnections::Plain(listener) => listener.accept().await.map(|(stream, _)| Connection::Plain(stream)),
            HttpConnections::Tls(connections) => {
                connections.next().await.unwrap_or_else(|| Err(io::ErrorKind::ConnectionAborted.into()))
            }
        }
    }
}

pub async fn serve(
    routes: Router,
    mut incoming: HttpConnections,
    limits: &RouterLimits,
    timeouts: &Timeouts,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let places = Arc::new(Semaphore::new(limits.connections_max.clamp(1, Semaphore::MAX_PERMITS)));
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = incoming.next() => accepted,
            () = shutdown.cancelled() => break,
        };
        let Ok(stream) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        match places.clone().try_acquire_owned() {
            Ok(place) => {
                connections.spawn(serve_connection(stream, place, routes.clone(), timeouts.clone(), shutdown.clone()));
            }
            // An answer that does not fit into the socket's buffer is not worth a task.
            Err(_) => match stream {
                Connection::Plain(stream) => drop(stream.try_write(FULL)),
                secured => drop(secured),
            },
        }
    }
    connections.close();
    connections.wait().await;
    Ok(())
}

/// Waits until a connection without TLS sends data. It has no buffers before that.
async fn wait_for_data(stream: &TcpStream, headers_max: Duration, shutdown: &CancellationToken) -> bool {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY on a connection");
    }
    tokio::select! {
        first = tokio::time::timeout(headers_max, stream.readable()) => first.is_ok(),
        () = shutdown.cancelled() => false,
    }
}

async fn serve_connection(
    mut stream: Connection,
    place: OwnedSemaphorePermit,
    routes: Router,
    timeouts: Timeouts,
    shutdown: CancellationToken,
) {
    let Timeouts { headers_max, unread_max, .. } = timeouts;
    if let Connection::Plain(plain) = &stream
        && !wait_for_data(plain, headers_max, &shutdown).await
    {
        // It does not matter whether the peer receives the end.
        let _gone = stream.shutdown().await;
        return;
    }
    let has_request = Arc::new(AtomicBool::new(false));
    let certificate = stream.client_certificate().cloned();
    let certificate_ended = certificate.as_ref().map(|certificate| certificate.ended().clone()).unwrap_or_default();
    let service = TowerToHyperService::new(TrackingRouter { routes, has_request: has_request.clone(), certificate });
    let builder = connection_builder(headers_max);
    let socket = LimitedSocket::new(stream, place, unread_max);
    let mut served = pin!(builder.serve_connection(TokioIo::new(StrictLines::new(socket)), service));
    let mut late = pin!(first_request_timeout(has_request, headers_max));
    let mut draining = false;
    loop {
        tokio::select! {
            // An error means that the client left in the middle of a request.
            _ended = served.as_mut() => return,
            () = late.as_mut() => return,
            () = shutdown.cancelled(), if !draining => {
                draining = true;
                served.as_mut().graceful_shutdown();
            }
            // Its requests end with the reason; the client connects again with a valid certificate.
            () = certificate_ended.cancelled(), if !draining => {
                draining = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Returns the settings of one connection, for both protocols.
fn connection_builder(headers_max: Duration) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(headers_max).max_buf_size(HEAD_BYTES_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        // A client that has lost power does not close its connection.
        .keep_alive_interval(headers_max)
        .keep_alive_timeout(headers_max)
        .max_concurrent_streams(STREAMS_MAX)
        .max_pending_accept_reset_streams(RESETS_PENDING_MAX)
        .max_local_error_reset_streams(RESETS_OWN_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX);
    builder
}

/// Ends if no request arrived in time. The protocol's own deadline begins only once the protocol is known.
async fn first_request_timeout(has_request: Arc<AtomicBool>, headers_max: Duration) {
    tokio::time::sleep(headers_max).await;
    if has_request.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// The routes of one connection, which record that a request arrived, and pass on the client's certificate.
#[derive(Clone)]
struct TrackingRouter {
    routes: Router,
    has_request: Arc<AtomicBool>,
    certificate: Option<ClientCertificate>,
}

/// Returns the path without its final slash, which clients add when they build it from a base address.
fn without_last_slash(uri: &Uri) -> Option<Uri> {
    with_path(uri, uri.path().strip_suffix('/').filter(|path| !path.is_empty())?)
}

impl<B> Service<http::Request<B>> for TrackingRouter
where
    Router: Service<http::Request<B>>,
    <Router as Service<http::Request<B>>>::Future: Send + 'static,
{
    type Response = <Router as Service<http::Request<B>>>::Response;
    type Error = <Router as Service<http::Request<B>>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.routes.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        self.has_request.store(true, Ordering::Relaxed);
        if let Some(uri) = without_last_slash(request.uri()) {
            *request.uri_mut() = uri;
        }
        if let Some(certificate) = &self.certificate {
            request.extensions_mut().insert(certificate.clone());
        }
        Box::pin(self.routes.call(request))
    }
}
