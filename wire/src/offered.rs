//! TLS towards clients outside the cluster: a listener shows its certificate, requires one if configured to, and may
//! get another while it serves. Knows nothing of where keys come from.

use crate::client_certificate::{ClientCertificate, PresentedChain};
use crate::connection::Connection;
use crate::refused::{ConnectError, HandshakeRefusal};
use crate::tls::{TLS_HANDSHAKE, refused, unwrap_tls_error};
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use std::fmt;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsStream};

/// The protocol behind a handshake, by the names that clients choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlpnProtocol {
    /// HTTP/2 or HTTP/1.1, as the client prefers.
    Http,
    /// HTTP/2 alone.
    Grpc,
}

impl AlpnProtocol {
    fn names(self) -> Vec<Vec<u8>> {
        let names: &[&str] = match self {
            AlpnProtocol::Http => &["h2", "http/1.1"],
            AlpnProtocol::Grpc => &["h2"],
        };
        names.iter().map(|name| name.as_bytes().to_vec()).collect()
    }
}

/// A certificate for clients, and the check of theirs.
pub struct TlsOffer {
    pub config: ServerConfig,
    /// The verifier that is part of the config. None: clients need no certificate.
    pub verifier: Option<Arc<dyn ClientCertVerifier>>,
}

/// The TLS that clients are offered; clones share it.
#[derive(Clone)]
pub struct OfferedTls(watch::Sender<TlsConfigs>);

/// One certificate, as each kind of listener offers it.
#[derive(Clone)]
pub(crate) struct TlsConfigs {
    http: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
    pub(crate) verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl TlsConfigs {
    fn of(TlsOffer { config, verifier }: TlsOffer) -> TlsConfigs {
        let speaks = |spoken: AlpnProtocol| {
            let mut config = config.clone();
            config.alpn_protocols = spoken.names();
            Arc::new(config)
        };
        TlsConfigs { http: speaks(AlpnProtocol::Http), grpc: speaks(AlpnProtocol::Grpc), verifier }
    }

    fn speaking(&self, spoken: AlpnProtocol) -> Arc<ServerConfig> {
        match spoken {
            AlpnProtocol::Http => self.http.clone(),
            AlpnProtocol::Grpc => self.grpc.clone(),
        }
    }
}

/// The answer to a client that speaks HTTP/1.1 without TLS.
const PLAIN: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 30\r\n\
    connection: close\r\n\r\nthis port speaks TLS: https://";
/// Bytes of such a request that are read before it is answered: a connection that closes on unread bytes takes the
/// answer with it.
const PLAIN_READ_BYTES: usize = 4096;

impl OfferedTls {
    pub fn new(offer: TlsOffer) -> OfferedTls {
        OfferedTls(watch::Sender::new(TlsConfigs::of(offer)))
    }

    /// New handshakes see this. A connection goes on as it began, if its client's certificate is still accepted.
    pub fn replace(&self, offer: TlsOffer) {
        self.0.send_replace(TlsConfigs::of(offer));
    }

    pub(crate) async fn accept(&self, mut stream: TcpStream, spoken: AlpnProtocol) -> Result<Connection, ConnectError> {
        stream.set_nodelay(true)?;
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first[0] != TLS_HANDSHAKE[0] {
            let _read = stream.read(&mut [0; PLAIN_READ_BYTES]).await?;
            stream.write_all(PLAIN).await?;
            stream.shutdown().await?;
            return Err(HandshakeRefusal::TlsMissing.into());
        }
        // Subscribed before the handshake, so that no replacement is missed.
        let mut offers = self.0.subscribe();
        let offer = offers.borrow_and_update().clone();
        let acceptor = TlsAcceptor::from(offer.speaking(spoken));
        let accepted: TlsStream<TcpStream> = acceptor.accept(stream).await.map_err(unwrap_tls_error)?.into();
        let chain = accepted.get_ref().1.peer_certificates().map(PresentedChain::of);
        let Some(chain) = chain.filter(|_| offer.verifier.is_some()) else {
            return Ok(Connection::Tls(Box::new(accepted)));
        };
        // A resumed session was verified at its first handshake, which may be long ago.
        chain.verify(&offer, rustls::pki_types::UnixTime::now()).map_err(|why| refused(&why))?;
        Ok(Connection::OfClient(Box::new(accepted), ClientCertificate::watch(chain, offers)))
    }
}

impl fmt::Debug for OfferedTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfferedTls(..)")
    }
}
