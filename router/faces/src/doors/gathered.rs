//! A connection whose writes wait for one turn of the runtime, so that the output of many of its streams in one step
//! leaves in one write. Has no knowledge of frames.
//!
//! A runtime runs the most recently woken task first. Without this, the connection would run after each stream with
//! output, and write that output alone. A task that waits a turn is queued behind all tasks that are awake by then. If
//! there are none, it does not wait.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

pub struct WriteCoalescer<IO> {
    io: IO,
    /// Whether it has waited since the last flush.
    has_waited: bool,
}

impl<IO> WriteCoalescer<IO> {
    pub fn new(io: IO) -> WriteCoalescer<IO> {
        WriteCoalescer { io, has_waited: false }
    }

    fn poll_yield_once(&mut self, context: &Context<'_>) -> Poll<()> {
        if self.has_waited {
            return Poll::Ready(());
        }
        self.has_waited = true;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for WriteCoalescer<IO> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, into)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for WriteCoalescer<IO> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_yield_once(context));
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_yield_once(context));
        Pin::new(&mut self.io).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.has_waited = false;
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

impl<IO: Connected> Connected for WriteCoalescer<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.io.connect_info()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use tokio::io::AsyncWriteExt;
    use tokio::sync::Notify;

    /// Counts writes.
    struct Counting(Arc<AtomicUsize>);

    impl AsyncWrite for Counting {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.0.fetch_add(1, Relaxed);
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// The test acts like a connection: each of its streams wakes it, and it writes all of their output so far.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn tokens_of_one_step_leave_in_one_write() {
        let (n_writes, n_ready, news) = (Arc::default(), Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let mut io = WriteCoalescer::new(Counting(Arc::clone(&n_writes)));
        let connection = tokio::spawn({
            let (n_ready, news) = (n_ready.clone(), news.clone());
            async move {
                let mut n_written = 0;
                while n_written < 60 {
                    news.notified().await;
                    io.write_all(b"frame").await.unwrap();
                    n_written = n_ready.load(Relaxed);
                    io.flush().await.unwrap();
                }
            }
        });
        // A task spawns them, so all are awake before the first of them runs.
        tokio::spawn(async move {
            for _ in 0..60 {
                let (n_ready, news) = (n_ready.clone(), news.clone());
                tokio::spawn(async move {
                    n_ready.fetch_add(1, Relaxed);
                    news.notify_one();
                });
            }
        });
        connection.await.unwrap();
        assert!(n_writes.load(Relaxed) < 10, "{n_writes:?}");
    }
}
