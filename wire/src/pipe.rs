//! Pipes in memory, for roles within one process: the same frames as between machines, without TLS or token.

use crate::connection::Connection;
use crate::dial::channel_over;
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::codegen::Service;
use tonic::transport::{Channel, Uri};

/// The most bytes under way in each direction of a pipe.
const PIPE_BYTES_MAX: usize = 256 << 10;
/// The most connections that were dialled and not yet accepted.
const PIPES_WAITING_MAX: usize = 64;

/// Both ends of an in-memory listener: one dials, the other accepts.
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
        channel_over(self.clone())
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
            let refused = |_| io::Error::new(io::ErrorKind::ConnectionRefused, "this process accepts no connections");
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
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.pipes.poll_recv(cx).map(|pipe| pipe.map(|pipe| Ok(Connection::Pipe(pipe))))
    }
}
