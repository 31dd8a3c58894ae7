//! What OpenAI's and vLLM's APIs have beyond one answer to one prompt.

use crate::client::{post, post_until, read_until};
use crate::grpc::client;
use crate::http::merge;
use crate::{House, config, run};
use proto::v1;
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";

#[test]
fn several_prompts_have_choices_of_their_own() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "prompt": ["one", "three"], "n": 2, "seed": 7 });
        let whole = post(house.http, COMPLETIONS, &body).await.json();
        let choices = whole["choices"].as_array().unwrap();
        assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!((&whole["usage"]["prompt_tokens"], &whole["usage"]["completion_tokens"]), (&json!(8), &json!(52)));
        // A prompt among others is answered as it would be alone.
        let sent = house.fake.submits();
        let drawn: Vec<_> =
            sent.iter().map(|sent| (sent.prompt.len(), sent.sampling.as_ref().unwrap().choice)).collect();
        assert_eq!(drawn, [(3, 0), (3, 1), (5, 0), (5, 1)]);
        let body = json!({ "prompt": [[1, 2], [3]], "stream": true });
        let chunks = post(house.http, COMPLETIONS, &body).await.chunks();
        let text = |index: u64| -> String {
            let ours = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
            ours.map(|choice| choice["text"].as_str().unwrap()).collect()
        };
        assert_eq!((text(0), text(1)), ("Hello, world".into(), "Hello, world".into()));
        house.close().await;
    });
}

#[test]
fn an_echo_repeats_the_prompt() {
    run(async {
        let house = House::open(config()).await;
        let plain = post(house.http, COMPLETIONS, &json!({ "prompt": "Say:", "echo": true })).await.json();
        assert_eq!(plain["choices"][0]["text"], "Say:Hello, world");
        house.fake.answer("ab");
        let body = json!({ "prompt": "né!", "echo": true, "logprobs": 1, "max_tokens": 2 });
        let whole = post(house.http, COMPLETIONS, &body).await.json();
        assert_eq!(whole["choices"][0]["text"], "né!ab");
        let (bad, half) = ("\u{fffd}", json!({ "\u{fffd}": -0.5, "a": -1.0 }));
        let expected = json!({
            "tokens": ["n", bad, bad, "!", "a", "b"],
            // Parts of a character count as the replacement characters that they become.
            "text_offset": [0, 1, 2, 3, 3, 4],
            "token_logprobs": [null, -0.5, -0.5, -0.5, -0.5, -0.5],
            "top_logprobs": [null, half, half, { "!": -0.5, "a": -1.0 }, { "a": -0.5 }, { "a": -1.0, "b": -0.5 }],
        });
        assert_eq!(whole["choices"][0]["logprobs"], expected);
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let chunks = post(house.http, COMPLETIONS, &streamed).await.chunks();
        assert_eq!(chunks[0]["choices"][0]["text"], "né!");
        assert_eq!(chunks[0]["choices"][0]["logprobs"]["tokens"], json!(["n", bad, bad, "!"]));
        let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, "né!ab");
        house.close().await;
    });
}

#[test]
fn echo_with_zero_max_tokens_returns_only_the_prompt() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "prompt": "Hi", "echo": true, "logprobs": 0, "max_tokens": 0 });
        let whole = post(house.http, COMPLETIONS, &body).await.json();
        let choice = &whole["choices"][0];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("Hi"), &json!("length")));
        assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.5]));
        assert_eq!(whole["usage"]["completion_tokens"], 0);
        house.close().await;
    });
}

#[test]
fn the_prompt_is_scored() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "prompt": "Hi, you", "prompt_logprobs": 1, "max_tokens": 1 });
        let scores = &post(house.http, COMPLETIONS, &body).await.json()["choices"][0]["prompt_logprobs"];
        let scores = scores.as_array().unwrap();
        assert_eq!((scores.len(), &scores[0]), (7, &Value::Null));
        let i = json!({ "logprob": -0.5, "decoded_token": "i" });
        let a = json!({ "logprob": -1.0, "rank": 1, "decoded_token": "a" });
        assert_eq!(scores[1], json!({ "105": i, "97": a }));
        let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "prompt_logprobs": 0 });
        let whole = post(house.http, CHAT, &chat).await.json();
        assert_eq!(whole["prompt_logprobs"].as_array().unwrap().len(), 10);
        assert_eq!(house.fake.submits().iter().map(|sent| sent.goal).collect::<Vec<_>>(), [3, 2]);
        house.close().await;
    });
}

#[test]
fn token_ids_are_returned_on_request() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("ab");
        let body = json!({ "prompt": "Hi", "return_token_ids": true });
        let choice = &post(house.http, COMPLETIONS, &body).await.json()["choices"][0];
        assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&json!([72, 105]), &json!([97, 98, 257])));
        let chat =
            json!({ "messages": [{ "role": "user", "content": "Hi" }], "return_token_ids": true, "stream": true });
        let chunks = post(house.http, CHAT, &chat).await.chunks();
        assert_eq!(chunks[0]["prompt_token_ids"].as_array().unwrap().len(), 10);
        let ids: Vec<_> =
            chunks.iter().flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten().collect();
        assert_eq!(ids, [97, 98, 257]);
        house.close().await;
    });
}

/// Proxies close silent connections.
#[test]
fn waiting_stream_sends_comments() {
    run(async {
        let mut config = config();
        let soon = Duration::from_millis(10);
        (config.timeouts.sse_silence_max, config.timeouts.first_answer_max) = (soon, soon);
        let house = House::open(config).await;
        house.fake.answer("ab");
        house.fake.script(|script| script.hold_at = 0);
        let body = json!({ "prompt": "Hi", "stream": true });
        let mut stream = post_until(house.http, COMPLETIONS, &body, ": still here\n").await;
        let waited = read_until(&mut stream, ": still here\n").await;
        // Some readers take an empty line for an event, once they know an id.
        assert!(!waited.contains(": still here\n\n"), "{waited:?}");
        // A comment is not an event: the first event after the comments is the answer's.
        house.fake.script(|script| script.hold_at = usize::MAX);
        house.fake.die();
        house.fake.welcome();
        let rest = read_until(&mut stream, "[DONE]").await;
        assert!(rest.contains("\"text\":\"ab\"") || rest.contains("\"text\":\"a\""), "{rest}");
        house.close().await;
    });
}

#[test]
fn a_stop_string_may_be_shown() {
    run(async {
        let house = House::open(config()).await;
        let request_body = |extra: Value| {
            let mut body = json!({ "prompt": "Hi", "include_stop_str_in_output": true });
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            body
        };
        for (extra, text) in [
            (json!({ "stop": "lo," }), "Hello,"),
            (json!({ "stop_token_ids": [44] }), "Hello,"),
            (json!({}), "Hello, world"),
            (json!({ "skip_special_tokens": false }), "Hello, world<|im_end|>"),
        ] {
            let whole = post(house.http, COMPLETIONS, &request_body(extra.clone())).await.json();
            assert_eq!(
                (&whole["choices"][0]["text"], &whole["choices"][0]["finish_reason"]),
                (&json!(text), &json!("stop")),
                "{extra}"
            );
        }
        let plain = json!({ "prompt": "Hi", "stop_token_ids": [44] });
        assert_eq!(post(house.http, COMPLETIONS, &plain).await.json()["choices"][0]["text"], "Hello");
        house.close().await;
    });
}

#[test]
fn embeddings_may_be_raw_or_bytes_or_of_a_chat() {
    run(async {
        let house = House::open(config()).await;
        let values =
            async |body: Value| post(house.http, EMBEDDINGS, &body).await.json()["data"][0]["embedding"].take();
        // The fake replica returns the prompt's length and its first token.
        assert_eq!(values(json!({ "input": "\u{4}abc", "use_activation": false })).await, json!([4.0, 4.0]));
        let cut = json!({ "input": "\u{4}abc", "use_activation": false, "truncate_prompt_tokens": 2 });
        assert_eq!(values(cut).await, json!([2.0, 4.0]));
        let half_sized = json!({ "input": "\u{4}abc", "encoding_format": "base64", "embed_dtype": "float16" });
        assert_eq!(values(half_sized).await, "qDmoOQ==");
        let bare = json!({ "input": "\u{4}abc", "use_activation": false, "add_special_tokens": false });
        assert_eq!(values(bare).await, json!([4.0, 4.0]));
        let messages = json!([{ "role": "user", "content": "Hi" }]);
        let length = async |extra: Value| {
            let body = merge(json!({ "messages": messages, "use_activation": false }), extra);
            values(body).await[0].as_f64().unwrap()
        };
        let plain = length(json!({})).await;
        assert!(length(json!({ "add_generation_prompt": true })).await > plain);
        let as_input = json!({ "input": messages, "use_activation": false });
        assert_eq!(values(as_input).await[0].as_f64().unwrap(), plain);

        // These numbers are text in this form, as the client of these tests expects.
        let inputs = json!({ "input": ["\u{2}a", "\u{2}b"], "use_activation": false });
        let bytes = merge(inputs, json!({ "encoding_format": "bytes", "endianness": "big" }));
        let reply = post(house.http, EMBEDDINGS, &bytes).await;
        let described: Value = serde_json::from_str(&reply.headers["metadata"]).unwrap();
        let second = &described["data"][1];
        assert_eq!((&second["start"], &second["end"], &second["shape"]), (&json!(8), &json!(16), &json!([2])));
        let only = merge(bytes, json!({ "encoding_format": "bytes_only" }));
        assert!(!post(house.http, EMBEDDINGS, &only).await.headers.contains_key("metadata"));
        house.close().await;
    });
}

#[test]
fn embeddings_have_length_one() {
    run(async {
        let mut config = config();
        config.limits.embeddings_at_once_max = 2;
        let house = House::open(config).await;
        let reply = post(house.http, EMBEDDINGS, &json!({ "input": "\u{4}abc", "model": "alias" })).await.json();
        let half = std::f32::consts::FRAC_1_SQRT_2;
        let one = json!({ "object": "embedding", "index": 0, "embedding": [half, half] });
        assert_eq!((&reply["data"], &reply["model"]), (&json!([one]), &json!("toy")));
        assert_eq!(reply["usage"], json!({ "prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0 }));
        // There are more inputs than run at once; the answers keep their order.
        let many = json!({ "input": [[3, 1, 1, 1], [0, 5, 5], [4, 4], [9], [1, 2, 3]] });
        let reply = post(house.http, EMBEDDINGS, &many).await.json();
        let first = |i: usize| reply["data"][i]["embedding"][0].as_f64().unwrap() as f32;
        assert_eq!((reply["data"].as_array().unwrap().len(), first(0), first(1)), (5, 0.8, 1.0));
        assert_eq!(reply["usage"]["total_tokens"], 13);
        let hidden = json!({ "input": "a", "dimensions": 32, "add_special_tokens": true, "normalize": true });
        assert_eq!(post(house.http, EMBEDDINGS, &hidden).await.status, 200);
        let body = json!({ "input": "\u{4}abc", "encoding_format": "base64" });
        let text =
            post(house.http, EMBEDDINGS, &body).await.json()["data"][0]["embedding"].as_str().unwrap().to_owned();
        // This is 0.70710677 twice, little-endian.
        assert_eq!(text, "8wQ1P/MENT8=");
        for (body, param) in [
            (json!({}), "input"),
            (json!({ "input": [] }), "input"),
            (json!({ "input": "" }), "input"),
            (json!({ "input": [999] }), "input"),
            (json!({ "input": "a", "dimensions": 1 }), "dimensions"),
            (json!({ "input": "a", "encoding_format": "int8" }), "encoding_format"),
            (json!({ "input": "a", "embed_dtype": "int8" }), "embed_dtype"),
            (json!({ "input": "a", "endianness": "middle" }), "endianness"),
            (json!({ "input": "a", "input_type": "song" }), "input_type"),
            (json!({ "messages": [{ "role": "a wizard", "content": "x" }] }), "messages[0].role"),
            (json!({ "input": "abc", "truncate_prompt_tokens": 9999999 }), "truncate_prompt_tokens"),
        ] {
            let reply = post(house.http, EMBEDDINGS, &body).await;
            assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{body}");
        }
        let inputs = ["\u{4}abc"].map(|text| v1::EmbedInput { input: Some(v1::embed_input::Input::Text(text.into())) });
        let request = v1::EmbedRequest { inputs: inputs.to_vec(), ..v1::EmbedRequest::default() };
        let reply = client(&house).embed(request).await.unwrap().into_inner();
        assert_eq!(reply.embeddings[0].values, [half, half]);
        house.close().await;
    });
}
