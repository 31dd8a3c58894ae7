//! Listening: a peer that dials proves itself before anything else is read from it.

use crate::connection::{Connection, Incoming};
use crate::greeting::{PROOF_MAX, Trust};
use crate::offered::{AlpnProtocol, OfferedTls};
use crate::refusals::Refusals;
use crate::refused::ConnectError;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;

/// The most peers that prove themselves at once; more wait in the listener's queue.
const PROVING_MAX: usize = 128;
/// The time of a proof between distant machines. A peer that took longer loses its place if others wait: a silent peer
/// keeps them out for no longer than this.
const PROOF_USUAL: Duration = Duration::from_millis(200);
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
    let mut proving = HandshakeSlots::new();
    let refusals = Arc::new(Refusals::default());
    loop {
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
        let Some(place) = proving.place().await else { return };
        let (proof, proved, refusals) = (proof.clone(), proved.clone(), refusals.clone());
        tokio::spawn(async move {
            match place.prove(&proof, stream).await {
                Ok((connection, _place)) => {
                    // No caller takes connections once the server has ended.
                    let _ended = proved.send(Ok(connection)).await;
                }
                Err(why) => log_refusal(peer, &why, &refusals),
            }
        });
    }
}

/// The places of the peers that prove themselves.
struct HandshakeSlots {
    places: Arc<Semaphore>,
    /// The peers that have a place, the longest there first.
    peers: VecDeque<(Instant, oneshot::Sender<()>)>,
}

/// A peer's place until it has proved itself, and then until its connection is taken.
struct HandshakeSlot {
    permit: OwnedSemaphorePermit,
    /// Ends when the place is given to another peer.
    lost: oneshot::Receiver<()>,
}

impl HandshakeSlots {
    fn new() -> HandshakeSlots {
        HandshakeSlots { places: Arc::new(Semaphore::new(PROVING_MAX)), peers: VecDeque::new() }
    }

    /// A place for one more peer: a free one, or that of the peer which has tried longest, once it has had its time.
    async fn place(&mut self) -> Option<HandshakeSlot> {
        loop {
            self.peers.retain(|(_, place)| !place.is_closed());
            let left = self.peers.front().map(|(since, _)| PROOF_USUAL.saturating_sub(since.elapsed()));
            // Without a peer that could lose its place, those that have proved themselves hold all places.
            let free = timeout(left.unwrap_or(PROOF_USUAL), self.places.clone().acquire_owned()).await;
            match free {
                Ok(Ok(permit)) => {
                    let (kept, lost) = oneshot::channel();
                    self.peers.push_back((Instant::now(), kept));
                    return Some(HandshakeSlot { permit, lost });
                }
                Ok(Err(_closed)) => return None,
                // Its task ends with the sender, and leaves the place.
                Err(_elapsed) => drop(self.peers.pop_front()),
            }
        }
    }
}

impl HandshakeSlot {
    async fn prove(
        self,
        proof: &HandshakeKind,
        stream: TcpStream,
    ) -> Result<(Connection, OwnedSemaphorePermit), ConnectError> {
        let HandshakeSlot { permit, lost } = self;
        tokio::select! {
            proved = timeout(PROOF_MAX, proof.accept(stream)) => {
                let connection = proved.unwrap_or(Err(ConnectError::Late))?;
                Ok((connection, permit))
            }
            _ = lost => Err(ConnectError::Displaced),
        }
    }
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
