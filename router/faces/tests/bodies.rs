//! How much memory a body takes while it is read, measured by an allocator that counts. In a process of its own, where
//! nothing else allocates.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "an allocator that counts")]

#[path = "router/model.rs"]
mod model;

use router::{Config, CoordinatorChannel};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

struct Counting;

static N_BYTES: AtomicUsize = AtomicUsize::new(0);
static N_BYTES_MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let n_bytes = N_BYTES.fetch_add(layout.size(), Relaxed) + layout.size();
        N_BYTES_MOST.fetch_max(n_bytes, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        N_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const HEAD: &str =
    "POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
/// A JSON string that never ends, a byte at a time.
const N_CHUNKS: usize = 1 << 20;
const CHUNK: &str = "1\r\n\"\r\n";

#[tokio::test]
async fn a_body_in_chunks_of_one_byte_takes_memory_by_its_bytes() {
    let (http, grpc) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let (address, shutdown) = (http.local_addr().unwrap(), CancellationToken::new());
    let coordinators: Vec<CoordinatorChannel> = Vec::new();
    let served =
        tokio::spawn(faces::serve(Config::default(), coordinators, model::text(), http, grpc, shutdown.clone()));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(HEAD.as_bytes()).await.unwrap();
    let many = CHUNK.repeat(1 << 10);
    let before = N_BYTES.load(Relaxed);
    N_BYTES_MOST.store(before, Relaxed);
    for _ in 0..N_CHUNKS >> 10 {
        stream.write_all(many.as_bytes()).await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let n_bytes = N_BYTES_MOST.load(Relaxed) - before;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    // The bytes that have come, the larger buffer into which they are copied, and the buffers of the connection.
    assert!(n_bytes < 5 * N_CHUNKS, "{n_bytes} bytes for a body of {N_CHUNKS}");
    shutdown.cancel();
    served.await.unwrap().unwrap();
}
