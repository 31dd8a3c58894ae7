//! Replicas come and go while the router runs, by the store: one that vanishes there is only suspected, an open stream
//! is the truth, and the last claim counts.

use crate::client::get;
use crate::fake::Fake;
use crate::grpc::{client, generate, text_request};
use crate::replicas::{open_held_stream, read_rest};
use crate::{House, config, eventually, run};
use cluster::{Claim, MemoryStore, Store};
use proto::v1::GetTopologyRequest;
use router::Membership;
use serde_json::{Value, json};

/// A claim before that of fakes, which serve under incarnation 3.
const BEFORE: u64 = 2;

/// Two replicas, reached at `one:1` and `two:1`, that the store does not list yet.
async fn house() -> (House, MemoryStore) {
    let (one, two) = (Fake::start(), Fake::start());
    one.script(|script| script.name = "one");
    two.script(|script| (script.name, script.incarnation) = ("two", 4));
    [&one, &two].into_iter().for_each(Fake::welcome);
    let store = MemoryStore::starting_at(BEFORE);
    let channels = [("one:1", one.coordinator().channel), ("two:1", two.coordinator().channel)];
    let dial = move |address: &str| {
        let found = channels.iter().find(|(name, _)| *name == address);
        found.map(|(_, channel)| channel.clone()).ok_or_else(|| "no coordinator has this address".to_owned())
    };
    let membership = Membership::Followed { store: Store::Memory(store.clone()), dial: Box::new(dial) };
    (House::with(config(), vec![one, two], membership).await, store)
}

async fn page(house: &House) -> Vec<Value> {
    get(house.http, "/cluster").await.json()["replicas"].as_array().unwrap().clone()
}

async fn shown(house: &House, expect: &[(&str, &str)]) {
    eventually(|| async {
        let page = page(house).await;
        let shown = page.iter().map(|of| (of["replica"].as_str().unwrap(), of["phase"].as_str().unwrap()));
        shown.eq(expect.iter().copied())
    })
    .await;
}

async fn claimed(house: &House, store: &MemoryStore, name: &str, address: &str) -> Claim {
    let n_before = page(house).await.len();
    let claim = store.claim(name, address);
    eventually(|| async { page(house).await.len() == n_before + 1 }).await;
    claim
}

#[test]
fn replicas_appear_and_disappear() {
    run(async {
        let (house, store) = house().await;
        assert_eq!((get(house.http, "/ready").await.status, page(&house).await), (503, vec![]));
        let first = claimed(&house, &store, "one", "one:1").await;
        house.wait_until_ready().await;
        generate(&house, text_request("x")).await.unwrap();
        let _second = claimed(&house, &store, "two", "two:1").await;
        shown(&house, &[("one", "ready"), ("two", "ready")]).await;
        let topology = client(&house).get_topology(GetTopologyRequest::default()).await.unwrap().into_inner();
        assert_eq!(topology.store.map(|store| (store.kind, store.connected)), Some(("memory".into(), true)));
        // No process answers at this address: the replica is listed and absent.
        let third = claimed(&house, &store, "three", "one:1").await;
        drop(third);
        // An entry that vanishes ends nothing: new requests are still served over the open stream.
        drop(first);
        eventually(|| async { page(&house).await.iter().all(|of| of["replica"] != "three") }).await;
        house.fake.script(|script| script.hold_at = 3);
        let (_, stream) = open_held_stream(&house, "x").await;
        assert_eq!(house.fake.submits().len(), 2);
        // The stream ends: now the replica is gone, and its request goes on elsewhere.
        house.fake.die();
        shown(&house, &[("two", "ready")]).await;
        assert!("Hello, world".ends_with(&read_rest(stream).await));
        assert_eq!(house.other().submits().len(), 1);
        // The replica can come back.
        house.fake.welcome();
        house.fake.script(|script| script.incarnation = 9);
        let _again = claimed(&house, &store, "one", "one:1").await;
        shown(&house, &[("two", "ready"), ("one", "ready")]).await;
        house.close().await;
    });
}

#[test]
fn the_later_of_two_claims_serves() {
    run(async {
        let (house, store) = house().await;
        let _first = claimed(&house, &store, "name", "one:1").await;
        house.wait_until_ready().await;
        house.fake.script(|script| script.hold_at = 3);
        let (_, stream) = open_held_stream(&house, "x").await;
        // The first coordinator still runs, and its frames are ignored.
        let _second = store.claim("name", "two:1");
        shown(&house, &[("two", "ready")]).await;
        assert!("Hello, world".ends_with(&read_rest(stream).await));
        assert_eq!((house.fake.submits().len(), house.other().submits().len()), (1, 1));
        // A third claim gives the address of the first, which answers under its old one and is refused.
        let _third = store.claim("name", "one:1");
        eventually(|| async { page(&house).await[0]["phase"] == "absent" }).await;
        assert_eq!(get(house.http, "/ready").await.json()["error"]["code"], json!("not_ready"));
        house.fake.script(|script| script.incarnation = 5);
        house.wait_until_ready().await;
        house.close().await;
    });
}
