//! Replies in OpenAI's shapes: whole and in chunks they have the same content.

use crate::client::post;
use crate::{House, config, run};
use serde_json::{Value, json};
use types::{PrefixReuse, ReuseEnd};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(extra: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "seed": 5 });
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The text of one choice, joined from its chunks.
fn text(chunks: &[Value], index: u64) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let ours = choices.filter(|choice| choice["index"] == index);
    ours.map(|choice| choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or("")).collect()
}

#[test]
fn a_whole_chat_answer() {
    run(async {
        let house = House::open(config()).await;
        let reuse = PrefixReuse { ended: Some(ReuseEnd::Differs), position: 4, fetched: 2 };
        house.fake.script(|script| (script.n_cached, script.reuse) = (4, reuse));
        let reply = post(house.http, CHAT, &chat(json!({ "model": "alias" }))).await;
        let mut answer = reply.json();
        assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
        assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
        answer["id"] = Value::Null;
        answer["created"] = Value::Null;
        let expected = json!({
            "id": null, "object": "chat.completion", "created": null, "model": "toy",
            "system_fingerprint": "b_0707070707070707", "seed": 5, "service_tier": "default",
            "choices": [{ "index": 0, "logprobs": null, "finish_reason": "stop", "stop_reason": null,
                "token_ids": null,
                "message": { "role": "assistant", "content": "Hello, world", "refusal": null, "annotations": [] } }],
            "prompt_logprobs": null, "prompt_token_ids": null,
            "usage": { "prompt_tokens": 10, "completion_tokens": 13, "total_tokens": 23,
                "prompt_tokens_details": { "cached_tokens": 4, "audio_tokens": 0,
                    "reuse_ended": { "reason": "differs", "position": 4 }, "cached_tokens_fetched": 2 },
                "completion_tokens_details": { "reasoning_tokens": 0, "audio_tokens": 0,
                    "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0 } },
        });
        assert_eq!(answer, expected);
        let cut = post(house.http, CHAT, &chat(json!({ "max_tokens": 5 }))).await.json();
        assert_eq!(cut["choices"][0]["message"]["content"], "Hello");
        assert_eq!(
            (&cut["choices"][0]["finish_reason"], &cut["usage"]["completion_tokens"]),
            (&json!("length"), &json!(5))
        );
        house.close().await;
    });
}

#[test]
fn a_chat_answer_in_chunks() {
    run(async {
        let house = House::open(config()).await;
        let extra = json!({ "stream": true, "stream_options": { "include_usage": true } });
        let reply = post(house.http, CHAT, &chat(extra)).await;
        assert_eq!(reply.headers["content-type"], "text/event-stream");
        let chunks = reply.chunks();
        assert_eq!(chunks.len(), 1 + 12 + 1 + 1);
        assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": null, "refusal": null }));
        assert_eq!(chunks[1]["choices"][0]["delta"], json!({ "content": "H" }));
        assert_eq!(chunks[13]["choices"][0]["delta"], json!({}));
        assert_eq!(chunks[13]["choices"][0]["finish_reason"], "stop");
        assert_eq!(chunks[14]["choices"], json!([]));
        assert_eq!(chunks[14]["usage"]["total_tokens"], 23);
        for chunk in &chunks[..14] {
            assert_eq!((&chunk["usage"], &chunk["object"]), (&Value::Null, &json!("chat.completion.chunk")));
            assert!(chunk.as_object().unwrap().contains_key("usage"));
            assert_eq!((&chunk["id"], &chunk["seed"]), (&chunks[0]["id"], &json!(5)));
        }
        assert_eq!(text(&chunks, 0), "Hello, world");
        let plain = post(house.http, CHAT, &chat(json!({ "stream": true }))).await.chunks();
        assert!(plain.iter().all(|chunk| !chunk.as_object().unwrap().contains_key("usage")));
        house.close().await;
    });
}

#[test]
fn chunks_have_usage_so_far_on_request() {
    run(async {
        let house = House::open(config()).await;
        let extra = |each: bool, all: bool| {
            json!({ "stream": true, "n": 2, "max_tokens": 3,
                "stream_options": { "include_usage": all, "continuous_usage_stats": each } })
        };
        let chunks = post(house.http, CHAT, &chat(extra(true, true))).await.chunks();
        let completion_counts: Vec<u64> =
            chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(
            completion_counts.is_sorted() && completion_counts[0] == 0 && completion_counts.ends_with(&[6, 6]),
            "{completion_counts:?}"
        );
        for chunk in &chunks {
            let of = |name: &str| chunk["usage"][name].as_u64().unwrap();
            assert_eq!((of("prompt_tokens"), of("total_tokens")), (10, 10 + of("completion_tokens")));
        }
        let silent = post(house.http, CHAT, &chat(extra(true, false))).await.chunks();
        assert!(silent.iter().all(|chunk| chunk["usage"].is_null()));
        house.close().await;
    });
}

#[test]
fn completions_whole_and_in_chunks() {
    run(async {
        let house = House::open(config()).await;
        let whole = post(house.http, COMPLETIONS, &json!({ "prompt": "Hi", "seed": 1 })).await.json();
        assert!(whole["id"].as_str().unwrap().starts_with("cmpl-"));
        assert_eq!(whole["object"], "text_completion");
        let choice = json!({ "index": 0, "text": "Hello, world", "logprobs": null, "finish_reason": "stop",
            "stop_reason": null, "prompt_logprobs": null, "prompt_token_ids": null, "token_ids": null });
        assert_eq!(whole["choices"], json!([choice]));
        let chunks = post(house.http, COMPLETIONS, &json!({ "prompt": "Hi", "stream": true })).await.chunks();
        assert_eq!(text(&chunks, 0), "Hello, world");
        let last = &chunks.last().unwrap()["choices"][0];
        assert_eq!((&last["text"], &last["finish_reason"]), (&json!(""), &json!("stop")));
        house.close().await;
    });
}

#[test]
fn characters_and_stop_strings_are_never_cut() {
    run(async {
        let house = House::open(config()).await;
        let answer = "naïve 😀 end. No more";
        house.fake.answer(answer);
        for tokens_per_frame in [1, 2, 3, 100] {
            house.fake.script(|script| script.tokens_per_frame = tokens_per_frame);
            for (stop, expected) in [
                (json!(null), answer),
                (json!("No"), "naïve 😀 end. "),
                (json!(["more!", " 😀 e", "zz"]), "naïve"),
                (json!(["d. No mort"]), answer),
                (json!(["more", "ï"]), "na"),
            ] {
                let whole = post(house.http, CHAT, &chat(json!({ "stop": stop }))).await.json();
                assert_eq!(whole["choices"][0]["message"]["content"], expected);
                assert_eq!(whole["choices"][0]["finish_reason"], "stop");
                let chunks = post(house.http, CHAT, &chat(json!({ "stop": stop, "stream": true }))).await.chunks();
                assert_eq!(text(&chunks, 0), expected, "{tokens_per_frame} tokens per frame, stop {stop}");
                let finished = chunks.iter().filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null());
                assert_eq!(finished.count(), 1);
            }
        }
        // The answer is cut off inside a character: one replacement character is at the end.
        let cut = post(house.http, CHAT, &chat(json!({ "max_tokens": 3 }))).await.json();
        assert_eq!(cut["choices"][0]["message"]["content"], "na\u{fffd}");
        house.close().await;
    });
}

#[test]
fn stop_strings_wait_for_min_tokens() {
    run(async {
        let house = House::open(config()).await;
        let whole = post(house.http, CHAT, &chat(json!({ "stop": "l", "min_tokens": 4 }))).await.json();
        assert_eq!(whole["choices"][0]["message"]["content"], "Hello, wor");
        assert_eq!(whole["usage"]["completion_tokens"], 11);
        house.close().await;
    });
}

#[test]
fn choices_are_requests_with_one_seed() {
    run(async {
        let house = House::open(config()).await;
        let whole = post(house.http, CHAT, &chat(json!({ "n": 2, "stop": "wor" }))).await.json();
        let choices = whole["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2);
        for (i, choice) in choices.iter().enumerate() {
            assert_eq!((&choice["index"], &choice["message"]["content"]), (&json!(i), &json!("Hello, ")));
        }
        assert_eq!(
            ["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| &whole["usage"][name]),
            [&json!(10), &json!(20), &json!(30)]
        );
        let sampled: Vec<_> = house.fake.submits().into_iter().map(|request| request.sampling.unwrap()).collect();
        assert_eq!(
            sampled.iter().map(|sampling| (sampling.seed, sampling.choice)).collect::<Vec<_>>(),
            [(5, 0), (5, 1)]
        );
        let chunks = post(house.http, CHAT, &chat(json!({ "n": 3, "stream": true }))).await.chunks();
        for i in 0..3 {
            assert_eq!(text(&chunks, i), "Hello, world");
        }
        let finished = chunks.iter().filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null());
        assert_eq!(finished.count(), 3);
        house.close().await;
    });
}

#[test]
fn logprobs_of_a_chat() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("é!");
        let extra = json!({ "logprobs": true, "top_logprobs": 2 });
        let whole = post(house.http, CHAT, &chat(extra)).await.json();
        let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
        let top =
            json!([{ "token": "a", "logprob": -1.0, "bytes": [97] }, { "token": "b", "logprob": -2.0, "bytes": [98] }]);
        let one =
            |token: &str, bytes: Value| json!({ "token": token, "logprob": -0.5, "bytes": bytes, "top_logprobs": top });
        let (first, second) = (one("\u{fffd}", json!([195])), one("\u{fffd}", json!([169])));
        let end = one("<|im_end|>", json!(b"<|im_end|>"));
        assert_eq!(content, &[first, second, one("!", json!([33])), end]);
        let extra = json!({ "logprobs": true, "stream": true });
        let chunks = post(house.http, CHAT, &chat(extra)).await.chunks();
        let entries = chunks.iter().flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
        assert_eq!(entries.map(Vec::len).sum::<usize>(), 4);
        house.close().await;
    });
}

#[test]
fn logprobs_of_a_completion() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("ab");
        let body = json!({ "prompt": "Hi", "logprobs": 1, "max_tokens": 2 });
        let whole = post(house.http, COMPLETIONS, &body).await.json();
        let expected = json!({ "text_offset": [0, 1], "token_logprobs": [-0.5, -0.5], "tokens": ["a", "b"],
            "top_logprobs": [{ "a": -0.5 }, { "a": -1.0, "b": -0.5 }] });
        assert_eq!(whole["choices"][0]["logprobs"], expected);
        house.close().await;
    });
}

#[test]
fn drawn_seed_is_returned() {
    run(async {
        let house = House::open(config()).await;
        let mut seeds = std::collections::BTreeSet::new();
        for _ in 0..8 {
            let seed = post(house.http, COMPLETIONS, &json!({ "prompt": "Hi" })).await.json()["seed"].as_u64().unwrap();
            assert!(seed < 1 << 53);
            seeds.insert(seed);
        }
        let sent = house.fake.submits().into_iter().map(|request| request.sampling.unwrap().seed);
        assert_eq!(sent.collect::<std::collections::BTreeSet<_>>(), seeds);
        assert_eq!(seeds.len(), 8);
        house.close().await;
    });
}

#[test]
fn an_error_after_the_first_token() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.last = proto::cluster::Finish::Failed);
        let reply = post(house.http, CHAT, &chat(json!({ "stream": true }))).await;
        let events = reply.events();
        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        assert_eq!(last["error"]["type"], "server_error");
        assert_eq!(post(house.http, CHAT, &chat(json!({}))).await.status, 500);
        house.close().await;
    });
}

/// The replica reports that the request itself is the reason, so only the client can change it.
#[test]
fn request_that_leaves_no_token_gets_its_reason() {
    run(async {
        use proto::cluster::{Finish, GrammarFault};
        let cases = [
            (Finish::NoToken, GrammarFault::Unspecified, 400, "no_token_left"),
            (Finish::Grammar, GrammarFault::TooComplex, 400, "grammar_too_costly"),
            (Finish::Grammar, GrammarFault::Late, 503, "grammar_too_slow"),
            (Finish::Grammar, GrammarFault::Unspecified, 500, "grammar_failed"),
        ];
        let house = House::open(config()).await;
        for (finish, fault, status, code) in cases {
            house.fake.script(|script| (script.last, script.fault) = (finish, fault));
            let reply = post(house.http, CHAT, &chat(json!({ "stream": true }))).await;
            let last: Value = serde_json::from_str(reply.events().last().unwrap()).unwrap();
            let whole = post(house.http, CHAT, &chat(json!({}))).await;
            assert_eq!(whole.status, status);
            let kind = if status == 400 { "invalid_request_error" } else { "server_error" };
            for error in [&last["error"], &whole.json()["error"]] {
                assert_eq!((&error["type"], &error["code"]), (&json!(kind), &json!(code)));
                assert!(error["message"].as_str().unwrap().contains("of the answer"), "{error}");
            }
        }
        house.close().await;
    });
}
