//! Replicas without their ranks: their streams move at once to a replica that can continue them; if there is none, a
//! request waits as long as it may and then gets the reason.

use crate::client::post;
use crate::grpc::{client, text_request};
use crate::replicas::{open_held_stream, read_rest};
use crate::{House, config, run};
use proto::cluster::state::Phase;
use router::{Config, Timeouts};
use serde_json::json;
use std::time::{Duration, Instant};
use tonic::Code;

const WHY: &str = "tp 2 x pp 1 needs 2 workers, but 1 is available";
const MAX: Duration = Duration::from_millis(500);

fn lose_workers(house: &House) {
    house.fake.script(|script| (script.hold_at, script.unplaced) = (3, Some(WHY)));
    house.fake.phase(Phase::Recovering);
}

#[test]
fn its_streams_go_to_another_at_once_and_new_ones_too() {
    run(async {
        let house = House::open_two(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let (_, first) = open_held_stream(&house, "x").await;
        let begun = Instant::now();
        lose_workers(&house);
        assert_eq!(read_rest(first).await, "ello, world");
        let (_, second) = open_held_stream(&house, "x").await;
        assert_eq!(read_rest(second).await, "ello, world");
        assert!(begun.elapsed() < Timeouts::default().recovery_max / 2);
        assert_eq!((house.fake.submits().len(), house.other().submits().len()), (1, 2));
        assert_eq!(house.fake.cancels(), [house.fake.submits()[0].id]);
        house.close().await;
    });
}

#[test]
fn requests_without_other_replica_end_in_time_with_reason() {
    run(async {
        let timeouts = Timeouts { replica_absence_max: MAX, first_answer_max: MAX / 5, ..config().timeouts };
        let house = House::open(Config { timeouts, ..config() }).await;
        house.fake.script(|script| script.hold_at = 3);
        let (_, mut running) = open_held_stream(&house, "x").await;
        lose_workers(&house);
        let end = loop {
            match running.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended well"),
                Err(status) => break status,
            }
        };
        assert!(end.code() == Code::Unavailable && end.message().contains(WHY), "{end:?}");
        assert!(end.message().contains("replica-0") && end.metadata().get("retry-after").is_some(), "{end:?}");
        // New requests, whole and streamed.
        house.fake.script(|script| script.hold_at = 0);
        let begun = Instant::now();
        let whole = post(house.http, "/v1/completions", &json!({ "prompt": "x" })).await;
        assert_eq!((whole.status, &whole.json()["error"]["code"]), (503, &json!("replica_lost")));
        assert!(whole.body.contains(WHY) && whole.headers.contains_key("retry-after"), "{}", whole.body);
        let streamed = post(house.http, "/v1/completions", &json!({ "prompt": "x", "stream": true })).await;
        assert!(streamed.body.contains(WHY), "{}", streamed.body);
        let status = client(&house).generate(text_request("x")).await.unwrap().into_inner().message().await;
        assert!(begun.elapsed() >= 2 * MAX && begun.elapsed() < 2 * MAX + Duration::from_secs(10));
        drop(status);
        let deadline = Instant::now() + Duration::from_secs(10);
        while house.fake.cancels().len() < house.fake.submits().len() {
            assert!(Instant::now() < deadline, "something is left there: {:?}", house.fake.cancels());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        house.close().await;
    });
}
