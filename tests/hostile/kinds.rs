//! Hostile connections: ten kinds, each against any port. Has knowledge of bytes, and of the ports' reactions.

use crate::secured::TlsHandshake;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// How long a connection that waits is held.
pub const HOLD: Duration = Duration::from_secs(2);
/// The limit for any of them: a port that neither reads nor closes costs its client no more time.
const WHOLE_MAX: Duration = Duration::from_secs(20);
const N_RESETS: u32 = 100;
const N_HEADERS: usize = 100_000;
const HEADER_BYTES: usize = 1 << 20;
/// The number of requests that were aborted; spreads their times.
static N_ABORTED: AtomicU64 = AtomicU64::new(0);
/// Bytes between two checks whether the port still reads.
const PORTION: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Idle,
    Slow,
    HalfOpen,
    OneByte,
    RapidReset,
    WrongProtocol,
    BadTls,
    HugeHeader,
    ManyHeaders,
    Aborted,
}

pub const KINDS: [Kind; 10] = [
    Kind::Idle,
    Kind::Slow,
    Kind::HalfOpen,
    Kind::OneByte,
    Kind::RapidReset,
    Kind::WrongProtocol,
    Kind::BadTls,
    Kind::HugeHeader,
    Kind::ManyHeaders,
    Kind::Aborted,
];

/// The outcome of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Went {
    /// The port has ended it, or answered.
    Ended,
    /// This side has ended it.
    Left,
    /// The port accepts no connection.
    Refused,
    /// Neither side could continue in time.
    Stuck,
}

/// A port, and the handshake that precedes the attack, if there is one.
#[derive(Clone)]
pub struct Port {
    pub address: SocketAddr,
    pub tls: Option<TlsHandshake>,
}

impl Port {
    pub fn plain(address: SocketAddr) -> Port {
        Port { address, tls: None }
    }
}

/// One connection of this kind.
pub async fn attack(kind: Kind, port: Port) -> Went {
    let whole = async {
        let Ok(stream) = TcpStream::connect(port.address).await else { return Went::Refused };
        // It leaves without a farewell; the others end in their own ways.
        if kind == Kind::Aborted && stream.set_zero_linger().is_err() {
            return Went::Refused;
        }
        let went = match port.tls {
            None => play(kind, stream).await,
            Some(tls) => match tls.connect(stream).await {
                Ok(stream) => play(kind, stream).await,
                Err(_) => Ok(Went::Refused),
            },
        };
        went.unwrap_or(Went::Ended)
    };
    timeout(WHOLE_MAX, whole).await.unwrap_or(Went::Stuck)
}

async fn play(kind: Kind, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<Went> {
    match kind {
        Kind::Idle => Ok(held(&mut stream, HOLD).await),
        Kind::Slow => slow(&mut stream).await,
        Kind::HalfOpen => {
            stream.shutdown().await?;
            Ok(held(&mut stream, HOLD).await)
        }
        Kind::OneByte => {
            stream.write_all(&[0x7f]).await?;
            stream.flush().await?;
            Ok(held(&mut stream, HOLD / 4).await)
        }
        Kind::RapidReset => {
            all_of(&mut stream, &resets()).await?;
            Ok(held(&mut stream, HOLD / 4).await)
        }
        Kind::WrongProtocol => {
            stream.write_all(b"SSH-2.0-OpenSSH_9.7\r\n\0\0\x01\x2c\x06\x14 version\r\n*1\r\n$4\r\nPING\r\n").await?;
            stream.flush().await?;
            Ok(held(&mut stream, HOLD / 4).await)
        }
        Kind::BadTls => {
            // A handshake that announces more bytes than arrive, and that is invalid.
            let mut hello = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
            hello.extend((0..200u8).map(|i| i.wrapping_mul(37)));
            stream.write_all(&hello).await?;
            stream.flush().await?;
            Ok(held(&mut stream, HOLD / 4).await)
        }
        Kind::HugeHeader => {
            stream.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\nx: ").await?;
            all_of(&mut stream, &vec![b'a'; HEADER_BYTES]).await?;
            Ok(held(&mut stream, HOLD / 4).await)
        }
        Kind::ManyHeaders => {
            stream.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n").await?;
            all_of(&mut stream, "a: b\r\n".repeat(N_HEADERS).as_bytes()).await?;
            stream.write_all(b"\r\n").await?;
            stream.flush().await?;
            Ok(held(&mut stream, HOLD / 4).await)
        }
        Kind::Aborted => {
            let body = "{\"prompt\": \"it never ends\", \"max_tokens\": 64, \"stream\": true}";
            let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: ";
            stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).await?;
            stream.flush().await?;
            // Some leave before the answer, some within it.
            sleep(Duration::from_millis(N_ABORTED.fetch_add(1, Relaxed) % 20)).await;
            Ok(Went::Left)
        }
    }
}

/// Reads until the port ends the connection, at most for this long.
async fn held(stream: &mut (impl AsyncRead + Unpin), long: Duration) -> Went {
    let mut bytes = vec![0; PORTION];
    let until_ended = async { while !matches!(stream.read(&mut bytes).await, Ok(0) | Err(_)) {} };
    match timeout(long, until_ended).await {
        Ok(()) => Went::Ended,
        Err(_) => Went::Left,
    }
}

async fn slow(stream: &mut (impl AsyncWrite + Unpin)) -> std::io::Result<Went> {
    for byte in "GET /health HTT".bytes() {
        stream.write_all(&[byte]).await?;
        stream.flush().await?;
        sleep(HOLD / 16).await;
    }
    Ok(Went::Left)
}

async fn all_of(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    for portion in bytes.chunks(PORTION) {
        stream.write_all(portion).await?;
    }
    stream.flush().await
}

/// HTTP/2: streams that are opened and reset immediately.
fn resets() -> Vec<u8> {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    const SETTINGS: u8 = 4;
    const END_HEADERS: u8 = 4;
    const CANCEL: [u8; 4] = [0, 0, 0, 8];
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let len = payload.len() as u8;
        [&[0, 0, len, kind, flags][..], &stream.to_be_bytes(), payload].concat()
    };
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    for i in 0..N_RESETS {
        // POST, http, / and an authority, by HPACK's static table.
        bytes.extend(frame(HEADERS, END_HEADERS, 2 * i + 1, &[0x83, 0x86, 0x84, 0x41, 1, b'x']));
        bytes.extend(frame(RST_STREAM, 0, 2 * i + 1, &CANCEL));
    }
    bytes
}
