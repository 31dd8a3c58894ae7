//! Fields of an answer that vLLM's clients read besides its text: where tokens stand, how long it took, how much work
//! waits; and request fields in vLLM's words.

use crate::client::{get, post, send};
use crate::model::{CONTEXT, END, START};
use crate::{House, config, eventually, run};
use proto::cluster::Passage;
use proto::cluster::passage::Kind;
use serde_json::{Value, json};
use std::net::SocketAddr;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const GENERATE: &str = "/inference/v1/generate";

fn hi() -> Value {
    json!([{ "role": "user", "content": "Hi" }])
}

#[test]
fn rendered_prompt_has_token_offsets() {
    run(async {
        let house = House::open(config()).await;
        let rendered = async |page: &str, body: Value| post(house.http, &format!("{page}/render"), &body).await.json();
        let request = json!({ "prompt": ["aïb", "cd"], "return_token_offsets": true });
        let both = rendered(COMPLETIONS, request).await;
        // A character of two tokens is where both stand.
        assert_eq!(both[0]["token_offsets"], json!([[0, 1], [1, 2], [1, 2], [2, 3]]));
        assert_eq!(both[1]["token_offsets"], json!([[0, 1], [1, 2]]));
        for (side, ids, places) in
            [("left", json!([99, 100]), json!([[2, 3], [3, 4]])), ("right", json!([97, 98]), json!([[0, 1], [1, 2]]))]
        {
            let body = json!({ "prompt": "abcd", "return_token_offsets": true, "truncate_prompt_tokens": 2,
                "truncation_side": side });
            let cut = rendered(COMPLETIONS, body).await;
            assert_eq!((&cut[0]["token_ids"], &cut[0]["token_offsets"]), (&ids, &places), "{side}");
        }
        let chat = rendered(CHAT, json!({ "messages": hi(), "return_token_offsets": true })).await;
        let (ids, places) = (chat["token_ids"].as_array().unwrap(), chat["token_offsets"].as_array().unwrap());
        assert_eq!(ids.len(), places.len());
        let offset_of = |token: u32| places[ids.iter().position(|id| *id == token).unwrap()].clone();
        let start = "<|im_start|>".len();
        assert_eq!((offset_of(START), offset_of(u32::from(b'u'))), (json!([0, start]), json!([start, start + 1])));
        assert_eq!(offset_of(END), json!([start + "user:Hi".len(), start + "user:Hi<|im_end|>".len()]));
        // Token ids that were sent stand in no text. Without the field, the reply has no offsets.
        let sent = rendered(COMPLETIONS, json!({ "prompt": [97], "return_token_offsets": true })).await;
        let plain = rendered(CHAT, json!({ "messages": hi() })).await;
        assert_eq!((&sent[0]["token_offsets"], &plain["token_offsets"]), (&Value::Null, &Value::Null));
        house.close().await;
    });
}

#[test]
fn answer_has_timings_if_operator_enables_them() {
    const TIMES: [&str; 4] = ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "tokens_per_second"];
    run(async {
        let plain = House::open(config()).await;
        assert!(post(plain.http, CHAT, &json!({ "messages": hi() })).await.json().get("metrics").is_none());
        plain.close().await;
        let house = House::open(router::Config { request_metrics: true, ..config() }).await;
        let started = Passage { kind: Kind::Started.into(), micros_ago: 0, start: 0, end: 0 };
        house.fake.script(|script| script.passages = vec![started]);
        let fetch_metrics = async |body: Value| post(house.http, CHAT, &body).await.json()["metrics"].take();
        let metrics = fetch_metrics(json!({ "messages": hi(), "max_tokens": 4 })).await;
        let number = |name: &str| metrics[name].as_f64().unwrap_or_else(|| panic!("{name}: {metrics}"));
        assert!(TIMES.into_iter().all(|name| number(name) >= 0.0));
        assert!((number("mean_itl_ms") * 3.0 - number("generation_time_ms")).abs() < 1e-6, "{metrics}");
        assert!(number("queue_time_ms") > 0.0, "it waited until its ranks began: {metrics}");
        assert!(fetch_metrics(json!({ "messages": hi(), "max_tokens": 1 })).await.get("mean_itl_ms").is_none());
        assert_eq!(fetch_metrics(json!({ "messages": hi(), "n": 2 })).await, Value::Null);
        let body = json!({ "messages": hi(), "max_tokens": 2, "stream": true,
            "stream_options": { "include_usage": true } });
        let mut chunks = post(house.http, CHAT, &body).await.chunks();
        let last = chunks.pop().unwrap();
        assert!(last["metrics"]["time_to_first_token_ms"].is_number() && last["usage"].is_object(), "{last}");
        assert!(chunks.iter().all(|chunk| chunk.get("metrics").is_none()), "{chunks:?}");
        house.close().await;
    });
}

#[test]
fn load_is_reported_in_the_requested_format() {
    run(async {
        let house = House::open(config()).await;
        let fetch_load = async |http: SocketAddr, form: &str| {
            let body = json!({ "prompt": "Hi" }).to_string();
            let head = format!("host: localhost\r\nconnection: close\r\nendpoint-load-metrics-format: {form}");
            let kind = format!("content-type: application/json\r\ncontent-length: {}", body.len());
            let reply = send(http, &format!("POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n{kind}\r\n\r\n{body}")).await;
            assert_eq!(reply.status, 200);
            reply.headers.get("endpoint-load-metrics").cloned()
        };
        let numbers = "named_metrics.kv_cache_usage_perc=0, named_metrics.num_requests_waiting=0";
        assert_eq!(fetch_load(house.http, "TEXT").await.unwrap(), format!("TEXT {numbers}"));
        let in_json = fetch_load(house.http, "json").await.unwrap();
        let report: Value = serde_json::from_str(in_json.strip_prefix("JSON ").unwrap()).unwrap();
        let named = json!({ "kv_cache_usage_perc": 0.0, "num_requests_waiting": 0 });
        assert_eq!(report, json!({ "named_metrics": named }));
        assert_eq!(fetch_load(house.http, "BIN").await, None);
        // What waits is counted, by this router.
        house.fake.script(|script| script.hold_at = 0);
        let body = json!({ "prompt": "Hi", "stream": true });
        let stream = crate::client::post_and_leave_open(house.http, COMPLETIONS, &body).await;
        let head = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
        let request = format!("{head}endpoint-load-metrics-format: TEXT\r\n\r\n");
        eventually(|| async {
            send(house.http, &request).await.headers["endpoint-load-metrics"].ends_with("num_requests_waiting=1")
        })
        .await;
        drop(stream);
        assert!(!get(house.http, "/v1/models").await.headers.contains_key("endpoint-load-metrics"));
        house.close().await;
    });
}

#[test]
fn echo_begins_with_the_assistants_text() {
    run(async {
        let house = House::open(config()).await;
        let begun = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "So: " }]);
        let mut body = json!({ "messages": begun, "echo": true, "continue_final_message": true,
            "add_generation_prompt": false, "max_tokens": 2 });
        let fetch_message =
            async |body: &Value| post(house.http, CHAT, body).await.json()["choices"][0]["message"].take();
        assert_eq!(fetch_message(&body).await["content"], "So: He");
        body["stream"] = true.into();
        let chunks = post(house.http, CHAT, &body).await.chunks();
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!((&*text, &chunks[0]["choices"][0]["delta"]["role"]), ("So: He", &json!("assistant")));
        (body["stream"], body["echo"]) = (false.into(), false.into());
        assert_eq!(fetch_message(&body).await["content"], "He");
        // The echo contains only the assistant's own words, not those of the user.
        assert_eq!(fetch_message(&json!({ "messages": hi(), "echo": true, "max_tokens": 2 })).await["content"], "He");
        let several = json!({ "messages": [hi(), begun], "echo": true, "max_tokens": 2, "n": 2 });
        let answer = post(house.http, "/v1/chat/completions/batch", &several).await.json();
        let texts: Vec<_> =
            answer["choices"].as_array().unwrap().iter().map(|choice| &choice["message"]["content"]).collect();
        assert_eq!(texts, ["He", "He", "So: He", "So: He"]);
        house.close().await;
    });
}

#[test]
fn what_an_answer_has_no_room_for_is_refused() {
    run(async {
        let house = House::open(config()).await;
        let with = |params: Value| json!({ "token_ids": [72, 105], "sampling_params": params });
        let room = CONTEXT - 2;
        for (params, refused_field) in [
            (json!({ "max_tokens": null, "min_tokens": 2_147_483_648_u32 }), Some("min_tokens")),
            (json!({ "min_tokens": room + 1 }), Some("min_tokens")),
            (json!({ "min_tokens": room }), None),
            (json!({ "stop": ["wor"], "detokenize": false }), Some("stop")),
            (json!({ "stop": ["wor"], "detokenize": true }), None),
            (json!({ "stop": null, "detokenize": false }), None),
        ] {
            let reply = post(house.http, GENERATE, &with(params.clone())).await;
            let message = refused_field.map(|name| reply.json()["error"]["message"].as_str().unwrap().contains(name));
            assert_eq!(
                (reply.status == 400, message),
                (refused_field.is_some(), refused_field.map(|_| true)),
                "{params}: {reply:?}"
            );
        }
        house.close().await;
    });
}

#[test]
fn what_was_measured_of_an_answer_is_passed_on_whole() {
    run(async {
        let house = House::open(config()).await;
        let drafts = json!({ "mean_acceptance_length": 2.0 });
        let metrics = json!({ "queue_time_ms": 3.0, "speculative_decoding": drafts });
        let derender_metrics = async |metrics: &Value| {
            let generated = json!({ "choices": [{ "token_ids": [72] }], "metrics": metrics });
            let body = json!({ "generate_response": generated, "chat_request": { "messages": hi() } });
            post(house.http, "/v1/chat/completions/derender", &body).await.json()["metrics"].take()
        };
        let drafts = json!({ "mean_acceptance_length": 2.0, "per_step_accepted": null, "per_step_drafted": null });
        let whole = json!({ "time_to_first_token_ms": null, "generation_time_ms": null, "queue_time_ms": 3.0,
            "mean_itl_ms": null, "tokens_per_second": null, "speculative_decoding": drafts });
        assert_eq!(derender_metrics(&metrics).await, whole);
        assert_eq!(derender_metrics(&Value::Null).await, Value::Null);
        house.close().await;
    });
}
