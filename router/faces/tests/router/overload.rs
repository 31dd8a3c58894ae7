//! Requests beyond capacity are refused early, by name and with a time to retry; and nothing is kept without a limit.

use crate::client::{Reply, post, post_and_leave_open, read_until};
use crate::grpc::{client, text_request};
use crate::{House, config, eventually, run, run_within};
use proto::cluster::state::Phase;
use proto::v1;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tonic::Code;

const COMPLETIONS: &str = "/v1/completions";

fn check_refused(reply: &Reply, code: &str) {
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (429, Some(code)), "{reply:?}");
    assert!(reply.headers["retry-after"].parse::<u64>().unwrap() > 0);
}

#[test]
fn a_request_that_would_miss_its_deadline_is_refused_at_once() {
    run(async {
        let house = House::open(config()).await;
        // An hour of work, whatever this machine does.
        let actual = proto::cluster::Actual { computed: 1000, busy_micros: 1_000_000, ..Default::default() };
        house.fake.script(|script| (script.backlog, script.actual) = (3_600_000, actual));
        house.fake.phase(Phase::Ready);
        let page = || async { crate::client::get(house.http, "/cluster").await.json() };
        eventually(|| async { page().await["replicas"][0]["backlog_tokens"] == 3_600_000 }).await;
        let late = json!({ "prompt": "x", "deadline_ms": 600_000 });
        check_refused(&post(house.http, COMPLETIONS, &late).await, "deadline_too_short");
        let request = v1::GenerateRequest { deadline_ms: 600_000, ..text_request("x") };
        let status = client(&house).generate(request).await.unwrap_err();
        assert_eq!((status.code(), status.metadata().get("retry-after").unwrap().to_str().unwrap()), (FULL, "60"));
        assert!(house.fake.submits().is_empty());
        // These are admitted: one with enough time, one without a deadline, and one with a priority that does not wait
        // for the others.
        for more in [json!({ "deadline_ms": 7_200_000 }), json!({}), json!({ "deadline_ms": 600_000, "priority": -1 })]
        {
            let mut body = json!({ "prompt": "x" });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            assert_eq!(post(house.http, COMPLETIONS, &body).await.status, 200, "{body}");
        }
        // While the wait is unknown, no request is refused for it.
        house.fake.die();
        eventually(|| async { crate::client::get(house.http, "/ready").await.status == 503 }).await;
        house.fake.welcome();
        house.wait_until_ready().await;
        assert_eq!(post(house.http, COMPLETIONS, &late).await.status, 200);
        house.close().await;
    });
}

const FULL: Code = Code::ResourceExhausted;

#[test]
fn tokens_that_wait_are_limited() {
    run(async {
        let mut config = config();
        config.limits.waiting_tokens_max = 10;
        let house = House::open(config).await;
        house.fake.script(|script| script.hold_at = 0);
        let waiting = post_and_leave_open(house.http, COMPLETIONS, &json!({ "prompt": "1234", "n": 2 })).await;
        eventually(|| async { house.fake.submits().len() == 2 }).await;
        check_refused(&post(house.http, COMPLETIONS, &json!({ "prompt": "123" })).await, "rate_limit_exceeded");
        let last = post_and_leave_open(house.http, COMPLETIONS, &json!({ "prompt": "12" })).await;
        eventually(|| async { house.fake.submits().len() == 3 }).await;
        drop((waiting, last));
        eventually(|| async { house.fake.cancels().len() == 3 }).await;
        house.fake.script(|script| script.hold_at = usize::MAX);
        // A single request may have more.
        assert_eq!(post(house.http, COMPLETIONS, &json!({ "prompt": "1234567890123" })).await.status, 200);
        house.close().await;
    });
}

const SLOW_REST: &str = r#"                                   {"prompt": "x"}"#;

/// Opens a request of 950 bytes and sends 900 of them, until `other` is refused for it. Where `other` came first, the
/// slow request may be the one that is refused: it ends, and another one begins.
async fn slow_body_that_holds_room(house: &House, other: &Value) -> TcpStream {
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 950\r\n\r\n";
    for _ in 0..100 {
        let mut slow = TcpStream::connect(house.http).await.unwrap();
        slow.write_all(format!("{head}{}", " ".repeat(900)).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        if post(house.http, COMPLETIONS, other).await.status == 429 {
            return slow;
        }
        slow.write_all(SLOW_REST.as_bytes()).await.unwrap();
        read_until(&mut slow, "\r\n\r\n").await;
    }
    panic!("no body held room");
}

#[test]
fn bodies_that_are_read_together_are_limited() {
    run(async {
        let mut config = config();
        config.limits.bodies_bytes_max = 1000;
        let house = House::open(config).await;
        let body = json!({ "prompt": "x".repeat(100) });
        let mut slow = slow_body_that_holds_room(&house, &body).await;
        check_refused(&post(house.http, COMPLETIONS, &body).await, "rate_limit_exceeded");
        slow.write_all(SLOW_REST.as_bytes()).await.unwrap();
        assert!(read_until(&mut slow, "\r\n").await.starts_with("HTTP/1.1 200"));
        assert_eq!(post(house.http, COMPLETIONS, &body).await.status, 200);
        house.close().await;
    });
}

#[test]
fn a_request_has_as_long_as_this_router_gives_it() {
    run(async {
        let mut config = config();
        config.timeouts.request_max = Some(Duration::from_millis(200));
        let house = House::open(config).await;
        house.fake.script(|script| script.hold_at = 1);
        let reply = post(house.http, COMPLETIONS, &json!({ "prompt": "x", "deadline_ms": 3_600_000 })).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (504, &json!("deadline_exceeded")));
        let streamed = post(house.http, COMPLETIONS, &json!({ "prompt": "x", "stream": true })).await;
        assert!(streamed.body.contains("deadline_exceeded"), "{streamed:?}");
        // The deadline passes before the first token, or in the middle.
        let whole = async {
            let mut replies = client(&house).generate(text_request("x")).await?.into_inner();
            while replies.message().await?.is_some() {}
            Ok::<_, tonic::Status>(())
        };
        assert_eq!(whole.await.unwrap_err().code(), Code::DeadlineExceeded);
        eventually(|| async { house.fake.submits().len() == house.fake.cancels().len() }).await;
        assert!(house.fake.submits().iter().all(|request| request.deadline_micros.is_some()));
        house.close().await;
    });
}

/// The answer is larger than what sockets hold: so it would have to be kept here.
#[test]
fn a_client_that_does_not_read_is_cut_and_the_rest_goes_on() {
    run_within(Duration::from_secs(120), async {
        let mut config = config();
        config.limits.outputs_unread_max = 768;
        let house = House::open(config).await;
        house.fake.script(|script| script.answer = vec![120; 150]);
        let prompts: Vec<String> = (0..12).map(|i| format!("prompt {i}")).collect();
        let body = json!({ "prompt": prompts, "n": 16, "logprobs": 20, "stream": true, "max_tokens": 150 });
        let mut unread = post_and_leave_open(house.http, COMPLETIONS, &body).await;
        eventually(|| async { house.fake.submits().len() == 12 * 16 }).await;
        // One stream is not read while others are served.
        let other: Value = post(house.http, COMPLETIONS, &json!({ "prompt": "x", "max_tokens": 3 })).await.json();
        assert_eq!(other["usage"]["completion_tokens"], 3);
        eventually(|| async { !house.fake.cancels().is_empty() }).await;
        assert!(read_until(&mut unread, "slow_reader").await.starts_with("HTTP/1.1 200"));
        house.close().await;
    });
}
