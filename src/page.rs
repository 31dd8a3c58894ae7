//! The page of a role that no client talks to: whether it lives, whether it can serve, and what it has counted. Knows
//! nothing of the role itself, and trusts nobody: it tells, and takes nothing.

use anyhow::Context;
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// Prometheus's text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4";

/// Answers for as long as the process lives, a drain included: who watches wants to see its end.
pub async fn open(
    address: SocketAddr,
    metrics: router::Render,
    is_ready: impl Fn() -> bool + Clone + Send + Sync + 'static,
) -> anyhow::Result<SocketAddr> {
    let bound = TcpListener::bind(address).await.with_context(|| format!("cannot listen for health on {address}"))?;
    let address = bound.local_addr()?;
    let ready = move || {
        let is_ready = is_ready();
        let answer =
            if is_ready { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") };
        async move { answer }
    };
    let page = Router::new()
        .route("/health", get(|| async { "alive\n" }))
        .route("/ready", get(ready))
        .route("/metrics", get(move || async move { ([(header::CONTENT_TYPE, METRICS_TYPE)], metrics()) }));
    tokio::spawn(async move { axum::serve(bound, page).await });
    Ok(address)
}

/// Whether a coordinator's page of metrics says that ranks take steps.
pub fn has_ready_ranks(metrics: &str) -> bool {
    let counts = metrics.lines().filter(|line| line.starts_with("lockstep:ranks_ready{"));
    counts.filter_map(|line| line.rsplit(' ').next()).any(|count| count.parse().is_ok_and(|n: f64| n > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn check(address: SocketAddr, path: &str, status: &str, end: &str) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: page\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.ends_with(end), "{path}: {answer}");
    }

    #[tokio::test]
    async fn the_page_tells_what_is_true_now() {
        let is_ready = Arc::new(AtomicBool::new(false));
        let now = is_ready.clone();
        let metrics: router::Render = Arc::new(|| "lockstep:epoch 3\n".into());
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let address = open(any_port, metrics, move || now.load(Ordering::Relaxed)).await.unwrap();
        check(address, "/health", "200", "alive\n").await;
        check(address, "/ready", "503", "not ready\n").await;
        is_ready.store(true, Ordering::Relaxed);
        check(address, "/ready", "200", "ready\n").await;
        check(address, "/metrics", "200", "lockstep:epoch 3\n").await;
        check(address, "/elsewhere", "404", "").await;
    }

    #[test]
    fn ranks_are_ready_when_the_gauge_says_so() {
        assert!(has_ready_ranks("# x\nlockstep:ranks_ready{model_name=\"toy\",replica=\"one\"} 4\n"));
        assert!(!has_ready_ranks("lockstep:ranks_ready{replica=\"one\"} 0\nlockstep:epoch{replica=\"one\"} 1\n"));
        assert!(!has_ready_ranks("# TYPE lockstep:ranks_ready gauge\n"));
    }
}
