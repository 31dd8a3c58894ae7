//! Several choices of one prompt in one stream of gRPC, from a real server: the tokens of the HTTP API's `n`, and of
//! requests for one choice each. The published client reads them.

use crate::common::node::{Node, PATIENCE, complete, free_address};
use lockstep_client::v1::generate_reply::Event;
use lockstep_client::v1::generate_request::Input;
use lockstep_client::v1::{GenerateRequest, Sampling};
use lockstep_client::{ConnectOptions, LockstepClient};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const MODEL: &str = "tests/reference/llama-f32-tied";
const SEED: u64 = 11;
const N_CHOICES: u32 = 3;
const N_TOKENS: u32 = 12;

/// The tokens of each choice of a request.
async fn tokens(client: &LockstepClient, request: GenerateRequest) -> BTreeMap<u32, Vec<u32>> {
    let (mut answer, mut all) = (client.generate(request), BTreeMap::<u32, Vec<u32>>::new());
    while let Some(event) = answer.next_event().await.unwrap() {
        if let Event::Delta(delta) = event {
            all.entry(delta.choice).or_default().extend(delta.token_ids);
        }
    }
    all
}

fn tokens_over_http(http: &str) -> BTreeMap<u32, Vec<u32>> {
    let body = json!({ "prompt": "hello", "n": N_CHOICES, "seed": SEED, "temperature": 1.0, "max_tokens": N_TOKENS,
        "ignore_eos": true, "return_token_ids": true });
    let number = |value: &Value| value.as_u64().unwrap() as u32;
    let ids = |choice: &Value| choice["token_ids"].as_array().unwrap().iter().map(number).collect();
    let choices = complete(http, &body);
    choices.as_array().unwrap().iter().map(|choice| (number(&choice["index"]), ids(choice))).collect()
}

#[test]
fn choices_over_grpc_are_those_over_http() {
    let grpc = free_address().to_string();
    let doors = ["--http", "127.0.0.1:0", "--grpc", &grpc, "--threads", "1"];
    let mut node = Node::start(&[&["serve", MODEL, "--activations", "f32"], &doors[..]].concat());
    let http = node.http();
    node.until_ready(&http);
    let over_http = tokens_over_http(&http);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (together, alone) = runtime.block_on(async {
        let client = LockstepClient::connect([format!("http://{grpc}")], &ConnectOptions::default()).unwrap();
        let sampling = Sampling {
            seed: Some(SEED),
            temperature: Some(1.0),
            max_tokens: Some(N_TOKENS),
            ignore_eos: true,
            ..Sampling::default()
        };
        let input = Some(Input::Text("hello".into()));
        let request = GenerateRequest { input, sampling: Some(sampling), ..GenerateRequest::default() };
        let reading = async {
            let together = tokens(&client, GenerateRequest { n: N_CHOICES, ..request.clone() }).await;
            let mut alone = BTreeMap::new();
            for choice in 0..N_CHOICES {
                let mut one = tokens(&client, GenerateRequest { choice, ..request.clone() }).await;
                alone.insert(choice, one.remove(&0).unwrap());
            }
            (together, alone)
        };
        tokio::time::timeout(PATIENCE, reading).await.unwrap()
    });
    assert_eq!(together.len(), N_CHOICES as usize);
    assert!(together.values().all(|tokens| tokens.len() == N_TOKENS as usize));
    assert_ne!(together[&0], together[&1], "each choice is a draw of its own");
    assert_eq!(together, over_http);
    assert_eq!(together, alone);
}
