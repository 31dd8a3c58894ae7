//! Pages with one text as the answer: Anthropic's messages and OpenAI's responses.

use crate::client::{Reply, get, post, post_after, post_until, post_with_key, send};
use crate::{House, config, eventually, run, run_within};
use proto::cluster as wire;
use router::ApiKeys;
use serde_json::{Value, json};
use std::time::Duration;
use types::{PrefixReuse, ReuseEnd};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const RESPONSES: &str = "/v1/responses";

fn with(mut body: Value, extra: Value) -> Value {
    extra.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

fn message(extra: Value) -> Value {
    let body = json!({ "model": "toy", "max_tokens": 50, "messages": [{ "role": "user", "content": "Hi" }] });
    with(body, extra)
}

fn response(extra: Value) -> Value {
    with(json!({ "model": "toy", "input": "Hi" }), extra)
}

/// Returns the names and data of all events. Their names are their types.
fn events(reply: &Reply) -> Vec<Value> {
    let data: Vec<Value> = reply.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let names = reply.body.lines().filter_map(|line| line.strip_prefix("event: "));
    assert!(names.eq(data.iter().map(|data| data["type"].as_str().unwrap())), "{}", reply.body);
    data
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

/// The last prompt that the replica received.
fn prompt(house: &House) -> String {
    let bytes = house.fake.submits().last().unwrap().prompt.iter().map(|token| *token as u8).collect();
    String::from_utf8_lossy(&bytes_of(bytes)).into_owned()
}

/// Control tokens are not bytes: they were cut to zero and one.
fn bytes_of(bytes: Vec<u8>) -> Vec<u8> {
    bytes.into_iter().map(|byte| if byte < 2 { b'|' } else { byte }).collect()
}

#[test]
fn a_whole_message() {
    run(async {
        let house = House::open(config()).await;
        let reuse = PrefixReuse { ended: Some(ReuseEnd::Differs), position: 4, fetched: 0 };
        house.fake.script(|script| (script.n_cached, script.reuse) = (4, reuse));
        let extra = json!({ "system": [{ "type": "text", "text": "Be" }, { "type": "text", "text": "good" }],
            "temperature": 0.5, "top_k": 3, "metadata": { "user_id": "x" } });
        let mut answer = post(house.http, MESSAGES, &message(extra)).await.json();
        assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
        answer["id"] = Value::Null;
        let text = json!({ "type": "text", "text": "Hello, world", "citations": null });
        let expected = json!({
            "id": null, "type": "message", "role": "assistant", "model": "toy", "content": [text],
            "stop_reason": "end_turn", "stop_sequence": null, "stop_details": null, "container": null,
            "usage": { "input_tokens": 22, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                "cache_creation": { "ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0 },
                "output_tokens": 13, "output_tokens_details": { "thinking_tokens": 0 }, "server_tool_use": null,
                "reuse_ended": { "reason": "differs", "position": 4 },
                "service_tier": "standard", "inference_geo": null },
        });
        assert_eq!(answer, expected);
        assert_eq!(prompt(&house), "|system:Be\ngood||user:Hi||");
        let sampling = house.fake.submits()[0].sampling.clone().unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.tokens_max), (0.5, 3, 50));
        let blocks = json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "Hi",
            "cache_control": { "type": "ephemeral" } }] }], "max_tokens": 5 });
        let cut = post(house.http, MESSAGES, &message(blocks)).await.json();
        assert_eq!((&cut["stop_reason"], &cut["content"][0]["text"]), (&json!("max_tokens"), &json!("Hello")));
        let stopped = post(house.http, MESSAGES, &message(json!({ "stop_sequences": ["wor"] }))).await.json();
        assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!("wor")));
        assert_eq!(stopped["content"][0]["text"], "Hello, ");
        house.close().await;
    });
}

#[test]
fn a_message_in_events() {
    run(async {
        let house = House::open(config()).await;
        let reply = post(house.http, MESSAGES, &message(json!({ "stream": true, "max_tokens": 3 }))).await;
        assert_eq!(reply.headers["content-type"], "text/event-stream");
        let events = events(&reply);
        let delta = "content_block_delta";
        let expected = [
            "message_start",
            "ping",
            "content_block_start",
            delta,
            delta,
            delta,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ];
        assert_eq!(types(&events), expected);
        let begun = &events[0]["message"];
        assert_eq!(
            (&begun["content"], &begun["stop_reason"], &begun["role"]),
            (&json!([]), &Value::Null, &json!("assistant"))
        );
        assert_eq!((&begun["usage"]["input_tokens"], &begun["usage"]["output_tokens"]), (&json!(10), &json!(0)));
        let text: String = events[3..6].iter().map(|event| event["delta"]["text"].as_str().unwrap()).collect();
        assert_eq!(text, "Hel");
        let end =
            json!({ "stop_reason": "max_tokens", "stop_sequence": null, "stop_details": null, "container": null });
        assert_eq!(events[7]["delta"], end);
        assert_eq!(events[7]["usage"]["output_tokens"], 3);
        house.close().await;
    });
}

#[test]
fn tokens_of_a_message_are_counted() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "model": "toy", "messages": [{ "role": "user", "content": "Hi" }] });
        assert_eq!(post(house.http, COUNT, &body).await.json(), json!({ "input_tokens": 10 }));
        let system = with(body.clone(), json!({ "system": "Be good" }));
        assert_eq!(post(house.http, COUNT, &system).await.json(), json!({ "input_tokens": 26 }));
        assert_eq!(post(house.http, COUNT, &with(body, json!({ "tools": [{}] }))).await.status, 400);
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn anthropics_errors() {
    run(async {
        let mut config = config();
        config.keys = ApiKeys::parse("alice:k1").unwrap();
        let house = House::open(config).await;
        let check = |reply: &Reply, status: u16, kind: &str, word: &str| {
            let error = reply.json();
            let found = (reply.status, error["type"].as_str(), error["error"]["type"].as_str());
            assert_eq!(found, (status, Some("error"), Some(kind)), "{error}");
            assert!(error["error"]["message"].as_str().unwrap().contains(word), "{error}");
            assert_eq!(error["request_id"], reply.headers["x-request-id"].as_str());
            assert_eq!(reply.headers["request-id"], reply.headers["x-request-id"]);
        };
        check(&post(house.http, MESSAGES, &message(json!({}))).await, 401, "authentication_error", "key");
        check(&post(house.http, COUNT, &message(json!({}))).await, 401, "authentication_error", "key");
        let bare = |key: &str, body: &Value| {
            let text = body.to_string();
            format!(
                "POST {MESSAGES} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-api-key: {key}\r\n\
                 content-length: {}\r\n\r\n{text}",
                text.len()
            )
        };
        assert_eq!(send(house.http, &bare("k1", &message(json!({})))).await.status, 200);
        check(&send(house.http, &bare("k2", &message(json!({})))).await, 401, "authentication_error", "key");
        let post_message = async |extra: Value| post_with_key(house.http, MESSAGES, "k1", &message(extra)).await;
        let invalid = "invalid_request_error";
        let image = json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }]);
        for (extra, word) in [
            (json!({ "max_tokens": null }), "max_tokens"),
            (json!({ "max_tokens": 0 }), "max_tokens"),
            (json!({ "messages": [] }), "messages"),
            (json!({ "messages": image }), "messages[0].content[0].type: `image`"),
            (json!({ "messages": [{ "role": "tool", "content": "a" }] }), "messages[0].role"),
            (json!({ "tools": [{ "name": "a" }] }), "tools[0].input_schema"),
            (json!({ "tool_choice": { "type": "any" } }), "tool_choice"),
            (json!({ "thinking": { "type": "enabled" } }), "thinking.budget_tokens"),
            (json!({ "stop_sequences": [""] }), "stop_sequences"),
            (json!({ "system": 5 }), "system"),
        ] {
            check(&post_message(extra).await, 400, invalid, word);
        }
        check(&post_message(json!({ "model": "other" })).await, 404, "not_found_error", "other");
        let thread = post_message(json!({ "thread": { "type": "continue", "previous_message_id": "msg_1" } })).await;
        check(&thread, 400, invalid, "thread");
        assert_eq!(thread.json()["error"]["details"]["error_code"], "thread_unsupported_request");
        let long = json!({ "messages": [{ "role": "user", "content": "x".repeat(500) }] });
        check(&post_message(long).await, 400, invalid, "tokens");
        house.fake.script(|script| script.refuse = Some((wire::refused::Reason::Full, 3000)));
        let full = post_message(json!({})).await;
        check(&full, 429, "rate_limit_error", "later");
        assert_eq!(full.headers["retry-after"], "3");
        house.close().await;
    });
}

#[test]
fn a_whole_response() {
    run(async {
        let house = House::open(config()).await;
        let reuse = PrefixReuse { ended: Some(ReuseEnd::Whole), position: 4, fetched: 0 };
        house.fake.script(|script| (script.n_cached, script.reuse) = (4, reuse));
        let input = json!([{ "role": "developer", "content": "Be" },
            { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "Hi" }] }]);
        let extra = json!({ "input": input, "instructions": "Now", "temperature": 0.5, "metadata": { "a": "b" },
            "store": true, "text": { "format": { "type": "text" } }, "tools": [] });
        let answer = post(house.http, RESPONSES, &response(extra)).await.json();
        assert!(answer["id"].as_str().unwrap().starts_with("resp_"));
        assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
        let item = &answer["output"][0];
        assert_eq!(
            (&item["type"], &item["role"], &item["status"]),
            (&json!("message"), &json!("assistant"), &json!("completed"))
        );
        let part = json!({ "type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": [] });
        assert_eq!(item["content"], json!([part]));
        let of_prompt = json!({ "cached_tokens": 4, "reuse_ended": { "reason": "whole", "position": 4 } });
        let usage = json!({ "input_tokens": 33, "input_tokens_details": of_prompt, "output_tokens": 13,
            "output_tokens_details": { "reasoning_tokens": 0 }, "total_tokens": 46 });
        assert_eq!(answer["usage"], usage);
        let expected_fields = json!({ "instructions": "Now", "temperature": 0.5, "top_p": 1.0, "metadata": { "a": "b" },
            "store": true, "previous_response_id": null, "error": null, "incomplete_details": null });
        expected_fields
            .as_object()
            .unwrap()
            .iter()
            .for_each(|(name, value)| assert_eq!(&answer[name], value, "{name}"));
        assert_eq!(prompt(&house), "|system:Now||system:Be||user:Hi||");
        let cut = post(house.http, RESPONSES, &response(json!({ "max_output_tokens": 5 }))).await.json();
        assert_eq!((&cut["status"], &cut["output"][0]["content"][0]["text"]), (&json!("incomplete"), &json!("Hello")));
        assert_eq!(cut["incomplete_details"], json!({ "reason": "max_output_tokens" }));
        house.close().await;
    });
}

#[test]
fn a_response_in_events() {
    run(async {
        let house = House::open(config()).await;
        let reply = post(house.http, RESPONSES, &response(json!({ "stream": true }))).await;
        let events = events(&reply);
        let expected =
            ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"];
        assert_eq!(types(&events[..4]), expected);
        assert!(events[4..16].iter().all(|event| event["type"] == "response.output_text.delta"));
        let expected = [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ];
        assert_eq!(types(&events[16..]), expected);
        assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
        let text: String = events[4..16].iter().map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!((text.as_str(), events[16]["text"].as_str()), ("Hello, world", Some("Hello, world")));
        let done = &events[19]["response"];
        assert_eq!((&done["id"], &done["output"][0]), (&events[0]["response"]["id"], &events[18]["item"]));
        assert_eq!((&done["status"], &done["usage"]["output_tokens"]), (&json!("completed"), &json!(13)));
        house.close().await;
    });
}

#[test]
fn unserved_fields_of_a_response_are_refused_by_name() {
    run(async {
        let house = House::open(config()).await;
        for (extra, param) in [
            (json!({ "conversation": [] }), "conversation"),
            (json!({ "background": 1 }), "background"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "text": { "format": { "type": "json_schema" } } }), "text.format.schema"),
            (json!({ "truncation": "middle" }), "truncation"),
            (json!({ "include": ["message.thoughts"] }), "include[0]"),
            (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
            (json!({ "input": null }), "input"),
            (json!({ "input": [{ "type": "function_call_output" }] }), "input[0].call_id"),
            (
                json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }),
                "input[0].content[0].type",
            ),
            (json!({ "input": [{ "role": "tool", "content": "x" }] }), "input[0].role"),
        ] {
            let reply = post(house.http, RESPONSES, &response(extra)).await;
            assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{}", reply.body);
        }
        assert_eq!(get(house.http, "/v1/responses/resp_1").await.status, 404);
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn a_failure_in_the_middle_is_the_last_event() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.last = wire::Finish::Failed);
        let last = async |path: &str, body: Value| {
            let reply = post(house.http, path, &body).await;
            events(&reply).pop().unwrap()
        };
        let error = last(MESSAGES, message(json!({ "stream": true }))).await;
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("api_error")));
        let failed = last(RESPONSES, response(json!({ "stream": true }))).await;
        assert_eq!((&failed["type"], &failed["response"]["status"]), (&json!("response.failed"), &json!("failed")));
        assert!(failed["response"]["error"]["message"].as_str().unwrap().contains("gave up the request"));
        house.close().await;
    });
}

#[test]
fn a_client_that_leaves_has_cancelled() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let sign = "\"l\"";
        drop(post_until(house.http, MESSAGES, &message(json!({ "stream": true })), sign).await);
        drop(post_until(house.http, RESPONSES, &response(json!({ "stream": true })), sign).await);
        eventually(|| async { house.fake.cancels().len() == 2 }).await;
        house.close().await;
    });
}

fn id_of(event: &str) -> Option<&str> {
    event.lines().find_map(|line| line.strip_prefix("id: "))
}

/// An event without the second in which its response ended.
fn timeless(event: &str) -> Value {
    let mut event: Value = serde_json::from_str(event).unwrap();
    if let Some(response) = event.get_mut("response") {
        response["completed_at"] = Value::Null;
    }
    event
}

/// Compares whole events in order: a token's event is the same wherever the stream is resumed.
#[test]
fn a_stream_that_breaks_off_anywhere_resumes_with_the_same_rest() {
    run_within(Duration::from_secs(120), async {
        let first = House::open(config()).await;
        let second = House::of(config(), vec![first.fake.clone()]).await;
        second.wait_until_ready().await;
        for (path, body) in [
            (MESSAGES, message(json!({ "stream": true }))),
            (MESSAGES, message(json!({ "stream": true, "stop_sequences": ["wor"] }))),
            (RESPONSES, response(json!({ "stream": true }))),
            (RESPONSES, response(json!({ "stream": true, "max_output_tokens": 4 }))),
        ] {
            let whole = post(first.http, path, &body).await;
            let all = whole.events();
            let ids: Vec<Option<&str>> = whole.body.split_terminator("\n\n").map(id_of).collect();
            assert_eq!(ids.len(), all.len());
            assert!(ids.iter().flatten().count() > 4, "{}", whole.body);
            for (i, id) in ids.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?))) {
                let rest = post_after(second.http, path, id, &body).await;
                assert_eq!(rest.status, 200, "{}", rest.body);
                let ping = r#"{"type":"ping"}"#;
                let expected: Vec<&String> = all[i + 1..].iter().filter(|event| *event != ping).collect();
                let same =
                    rest.events().iter().map(|event| timeless(event)).eq(expected.iter().map(|event| timeless(event)));
                assert!(same, "{path} behind event {i}: {}", rest.body);
            }
        }
        first.close().await;
        second.close().await;
    });
}
