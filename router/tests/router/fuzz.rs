//! Bodies that no client would send: each gets an answer or a typed error, and a neighbour's stream goes on.

use crate::client::{post_text, post_until, read_until};
use crate::{House, config, run};
use serde_json::{Map, Value, json};

const PAGES: [&str; 5] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"];
const ROUNDS: usize = 1200;

/// Bodies that are right, with every field that there is.
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
    ]
}

fn nasty(random: &mut Random) -> Value {
    let all = [
        Value::Null,
        json!(true),
        json!(-1),
        json!(0),
        json!(1e308),
        json!(-1e-320),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(2147483648u32),
        json!(0.5),
        json!(""),
        json!("NaN"),
        json!("\u{0}\u{ffff}\u{202e}😀"),
        json!("x".repeat(5000)),
        json!([]),
        json!({}),
        json!([[]]),
        json!([null]),
        json!([[[[1]]]]),
        json!({ "": null }),
        json!(vec!["a"; 300]),
        json!(vec![1; 300]),
        json!({ "type": "json_schema" }),
    ];
    all[random.below(all.len())].clone()
}

/// Changes one place of a tree: another value, a member gone, or one more.
fn mutate(value: &mut Value, random: &mut Random) {
    match value {
        Value::Object(members) if !members.is_empty() && random.below(4) > 0 => mutate_member(members, random),
        Value::Array(items) if !items.is_empty() && random.below(4) > 0 => {
            let i = random.below(items.len());
            mutate(&mut items[i], random);
        }
        other => *other = nasty(random),
    }
}

fn mutate_member(members: &mut Map<String, Value>, random: &mut Random) {
    let name = members.keys().nth(random.below(members.len())).cloned().unwrap();
    match random.below(8) {
        0 => drop(members.remove(&name)),
        1 => drop(members.insert(format!("{name}x"), nasty(random))),
        _ => mutate(&mut members[&name], random),
    }
}

/// Bytes changed, lost or doubled: mostly no JSON any more.
fn scramble(text: &str, random: &mut Random) -> String {
    let mut letters: Vec<char> = text.chars().collect();
    let at = random.below(letters.len());
    match random.below(3) {
        0 => letters[at] = ['"', '{', ']', '\\', '9', '\u{1}', 'é'][random.below(7)],
        1 => letters.truncate(at),
        _ => letters.insert(at, letters[at]),
    }
    letters.into_iter().collect()
}

#[test]
fn mutated_bodies() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let neighbour = json!({ "prompt": "neighbour", "stream": true });
        let mut stream = post_until(house.http, PAGES[1], &neighbour, "\"l\"").await;
        house.fake.script(|script| script.hold_at = usize::MAX);
        let (mut random, right) = (Random(11), right());
        let mut n_taken = 0;
        for round in 0..ROUNDS {
            let mut body = right[round % right.len()].clone();
            (0..random.below(4)).for_each(|_| mutate(&mut body, &mut random));
            let mut text = body.to_string();
            if random.below(5) == 0 {
                text = scramble(&text, &mut random);
            }
            let page = PAGES[if random.below(4) > 0 { round % right.len() } else { random.below(PAGES.len()) }];
            let reply = post_text(house.http, page, &text).await;
            n_taken += usize::from(reply.status == 200);
            assert!([200, 400, 404].contains(&reply.status), "{page} {text}: {reply:?}");
            if reply.status != 200 {
                assert!(reply.json()["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{text}");
            }
        }
        assert!((ROUNDS / 20..ROUNDS).contains(&n_taken), "{n_taken} of {ROUNDS} were taken");
        // The neighbour's replica says the rest in another life.
        house.fake.die();
        house.fake.welcome();
        assert!(read_until(&mut stream, "[DONE]").await.contains("\"finish_reason\":\"stop\""));
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

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}
