//! Audits: a share of the answers is run again, last in every queue and apart from every cache, at another replica
//! where there is one, and never while clients are being answered.

use crate::client::{Reply, post};
use crate::{House, config, eventually, run};
use proto::cluster as wire;
use router::Config;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;

const COMPLETIONS: &str = "/v1/completions";

async fn post_completion(http: SocketAddr, prompt: &str) -> Reply {
    let reply = post(http, COMPLETIONS, &json!({ "prompt": prompt, "seed": 5, "max_tokens": 8, "logprobs": 1 })).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply
}

/// Waits until an audit that has begun ends. No client request delays it.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(200)).await;
}

fn audit_config() -> Config {
    Config { audit: 1.0, ..config() }
}

#[test]
fn an_audit_is_the_same_request_apart_from_every_cache_and_after_all_others() {
    run(async {
        let house = House::open(audit_config()).await;
        post_completion(house.http, "x").await;
        eventually(|| async { house.fake.submits().len() == 2 }).await;
        let [first, rerun] = &house.fake.submits()[..] else { panic!() };
        assert!(rerun.cache_bypass && rerun.cache_apart && rerun.priority == 127, "{rerun:?}");
        assert!(!first.cache_apart && first.sampling.as_ref().unwrap().logprobs.is_some());
        let as_first = |request: &wire::Request| {
            let mut request = wire::Request {
                id: 0,
                priority: 0,
                cache_bypass: false,
                cache_apart: false,
                deadline_micros: None,
                ..request.clone()
            };
            request.sampling.as_mut().unwrap().logprobs = None;
            request
        };
        assert_eq!(as_first(first), as_first(rerun));
        house.close().await;
    });
}

#[test]
fn audit_runs_elsewhere_and_difference_triggers_third_run() {
    run(async {
        let house = House::open_two(audit_config()).await;
        post_completion(house.http, "x").await;
        let n_each = || [&house.fake, house.other()].map(|fake| fake.submits().len());
        eventually(|| async { n_each() == [1, 1] }).await;
        settle().await;
        // Now one replica answers differently, and a third run decides which.
        house.other().answer("Hello, worle");
        house.fake.forget();
        house.other().forget();
        let eight = post_completion(house.http, "x").await;
        assert_eq!(eight.json()["choices"][0]["text"], "Hello, w", "eight tokens, and there they are equal");
        eventually(|| async { n_each() == [1, 1] }).await;
        settle().await;
        house.other().answer("Hellish");
        house.fake.forget();
        house.other().forget();
        post_completion(house.http, "x").await;
        eventually(|| async { n_each().iter().sum::<usize>() == 3 }).await;
        house.close().await;
    });
}

#[test]
fn while_a_client_is_answered_nothing_is_audited_and_an_audit_makes_way() {
    run(async {
        let house = House::open(audit_config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let held = tokio::spawn({
            let http = house.http;
            async move { post(http, COMPLETIONS, &json!({ "prompt": "held", "max_tokens": 8 })).await }
        });
        eventually(|| async { house.fake.submits().len() == 1 }).await;
        // A whole answer beside it is queued for an audit, and waits.
        house.fake.script(|script| script.hold_at = usize::MAX);
        post_completion(house.http, "x").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(house.fake.submits().len(), 2, "a client is being answered");
        held.abort();
        house.fake.script(|script| script.hold_at = 3);
        eventually(|| async { house.fake.submits().iter().any(|request| request.cache_apart) }).await;
        // The audit hangs at its third token when a client comes: it is cancelled.
        let n_cancels = house.fake.cancels().len();
        let held = tokio::spawn({
            let http = house.http;
            async move { post(http, COMPLETIONS, &json!({ "prompt": "new", "max_tokens": 8 })).await }
        });
        eventually(|| async { house.fake.cancels().len() > n_cancels }).await;
        let audit = house.fake.submits().iter().find(|request| request.cache_apart).unwrap().id;
        assert!(house.fake.cancels().contains(&audit));
        held.abort();
        house.close().await;
    });
}

#[test]
fn without_the_setting_nothing_is_run_again() {
    run(async {
        let house = House::open(config()).await;
        post_completion(house.http, "x").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(house.fake.submits().len(), 1);
        house.close().await;
    });
}
