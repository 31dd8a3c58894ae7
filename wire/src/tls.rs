//! TLS between roles, with certificates on both sides. Knows nothing of where keys come from.

use crate::refused::{ConnectError, HandshakeRefusal};
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, ServerConfig};
use std::io;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// The name in every role's certificate. Machines come and go, so a certificate proves the cluster.
pub const SERVER_NAME: &str = "lockstep.cluster";

/// The first bytes of a TLS record: of an alert, and of the first message of a handshake.
pub(crate) const TLS_ALERT: [u8; 2] = [21, 3];
pub(crate) const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// Both sides require a certificate of the cluster from the peer.
#[derive(Clone, Debug)]
pub struct Tls {
    pub server: Arc<ServerConfig>,
    pub client: Arc<ClientConfig>,
}

impl Tls {
    pub(crate) async fn accept(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, ConnectError> {
        let accepted = TlsAcceptor::from(self.server.clone()).accept(stream).await.map_err(unwrap_tls_error)?;
        Ok(accepted.into())
    }

    pub(crate) async fn connect(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>, ConnectError> {
        let name = ServerName::try_from(SERVER_NAME).expect("a constant name that is valid");
        let connected =
            TlsConnector::from(self.client.clone()).connect(name, stream).await.map_err(unwrap_tls_error)?;
        Ok(connected.into())
    }
}

/// Unwraps the rustls error that a stream's error contains, if it does.
pub(crate) fn unwrap_tls_error(error: io::Error) -> ConnectError {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).map(refused);
    tls.map_or(ConnectError::Io(error), ConnectError::Refused)
}

pub(crate) fn refused(error: &rustls::Error) -> HandshakeRefusal {
    use rustls::AlertDescription as Alert;
    use rustls::Error as E;
    match error {
        E::InvalidCertificate(
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. },
        )
        | E::AlertReceived(Alert::CertificateExpired) => HandshakeRefusal::Expired,
        E::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)
        | E::AlertReceived(Alert::UnknownCA | Alert::DecryptError) => HandshakeRefusal::Stranger,
        other => HandshakeRefusal::Certificate(other.to_string()),
    }
}
