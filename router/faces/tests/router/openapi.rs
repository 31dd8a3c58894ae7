//! `/openapi.json`, against the pages themselves.

use crate::client::{Reply, get, send};
use crate::{House, config, run};
use router::ApiKeys;
use serde_json::Value;
use std::net::SocketAddr;

async fn send_request(http: SocketAddr, method: &str, path: &str) -> Reply {
    let body = "{}";
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 2";
    send(http, &format!("{method} {path} HTTP/1.1\r\n{head}\r\n\r\n{body}")).await
}

/// Each page with its method: (method, path, its description).
fn pages(document: &Value) -> Vec<(String, String, Value)> {
    let mut pages = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            pages.push((
                method.to_uppercase(),
                path.replace("{id}", "toy").replace("{item_id}", "toy"),
                operation.clone(),
            ));
        }
    }
    pages
}

#[test]
fn every_page_that_is_described_is_there() {
    run(async {
        let house = House::open(config()).await;
        let document = get(house.http, "/openapi.json").await.json();
        assert_eq!(document["openapi"], "3.1.0");
        let pages = pages(&document);
        assert!(pages.len() > 20, "{document}");
        for (method, path, operation) in &pages {
            assert!(!path.contains('{'), "{path}");
            assert!(operation["summary"].as_str().is_some_and(|about| !about.is_empty()), "{method} {path}");
            let reply = send_request(house.http, method, path).await;
            assert!(![401, 405, 500].contains(&reply.status), "{method} {path}: {reply:?}");
            assert!(!reply.body.contains("no such page"), "{method} {path}");
        }
        for path in ["/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize", "/health"] {
            assert!(pages.iter().any(|(_, known, _)| known == path), "{path}");
        }
        house.close().await;
    });
}

#[test]
fn every_page_requires_a_key_as_described() {
    const OPEN: [&str; 7] = ["/", "/livez", "/health", "/ready", "/ping", "/metrics", "/openapi.json"];
    run(async {
        let house = House::open(router::Config { keys: ApiKeys::parse("k1").unwrap(), ..config() }).await;
        for (method, path, operation) in pages(&get(house.http, "/openapi.json").await.json()) {
            let needs_key = !operation["security"].as_array().unwrap().is_empty();
            let reply = send_request(house.http, &method, &path).await;
            let is_open = OPEN.contains(&path.as_str()) || path.starts_with("/page/");
            assert_eq!((needs_key, reply.status == 401), (!is_open, needs_key), "{method} {path}");
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}
