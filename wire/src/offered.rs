//! TLS towards clients outside the cluster: a listener shows its certificate, requires one if configured to, and may
//! get another while it serves. Knows nothing of where keys come from.

use crate::connection::Connection;
use crate::refused::{ConnectError, HandshakeRefusal};
use crate::tls::{TLS_HANDSHAKE, unwrap_tls_error};
use rustls::ServerConfig;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

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

/// The TLS that clients are offered; clones share it.
#[derive(Clone)]
pub struct OfferedTls(Arc<RwLock<TlsConfigs>>);

/// One certificate, as each kind of listener offers it.
struct TlsConfigs {
    http: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
}

impl TlsConfigs {
    fn of(config: ServerConfig) -> TlsConfigs {
        let speaks = |spoken: AlpnProtocol| {
            let mut config = config.clone();
            config.alpn_protocols = spoken.names();
            Arc::new(config)
        };
        TlsConfigs { http: speaks(AlpnProtocol::Http), grpc: speaks(AlpnProtocol::Grpc) }
    }
}

/// The answer to a client that speaks HTTP/1.1 without TLS.
const PLAIN: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 30\r\n\
    connection: close\r\n\r\nthis port speaks TLS: https://";
/// Bytes of such a request that are read before it is answered: a connection that closes on unread bytes takes the
/// answer with it.
const PLAIN_READ_BYTES: usize = 4096;

impl OfferedTls {
    pub fn new(config: ServerConfig) -> OfferedTls {
        OfferedTls(Arc::new(RwLock::new(TlsConfigs::of(config))))
    }

    /// New handshakes see this; connections go on as they began.
    pub fn replace(&self, config: ServerConfig) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = TlsConfigs::of(config);
    }

    fn now(&self, spoken: AlpnProtocol) -> Arc<ServerConfig> {
        let offer = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match spoken {
            AlpnProtocol::Http => offer.http.clone(),
            AlpnProtocol::Grpc => offer.grpc.clone(),
        }
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
        let accepted = TlsAcceptor::from(self.now(spoken)).accept(stream).await.map_err(unwrap_tls_error)?;
        Ok(Connection::Tls(Box::new(accepted.into())))
    }
}

impl fmt::Debug for OfferedTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfferedTls(..)")
    }
}
