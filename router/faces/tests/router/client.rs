//! As much of an HTTP client as the tests need.

use serde_json::Value;
use std::collections::HashMap;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HashMap<String, String>,
    pub body: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// Each event's data.
    pub fn events(&self) -> Vec<String> {
        let data = |event: &str| line_of(event, "data: ");
        self.body.split("\n\n").filter_map(data).collect()
    }

    /// The id and data of each event that has an id.
    pub fn identified(&self) -> Vec<(String, String)> {
        let both = |event: &str| Some((line_of(event, "id: ")?, line_of(event, "data: ")?));
        self.body.split("\n\n").filter_map(both).collect()
    }

    /// All events but the last, which marks the end.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

fn line_of(event: &str, name: &str) -> Option<String> {
    event.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
}

pub async fn get(address: SocketAddr, path: &str) -> Reply {
    send(address, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await
}

/// Requests a stream from the position of an event's id on.
pub async fn post_after(address: SocketAddr, path: &str, last_event_id: &str, body: &Value) -> Reply {
    let request = posting(path, &body.to_string());
    let with_id = format!("host: localhost\r\nlast-event-id: {last_event_id}");
    send(address, &request.replacen("host: localhost", &with_id, 1)).await
}

pub async fn post_with_key(address: SocketAddr, path: &str, key: &str, body: &Value) -> Reply {
    let request = posting(path, &body.to_string());
    send(address, &request.replacen("host: localhost", &format!("host: localhost\r\nauthorization: Bearer {key}"), 1))
        .await
}

pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    post_text(address, path, &body.to_string()).await
}

pub async fn post_text(address: SocketAddr, path: &str, body: &str) -> Reply {
    send(address, &posting(path, body)).await
}

fn posting(path: &str, body: &str) -> String {
    let n = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {n}\r\n\r\n{body}"
    )
}

/// Sends a raw request, and reads to the end of the connection.
pub async fn send(address: SocketAddr, request: &str) -> Reply {
    send_bytes(address, request.as_bytes()).await
}

pub async fn send_bytes(address: SocketAddr, request: &[u8]) -> Reply {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    parse(&bytes)
}

/// Sends and reads until the answer contains `sign`; the caller drops the connection.
pub async fn post_until(address: SocketAddr, path: &str, body: &Value, sign: &str) -> TcpStream {
    let mut stream = post_and_leave_open(address, path, body).await;
    read_until(&mut stream, sign).await;
    stream
}

pub async fn post_and_leave_open(address: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(posting(path, &body.to_string()).as_bytes()).await.unwrap();
    stream
}

pub async fn read_until(stream: &mut TcpStream, sign: &str) -> String {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while !String::from_utf8_lossy(&bytes).contains(sign) {
        let n = stream.read(&mut buffer).await.unwrap();
        assert!(n > 0, "{sign:?} did not arrive in {:?}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn parse(bytes: &[u8]) -> Reply {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("no head");
    let head = std::str::from_utf8(&bytes[..end]).unwrap();
    let (first, rest) = head.split_once("\r\n").unwrap_or((head, ""));
    let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
    let headers: HashMap<String, String> = rest.lines().filter_map(header).collect();
    let chunked = headers.get("transfer-encoding").is_some_and(|encoding| encoding == "chunked");
    let body = if chunked { dechunk(&bytes[end + 4..]) } else { bytes[end + 4..].to_vec() };
    let status = first.split(' ').nth(1).unwrap().parse().unwrap();
    Reply { status, headers, body: String::from_utf8(body).unwrap() }
}

fn dechunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|window| window == b"\r\n").expect("a chunk's size");
        let n = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if n == 0 {
            return body;
        }
        body.extend_from_slice(&bytes[end + 2..end + 2 + n]);
        bytes = &bytes[end + 2 + n + 2..];
    }
}
