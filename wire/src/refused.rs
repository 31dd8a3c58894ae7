//! Why there is no connection, in words for operators of the cluster.

use crate::token::NoRandomness;
use std::io;

/// Why a connection did not come about though the peer was reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeRefusal {
    /// Or it is not valid yet: TLS has one word for both.
    #[error("the certificate has expired or is not valid yet, or this machine's clock is wrong")]
    Expired,
    #[error("the certificate does not belong to this cluster: check the join token or the authority")]
    Stranger,
    #[error("the certificate is refused: {0}")]
    Certificate(String),
    #[error("the dialler uses TLS, but the listener does not")]
    TlsUnwanted,
    #[error("the listener uses TLS, but the dialler does not")]
    TlsMissing,
    #[error("the join tokens differ")]
    TokenWrong,
    #[error("the listener requires a join token, but the dialler has none")]
    TokenMissing,
    #[error("the dialler has a join token, but the listener requires none")]
    TokenUnwanted,
    #[error("the peer is not a role of a cluster of this version")]
    Garbage,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Refused(#[from] HandshakeRefusal),
    #[error("no connection: {0}")]
    Io(#[from] io::Error),
    #[error("the connection timed out")]
    Late,
    #[error("the handshake took longer than usual while other connections waited")]
    Displaced,
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    /// There was no address to dial.
    #[error("{0}")]
    Nowhere(String),
}

impl HandshakeRefusal {
    /// The refusal in an error's chain of causes, if there is one.
    pub fn cause_of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a HandshakeRefusal> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(refused) = error.downcast_ref() {
                return Some(refused);
            }
            if let Some(ConnectError::Refused(refused)) = error.downcast_ref() {
                return Some(refused);
            }
            next = error.source();
        }
        None
    }

    /// True if another attempt would fail alike. Garbage may come from another program that holds the port for a while.
    /// A certificate becomes valid, or is replaced while this process runs.
    pub fn is_final(&self) -> bool {
        !matches!(self, HandshakeRefusal::Garbage | HandshakeRefusal::Expired)
    }
}
