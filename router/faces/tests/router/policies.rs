//! Which of two replicas gets a request, by what coordinators report of their caches; and which gets none, because it
//! is silent or breaks often.

use crate::client::get;
use crate::fake::{Fake, SALT};
use crate::grpc::{client, generate, text_request};
use crate::replicas::{open_held_stream, read_rest};
use crate::{House, config, eventually, run};
use proto::cluster as wire;
use proto::cluster::state::Phase;
use router::{Config, PickPolicy, Timeouts, board};
use serde_json::{Value, json};
use std::time::Duration;
use tonic::Request;
use types::{CacheOwner, PolicyDigest};

/// The policy digest of fakes.
const DIGEST: PolicyDigest = PolicyDigest([7; 32]);

async fn replicas(house: &House) -> Vec<Value> {
    get(house.http, "/cluster").await.json()["replicas"].as_array().unwrap().clone()
}

/// A beat with a backlog of tokens to compute.
fn beat(backlog_tokens: u64, cached: Option<wire::Cached>) -> wire::Beat {
    wire::Beat { load: Some(wire::Load { backlog_tokens, ..wire::Load::default() }), cached }
}

fn names(text: &str) -> Vec<u64> {
    let prompt: Vec<u32> = text.bytes().map(u32::from).collect();
    board::names(&prompt, CacheOwner::default(), &DIGEST, &SALT).collect()
}

fn cache_report(sequence: u64, added: Vec<u64>) -> Option<wire::Cached> {
    Some(wire::Cached { sequence, anew: sequence == 1, added, dropped: Vec::new() })
}

async fn n_submits(house: &House, text: &str) -> (usize, usize) {
    generate(house, text_request(text)).await.unwrap();
    (house.fake.submits().len(), house.other().submits().len())
}

#[test]
fn prompt_goes_to_its_cache_and_report_gap_triggers_recital() {
    run(async {
        let house = House::open_two(config()).await;
        let text = "what a prompt begins with, and how it goes on".to_string() + &"o".repeat(60);
        assert_eq!(n_submits(&house, &text).await, (1, 0));
        house.other().beat(beat(0, cache_report(1, names(&text))));
        // Until the beat arrives, the first of equals gets it.
        eventually(|| async { n_submits(&house, &text).await.1 == 1 }).await;
        let first = house.fake.submits().len();
        assert_eq!(n_submits(&house, &text).await, (first, 2));
        assert_eq!(n_submits(&house, "something else").await, (first + 1, 2));
        // It is passed over once it has more work than the cache saves.
        house.other().script(|script| script.backlog = 200);
        house.other().phase(Phase::Ready);
        eventually(|| async { replicas(&house).await[1]["backlog_tokens"] == 200 }).await;
        assert_eq!(n_submits(&house, &text).await, (first + 2, 2));
        // The second report of its cache is missing.
        house.other().beat(beat(0, cache_report(3, vec![1])));
        eventually(|| async { house.other().n_recited() == 1 }).await;
        assert_eq!(n_submits(&house, &text).await, (first + 3, 2));
        house.close().await;
    });
}

#[test]
fn a_session_stays_where_it_is() {
    run(async {
        let house = House::open_two(Config { policy: PickPolicy::Affinity, ..config() }).await;
        let mut homes = [0, 0];
        for session in 0..12 {
            let before = (house.fake.submits().len(), house.other().submits().len());
            for _ in 0..3 {
                let mut request = Request::new(text_request("x"));
                request.metadata_mut().insert("x-session-id", session.to_string().parse().unwrap());
                read_rest(client(&house).generate(request).await.unwrap().into_inner()).await;
            }
            let after = (house.fake.submits().len(), house.other().submits().len());
            let here = [after.0 - before.0, after.1 - before.1];
            assert!(here == [3, 0] || here == [0, 3], "{here:?}");
            (0..2).for_each(|i| homes[i] += here[i]);
        }
        assert!(homes.iter().all(|n| *n > 0), "{homes:?}");
        house.close().await;
    });
}

#[test]
fn streams_of_silent_replica_move_and_a_beat_restores_it() {
    run(async {
        let house = House::of(config(), vec![Fake::start(), Fake::start()]).await;
        house.fake.script(|script| (script.name, script.beat_millis, script.hold_at) = ("one", 50, 3));
        house.other().script(|script| script.name = "two");
        house.fake.welcome();
        eventually(|| async { replicas(&house).await[0]["phase"] == "ready" }).await;
        let (_, stream) = open_held_stream(&house, "x").await;
        // A silent replica that is alone is suspected and keeps its requests.
        eventually(|| async { replicas(&house).await[0]["suspected"] == true }).await;
        assert!(house.fake.cancels().is_empty());
        house.other().welcome();
        assert_eq!(read_rest(stream).await, "ello, world");
        assert_eq!(house.other().submits()[0].output, b"Hel".map(u32::from));
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        generate(&house, text_request("x")).await.unwrap();
        assert_eq!((house.fake.submits().len(), house.other().submits().len()), (1, 2));
        house.fake.beat(beat(0, None));
        eventually(|| async { replicas(&house).await[0]["suspected"] == false }).await;
        house.close().await;
    });
}

#[test]
fn a_replica_that_breaks_often_is_shunned_and_then_tried_with_one_request() {
    run(async {
        let mut config = config();
        config.timeouts = Timeouts { judge_every: Duration::from_millis(200), ..config.timeouts };
        let house = House::open_two(config).await;
        for _ in 0..3 {
            house.fake.die();
            house.wait_for_phases(["absent", "ready"]).await;
            house.fake.welcome();
            house.wait_for_phases(["ready", "ready"]).await;
        }
        eventually(|| async { replicas(&house).await[0]["shunned"] == "breaks" }).await;
        // Ten looks later it is tried with one request, and is then trusted again.
        eventually(|| async {
            generate(&house, text_request("x")).await.unwrap();
            !house.fake.submits().is_empty()
        })
        .await;
        eventually(|| async { replicas(&house).await[0]["shunned"] == json!(null) }).await;
        assert!(!house.other().submits().is_empty());
        house.close().await;
    });
}
