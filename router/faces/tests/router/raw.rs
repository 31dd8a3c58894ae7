//! HTTP/2 by hand, for client behaviour that no library has. It answers pings, and sends nothing else by itself.

use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// `ENHANCE_YOUR_CALM`: the server rejects this client's load.
pub const CALM: [u8; 4] = [0, 0, 0, 11];
/// A setting: no data may be sent on a stream before a window update.
pub const NO_WINDOW: [u8; 6] = [0, 4, 0, 0, 0, 0];

pub struct Raw(TcpStream);

#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Raw {
    pub async fn connect(address: SocketAddr, settings: &[u8]) -> Raw {
        let mut raw = Raw(TcpStream::connect(address).await.unwrap());
        let preface = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(SETTINGS, 0, 0, settings)].concat();
        raw.write(&preface).await;
        raw
    }

    /// The server may close the connection midway.
    pub async fn write(&mut self, bytes: &[u8]) {
        drop(self.0.write_all(bytes).await);
    }

    /// Sends a request. `ends`: its body ends.
    pub async fn post(&mut self, stream: u32, path: &str, key: &str, body: &[u8], ends: bool) {
        self.write(&posting(stream, path, key, body, ends)).await;
    }

    /// None when the connection is over.
    pub async fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).await.ok()?;
        let n = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; n];
        self.0.read_exact(&mut payload).await.ok()?;
        let (kind, flags) = (head[3], head[4]);
        if kind == PING && flags == 0 {
            self.write(&frame(PING, 1, 0, &payload)).await;
        }
        Some(Frame { kind, flags, stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]), payload })
    }

    /// The first frame for which `holds` is true.
    pub async fn until(&mut self, holds: impl Fn(&Frame) -> bool) -> Option<Frame> {
        loop {
            let frame = self.next().await?;
            if holds(&frame) {
                return Some(frame);
            }
        }
    }
}

pub fn posting(stream: u32, path: &str, key: &str, body: &[u8], ends: bool) -> Vec<u8> {
    let headers = frame(HEADERS, END_HEADERS, stream, &headers(path, key));
    [headers, frame(DATA, if ends { END_STREAM } else { 0 }, stream, body)].concat()
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let n = (payload.len() as u32).to_be_bytes();
    [&n[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// POST over http: indexed fields where HPACK's table has them, the rest as plain text.
fn headers(path: &str, key: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let named = |name: &str, value: &str| [&[0][..], &text(name), &text(value)].concat();
    let mut all = vec![0x83, 0x86];
    all.extend([&[4][..], &text(path), &[1], &text("localhost")].concat());
    let kind = if path.starts_with("/v1/") { "application/json" } else { "application/grpc" };
    all.extend(named("content-type", kind));
    all.extend(named("te", "trailers"));
    if !key.is_empty() {
        all.extend(named("authorization", &format!("Bearer {key}")));
    }
    all
}

/// A request in gRPC's framing: the field `text`, by hand.
pub fn grpc_body(text: &str) -> Vec<u8> {
    let message = [&[0x12, text.len() as u8], text.as_bytes()].concat();
    [&[0, 0, 0, 0, message.len() as u8], &message[..]].concat()
}
