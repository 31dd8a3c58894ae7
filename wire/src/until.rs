//! A connection that ends when its caller cancels it. Knows nothing of the content.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Reads fail once `end` is cancelled, whatever the peer does. HTTP/2 always reads, so the connection is closed then.
pub struct CancellableIo<IO> {
    io: IO,
    end: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<IO> CancellableIo<IO> {
    pub fn new(io: IO, end: CancellationToken) -> CancellableIo<IO> {
        CancellableIo { io, end: Box::pin(end.cancelled_owned()) }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for CancellableIo<IO> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.end.as_mut().poll(cx).is_ready() {
            let why = "another coordinator has claimed the replica";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, why)));
        }
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for CancellableIo<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
