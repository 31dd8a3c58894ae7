//! Keys, browsers, and connections that send no request.

use crate::client::{get, post, post_with_key, read_until, send};
use crate::grpc::{client, text_request};
use crate::raw::{END_STREAM, HEADERS, NO_WINDOW, Raw, grpc_body};
use crate::{House, config, eventually, run, run_within};
use proto::v1;
use router::{ApiKeys, Config};
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const COMPLETIONS: &str = "/v1/completions";

#[test]
fn a_key_opens_and_names_the_tenant() {
    run(async {
        let mut config = config();
        config.keys = ApiKeys::parse("alice:k1\nbob:k2\nalice:k3").unwrap();
        let house = House::open(config).await;
        let body = json!({ "prompt": "Hi" });
        for path in ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"] {
            for reply in [post(house.http, path, &body).await, post_with_key(house.http, path, "k4", &body).await] {
                assert_eq!((reply.status, &reply.json()["error"]["code"]), (401, &json!("invalid_api_key")), "{path}");
            }
        }
        for keyed in ["/v1/models", "/cluster"] {
            assert_eq!(get(house.http, keyed).await.status, 401, "{keyed}");
        }
        for open in ["/livez", "/health", "/ready", "/metrics"] {
            assert_eq!(get(house.http, open).await.status, 200, "{open}");
        }
        for key in ["k1", "k2", "k3"] {
            assert_eq!(post_with_key(house.http, COMPLETIONS, key, &body).await.status, 200);
        }
        assert_eq!(post_with_key(house.http, "/tokenize", "k1", &body).await.status, 200);
        let tenants: Vec<_> = house.fake.submits().iter().map(|sent| sent.tenant).collect();
        assert!(tenants[0] == tenants[2] && tenants[0] != tenants[1] && !tenants.contains(&0), "{tenants:?}");

        let refused = client(&house).generate(text_request("Hi")).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unauthenticated);
        let mut keyed = tonic::Request::new(text_request("Hi"));
        keyed.metadata_mut().insert("authorization", "Bearer k2".parse().unwrap());
        assert!(client(&house).generate(keyed).await.is_ok());
        eventually(|| async { house.fake.submits().len() == 4 }).await;
        assert_eq!(house.fake.submits()[3].tenant, tenants[1]);
        house.close().await;
    });
}

/// Sends these bytes on a connection of its own, and returns the answers.
async fn raw(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that has refused may close while the client still sends.
    let _sent = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _end = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_bare_line_feed_frames_nothing() {
    run(async {
        let house = House::open(config()).await;
        let good = "GET /livez HTTP/1.1\r\nhost: localhost\r\n";
        let chunked = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n");
        for (bytes, statuses) in [
            (format!("{good}connection: close\r\n\r\n"), vec!["200"]),
            (format!("{good}\n"), vec!["400"]),
            (good.replace("\r\n", "\n") + "\n", vec!["400"]),
            (format!("{good}\r\n{good}x: y\nz: w\r\n\r\n"), vec!["200", "400"]),
            (format!("{chunked}2\n{{}}\r\n0\r\n\r\n"), vec!["400"]),
        ] {
            let answer = raw(house.http, bytes.as_bytes()).await;
            let lines = answer.split("HTTP/1.1 ").skip(1).map(|rest| &rest[..3]);
            assert_eq!(lines.collect::<Vec<_>>(), statuses, "{bytes:?}: {answer}");
        }
        // Within a body, bare line feeds are allowed.
        let body = "{\n\"prompt\": \"Hi\"\n}";
        let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
        let sent = format!("{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        assert!(raw(house.http, sent.as_bytes()).await.starts_with("HTTP/1.1 200"));
        house.close().await;
    });
}

#[test]
fn a_head_that_is_too_long_is_refused() {
    run(async {
        let house = House::open(config()).await;
        let with = |n: usize| {
            format!("GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: {}\r\n\r\n", "y".repeat(n))
        };
        assert!(raw(house.http, with(32 << 10).as_bytes()).await.starts_with("HTTP/1.1 200"));
        assert!(raw(house.http, with(200 << 10).as_bytes()).await.starts_with("HTTP/1.1 431"));
        assert_eq!(get(house.http, "/livez").await.status, 200);
        house.close().await;
    });
}

/// A client that tries once loses nothing at a router that has just begun and does not know its replica yet.
#[test]
fn a_new_router_holds_requests_until_it_knows_its_replicas() {
    run(async {
        let house = House::open_unready(config()).await;
        let (http, mut calls) = (house.http, client(&house));
        let whole = tokio::spawn(async move { post(http, COMPLETIONS, &json!({ "prompt": "Hi" })).await.status });
        let call = tokio::spawn(async move { calls.generate(text_request("Hi")).await.is_ok() });
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!whole.is_finished() && !call.is_finished());
        house.fake.welcome();
        assert_eq!((whole.await.unwrap(), call.await.unwrap()), (200, true));
        house.close().await;

        // The router waits only a moment, and not for a replica that has reported that it is not ready.
        let house = House::open_unready(config()).await;
        let began = tokio::time::Instant::now();
        assert_eq!(post(house.http, COMPLETIONS, &json!({ "prompt": "Hi" })).await.status, 503);
        assert!(began.elapsed() < 2 * Duration::from_secs(1) + Duration::from_millis(500), "{:?}", began.elapsed());
        house.close().await;
    });
}

/// Requests with other keys continue, also those of the same tenant.
#[test]
fn a_key_that_is_taken_back_ends_its_streams_alone() {
    run(async {
        let keys = ApiKeys::parse("alice:k1\nalice:k2").unwrap();
        let house = House::open(Config { keys: keys.clone(), ..config() }).await;
        house.fake.script(|script| script.hold_at = 3);
        let open = async |key: &str, path: &str, body: &str| {
            let mut stream = TcpStream::connect(house.http).await.unwrap();
            let n = body.len();
            let head = format!("authorization: Bearer {key}\r\nconnection: close\r\ncontent-length: {n}");
            let request = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}");
            stream.write_all(request.as_bytes()).await.unwrap();
            stream
        };
        let streamed = r#"{"prompt": "Hi", "stream": true}"#;
        let mut ended = open("k1", COMPLETIONS, streamed).await;
        let mut whole = open("k1", COMPLETIONS, r#"{"prompt": "Hi"}"#).await;
        let mut kept = open("k2", COMPLETIONS, streamed).await;
        let mut keyed = tonic::Request::new(text_request("Hi"));
        keyed.metadata_mut().insert("authorization", "Bearer k1".parse().unwrap());
        let mut call = client(&house).generate(keyed).await.unwrap().into_inner();
        for stream in [&mut ended, &mut kept] {
            read_until(stream, "data: ").await;
        }
        call.message().await.unwrap().unwrap();
        eventually(|| async { house.fake.submits().len() == 4 }).await;
        keys.replace("alice:k2").unwrap();
        let mut rest = String::new();
        ended.read_to_string(&mut rest).await.unwrap();
        assert!(rest.contains("event: error\ndata: {") && rest.contains("invalid_api_key"), "{rest}");
        let mut refused = String::new();
        whole.read_to_string(&mut refused).await.unwrap();
        assert!(refused.starts_with("HTTP/1.1 401") && refused.contains("invalid_api_key"), "{refused}");
        let status = loop {
            match call.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended well"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), tonic::Code::Unauthenticated, "{status}");
        // The capacity of these streams is free, and the other key's stream is as it was.
        eventually(|| async { house.fake.cancels().len() == 3 }).await;
        let nothing = tokio::time::timeout(Duration::from_millis(200), kept.read_u8()).await;
        assert!(nothing.is_err() || nothing.is_ok_and(|read| read.is_ok()), "the other stream ended");
        drop(kept);
        house.close().await;
    });
}

#[test]
fn every_answer_names_its_request() {
    run(async {
        let house = House::open(config()).await;
        let fetch_request_id = async |line: &str, id: &str| {
            let head = format!("{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: {id}\r\n\r\n");
            send(house.http, &head).await.headers["x-request-id"].clone()
        };
        for line in ["GET /health", "GET /v1/models", "GET /no/such/page", "POST /v1/completions", "PUT /v1/models"] {
            assert_eq!(fetch_request_id(line, "trace-1.a:b/c").await, "trace-1.a:b/c", "{line}");
            // An id that a log would have to escape, or that is none, is not repeated.
            let mut own = std::collections::BTreeSet::new();
            for id in ["", "a b", "a\"b", &"x".repeat(129)] {
                own.insert(fetch_request_id(line, id).await);
            }
            assert!(
                own.len() == 4
                    && own.iter().all(|id| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())),
                "{own:?}"
            );
        }
        let stranger = "GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\nx-request-id: x7\r\n\r\n";
        let refused = send(house.http, stranger).await;
        assert_eq!((refused.status, refused.headers["x-request-id"].as_str()), (403, "x7"));
        house.close().await;
    });
}

#[test]
fn browsers_get_cors_headers() {
    run(async {
        let mut config = config();
        config.keys = ApiKeys::parse("k1").unwrap();
        let house = House::open(config).await;
        let preflight = "OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             origin: http://x\r\naccess-control-request-method: POST\r\n\
             access-control-request-headers: authorization,x-more\r\n\r\n";
        let reply = send(house.http, preflight).await;
        assert_eq!((reply.status, reply.headers["access-control-allow-origin"].as_str()), (200, "http://x"));
        assert_eq!(reply.headers["access-control-allow-headers"], "authorization,x-more");
        assert!(reply.headers["access-control-allow-methods"].contains("POST"));
        // Refusals have the header too: a page could not read them otherwise.
        let refused = post(house.http, COMPLETIONS, &json!({})).await;
        assert_eq!((refused.status, refused.headers["access-control-allow-origin"].as_str()), (401, "*"));
        house.close().await;
    });
}

/// A page with a host name that resolves to a loopback address sends requests as if it came from there; and so does any
/// page of a browser on this machine.
#[test]
fn foreign_hosts_and_origins_are_refused_without_keys() {
    run(async {
        let house = House::open(config()).await;
        let raw_request = |host: &str, origin: &str| {
            let body = r#"{"prompt": "Hi", "max_tokens": 1}"#;
            let (head, n) = (format!("host: {host}{origin}\r\nconnection: close"), body.len());
            format!("POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\ncontent-length: {n}\r\n\r\n{body}")
        };
        for (host, origin) in [("evil.example", ""), ("localhost", "\r\norigin: http://evil.example")] {
            let refused = send(house.http, &raw_request(host, origin)).await;
            assert_eq!(refused.status, 403, "{refused:?}");
            assert!(refused.body.contains("evil.example") && refused.body.contains("--allowed-"), "{}", refused.body);
            assert!(!refused.headers.contains_key("access-control-allow-origin"));
        }
        assert!(house.fake.submits().is_empty());
        let preflight = "OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\n\
                         access-control-request-method: POST\r\nconnection: close\r\n\r\n";
        let preflight_reply = send(house.http, preflight).await;
        let has_cors_headers = preflight_reply.headers.keys().any(|name| name.starts_with("access-control"));
        assert!(preflight_reply.status == 200 && !has_cors_headers, "{preflight_reply:?}");
        let own = send(house.http, &raw_request("localhost", "\r\norigin: http://localhost:3000")).await;
        assert_eq!((own.status, &*own.headers["access-control-allow-origin"]), (200, "http://localhost:3000"));
        assert_eq!(send(house.http, &raw_request(&house.http.to_string(), "")).await.status, 200);
        house.close().await;
    });
}

#[test]
fn connections_without_request_are_closed() {
    run(async {
        let mut config = config();
        config.timeouts.headers_max = Duration::from_millis(150);
        let house = House::open(config).await;
        let mut silent = Vec::new();
        for start in ["", "P", "PR", "POST /v1/completions HTTP/1.1\r\nhost: te"] {
            let mut stream = TcpStream::connect(house.http).await.unwrap();
            stream.write_all(start.as_bytes()).await.unwrap();
            silent.push((start, stream));
        }
        let body = json!({ "prompt": "Hi" });
        assert_eq!(post(house.http, COMPLETIONS, &body).await.status, 200);
        for (start, mut stream) in silent {
            let mut rest = Vec::new();
            // The connection is closed, or refused and closed.
            let _reset = stream.read_to_end(&mut rest).await;
            let rest = String::from_utf8_lossy(&rest).into_owned();
            assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 4"), "{start:?}: {rest}");
        }
        house.close().await;
    });
}

#[test]
fn connection_over_limit_gets_503() {
    run(async {
        let mut config = config();
        config.limits.connections_max = 1;
        let house = House::open(config).await;
        eventually(|| async {
            let mut first = TcpStream::connect(house.http).await.unwrap();
            first.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
            if !read_until(&mut first, "\r\n\r\n").await.starts_with("HTTP/1.1 200") {
                return false;
            }
            let mut second = TcpStream::connect(house.http).await.unwrap();
            read_until(&mut second, "\r\n\r\n").await.starts_with("HTTP/1.1 503")
        })
        .await;
        // A request on a connection beyond the limit is not read, so its answer may be lost with the connection.
        eventually(|| async { is_alive(house.http).await.unwrap_or(false) }).await;
        house.close().await;
    });
}

#[test]
fn grpc_limits_connections_and_closes_silent_ones() {
    run(async {
        let mut config = config();
        config.limits.connections_max = 1;
        config.timeouts.headers_max = Duration::from_millis(150);
        let house = House::open(config).await;
        for start in ["", "PRI * HTTP/2.0\r\n"] {
            let mut silent = TcpStream::connect(house.grpc).await.unwrap();
            silent.write_all(start.as_bytes()).await.unwrap();
            // An earlier client may still have the place. The connection is closed in any case, whatever is sent
            // before.
            let _reset = silent.read_to_end(&mut Vec::new()).await;
        }
        let request = v1::ListModelsRequest {};
        let first = client(&house);
        eventually(|| async { first.clone().list_models(request).await.is_ok() }).await;
        let mut second = TcpStream::connect(house.grpc).await.unwrap();
        let closed = second.read_to_end(&mut Vec::new()).await;
        assert!(closed.is_err() || closed.unwrap() == 0, "the server must not read it");
        drop(first);
        eventually(|| async { client(&house).list_models(request).await.is_ok() }).await;
        house.close().await;
    });
}

/// Whether a call is answered and over although its body never ends.
async fn is_answered(house: &House, path: &str, key: &str) -> bool {
    let mut raw = Raw::connect(house.grpc, &[]).await;
    raw.post(1, path, key, &[0, 0], false).await;
    let answer = raw.until(|frame| frame.kind == HEADERS && frame.stream == 1).await;
    answer.is_some_and(|frame| frame.flags & END_STREAM > 0)
}

#[test]
fn a_call_is_refused_before_its_body_and_a_body_has_its_time() {
    run(async {
        let keys = ApiKeys::parse("k1").unwrap();
        let mut config = Config { keys, ..config() };
        config.timeouts.body_max = Duration::from_secs(3600);
        let house = House::open(config.clone()).await;
        for path in ["/lockstep.v1.Inference/Generate", "/vllm.grpc.engine.VllmEngine/Generate", "/nobody/knows"] {
            for key in ["", "k2"] {
                assert!(is_answered(&house, path, key).await, "{path} with {key:?}");
            }
        }
        house.close().await;
        config.timeouts.body_max = Duration::from_millis(100);
        let house = House::open(config).await;
        for path in ["/lockstep.v1.Inference/Generate", "/grpc.health.v1.Health/Check"] {
            assert!(is_answered(&house, path, "k1").await, "{path}");
        }
        assert!(house.fake.submits().is_empty());
        house.close().await;
    });
}

/// The resources of such a client are free for the next.
#[test]
fn a_connection_that_never_reads_gives_back_its_place() {
    run_within(Duration::from_secs(120), async {
        let mut config = Config { keys: ApiKeys::parse("alice:k1 concurrent=1").unwrap(), ..config() };
        config.timeouts.unread_max = Duration::from_millis(300);
        let house = House::open(config).await;
        let short = json!({ "prompt": "x", "max_tokens": 1 });
        let is_free = || async { post_with_key(house.http, COMPLETIONS, "k1", &short).await.status == 200 };
        // This connection reads nothing: more is sent than sockets hold.
        house.fake.script(|script| script.answer = vec![120; 150]);
        let prompts: Vec<String> = (0..12).map(|i| format!("prompt {i}")).collect();
        let long = json!({ "prompt": prompts, "n": 16, "logprobs": 20, "stream": true, "max_tokens": 150 }).to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k1\r\n";
        let mut deaf = TcpStream::connect(house.http).await.unwrap();
        deaf.write_all(format!("{head}content-length: {}\r\n\r\n{long}", long.len()).as_bytes()).await.unwrap();
        eventually(|| async { !house.fake.submits().is_empty() }).await;
        eventually(is_free).await;
        drop(deaf);
        // This connection lives, and one stream of it is not read.
        let n_before = house.fake.submits().len();
        let mut deaf = Raw::connect(house.grpc, &NO_WINDOW).await;
        deaf.post(1, "/lockstep.v1.Inference/Generate", "k1", &grpc_body("y"), true).await;
        eventually(|| async { house.fake.submits().len() > n_before }).await;
        let lives = tokio::spawn(async move { deaf.until(|_| false).await });
        eventually(is_free).await;
        assert!(!lives.is_finished(), "its pings are answered");
        lives.abort();
        house.close().await;
    });
}

async fn is_alive(address: SocketAddr) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).await?;
    Ok(reply.starts_with(b"HTTP/1.1 200"))
}
