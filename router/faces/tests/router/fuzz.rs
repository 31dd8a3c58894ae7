//! Invalid bodies: each gets an answer or a typed error, and a neighbour's stream goes on.

#[allow(dead_code, reason = "each crate that has fuzz targets uses a part of it")]
#[path = "../../../../tests/fuzz/harness.rs"]
mod harness;

use crate::client::{post_text, post_until, read_until};
use crate::{House, config, kserve, run, run_within};
use harness::{Rounds, mutate, scramble};
use serde_json::{Value, json};
use std::time::Duration;
use tonic::Code;

const PAGES: [&str; 20] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/v1/messages",
    "/v1/responses",
    "/completion",
    "/inference/v1/generate",
    "/api/chat",
    "/api/generate",
    "/detokenize",
    "/api/embed",
    "/infill",
    "/apply-template",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/batch",
    "/v1/responses/input_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/invocations",
];
const ROUNDS: u64 = 1200;
/// Far above the time that a target may be configured to run.
const HANGS_AFTER: Duration = Duration::from_secs(3600);

/// Valid bodies, with every field that there is.
fn right() -> Vec<Value> {
    vec![
        json!({ "model": "toy", "messages": [{ "role": "system", "content": "Be." }, { "role": "user", "content": [{
            "type": "text", "text": "Hi" }] }], "logprobs": true, "top_logprobs": 2, "n": 2, "seed": 1, "tools": [],
            "stream": true, "stream_options": { "include_usage": true }, "stop": ["a", "b"], "max_tokens": 4 }),
        json!({ "prompt": ["Hi", "you"], "echo": true, "logprobs": 1, "max_tokens": 3, "temperature": 0.5, "top_k": 5,
            "logit_bias": { "65": 1.5 }, "bad_words": ["x"], "allowed_token_ids": [1, 2], "presence_penalty": 0.5,
            "dry_multiplier": 0.5, "dry_sequence_breakers": ["\n"], "xtc_probability": 0.5, "typical_p": 0.5,
            "min_p": 0.1, "top_p": 0.9, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [7] }),
        json!({ "input": [[1, 2], [3]], "encoding_format": "base64", "model": "toy" }),
        json!({ "prompt": "Hi", "add_special_tokens": true, "return_token_strs": true, "tokens": [1, 2] }),
        json!({ "model": "toy", "max_tokens": 4, "system": [{ "type": "text", "text": "Be." }], "messages": [
            { "role": "user", "content": "Hi" }, { "role": "assistant", "content": [{ "type": "text", "text": "a" }] },
            { "role": "user", "content": [{ "type": "text", "text": "b" }] }], "stop_sequences": ["x"], "top_k": 5,
            "stream": true, "thinking": { "type": "disabled" }, "tool_choice": { "type": "auto" }, "tools": [] }),
        json!({ "model": "toy", "max_output_tokens": 4, "instructions": "Be.", "input": [{ "role": "user",
            "content": [{ "type": "input_text", "text": "Hi" }], "type": "message" }], "store": false, "top_p": 0.5,
            "text": { "format": { "type": "text" }, "verbosity": "medium" }, "reasoning": { "effort": null },
            "metadata": {}, "truncation": "disabled", "include": [], "stream": true,
            "stream_options": { "include_obfuscation": true } }),
        json!({ "prompt": ["Hi", [1, 2]], "n_predict": 4, "n_probs": 1, "return_tokens": true, "cache_prompt": true,
            "logit_bias": [[65, 1.5], [66, false]], "samplers": [], "repeat_last_n": -1, "repeat_penalty": 1.1,
            "input_prefix": "a", "input_suffix": "b", "input_extra": [{ "filename": "f", "text": "c" }],
            "stop": ["x"], "stream": true, "seed": -1 }),
        json!({ "token_ids": [72, 105], "sampling_params": { "n": 2, "max_tokens": 4, "logprobs": 1, "top_k": 5,
            "stop": ["x"], "logit_bias": { "65": 1 } }, "request_id": "r", "stream": true, "priority": 0 }),
        json!({ "model": "toy:latest", "messages": [{ "role": "user", "content": "Hi", "images": [] }],
            "logprobs": true,
            "options": { "temperature": 0.5, "num_predict": 4, "num_ctx": 64, "repeat_last_n": 0, "stop": ["x"],
                "seed": 1, "mirostat": 0 }, "keep_alive": "5m", "think": false, "format": "", "tools": [] }),
        json!({ "model": "toy", "prompt": "Hi", "system": "Be.", "context": [72, 105], "raw": false, "suffix": "",
            "input": ["a", "b"], "truncate": true, "options": { "num_predict": 4 }, "stream": false }),
    ]
}

#[test]
fn mutated_bodies() {
    run_within(HANGS_AFTER, async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let neighbour = json!({ "prompt": "neighbour", "stream": true });
        let mut stream = post_until(house.http, PAGES[1], &neighbour, "\"l\"").await;
        house.fake.script(|script| script.hold_at = usize::MAX);
        let right = right();
        let mut rounds = Rounds::of("request JSON", ROUNDS);
        let mut n_taken = 0;
        while let Some(mut random) = rounds.next() {
            let kind = random.below(right.len());
            let mut body = right[kind].clone();
            (0..random.below(4)).for_each(|_| mutate(&mut body, &mut random));
            let mut text = body.to_string();
            if random.one_in(5) {
                text = scramble(&text, &mut random);
            }
            let page = PAGES[if random.one_in(4) { random.below(PAGES.len()) } else { kind }];
            let reply = post_text(house.http, page, &text).await;
            n_taken += u64::from(reply.status == 200);
            assert!([200, 400, 404].contains(&reply.status), "{page} {text}: {reply:?}");
            if reply.status != 200 {
                // Ollama's error is the message itself.
                let error = &reply.json()["error"];
                let error_text = error.as_str().or(error["message"].as_str());
                assert!(error_text.is_some_and(|message| !message.is_empty()), "{text}");
            }
        }
        let n = rounds.n();
        assert!(!rounds.are_many() || (n / 20..n).contains(&n_taken), "{n_taken} of {n} were taken");
        // The neighbour's replica continues in another incarnation.
        house.fake.die();
        house.fake.welcome();
        assert!(read_until(&mut stream, "[DONE]").await.contains("\"finish_reason\":\"stop\""));
        house.close().await;
    });
}

#[test]
fn mutated_sampling_parameters() {
    run_within(HANGS_AFTER, async {
        let house = House::open(config()).await;
        let right = right();
        let mut rounds = Rounds::of("sampling parameters", ROUNDS / 4);
        let mut n_taken = 0;
        while let Some(mut random) = rounds.next() {
            // The fields of `/v1/completions`, except those without a place in a tensor answer.
            let mut body = right[1].clone();
            ["prompt", "echo", "logprobs"].iter().for_each(|name| drop(body.as_object_mut().unwrap().remove(*name)));
            (0..random.below(4)).for_each(|_| mutate(&mut body, &mut random));
            let mut sampling = body.to_string();
            if random.one_in(5) {
                sampling = scramble(&sampling, &mut random);
            }
            let inputs = vec![kserve::text("text_input", "Hi"), kserve::text("sampling_parameters", &sampling)];
            match kserve::client(&house).model_infer(kserve::infer_request(inputs)).await {
                Ok(_) => n_taken += 1,
                Err(refused) => {
                    assert_eq!(refused.code(), Code::InvalidArgument, "{sampling}: {refused:?}");
                    assert!(!refused.message().is_empty(), "{sampling}");
                }
            }
        }
        let n = rounds.n();
        assert!(!rounds.are_many() || (n / 20..n).contains(&n_taken), "{n_taken} of {n} were taken");
        house.close().await;
    });
}

#[test]
fn bodies_of_great_size() {
    run(async {
        let mut config = config();
        config.limits.body_bytes_max = 4 << 20;
        let house = House::open(config).await;
        let status = async |body: Value| {
            let reply = post_text(house.http, PAGES[1], &body.to_string()).await;
            assert!(reply.json()["error"]["message"].is_string());
            reply.status
        };
        assert_eq!(status(json!({ "prompt": "x".repeat(10 << 20) })).await, 413);
        assert_eq!(status(json!({ "prompt": "word ".repeat(400_000) })).await, 400);
        let stops: Vec<String> = (0..10_000).map(|i| format!("stop {i}")).collect();
        assert_eq!(status(json!({ "prompt": "x", "stop": stops })).await, 400);
        assert_eq!(status(json!({ "prompt": "x", "bad_words": stops })).await, 400);
        assert_eq!(status(json!({ "prompt": vec![1; 500_000] })).await, 400);
        assert_eq!(status(json!({ "prompt": vec![vec![1]; 100_000] })).await, 400);
        for nan in ["NaN", "Infinity", "1e999", "nan"] {
            let reply =
                post_text(house.http, PAGES[1], &format!("{{\"prompt\": \"x\", \"temperature\": {nan}}}")).await;
            assert_eq!(reply.status, 400, "{nan}");
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}
