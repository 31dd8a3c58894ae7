//! Listening: a peer that dials proves itself before anything else is read from it.

use crate::connection::{Connection, Incoming};
use crate::greeting::{PROOF_MAX, Trust};
use crate::offered::{AlpnProtocol, OfferedTls};
use crate::places::{Place, Places};
use crate::refusals::Refusals;
use crate::refused::ConnectError;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;

/// The most connections that have proved themselves and were not yet taken.
const PROVED_MAX: usize = 64;
/// The pause after the listener failed, as when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The step that a peer must complete before anything else is read from it.
#[derive(Clone)]
enum HandshakeKind {
    /// Prove that it belongs to the cluster.
    Role(watch::Receiver<Trust>),
    /// Shake hands, as any client may.
    Client(OfferedTls, AlpnProtocol),
}

impl HandshakeKind {
    async fn accept(&self, stream: TcpStream) -> Result<Connection, ConnectError> {
        match self {
            HandshakeKind::Role(trust) => {
                let trust = trust.borrow().clone();
                trust.accept(stream).await
            }
            HandshakeKind::Client(tls, spoken) => tls.accept(stream, *spoken).await,
        }
    }
}

/// Returns the connections of a listener that have proved themselves. Any other peer receives the reason, and the log
/// names it once a second.
pub fn incoming(listener: TcpListener, trust: Trust) -> Incoming {
    incoming_by(listener, watch::channel(trust).1)
}

/// The same where the trust may change: a change applies to connections that come later.
pub fn incoming_by(listener: TcpListener, trust: watch::Receiver<Trust>) -> Incoming {
    spawn_listener(listener, HandshakeKind::Role(trust))
}

/// Returns the connections of clients whose handshakes are done. The limits of number and time are those of roles.
pub fn incoming_clients(listener: TcpListener, tls: OfferedTls, spoken: AlpnProtocol) -> Incoming {
    spawn_listener(listener, HandshakeKind::Client(tls, spoken))
}

fn spawn_listener(listener: TcpListener, proof: HandshakeKind) -> Incoming {
    let (proved, connections) = mpsc::channel(PROVED_MAX);
    tokio::spawn(listen(listener, proof, proved));
    Box::pin(ReceiverStream::new(connections))
}

async fn listen(listener: TcpListener, proof: HandshakeKind, proved: mpsc::Sender<io::Result<Connection>>) {
    let mut places = Places::new();
    let refusals = Arc::new(Refusals::default());
    loop {
        let accepted = tokio::select! {
            () = proved.closed() => return,
            accepted = listener.accept() => Some(accepted),
            () = places.changed() => None,
        };
        match accepted {
            Some(Ok((stream, peer))) => {
                if let Some((_, peer)) = places.arrive(peer.ip(), (stream, peer)) {
                    log_refusal(peer, &ConnectError::Displaced, &refusals);
                }
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "no connection can be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            None => {}
        }
        while let Some((place, (stream, peer))) = places.admit(Instant::now()) {
            let (proof, proved, refusals) = (proof.clone(), proved.clone(), refusals.clone());
            tokio::spawn(async move {
                match prove(place, &proof, stream).await {
                    Ok((connection, _place)) => {
                        // No caller takes connections once the server has ended.
                        let _ended = proved.send(Ok(connection)).await;
                    }
                    Err(why) => log_refusal(peer, &why, &refusals),
                }
            });
        }
    }
}

async fn prove(
    mut place: Place,
    proof: &HandshakeKind,
    stream: TcpStream,
) -> Result<(Connection, Place), ConnectError> {
    let connection = tokio::select! {
        proved = timeout(PROOF_MAX, proof.accept(stream)) => proved.unwrap_or(Err(ConnectError::Late))?,
        () = place.lost() => return Err(ConnectError::Displaced),
    };
    place.prove();
    Ok((connection, place))
}

fn log_refusal(peer: SocketAddr, why: &ConnectError, refusals: &Refusals) {
    if let Some(suppressed) = refusals.admit(peer, 1, why) {
        tracing::warn!(%peer, %why, unsaid = suppressed.count(), last_unsaid = suppressed.last, "a peer is refused");
    }
}

/// A listener's connections, each without Nagle's delay.
pub fn tcp_incoming(listener: TcpListener) -> Incoming {
    let accepted = TcpIncoming::from(listener).with_nodelay(Some(true));
    Box::pin(accepted.map(|accepted| accepted.map(Connection::Plain)))
}
