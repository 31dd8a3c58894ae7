//! A client's connection. It holds a place among the others, and has time limits to begin and to read its data. Has no
//! knowledge of protocols, except the length of HTTP/2's preface.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};
use tonic::transport::server::Connected;
use wire::ClientCertificate;

/// The length of HTTP/2's preface: before it has arrived, no deadline of the protocol runs.
const PREFACE_BYTES: usize = 24;
/// The time between the end of a client's certificate and that of its connection, in which calls receive the reason.
const FAREWELL: Duration = Duration::from_secs(1);

pub struct LimitedSocket<IO> {
    io: IO,
    /// The time until which a byte must have been written. Present while a write waits.
    unread: Option<Pin<Box<Sleep>>>,
    unread_max: Duration,
    /// Present until the client has begun.
    beginning: Option<StartDeadline>,
    /// Ready some time after the client's certificate has ended. Present if the client has one.
    certificate_ended: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    _place: OwnedSemaphorePermit,
}

struct StartDeadline {
    n_bytes: usize,
    late: Pin<Box<Sleep>>,
}

impl<IO> LimitedSocket<IO> {
    pub fn new(io: IO, place: OwnedSemaphorePermit, unread_max: Duration) -> LimitedSocket<IO> {
        LimitedSocket { io, unread: None, unread_max, beginning: None, certificate_ended: None, _place: place }
    }

    /// Closes the connection if it does not begin in time, for servers without such a limit.
    pub fn with_start_deadline(self, max: Duration) -> LimitedSocket<IO> {
        LimitedSocket { beginning: Some(StartDeadline { n_bytes: 0, late: Box::pin(sleep(max)) }), ..self }
    }

    /// Closes the connection when the client's certificate ends, so that the client connects again with a valid one.
    pub fn with_certificate(self, certificate: Option<ClientCertificate>) -> LimitedSocket<IO> {
        let ended = |certificate: ClientCertificate| -> Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                certificate.ended().cancelled().await;
                sleep(FAREWELL).await;
            })
        };
        LimitedSocket { certificate_ended: certificate.map(ended), ..self }
    }

    /// Returns the result of a write, or an error if the client has not read for too long.
    fn check_write_stall(
        &mut self,
        context: &mut Context<'_>,
        wrote: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if wrote.is_ready() {
            self.unread = None;
            return wrote;
        }
        let unread_max = self.unread_max;
        let unread = self.unread.get_or_insert_with(|| Box::pin(sleep(unread_max)));
        unread.as_mut().poll(context).map(|()| Err(timeout_error("the client does not read")))
    }
}

fn timeout_error(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}

impl<IO: AsyncRead + Unpin> AsyncRead for LimitedSocket<IO> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(ended) = &mut this.certificate_ended
            && ended.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the client's certificate ended",
            )));
        }
        let n_before = into.filled().len();
        let read = Pin::new(&mut this.io).poll_read(context, into);
        let Some(beginning) = &mut this.beginning else { return read };
        beginning.n_bytes += into.filled().len() - n_before;
        if beginning.n_bytes >= PREFACE_BYTES {
            this.beginning = None;
            return read;
        }
        match (&read, beginning.late.as_mut().poll(context)) {
            (Poll::Pending, Poll::Ready(())) => Poll::Ready(Err(timeout_error("the client sends nothing"))),
            _ => read,
        }
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for LimitedSocket<IO> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write(context, bytes);
        this.check_write_stall(context, wrote)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write_vectored(context, bytes);
        this.check_write_stall(context, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

impl<IO: Connected> Connected for LimitedSocket<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> IO::ConnectInfo {
        self.io.connect_info()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::sync::Semaphore;

    const MAX: Duration = Duration::from_secs(30);

    fn socket() -> (LimitedSocket<DuplexStream>, DuplexStream, Arc<Semaphore>) {
        let (ours, theirs) = duplex(16);
        let places = Arc::new(Semaphore::new(1));
        let place = places.clone().try_acquire_owned().unwrap();
        (LimitedSocket::new(ours, place, MAX), theirs, places)
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_served_and_one_that_never_reads_is_closed() {
        let (mut socket, mut reader, places) = socket();
        let writing = tokio::spawn(async move { socket.write_all(&[7; 64]).await });
        let mut piece = [0; 8];
        for _ in 0..4 {
            tokio::time::sleep(MAX - Duration::from_secs(1)).await;
            reader.read_exact(&mut piece).await.unwrap();
        }
        assert!(!writing.is_finished() && places.available_permits() == 0);
        let ended = writing.await.unwrap();
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(places.available_permits(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_does_not_begin_is_closed() {
        let (socket, mut client, _places) = socket();
        let mut socket = socket.with_start_deadline(MAX);
        client.write_all(b"PRI").await.unwrap();
        let mut received = Vec::new();
        assert_eq!(socket.read_to_end(&mut received).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(received, b"PRI");
        // Once it has begun, it may stay silent.
        let (socket, mut client, _places) = self::socket();
        let mut socket = socket.with_start_deadline(MAX);
        let sending = async {
            client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
            tokio::time::sleep(3 * MAX).await;
            drop(client);
        };
        let (n_read, ()) = tokio::join!(socket.read_to_end(&mut received), sending);
        assert_eq!(n_read.unwrap(), 24);
    }
}
