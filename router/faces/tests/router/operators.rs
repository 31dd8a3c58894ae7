//! Operators' pages on a port of their own: the clients' port does not have them, and they require operators' keys.

use crate::client::{get, send};
use crate::{config, listener, model, run};
use faces::HttpListeners;
use router::{ApiKeys, Config, CoordinatorChannel, DisabledPages};
use serde_json::Value;
use std::net::SocketAddr;
use tokio_util::sync::CancellationToken;

fn get_request(path: &str, key: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n")
}

async fn get_status_with_key(address: SocketAddr, path: &str, key: &str) -> u16 {
    send(address, &get_request(path, key)).await.status
}

async fn get_json_with_key(address: SocketAddr, path: &str, key: &str) -> Value {
    send(address, &get_request(path, key)).await.json()
}

async fn with_server(clients: &str, operators: &str, test: impl AsyncFnOnce(SocketAddr, SocketAddr)) {
    with_configured_server(config(), clients, operators, test).await;
}

/// Serves without any replicas while `test` runs, with these keys of clients and operators. `test` gets both addresses.
async fn with_configured_server(
    config: Config,
    clients: &str,
    operators: &str,
    test: impl AsyncFnOnce(SocketAddr, SocketAddr),
) {
    let (http, grpc, admin) = (listener().await, listener().await, listener().await);
    let (at, admin_at) = (http.local_addr().unwrap(), admin.local_addr().unwrap());
    let keys = |text| ApiKeys::parse(text).unwrap();
    let config = Config { keys: keys(clients), operators: Some(keys(operators)), ..config };
    let shutdown = CancellationToken::new();
    let http = HttpListeners { clients: http, operators: Some(admin) };
    let coordinators: Vec<CoordinatorChannel> = Vec::new();
    let served = tokio::spawn(faces::serve(config, coordinators, model::text(), http, grpc, shutdown.clone()));
    test(at, admin_at).await;
    shutdown.cancel();
    served.await.unwrap().unwrap();
}

#[test]
fn operators_pages_are_on_their_own_port_with_their_own_keys() {
    run(with_server("client:kc", "prometheus:kp\nann:ka", async |http, admin| {
        for page in ["/metrics", "/cluster"] {
            assert_eq!(get_status_with_key(http, page, "kc").await, 404, "{page}");
            assert_eq!(get(admin, page).await.status, 401, "{page}");
            assert_eq!(
                get_status_with_key(admin, page, "kc").await,
                401,
                "a client's key opens no page of operators: {page}"
            );
            assert_eq!(
                (get_status_with_key(admin, page, "kp").await, get_status_with_key(admin, page, "ka").await),
                (200, 200),
                "{page}"
            );
        }
        for address in [http, admin] {
            assert_eq!((get(address, "/livez").await.status, get(address, "/ready").await.status), (200, 503));
        }
        assert_eq!(
            (get_status_with_key(admin, "/v1/models", "kp").await, get_status_with_key(http, "/v1/models", "kc").await),
            (404, 200)
        );
        // Their data is not there in any other form either.
        for of in ["cluster", "load", "requests,load"] {
            assert_eq!(get_status_with_key(http, &format!("/events?of={of}"), "kc").await, 403, "{of}");
        }
        let sees = async |address, key| get_json_with_key(address, "/viewer", key).await["sees"]["cluster"].clone();
        assert_eq!((sees(http, "kc").await, sees(admin, "kp").await), (false.into(), true.into()));
        let pages = get(http, "/openapi.json").await.json();
        let has = |page: &str| pages["paths"].get(page).is_some();
        assert_eq!((has("/metrics"), has("/cluster"), has("/livez")), (false, false, true));
    }));
}

#[test]
fn pages_are_switched_off_on_their_own_port_too() {
    let config = Config { pages_off: DisabledPages { metrics: true, slots: true, ui: true }, ..config() };
    run(with_configured_server(config, "", "", async |_, admin| {
        assert_eq!((get(admin, "/metrics").await.status, get(admin, "/").await.status), (501, 404));
        assert_eq!(get(admin, "/cluster").await.status, 200);
    }));
}

#[test]
fn without_operator_keys_only_foreign_origins_are_refused() {
    run(with_server("client:kc", "", async |_, admin| {
        assert_eq!((get(admin, "/metrics").await.status, get(admin, "/cluster").await.status), (200, 200));
        let stranger =
            "GET /cluster HTTP/1.1\r\nhost: localhost\r\norigin: https://evil.example\r\nconnection: close\r\n\r\n";
        assert_eq!(send(admin, stranger).await.status, 403);
    }));
}
