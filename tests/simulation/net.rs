//! Connections of the simulated network, in the form that the roles use. Has no knowledge of the frames.

use cluster::LastClaim;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio_stream::Stream;
use tonic::transport::{Channel, Uri};
use tower::service_fn;
use turmoil::net::{TcpListener, TcpStream};
use wire::Connection;

/// The port on which every role listens.
pub const PORT: u16 = 7000;

#[derive(Debug)]
struct Wire(TcpStream);

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// A listener's connections, on the host that calls this.
pub async fn listen() -> io::Result<wire::Incoming> {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).await?;
    Ok(Box::pin(Incoming { listener: Arc::new(listener), accepting: None }))
}

type Accepting = Pin<Box<dyn Future<Output = io::Result<(TcpStream, SocketAddr)>> + Send>>;

struct Incoming {
    listener: Arc<TcpListener>,
    accepting: Option<Accepting>,
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let listener = self.listener.clone();
        let accepting = self.accepting.get_or_insert_with(|| Box::pin(async move { listener.accept().await }));
        let accepted = ready!(accepting.as_mut().poll(cx));
        self.accepting = None;
        Poll::Ready(Some(accepted.map(|(stream, _)| Connection::Other(Box::new(Wire(stream))))))
    }
}

/// A channel with the limits and timers that every role uses.
pub fn channel(host: &str) -> Channel {
    let host = host.to_owned();
    wire::channel_over(service_fn(move |_: Uri| {
        let host = host.clone();
        async move { Ok(TokioIo::new(TcpStream::connect((host.as_str(), PORT)).await?)) }
    }))
}

/// Returns a channel to the host that has the last claim at each dial, until another host claims it.
pub fn channel_to_last(claim: watch::Receiver<LastClaim>) -> Channel {
    wire::channel_over(service_fn(move |_: Uri| {
        let LastClaim { address, superseded, .. } = claim.borrow().clone();
        async move {
            let stream = TcpStream::connect((address.as_str(), PORT)).await?;
            Ok(TokioIo::new(wire::CancellableIo::new(stream, superseded)))
        }
    }))
}
