//! Several replicas behind one router: who gets a request, whose cancel it is, and what is left when one is gone.

use crate::client::get;
use crate::grpc::{ask, client, generate};
use crate::{House, config, eventually, run};
use proto::cluster::state::Phase;
use proto::v1;
use proto::v1::generate_reply::Event;
use serde_json::{Value, json};
use tonic::Streaming;

type Replies = Streaming<v1::GenerateReply>;

/// A stream that the replica holds after three tokens, as soon as it has said the first; and what it was started with.
async fn held(house: &House, text: &str) -> (v1::Started, Replies) {
    let mut replies = client(house).generate(ask(text)).await.unwrap().into_inner();
    let Some(Event::Started(started)) = replies.message().await.unwrap().unwrap().event else { panic!("no Started") };
    replies.message().await.unwrap().unwrap();
    (started, replies)
}

/// The rest of a stream whose first token has been read.
async fn rest(mut replies: Replies) -> String {
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
        // One after the other, the first is always free.
        for _ in 0..3 {
            generate(&house, ask("x")).await.unwrap();
        }
        assert_eq!(n_submits(&house), (3, 0));
        hold(&house, 3);
        let (one, first) = held(&house, "x").await;
        let (two, second) = held(&house, "x").await;
        assert_eq!((replica(&one), replica(&two), n_submits(&house)), ("one", "two", (4, 1)));
        // Both replicas have given this router the same number.
        assert_ne!(one.id, two.id);
        drop(second);
        eventually(|| async { house.other().cancels().len() == 1 }).await;
        assert_eq!(house.other().cancels(), [house.other().submits()[0].id]);
        assert!(house.fake.cancels().is_empty());
        // The second is free again, and the first is not.
        let (three, _third) = held(&house, "x").await;
        assert_eq!(replica(&three), "two");
        drop(first);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.close().await;
    });
}

#[test]
fn what_others_have_sent_counts() {
    run(async {
        let house = House::open_two(config()).await;
        house.fake.script(|script| script.backlog = 1000);
        house.fake.phase(Phase::Ready);
        let page = || async { get(house.http, "/cluster").await.json() };
        eventually(|| async { page().await["replicas"][0]["backlog_tokens"] == 1000 }).await;
        generate(&house, ask("x")).await.unwrap();
        assert_eq!(n_submits(&house), (0, 1));
        house.close().await;
    });
}

#[test]
fn who_drains_or_is_away_gets_nothing_and_all_are_shown() {
    run(async {
        let house = House::open_two(config()).await;
        house.fake.phase(Phase::Draining);
        house.phases(["draining", "ready"]).await;
        assert_eq!(get(house.http, "/ready").await.status, 200);
        generate(&house, ask("x")).await.unwrap();
        house.fake.die();
        house.phases(["absent", "ready"]).await;
        generate(&house, ask("x")).await.unwrap();
        assert_eq!((n_submits(&house), get(house.http, "/ready").await.status), ((0, 2), 200));
        let topology = client(&house).get_topology(v1::GetTopologyRequest {}).await.unwrap().into_inner();
        let shown: Vec<_> = topology.replicas.iter().map(|of| (of.replica.as_str(), of.phase.as_str())).collect();
        assert_eq!(shown, [("one", "absent"), ("two", "ready")]);
        house.other().phase(Phase::Draining);
        house.phases(["absent", "draining"]).await;
        let reply = get(house.http, "/ready").await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("draining")));
        assert_eq!(generate(&house, ask("x")).await.err().unwrap().code(), tonic::Code::Unavailable);
        assert_eq!(n_submits(&house), (0, 2));
        house.close().await;
    });
}

#[test]
fn one_that_is_lost_keeps_its_streams_and_the_other_goes_on() {
    run(async {
        let house = House::open_two(config()).await;
        hold(&house, 3);
        let (_, first) = held(&house, "x").await;
        let (_, second) = held(&house, "x").await;
        house.fake.die();
        house.phases(["absent", "ready"]).await;
        hold(&house, usize::MAX);
        assert_eq!(generate(&house, ask("x")).await.unwrap().text, "Hello, world");
        // Told to go on, the second replica has nothing to do with what the first had.
        drop(second);
        eventually(|| async { house.other().cancels().len() == 1 }).await;
        assert_eq!(n_submits(&house), (1, 2));
        house.fake.welcome();
        assert_eq!(rest(first).await, "ello, world");
        assert_eq!(n_submits(&house), (2, 2));
        house.close().await;
    });
}

#[test]
fn one_of_another_policy_gets_nothing() {
    run(async {
        let house = House::open_two(config()).await;
        house.other().script(|script| script.digest = [8; 32]);
        house.other().die();
        house.phases(["ready", "absent"]).await;
        house.other().welcome();
        house.phases(["ready", "ready"]).await;
        hold(&house, 3);
        let (_, _first) = held(&house, "x").await;
        let (_, _second) = held(&house, "x").await;
        assert_eq!(n_submits(&house), (2, 0));
        let page = get(house.http, "/cluster").await.json();
        let digests: Vec<&Value> = (0..2).map(|i| &page["replicas"][i]["policy_digest"]).collect();
        assert_ne!(digests[0], digests[1]);
        house.close().await;
    });
}
