//! A connection between two roles that have proved themselves, or of a client, whatever carries it.

use crate::client_certificate::ClientCertificate;
use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tokio_stream::Stream;
use tonic::transport::server::Connected;

/// The connections that a server accepts. One type for all servers: each is compiled once, in its own crate.
pub type Incoming = Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>>;

/// A role that runs as long as this is polled. A role's crate boxes it: the future of a public async fn would be
/// compiled again in every binary that polls it.
pub type ConnectionFuture<E> = Pin<Box<dyn Future<Output = Result<(), E>> + Send>>;

/// A carrier of a connection other than TCP: a simulated network, for example.
pub trait Carrier: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<IO: AsyncRead + AsyncWrite + Debug + Send + Unpin> Carrier for IO {}

/// A connection that has proved itself.
#[derive(Debug)]
pub enum Connection {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    /// A client that has shown a certificate.
    OfClient(Box<TlsStream<TcpStream>>, ClientCertificate),
    /// A pipe within the process: no proof is needed.
    Pipe(DuplexStream),
    Other(Box<dyn Carrier>),
}

macro_rules! either {
    ($self:ident, $io:ident => $call:expr) => {
        match $self.get_mut() {
            Connection::Plain(io) => {
                let $io = Pin::new(io);
                $call
            }
            Connection::Tls(io) | Connection::OfClient(io, _) => {
                let $io = Pin::new(&mut **io);
                $call
            }
            Connection::Pipe(io) => {
                let $io = Pin::new(io);
                $call
            }
            Connection::Other(io) => {
                let $io = Pin::new(&mut **io);
                $call
            }
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_read(cx, buf))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, io => io.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, io => io.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Connection::Plain(io) => io.is_write_vectored(),
            Connection::Tls(io) | Connection::OfClient(io, _) => io.is_write_vectored(),
            Connection::Pipe(io) => io.is_write_vectored(),
            Connection::Other(io) => io.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, io => io.poll_shutdown(cx))
    }
}

impl Connection {
    /// Returns the certificate that a client had to show.
    pub fn client_certificate(&self) -> Option<&ClientCertificate> {
        match self {
            Connection::OfClient(_, certificate) => Some(certificate),
            _ => None,
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Option<ClientCertificate>;

    fn connect_info(&self) -> Option<ClientCertificate> {
        self.client_certificate().cloned()
    }
}
