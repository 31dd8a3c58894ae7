//! Certificates: an answer has the same one through every face, whole or streamed, and another answer has another.
//! `resume` tests that a resumed stream has the same one.

use crate::client::{Reply, post};
use crate::grpc::{generate, text_request};
use crate::model::END;
use crate::{House, config, run};
use proto::v1;
use serde_json::{Value, json};
use types::{Hex, TokensHash};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const DIGEST: [u8; 32] = [7; 32];

fn hash(tokens: &[u32]) -> String {
    Hex(&TokensHash::of(tokens).0).to_string()
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Returns the certificate of an answer of these tokens, made by hand.
fn expected(prompt: &[u32], answer: &[u32], reason: &str) -> Value {
    json!({
        "version": 1, "policy_digest": Hex(&DIGEST).to_string(), "seed": 5, "choice": 0, "prompt_hash": hash(prompt),
        "answer_hash": hash(answer), "tokens": answer.len(), "finish_reason": reason,
    })
}

/// Returns the first certificate in a reply, whole or streamed, wherever its page has it.
fn first_certificate(reply: &Reply) -> Value {
    let events = if reply.body.starts_with('{') { vec![reply.body.clone()] } else { reply.events() };
    let values = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let places = |of: Value| {
        [&of["certificate"], &of["response"]["certificate"], &of["choices"][0]["certificate"]].map(Value::clone)
    };
    values.flat_map(places).find(|place| !place.is_null()).unwrap_or_else(|| panic!("none in {}", reply.body))
}

/// The required structure of an answer is part of its certificate.
#[test]
fn certificate_identifies_grammar_and_its_engine() {
    run(async {
        let house = House::open(config()).await;
        let mut hashes = Vec::new();
        for more in [json!({ "regex": "[a-z]+" }), json!({ "regex": "[A-Z]+" }), json!({ "regex": "[a-z]+" })] {
            let mut body = json!({ "prompt": "x", "seed": 5, "certificate": true });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let certificate = first_certificate(&post(house.http, COMPLETIONS, &body).await);
            let text = house.fake.submits().last().unwrap().constraint.clone().unwrap();
            let text = types::Grammar::new(String::from_utf8(text).unwrap());
            let model = crate::model::text();
            let table = checkpoint::TokenTable::new(model.tokenizer.clone());
            let n_vocab = model.spec.vocab as usize;
            let vocabulary = grammar::Vocabulary::new(table.tokens().take(n_vocab), n_vocab, &model.spec.eos).unwrap();
            let expected = Hex(&grammar::digest(&text, &vocabulary.hash())).to_string();
            assert_eq!(certificate["grammar_hash"], expected, "as a rank has it");
            hashes.push(expected);
        }
        assert!(hashes[0] == hashes[2] && hashes[0] != hashes[1]);
        house.close().await;
    });
}

#[test]
fn every_page_and_both_ways_of_sending_have_the_same() {
    run(async {
        let house = House::open(config()).await;
        let mut answer = bytes("Hello, world");
        answer.push(END);
        let messages = json!([{ "role": "user", "content": "A" }]);
        let pages = [
            (COMPLETIONS, json!({ "prompt": "x" })),
            (CHAT, json!({ "messages": messages })),
            ("/v1/responses", json!({ "model": "toy", "input": "A" })),
            ("/v1/messages", json!({ "messages": messages, "max_tokens": 50 })),
        ];
        for (path, mut body) in pages {
            (body["seed"], body["certificate"]) = (5.into(), true.into());
            let whole = post(house.http, path, &body).await;
            body["stream"] = true.into();
            let streamed = post(house.http, path, &body).await;
            let prompt = house.fake.submits().last().unwrap().prompt.clone();
            let expected = expected(&prompt, &answer, "stop");
            assert_eq!(
                (first_certificate(&whole), first_certificate(&streamed)),
                (expected.clone(), expected.clone()),
                "{path}"
            );
            for headers in [whole.headers, streamed.headers] {
                let header_values =
                    ["policy-digest", "prompt-hash"].map(|name| &*headers[&format!("x-lockstep-{name}")]);
                let known = [&expected["policy_digest"], &expected["prompt_hash"]].map(|of| of.as_str().unwrap());
                assert_eq!((header_values, &*headers["x-lockstep-seed"]), (known, "5"), "{path}");
            }
            body.as_object_mut().unwrap().remove("certificate");
            assert!(!post(house.http, path, &body).await.body.contains("certificate"), "{path}");
        }
        house.close().await;
    });
}

#[test]
fn grpc_has_the_same() {
    run(async {
        let house = House::open(config()).await;
        let sampling = v1::Sampling { seed: Some(5), max_tokens: Some(3), ..Default::default() };
        let request = v1::GenerateRequest { sampling: Some(sampling), certificate: true, ..text_request("x") };
        let reply = generate(&house, request.clone()).await.unwrap();
        let over_http = json!({ "prompt": "x", "seed": 5, "max_tokens": 3, "certificate": true });
        let over_http = first_certificate(&post(house.http, COMPLETIONS, &over_http).await);
        let certificate = reply.finished.certificate.unwrap();
        assert_eq!(over_http, expected(&bytes("x"), &bytes("Hel"), "length"));
        assert_eq!(certificate.answer_hash, TokensHash::of(&bytes("Hel")).0);
        assert_eq!((&certificate.policy_digest[..], certificate.seed, certificate.tokens), (&DIGEST[..], 5, 3));
        assert_eq!((certificate.reason(), certificate.choice), (v1::finished::Reason::Length, 0));
        assert_eq!((&certificate.prompt_hash, certificate.version), (&reply.started.prompt_hash, 1));
        let plain = generate(&house, v1::GenerateRequest { certificate: false, ..request }).await.unwrap();
        assert_eq!(plain.finished.certificate, None);
        house.close().await;
    });
}

#[test]
fn each_choice_of_each_prompt_has_its_own() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "prompt": ["x", "yz"], "n": 2, "seed": 5, "stop": "wor", "certificate": true });
        let reply = post(house.http, COMPLETIONS, &body).await;
        // The tokens that completed the stop string count, and its text is not shown.
        let answer = bytes("Hello, wor");
        for (slot, choice) in reply.json()["choices"].as_array().unwrap().iter().enumerate() {
            let mut expected = expected(&bytes(["x", "yz"][slot / 2]), &answer, "stop");
            expected["choice"] = (slot % 2).into();
            assert_eq!((&choice["certificate"], &choice["text"]), (&expected, &json!("Hello, ")));
        }
        assert!(!reply.headers.contains_key("x-lockstep-prompt-hash"), "there are two prompts");
        house.close().await;
    });
}

#[test]
fn another_token_is_another_certificate_and_another_frame_is_not() {
    run(async {
        let house = House::open(config()).await;
        let body = json!({ "prompt": "x", "seed": 5, "certificate": true });
        let one = first_certificate(&post(house.http, COMPLETIONS, &body).await);
        house.fake.script(|script| script.tokens_per_frame = 5);
        assert_eq!(first_certificate(&post(house.http, COMPLETIONS, &body).await), one);
        house.fake.answer("Hello, worle");
        let other = first_certificate(&post(house.http, COMPLETIONS, &body).await);
        let mut as_one = other.clone();
        as_one["answer_hash"] = one["answer_hash"].clone();
        assert!(other != one && as_one == one, "{other}");
        house.close().await;
    });
}

#[test]
fn invalid_certificate_field_is_refused_by_name() {
    run(async {
        let house = House::open(config()).await;
        let messages = json!([{ "role": "user", "content": "A" }]);
        let refused = [
            (COMPLETIONS, json!({ "prompt": "x", "certificate": "yes" })),
            (COMPLETIONS, json!({ "prompt": "x", "certificate": true, "echo": true, "max_tokens": 0 })),
            (CHAT, json!({ "messages": messages, "certificate": 1 })),
            ("/v1/responses", json!({ "model": "toy", "input": "A", "certificate": [] })),
            ("/v1/messages", json!({ "messages": messages, "max_tokens": 5, "certificate": "no" })),
        ];
        for (path, body) in refused {
            let reply = post(house.http, path, &body).await;
            assert!(reply.status == 400 && reply.body.contains("certificate"), "{body}: {}", reply.body);
        }
        house.close().await;
    });
}
