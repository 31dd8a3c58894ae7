//! Fields of vLLM's and llama.cpp's clients that change little of an answer: each has its documented effect.

use crate::client::{Reply, post};
use crate::model::{CONTEXT, END, VOCAB};
use crate::{House, config, run};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn hi() -> Value {
    json!([{ "role": "user", "content": "Hi" }])
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[track_caller]
fn assert_refused(reply: &Reply, field: &str) {
    assert!(reply.status == 400 && reply.body.contains(field), "{field}: {reply:?}");
}

#[test]
fn tokens_may_be_returned_as_their_ids() {
    run(async {
        let house = House::open(config()).await;
        let with = |mut body: Value| {
            (body["return_tokens_as_token_ids"], body["max_tokens"]) = (true.into(), 2.into());
            body
        };
        let body = with(json!({ "prompt": "Hi", "logprobs": 1 }));
        let logprobs = post(house.http, COMPLETIONS, &body).await.json()["choices"][0]["logprobs"].take();
        assert_eq!(logprobs["tokens"], json!(["token_id:72", "token_id:101"]));
        assert!(logprobs["top_logprobs"][0].as_object().unwrap().contains_key("token_id:72"), "{logprobs}");
        let body = with(json!({ "messages": hi(), "logprobs": true }));
        let content = post(house.http, CHAT, &body).await.json()["choices"][0]["logprobs"]["content"].take();
        assert_eq!((&content[0]["token"], &content[0]["bytes"]), (&json!("token_id:72"), &json!([72])));
        house.close().await;
    });
}

#[test]
fn stop_reason_is_returned() {
    run(async {
        let house = House::open(config()).await;
        for (fields, reason) in [
            (json!({ "stop": ["wor", "x"], "max_tokens": 50 }), json!("wor")),
            (json!({ "max_tokens": 2 }), Value::Null),
            (json!({ "max_tokens": 50 }), Value::Null),
            // A model's own end token is not reported, even if the client lists it.
            (json!({ "max_tokens": 50, "stop_token_ids": [END] }), Value::Null),
            (json!({ "max_tokens": 50, "stop_token_ids": [END], "ignore_eos": true }), json!(END)),
        ] {
            let mut body = fields.clone();
            body["prompt"] = "Hi".into();
            let answer = post(house.http, COMPLETIONS, &body).await.json();
            let choice = answer["choices"][0].as_object().unwrap();
            assert_eq!(choice.get("stop_reason"), Some(&reason), "{fields}");
            body["stream"] = true.into();
            let chunks = post(house.http, COMPLETIONS, &body).await.chunks();
            assert_eq!(chunks.last().unwrap()["choices"][0]["stop_reason"], reason, "{fields}");
        }
        house.close().await;
    });
}

#[test]
fn prompts_are_truncated_as_requested() {
    run(async {
        let house = House::open(config()).await;
        let long = "b".repeat(300);
        let (max, room) = (CONTEXT as usize - 1, CONTEXT - 1);
        for (request, expected) in [
            (json!({ "prompt": "abcd", "truncate_prompt_tokens": 3 }), bytes("bcd")),
            (json!({ "prompt": "abcd", "truncate_prompt_tokens": 3, "truncation_side": "right" }), bytes("abc")),
            (json!({ "prompt": "abcd", "truncate_prompt_tokens": 9 }), bytes("abcd")),
            (json!({ "prompt": "abcd", "truncate_prompt_tokens": -1 }), bytes("abcd")),
            (json!({ "prompt": long, "truncate_prompt_tokens": -1 }), bytes(&long[..max])),
            (json!({ "prompt": long, "truncate_prompt_tokens": room }), bytes(&long[..max])),
        ] {
            assert_eq!(post(house.http, COMPLETIONS, &request).await.status, 200, "{request}");
            assert_eq!(house.fake.submits()[0].prompt, expected, "{request}");
            house.fake.forget();
        }
        let body = json!({ "prompt": "abcd", "truncate_prompt_tokens": 2, "echo": true, "max_tokens": 1 });
        assert_eq!(post(house.http, COMPLETIONS, &body).await.json()["choices"][0]["text"], "cdH");
        let body = json!({ "messages": hi(), "truncate_prompt_tokens": 4 });
        assert_eq!(post(house.http, CHAT, &body).await.json()["usage"]["prompt_tokens"], 4);
        let body = json!({ "prompt": "abcd", "truncate_prompt_tokens": 2, "n_predict": 1 });
        assert_eq!(post(house.http, "/completion", &body).await.json()["prompt"], "cd");
        for (field, value) in [
            ("truncate_prompt_tokens", json!(0)),
            ("truncate_prompt_tokens", json!(-2)),
            ("truncate_prompt_tokens", json!(CONTEXT)),
            ("truncation_side", json!("middle")),
        ] {
            let body = json!({ "prompt": "abcd", field: value });
            assert_refused(&post(house.http, COMPLETIONS, &body).await, field);
        }
        // Pages that do not cut prompts refuse the field.
        let cut = json!(2);
        for (path, body) in [
            (
                "/inference/v1/generate",
                json!({ "token_ids": [72], "sampling_params": {}, "truncate_prompt_tokens": cut }),
            ),
            ("/api/generate", json!({ "prompt": "abcd", "truncate_prompt_tokens": cut })),
            ("/v1/messages", json!({ "messages": hi(), "max_tokens": 2, "truncate_prompt_tokens": cut })),
        ] {
            assert_refused(&post(house.http, path, &body).await, "truncate_prompt_tokens");
        }
        house.close().await;
    });
}

#[test]
fn what_is_embedded_may_fill_the_context() {
    run(async {
        let house = House::open(config()).await;
        let ids = |n: u32| json!(vec![65; n as usize]);
        let path = "/v1/embeddings";
        assert_eq!(post(house.http, path, &json!({ "input": ids(CONTEXT) })).await.status, 200);
        assert_eq!(house.fake.submits()[0].prompt.len(), CONTEXT as usize);
        assert_refused(&post(house.http, path, &json!({ "input": ids(CONTEXT + 1) })).await, "context");
        house.fake.forget();
        let body = json!({ "input": "abcd", "truncate_prompt_tokens": 2 });
        assert_eq!(post(house.http, path, &body).await.status, 200);
        let body = json!({ "input": ids(CONTEXT + 9), "truncate_prompt_tokens": -1 });
        assert_eq!(post(house.http, path, &body).await.status, 200);
        let prompts: Vec<_> = house.fake.submits().into_iter().map(|submit| submit.prompt).collect();
        assert_eq!(prompts, [bytes("ab"), vec![65; CONTEXT as usize]]);
        house.close().await;
    });
}

#[test]
fn a_suffix_is_filled_up_to() {
    run(async {
        let house = House::coding().await;
        house.fake.welcome();
        house.wait_until_ready().await;
        let body = json!({ "prompt": "ab", "suffix": "c" });
        assert_eq!(post(house.http, COMPLETIONS, &body).await.json()["choices"][0]["text"], "Hello, world");
        let [prefix, suffix, middle] = [0, 1, 2].map(|i| VOCAB + i);
        let expected = [vec![prefix], bytes("ab"), vec![suffix], bytes("c"), vec![middle]].concat();
        assert_eq!(house.fake.submits()[0].prompt, expected);
        assert_refused(&post(house.http, COMPLETIONS, &json!({ "prompt": ["a", "b"], "suffix": "c" })).await, "prompt");
        assert_refused(&post(house.http, "/completion", &json!({ "prompt": "ab", "suffix": "c" })).await, "suffix");
        house.close().await;
        let house = House::open(config()).await;
        assert_refused(&post(house.http, COMPLETIONS, &body).await, "suffix");
        house.close().await;
    });
}

#[test]
fn a_rendered_call_keeps_its_grammar() {
    run(async {
        let house = House::open_unready(config()).await;
        // The toy model gets its tools in a text that is longer than its context.
        house.fake.script(|script| script.context = 4000);
        house.fake.welcome();
        house.wait_until_ready().await;
        let tools = json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }]);
        let body = json!({ "messages": hi(), "tools": tools, "tool_choice": "required", "seed": 1, "max_tokens": 5 });
        let rendered = post(house.http, &format!("{CHAT}/render"), &body).await.json();
        assert!(rendered["sampling_params"]["structured_outputs"]["structural_tag"].is_string(), "{rendered}");
        post(house.http, CHAT, &body).await;
        post(house.http, "/inference/v1/generate", &rendered).await;
        let [direct, through]: [proto::cluster::Request; 2] = house.fake.submits().try_into().unwrap();
        assert!(direct.constraint.is_some());
        assert_eq!((direct.prompt, direct.constraint), (through.prompt, through.constraint));
        house.close().await;
    });
}

#[test]
fn ollama_generate_applies_think() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "prompt": "Hi", "think": "high", "stream": false });
        assert_eq!(post(house.http, "/api/generate", &body).await.status, 200);
        let prompt = house.fake.submits()[0].prompt.clone();
        let tail: Vec<u8> = prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
        assert!(tail.ends_with(b"[high]"), "{prompt:?}");
        assert_eq!(post(house.http, "/api/generate", &json!({ "prompt": "Hi", "think": false })).await.status, 200);
        let raw = json!({ "prompt": "Hi", "think": true, "raw": true });
        assert_refused(&post(house.http, "/api/generate", &raw).await, "think");
        house.close().await;
    });
}
