//! Ollama's API.

use crate::client::{Reply, get, post, post_after, post_until, post_with_key, read_until, send};
use crate::model::{CONTEXT, END, START};
use crate::{House, config, eventually, run};
use proto::cluster as wire;
use router::ApiKeys;
use serde_json::{Value, json};
use types::{PrefixReuse, ReuseEnd};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn with(mut body: Value, extra: Value) -> Value {
    extra.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

fn chat(extra: Value) -> Value {
    with(json!({ "model": "toy", "messages": [{ "role": "user", "content": "Hi" }] }), extra)
}

fn generate(extra: Value) -> Value {
    with(json!({ "model": "toy", "prompt": "Hi" }), extra)
}

fn whole(body: Value) -> Value {
    with(body, json!({ "stream": false }))
}

fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.headers["content-type"], "application/x-ndjson");
    reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the last prompt that the replica received: bytes, and control tokens as they are.
fn prompt(house: &House) -> Vec<u32> {
    house.fake.submits().last().unwrap().prompt.clone()
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Returns one rendered turn, behind which the answer begins.
fn turn(role: &str, text: &str) -> Vec<u32> {
    [vec![START], bytes(&format!("{role}:{text}")), vec![END]].concat()
}

fn times(value: &mut Value) -> [u64; 4] {
    ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"].map(|name| {
        let time = value[name].as_u64().unwrap();
        value.as_object_mut().unwrap().remove(name);
        time
    })
}

#[test]
fn a_whole_chat() {
    run(async {
        let house = House::open(config()).await;
        let reuse = PrefixReuse { ended: Some(ReuseEnd::Evicted), position: 2, fetched: 0 };
        house.fake.script(|script| script.reuse = reuse);
        let options = json!({ "temperature": 0.5, "top_k": 3, "seed": 5, "num_ctx": 8192 });
        let mut answer = post(house.http, CHAT, &whole(chat(json!({ "options": options, "keep_alive": "5m" })))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.headers.remove("content-type").unwrap(), "application/json");
        let mut answer = answer.json();
        let [total, load, prompt_time, eval_time] = times(&mut answer);
        assert_eq!((total, load), (prompt_time + eval_time, 0));
        assert!(prompt_time > 0, "{prompt_time}");
        let created = answer["created_at"].take();
        assert!(created.as_str().unwrap().ends_with('Z'), "{created}");
        let message = json!({ "role": "assistant", "content": "Hello, world" });
        let expected = json!({ "model": "toy", "created_at": null, "message": message, "done": true,
            "done_reason": "stop", "prompt_eval_count": 10, "eval_count": 13,
            "reuse_ended": { "reason": "evicted", "position": 2 } });
        assert_eq!(answer, expected);
        let sampling = house.fake.submits()[0].sampling.clone().unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.seed), (0.5, 3, 5));
        house.close().await;
    });
}

#[test]
fn a_chat_comes_in_lines() {
    run(async {
        let house = House::open(config()).await;
        let reply = post(house.http, CHAT, &chat(json!({ "options": { "num_predict": 3 } }))).await;
        let lines = lines(&reply);
        let contents: Vec<_> = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
        assert_eq!(contents, ["H", "e", "l", ""]);
        assert!(lines[..3].iter().all(|line| line["done"] == false && line["model"] == "toy"));
        let last = &lines[3];
        assert_eq!(
            (&last["done"], &last["done_reason"], &last["eval_count"]),
            (&json!(true), &json!("length"), &json!(3))
        );
        assert!(!last.as_object().unwrap().contains_key("context"));
        let stopped = post(house.http, CHAT, &chat(json!({ "options": { "stop": ["wor"] } }))).await;
        let text: String = stopped.body.lines().map(text_of).collect();
        assert_eq!(text, "Hello, ");
        house.close().await;
    });
}

fn text_of(line: &str) -> String {
    let line: Value = serde_json::from_str(line).unwrap();
    line["message"]["content"].as_str().unwrap().to_owned()
}

#[test]
fn a_prompt_is_wrapped_or_raw() {
    run(async {
        let house = House::open(config()).await;
        let post_generate = async |extra: Value| post(house.http, GENERATE, &whole(generate(extra))).await.json();
        let answer = post_generate(json!({ "system": "Be" })).await;
        assert_eq!((&answer["response"], &answer["done_reason"]), (&json!("Hello, world"), &json!("stop")));
        assert_eq!(prompt(&house), [turn("system", "Be"), turn("user", "Hi"), vec![START]].concat());
        let raw = post_generate(json!({ "raw": true })).await;
        assert_eq!((&raw["response"], &raw["prompt_eval_count"]), (&json!("Hello, world"), &json!(2)));
        assert!(!raw.as_object().unwrap().contains_key("context"));
        assert_eq!(prompt(&house), bytes("Hi"));
        let lines = lines(&post(house.http, GENERATE, &generate(json!({}))).await);
        let text: String = lines.iter().map(|line| line["response"].as_str().unwrap()).collect();
        assert_eq!(text, "Hello, world");
        house.close().await;
    });
}

#[test]
fn a_context_goes_on_from_where_it_ended() {
    run(async {
        let house = House::open(config()).await;
        let first = post(house.http, GENERATE, &whole(generate(json!({})))).await.json();
        let tokens = [turn("user", "Hi"), vec![START], bytes("Hello, world"), vec![END]].concat();
        assert_eq!(first["context"], json!(tokens));
        let next = json!({ "context": first["context"], "prompt": "Go on" });
        let reply = post(house.http, GENERATE, &generate(next)).await;
        assert_eq!(prompt(&house), [tokens.clone(), turn("user", "Go on"), vec![START]].concat());
        let context = lines(&reply).pop().unwrap()["context"].as_array().unwrap().len();
        assert_eq!(context, prompt(&house).len() + 13);
        let wrong = post(house.http, GENERATE, &generate(json!({ "context": [9999] }))).await;
        assert!(wrong.status == 400 && wrong.json()["error"].as_str().unwrap().starts_with("context"), "{wrong:?}");
        house.close().await;
    });
}

#[test]
fn logprobs_are_beside_their_text() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("ab");
        let body = whole(generate(json!({ "logprobs": true, "top_logprobs": 1, "options": { "num_predict": 1 } })));
        let answer = post(house.http, GENERATE, &body).await.json();
        let top = json!([{ "token": "a", "logprob": -1.0, "bytes": [97] }]);
        let one = json!({ "token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top });
        assert_eq!(answer["logprobs"], json!([one]));
        let streamed = lines(&post(house.http, CHAT, &chat(json!({ "logprobs": true }))).await);
        let n_logprobs: usize = streamed.iter().filter_map(|line| line["logprobs"].as_array()).map(Vec::len).sum();
        assert_eq!(n_logprobs, 3);
        house.close().await;
    });
}

/// Clients send requests without a prompt in order to have a model loaded.
#[test]
fn request_without_prompt_reports_loaded_model() {
    run(async {
        let house = House::open(config()).await;
        let mut loaded = post(house.http, GENERATE, &json!({ "model": "toy", "keep_alive": -1 })).await.json();
        loaded["created_at"] = Value::Null;
        let expected =
            json!({ "model": "toy", "created_at": null, "response": "", "done": true, "done_reason": "load" });
        assert_eq!(loaded, expected);
        let chat = post(house.http, CHAT, &json!({ "model": "toy:latest", "messages": [] })).await.json();
        assert_eq!((&chat["done_reason"], &chat["message"]["content"]), (&json!("load"), &json!("")));
        assert_eq!(post(house.http, CHAT, &json!({ "model": "other" })).await.status, 404);
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn a_name_may_have_the_tag_latest() {
    run(async {
        let house = House::open(config()).await;
        for model in ["toy", "toy:latest", "alias:latest", "org/toy"] {
            let answer = post(house.http, CHAT, &whole(chat(json!({ "model": model })))).await;
            assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("toy")), "{model}");
        }
        let other = post(house.http, CHAT, &chat(json!({ "model": "toy:7b" }))).await;
        assert!(other.status == 404 && other.json()["error"].as_str().unwrap().contains("toy:7b"), "{other:?}");
        house.close().await;
    });
}

#[test]
fn models_are_listed_and_shown() {
    run(async {
        let house = House::open(config()).await;
        let listed = get(house.http, "/api/tags").await.json();
        let names: Vec<_> = listed["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
        assert_eq!(names, ["toy:latest", "alias:latest"]);
        let first = &listed["models"][0];
        assert_eq!((&first["model"], &first["digest"]), (&json!("toy:latest"), &json!("07".repeat(32))));
        let details = json!({ "parent_model": "", "format": "", "family": "llama", "families": ["llama"],
            "parameter_size": "15.4K", "quantization_level": "unknown" });
        assert_eq!(first["details"], details);
        let running = get(house.http, "/api/ps").await.json();
        assert_eq!(running["models"][0]["context_length"], CONTEXT);
        let shown = post(house.http, "/api/show", &json!({ "model": "toy:latest" })).await.json();
        assert_eq!(shown["parameters"], "temperature 0.25\ntop_k 7");
        assert_eq!((&shown["capabilities"], &shown["details"]), (&json!(["completion"]), &details));
        assert_eq!(shown["model_info"]["llama.context_length"], CONTEXT);
        assert_eq!(shown["model_info"]["general.architecture"], "llama");
        assert!(shown["template"].as_str().unwrap().contains("message.role"), "{shown}");
        assert_eq!(post(house.http, "/api/show", &json!({ "name": "other" })).await.status, 404);
        house.fake.phase(wire::state::Phase::Recovering);
        eventually(|| async { get(house.http, "/api/ps").await.json()["models"] == json!([]) }).await;
        house.close().await;
    });
}

#[test]
fn a_pull_fetches_nothing() {
    run(async {
        let house = House::open(config()).await;
        let pulled = post(house.http, "/api/pull", &json!({ "model": "toy" })).await;
        assert_eq!(lines(&pulled), [json!({ "status": "success" })]);
        let quiet = post(house.http, "/api/pull", &json!({ "name": "toy:latest", "stream": false })).await;
        assert_eq!(quiet.json(), json!({ "status": "success" }));
        let missing = post(house.http, "/api/pull", &json!({ "model": "llama3.2" })).await;
        let message = missing.json()["error"].as_str().unwrap().to_owned();
        assert!(
            missing.status == 404 && message.contains("`llama3.2`") && message.contains("lockstep pull"),
            "{message}"
        );
        assert_eq!(post(house.http, "/api/pull", &json!({})).await.status, 400);
        for path in ["/api/create", "/api/copy", "/api/push"] {
            let refused = post(house.http, path, &json!({ "model": "toy" })).await;
            assert!(refused.status == 403 && refused.json()["error"].is_string(), "{path}: {refused:?}");
        }
        let delete = "DELETE /api/delete HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(send(house.http, delete).await.status, 403);
        house.close().await;
    });
}

#[test]
fn texts_are_embedded() {
    run(async {
        let house = House::open(config()).await;
        let both = post(house.http, "/api/embed", &json!({ "model": "toy", "input": ["abc", "d"] })).await.json();
        let near = |value: &Value, expected: [f64; 2]| {
            let found = value.as_array().unwrap().iter().map(|n| n.as_f64().unwrap());
            assert!(found.zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{value}");
        };
        // The fake's vector is the number of tokens and the first of them.
        let direction = |n: f64, first: f64| [n / n.hypot(first), first / n.hypot(first)];
        near(&both["embeddings"][0], direction(3.0, 97.0));
        near(&both["embeddings"][1], direction(1.0, 100.0));
        assert_eq!(both["prompt_eval_count"], 4);
        assert!(both["total_duration"].as_u64().unwrap() > 0);
        let older = post(house.http, "/api/embeddings", &json!({ "model": "toy", "prompt": "abc" })).await.json();
        near(&older["embedding"], direction(3.0, 97.0));
        house.close().await;
    });
}

#[test]
fn long_texts_are_truncated_unless_disabled() {
    run(async {
        let house = House::open(config()).await;
        let long = "x".repeat(500);
        let cut = post(house.http, "/api/embed", &json!({ "input": [long, "y"] })).await;
        assert_eq!((cut.status, &cut.json()["prompt_eval_count"]), (200, &json!(CONTEXT + 1)));
        let lengths: Vec<_> = house.fake.submits().iter().map(|sent| sent.prompt.len()).collect();
        assert_eq!(lengths, [CONTEXT as usize, 1]);
        let refused = post(house.http, "/api/embed", &json!({ "input": long, "truncate": false })).await;
        assert!(refused.status == 400 && refused.body.contains("tokens"), "{refused:?}");
        for body in
            [json!({}), json!({ "input": 5 }), json!({ "input": ["a"], "dimensions": 8 }), json!({ "input": [5] })]
        {
            assert_eq!(post(house.http, "/api/embed", &body).await.status, 400, "{body}");
        }
        assert_eq!(post(house.http, "/api/embeddings", &json!({ "prompt": ["a"] })).await.status, 400);
        house.close().await;
    });
}

#[test]
fn server_answers_head_and_version() {
    run(async {
        let house = House::open(config()).await;
        let head = "HEAD / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        assert_eq!(send(house.http, head).await.status, 200);
        let version = get(house.http, "/api/version").await.json()["version"].as_str().unwrap().to_owned();
        assert!(version.split('.').all(|part| part.parse::<u32>().is_ok()), "{version}");
        house.close().await;
    });
}

#[test]
fn refusals_are_one_member() {
    run(async {
        let house = House::open(config()).await;
        let check = async |path: &str, body: Value, status: u16, word: &str| {
            let reply = post(house.http, path, &body).await;
            let message = reply.json()["error"].as_str().unwrap_or_default().to_owned();
            assert!(reply.status == status && message.contains(word), "{path} {body}: {reply:?}");
        };
        let image = json!([{ "role": "user", "content": "a", "images": ["aGk="] }]);
        for (extra, word) in [
            (json!({ "messages": image }), "messages[0].images"),
            (json!({ "messages": [{ "role": "a wizard", "content": "a" }] }), "messages[0].role"),
            (json!({ "messages": 5 }), "messages"),
            (json!({ "tools": [{ "type": "function" }] }), "tools"),
            (json!({ "format": "xml" }), "format"),
            (json!({ "think": 5 }), "think"),
            (json!({ "options": { "mirostat": 1 } }), "mirostat"),
            (json!({ "options": { "num_predict": -7 } }), "num_predict"),
            (json!({ "options": { "repeat_penalty": 0 } }), "repeat_penalty"),
            (json!({ "top_logprobs": 1 }), "top_logprobs"),
            (json!({ "stream": "yes" }), "stream"),
        ] {
            check(CHAT, chat(extra), 400, word).await;
        }
        for (extra, word) in [
            (json!({ "images": ["aGk="] }), "images"),
            (json!({ "template": "{{ .Prompt }}" }), "template"),
            (json!({ "suffix": "end" }), "suffix"),
            (json!({ "raw": true, "system": "Be" }), "system"),
            (json!({ "raw": true, "context": [1] }), "context"),
            (json!({ "prompt": 5 }), "prompt"),
        ] {
            check(GENERATE, generate(extra), 400, word).await;
        }
        check(CHAT, chat(json!({ "messages": [{ "role": "user", "content": "x".repeat(300) }] })), 400, "tokens").await;
        check(CHAT, chat(json!({ "model": "other" })), 404, "other").await;
        let resumed = post_after(house.http, CHAT, "x:0", &chat(json!({}))).await;
        assert!(resumed.status == 400 && resumed.body.contains("Last-Event-ID"), "{resumed:?}");
        house.fake.script(|script| script.refuse = Some((wire::refused::Reason::Full, 3000)));
        check(CHAT, chat(json!({})), 429, "later").await;
        house.close().await;
    });
}

#[test]
fn a_stream_that_fails_ends_with_an_error() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.last = wire::Finish::Failed);
        let lines = lines(&post(house.http, CHAT, &chat(json!({}))).await);
        let last = lines.last().unwrap();
        assert!(last["error"].is_string() && last["done"].is_null(), "{last}");
        assert_eq!(post(house.http, CHAT, &whole(chat(json!({})))).await.status, 500);
        house.close().await;
    });
}

#[test]
fn a_client_that_leaves_cancels() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        drop(post_until(house.http, CHAT, &chat(json!({})), "\"l\"").await);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        let mut stream = post_until(house.http, GENERATE, &generate(json!({})), "\"l\"").await;
        house.fake.script(|script| script.hold_at = usize::MAX);
        house.fake.die();
        house.fake.welcome();
        // A lost replica costs a pause here too.
        assert!(read_until(&mut stream, "\"done\":true").await.contains("\"done_reason\":\"stop\""));
        house.close().await;
    });
}

#[test]
fn missing_key_is_refused_in_ollama_format() {
    run(async {
        let house = House::open(router::Config { keys: ApiKeys::parse("alice:k1").unwrap(), ..config() }).await;
        let without = post(house.http, CHAT, &chat(json!({}))).await;
        assert!(without.status == 401 && without.json()["error"].as_str().unwrap().contains("key"), "{without:?}");
        assert_eq!(get(house.http, "/api/tags").await.status, 401);
        assert_eq!(post_with_key(house.http, CHAT, "k1", &chat(json!({}))).await.status, 200);
        house.close().await;
    });
}
