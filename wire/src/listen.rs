//! Listening: a peer that dials proves itself before anything else is read from it.

use crate::connection::Connection;
use crate::greeting::{PROOF_MAX, Trust};
use crate::refusals::Refusals;
use crate::refused::Unconnected;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;

/// The most peers that prove themselves at once; more wait in the listener's queue.
const PROVING_MAX: usize = 64;
/// The most connections that have proved themselves and were not yet taken.
const PROVED_MAX: usize = 64;
/// The pause after the listener failed, as when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The connections of a listener that have proved themselves. A peer that does not is told why, and is named in the
/// log, once a second.
pub fn incoming(listener: TcpListener, trust: Trust) -> impl Stream<Item = io::Result<Connection>> + Send {
    let (proved, connections) = mpsc::channel(PROVED_MAX);
    tokio::spawn(listen(listener, trust, proved));
    ReceiverStream::new(connections)
}

async fn listen(listener: TcpListener, trust: Trust, proved: mpsc::Sender<io::Result<Connection>>) {
    let proving = Arc::new(Semaphore::new(PROVING_MAX));
    let refusals = Arc::new(Refusals::default());
    loop {
        let Ok(permit) = proving.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            () = proved.closed() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (trust, proved, refusals) = (trust.clone(), proved.clone(), refusals.clone());
        tokio::spawn(async move {
            let _permit = permit;
            match timeout(PROOF_MAX, trust.accept(stream)).await.unwrap_or(Err(Unconnected::Late)) {
                Ok(connection) => {
                    // Nobody takes connections any more when the server has ended.
                    let _ended = proved.send(Ok(connection)).await;
                }
                Err(why) => log_refusal(peer, &why, &refusals),
            }
        });
    }
}

fn log_refusal(peer: SocketAddr, why: &Unconnected, refusals: &Refusals) {
    if let Some(unsaid) = refusals.admit(peer, 1, why) {
        tracing::warn!(%peer, %why, unsaid = unsaid.count(), last_unsaid = unsaid.last, "a peer is refused");
    }
}

/// A listener's connections, each without Nagle's delay.
pub fn tcp_incoming(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}
