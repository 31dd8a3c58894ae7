//! Connections between roles: how they prove that they belong to the cluster, TLS, dialling and listening. Knows
//! nothing of the content.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod client_certificate;
mod connection;
mod dial;
mod greeting;
mod limits;
mod listen;
mod offered;
mod pipe;
mod places;
pub mod rate_limit;
pub mod refusals;
mod refused;
mod tls;
mod token;
mod until;

pub use client_certificate::ClientCertificate;
pub use connection::{Carrier, Connection, ConnectionFuture, Incoming};
pub use dial::{DialTarget, channel, channel_over, channel_to_where, tcp};
pub use greeting::Trust;
pub use limits::{HEADERS_BYTES_MAX, RESETS_OWN_MAX, RESETS_PENDING_MAX, STREAMS_MAX, server};
pub use listen::{incoming, incoming_by, incoming_clients, tcp_incoming};
pub use offered::{AlpnProtocol, OfferedTls, TlsOffer};
pub use pipe::{Dialer, Pipes, in_memory};
pub use refused::{ConnectError, HandshakeRefusal};
pub use tls::{SERVER_NAME, Tls};
pub use token::{BadToken, JoinToken, NoRandomness, TOKEN_CHARS_MAX, TOKEN_CHARS_MIN, random};
pub use until::CancellableIo;

#[cfg(test)]
mod tests;
