//! How both sides of a connection prove that they belong to the cluster: by certificates, a join token, or both. Knows
//! nothing of what is sent afterwards.
//!
//! Every connection begins with a greeting, inside TLS where there is TLS:
//!
//! ```text
//! dialler  magic · has a token · nonce d                →
//!          ← magic · verdict · nonce l · keyed(token, "listener" d l)
//! dialler  keyed(token, "dialler" d l)                  →
//!          ← verdict
//! ```
//! A dialler that finds the listener's proof wrong answers with zeros. So a token is never sent, an overheard proof
//! cannot be used again, and a refused dialler receives the reason before a single frame of HTTP.

use crate::connection::Connection;
use crate::refused::{ConnectError, HandshakeRefusal};
use crate::tls::{TLS_ALERT, TLS_HANDSHAKE, Tls, unwrap_tls_error};
use crate::token::{JoinToken, NONCE_BYTES, random};
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The limit for TLS and the greeting together.
pub(crate) const PROOF_MAX: Duration = Duration::from_secs(5);
pub(crate) const MAGIC: [u8; 8] = *b"LOCKSTP1";
pub(crate) const PROOF_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + 1 + NONCE_BYTES;
pub(crate) const REPLY_BYTES: usize = MAGIC.len() + 1 + NONCE_BYTES + PROOF_BYTES;

/// The means by which a role proves itself, and the proof that it requires of its peers.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    pub token: Option<JoinToken>,
    pub tls: Option<Tls>,
}

impl Trust {
    /// The listener's side.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Result<Connection, ConnectError> {
        stream.set_nodelay(true)?;
        let mut connection = match &self.tls {
            None => Connection::Plain(stream),
            Some(tls) => Connection::Tls(Box::new(tls.accept(stream).await?)),
        };
        greet_dialler(&mut connection, self.token.as_ref()).await?;
        Ok(connection)
    }

    /// The dialler's side.
    pub(crate) async fn connect(&self, stream: TcpStream) -> Result<Connection, ConnectError> {
        stream.set_nodelay(true)?;
        let mut connection = match &self.tls {
            None => Connection::Plain(stream),
            Some(tls) => Connection::Tls(Box::new(tls.connect(stream).await?)),
        };
        greet_listener(&mut connection, self.token.as_ref()).await?;
        Ok(connection)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GreetingVerdict {
    Welcome = 0,
    TokenMissing = 1,
    TokenUnwanted = 2,
    TokenWrong = 3,
    Garbage = 4,
}

impl From<u8> for GreetingVerdict {
    fn from(byte: u8) -> GreetingVerdict {
        match byte {
            0 => GreetingVerdict::Welcome,
            1 => GreetingVerdict::TokenMissing,
            2 => GreetingVerdict::TokenUnwanted,
            3 => GreetingVerdict::TokenWrong,
            _ => GreetingVerdict::Garbage,
        }
    }
}

impl GreetingVerdict {
    fn accept(self) -> Result<(), HandshakeRefusal> {
        match self {
            GreetingVerdict::Welcome => Ok(()),
            GreetingVerdict::TokenMissing => Err(HandshakeRefusal::TokenMissing),
            GreetingVerdict::TokenUnwanted => Err(HandshakeRefusal::TokenUnwanted),
            GreetingVerdict::TokenWrong => Err(HandshakeRefusal::TokenWrong),
            GreetingVerdict::Garbage => Err(HandshakeRefusal::Garbage),
        }
    }
}

async fn greet_dialler(peer: &mut Connection, token: Option<&JoinToken>) -> Result<(), ConnectError> {
    let mut hello = [0; HELLO_BYTES];
    read_magic(peer, &mut hello, TLS_HANDSHAKE, HandshakeRefusal::TlsUnwanted).await?;
    let has_token = hello[MAGIC.len()] != 0;
    let dialler: [u8; NONCE_BYTES] = nonce_at(&hello, MAGIC.len() + 1);
    let listener: [u8; NONCE_BYTES] = random()?;
    let verdict = match (token, has_token) {
        (Some(_), false) => GreetingVerdict::TokenMissing,
        (None, true) => GreetingVerdict::TokenUnwanted,
        (Some(_), true) | (None, false) => GreetingVerdict::Welcome,
    };
    let mut reply = [0; REPLY_BYTES];
    reply[..MAGIC.len()].copy_from_slice(&MAGIC);
    reply[MAGIC.len()] = verdict as u8;
    reply[MAGIC.len() + 1..][..NONCE_BYTES].copy_from_slice(&listener);
    if let (Some(token), GreetingVerdict::Welcome) = (token, verdict) {
        let proof = token.proof("listener", &dialler, &listener);
        reply[REPLY_BYTES - PROOF_BYTES..].copy_from_slice(proof.as_bytes());
    }
    send(peer, &reply).await?;
    verdict.accept()?;
    let mut answer = [0; PROOF_BYTES];
    peer.read_exact(&mut answer).await.map_err(unwrap_tls_error)?;
    let verdict = match token {
        // Hashes are compared in constant time.
        Some(token) if token.proof("dialler", &dialler, &listener) != blake3::Hash::from_bytes(answer) => {
            GreetingVerdict::TokenWrong
        }
        _ => GreetingVerdict::Welcome,
    };
    let sent = send(peer, &[verdict as u8]).await;
    // A refused dialler may have left before this arrives.
    verdict.accept()?;
    Ok(sent?)
}

async fn greet_listener(peer: &mut Connection, token: Option<&JoinToken>) -> Result<(), ConnectError> {
    let dialler: [u8; NONCE_BYTES] = random()?;
    let mut hello = [0; HELLO_BYTES];
    hello[..MAGIC.len()].copy_from_slice(&MAGIC);
    hello[MAGIC.len()] = token.is_some().into();
    hello[MAGIC.len() + 1..].copy_from_slice(&dialler);
    send(peer, &hello).await.map_err(unwrap_tls_error)?;
    let mut reply = [0; REPLY_BYTES];
    read_magic(peer, &mut reply, TLS_ALERT, HandshakeRefusal::TlsMissing).await?;
    GreetingVerdict::from(reply[MAGIC.len()]).accept()?;
    let listener = nonce_at(&reply, MAGIC.len() + 1);
    let theirs = blake3::Hash::from_bytes(nonce_at(&reply, REPLY_BYTES - PROOF_BYTES));
    let is_ours = token.is_none_or(|token| token.proof("listener", &dialler, &listener) == theirs);
    // A listener with another token gets no proof; the zeros in its place show it why.
    let answer = match token {
        Some(token) if is_ours => *token.proof("dialler", &dialler, &listener).as_bytes(),
        _ => [0; PROOF_BYTES],
    };
    send(peer, &answer).await.map_err(unwrap_tls_error)?;
    if !is_ours {
        return Err(HandshakeRefusal::TokenWrong.into());
    }
    let mut verdict = [0];
    peer.read_exact(&mut verdict).await.map_err(unwrap_tls_error)?;
    Ok(GreetingVerdict::from(verdict[0]).accept()?)
}

async fn send(peer: &mut Connection, message: &[u8]) -> io::Result<()> {
    peer.write_all(message).await?;
    peer.flush().await
}

/// Reads a message that begins with the magic. The magic is checked first: a message that begins otherwise may be
/// shorter.
async fn read_magic(
    peer: &mut Connection,
    message: &mut [u8],
    tls: [u8; 2],
    is_tls: HandshakeRefusal,
) -> Result<(), ConnectError> {
    let (first, rest) = message.split_at_mut(tls.len());
    peer.read_exact(first).await.map_err(hung_up)?;
    if *first == tls {
        return Err(is_tls.into());
    }
    let magic = &mut rest[..MAGIC.len() - first.len()];
    if *first == MAGIC[..first.len()] {
        peer.read_exact(magic).await.map_err(hung_up)?;
    }
    if message[..MAGIC.len()] != MAGIC {
        return Err(HandshakeRefusal::Garbage.into());
    }
    let rest = &mut message[MAGIC.len()..];
    peer.read_exact(rest).await.map(drop).map_err(hung_up)
}

/// A peer that hangs up on a greeting is no role of Lockstep; other errors are those of TLS or the connection.
fn hung_up(error: io::Error) -> ConnectError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => HandshakeRefusal::Garbage.into(),
        _ => unwrap_tls_error(error),
    }
}

fn nonce_at(bytes: &[u8], at: usize) -> [u8; NONCE_BYTES] {
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[at..at + NONCE_BYTES]);
    nonce
}
