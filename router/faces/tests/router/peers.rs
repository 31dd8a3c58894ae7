//! Cases of vLLM's and llama.cpp's own server tests that no other file has.

use crate::client::{get, post};
use crate::model::{CONTEXT, VOCAB};
use crate::{House, config, run};
use router::ApiKeys;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/completion";

fn hi() -> Value {
    json!([{ "role": "user", "content": "Hi" }])
}

#[test]
fn several_conversations_get_their_answers_in_one() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "messages": [hi(), [{ "role": "user", "content": "Ho" }]], "n": 2, "max_tokens": 3,
            "return_token_ids": true });
        let answer = post(house.http, "/v1/chat/completions/batch", &body).await.json();
        let choices = answer["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(i, choice)| choice["index"] == i), "{answer}");
        let prompts: Vec<_> = choices.iter().map(|choice| &choice["prompt_token_ids"]).collect();
        assert!(prompts[0] == prompts[1] && prompts[1] != prompts[2] && prompts[2] == prompts[3], "{answer}");
        assert_eq!(choices[3]["message"]["content"], "Hel");
        for (wrong, field) in [
            (json!({ "messages": hi() }), "messages"),
            (json!({ "messages": [] }), "messages"),
            (json!({ "messages": [hi(), []] }), "messages"),
            (json!({ "messages": [hi()], "stream": true }), "stream"),
        ] {
            let reply = post(house.http, "/v1/chat/completions/batch", &wrong).await;
            assert!(reply.status == 400 && reply.body.contains(field), "{wrong}: {reply:?}");
        }
        house.close().await;
    });
}

#[test]
fn invocations_page_answers_by_its_fields() {
    run(async {
        let house = House::open(config()).await;
        let answer = async |body: Value| post(house.http, "/invocations", &body).await.json();
        assert_eq!(answer(json!({ "messages": hi() })).await["object"], "chat.completion");
        assert_eq!(answer(json!({ "prompt": "Hi" })).await["object"], "text_completion");
        assert_eq!(answer(json!({ "input": "Hi" })).await["object"], "list");
        assert_eq!(answer(json!({ "query": "Hi", "documents": ["a"] })).await["results"][0]["index"], 0);
        assert_eq!(answer(json!({ "text_1": "Hi", "text_2": "a" })).await["data"][0]["object"], "score");
        assert_eq!(answer(json!({})).await["error"]["param"], "prompt");
        house.close().await;
    });
}

#[test]
fn tokens_are_counted_as_the_page_itself_counts_them() {
    run(async {
        let house = House::open(config()).await;
        for (page, body, used) in [
            (CHAT, json!({ "messages": hi() }), "prompt_tokens"),
            ("/v1/responses", json!({ "model": "toy", "input": "Hi", "instructions": "Be" }), "input_tokens"),
        ] {
            let counted = post(house.http, &format!("{page}/input_tokens"), &body).await.json();
            let answer = post(house.http, page, &body).await.json();
            assert_eq!(counted["input_tokens"], answer["usage"][used], "{page}");
        }
        house.close().await;
    });
}

#[test]
fn texts_may_have_biases_and_what_is_no_token_is_named() {
    run(async {
        let house = House::open(config()).await;
        for (biases, expected) in [
            (json!([["ab", -5], [67, 1]]), vec![(67, 1.0), (97, -5.0), (98, -5.0)]),
            (json!({ "ab": -5, "67": 1 }), vec![(67, 1.0), (97, -5.0), (98, -5.0)]),
        ] {
            let reply = post(house.http, COMPLETION, &json!({ "prompt": "Hi", "logit_bias": biases })).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let sampling = house.fake.submits().pop().unwrap().sampling.unwrap();
            assert_eq!(sampling.bias_tokens.into_iter().zip(sampling.bias).collect::<Vec<_>>(), expected, "{biases}");
        }
        for (bias, part) in
            [(json!({ "bad1": 1, "5": 1, "bad2": 1 }), "bad1`, `bad2"), (json!({ "99999": 1 }), "99999")]
        {
            let reply = post(house.http, CHAT, &json!({ "messages": hi(), "logit_bias": bias })).await;
            assert!(reply.status == 400 && reply.body.contains(part), "{reply:?}");
        }
        house.close().await;
    });
}

#[test]
fn timings_and_prompt_are_returned_on_request() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "messages": hi(), "max_tokens": 3, "timings_per_token": true, "verbose": true });
        let answer = post(house.http, CHAT, &body).await.json();
        assert_eq!(answer["timings"]["predicted_n"], 3);
        assert!(answer["__verbose"]["prompt"].as_str().unwrap().contains("Hi"), "{answer}");
        let mut streamed = body.clone();
        (streamed["stream"], streamed["stream_options"]) = (true.into(), json!({ "include_usage": true }));
        let chunks = post(house.http, CHAT, &streamed).await.chunks();
        let numbers: Vec<_> = chunks.iter().map(|chunk| chunk["timings"]["predicted_n"].as_u64()).collect();
        assert_eq!((numbers[0], numbers.last().unwrap()), (None, &Some(3)));
        assert!(numbers.contains(&Some(1)) && chunks.last().unwrap()["timings"]["prompt_per_second"].is_number());
        let plain = post(house.http, CHAT, &json!({ "messages": hi() })).await.json();
        assert!(plain.get("timings").is_none() && plain.get("__verbose").is_none(), "{plain}");
        let of_llama_cpp = post(house.http, "/chat/completions", &json!({ "messages": hi() })).await.json();
        assert!(of_llama_cpp["timings"]["predicted_ms"].is_number());
        house.close().await;
    });
}

#[test]
fn completion_has_only_requested_fields() {
    run(async {
        let house = House::open(config()).await;
        let fields = json!(["content", "generation_settings/n_predict", "no/such"]);
        let body = json!({ "prompt": "Hi", "n_predict": 3, "response_fields": fields });
        let answer = post(house.http, COMPLETION, &body).await.json();
        assert_eq!(answer, json!({ "content": "Hel", "generation_settings/n_predict": 3 }));
        house.close().await;
    });
}

#[test]
fn llama_cpp_pages_have_llama_cpp_error_types() {
    run(async {
        let house = House::open(config()).await;
        let long = json!({ "messages": [{ "role": "user", "content": "x".repeat(CONTEXT as usize) }] });
        let error = |reply: crate::client::Reply| reply.json()["error"].clone();
        let llama_cpp_error = error(post(house.http, "/chat/completions", &long).await);
        assert_eq!(
            (&llama_cpp_error["type"], &llama_cpp_error["n_ctx"]),
            (&json!("exceed_context_size_error"), &json!(CONTEXT))
        );
        assert!(llama_cpp_error["n_prompt_tokens"].as_u64().unwrap() > u64::from(CONTEXT));
        let openai_error = error(post(house.http, CHAT, &long).await);
        assert_eq!(
            (&openai_error["type"], &openai_error["code"]),
            (&json!("invalid_request_error"), &json!("context_length_exceeded"))
        );
        let saved = post(house.http, "/slots/0?action=save", &json!({ "filename": "a" })).await;
        assert_eq!((saved.status, &error(saved)["type"]), (501, &json!("not_supported_error")));
        house.close().await;
        let keyed = router::Config { keys: ApiKeys::parse("secret").unwrap(), ..config() };
        let house = House::open(keyed).await;
        let refused = post(house.http, COMPLETION, &json!({ "prompt": "Hi" })).await;
        assert_eq!((refused.status, &error(refused)["type"]), (401, &json!("authentication_error")));
        house.close().await;
    });
}

#[test]
fn tokens_are_spelled_as_the_vocabulary_has_them() {
    run(async {
        let house = House::open(config()).await;
        let tokenized =
            post(house.http, "/tokenize", &json!({ "prompt": "a b", "return_token_strs": true })).await.json();
        assert_eq!(tokenized["token_strs"], json!(["a", "Ġ", "b"]));
        let with_model = post(house.http, "/detokenize", &json!({ "model": "toy", "tokens": [72, 105] })).await.json();
        assert_eq!(with_model, json!({ "prompt": "Hi" }));
        let info = get(house.http, "/tokenizer_info").await.json();
        assert_eq!((&info["model_max_length"], &info["vocab_size"]), (&json!(CONTEXT), &json!(VOCAB)));
        house.close().await;
    });
}

#[test]
fn a_server_may_have_a_seed_and_go_by_any_name() {
    run(async {
        let names = vec!["toy".to_owned(), "*".to_owned()];
        let house = House::open(router::Config { seed: Some(7), names, ..config() }).await;
        let post_chat = async |extra: Value| {
            let mut body = json!({ "model": "claude-or-any-other", "messages": hi() });
            extra.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
            post(house.http, CHAT, &body).await.json()
        };
        let answer = post_chat(json!({})).await;
        assert_eq!((&answer["seed"], &answer["model"]), (&json!(7), &json!("toy")));
        assert_eq!(post_chat(json!({ "seed": 8 })).await["seed"], 8);
        let listed = get(house.http, "/v1/models").await.json();
        assert_eq!(listed["data"].as_array().unwrap().len(), 1);
        house.close().await;
    });
}

#[test]
fn every_generation_page_can_be_rendered() {
    run(async {
        let house = House::open(config()).await;
        let message = json!({ "model": "toy", "max_tokens": 5, "messages": hi(), "temperature": 0.123 });
        let response = json!({ "model": "toy", "max_output_tokens": 5, "input": "Hi", "temperature": 0.123 });
        for (page, body, prefix) in [("/v1/messages", message, "chatcmpl-"), ("/v1/responses", response, "resp_")] {
            let rendered = post(house.http, &format!("{page}/render"), &body).await.json();
            assert_eq!(rendered["sampling_params"]["temperature"], 0.123, "{rendered}");
            assert_eq!(rendered["sampling_params"]["max_tokens"], 5);
            assert!(rendered["request_id"].as_str().unwrap().starts_with(prefix), "{rendered}");
            post(house.http, page, &body).await.json();
            assert_eq!(rendered["token_ids"], json!(house.fake.submits().pop().unwrap().prompt), "{page}");
        }
        let named = json!({ "prompt": ["a", "b"], "request_id": "mine", "stream": true,
            "stream_options": { "include_usage": true } });
        let rendered = post(house.http, "/v1/completions/render", &named).await.json();
        let ids: Vec<_> = rendered.as_array().unwrap().iter().map(|one| &one["request_id"]).collect();
        assert_eq!(ids, ["cmpl-mine-0", "cmpl-mine-1"]);
        assert_eq!(rendered[0]["stream_options"]["include_usage"], true);
        let before = json!({ "model": "toy", "input": "Hi", "previous_response_id": "resp_1" });
        assert_eq!(post(house.http, "/v1/responses/render", &before).await.status, 400);
        house.close().await;
    });
}

#[test]
fn logprobs_of_a_response_stand_beside_its_text() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("ab");
        let mut body = json!({ "model": "toy", "input": "Hi", "top_logprobs": 1,
            "include": ["message.output_text.logprobs"] });
        let whole = post(house.http, "/v1/responses", &body).await.json();
        let logprobs = &whole["output"][0]["content"][0]["logprobs"];
        assert_eq!(
            (&logprobs[0]["token"], &logprobs[1]["token"], &whole["top_logprobs"]),
            (&json!("a"), &json!("b"), &json!(1))
        );
        assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 1);
        body["stream"] = true.into();
        let events = post(house.http, "/v1/responses", &body).await.events();
        let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let logprobs_of = |kind: &'static str| {
            events.iter().filter(move |event| event["type"] == kind).map(|event| event["logprobs"].clone())
        };
        let in_deltas: Vec<Value> =
            logprobs_of("response.output_text.delta").flat_map(|list| list.as_array().unwrap().clone()).collect();
        let whole_text = logprobs_of("response.output_text.done").next().unwrap();
        assert_eq!(json!(in_deltas[..2]), json!([logprobs[0], logprobs[1]]));
        assert_eq!(whole_text, json!(in_deltas));
        house.close().await;
    });
}

#[test]
fn logprob_token_ids_are_sent_to_the_replica() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "messages": hi(), "logprobs": true, "logprob_token_ids": [70, 65, 70] });
        assert_eq!(post(house.http, CHAT, &body).await.status, 200);
        assert_eq!(house.fake.submits().pop().unwrap().sampling.unwrap().logprob_token_ids, [65, 70]);
        for wrong in [
            json!({ "messages": hi(), "logprob_token_ids": [65] }),
            json!({ "messages": hi(), "logprobs": true, "logprob_token_ids": [VOCAB] }),
            json!({ "messages": hi(), "logprobs": true, "logprob_token_ids": vec![65; 21] }),
        ] {
            let reply = post(house.http, CHAT, &wrong).await;
            assert!(reply.status == 400 && reply.body.contains("logprob_token_ids"), "{wrong}: {reply:?}");
        }
        house.close().await;
    });
}

#[test]
fn of_the_tools_only_some_may_be_allowed() {
    run(async {
        let house = House::open(config()).await;
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let with = |allowed: Value| {
            json!({ "messages": hi(), "tools": [tool("first"), tool("second")],
            "tool_choice": { "type": "allowed_tools", "allowed_tools": allowed } })
        };
        let body = with(json!({ "mode": "auto", "tools": [tool("second")] }));
        let prompt = post(house.http, "/apply-template", &body).await.json()["prompt"].to_string();
        assert!(prompt.contains("second") && !prompt.contains("first"), "{prompt}");
        for wrong in [
            json!({ "mode": "none", "tools": [tool("second")] }),
            json!({ "mode": "auto" }),
            json!({ "mode": "auto", "tools": [tool("third")] }),
            json!({ "mode": "auto", "tools": "second" }),
            json!({ "mode": "auto", "tools": [5] }),
            json!("second"),
            json!(5),
            json!(["second"]),
        ] {
            let reply = post(house.http, CHAT, &with(wrong.clone())).await;
            assert!(reply.status == 400 && reply.body.contains("allowed_tools"), "{wrong}: {reply:?}");
        }
        house.close().await;
    });
}
