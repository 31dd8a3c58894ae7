//! `/v1/conversations`: kept items, and responses that continue them and add to them.

use crate::client::{Reply, get, post, post_and_leave_open, send};
use crate::{House, config, eventually, run};
use router::{ApiKeys, Config};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;

const RESPONSES: &str = "/v1/responses";
const PAGE: &str = "/v1/conversations";

async fn send_with_key(http: SocketAddr, method: &str, path: &str, key: &str) -> Reply {
    let head = format!("host: localhost\r\nconnection: close\r\nauthorization: Bearer {key}\r\ncontent-length: 0");
    send(http, &format!("{method} {path} HTTP/1.1\r\n{head}\r\n\r\n")).await
}

fn user(text: &str) -> Value {
    json!({ "type": "message", "role": "user", "content": text })
}

async fn create_conversation(http: SocketAddr, body: Value) -> String {
    let made = post(http, PAGE, &body).await;
    assert_eq!((made.status, &made.json()["object"]), (200, &json!("conversation")), "{made:?}");
    format!("{PAGE}/{}", made.json()["id"].as_str().unwrap())
}

fn id(page: &str) -> &str {
    page.strip_prefix("/v1/conversations/").unwrap()
}

/// Returns the texts of its items, in their order.
async fn texts(http: SocketAddr, page: &str) -> Vec<String> {
    let items = get(http, &format!("{page}/items?order=asc&limit=100")).await.json();
    let text = |item: &Value| item["content"][0]["text"].as_str().unwrap().to_owned();
    items["data"].as_array().unwrap().iter().map(text).collect()
}

#[test]
fn a_conversation_is_made_described_and_forgotten() {
    run(async {
        let house = House::open(config()).await;
        let body =
            json!({ "metadata": { "a": "b" }, "items": [user("one"), { "role": "assistant", "content": "two" }] });
        let made = post(house.http, PAGE, &body).await.json();
        let page = format!("{PAGE}/{}", made["id"].as_str().unwrap());
        assert_eq!((&made["object"], &made["metadata"]), (&json!("conversation"), &json!({ "a": "b" })));
        assert!(made["created_at"].is_u64() && made["id"].as_str().unwrap().starts_with("conv_"));
        assert_eq!(get(house.http, &page).await.json(), made);
        let changed = post(house.http, &page, &json!({ "metadata": { "c": "d" } })).await.json();
        assert_eq!((&changed["id"], &changed["metadata"]), (&made["id"], &json!({ "c": "d" })));
        assert_eq!(get(house.http, &page).await.json(), changed);
        let added = post(house.http, &format!("{page}/items"), &json!({ "items": [user("three")] })).await.json();
        assert_eq!((&added["object"], &added["has_more"]), (&json!("list"), &json!(false)));
        let item = &added["data"][0];
        assert_eq!(
            (&item["content"], &item["status"]),
            (&json!([{ "type": "input_text", "text": "three" }]), &json!("completed"))
        );
        assert_eq!(texts(house.http, &page).await, ["one", "two", "three"]);
        let one = get(house.http, &format!("{page}/items?limit=1")).await.json();
        assert_eq!((&one["data"][0], &one["has_more"]), (item, &json!(true)));
        let of_item = format!("{page}/items/{}", item["id"].as_str().unwrap());
        assert_eq!(get(house.http, &of_item).await.json(), *item);
        assert_eq!(send_with_key(house.http, "DELETE", &of_item, "").await.json(), changed);
        assert_eq!(
            (texts(house.http, &page).await, get(house.http, &of_item).await.status),
            (vec!["one".into(), "two".into()], 404)
        );
        // A conversation is no response, and a response is none.
        assert_eq!(send_with_key(house.http, "DELETE", &format!("{RESPONSES}/{}", id(&page)), "").await.status, 404);
        let gone = send_with_key(house.http, "DELETE", &page, "").await.json();
        assert_eq!(gone, json!({ "id": made["id"], "object": "conversation.deleted", "deleted": true }));
        for (method, path) in [("GET", page.clone()), ("DELETE", page.clone()), ("GET", format!("{page}/items"))] {
            let reply = send_with_key(house.http, method, &path, "").await;
            let error = &reply.json()["error"];
            assert_eq!((reply.status, &error["param"]), (404, &json!("conversation_id")), "{method} {path}");
            assert!(error["message"].as_str().unwrap().contains("not found"), "{error}");
        }
        house.close().await;
    });
}

#[test]
fn a_response_goes_on_with_a_conversation_and_adds_to_it() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.context = 4000);
        let page = create_conversation(house.http, json!({ "items": [user("one")] })).await;
        let request_body = |input: &str, of: Value, more: Value| {
            let mut body = json!({ "model": "toy", "input": input, "conversation": of });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        house.fake.answer("yes");
        let first = post(house.http, RESPONSES, &request_body("two", json!(id(&page)), json!({}))).await.json();
        assert_eq!(
            (&first["conversation"], &first["previous_response_id"]),
            (&json!({ "id": id(&page) }), &Value::Null)
        );
        assert_eq!(texts(house.http, &page).await, ["one", "two", "yes"]);
        house.fake.answer("no");
        let of = json!({ "id": id(&page) });
        let streamed =
            post(house.http, RESPONSES, &request_body("three", of.clone(), json!({ "stream": true, "store": false })))
                .await;
        let last: Value = serde_json::from_str(streamed.events().last().unwrap()).unwrap();
        assert_eq!(last["response"]["conversation"], of);
        assert_eq!(texts(house.http, &page).await, ["one", "two", "yes", "three", "no"]);
        let cut = json!({ "max_output_tokens": 1, "background": true });
        assert_eq!(post(house.http, RESPONSES, &request_body("four", of.clone(), cut)).await.status, 200);
        eventually(|| async { texts(house.http, &page).await.len() == 7 }).await;
        assert_eq!(texts(house.http, &page).await[5..], ["four", "n"]);
        // The prompt is that of all items, sent at once.
        let all: Vec<Value> = ["one", "two", "yes", "three"]
            .iter()
            .zip(["user", "user", "assistant", "user"])
            .map(|(text, role)| json!({ "role": role, "content": text }))
            .collect();
        post(house.http, RESPONSES, &json!({ "model": "toy", "input": all })).await;
        let prompts: Vec<_> = house.fake.submits().iter().map(|submit| submit.prompt.clone()).collect();
        assert_eq!(prompts[1], prompts[3]);
        // Each item has an id of its own, even if a client sends the same item again.
        let items = get(house.http, &format!("{page}/items?limit=100")).await.json();
        let repeated = json!({ "items": [items["data"][0], items["data"][0]] });
        assert_eq!(post(house.http, &format!("{page}/items"), &repeated).await.status, 200);
        let items = get(house.http, &format!("{page}/items?limit=100")).await.json();
        let ids: std::collections::BTreeSet<&str> =
            items["data"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect();
        assert_eq!(ids.len(), 9);
        // Counts the tokens without continuing the conversation.
        let counted = post(house.http, "/v1/responses/input_tokens", &request_body("five", of, json!({}))).await;
        assert_eq!((counted.status, texts(house.http, &page).await.len()), (200, 9));
        house.close().await;
    });
}

#[test]
fn one_response_at_a_time_goes_on_with_a_conversation() {
    run(async {
        let house = House::open(config()).await;
        let page = create_conversation(house.http, json!({})).await;
        house.fake.script(|script| script.hold_at = 2);
        let body = json!({ "model": "toy", "input": "Hi", "conversation": id(&page) });
        let first = post_and_leave_open(house.http, RESPONSES, &body).await;
        eventually(|| async { house.fake.submits().len() == 1 }).await;
        let refused = post(house.http, RESPONSES, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("conversation_locked")));
        // A client that leaves adds nothing, and its turn is over.
        drop(first);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.fake.script(|script| script.hold_at = usize::MAX);
        eventually(|| async { post(house.http, RESPONSES, &body).await.status == 200 }).await;
        assert_eq!(texts(house.http, &page).await.len(), 2);
        house.close().await;
    });
}

#[test]
fn what_is_no_conversation_is_refused() {
    run(async {
        let house = House::open(config()).await;
        let page = create_conversation(house.http, json!({ "items": [user("one")] })).await;
        let stored = post(house.http, RESPONSES, &json!({ "model": "toy", "input": "Hi" })).await.json();
        let both = json!({ "conversation": id(&page), "previous_response_id": stored["id"] });
        for (more, status, param, words) in [
            (both, 400, "conversation", "Mutually exclusive parameters"),
            (json!({ "conversation": "conv_1" }), 404, "conversation", "Conversation with id 'conv_1' not found"),
            (json!({ "conversation": stored["id"] }), 404, "conversation", "not found"),
            (json!({ "conversation": 5 }), 400, "conversation", "must be an id"),
            (json!({ "conversation": { "name": "a" } }), 400, "conversation", "must have an `id`"),
        ] {
            let mut body = json!({ "model": "toy", "input": "Hi" });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let reply = post(house.http, RESPONSES, &body).await;
            let error = &reply.json()["error"];
            assert_eq!((reply.status, &error["param"]), (status, &json!(param)), "{more}: {error}");
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        }
        let items = format!("{page}/items");
        let many: Vec<Value> = (0..21).map(|_| user("x")).collect();
        let pairs: Value = (0..17).map(|i| (i.to_string(), json!("x"))).collect::<serde_json::Map<_, _>>().into();
        for (path, body, param) in [
            (PAGE, json!({ "items": "one" }), "items"),
            (PAGE, json!({ "items": [5] }), "items[0]"),
            (PAGE, json!({ "items": [user("a"), { "type": "web_search_call" }] }), "items[1].type"),
            (PAGE, json!({ "items": [{ "role": "king", "content": "x" }] }), "items[0].role"),
            (PAGE, json!({ "metadata": [] , "items": [] }), "metadata"),
            (PAGE, json!({ "metadata": { "a": 5 } }), "metadata"),
            (PAGE, json!({ "metadata": { "a": "x".repeat(513) } }), "metadata"),
            (PAGE, json!({ "metadata": pairs }), "metadata"),
            (PAGE, json!({ "items": many }), "items"),
            (&page, json!({}), "metadata"),
            (&items, json!({}), "items"),
            (&items, json!({ "items": many }), "items"),
        ] {
            let reply = post(house.http, path, &body).await;
            assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{body}: {reply:?}");
        }
        for path in [format!("{items}?limit=0"), format!("{items}?order=up"), format!("{items}?after=x")] {
            assert_eq!(get(house.http, &path).await.status, 400, "{path}");
        }
        assert_eq!(texts(house.http, &page).await, ["one"]);
        house.close().await;
    });
}

#[test]
fn a_conversation_is_its_keys_own() {
    run(async {
        let keys = ApiKeys::parse("alice:k1\nbob:k2").unwrap();
        let house = House::open(Config { keys, ..config() }).await;
        let made = send_with_key(house.http, "POST", PAGE, "k1").await;
        assert_eq!(made.status, 400, "a body is JSON: {made:?}");
        let made = crate::client::post_with_key(house.http, PAGE, "k1", &json!({})).await.json();
        let page = format!("{PAGE}/{}", made["id"].as_str().unwrap());
        for (key, status) in [("k2", 404), ("k1", 200), ("none", 401)] {
            assert_eq!(send_with_key(house.http, "GET", &page, key).await.status, status);
            let body = json!({ "model": "toy", "input": "Hi", "conversation": made["id"] });
            let reply = crate::client::post_with_key(house.http, RESPONSES, key, &body).await;
            assert_eq!(reply.status, status, "{reply:?}");
        }
        assert_eq!(send_with_key(house.http, "DELETE", &page, "k2").await.status, 404);
        assert_eq!(send_with_key(house.http, "DELETE", &page, "k1").await.status, 200);
        house.close().await;
    });
}

#[test]
fn conversations_have_the_room_and_the_time_of_responses() {
    run(async {
        let mut config = crate::config();
        config.limits.stored.responses_max = 2;
        config.limits.stored.age_max = Duration::from_millis(1500);
        config.limits.body_bytes_max = 10_000;
        config.limits.stored.bytes_max = 50_000;
        let house = House::open(config.clone()).await;
        let first = create_conversation(house.http, json!({})).await;
        let second = create_conversation(house.http, json!({})).await;
        // A used conversation is younger than an unused one.
        let grown = post(house.http, &format!("{first}/items"), &json!({ "items": [user("one")] })).await;
        assert_eq!(grown.status, 200, "{grown:?}");
        let third = create_conversation(house.http, json!({})).await;
        let status = async |page: &str| get(house.http, page).await.status;
        assert_eq!([status(&first).await, status(&second).await, status(&third).await], [200, 404, 200]);
        // It is no larger than a body, though it grows by less.
        let large = json!({ "items": [user(&"x".repeat(6_000))] });
        let items = format!("{third}/items");
        assert_eq!(post(house.http, &items, &large).await.status, 200);
        let refused = post(house.http, &items, &large).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("items")), "{refused:?}");
        eventually(|| async { status(&first).await == 404 && status(&third).await == 404 }).await;
        house.close().await;

        config.limits.stored.responses_max = 0;
        let house = House::open(config).await;
        assert_eq!(post(house.http, PAGE, &json!({})).await.status, 501);
        house.close().await;
    });
}

#[test]
fn removed_conversation_content_takes_no_room() {
    run(async {
        let mut config = crate::config();
        config.limits.stored.bytes_max = 50_000;
        let house = House::open(config).await;
        let (other, page) =
            (create_conversation(house.http, json!({})).await, create_conversation(house.http, json!({})).await);
        let metadata: Value =
            (0..8).map(|i| (i.to_string(), json!("x".repeat(500)))).collect::<serde_json::Map<_, _>>().into();
        for _ in 0..20 {
            assert_eq!(post(house.http, &page, &json!({ "metadata": metadata })).await.status, 200);
            let added =
                post(house.http, &format!("{page}/items"), &json!({ "items": [user(&"x".repeat(4_000))] })).await;
            let item = added.json()["data"][0]["id"].as_str().unwrap().to_owned();
            assert_eq!(send_with_key(house.http, "DELETE", &format!("{page}/items/{item}"), "").await.status, 200);
        }
        for kept in [&other, &page] {
            assert_eq!(get(house.http, kept).await.status, 200, "{kept}");
        }
        house.close().await;
    });
}
