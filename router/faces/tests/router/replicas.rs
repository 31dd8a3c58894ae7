//! Several replicas behind one router: which gets a request, where its cancel goes, and what happens to requests when
//! one is lost.

use crate::client::{get, post};
use crate::grpc::{client, generate, text_request};
use crate::{House, config, eventually, run};
use proto::cluster::state::Phase;
use proto::v1;
use proto::v1::generate_reply::Event;
use router::{Config, Timeouts};
use serde_json::{Value, json};
use std::time::Duration;
use tonic::Streaming;

type Replies = Streaming<v1::GenerateReply>;

/// A stream that the replica pauses after three tokens, once its first was read; and how it started.
pub async fn open_held_stream(house: &House, text: &str) -> (v1::Started, Replies) {
    let mut replies = client(house).generate(text_request(text)).await.unwrap().into_inner();
    let Some(Event::Started(started)) = replies.message().await.unwrap().unwrap().event else { panic!("no Started") };
    replies.message().await.unwrap().unwrap();
    (started, replies)
}

/// Returns the rest of a stream after its first token.
pub async fn read_rest(mut replies: Replies) -> String {
    let mut text = String::new();
    while let Some(reply) = replies.message().await.unwrap() {
        if let Some(Event::Delta(delta)) = reply.event {
            text.push_str(&delta.text);
        }
    }
    text
}

fn hold(house: &House, hold_at: usize) {
    house.fake.script(|script| script.hold_at = hold_at);
    house.other().script(|script| script.hold_at = hold_at);
}

fn n_submits(house: &House) -> (usize, usize) {
    (house.fake.submits().len(), house.other().submits().len())
}

fn replica(started: &v1::Started) -> &str {
    &started.resume.as_ref().unwrap().replica
}

#[test]
fn requests_go_where_the_least_work_is_and_cancels_follow_them() {
    run(async {
        let house = House::open_two(config()).await;
        // One request after the other: the first replica is always free.
        for _ in 0..3 {
            generate(&house, text_request("x")).await.unwrap();
        }
        assert_eq!(n_submits(&house), (3, 0));
        hold(&house, 3);
        let (one, first) = open_held_stream(&house, "x").await;
        let (two, second) = open_held_stream(&house, "x").await;
        assert_eq!((replica(&one), replica(&two), n_submits(&house)), ("one", "two", (4, 1)));
        // Both replicas have given this router the same number.
        assert_ne!(one.id, two.id);
        drop(second);
        eventually(|| async { house.other().cancels().len() == 1 }).await;
        assert_eq!(house.other().cancels(), [house.other().submits()[0].id]);
        assert!(house.fake.cancels().is_empty());
        // The second is free again, and the first is not.
        let (three, _third) = open_held_stream(&house, "x").await;
        assert_eq!(replica(&three), "two");
        drop(first);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.close().await;
    });
}

#[test]
fn work_from_other_routers_counts() {
    run(async {
        let house = House::open_two(config()).await;
        house.fake.script(|script| script.backlog = 1000);
        house.fake.phase(Phase::Ready);
        let page = || async { get(house.http, "/cluster").await.json() };
        eventually(|| async { page().await["replicas"][0]["backlog_tokens"] == 1000 }).await;
        generate(&house, text_request("x")).await.unwrap();
        assert_eq!(n_submits(&house), (0, 1));
        house.close().await;
    });
}

#[test]
fn a_draining_or_absent_replica_gets_nothing_and_is_shown() {
    run(async {
        let house = House::open_two(config()).await;
        house.fake.phase(Phase::Draining);
        house.wait_for_phases(["draining", "ready"]).await;
        assert_eq!(get(house.http, "/ready").await.status, 200);
        generate(&house, text_request("x")).await.unwrap();
        house.fake.die();
        house.wait_for_phases(["absent", "ready"]).await;
        generate(&house, text_request("x")).await.unwrap();
        assert_eq!((n_submits(&house), get(house.http, "/ready").await.status), ((0, 2), 200));
        let topology = client(&house).get_topology(v1::GetTopologyRequest::default()).await.unwrap().into_inner();
        let shown: Vec<_> = topology.replicas.iter().map(|of| (of.replica.as_str(), of.phase.as_str())).collect();
        assert_eq!(shown, [("one", "absent"), ("two", "ready")]);
        house.other().phase(Phase::Draining);
        house.wait_for_phases(["absent", "draining"]).await;
        let reply = get(house.http, "/ready").await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("draining")));
        assert_eq!(generate(&house, text_request("x")).await.err().unwrap().code(), tonic::Code::Unavailable);
        assert_eq!(n_submits(&house), (0, 2));
        house.close().await;
    });
}

#[test]
fn streams_of_a_lost_replica_go_on_at_another() {
    run(async {
        let house = House::open_two(config()).await;
        hold(&house, 3);
        let (_, first) = open_held_stream(&house, "x").await;
        let (_, second) = open_held_stream(&house, "x").await;
        assert_eq!(n_submits(&house), (1, 1));
        hold(&house, usize::MAX);
        house.fake.die();
        assert_eq!(read_rest(first).await, "ello, world");
        assert_eq!(n_submits(&house), (1, 2));
        let (before, after) = (house.fake.submits().remove(0), house.other().submits().remove(1));
        assert_eq!((&before.prompt, &before.sampling), (&after.prompt, &after.sampling));
        assert_eq!(after.output, b"Hel".map(u32::from));
        // The other replica's own request is not touched, and ends by itself.
        drop(second);
        eventually(|| async { house.other().cancels().len() == 1 }).await;
        assert_eq!(house.other().cancels(), [house.other().submits()[0].id]);
        house.close().await;
    });
}

#[test]
fn a_request_without_a_token_moves_too_and_its_cancel_follows() {
    run(async {
        let house = House::open_two(config()).await;
        hold(&house, 0);
        let start_request = |text: &'static str| {
            let mut client = client(&house);
            tokio::spawn(async move { client.generate(text_request(text)).await.unwrap().into_inner() })
        };
        let first = start_request("moves");
        eventually(|| async { n_submits(&house) == (1, 0) }).await;
        let tasks = [first, start_request("stays")];
        eventually(|| async { n_submits(&house) == (1, 1) }).await;
        house.fake.die();
        eventually(|| async { n_submits(&house) == (1, 2) }).await;
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
        eventually(|| async { house.other().cancels().len() == 2 }).await;
        house.close().await;
    });
}

#[test]
fn choices_logprobs_and_stop_strings_are_right_after_a_move() {
    run(async {
        let body = json!({
            "prompt": "x", "n": 3, "logprobs": 2, "stop": ["wor"], "stream": true, "return_token_ids": true,
            "presence_penalty": 0.5, "seed": 7, "stream_options": {"include_usage": true},
        });
        let undisturbed = House::open_two(config()).await;
        let expect = join_chunks(&post(undisturbed.http, "/v1/completions", &body).await);
        undisturbed.close().await;
        for hold_at in [0, 3, 9] {
            let house = House::open_two(config()).await;
            hold(&house, hold_at);
            let stream = tokio::spawn({
                let (http, body) = (house.http, body.clone());
                async move { post(http, "/v1/completions", &body).await }
            });
            eventually(|| async { n_submits(&house) == (3, 0) }).await;
            hold(&house, usize::MAX);
            house.fake.die();
            assert_eq!(join_chunks(&stream.await.unwrap()), expect, "held at {hold_at}");
            assert_eq!(n_submits(&house), (3, 3));
            house.close().await;
        }
    });
}

/// The whole text of each choice, and the usage.
fn join_chunks(reply: &crate::client::Reply) -> Vec<Value> {
    let mut choices = vec![json!({ "text": "", "tokens": [], "logprobs": [], "offsets": [], "end": null }); 3];
    for chunk in reply.chunks() {
        if let Some(usage) = chunk["usage"].as_object() {
            choices.push(json!(usage));
        }
        for part in chunk["choices"].as_array().unwrap() {
            let choice = &mut choices[part["index"].as_u64().unwrap() as usize];
            let text = format!("{}{}", choice["text"].as_str().unwrap(), part["text"].as_str().unwrap());
            choice["text"] = text.into();
            for (to, from) in [
                ("tokens", &part["token_ids"]),
                ("logprobs", &part["logprobs"]["token_logprobs"]),
                ("offsets", &part["logprobs"]["text_offset"]),
            ] {
                choice[to].as_array_mut().unwrap().extend(from.as_array().cloned().unwrap_or_default());
            }
            if !part["finish_reason"].is_null() {
                choice["end"] = part["finish_reason"].clone();
            }
        }
    }
    choices
}

#[test]
fn a_stream_that_no_replica_can_go_on_with_fails_once_and_in_time() {
    run(async {
        let timeouts = Timeouts { replica_absence_max: Duration::from_millis(300), ..config().timeouts };
        let house = House::open_two(Config { timeouts, ..config() }).await;
        hold(&house, 3);
        let (_, mut first) = open_held_stream(&house, "x").await;
        let (_, mut second) = open_held_stream(&house, "x").await;
        house.other().die();
        house.fake.die();
        for replies in [&mut first, &mut second] {
            let end = loop {
                match replies.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("it ended well"),
                    Err(status) => break status,
                }
            };
            assert_eq!(end.code(), tonic::Code::Unavailable);
            assert!(end.message().contains("lost"), "{end:?}");
        }
        house.close().await;
    });
}

#[test]
fn the_first_replica_that_becomes_ready_goes_on() {
    run(async {
        let house = House::open_two(config()).await;
        hold(&house, 3);
        let (_, first) = open_held_stream(&house, "x").await;
        house.other().die();
        house.wait_for_phases(["ready", "absent"]).await;
        house.fake.die();
        house.wait_for_phases(["absent", "absent"]).await;
        hold(&house, usize::MAX);
        house.other().welcome();
        assert_eq!(read_rest(first).await, "ello, world");
        assert_eq!(n_submits(&house), (1, 1));
        house.close().await;
    });
}

#[test]
fn streams_of_a_replica_that_drains_for_too_long_move() {
    run(async {
        let house = House::open_two(config()).await;
        hold(&house, 3);
        let (_, first) = open_held_stream(&house, "x").await;
        house.fake.phase(Phase::Draining);
        house.wait_for_phases(["draining", "ready"]).await;
        hold(&house, usize::MAX);
        house.fake.cancel_all();
        assert_eq!(read_rest(first).await, "ello, world");
        assert_eq!(n_submits(&house), (1, 1));
        house.close().await;
    });
}

#[test]
fn a_replica_of_another_policy_gets_nothing() {
    run(async {
        let house = House::open_two(config()).await;
        house.other().script(|script| script.digest = [8; 32]);
        house.other().die();
        house.wait_for_phases(["ready", "absent"]).await;
        house.other().welcome();
        house.wait_for_phases(["ready", "ready"]).await;
        hold(&house, 3);
        let (_, _first) = open_held_stream(&house, "x").await;
        let (_, _second) = open_held_stream(&house, "x").await;
        assert_eq!(n_submits(&house), (2, 0));
        let page = get(house.http, "/cluster").await.json();
        let digests: Vec<&Value> = (0..2).map(|i| &page["replicas"][i]["policy_digest"]).collect();
        assert_ne!(digests[0], digests[1]);
        house.close().await;
    });
}

/// A replica of the build before would answer without the grammar.
#[test]
fn what_a_replica_s_protocol_does_not_have_is_not_sent_to_it() {
    run(async {
        let house = House::open_unready(config()).await;
        house.fake.script(|script| script.protocol = proto::OLDEST);
        house.fake.welcome();
        house.wait_until_ready().await;
        let body = json!({ "prompt": "x" });
        assert_eq!(post(house.http, "/v1/completions", &body).await.status, 200);
        let body = json!({ "prompt": "x", "structured_outputs": { "regex": "Hel+o" } });
        let refused = post(house.http, "/v1/completions", &body).await;
        assert_eq!(refused.status, 503, "{refused:?}");
        assert_eq!(house.fake.submits().len(), 1);
        let page = get(house.http, "/cluster").await.json();
        assert_eq!(page["replicas"][0]["protocol"], proto::OLDEST);
        house.close().await;
    });
}
