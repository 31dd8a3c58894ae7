//! The HTTP face: what it accepts and what it refuses, and when.

use crate::client::{get, post, post_and_leave_open, post_text, post_until, send, send_bytes};
use crate::{House, config, eventually, run};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(extra: Value) -> Value {
    merge(json!({ "model": "toy", "messages": [{ "role": "user", "content": "Hi" }] }), extra)
}

fn completion(extra: Value) -> Value {
    merge(json!({ "prompt": "Hi" }), extra)
}

pub fn merge(mut body: Value, extra: Value) -> Value {
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn parameters_reach_the_replica() {
    run(async {
        let house = House::open(config()).await;
        let extra = json!({
            "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.125, "seed": -1, "max_tokens": 3,
            "max_completion_tokens": 5, "min_tokens": 2, "stop_token_ids": [44], "priority": -4,
            "messages": [{ "role": "developer", "content": [
                { "type": "text", "text": "A" }, { "type": "text", "text": "B" }
            ] }],
        });
        let reply = post(house.http, CHAT, &chat(extra)).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let sent = house.fake.submits().remove(0);
        let prompt = [&[256][..], &b"system:A\nB".map(u32::from), &[257, 256]].concat();
        assert_eq!((sent.prompt, sent.priority, sent.tenant), (prompt, -4, 0));
        let sampling = sent.sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), (0.0, 0, 0.5, 0.125));
        assert_eq!((sampling.seed, sampling.tokens_max, sampling.tokens_min), (u64::MAX, 5, 2));
        assert_eq!((sampling.stop, sampling.logprobs, sampling.choice), (vec![44, 257], None, 0));
        assert_eq!((sampling.typical_p, sampling.penalties, sampling.dry, sampling.xtc), (None, None, None, None));
        post(house.http, COMPLETIONS, &json!({ "prompt": [[5, 6]], "ignore_eos": true })).await;
        let sent = house.fake.submits().remove(1);
        assert_eq!((sent.prompt, sent.sampling.unwrap().stop), (vec![5, 6], vec![]));
        house.close().await;
    });
}

#[test]
fn a_completion_without_a_length_has_sixteen_tokens() {
    run(async {
        let house = House::open(config()).await;
        let room = u64::from(crate::model::CONTEXT) - 10;
        for (path, body, expect) in [
            (COMPLETIONS, json!({}), 16),
            (COMPLETIONS, json!({ "max_tokens": null }), 16),
            (COMPLETIONS, json!({ "max_tokens": 40 }), 40),
            (COMPLETIONS, json!({ "max_completion_tokens": 41, "max_tokens": 40 }), 41),
            (CHAT, json!({}), room),
        ] {
            let base = if path == CHAT { chat(body) } else { completion(body) };
            assert_eq!(post(house.http, path, &base).await.status, 200, "{base}");
            let sent = house.fake.submits().pop().unwrap().sampling.unwrap();
            assert_eq!(u64::from(sent.tokens_max), expect, "{base}");
        }
        house.close().await;
    });
}

#[test]
fn all_of_sampling_reaches_the_replica() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({
            "presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.25, "typical_p": 0.75,
            "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.25, "dry_multiplier": 0.5, "dry_base": 2,
            "dry_allowed_length": 3, "dry_sequence_breakers": ["!"], "logit_bias": { "65": -100, "7": 2.5 },
            "allowed_token_ids": [65, 66, 67], "bad_words": ["AB"],
        });
        assert_eq!(post(house.http, COMPLETIONS, &completion(body)).await.status, 200);
        let sent = house.fake.submits().remove(0).sampling.unwrap();
        let penalties = sent.penalties.unwrap();
        assert_eq!((penalties.presence, penalties.frequency, penalties.repetition), (0.5, -0.25, 1.25));
        assert_eq!((sent.typical_p, sent.top_n_sigma), (Some(0.75), 2.0));
        let (xtc, dry) = (sent.xtc.unwrap(), sent.dry.unwrap());
        assert_eq!((xtc.probability, xtc.threshold), (0.5, 0.25));
        assert_eq!((dry.multiplier, dry.base, dry.length_allowed), (0.5, 2.0, 3));
        assert_eq!(dry.breakers.iter().map(|run| run.tokens.clone()).collect::<Vec<_>>(), [vec![33]]);
        assert_eq!((sent.bias_tokens, sent.bias), (vec![7, 65], vec![2.5, -100.0]));
        assert_eq!(sent.allowed, [65, 66, 67]);
        // Each token of the toy model is a byte: with a space before it a word has one token more, and is not added.
        assert_eq!(sent.bad_words.iter().map(|run| run.tokens.clone()).collect::<Vec<_>>(), [vec![65, 66]]);
        house.close().await;
    });
}

#[test]
fn non_json_content_type_is_refused() {
    run(async {
        let house = House::open(config()).await;
        let body = r#"{"prompt": "Hi"}"#;
        let status = async |headers: &str, body: &str| {
            let n = body.len();
            let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}");
            send(house.http, &format!("{head}content-length: {n}\r\n\r\n{body}")).await.status
        };
        for (headers, expect) in [
            ("", 200),
            ("content-type: application/json\r\n", 200),
            ("content-type: Application/JSON; charset=utf-8\r\n", 200),
            ("content-type: application/problem+json\r\ncontent-encoding: identity\r\n", 200),
            ("content-type: application/x-www-form-urlencoded\r\n", 415),
            ("content-type: text/plain\r\n", 415),
            ("content-type: multipart/form-data; boundary=x\r\n", 415),
            ("content-type: \r\n", 415),
            ("content-type: application/json\r\ncontent-encoding: br\r\n", 415),
            ("content-type: application/json\r\ncontent-encoding: gzip\r\n", 400),
        ] {
            assert_eq!(status(headers, body).await, expect, "{headers}");
        }
        assert_eq!(status("", &format!("\u{feff}{body}")).await, 200);
        // As `curl -d` sends it: on pages of Ollama and llama.cpp, and not for a page of another site.
        let of_curl = "content-type: application/x-www-form-urlencoded\r\n";
        for (path, body) in [
            ("/api/generate", r#"{"model": "toy", "prompt": "Hi", "stream": false}"#),
            ("/api/chat", r#"{"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "stream": false}"#),
            ("/completion", r#"{"prompt": "Hi", "n_predict": 2}"#),
            ("/tokenize", r#"{"content": "Hi"}"#),
        ] {
            for (from, expect) in [("", 200), ("origin: http://evil.example\r\n", 403)] {
                let n = body.len();
                let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{of_curl}{from}");
                let reply = send(house.http, &format!("{head}content-length: {n}\r\n\r\n{body}")).await;
                assert_eq!(reply.status, expect, "{path} {from}{}", reply.body);
            }
        }
        house.close().await;
    });
}

#[test]
fn a_body_may_be_packed_by_gzip() {
    run(async {
        let house = House::open(config()).await;
        let send = async |body: &[u8]| {
            let mut packer = GzEncoder::new(Vec::new(), Compression::default());
            packer.write_all(body).unwrap();
            let packed = packer.finish().unwrap();
            let head = format!(
                "POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                 content-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
                packed.len()
            );
            send_bytes(house.http, &[head.as_bytes(), &packed].concat()).await
        };
        let request = json!({ "prompt": "Hi", "seed": 5, "max_tokens": 4 });
        let (packed, plain) =
            (send(request.to_string().as_bytes()).await, post(house.http, COMPLETIONS, &request).await);
        assert_eq!((packed.status, &packed.json()["choices"]), (200, &plain.json()["choices"]));
        // A body that unpacks to more than the limit is refused like any body beyond it.
        let bytes_max = config().limits.body_bytes_max;
        let bomb = send(&vec![b' '; bytes_max + 1]).await;
        assert_eq!((bomb.status, &bomb.json()["error"]["code"]), (413, &json!("request_too_large")));
        house.close().await;
    });
}

#[test]
fn seed_is_returned_as_it_was_sent() {
    run(async {
        let house = House::open(config()).await;
        for seed in [json!(-1), json!(7), json!(-9_000_000_000_i64)] {
            for (page, body) in [
                (COMPLETIONS, json!({ "prompt": "Hi", "seed": seed })),
                ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "Hi" }], "seed": seed })),
                ("/v1/responses", json!({ "input": "Hi", "seed": seed })),
            ] {
                let reply = post(house.http, page, &body).await;
                assert_eq!((reply.status, &reply.json()["seed"]), (200, &seed), "{page} {reply:?}");
            }
        }
        house.close().await;
    });
}

#[test]
fn errors_name_the_page_and_a_last_slash_changes_none() {
    run(async {
        let house = House::open(config()).await;
        let send_request = async |method: &str, path: &str| {
            send(house.http, &format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).await
        };
        assert_eq!(send_request("GET", "/v1/models/").await.body, send_request("GET", "/v1/models").await.body);
        assert_eq!(send_request("GET", "/v1/models/?x=1").await.status, 200);
        for (method, path, status, message) in [
            ("POST", "/v1/nothing", 404, "there is no POST /v1/nothing here"),
            ("GET", COMPLETIONS, 405, "/v1/completions exists, but does not accept GET"),
        ] {
            let reply = send_request(method, path).await;
            assert_eq!((reply.status, &reply.json()["error"]["message"]), (status, &json!(message)), "{path}");
        }
        let reply = send_request("GET", "/v1/messages/batches").await;
        let expected = json!({ "type": "not_found_error", "message": "there is no GET /v1/messages/batches here" });
        assert_eq!((reply.status, reply.json()["type"].clone()), (404, json!("error")));
        assert_eq!(reply.json()["error"], expected);
        house.close().await;
    });
}

#[test]
fn values_that_change_nothing_here_are_taken() {
    run(async {
        let house = House::open(config()).await;
        let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 2 });
        for (path, body) in [
            (CHAT, merge(chat.clone(), json!({ "top_p": 0, "verbosity": "low", "reasoning_effort": "high" }))),
            (
                "/v1/responses",
                json!({ "model": "toy", "input": "Hi", "truncation": "auto", "max_output_tokens": 2,
                "text": { "verbosity": "high" }, "reasoning": { "effort": "low" } }),
            ),
        ] {
            let reply = post(house.http, path, &body).await;
            assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        }
        house.close().await;
    });
}

#[test]
fn what_a_chat_refuses_is_not_tokenized_either() {
    run(async {
        let house = House::open(config()).await;
        let user = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        for (extra, name) in [
            (json!({ "tools": [{ "type": "function" }] }), "tools[0].function.name"),
            (json!({ "tool_choice": "required" }), "tool_choice"),
            (json!({ "continue_final_message": 1 }), "continue_final_message"),
            (json!({ "chat_template_kwargs": 5 }), "chat_template_kwargs"),
            (json!({ "documents": "a" }), "documents"),
            (json!({ "messages": [{ "role": "a wizard", "content": "x" }] }), "messages[0].role"),
        ] {
            for path in [CHAT, "/tokenize"] {
                let reply = post(house.http, path, &merge(user.clone(), extra.clone())).await;
                assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(name)), "{path} {extra}");
            }
        }
        let both = merge(user, json!({ "prompt": "Hi" }));
        assert_eq!(post(house.http, "/tokenize", &both).await.json()["error"]["param"], "messages");
        house.close().await;
    });
}

#[test]
fn a_wrong_field_is_named() {
    run(async {
        let house = House::open(config()).await;
        let user = |content: Value| json!({ "messages": [{ "role": "user", "content": content }] });
        for (path, body, param) in [
            (CHAT, chat(json!({ "temperature": 3 })), "temperature"),
            (CHAT, chat(json!({ "n": 0 })), "n"),
            (CHAT, chat(json!({ "n": 129 })), "n"),
            (CHAT, chat(json!({ "min_tokens": 9, "max_tokens": 8 })), "min_tokens"),
            (CHAT, chat(json!({ "stop": "" })), "stop"),
            (CHAT, chat(json!({ "logprobs": true, "top_logprobs": 21 })), "top_logprobs"),
            (CHAT, chat(json!({ "top_logprobs": 2 })), "top_logprobs"),
            (CHAT, chat(json!({ "tools": [{}] })), "tools[0].type"),
            (CHAT, chat(json!({ "messages": [] })), "messages"),
            (CHAT, json!({}), "messages"),
            (CHAT, chat(json!({ "messages": "Hi" })), "messages"),
            (CHAT, chat(json!({ "messages": [{ "role": "<robot>", "content": "x" }] })), "messages[0].role"),
            (CHAT, chat(user(Value::Null)), "messages[0].content"),
            (CHAT, chat(user(json!([{ "type": "image_url" }]))), "messages[0].content[0].type"),
            (COMPLETIONS, json!({}), "prompt"),
            (COMPLETIONS, json!({ "prompt": "" }), "prompt"),
            (COMPLETIONS, json!({ "prompt": ["a", 1] }), "prompt"),
            (COMPLETIONS, json!({ "prompt": vec!["a"; 257] }), "prompt"),
            (COMPLETIONS, json!({ "prompt": [1, 258] }), "prompt"),
            (COMPLETIONS, json!({ "prompt": [1, "a"] }), "prompt"),
            (COMPLETIONS, completion(json!({ "logprobs": 21 })), "logprobs"),
            (COMPLETIONS, completion(json!({ "max_tokens": 0 })), "max_tokens"),
            (COMPLETIONS, completion(json!({ "suffix": "end" })), "suffix"),
            (COMPLETIONS, completion(json!({ "prompt_logprobs": 1, "stream": true })), "prompt_logprobs"),
            (COMPLETIONS, completion(json!({ "presence_penalty": 2.5 })), "presence_penalty"),
            (COMPLETIONS, completion(json!({ "repetition_penalty": 0 })), "repetition_penalty"),
            (COMPLETIONS, completion(json!({ "logit_bias": { "5": 101 } })), "logit_bias"),
            (COMPLETIONS, completion(json!({ "logit_bias": { "258": 1 } })), "logit_bias"),
            (COMPLETIONS, completion(json!({ "allowed_token_ids": [258] })), "allowed_token_ids"),
            (COMPLETIONS, completion(json!({ "bad_words": [""] })), "bad_words"),
            (COMPLETIONS, completion(json!({ "typical_p": 0 })), "typical_p"),
            (COMPLETIONS, completion(json!({ "xtc_probability": 2 })), "xtc_probability"),
            (COMPLETIONS, completion(json!({ "dry_multiplier": -1 })), "dry_multiplier"),
            (COMPLETIONS, completion(json!({ "mirostat": 2 })), "mirostat"),
            (COMPLETIONS, completion(json!({ "n": 3, "best_of": 2 })), "best_of"),
        ] {
            let reply = post(house.http, path, &body).await;
            assert_eq!(reply.status, 400, "{body}: {reply:?}");
            let error = &reply.json()["error"];
            assert_eq!((&error["param"], &error["type"]), (&json!(param), &json!("invalid_request_error")), "{body}");
            assert!(error["message"].as_str().unwrap().contains(param), "{error}");
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn a_body_that_is_no_request_is_refused() {
    run(async {
        let house = House::open(config()).await;
        let check = async |reply: crate::client::Reply, status: u16, code: Value| {
            assert_eq!(reply.status, status, "{reply:?}");
            assert_eq!(reply.json()["error"]["code"], code, "{reply:?}");
        };
        check(post_text(house.http, CHAT, "{\"messages\": [").await, 400, Value::Null).await;
        check(post_text(house.http, CHAT, "[]").await, 400, Value::Null).await;
        check(post_text(house.http, CHAT, &"[".repeat(100_000)).await, 400, Value::Null).await;
        check(post_text(house.http, CHAT, &" ".repeat(1_048_577)).await, 413, json!("request_too_large")).await;
        check(post(house.http, CHAT, &chat(json!({ "model": "gpt" }))).await, 404, json!("model_not_found")).await;
        check(get(house.http, "/v1/nothing").await, 404, Value::Null).await;
        check(get(house.http, CHAT).await, 405, Value::Null).await;
        let long = completion(json!({ "prompt": "x".repeat(200) }));
        let reply = post(house.http, COMPLETIONS, &long).await;
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("has 200 tokens") && message.contains("context of 200"), "{message}");
        check(reply, 400, json!("context_length_exceeded")).await;
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn full_router_refuses_with_retry_after() {
    run(async {
        let mut config = config();
        config.limits.requests_waiting_max = 2;
        let house = House::open(config).await;
        house.fake.script(|script| script.hold_at = 0);
        let waiting = post_and_leave_open(house.http, CHAT, &chat(json!({ "n": 2 }))).await;
        eventually(|| async { house.fake.submits().len() == 2 }).await;
        let reply = post(house.http, CHAT, &chat(json!({}))).await;
        assert_eq!((reply.status, reply.headers["retry-after"].as_str()), (429, "1"), "{reply:?}");
        assert_eq!(reply.json()["error"]["code"], "rate_limit_exceeded");
        // Three choices never fit into two places, so a retry would not help, and no place is taken.
        drop(waiting);
        eventually(|| async { house.fake.cancels().len() == 2 }).await;
        house.fake.script(|script| script.hold_at = usize::MAX);
        assert_eq!(post(house.http, CHAT, &chat(json!({ "n": 3 }))).await.status, 400);
        assert_eq!(post(house.http, CHAT, &chat(json!({ "n": 2 }))).await.status, 200);
        assert_eq!(house.fake.submits().len(), 4);
        house.close().await;
    });
}

#[test]
fn a_replica_that_is_full_makes_a_429() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.refuse = Some((proto::cluster::refused::Reason::Full, 3000)));
        for extra in [json!({}), json!({ "stream": true }), json!({ "n": 3 })] {
            let reply = post(house.http, CHAT, &chat(extra)).await;
            assert_eq!((reply.status, reply.headers["retry-after"].as_str()), (429, "3"), "{reply:?}");
        }
        house.close().await;
    });
}

#[test]
fn a_client_that_leaves_is_cancelled() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        drop(post_until(house.http, CHAT, &chat(json!({ "stream": true })), "\"l\"").await);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        let waiting = post_and_leave_open(house.http, CHAT, &chat(json!({}))).await;
        eventually(|| async { house.fake.submits().len() == 2 }).await;
        drop(waiting);
        eventually(|| async { house.fake.cancels().len() == 2 }).await;
        drop(post_until(house.http, CHAT, &chat(json!({ "stream": true, "n": 3 })), "\"index\":2").await);
        eventually(|| async { house.fake.cancels().len() == 5 }).await;
        let ids = |request: proto::cluster::Request| request.id;
        let (mut cancelled, submitted) = (house.fake.cancels(), house.fake.submits().into_iter().map(ids));
        cancelled.sort_unstable();
        assert_eq!(cancelled, submitted.collect::<Vec<_>>());
        house.close().await;
    });
}

#[test]
fn readiness_follows_replica_phase() {
    run(async {
        let house = House::open_unready(config()).await;
        let statuses = async || (get(house.http, "/livez").await.status, get(house.http, "/health").await.status);
        assert_eq!(statuses().await, (200, 503));
        assert_eq!(get(house.http, "/health").await.json()["error"]["code"], "not_ready");
        let check = async |status: u16, code: &str| {
            let reply = get(house.http, "/ready").await;
            assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (status, Some(code)), "{reply:?}");
            assert!(reply.headers.contains_key("retry-after"));
        };
        check(503, "not_ready").await;
        let reply = post(house.http, CHAT, &chat(json!({}))).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("not_ready")));
        assert_eq!(get(house.http, "/v1/models").await.json()["data"], json!([]));
        let replica = &get(house.http, "/cluster").await.json()["replicas"][0];
        assert_eq!((&replica["replica"], &replica["phase"]), (&json!("somewhere"), &json!("absent")));
        house.fake.welcome();
        house.wait_until_ready().await;
        assert_eq!(statuses().await, (200, 200));
        house.fake.phase(proto::cluster::state::Phase::Draining);
        eventually(|| async { get(house.http, "/ready").await.status == 503 }).await;
        check(503, "draining").await;
        house.fake.die();
        eventually(|| async { get(house.http, "/ready").await.body.contains("not_ready") }).await;
        assert_eq!(statuses().await, (200, 503));
        house.close().await;
    });
}

#[test]
fn pages_answer_in_the_form_of_their_apis() {
    run(async {
        let house = House::open(config()).await;
        let models = get(house.http, "/v1/models").await.json();
        assert_eq!((&models["data"][0]["id"], &models["data"][1]["id"]), (&json!("toy"), &json!("alias")));
        assert_eq!(models["data"][0]["max_model_len"], crate::model::CONTEXT);
        assert_eq!(get(house.http, "/v1/models/org/toy").await.json()["id"], "org/toy");
        assert_eq!(get(house.http, "/v1/models/gpt").await.status, 404);
        assert!(get(house.http, "/metrics").await.body.starts_with("metric 1\n"));
        let cluster = &get(house.http, "/cluster").await.json()["replicas"][0];
        assert_eq!((&cluster["phase"], &cluster["epoch"]), (&json!("ready"), &json!("3.1")));
        assert_eq!(cluster["ranks"][0]["pid"], 42);
        let tokens = post(house.http, "/tokenize", &json!({ "prompt": "né" })).await.json();
        assert_eq!(tokens, json!({ "count": 3, "max_model_len": 200, "tokens": [110, 195, 169], "token_strs": null }));
        let named = post(house.http, "/tokenize", &json!({ "prompt": "hi", "return_token_strs": true })).await.json();
        assert_eq!(named["token_strs"], json!(["h", "i"]));
        let text = post(house.http, "/detokenize", &json!({ "tokens": [110, 195, 169] })).await.json();
        assert_eq!(text["prompt"], "né");
        house.close().await;
    });
}

#[test]
fn after_the_stop_signal_streams_end_and_no_request_gets_in() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let mut stream = post_until(house.http, CHAT, &chat(json!({ "stream": true })), "\"l\"").await;
        house.shutdown.cancel();
        // The replica continues in another incarnation: it finishes the stream, though the router drains.
        house.fake.script(|script| script.hold_at = usize::MAX);
        house.fake.die();
        house.fake.welcome();
        let rest = crate::client::read_until(&mut stream, "[DONE]").await;
        assert!(rest.contains("\"finish_reason\":\"stop\""), "{rest}");
        house.close().await;
    });
}

#[test]
fn streams_that_do_not_end_in_time_are_cut() {
    run(async {
        let mut config = config();
        config.timeouts.drain_max = Duration::from_millis(50);
        let house = House::open(config).await;
        house.fake.script(|script| script.hold_at = 3);
        let mut stream = post_until(house.http, CHAT, &chat(json!({ "stream": true })), "\"l\"").await;
        house.shutdown.cancel();
        let rest = crate::client::read_until(&mut stream, "\r\n0\r\n").await;
        assert!(rest.contains("data: {\"error\":") && !rest.contains("[DONE]"), "{rest}");
        house.close().await;
    });
}
