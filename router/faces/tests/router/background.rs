//! `/v1/responses` with `background`: a response runs without its client, and is read, resumed, cancelled and
//! forgotten.

use crate::client::{Reply, get, post, post_and_leave_open, post_with_key, read_until, send};
use crate::{House, config, eventually, run};
use router::{ApiKeys, Config};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

const RESPONSES: &str = "/v1/responses";
const ANSWER: &str = "Hello, world";

fn request_body(more: Value) -> Value {
    let mut body = json!({ "model": "toy", "input": "Hi", "background": true, "seed": 5 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn page(reply: &Value) -> String {
    format!("{RESPONSES}/{}", reply["id"].as_str().unwrap())
}

async fn send_request(http: SocketAddr, method: &str, path: &str) -> Reply {
    send(
        http,
        &format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"),
    )
    .await
}

async fn read(http: SocketAddr, reply: &Value) -> Value {
    get(http, &page(reply)).await.json()
}

async fn wait_for_status(http: SocketAddr, reply: &Value, status: &str) -> Value {
    eventually(|| async { read(http, reply).await["status"] == status }).await;
    read(http, reply).await
}

fn hold(house: &House, at: usize) {
    house.fake.script(|script| script.hold_at = at);
}

fn data(reply: &Reply) -> Vec<Value> {
    reply.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

/// Removes the fields that differ between requests.
fn plain(reply: &Value) -> Value {
    let id = reply["id"].as_str().unwrap().strip_prefix("resp_").unwrap();
    let mut reply: Value = serde_json::from_str(&reply.to_string().replace(id, "ID")).unwrap();
    for name in ["created_at", "completed_at", "background"] {
        reply[name] = Value::Null;
    }
    reply
}

#[test]
fn an_answer_in_the_background_is_the_answer_that_waits() {
    run(async {
        let house = House::open(config()).await;
        let waited = post(house.http, RESPONSES, &request_body(json!({ "background": false }))).await.json();
        let begun = post(house.http, RESPONSES, &request_body(json!({}))).await;
        assert_eq!(begun.status, 200, "{begun:?}");
        let begun = begun.json();
        assert_eq!(
            (&begun["status"], &begun["background"], &begun["output"]),
            (&"queued".into(), &true.into(), &json!([]))
        );
        let ended = wait_for_status(house.http, &begun, "completed").await;
        assert_eq!(plain(&ended), plain(&waited));
        assert_eq!((&ended["background"], &waited["background"]), (&json!(true), &json!(false)));
        // A later response can continue it, like any that is stored.
        let more = |before: &Value| json!({ "model": "toy", "input": "And?", "previous_response_id": before["id"] });
        for before in [&ended, &waited] {
            assert_eq!(post(house.http, RESPONSES, &more(before)).await.status, 200);
        }
        let prompts: Vec<_> = house.fake.submits().iter().map(|submit| submit.prompt.clone()).collect();
        assert_eq!((&prompts[0], &prompts[2]), (&prompts[1], &prompts[3]));
        house.close().await;
    });
}

#[test]
fn background_response_runs_without_client_and_reports_status() {
    run(async {
        let house = House::open(config()).await;
        hold(&house, 0);
        let queued = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        assert_eq!(read(house.http, &queued).await, queued);
        let items = get(house.http, &format!("{}/input_items", page(&queued))).await.json();
        assert_eq!(items["data"][0]["content"][0]["text"], "Hi");
        hold(&house, 3);
        let begun = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        let begun = wait_for_status(house.http, &begun, "in_progress").await;
        // No response can continue one that is not over.
        let more = json!({ "model": "toy", "input": "And?", "previous_response_id": begun["id"] });
        let refused = post(house.http, RESPONSES, &more).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("previous_response_id")));
        assert!(house.fake.cancels().is_empty());
        for running in [&queued, &begun] {
            let cancelled = send_request(house.http, "POST", &format!("{}/cancel", page(running))).await;
            assert_eq!((cancelled.status, &cancelled.json()["status"]), (200, &json!("cancelled")), "{cancelled:?}");
            assert_eq!(read(house.http, running).await, cancelled.json());
            // A second cancel returns the same reply.
            let repeated = send_request(house.http, "POST", &format!("{}/cancel", page(running))).await;
            assert_eq!((repeated.status, repeated.json()), (200, cancelled.json()));
        }
        let output_item = &read(house.http, &begun).await["output"][0];
        assert_eq!((&output_item["content"][0]["text"], &output_item["status"]), (&json!("Hel"), &json!("incomplete")));
        eventually(|| async { house.fake.cancels().len() == 2 }).await;
        house.close().await;
    });
}

#[test]
fn what_has_ended_is_not_cancelled() {
    run(async {
        let house = House::open(config()).await;
        let begun = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        wait_for_status(house.http, &begun, "completed").await;
        let cut = post(house.http, RESPONSES, &request_body(json!({ "max_output_tokens": 3 }))).await.json();
        wait_for_status(house.http, &cut, "incomplete").await;
        let waited = post(house.http, RESPONSES, &request_body(json!({ "background": false }))).await.json();
        for (reply, words) in [
            (&begun, "Cannot cancel a response that is completed"),
            (&cut, "Cannot cancel a response that is incomplete"),
            (&waited, "Cannot cancel a synchronous response"),
        ] {
            let refused = send_request(house.http, "POST", &format!("{}/cancel", page(reply))).await;
            let error = refused.json()["error"].clone();
            assert_eq!((refused.status, &error["type"]), (400, &json!("invalid_request_error")));
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        }
        house.close().await;
    });
}

#[test]
fn its_events_are_read_from_any_of_them_on() {
    run(async {
        let house = House::open(config()).await;
        let whole = post(house.http, RESPONSES, &request_body(json!({ "stream": true }))).await;
        assert_eq!(whole.headers["content-type"], "text/event-stream");
        let events = data(&whole);
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(kinds[..3], ["response.created", "response.queued", "response.in_progress"]);
        assert_eq!(*kinds.last().unwrap(), "response.completed");
        assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i), "{whole:?}");
        let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
        let last = &events.last().unwrap()["response"];
        assert_eq!((text.as_str(), &last["output"][0]["content"][0]["text"]), (ANSWER, &json!(ANSWER)));
        assert_eq!(read(house.http, last).await, *last);
        // Its events equal those of a stream that its client holds, but for the beginning.
        let held =
            data(&post(house.http, RESPONSES, &request_body(json!({ "stream": true, "background": false }))).await);
        assert_eq!(held.len() + 1, events.len());
        for (one, other) in held[2..].iter().zip(&events[3..]) {
            assert_eq!((&one["type"], &one["delta"]), (&other["type"], &other["delta"]));
        }
        let all = get(house.http, &format!("{}?stream=true", page(last))).await;
        assert_eq!(all.body, whole.body);
        for n in 0..events.len() + 2 {
            let rest = get(house.http, &format!("{}?stream=true&starting_after={n}", page(last))).await;
            assert_eq!(data(&rest), events[(n + 1).min(events.len())..], "{n}");
        }
        house.close().await;
    });
}

/// Returns a stream that has come to a sign, and its response's id.
async fn open_stream(house: &House, sign: &str) -> (TcpStream, String) {
    let mut stream = post_and_leave_open(house.http, RESPONSES, &request_body(json!({ "stream": true }))).await;
    let text = read_until(&mut stream, sign).await;
    let (_, rest) = text.split_once("\"id\":\"").unwrap();
    (stream, rest.split_once('"').unwrap().0.to_owned())
}

#[test]
fn a_stream_that_its_client_left_is_taken_up_while_it_runs() {
    run(async {
        let house = House::open(config()).await;
        hold(&house, 2);
        let (stream, id) = open_stream(&house, "\"delta\":\"e\"").await;
        let taken = tokio::spawn({
            let (http, path) = (house.http, format!("{RESPONSES}/{id}?stream=true&starting_after=2"));
            async move { get(http, &path).await }
        });
        // A client that leaves ends nothing.
        drop(stream);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!((house.fake.cancels(), taken.is_finished()), (vec![], false));
        let cancelled = send_request(house.http, "POST", &format!("{RESPONSES}/{id}/cancel")).await.json();
        let events = data(&taken.await.unwrap());
        let first = (&events[0]["sequence_number"], &events[0]["type"]);
        assert_eq!(first, (&json!(3), &json!("response.output_item.added")));
        let last = events.last().unwrap();
        assert_eq!((&last["type"], &last["response"]), (&json!("response.cancelled"), &cancelled));
        house.close().await;
    });
}

#[test]
fn what_is_forgotten_while_it_runs_ends() {
    run(async {
        let house = House::open(config()).await;
        hold(&house, 2);
        let begun = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        wait_for_status(house.http, &begun, "in_progress").await;
        assert_eq!(send_request(house.http, "DELETE", &page(&begun)).await.json()["deleted"], true);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        assert_eq!(get(house.http, &page(&begun)).await.status, 404);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(get(house.http, &page(&begun)).await.status, 404);
        house.close().await;
    });
}

#[test]
fn shutdown_waits_for_background_response_then_fails_it() {
    run(async {
        let mut config = crate::config();
        config.timeouts.drain_max = Duration::from_millis(300);
        let house = House::open(config).await;
        hold(&house, 2);
        let (_left, id) = open_stream(&house, "\"delta\":\"e\"").await;
        let taken = tokio::spawn({
            let (http, path) = (house.http, format!("{RESPONSES}/{id}?stream=true&starting_after=0"));
            async move { get(http, &path).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        let begun = Instant::now();
        house.close().await;
        let waited = begun.elapsed();
        assert!(waited > Duration::from_millis(250) && waited < Duration::from_secs(5), "{waited:?}");
        let events = data(&taken.await.unwrap());
        let last = events.last().unwrap();
        assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));

        // A response with a finished answer is waited for, and no longer.
        let house = House::open(crate::config()).await;
        let running = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        wait_for_status(house.http, &running, "completed").await;
        let begun = Instant::now();
        house.close().await;
        assert!(begun.elapsed() < Duration::from_secs(4));
    });
}

#[test]
fn what_cannot_be_done_is_refused() {
    run(async {
        let house = House::open(config()).await;
        for (more, status, param, words) in [
            (json!({ "store": false }), 400, "background", "background can only be used when `store` is true"),
            (json!({ "background": "yes" }), 400, "background", "must be true or false"),
            (json!({ "model": "unknown" }), 404, "model", "unknown"),
            (json!({ "temperature": -1 }), 400, "temperature", ""),
            (json!({ "input": "x".repeat(500) }), 400, "", "tokens"),
        ] {
            let reply = post(house.http, RESPONSES, &request_body(more.clone())).await;
            let error = &reply.json()["error"];
            assert_eq!((reply.status, error["param"].as_str().unwrap_or_default()), (status, param), "{more}: {error}");
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        }
        assert_eq!(house.fake.seen(), []);
        let begun = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        for (query, param) in [("stream=true", "stream"), ("stream=true&starting_after=x", "starting_after")] {
            let refused = get(house.http, &format!("{}?{query}", page(&begun))).await;
            assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)));
        }
        house.close().await;

        let mut config = crate::config();
        config.limits.stored.responses_max = 0;
        let house = House::open(config).await;
        let refused = post(house.http, RESPONSES, &request_body(json!({}))).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("background")));
        house.close().await;
    });
}

#[test]
fn what_runs_counts_for_its_tenant_and_is_its_own() {
    run(async {
        let keys = ApiKeys::parse("alice:k1 concurrent=2\nbob:k2").unwrap();
        let mut config = Config { keys, ..config() };
        config.timeouts.drain_max = Duration::from_millis(50);
        let house = House::open(config).await;
        hold(&house, 2);
        let begin = async |key| post_with_key(house.http, RESPONSES, key, &request_body(json!({}))).await;
        let (first, _) = (begin("k1").await, begin("k1").await);
        assert_eq!((first.status, begin("k1").await.status, begin("k2").await.status), (200, 429, 200));
        let send_with_key = async |method: &str, path: &str, key: &str| {
            let head = format!("host: localhost\r\nconnection: close\r\nauthorization: Bearer {key}");
            send(house.http, &format!("{method} {path} HTTP/1.1\r\n{head}\r\ncontent-length: 0\r\n\r\n")).await
        };
        let response_path = page(&first.json());
        let cancel = format!("{response_path}/cancel");
        assert_eq!(
            (
                send_with_key("GET", &response_path, "k2").await.status,
                send_with_key("POST", &cancel, "k2").await.status
            ),
            (404, 404)
        );
        assert_eq!(send_with_key("DELETE", &response_path, "k2").await.status, 404);
        assert_eq!(send_with_key("POST", &cancel, "k1").await.status, 200);
        eventually(|| async { begin("k1").await.status == 200 }).await;
        house.close().await;
    });
}

#[test]
fn what_runs_has_room_or_is_refused() {
    run(async {
        let mut config = crate::config();
        config.limits.stored.responses_max = 4;
        config.timeouts.drain_max = Duration::from_millis(50);
        config.limits.stored.bytes_max = 1 << 20;
        let house = House::open(config).await;
        hold(&house, 2);
        let mut statuses = Vec::new();
        for _ in 0..3 {
            statuses.push(post(house.http, RESPONSES, &request_body(json!({}))).await.status);
        }
        // One tenant may have half of the places at most.
        assert_eq!(statuses, [200, 200, 429]);
        house.close().await;

        // Each event repeats the instructions, and there is no room for that.
        let mut config = crate::config();
        config.limits.stored.bytes_max = 60_000;
        let house = House::open(config).await;
        let large = json!({ "stream": true, "max_output_tokens": 3, "metadata": { "a": "x".repeat(5_000) } });
        let events = data(&post(house.http, RESPONSES, &request_body(large)).await);
        let last = events.last().unwrap();
        let why = last["response"]["error"]["message"].as_str().unwrap_or_default();
        assert_eq!((&last["type"], why.contains("no room")), (&json!("response.failed"), true), "{last}");
        let kept = read(house.http, &last["response"]).await;
        assert_eq!((&kept["status"], &kept["error"]), (&json!("failed"), &last["response"]["error"]));
        house.close().await;
    });
}

#[test]
fn messages_are_returned_as_tokens() {
    run(async {
        let house = House::open(config()).await;
        for more in [json!({ "background": false }), json!({ "background": false, "stream": true })] {
            let more = request_body(more);
            let body = {
                let mut body = more;
                body["enable_response_messages"] = true.into();
                body
            };
            let reply = post(house.http, RESPONSES, &body).await;
            let reply = match body["stream"] == true {
                true => data(&reply).last().unwrap()["response"].clone(),
                false => reply.json(),
            };
            let prompt = &house.fake.submits().last().unwrap().prompt.clone();
            let first_message = |name: &str| reply[name][0].clone();
            let (input, output) = (first_message("input_messages"), first_message("output_messages"));
            assert_eq!((&input["type"], &input["tokens"]), (&json!("raw_message_tokens"), &json!(prompt)));
            assert_eq!(input["message"], "<|im_start|>user:Hi<|im_end|><|im_start|>");
            let mut ids: Vec<u32> = ANSWER.bytes().map(u32::from).collect();
            ids.push(crate::model::END);
            assert_eq!((&output["message"], &output["tokens"]), (&json!(format!("{ANSWER}<|im_end|>")), &json!(ids)));
        }
        let plain = post(house.http, RESPONSES, &request_body(json!({ "background": false }))).await.json();
        assert!(plain.get("input_messages").is_none());
        house.close().await;
    });
}
