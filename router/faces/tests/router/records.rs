//! Records: a finished answer's record can be sent again as the same request, whichever page it came by, and contains
//! nothing that was not to be kept.

use crate::client::{Reply, get, post, post_with_key, send};
use crate::fake::Fake;
use crate::grpc::{generate, text_request};
use crate::model::END;
use crate::{House, config, eventually, run};
use proto::cluster as wire;
use proto::v1;
use router::{ApiKeys, Config, RecordConfig, recorded_lines};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;

const COMPLETIONS: &str = "/v1/completions";

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let dir = std::env::temp_dir().join(format!("lockstep-records-{name}-{}", std::process::id()));
        let _none = std::fs::remove_dir_all(&dir);
        Folder(dir)
    }

    fn config(&self, prompts: bool) -> Config {
        let record = RecordConfig { dir: self.0.clone(), prompts, bytes_max: 1 << 20, files_max: 4 };
        Config { record: Some(record), ..config() }
    }

    fn lines(&self) -> Vec<String> {
        recorded_lines(&self.0).unwrap().collect::<Result<_, _>>().unwrap()
    }

    fn all(&self) -> Vec<Value> {
        self.lines().iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

async fn get_with_key(address: SocketAddr, path: &str, key: &str) -> Reply {
    let head = format!("host: localhost\r\nauthorization: Bearer {key}\r\nconnection: close");
    send(address, &format!("GET {path} HTTP/1.1\r\n{head}\r\n\r\n")).await
}

/// Returns the part of a request of which a stream is a function.
fn without_id(request: &wire::Request) -> wire::Request {
    wire::Request { id: 0, ..request.clone() }
}

fn bodies() -> Vec<(&'static str, Value)> {
    let messages = json!([{ "role": "user", "content": "A" }]);
    vec![
        (COMPLETIONS, json!({ "prompt": "x" })),
        (
            COMPLETIONS,
            json!({
                "prompt": ["x", "yz"], "n": 2, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3,
                "stop": ["wor"], "stop_token_ids": [7], "presence_penalty": 0.3, "frequency_penalty": -0.1,
                "repetition_penalty": 1.1, "typical_p": 0.9, "top_n_sigma": 3, "xtc_probability": 0.1, "min_tokens": 1,
                "dry_multiplier": 0.5, "dry_sequence_breakers": ["!"], "logit_bias": { "65": 1.5 }, "bad_words": ["q"],
                "allowed_token_ids": [65, 72, 101, 108, 111], "max_tokens": 12, "ignore_eos": true,
            }),
        ),
        (COMPLETIONS, json!({ "prompt": [1, 2], "grammar": "root ::= \"Hello, world\"", "stream": true })),
        ("/v1/chat/completions", json!({ "messages": messages, "response_format": { "type": "json_object" } })),
        ("/v1/chat/completions", json!({ "messages": messages, "stream": true, "seed": 5 })),
        ("/v1/responses", json!({ "input": "A", "model": "toy" })),
        ("/v1/messages", json!({ "messages": messages, "max_tokens": 50 })),
        ("/api/chat", json!({ "messages": messages, "model": "toy" })),
    ]
}

#[test]
fn recorded_answer_of_any_page_replays_the_same_request() {
    let folder = Folder::new("pages");
    run(async {
        let house = House::open(folder.config(true)).await;
        let mut sent = Vec::new();
        for (path, body) in bodies() {
            assert_eq!(post(house.http, path, &body).await.status, 200, "{body}");
            sent.push(house.fake.submits());
        }
        let sampling = v1::Sampling { seed: Some(5), max_tokens: Some(3), ..Default::default() };
        generate(&house, v1::GenerateRequest { sampling: Some(sampling), ..text_request("x") }).await.unwrap();
        sent.push(house.fake.submits());
        house.close().await;
        let records = folder.all();
        assert_eq!(records.len(), sent.len());
        let house = House::open(config()).await;
        let mut n_before = (0, 0);
        for (record, sent) in records.iter().zip(sent) {
            let mut replay = record["request"].clone();
            (replay["certificate"], replay["return_token_ids"]) = (true.into(), true.into());
            let reply = post(house.http, COMPLETIONS, &replay).await;
            assert_eq!(reply.status, 200, "{replay}: {}", reply.body);
            let now = house.fake.submits();
            let (first, second) = (&sent[n_before.0..], &now[n_before.1..]);
            assert!(first.iter().map(without_id).eq(second.iter().map(without_id)), "{replay}:\n{first:?}\n{second:?}");
            n_before = (sent.len(), now.len());
            let choices = reply.json()["choices"].as_array().unwrap().clone();
            for (old, new) in record["response"]["choices"].as_array().unwrap().iter().zip(&choices) {
                for name in ["index", "token_ids", "finish_reason", "certificate"] {
                    assert_eq!(old[name], new[name], "{name} of {replay}");
                }
            }
        }
        house.close().await;
    });
}

/// A prompt of token ids has no thought: a repeated request is refused, instead of reporting a difference.
#[test]
fn thinking_budget_is_recorded_and_its_replay_is_refused() {
    let folder = Folder::new("budget");
    run(async {
        let fake = Fake::start();
        fake.script(|script| script.context = 4000);
        fake.answer("so</think>yes");
        fake.welcome();
        let members = vec![fake.coordinator()].into();
        let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{{ '</think>' if false }}";
        let text = crate::model::text().with_template(checkpoint::ChatTemplate::new(template, None, None).unwrap());
        let house = House::with_texts(folder.config(true), vec![fake], members, text).await;
        house.wait_until_ready().await;
        let messages = json!([{ "role": "user", "content": "A" }]);
        let chat = json!({ "messages": messages, "thinking_budget": 7 });
        let reply = post(house.http, "/v1/chat/completions", &chat).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        eventually(|| async { folder.all().len() == 1 }).await;
        let replay = &folder.all()[0]["request"];
        assert_eq!(replay["thinking_token_budget"], 7, "{replay}");
        let refused = post(house.http, COMPLETIONS, replay).await;
        assert!(refused.status == 400 && refused.body.contains("thinking_token_budget"), "{}", refused.body);
        house.close().await;
    });
}

#[test]
fn without_prompts_there_are_hashes_and_no_word_of_them() {
    let folder = Folder::new("hashes");
    run(async {
        let house = House::open(folder.config(false)).await;
        let body =
            json!({ "prompt": "secret", "stop": "hush", "bad_words": ["q"], "regex": ".*", "certificate": true });
        let reply = post(house.http, COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        house.close().await;
        let [record] = &folder.all()[..] else { panic!("{:?}", folder.lines()) };
        let (request, choice) = (&record["request"], &record["response"]["choices"][0]);
        for name in ["prompt", "stop", "bad_words", "structured_outputs"] {
            assert!(request[name].is_null(), "{name} in {record}");
        }
        assert!(choice["token_ids"].is_null() && choice["text"].is_null() && request["temperature"].is_number());
        assert_eq!(choice["certificate"], reply.json()["choices"][0]["certificate"]);
    });
}

#[test]
fn record_is_shown_only_to_its_tenant_without_names() {
    let folder = Folder::new("tenants");
    run(async {
        let keys = ApiKeys::parse("alice:sesame\nbob:open").unwrap();
        let house = House::open(Config { keys, ..folder.config(true) }).await;
        let reply = post_with_key(house.http, COMPLETIONS, "sesame", &json!({ "prompt": "x" })).await;
        let id = reply.json()["id"].as_str().unwrap().to_owned();
        let page = format!("/records/{id}");
        let shown = |key: &'static str| get_with_key(house.http, &page, key);
        eventually(|| async { shown("sesame").await.status == 200 }).await;
        let record = shown("sesame").await;
        assert!(id.ends_with(record.json()["id"].as_str().unwrap()), "{}", record.body);
        for secret in ["alice", "sesame"] {
            assert!(!folder.lines()[0].contains(secret));
        }
        assert_eq!((shown("open").await.status, shown("none").await.status), (404, 401));
        assert_eq!(get_with_key(house.http, "/records/cmpl-00", "sesame").await.status, 404);
        house.close().await;
        let plain = House::open(config()).await;
        let none = get(plain.http, &page).await;
        assert!(none.status == 404 && none.body.contains("--record"), "{}", none.body);
        plain.close().await;
    });
}

#[test]
fn only_a_whole_answer_is_recorded() {
    let folder = Folder::new("whole");
    run(async {
        let house = House::open(folder.config(true)).await;
        house.fake.script(|script| script.last = wire::Finish::Failed);
        assert_ne!(post(house.http, COMPLETIONS, &json!({ "prompt": "x" })).await.status, 200);
        house.fake.script(|script| script.last = wire::Finish::Unspecified);
        assert_eq!(post(house.http, COMPLETIONS, &json!({ "prompt": "y" })).await.status, 200);
        house.close().await;
        let [record] = &folder.all()[..] else { panic!("{:?}", folder.lines()) };
        let ids = record["response"]["choices"][0]["token_ids"].as_array().unwrap();
        assert_eq!((ids.last(), &record["request"]["prompt"]), (Some(&json!(END)), &json!([[u32::from(b'y')]])));
    });
}
