//! `item_reference` in `/v1/responses`: a stored item by its id is the same as the item itself.

use crate::client::{Reply, get, post, post_with_key, send};
use crate::{House, config, run};
use router::ApiKeys;
use serde_json::{Value, json};
use std::net::SocketAddr;

const RESPONSES: &str = "/v1/responses";
const CONVERSATIONS: &str = "/v1/conversations";

fn request_body(input: Value, more: Value) -> Value {
    let mut body = json!({ "model": "toy", "input": input });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn user(text: &str) -> Value {
    json!({ "role": "user", "content": text })
}

fn reference(id: &Value) -> Value {
    json!({ "type": "item_reference", "id": id })
}

async fn open(config: router::Config) -> House {
    let house = House::open(config).await;
    house.fake.script(|script| script.context = 4000);
    house
}

async fn respond(http: SocketAddr, body: &Value) -> Value {
    let reply = post(http, RESPONSES, body).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json()
}

async fn delete(http: SocketAddr, path: &str) -> Reply {
    let head = "host: localhost\r\nconnection: close\r\ncontent-length: 0";
    send(http, &format!("DELETE {path} HTTP/1.1\r\n{head}\r\n\r\n")).await
}

fn prompts(house: &House) -> Vec<Vec<u32>> {
    house.fake.submits().iter().map(|submit| submit.prompt.clone()).collect()
}

#[track_caller]
fn assert_unknown(reply: &Reply, id: &str) {
    let error = &reply.json()["error"];
    assert_eq!((reply.status, &error["param"], &error["code"]), (404, &json!("input"), &json!("item_not_found")));
    assert!(error["message"].as_str().unwrap().starts_with(&format!("Item with id '{id}' not found")), "{error}");
}

#[test]
fn items_of_a_response_are_found_by_their_ids() {
    run(async {
        let house = open(config()).await;
        let first = respond(house.http, &request_body(json!("one"), json!({}))).await;
        let page = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
        let own = get(house.http, &format!("{page}/input_items")).await.json()["data"][0].clone();
        let output = &first["output"][0];
        let input = json!([reference(&own["id"]), { "id": output["id"] }, user("two")]);
        for more in [json!({}), json!({ "stream": true })] {
            assert_eq!(post(house.http, RESPONSES, &request_body(input.clone(), more)).await.status, 200);
        }
        let whole = request_body(json!([user("one"), output, user("two")]), json!({}));
        respond(house.http, &whole).await;
        let prompts = prompts(&house);
        assert_eq!((&prompts[1], &prompts[2]), (&prompts[3], &prompts[3]));
        let page_of_count = format!("{RESPONSES}/input_tokens");
        let counted = post(house.http, &page_of_count, &request_body(input.clone(), json!({}))).await.json();
        assert_eq!(counted["input_tokens"], prompts[3].len());
        // A response stores the items themselves, so it can be continued when the first one is deleted.
        let second = respond(house.http, &request_body(input.clone(), json!({}))).await;
        let page_of_second = format!("{RESPONSES}/{}", second["id"].as_str().unwrap());
        let items = get(house.http, &format!("{page_of_second}/input_items?order=asc")).await.json();
        assert_eq!((&items["data"][0], &items["data"][1]), (&own, output));
        assert_eq!(delete(house.http, &page).await.status, 200);
        let id = own["id"].as_str().unwrap();
        assert_unknown(&post(house.http, RESPONSES, &request_body(input, json!({}))).await, id);
        let go_on = request_body(json!("three"), json!({ "previous_response_id": second["id"] }));
        respond(house.http, &go_on).await;
        house.close().await;
    });
}

#[test]
fn items_of_a_conversation_are_found_by_their_ids() {
    run(async {
        let house = open(config()).await;
        let made = post(house.http, CONVERSATIONS, &json!({ "items": [user("one")] })).await.json();
        let page = format!("{CONVERSATIONS}/{}", made["id"].as_str().unwrap());
        let first = respond(house.http, &request_body(json!("two"), json!({ "conversation": made["id"] }))).await;
        let items = get(house.http, &format!("{page}/items?order=asc")).await.json();
        let references: Vec<Value> =
            items["data"].as_array().unwrap().iter().map(|item| reference(&item["id"])).collect();
        respond(house.http, &request_body(json!(references), json!({}))).await;
        respond(house.http, &request_body(json!([user("one"), user("two"), first["output"][0]]), json!({}))).await;
        let prompts = prompts(&house);
        assert_eq!(prompts[1], prompts[2]);
        // An item that a request adds to a conversation is a copy with an id of its own.
        let more = json!({ "conversation": made["id"] });
        respond(house.http, &request_body(json!([references[0]]), more)).await;
        let added = get(house.http, &format!("{page}/items?order=asc&limit=100")).await.json()["data"][3].clone();
        assert_eq!(added["content"], items["data"][0]["content"]);
        assert_ne!(added["id"], items["data"][0]["id"]);
        house.close().await;
    });
}

#[test]
fn unknown_items_are_refused() {
    run(async {
        let mut config = config();
        config.keys = ApiKeys::parse("alice:k1\nbob:k2").unwrap();
        let house = open(config).await;
        let post_as = async |key: &str, input: Value, more: Value| {
            post_with_key(house.http, RESPONSES, key, &request_body(input, more)).await
        };
        let stored = post_as("k1", json!("one"), json!({})).await.json();
        let fleeting = post_as("k1", json!("one"), json!({ "store": false })).await.json();
        let (id, gone) = (&stored["output"][0]["id"], &fleeting["output"][0]["id"]);
        assert_eq!(post_as("k1", json!([reference(id)]), json!({})).await.status, 200);
        for (key, id) in [("k2", id), ("k1", gone), ("k1", &json!("msg_1")), ("k1", &json!("msg_1_0"))] {
            assert_unknown(&post_as(key, json!([user("Hi"), reference(id)]), json!({})).await, id.as_str().unwrap());
        }
        for wrong in [json!({ "type": "item_reference" }), reference(&json!(5))] {
            let reply = post_as("k1", json!([user("Hi"), wrong]), json!({})).await;
            assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("input[1].id")), "{reply:?}");
        }
        house.close().await;
    });
}

/// Many short references to one long item are no way around the limit of bodies.
#[test]
fn resolved_items_count_like_a_body() {
    run(async {
        let mut config = config();
        config.limits.body_bytes_max = 30_000;
        let house = open(config).await;
        let large = json!([{ "role": "user", "content": "Hi", "padding": "x".repeat(20_000) }]);
        let first = respond(house.http, &request_body(large, json!({}))).await;
        let page = format!("{RESPONSES}/{}/input_items", first["id"].as_str().unwrap());
        let id = get(house.http, &page).await.json()["data"][0]["id"].clone();
        assert_eq!(respond(house.http, &request_body(json!([reference(&id)]), json!({}))).await["status"], "completed");
        let twice =
            post(house.http, RESPONSES, &request_body(json!([reference(&id), reference(&id)]), json!({}))).await;
        assert_eq!((twice.status, &twice.json()["error"]["param"]), (400, &json!("input")), "{twice:?}");
        house.close().await;
    });
}
