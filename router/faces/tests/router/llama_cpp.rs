//! The API of llama.cpp's server.

use crate::client::{Reply, get, post, post_until};
use crate::model::{CONTEXT, END, START, VOCAB};
use crate::{House, config, eventually, run};
use proto::cluster as wire;
use serde_json::{Value, json};

const COMPLETION: &str = "/completion";

fn with(mut body: Value, extra: Value) -> Value {
    extra.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

fn request_body(extra: Value) -> Value {
    with(json!({ "prompt": "Hi" }), extra)
}

fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.headers["content-type"], "text/event-stream");
    reply.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[test]
fn a_whole_completion() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.n_cached = 1);
        let extra = json!({ "n_predict": 20, "temperature": 0.5, "seed": 5, "cache_prompt": false, "id_slot": 3,
            "return_tokens": true, "mirostat": 0, "repeat_last_n": 64, "samplers": [], "typical_p": 1.0 });
        let mut answer = post(house.http, COMPLETION, &request_body(extra)).await.json();
        let timings = answer["timings"].take();
        assert_eq!((&timings["cache_n"], &timings["prompt_n"]), (&json!(1), &json!(1)));
        assert_eq!(timings["predicted_n"], 13);
        assert!(timings["prompt_ms"].as_f64().unwrap() > 0.0, "{timings}");
        let settings = answer["generation_settings"].take();
        assert_eq!((&settings["seed"], &settings["n_ctx"]), (&json!(5), &json!(CONTEXT)));
        assert_eq!((&settings["temperature"], &settings["top_k"]), (&json!(0.5), &json!(7)));
        let token_ids: Vec<u32> = b"Hello, world".iter().map(|byte| u32::from(*byte)).chain([END]).collect();
        let expected = json!({ "index": 0, "content": "Hello, world", "tokens": token_ids, "id_slot": -1, "stop": true,
            "tokens_predicted": 13, "tokens_evaluated": 2, "model": "toy", "generation_settings": null, "prompt": "Hi",
            "has_new_line": false, "truncated": false, "stop_type": "eos", "stopping_word": "", "tokens_cached": 1,
            "timings": null });
        assert_eq!(answer, expected);
        let sampling = house.fake.submits()[0].sampling.clone().unwrap();
        assert_eq!((sampling.temperature, sampling.tokens_max, sampling.seed), (0.5, 20, 5));
        house.close().await;
    });
}

#[test]
fn a_completion_ends_in_one_of_its_ways() {
    run(async {
        let house = House::open(config()).await;
        let check = async |extra: Value, content: &str, kind: &str, word: &str| {
            let answer = post(house.http, COMPLETION, &request_body(extra)).await.json();
            let found = [&answer["content"], &answer["stop_type"], &answer["stopping_word"]];
            assert_eq!(found, [content, kind, word], "{answer}");
            assert_eq!(answer["tokens"], json!([]));
        };
        check(json!({ "n_predict": -1 }), "Hello, world", "eos", "").await;
        check(json!({ "n_predict": 3 }), "Hel", "limit", "").await;
        check(json!({ "stop": ["wor"] }), "Hello, ", "word", "wor").await;
        check(json!({ "n_predict": 0 }), "", "limit", "").await;
        house.close().await;
    });
}

#[test]
fn a_completion_in_events_has_no_sign_of_its_end() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("a\nb");
        for path in [COMPLETION, "/completions"] {
            let events = events(&post(house.http, path, &request_body(json!({ "stream": true }))).await);
            let contents: Vec<_> = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
            assert_eq!(contents, ["a", "\n", "b", "", ""], "{path}");
            let tokens: Vec<_> = events.iter().flat_map(|event| event["tokens"].as_array().unwrap()).collect();
            assert_eq!(tokens, [97, 10, 98, 257]);
            let (last, pieces) = events.split_last().unwrap();
            assert!(pieces.iter().all(|event| event["stop"] == false && event["timings"].is_null()));
            assert_eq!((&last["stop"], &last["stop_type"]), (&json!(true), &json!("eos")));
            assert_eq!((&last["has_new_line"], &last["tokens_predicted"]), (&json!(true), &json!(4)));
        }
        let nothing =
            events(&post(house.http, COMPLETION, &request_body(json!({ "stream": true, "n_predict": 0 }))).await);
        assert_eq!((nothing.len(), &nothing[0]["tokens_predicted"]), (1, &json!(0)));
        house.close().await;
    });
}

#[test]
fn token_probabilities_are_returned() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("é");
        let answer = post(house.http, COMPLETION, &request_body(json!({ "n_probs": 1, "n_predict": 1 }))).await.json();
        let top = json!([{ "id": 97, "token": "a", "bytes": [97], "logprob": -1.0 }]);
        let one = json!({ "id": 195, "token": "\u{fffd}", "bytes": [195], "logprob": -0.5, "top_logprobs": top });
        assert_eq!(answer["completion_probabilities"], json!([one]));
        let streamed =
            events(&post(house.http, COMPLETION, &request_body(json!({ "n_probs": 1, "stream": true }))).await);
        let n_probabilities: usize =
            streamed.iter().filter_map(|event| event["completion_probabilities"].as_array()).map(Vec::len).sum();
        assert_eq!(n_probabilities, 3);
        house.close().await;
    });
}

#[test]
fn several_prompts_are_a_list() {
    run(async {
        let house = House::open(config()).await;
        let answers = post(house.http, COMPLETION, &json!({ "prompt": ["one", [1, 2]] })).await.json();
        let indices_and_lengths: Vec<_> =
            answers.as_array().unwrap().iter().map(|one| (&one["index"], &one["tokens_evaluated"])).collect();
        assert_eq!(indices_and_lengths, [(&json!(0), &json!(3)), (&json!(1), &json!(2))]);
        let ids = post(house.http, COMPLETION, &json!({ "prompt": [72, 105] })).await.json();
        assert_eq!((&ids["prompt"], &ids["content"]), (&json!("Hi"), &json!("Hello, world")));
        house.close().await;
    });
}

#[test]
fn biases_may_be_pairs() {
    run(async {
        let house = House::open(config()).await;
        let check = async |bias: Value, expected: &[(u32, f32)]| {
            let reply = post(house.http, COMPLETION, &request_body(json!({ "logit_bias": bias }))).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let sampling = house.fake.submits().pop().unwrap().sampling.unwrap();
            let sent: Vec<_> = sampling.bias_tokens.into_iter().zip(sampling.bias).collect();
            assert_eq!(sent, expected, "{bias}");
        };
        check(json!([[65, 1.5], [66, -2]]), &[(65, 1.5), (66, -2.0)]).await;
        check(json!([[65, false]]), &[(65, -100.0)]).await;
        check(json!({ "65": 1.5 }), &[(65, 1.5)]).await;
        for wrong in [json!([[65]]), json!([65, 1]), json!([[65, true]])] {
            let reply = post(house.http, COMPLETION, &request_body(json!({ "logit_bias": wrong }))).await;
            assert!(reply.status == 400 && reply.body.contains("logit_bias"), "{reply:?}");
        }
        house.close().await;
    });
}

#[test]
fn tokens_in_both_forms() {
    run(async {
        let house = House::open(config()).await;
        let tokens = post(house.http, "/tokenize", &json!({ "content": "né" })).await.json();
        assert_eq!(tokens, json!({ "tokens": [110, 195, 169] }));
        let pieces = post(house.http, "/tokenize", &json!({ "content": "né", "with_pieces": true })).await.json();
        let piece = |id: u32, piece: Value| json!({ "id": id, "piece": piece });
        let expected = [piece(110, json!("n")), piece(195, json!([195])), piece(169, json!([169]))];
        assert_eq!(pieces["tokens"], json!(expected));
        assert_eq!(post(house.http, "/tokenize", &json!({ "content": "" })).await.json(), json!({ "tokens": [] }));
        let text = post(house.http, "/detokenize", &json!({ "tokens": [110, 195, 169] })).await.json();
        assert_eq!(text, json!({ "content": "né", "prompt": "né" }));
        for body in [json!({ "content": 5 }), json!({ "content": "a", "parse_special": false })] {
            assert_eq!(post(house.http, "/tokenize", &body).await.status, 400, "{body}");
        }
        house.close().await;
    });
}

#[test]
fn a_chat_becomes_its_prompt() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        let rendered = post(house.http, "/apply-template", &body).await.json();
        assert_eq!(rendered, json!({ "prompt": "<|im_start|>user:Hi<|im_end|><|im_start|>" }));
        post(house.http, "/v1/chat/completions", &body).await;
        let completion = post(house.http, COMPLETION, &rendered).await;
        assert_eq!(completion.status, 200);
        let sent = house.fake.submits();
        assert_eq!(sent[0].prompt, sent[1].prompt);
        assert_eq!(sent[0].prompt.first(), Some(&START));
        assert_eq!(post(house.http, "/apply-template", &json!({})).await.status, 400);
        house.close().await;
    });
}

#[test]
fn server_reports_its_props_and_slots() {
    run(async {
        let mut config = config();
        config.limits.slots = 2;
        let house = House::open(config).await;
        let props = get(house.http, "/props").await.json();
        let settings = &props["default_generation_settings"];
        assert_eq!((&settings["n_ctx"], &settings["params"]["temperature"]), (&json!(CONTEXT), &json!(0.25)));
        assert_eq!((&props["model_alias"], &props["eos_token"]), (&json!("toy"), &json!("<|im_end|>")));
        assert!(props["chat_template"].as_str().unwrap().contains("message.role"), "{props}");
        let idle = get(house.http, "/slots").await.json();
        let free = |id: u32| json!({ "id": id, "n_ctx": CONTEXT, "is_processing": false, "speculative": false });
        assert_eq!((&idle, &props["total_slots"]), (&json!([free(0), free(1)]), &json!(2)));
        house.fake.script(|script| script.hold_at = 3);
        let stream = post_until(house.http, COMPLETION, &request_body(json!({ "stream": true })), "\"l\"").await;
        let busy = get(house.http, "/slots?fail_on_no_slot=1").await.json();
        let states: Vec<_> = busy.as_array().unwrap().iter().map(|slot| &slot["is_processing"]).collect();
        assert_eq!(states, [true, false]);
        drop(stream);
        eventually(|| async { get(house.http, "/slots").await.json() == idle }).await;
        assert_eq!(get(house.http, "/lora-adapters").await.json(), json!([]));
        house.close().await;
    });
}

#[test]
fn pages_of_openai_need_no_version() {
    run(async {
        let house = House::open(config()).await;
        let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        let answer = post(house.http, "/chat/completions", &chat).await.json();
        assert_eq!(answer["choices"][0]["message"]["content"], "Hello, world");
        assert_eq!(get(house.http, "/models").await.json()["data"][0]["id"], "toy");
        let ours = post(house.http, "/embedding", &json!({ "content": ["abc", "d"] })).await.json();
        let theirs = post(house.http, "/embeddings", &json!({ "input": ["abc", "d"] })).await.json();
        for i in 0..2 {
            assert_eq!(ours[i]["index"], i);
            assert_eq!(ours[i]["embedding"][0], theirs["data"][i]["embedding"]);
        }
        let same = post(house.http, "/embeddings", &json!({ "content": ["abc", "d"] })).await.json();
        assert_eq!(same, ours);
        assert_eq!(post(house.http, "/embedding", &json!({})).await.status, 400);
        house.close().await;
    });
}

#[test]
fn what_would_change_the_answer_is_refused_by_name() {
    run(async {
        let house = House::open(config()).await;
        for (extra, word) in [
            (json!({ "prompt": null }), "prompt"),
            (json!({ "prompt": { "prompt_string": "a", "multimodal_data": ["aa"] } }), "multimodal_data"),
            (json!({ "n_predict": -7 }), "n_predict"),
            (json!({ "mirostat": 2 }), "mirostat"),
            (json!({ "repeat_last_n": -2 }), "repeat_last_n"),
            (json!({ "repeat_penalty": 0 }), "repeat_penalty"),
            (json!({ "n_probs": 99 }), "n_probs"),
            (json!({ "post_sampling_probs": true }), "post_sampling_probs"),
            (json!({ "lora": [{ "id": 0, "scale": 1.0 }] }), "lora"),
            (json!({ "t_max_predict_ms": 50 }), "t_max_predict_ms"),
            (json!({ "samplers": ["top_k", "temperature"] }), "samplers"),
            (json!({ "samplers": "kt" }), "samplers"),
            (json!({ "dynatemp_range": 0.5 }), "dynatemp_range"),
            (json!({ "grammar": "root ::= other" }), "grammar"),
            (json!({ "json_schema": { "unheardOf": 1 } }), "json_schema"),
        ] {
            let reply = post(house.http, COMPLETION, &request_body(extra.clone())).await;
            assert!(reply.status == 400 && reply.body.contains(word), "{extra}: {reply:?}");
        }
        let greedy = request_body(json!({ "samplers": ["top_k", "temperature"], "temperature": 0 }));
        assert_eq!(post(house.http, COMPLETION, &greedy).await.status, 200);
        let gap = post(house.http, "/infill", &json!({ "input_prefix": "a", "input_suffix": "b" })).await;
        assert!(gap.status == 400 && gap.body.contains("input_suffix"), "{gap:?}");
        house.fake.script(|script| script.refuse = Some((wire::refused::Reason::Full, 3000)));
        let full = post(house.http, COMPLETION, &request_body(json!({}))).await;
        assert_eq!((full.status, full.headers["retry-after"].as_str()), (429, "3"));
        house.close().await;
    });
}

#[test]
fn what_is_between_two_texts() {
    run(async {
        let house = House::coding().await;
        house.fake.welcome();
        house.wait_until_ready().await;
        let [prefix, suffix, middle, file] = [0, 1, 2, 3].map(|i| VOCAB + i);
        let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
        let body = json!({ "input_prefix": "ab", "input_suffix": "c", "prompt": "d",
            "input_extra": [{ "filename": "f", "text": "e" }] });
        let answer = post(house.http, "/infill", &body).await.json();
        assert_eq!(answer["content"], "Hello, world");
        let expected = [
            vec![file],
            bytes("f\ne\n"),
            vec![prefix],
            bytes("ab"),
            vec![suffix],
            bytes("c"),
            vec![middle],
            bytes("d"),
        ];
        assert_eq!(house.fake.submits()[0].prompt, expected.concat());
        // Ollama's page sends the same request.
        let body = json!({ "prompt": "ab", "suffix": "c", "stream": false });
        assert_eq!(post(house.http, "/api/generate", &body).await.json()["response"], "Hello, world");
        let expected = [vec![prefix], bytes("ab"), vec![suffix], bytes("c"), vec![middle]];
        assert_eq!(house.fake.submits()[1].prompt, expected.concat());
        let shown = post(house.http, "/api/show", &json!({})).await.json();
        assert_eq!(shown["capabilities"], json!(["completion", "insert"]));
        assert_eq!(post(house.http, "/infill", &json!({ "input_extra": [5] })).await.status, 400);
        house.close().await;
    });
}

#[test]
fn a_completion_that_fails_ends_with_an_error() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.last = wire::Finish::Failed);
        let events = events(&post(house.http, COMPLETION, &request_body(json!({ "stream": true }))).await);
        assert_eq!(events.last().unwrap()["error"]["type"], "server_error");
        assert_eq!(post(house.http, COMPLETION, &request_body(json!({}))).await.status, 500);
        house.close().await;
    });
}

#[test]
fn a_prompt_may_be_of_several_kinds() {
    run(async {
        let house = House::open(config()).await;
        for (prompt, expected) in [
            (json!({ "prompt_string": "ab" }), vec!["ab"]),
            (json!(["a", { "prompt_string": "b" }]), vec!["a", "b"]),
            (json!([97, "bc", 100]), vec!["abcd"]),
            (json!([[97, "b"], [99]]), vec!["ab", "c"]),
        ] {
            let body = json!({ "prompt": prompt, "n_predict": 1 });
            assert_eq!(post(house.http, "/completion", &body).await.status, 200, "{body}");
            let prompts = house.fake.submits().into_iter().map(|submit| submit.prompt);
            let expected: Vec<Vec<u32>> = expected.iter().map(|text| text.bytes().map(u32::from).collect()).collect();
            assert_eq!(prompts.collect::<Vec<_>>(), expected, "{body}");
            house.fake.forget();
        }
        for (prompt, field) in [
            (json!({ "prompt_string": "ab", "multimodal_data": ["aaaa"] }), "multimodal_data"),
            (json!({ "text": "ab" }), "prompt_string"),
            (json!([97, {}]), "prompt"),
            (json!(5), "prompt"),
            (json!([]), "prompt"),
        ] {
            let reply = post(house.http, "/completion", &json!({ "prompt": prompt })).await;
            assert!(reply.status == 400 && reply.body.contains(field), "{prompt}: {reply:?}");
        }
        house.close().await;
    });
}

#[test]
fn what_may_not_be_drawn_is_among_the_settings() {
    run(async {
        let house = House::open(config()).await;
        let settings = async |extra: Value| {
            let mut body = extra;
            (body["prompt"], body["n_predict"]) = ("Hi".into(), 1.into());
            post(house.http, "/completion", &body).await.json()["generation_settings"].take()
        };
        assert_eq!(settings(json!({})).await["logit_bias"], json!([]));
        let biased = settings(json!({ "logit_bias": [[65, 1.5]], "ignore_eos": true })).await;
        let end = crate::model::END;
        assert_eq!(biased["logit_bias"], json!([{ "token": 65, "bias": 1.5 }, { "token": end, "bias": null }]));
        house.close().await;
    });
}
