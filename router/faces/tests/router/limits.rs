//! A tenant's limits over HTTP and gRPC: how they are refused, what is charged, and what is given back.

use crate::client::post_with_key;
use crate::grpc::{client, text_request};
use crate::{House, config, eventually, run};
use proto::v1::DetokenizeRequest;
use router::ApiKeys;
use serde_json::json;

const COMPLETIONS: &str = "/v1/completions";

fn keyed(lines: &str) -> router::Config {
    let mut config = config();
    config.keys = ApiKeys::parse(lines).unwrap();
    config
}

#[test]
fn too_many_requests_are_refused_as_openai_does() {
    run(async {
        let house = House::open(keyed("alice:k1 requests_per_minute=1\nbob:k2")).await;
        let body = json!({ "prompt": "Hi" });
        let first = post_with_key(house.http, COMPLETIONS, "k1", &body).await;
        assert_eq!((first.status, first.headers["x-ratelimit-remaining-requests"].as_str()), (200, "0"));
        let refused = post_with_key(house.http, COMPLETIONS, "k1", &body).await;
        assert_eq!(refused.status, 429);
        let error = &refused.json()["error"];
        assert_eq!((&error["code"], &error["type"]), (&json!("rate_limit_exceeded"), &json!("requests")));
        let retry_after: u64 = refused.headers["retry-after"].parse().unwrap();
        assert!((1..=60).contains(&retry_after), "{retry_after}");
        assert_eq!(refused.headers["x-ratelimit-limit-requests"], "1");
        assert!(!refused.headers.contains_key("x-ratelimit-limit-tokens"));

        let mut request = tonic::Request::new(text_request("Hi"));
        request.metadata_mut().insert("authorization", "Bearer k1".parse().unwrap());
        let status = client(&house).generate(request).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        assert!(status.metadata().contains_key("retry-after"), "{status:?}");

        let neighbour = post_with_key(house.http, COMPLETIONS, "k2", &body).await;
        assert!(neighbour.status == 200 && !neighbour.headers.contains_key("x-ratelimit-limit-requests"));
        house.close().await;
    });
}

#[test]
fn a_request_at_once_is_one_until_it_ends_and_tokens_are_given_back() {
    run(async {
        let house = House::open(keyed("alice:k1 concurrent=1 tokens_per_minute=100000 weight=7")).await;
        house.fake.script(|script| script.hold_at = 1);
        let mut request = tonic::Request::new(text_request("Hi"));
        request.metadata_mut().insert("authorization", "Bearer k1".parse().unwrap());
        let mut held = client(&house).generate(request).await.unwrap().into_inner();
        held.message().await.unwrap();
        let body = json!({ "prompt": "Hi", "max_tokens": 5 });
        let refused = post_with_key(house.http, COMPLETIONS, "k1", &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["type"]), (429, &json!("requests")));
        assert_eq!(house.fake.submits()[0].weight, 7);
        drop(held);
        house.fake.script(|script| script.hold_at = usize::MAX);
        let is_over = || async { post_with_key(house.http, COMPLETIONS, "k1", &body).await.status == 200 };
        eventually(is_over).await;
        let reply = post_with_key(house.http, COMPLETIONS, "k1", &body).await;
        let left: u64 = reply.headers["x-ratelimit-remaining-tokens"].parse().unwrap();
        assert!(left > 99_000, "unused tokens are returned: {left}");
        house.close().await;
    });
}

/// Of four draws or beams, one is sent.
#[test]
fn all_tokens_of_a_search_are_charged() {
    run(async {
        for is_beams in [false, true] {
            let house = House::open(keyed("alice:k1 tokens_per_minute=60")).await;
            let search = json!({ "prompt": "Hi", "max_tokens": 5, "best_of": 4, "use_beam_search": is_beams });
            let reply = post_with_key(house.http, COMPLETIONS, "k1", &search).await;
            assert_eq!((reply.status, &reply.json()["usage"]["completion_tokens"]), (200, &json!(5)));
            let next = post_with_key(house.http, COMPLETIONS, "k1", &json!({ "prompt": "Hi", "max_tokens": 1 })).await;
            let left: u64 = next.headers["x-ratelimit-remaining-tokens"].parse().unwrap();
            assert!(left < 60 - 4 * 4, "{left} tokens are left, beams: {is_beams}");
            house.close().await;
        }
    });
}

/// Tokenizing costs this server work too.
#[test]
fn reading_and_writing_text_is_a_request() {
    run(async {
        let house = House::open(keyed("alice:k1 requests_per_minute=4")).await;
        let message = json!([{ "role": "user", "content": "x" }]);
        let pages = [
            ("/tokenize", json!({ "prompt": "x" })),
            ("/detokenize", json!({ "tokens": [120] })),
            ("/v1/messages/count_tokens", json!({ "messages": message })),
        ];
        for (page, body) in &pages {
            assert_eq!(post_with_key(house.http, page, "k1", body).await.status, 200, "{page}");
        }
        let mut keyed = tonic::Request::new(DetokenizeRequest { token_ids: vec![120], ..Default::default() });
        keyed.metadata_mut().insert("authorization", "Bearer k1".parse().unwrap());
        assert_eq!(client(&house).detokenize(keyed).await.unwrap().into_inner().text, "x");
        for (page, body) in &pages {
            assert_eq!(post_with_key(house.http, page, "k1", body).await.status, 429, "{page}");
        }
        house.close().await;
    });
}
