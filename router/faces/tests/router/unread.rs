//! Bodies that are not read, on connections that are used again.

use crate::client::{post_text, read_until};
use crate::{House, config, run};
use std::net::SocketAddr;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const COMPLETIONS: &str = "/v1/completions";

async fn reuse_connection(http: SocketAddr, first: &str) -> String {
    let mut stream = TcpStream::connect(http).await.unwrap();
    stream.write_all(first.as_bytes()).await.unwrap();
    let head = read_until(&mut stream, "\r\n\r\n").await;
    if head.contains("connection: close") {
        return head;
    }
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    read_until(&mut stream, "alive").await
}

#[test]
fn unread_body_keeps_connection_or_announces_its_close() {
    run(async {
        let house = House::open(config()).await;
        let posting = |path: &str, n: usize| {
            let body = "x".repeat(n);
            format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {n}\r\n\r\n{body}")
        };
        assert!(reuse_connection(house.http, &posting("/nowhere", 100 << 10)).await.ends_with("alive\n"));
        let reply = reuse_connection(house.http, &posting("/nowhere", 300 << 10)).await;
        assert!(reply.starts_with("HTTP/1.1 404") && reply.contains("connection: close"), "{reply}");
        // The server does not wait for a body that never comes.
        let halted = "POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx";
        assert!(reuse_connection(house.http, halted).await.contains("connection: close"));
        let whole = posting("/v1/completions", 3);
        assert!(reuse_connection(house.http, &whole).await.ends_with("alive\n"));
        assert_eq!(post_text(house.http, COMPLETIONS, r#"{"prompt": "a"}"#).await.status, 200);
        house.close().await;
    });
}
