//! A collector over HTTP that is busy at first, then rejects a part, sends a wrong answer, and finally sends none. Code
//! that makes spans does not wait for it, and items that it does not receive are counted.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Answer, Collector, partly};
use std::time::{Duration, Instant};
use telemetry::Protocol;
use telemetry::logs::LogOptions;
use telemetry::spans::{self, RequestAttributes};

/// Answers in the order in which batches of spans arrive.
fn moody(path: &str, n_before: usize) -> Answer {
    let answer = |status, body: &[u8]| Answer { status, body: body.to_vec() };
    match (path, n_before) {
        // The same batch is sent again.
        ("/v1/traces", 0) => answer("503 Service Unavailable", b"busy"),
        ("/v1/traces", 1) => answer("200 OK", &partly("one of you is too long")),
        ("/v1/traces", 2) => answer("200 OK", b"\xff\xff\xff no protobuf"),
        ("/v1/traces", 3) => answer("413 Payload Too Large", &[0; 1 << 20]),
        ("/v1/traces", 4) => answer("200 OK", b""),
        ("/v1/traces", _) => {
            std::thread::sleep(Duration::from_secs(3600));
            answer("200 OK", b"")
        }
        _ => answer("200 OK", b""),
    }
}

/// The value of a series of the page, 0 where there is none.
fn value(page: &str, series: &str) -> u64 {
    let line = page.lines().find(|line| line.starts_with(series));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

fn spans(n: usize, name: &str) {
    for _ in 0..n {
        let span = spans::request("http", "", "");
        span.record_request(&RequestAttributes {
            operation: "chat",
            model: name.into(),
            ..RequestAttributes::default()
        });
        assert!(span.wants_content());
        span.record_content("[\"question\"]", "");
    }
}

#[test]
fn collector_failures_are_counted_and_block_nothing() {
    let collector = Collector::default();
    let endpoint = format!("http://{}/", collector.http(moody));
    let (protocol, content) = (Protocol::Http, true);
    let collector_config = telemetry::Collector { endpoint, protocol, content, ..telemetry::Collector::default() };
    telemetry::logs::init(LogOptions { filter: "warn", collector: Some(&collector_config), ..LogOptions::default() })
        .unwrap();
    let exporter = telemetry::exporter::install(&[]).unwrap();
    let until = |series: &str, n: u64| {
        let give_up = Instant::now() + Duration::from_secs(60);
        while value(&exporter.render(), series) < n {
            assert!(Instant::now() < give_up, "{series} is not {n}:\n{}", exporter.render());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let refused = "lockstep:otlp_dropped_total{signal=\"traces\",reason=\"refused\"}";
    let sent = "lockstep:otlp_sent_total{signal=\"traces\"}";
    // One at a time, because the number of spans per batch depends on timing.
    for (n, name) in [(1, "first"), (2, "second"), (3, "third")] {
        spans(1, name);
        until(refused, n);
    }
    spans(1, "fourth");
    until(sent, 1);
    // The collector accepts no more and no code waits for it: items without room are dropped.
    spans(20_000, "fifth");
    until("lockstep:otlp_dropped_total{signal=\"traces\",reason=\"full\"}", 1);
    let began = Instant::now();
    telemetry::flush();
    assert!(began.elapsed() < Duration::from_secs(30), "the process waits too long for a collector when it ends");
    let page = exporter.render();
    assert_eq!((value(&page, sent), value(&page, refused)), (1, 3));
    let received = collector.spans();
    let first: Vec<_> = received.iter().filter(|span| span.name == "chat first").collect();
    // Sent twice: first rejected as busy, then accepted.
    assert_eq!(first.len(), 2);
    let content = common::attribute(first[0], "gen_ai.input.messages");
    assert_eq!(content, common::text("[\"question\"]"));
}
