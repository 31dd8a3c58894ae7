//! A single-threaded hub on the loopback, for tests that pull from it. Has knowledge only of paths and bytes.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

pub struct Hub {
    pub endpoint: String,
    /// Paths with the first requested byte, in order.
    pub requests: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    /// Returns all requests except those for lists of files.
    pub fn file_requests(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        requests.iter().filter(|request| !request.starts_with(LISTS)).cloned().collect()
    }
}

/// The beginning of the paths of lists of files.
pub const LISTS: &str = "/api/";

/// A request: the path, the first byte, whether it had the token, and how many requests for files came before.
pub struct HubRequest {
    pub path: String,
    pub from: usize,
    pub has_token: bool,
    pub host: String,
    pub before: usize,
}

/// A hub's answer to one request.
pub struct Answer {
    pub status: &'static str,
    pub headers: String,
    pub body: Vec<u8>,
    /// The connection ends after this many bytes of the body.
    pub cut: usize,
}

impl Answer {
    pub fn new(status: &'static str, body: &[u8]) -> Answer {
        Answer { status, headers: String::new(), body: body.to_vec(), cut: usize::MAX }
    }

    /// Returns a file from `from` on, as a hub that supports ranges sends it.
    pub fn file(file: &[u8], from: usize) -> Answer {
        match from {
            0 => Answer::new("200 OK", file),
            _ => {
                let headers = format!("content-range: bytes {from}-{}/{}\r\n", file.len() - 1, file.len());
                Answer { headers, ..Answer::new("206 Partial Content", &file[from..]) }
            }
        }
    }

    fn send(self, mut stream: TcpStream) {
        let Answer { status, headers, body, cut } = self;
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        // A client without room closes the connection.
        let _ = stream.write_all(&body[..cut.min(length)]);
    }
}

/// Serves the given answers; each answer closes its connection. Ends with the process.
pub fn hub_that(answer: impl Fn(&HubRequest) -> Answer + Send + 'static) -> Hub {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let hub = Hub { endpoint, requests: Arc::new(Mutex::new(Vec::new())) };
    let log = hub.requests.clone();
    std::thread::spawn(move || {
        let mut n_files = 0;
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let request = read(&stream, n_files);
            n_files += usize::from(!request.path.starts_with(LISTS));
            log.lock().unwrap().push(format!("{} {}", request.path, request.from));
            answer(&request).send(stream);
        }
    });
    hub
}

fn read(stream: &TcpStream, before: usize) -> HubRequest {
    let mut lines = BufReader::new(stream).lines();
    let line = lines.next().unwrap().unwrap();
    // A list is requested with its folders and in pages, which a small hub does not have.
    let path = line.split([' ', '?']).nth(1).unwrap().to_owned();
    let mut request = HubRequest { path, from: 0, has_token: false, host: String::new(), before };
    for line in lines.map_while(std::io::Result::ok).take_while(|line| !line.is_empty()) {
        let line = line.to_lowercase();
        request.has_token |= line.starts_with("authorization:");
        request.host.push_str(line.strip_prefix("host: ").unwrap_or_default());
        if let Some(range) = line.strip_prefix("range: bytes=") {
            request.from = range.trim_end_matches('-').parse().unwrap();
        }
    }
    request
}

/// Serves files by their paths.
pub fn hub(files: HashMap<String, Vec<u8>>) -> Hub {
    hub_that(move |request| match files.get(&request.path) {
        Some(file) => Answer::file(file, request.from),
        None => Answer::new("404 Not Found", b""),
    })
}
