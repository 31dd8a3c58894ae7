//! vLLM's pages beside OpenAI's.

use crate::client::{get, post, post_until};
use crate::{House, config, eventually, run};
use serde_json::{Value, json};

const GENERATE: &str = "/inference/v1/generate";

#[test]
fn tokens_are_answered_in_tokens() {
    run(async {
        let house = House::open(config()).await;
        let params = json!({ "max_tokens": 3, "temperature": 0.5, "logprobs": 1, "n": 2, "seed": 5 });
        let body = json!({ "token_ids": [72, 105], "sampling_params": params, "request_id": "mine" });
        let answer = post(house.http, GENERATE, &body).await.json();
        assert_eq!((&answer["request_id"], &answer["kv_transfer_params"]), (&json!("mine"), &Value::Null));
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2);
        for (i, choice) in choices.iter().enumerate() {
            assert_eq!((&choice["index"], &choice["token_ids"]), (&json!(i), &json!([72, 101, 108])));
            assert_eq!(choice["finish_reason"], "length");
            let entries = choice["logprobs"]["content"].as_array().unwrap();
            assert_eq!((entries.len(), &entries[0]["token"]), (3, &json!("H")));
        }
        let counts = ["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| &answer["usage"][name]);
        assert_eq!(counts, [&json!(2), &json!(6), &json!(8)]);
        assert_eq!(house.fake.submits()[0].prompt, [72, 105]);
        house.close().await;
    });
}

#[test]
fn tokens_are_answered_as_they_come() {
    run(async {
        let house = House::open(config()).await;
        let body =
            json!({ "token_ids": [72], "sampling_params": { "stop": ["wor"], "max_tokens": 50 }, "stream": true });
        let chunks = post(house.http, GENERATE, &body).await.chunks();
        let ids: Vec<_> =
            chunks.iter().flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().unwrap()).collect();
        assert_eq!(ids, b"Hello, wor");
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
        let names: std::collections::BTreeSet<_> = chunks.iter().map(|chunk| chunk["request_id"].to_string()).collect();
        assert_eq!(names.len(), 1);
        house.close().await;
    });
}

/// A rendered request is the same as the request to the page itself.
#[test]
fn a_rendered_request_is_the_same_request() {
    run(async {
        let house = House::open(config()).await;
        let messages = json!([{ "role": "user", "content": "Hi" }]);
        let sampling = json!({ "temperature": 0.5, "seed": 7, "max_tokens": 5, "stop": ["x"], "min_p": 0.1,
            "logit_bias": { "65": 1.5 }, "presence_penalty": 0.5 });
        let with = |mut body: Value| {
            sampling.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
            body
        };
        for (page, body, is_list) in [
            ("/v1/chat/completions", with(json!({ "messages": messages })), false),
            ("/v1/completions", with(json!({ "prompt": "Hi" })), true),
            ("/v1/completions", json!({ "prompt": "Hi", "seed": 7 }), true),
        ] {
            let rendered = post(house.http, &format!("{page}/render"), &body).await.json();
            let rendered = if is_list { &rendered[0] } else { &rendered };
            assert_eq!(post(house.http, page, &body).await.status, 200);
            assert_eq!(post(house.http, GENERATE, rendered).await.status, 200, "{rendered}");
            let [direct, through]: [proto::cluster::Request; 2] = house.fake.submits().try_into().unwrap();
            let alike = |request: proto::cluster::Request| (request.prompt, request.sampling, request.goal);
            assert_eq!(alike(direct), alike(through), "{body}");
            house.fake.forget();
        }
        let both = post(house.http, "/v1/completions/render", &json!({ "prompt": ["a", "bc"] })).await.json();
        let lengths: Vec<_> =
            both.as_array().unwrap().iter().map(|one| one["token_ids"].as_array().unwrap().len()).collect();
        assert_eq!(lengths, [1, 2]);
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn wrong_requests_for_tokens_are_refused_by_name() {
    run(async {
        let house = House::open(config()).await;
        let params = json!({ "max_tokens": 3 });
        for (body, word) in [
            (json!({ "sampling_params": params }), "token_ids"),
            (json!({ "token_ids": [72] }), "sampling_params"),
            (json!({ "token_ids": [], "sampling_params": params }), "token_ids"),
            (json!({ "token_ids": [9999], "sampling_params": params }), "token_ids"),
            (json!({ "token_ids": "Hi", "sampling_params": params }), "token_ids"),
            (json!({ "token_ids": [72], "sampling_params": params, "features": "a" }), "features"),
            (json!({ "token_ids": [72], "sampling_params": { "prompt_logprobs": 1 } }), "prompt_logprobs"),
            (json!({ "token_ids": [72], "sampling_params": params, "kv_transfer_params": { "a": 1 } }), "kv_transfer"),
        ] {
            let reply = post(house.http, GENERATE, &body).await;
            assert!(reply.status == 400 && reply.body.contains(word), "{body}: {reply:?}");
        }
        let chat = json!([{ "role": "user", "content": "Hi" }]);
        for body in [json!({}), json!({ "messages": chat, "response_format": { "type": "xml" } })] {
            assert_eq!(post(house.http, "/v1/chat/completions/render", &body).await.status, 400, "{body}");
        }
        assert_eq!(
            post(house.http, "/v1/completions/render", &json!({ "model": "other", "prompt": "a" })).await.status,
            404
        );
        house.close().await;
    });
}

#[test]
fn server_reports_its_release_and_load() {
    run(async {
        let house = House::open(config()).await;
        assert_eq!(get(house.http, "/version").await.json(), json!({ "version": env!("CARGO_PKG_VERSION") }));
        assert_eq!(get(house.http, "/load").await.json(), json!({ "server_load": 0 }));
        house.fake.script(|script| script.hold_at = 3);
        let body = json!({ "prompt": "Hi", "stream": true });
        let stream = post_until(house.http, "/v1/completions", &body, "\"l\"").await;
        assert_eq!(get(house.http, "/load").await.json(), json!({ "server_load": 1 }));
        drop(stream);
        eventually(|| async { get(house.http, "/load").await.json() == json!({ "server_load": 0 }) }).await;
        assert_eq!(
            (get(house.http, "/ping").await.status, post(house.http, "/ping", &json!({})).await.status),
            (200, 200)
        );
        house.close().await;
    });
}

/// An answer that was generated from a rendered request has the text that the page itself would have sent.
#[test]
fn derendered_tokens_match_the_page_itself() {
    run(async {
        let house = House::open(config()).await;
        let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "logprobs": true, "seed": 1 });
        let mut whole = post(house.http, "/v1/chat/completions", &chat).await.json();
        whole["choices"][0]["message"]["reasoning"] = Value::Null;
        let rendered = post(house.http, "/v1/chat/completions/render", &chat).await.json();
        let generated = post(house.http, GENERATE, &rendered).await.json();
        let body = json!({ "generate_response": generated, "chat_request": chat, "prompt_tokens": 10 });
        let derendered = post(house.http, "/v1/chat/completions/derender", &body).await.json();
        assert_eq!(derendered["choices"][0]["message"], whole["choices"][0]["message"]);
        assert_eq!(derendered["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
        assert_eq!((&derendered["object"], &derendered["model"]), (&whole["object"], &whole["model"]));
        assert_eq!(derendered["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
        // The generate page's logprobs have ids, and this page's have texts.
        let likely =
            json!([{ "token_id": 72, "logprob": -1.0, "top_logprobs": [{ "token_id": 101, "logprob": -2.0 }] }]);
        let choice = json!({ "token_ids": [72], "finish_reason": "stop", "stop_reason": 72,
            "logprobs": { "content": likely } });
        let two = json!([{ "request_id": "a", "choices": [choice] }, { "choices": [choice] }]);
        let body = json!({ "generate_responses": two, "prompt_tokens": [5, 10] });
        let completion = post(house.http, "/v1/completions/derender", &body).await.json();
        assert_eq!((&completion["id"], &completion["usage"]["total_tokens"]), (&json!("a"), &json!(17)));
        let choices = completion["choices"].as_array().unwrap();
        for (i, choice) in choices.iter().enumerate() {
            assert_eq!(
                (&choice["index"], &choice["text"], &choice["stop_reason"]),
                (&json!(i), &json!("H"), &json!(72))
            );
            assert_eq!(choice["logprobs"]["tokens"], json!(["H"]));
            assert_eq!(choice["logprobs"]["top_logprobs"], json!([{ "H": -1.0, "e": -2.0 }]));
        }
        assert_eq!(choices.len(), 2);
        house.close().await;
    });
}

/// A client sends each event of a generated stream, and the state of the reply before it.
#[test]
fn derendered_pieces_match_the_page_itself() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("h\u{e9}llo \u{1f600}");
        let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "seed": 1 });
        let whole = post(house.http, "/v1/chat/completions", &chat).await.json();
        let mut rendered = post(house.http, "/v1/chat/completions/render", &chat).await.json();
        rendered["stream"] = true.into();
        let generated = post(house.http, GENERATE, &rendered).await.body;
        let events = generated.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
        let events: Vec<Value> = events.map(|data| serde_json::from_str(data).unwrap()).collect();
        assert!(events.len() > 5 && events.iter().all(|event| event["choices"][0]["token_ids"] != json!([])));
        for path in ["/v1/chat/completions/derender", "/v1/completions/derender"] {
            let (mut state, mut text) = (Value::Null, String::new());
            for (i, event) in events.iter().enumerate() {
                let body = json!({ "stream": true, "generate_chunk": event, "stream_state": state });
                let mut reply = post(house.http, path, &body).await.json();
                state = reply["stream_state"].take();
                let choice = &reply["chunk"]["choices"][0];
                if path.contains("chat") {
                    assert_eq!(choice["delta"].get("role").is_some(), i == 0, "{reply}");
                }
                let piece = if path.contains("chat") { &choice["delta"]["content"] } else { &choice["text"] };
                text.push_str(piece.as_str().unwrap());
                assert_eq!(choice["finish_reason"], event["choices"][0]["finish_reason"]);
            }
            assert_eq!(whole["choices"][0]["message"]["content"], text);
            let usage = json!({ "prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13 });
            let body = json!({ "stream": true, "generate_chunk": { "choices": [], "usage": usage },
                "stream_state": state });
            let last = post(house.http, path, &body).await.json();
            assert_eq!((&last["chunk"]["choices"], &last["chunk"]["usage"]), (&json!([]), &usage));
        }
        house.close().await;
    });
}

/// The last text of a completion comes with its finish reason; that of a chat only if each chunk counts its tokens.
#[test]
fn closing_chunks_have_the_last_text() {
    run(async {
        let house = House::open(config()).await;
        let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "stream": true, "max_tokens": 3 });
        let mut counted = chat.clone();
        counted["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": true });
        let completion = json!({ "prompt": "Hi", "stream": true, "max_tokens": 3 });
        for (path, body, has_text) in [
            ("/v1/completions", completion, true),
            ("/v1/chat/completions", chat, false),
            ("/v1/chat/completions", counted, true),
        ] {
            let reply = post(house.http, path, &body).await.body;
            let data = reply.lines().filter_map(|line| line.strip_prefix("data: "));
            let closing = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
            let closing = closing.map(|chunk| chunk["choices"][0].clone()).find(|one| one["finish_reason"] == "length");
            let closing = closing.unwrap();
            let text = closing["text"].as_str().or(closing["delta"]["content"].as_str()).unwrap_or_default();
            assert_eq!(!text.is_empty(), has_text, "{path}: {reply}");
        }
        house.close().await;
    });
}

#[test]
fn pages_also_answer_below_the_root_path() {
    run(async {
        let mut config = config();
        config.root_path = "/llm".to_owned();
        let house = House::open(config).await;
        for path in ["/v1/models", "/llm/v1/models", "/llm/health"] {
            assert_eq!(get(house.http, path).await.status, 200, "{path}");
        }
        assert_eq!(get(house.http, "/other/v1/models").await.status, 404);
        house.close().await;
    });
}

#[test]
fn invalid_derender_requests_are_refused() {
    run(async {
        let house = House::open(config()).await;
        let of = |choice: Value| json!({ "generate_response": { "choices": [choice] } });
        let of_pieces = |state: Value| json!({ "stream": true, "generate_chunk": {}, "stream_state": state });
        let one = json!({ "token_id": 72, "logprob": -1.0 });
        let likely = |n: usize| {
            let content = json!([{ "token_id": 72, "logprob": -1.0, "top_logprobs": vec![one.clone(); n] }]);
            json!({ "token_ids": [72], "logprobs": { "content": content } })
        };
        for (body, word) in [
            (json!({}), "generate_response"),
            (json!({ "generate_response": { "choices": [] } }), "choices"),
            (of(json!({ "token_ids": [] })), "token_ids"),
            (of(json!({ "token_ids": [9999] })), "token_ids"),
            (of(json!({ "token_ids": [-1] })), "token_ids"),
            (of(json!({ "token_ids": vec![65; 999] })), "max_model_len"),
            (of(likely(99)), "max_logprobs"),
            (json!({ "stream": true }), "generate_chunk"),
            (json!({ "stream": true, "generate_chunk": {}, "stream_state": {} }), "stream_state"),
            (of_pieces(json!({ "created": 1, "token_ids": { "a": [1] } })), "stream_state.token_ids"),
            (of_pieces(json!({ "created": 1, "token_ids": { "0": [9999] } })), "stream_state.token_ids"),
            (of_pieces(json!({ "created": 1, "token_ids": { "0": vec![65; 999] } })), "max_model_len"),
            (json!({ "stream": true, "generate_chunk": {}, "chat_request": { "stop": "a" } }), "stop"),
            (json!({ "generate_response": { "choices": vec![json!({ "token_ids": [65] }); 2000] } }), "choices count"),
        ] {
            let reply = post(house.http, "/v1/chat/completions/derender", &body).await;
            assert!(reply.status == 400 && reply.body.contains(word), "{word}: {reply:?}");
        }
        let one = json!([{ "choices": [{ "token_ids": [72] }] }]);
        for (body, word) in [
            (json!({ "generate_responses": [] }), "generate_responses"),
            (json!({ "generate_responses": one, "prompt_tokens": [5, 10] }), "prompt_tokens"),
            (json!({ "generate_responses": one, "prompt_token_ids": [[1], [2]] }), "prompt_token_ids"),
        ] {
            let reply = post(house.http, "/v1/completions/derender", &body).await;
            assert!(reply.status == 400 && reply.body.contains(word), "{word}: {reply:?}");
        }
        house.close().await;
    });
}
