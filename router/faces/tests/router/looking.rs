//! The pages that people read: the page's files, requests with their timelines, the last hour's load, and the stream of
//! changes; which client sees which data, and how much of it there can be.

use crate::client::{get, post, post_with_key, read_until, send};
use crate::fake::Fake;
use crate::{House, config, eventually, run};
use proto::cluster as wire;
use router::{ApiKeys, Config};
use serde_json::{Value, json};
use std::net::SocketAddr;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

async fn get_with_key(address: SocketAddr, path: &str, key: &str) -> crate::client::Reply {
    let head = format!("host: localhost\r\nauthorization: Bearer {key}\r\nconnection: close");
    send(address, &format!("GET {path} HTTP/1.1\r\n{head}\r\n\r\n")).await
}

async fn watch_events(address: SocketAddr, of: &str, sign: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET /events?of={of} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await.unwrap();
    let text = read_until(&mut stream, sign).await;
    (stream, text)
}

fn keyed() -> Config {
    let keys = "alice:ka\nbob:kb\nann:ko role=operator";
    Config { keys: ApiKeys::parse(keys).unwrap(), ..config() }
}

fn request_body() -> Value {
    json!({ "prompt": "very secret words", "max_tokens": 8 })
}

/// The exact text: a source that is added to a policy weakens it as much as one that is lost.
const HARDENING: [(&str, &str); 4] = [
    (
        "content-security-policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; \
         require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
];

#[test]
fn page_is_complete_and_its_policy_forbids_other_origins() {
    run(async {
        let house = House::open(keyed()).await;
        let page = get(house.http, "/").await;
        assert_eq!((page.status, &*page.headers["content-type"]), (200, "text/html; charset=utf-8"));
        let paths = get(house.http, "/openapi.json").await.json();
        let files: Vec<String> =
            paths["paths"].as_object().unwrap().keys().filter(|path| path.starts_with("/page/")).cloned().collect();
        assert!(files.len() > 10, "{files:?}");
        let mut n_bytes = page.body.len();
        for path in files.iter().map(String::as_str).chain(["/"]) {
            let file = get(house.http, path).await;
            assert_eq!(file.status, 200, "{path}");
            n_bytes += file.body.len();
            for (name, words) in HARDENING {
                assert_eq!(file.headers.get(name).map(String::as_str), Some(words), "{path}: {name}");
            }
            for reference in ["http://", "https://"] {
                let strange = file.body.match_indices(reference).filter(|(at, _)| {
                    let rest = &file.body[at + reference.len()..];
                    rest.starts_with(|first: char| first.is_ascii_alphanumeric())
                        && !["www.w3.org/2000/svg", "www.w3.org/1998/Math/MathML"].iter().any(|of| rest.starts_with(of))
                });
                assert_eq!(strange.count(), 0, "{path} names another origin");
            }
            let html = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("];
            for inline in html.into_iter().chain(["style=\"", "onclick=", "<script>", "<style"]) {
                assert!(!file.body.contains(inline), "{path} has {inline}");
            }
            let tag = &file.headers["etag"];
            let head = format!("host: localhost\r\nif-none-match: {tag}\r\nconnection: close");
            let cached = send(house.http, &format!("GET {path} HTTP/1.1\r\n{head}\r\n\r\n")).await;
            assert_eq!((cached.status, cached.body.len()), (304, 0), "{path}");
        }
        assert!(n_bytes < 300_000, "{n_bytes}");
        house.close().await;
    });
}

#[test]
fn a_tenant_sees_its_own_requests_and_an_operator_the_cluster() {
    run(async {
        let house = House::open(keyed()).await;
        for key in ["ka", "kb"] {
            assert_eq!(post_with_key(house.http, "/v1/completions", key, &request_body()).await.status, 200);
        }
        let listed = async |key| get_with_key(house.http, "/requests", key).await.json();
        let tenants = |list: &Value| -> Vec<String> {
            list["requests"].as_array().unwrap().iter().map(|of| of["tenant"].as_str().unwrap().to_owned()).collect()
        };
        let (of_alice, of_ann) = (listed("ka").await, listed("ko").await);
        assert_eq!(
            (tenants(&of_alice), tenants(&of_ann)),
            (vec!["alice".into()], vec!["bob".to_owned(), "alice".into()])
        );
        assert!(
            of_alice["waiting"].is_null() && of_ann["waiting"] == 0,
            "a tenant must not see how many requests of others wait"
        );
        let bobs = of_ann["requests"][0]["number"].as_u64().unwrap();
        let one = format!("/requests/{bobs}");
        assert_eq!(
            (get_with_key(house.http, &one, "ka").await.status, get_with_key(house.http, &one, "kb").await.status),
            (404, 200)
        );
        for path in ["/cluster", "/load/hour", "/events?of=cluster", "/events?of=requests,load"] {
            assert_eq!(get_with_key(house.http, path, "ka").await.status, 403, "{path}");
        }
        assert_eq!(
            (
                get_with_key(house.http, "/cluster", "ko").await.status,
                get_with_key(house.http, "/load/hour", "ko").await.status
            ),
            (200, 200)
        );
        let sees = async |key| get_with_key(house.http, "/viewer", key).await.json()["sees"].clone();
        assert_eq!(sees("ka").await, json!({ "cluster": false, "requests": "own" }));
        assert_eq!(sees("ko").await, json!({ "cluster": true, "requests": "all" }));
        for path in ["/viewer", "/requests", &one, "/load/hour", "/cluster", "/events?of=requests"] {
            for reply in [get(house.http, path).await, get_with_key(house.http, path, "kx").await] {
                assert!(reply.status == 401 && !reply.body.contains("alice"), "{path}: {reply:?}");
            }
        }
        for text in [
            of_ann.to_string(),
            get_with_key(house.http, &one, "ko").await.body,
            get_with_key(house.http, "/load/hour", "ko").await.body,
        ] {
            assert!(!text.contains("secret") && !text.contains("Hello"), "{text}");
        }
        house.close().await;
    });
}

#[test]
fn where_no_key_is_an_operator_s_every_key_sees_the_cluster_and_its_own_requests() {
    run(async {
        let keys = ApiKeys::parse("alice:ka\nbob:kb").unwrap();
        let house = House::open(Config { keys, ..config() }).await;
        assert_eq!(post_with_key(house.http, "/v1/completions", "ka", &request_body()).await.status, 200);
        assert_eq!(get_with_key(house.http, "/cluster", "kb").await.status, 200);
        assert_eq!(get_with_key(house.http, "/requests", "kb").await.json()["requests"], json!([]));
        house.close().await;
    });
}

#[test]
fn timeline_has_the_events_of_a_request() {
    run(async {
        let house = House::open_two(config()).await;
        // The first replica reports that it preempted the request and that its ranks were lost; then it drains.
        let kinds = [wire::passage::Kind::Started, wire::passage::Kind::Chunk, wire::passage::Kind::Preempted];
        let passage = |kind: wire::passage::Kind| wire::Passage { kind: kind.into(), micros_ago: 5, start: 3, end: 17 };
        for fake in [&house.fake, house.other()] {
            fake.script(|script| {
                script.passages = kinds.map(passage).to_vec();
                script.hold_at = 4;
            });
        }
        let http = house.http;
        let answer = tokio::spawn(async move { post(http, "/v1/completions", &request_body()).await });
        let shown = async || get(http, "/requests").await.json()["requests"][0].clone();
        eventually(|| async { shown().await["output"] == 4 }).await;
        let first = if house.fake.seen().is_empty() { house.other() } else { &house.fake };
        let next = if house.fake.seen().is_empty() { &house.fake } else { house.other() };
        next.script(|script| script.hold_at = usize::MAX);
        first.die();
        let answer = answer.await.unwrap().json();
        let row = shown().await;
        assert_eq!(
            (&row["state"], &row["over"], &row["output"]),
            (&json!("ok"), &json!(true), &answer["usage"]["completion_tokens"])
        );
        let by_id = get(http, &format!("/requests/{}", answer["id"].as_str().unwrap())).await.json();
        let event_kinds: Vec<&str> =
            by_id["events"].as_array().unwrap().iter().map(|of| of["what"].as_str().unwrap()).collect();
        let at_first = ["placed", "started", "chunk", "preempted", "first token"];
        assert_eq!(
            event_kinds,
            [&at_first[..], &["lost", "moved", "started", "chunk", "preempted"]].concat(),
            "{by_id}"
        );
        assert_eq!((&by_id["events"][1]["cached"], &by_id["events"][2]["end"]), (&json!(3), &json!(17)));
        let counts = by_id["tokens"]["counts"].as_array().unwrap();
        assert_eq!(counts.iter().map(|n| n.as_u64().unwrap()).sum::<u64>(), row["output"].as_u64().unwrap());
        house.close().await;
    });
}

#[test]
fn changes_are_sent_once_and_only_to_watchers() {
    run(async {
        let house = House::open(config()).await;
        for bad in ["", "?of=", "?of=cluster,keys", "?of=Cluster", "?of=load,load", "?of=requests,load,requests"] {
            assert_eq!(get(house.http, &format!("/events{bad}")).await.status, 400, "{bad}");
        }
        let (mut stream, text) = watch_events(house.http, "cluster,requests,load", "event: load").await;
        assert!(text.contains("event: cluster\ndata: {") && text.contains("event: requests\ndata: {"), "{text}");
        assert_eq!(text.matches("event: requests").count(), 1, "nothing has changed");
        assert_eq!(post(house.http, "/v1/completions", &request_body()).await.status, 200);
        let news = read_until(&mut stream, "\"state\":\"ok\"").await;
        assert!(news.contains("event: requests") && !news.contains("secret"), "{news}");
        house.fake.phase(wire::state::Phase::Recovering);
        read_until(&mut stream, "\"phase\":\"recovering\"").await;
        // A watching client does not delay the end.
        house.shutdown.cancel();
        read_until(&mut stream, "event: draining").await;
        house.close().await;
    });
}

#[test]
fn refusals_and_clients_that_leave_are_in_the_load() {
    run(async {
        let house = House::open(config()).await;
        assert_eq!(post(house.http, "/v1/completions", &request_body()).await.status, 200);
        house.fake.script(|script| script.refuse = Some((wire::refused::Reason::Full, 5)));
        assert_eq!(post(house.http, "/v1/completions", &request_body()).await.status, 429);
        let load = get(house.http, "/load/hour").await.json();
        let sum =
            |name: &str| load["bins"].as_array().unwrap().iter().map(|bin| bin[name].as_u64().unwrap()).sum::<u64>();
        assert_eq!((sum("arrived"), sum("ended"), sum("refused")), (2, 1, 1), "{load}");
        assert_eq!((sum("output"), sum("broken")), (8, 0), "{load}");
        assert!(load["bins"][0]["first_token_s"]["p50"].as_f64().unwrap() > 0.0);
        assert_eq!((&load["bin_seconds"], load["bins"][0]["tenants"]["other"].as_u64()), (&json!(10), Some(8)));
        house.close().await;
        // No request has come: the list is empty, and has no zeros.
        let idle = House::of(config(), vec![Fake::start()]).await;
        assert_eq!(get(idle.http, "/load/hour").await.json()["bins"], json!([]));
        idle.close().await;
    });
}
