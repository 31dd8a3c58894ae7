//! Published vulnerabilities of similar servers: one test for each way in that a client has.
//!
//! The others are tested beside their code. Files that run code when they are read, and headers of GGUF that overflow:
//! `tests/lockstep/advisories.rs`; these and templates that never end: the fuzz targets in
//! `checkpoint/tests/checkpoint/fuzz`. Names in a hub's answer that leave their folder:
//! `checkpoint/src/catalogue/tests/mod.rs`. One tenant's prefix found by another:
//! `coordinator/tests/coordinator/tenants.rs`. Invalid frames: `coordinator/tests/coordinator/faults/mod.rs`. Strangers
//! at a cluster's ports, and garbage between ranks: `tests/lockstep/processes/mod.rs`. Bodies of great size: `fuzz.rs`;
//! connections that send no request: `doors.rs`; thousands of stop strings: `router/src/front/stop.rs`.

use crate::client::{get, post, post_with_key, send};
use crate::grpc::{client, text_request};
use crate::raw::{CALM, END_STREAM, GOAWAY, HEADERS, RESET, Raw, frame, grpc_body, posting};
use crate::{House, config, eventually, run_within};
use proto::v1;
use router::{ApiKeys, Config};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tonic::Code;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const PATIENCE: Duration = Duration::from_secs(120);

async fn is_served(house: &House) {
    let reply = post(house.http, COMPLETIONS, &json!({ "prompt": "x", "max_tokens": 2 })).await;
    assert_eq!(reply.status, 200, "{reply:?}");
}

/// Returns bodies with a number, list or text in which each element costs the engine work, memory or output.
fn greedy() -> Vec<Value> {
    let many = |n: usize| (0..n).map(|i| json!(format!("s{i}"))).collect::<Value>();
    let bias = (0..100_000).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
    let nested = (0..200).fold(json!("x"), |inner, _| json!([inner]));
    vec![
        json!({ "n": u32::MAX }),
        json!({ "n": 129 }),
        json!({ "best_of": 1_000_000 }),
        json!({ "n": 2, "best_of": 1_000_000 }),
        json!({ "logprobs": u32::MAX }),
        json!({ "logprobs": 21 }),
        json!({ "prompt_logprobs": 100_000 }),
        json!({ "prompt_logprobs": -1 }),
        json!({ "stop": many(60_000) }),
        json!({ "stop": ["x".repeat(600_000)] }),
        json!({ "bad_words": many(60_000) }),
        json!({ "dry_sequence_breakers": many(60_000), "dry_multiplier": 1 }),
        json!({ "logit_bias": bias }),
        json!({ "logit_bias": { "4294967295": 1 } }),
        json!({ "logit_bias": { "5": 1e300 } }),
        json!({ "allowed_token_ids": [4_000_000_000u32] }),
        json!({ "stop_token_ids": (0..100_000).collect::<Vec<u32>>() }),
        json!({ "min_tokens": u32::MAX, "max_tokens": 5 }),
        json!({ "temperature": 1e308 }),
        json!({ "temperature": 1e-300, "top_p": 1e300 }),
        json!({ "top_k": i64::MIN }),
        json!({ "repetition_penalty": 0 }),
        json!({ "seed": 1e300 }),
        json!({ "priority": i64::MAX }),
        json!({ "deadline_ms": -1 }),
        json!({ "prompt": (0..100_000).map(|_| "x").collect::<Vec<_>>() }),
        json!({ "prompt": [4_294_967_295u32] }),
        json!({ "prompt": [[], []] }),
        json!({ "prompt": nested }),
        json!({ "prompt": "x".repeat(900_000) }),
        json!({ "guided_regex": "(a{1,100000}){1,100000}" }),
        json!({ "guided_grammar": "root ::= root" }),
        json!({ "guided_json": { "$ref": "#" } }),
        json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "$ref": "#" } } } }),
        json!({ "chat_template": "{% for i in range(1000000000) %}{% endfor %}" }),
    ]
}

#[test]
fn one_request_does_not_take_the_server_down() {
    run_within(PATIENCE, async {
        let house = House::open(config()).await;
        for more in greedy() {
            let named: Vec<&String> = more.as_object().unwrap().keys().collect();
            let mut body = json!({ "prompt": "x" });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let n_before = house.fake.submits().len();
            let reply = post(house.http, COMPLETIONS, &body).await;
            assert!(matches!(reply.status, 400 | 404 | 413 | 429), "{named:?}: {} {}", reply.status, reply.body);
            assert!(
                reply.json()["error"]["message"].is_string() && reply.body.len() < 2000,
                "{named:?}: {}",
                reply.body
            );
            assert_eq!(house.fake.submits().len(), n_before, "{named:?} came to the replica");
        }
        is_served(&house).await;
        house.close().await;
    });
}

#[test]
fn a_very_long_conversation_is_refused_or_answered_in_time() {
    run_within(PATIENCE, async {
        let house = House::open(config()).await;
        let messages: Vec<Value> = (0..20_000).map(|_| json!({ "role": "user", "content": "{{ 7 * 7 }}" })).collect();
        assert_eq!(post(house.http, CHAT, &json!({ "messages": messages })).await.status, 400);
        // A client's text is never part of the template.
        let message = json!([{ "role": "user", "content": "{{ 7 * 7 }}{% raw %}" }]);
        assert_eq!(post(house.http, CHAT, &json!({ "messages": message })).await.status, 200);
        let prompt: Vec<u8> = house.fake.submits()[0].prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
        assert!(String::from_utf8(prompt).unwrap().contains("{{ 7 * 7 }}{% raw %}"));
        is_served(&house).await;
        house.close().await;
    });
}

/// Every page that requires a key refuses without one, however its path is written.
#[test]
fn no_page_goes_around_the_key() {
    run_within(PATIENCE, async {
        let house = House::open(Config { keys: ApiKeys::parse("k1").unwrap(), ..config() }).await;
        let openai = [COMPLETIONS, CHAT, "/v1/embeddings", "/v1/models", "/v1/models/toy"];
        let others = ["/tokenize", "/detokenize", "/api/chat", "/api/tags", "/completion", "/inference/v1/generate"];
        for page in openai.into_iter().chain(others) {
            let upper = page.to_uppercase();
            let written = [
                page.to_owned(),
                format!("{page}/"),
                format!("/{page}"),
                format!("/.{page}"),
                format!("/health/..{page}"),
                format!("/health/%2e%2e{page}"),
                format!("{page}?key=k1"),
                format!("{page}%00"),
                format!("{page};x"),
                upper,
            ];
            for path in written {
                for method in ["GET", "POST", "HEAD", "PUT", "OPTIONS"] {
                    let body = r#"{"prompt": "x", "tokens": [1], "input": "x"}"#;
                    // On these pages clients of llama.cpp's and Anthropic's APIs may send the key as `x-api-key`.
                    let is_either = page == "/completion" || page.starts_with("/v1/models");
                    let aside = if is_either { "x-key: k1" } else { "x-api-key: k1" };
                    let head = format!("host: localhost\r\nconnection: close\r\nx-original-url: /health\r\n{aside}");
                    let n = body.len();
                    let request = format!("{method} {path} HTTP/1.1\r\n{head}\r\ncontent-length: {n}\r\n\r\n{body}");
                    let reply = send(house.http, &request).await;
                    assert!(matches!(reply.status, 400 | 401 | 404 | 405), "{method} {path}: {reply:?}");
                }
            }
            let wrong = post_with_key(house.http, page, "k2", &json!({ "prompt": "x" })).await;
            assert!(matches!(wrong.status, 401 | 405), "{page}: {wrong:?}");
        }
        let unauthenticated = |code: Code| assert_eq!(code, Code::Unauthenticated);
        let mut client = client(&house);
        unauthenticated(client.generate(text_request("x")).await.unwrap_err().code());
        unauthenticated(client.embed(v1::EmbedRequest::default()).await.unwrap_err().code());
        unauthenticated(client.tokenize(v1::TokenizeRequest::default()).await.unwrap_err().code());
        unauthenticated(client.detokenize(v1::DetokenizeRequest::default()).await.unwrap_err().code());
        unauthenticated(client.list_models(v1::ListModelsRequest {}).await.unwrap_err().code());
        unauthenticated(client.get_topology(v1::GetTopologyRequest::default()).await.unwrap_err().code());
        assert!(house.fake.submits().is_empty());
        house.close().await;
    });
}

/// A label that a client could choose would be a series for each of its values, for as long as the server lives.
#[test]
fn metrics_have_no_label_of_a_clients_choice() {
    run_within(PATIENCE, async {
        let exporter = telemetry::exporter::install(&[]).unwrap();
        let is_first = AtomicBool::new(true);
        let metrics: router::Render = Arc::new(move || {
            assert!(!is_first.swap(false, Ordering::Relaxed), "planned by this test");
            exporter.render()
        });
        let house = House::open(Config { metrics, ..config() }).await;
        for i in 0..50 {
            let body = json!({ "prompt": "x", "model": format!("evil-{i}"), "user": format!("evil-{i}") });
            post(house.http, COMPLETIONS, &body).await;
            get(house.http, &format!("/evil-{i}")).await;
            let head = format!("host: evil-{i}\r\nuser-agent: evil-{i}\r\ntraceparent: evil-{i}\r\nconnection: close");
            send(house.http, &format!("EVIL-{i} /v1/models/evil-{i} HTTP/1.1\r\n{head}\r\n\r\n")).await;
        }
        is_served(&house).await;
        assert_eq!(get(house.http, "/metrics").await.status, 500);
        let page = get(house.http, "/metrics").await.body;
        let n_panics = page.lines().find_map(|line| line.strip_prefix("lockstep:panics_total ")).map(str::parse::<u64>);
        assert!(n_panics.is_some_and(|n| n.unwrap() > 0), "{page}");
        assert!(page.contains("lockstep:") && !page.to_lowercase().contains("evil"), "{page}");
        let labels = |line: &str| line.split_once('{').map(|(_, rest)| rest.split('}').next().unwrap().to_owned());
        let outcomes: Vec<String> = page.lines().filter_map(labels).filter(|of| of.contains("outcome=")).collect();
        assert!(!outcomes.is_empty() && outcomes.len() < 64, "{outcomes:?}");
        house.close().await;
    });
}

/// Only the key decides which tenant's cache a request reads.
#[test]
fn the_prefix_cache_is_the_keys_own() {
    run_within(PATIENCE, async {
        let keys = ApiKeys::parse("alice:k1\nbob:k2").unwrap();
        let house = House::open(Config { keys, ..config() }).await;
        let plain = json!({ "prompt": "secret", "max_tokens": 1 });
        let claims = json!({ "prompt": "secret", "max_tokens": 1, "user": "alice", "tenant": "alice",
            "cache_salt": "alice", "prompt_cache_key": "alice", "metadata": { "tenant": "alice" } });
        for (key, body) in [("k1", &plain), ("k2", &plain), ("k2", &claims), ("k1", &claims)] {
            assert_eq!(post_with_key(house.http, COMPLETIONS, key, body).await.status, 200);
        }
        let tenants: Vec<u64> = house.fake.submits().iter().map(|request| request.tenant).collect();
        assert_eq!((tenants[0], tenants[1]), (tenants[3], tenants[2]));
        assert!(tenants[0] != tenants[1] && !tenants.contains(&0));
        // A salt separates requests of one key from each other. It never joins them with those of another key.
        let salts: Vec<Vec<u8>> = house.fake.submits().into_iter().map(|request| request.cache_salt).collect();
        assert!(salts[0].is_empty() && salts[1].is_empty() && salts[2] == salts[3]);
        assert_eq!(salts[2].len(), 16);
        for salt in ["", &"x".repeat(1025)] {
            let body = json!({ "prompt": "secret", "cache_salt": salt });
            let refused = post_with_key(house.http, COMPLETIONS, "k1", &body).await;
            assert_eq!(refused.json()["error"]["param"], "cache_salt", "{salt}");
        }
        house.close().await;
    });
}

/// Streams are opened and reset: their work ends with them, and a client that does it faster than it can be served is
/// disconnected.
#[test]
fn rapid_resets_leave_nothing_behind() {
    run_within(PATIENCE, async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 1);
        let (submits, cancels) = (|| house.fake.submits().len(), || house.fake.cancels().len());
        for (address, path, body) in [
            (house.http, COMPLETIONS, br#"{"prompt": "x", "stream": true}"#.to_vec()),
            (house.grpc, "/lockstep.v1.Inference/Generate", grpc_body("x")),
        ] {
            let mut client = Raw::connect(address, &[]).await;
            let n_before = submits();
            for i in 0..5 {
                client.post(2 * i + 1, path, "", &body, true).await;
            }
            eventually(|| async { submits() == n_before + 5 }).await;
            for i in 0..5 {
                client.write(&reset(2 * i + 1)).await;
            }
            eventually(|| async { cancels() == n_before + 5 }).await;
            // These are reset before they begin.
            let pair = |i: u32| [posting(2 * i + 1, path, "", &body, true), reset(2 * i + 1)].concat();
            let flood: Vec<u8> = (5..405).flat_map(pair).collect();
            client.write(&flood).await;
            let last = client.until(|frame| frame.kind == GOAWAY && frame.payload[4..8] != [0; 4]).await;
            assert_eq!(last.expect("a last word").payload[4..8], CALM, "{path}");
            eventually(|| async { submits() == cancels() }).await;
        }
        house.fake.script(|script| script.hold_at = usize::MAX);
        is_served(&house).await;
        house.close().await;
    });
}

fn reset(stream: u32) -> Vec<u8> {
    frame(RESET, 0, stream, &8u32.to_be_bytes())
}

/// Lists may be as long as a client likes, and each answer has its own copy.
#[test]
fn lists_are_not_multiplied() {
    run_within(PATIENCE, async {
        let house = House::open(config()).await;
        let (words, prompts) = (vec!["x".repeat(1000); 60], vec!["x"; 32]);
        let bias = (0..1025).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
        for (body, field, word) in [
            (json!({ "prompt": prompts, "n": 16, "bad_words": words }), "n", "lists"),
            (json!({ "prompt": "x", "logit_bias": bias }), "logit_bias", "1024"),
        ] {
            let reply = post(house.http, COMPLETIONS, &body).await;
            let error = &reply.json()["error"];
            assert_eq!((reply.status, error["param"].as_str()), (400, Some(field)), "{reply:?}");
            assert!(error["message"].as_str().unwrap().contains(word), "{reply:?}");
        }
        assert!(house.fake.submits().is_empty());
        // A repeated token counts once.
        let often = json!({ "prompt": "x", "n": 16, "allowed_token_ids": vec![7; 50_000], "max_tokens": 2 });
        assert_eq!(post(house.http, COMPLETIONS, &often).await.status, 200);
        let allowed: Vec<_> = house.fake.submits().into_iter().map(|of| of.sampling.unwrap().allowed).collect();
        assert_eq!(allowed, vec![vec![7]; 16]);
        house.close().await;
    });
}

/// The size of gRPC's messages is limited too, before any memory of that size is taken.
#[test]
fn messages_beyond_their_limit_are_refused() {
    run_within(PATIENCE, async {
        let house = House::open(config()).await;
        let long = text_request(&"x".repeat((1 << 20) + 1));
        assert_eq!(client(&house).generate(long).await.unwrap_err().code(), Code::ResourceExhausted);
        // The client sends a length alone, and nothing of the announced message.
        let mut raw = Raw::connect(house.grpc, &[]).await;
        raw.post(1, "/lockstep.v1.Inference/Generate", "", &[0, 255, 255, 255, 255, 1], false).await;
        let answer = raw.until(|frame| frame.kind == HEADERS && frame.stream == 1).await;
        assert_eq!(answer.expect("an answer").flags & END_STREAM, END_STREAM);
        assert!(house.fake.submits().is_empty());
        is_served(&house).await;
        house.close().await;
    });
}

/// A failure in one request harms no other.
#[test]
fn a_panic_ends_one_request() {
    run_within(PATIENCE, async {
        let metrics: router::Render = Arc::new(|| -> String { panic!("planned by this test") });
        let text_files: router::ReadTextFiles = Arc::new(|| panic!("planned by this test"));
        let house = House::open(Config { metrics, text_files: Some(text_files), ..config() }).await;
        let reply = get(house.http, "/metrics").await;
        assert_eq!((reply.status, &reply.json()["error"]["type"]), (500, &json!("server_error")));
        let request = proto::vllm::GetTokenizerRequest::default();
        let channel = wire::tcp(&house.grpc.to_string()).unwrap();
        let mut gateway = proto::vllm::vllm_engine_client::VllmEngineClient::new(channel);
        assert_eq!(gateway.get_tokenizer(request).await.unwrap_err().code(), Code::Internal);
        is_served(&house).await;
        house.close().await;
    });
}
