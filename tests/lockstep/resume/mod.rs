//! Processes killed with open streams. After a router's death its clients continue at another one; clients do not
//! notice a coordinator's death. Every byte of every stream is that of the undisturbed run.

mod calls;

use crate::common::node::{Folder, Node, PATIENCE, field};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use wire::JoinToken;

const MODEL: &str = "tests/reference/llama-f32-tied";
const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];

struct Replica {
    coordinator: Node,
    _worker: Node,
    address: String,
}

impl Replica {
    fn start(token: &str) -> Replica {
        Replica::of(&[MODEL, "--activations", "f32", "--speculation", "4"], token)
    }

    /// Starts a replica of a model, with more flags.
    fn of(model: &[&str], token: &str) -> Replica {
        let listen = ["--listen", "127.0.0.1:0", "--token-file", token];
        let coordinator = [&["coordinator"], model, &listen].concat();
        let mut coordinator = Node::start(&coordinator);
        let address = field(&coordinator.until(&["coordinating"]), "address").to_owned();
        let worker = Node::start(&["worker", "--threads", "1", "--join", &address, "--token-file", token]);
        Replica { coordinator, _worker: worker, address }
    }
}

fn router(token: &str, replicas: &[&Replica]) -> (Node, String) {
    router_of(&[MODEL], token, replicas)
}

fn router_of(model: &[&str], token: &str, replicas: &[&Replica]) -> (Node, String) {
    let addresses = replicas.iter().flat_map(|replica| ["--coordinator", &replica.address]);
    let arguments = ["--token-file", token].into_iter().chain(addresses).chain(DOORS.into_iter().take(4));
    let mut node = Node::start(&[&["router"], model, &arguments.collect::<Vec<_>>()].concat());
    let http = node.http();
    node.until_ready(&http);
    (node, http)
}

/// The events of a stream, each with its id.
struct Events(BufReader<Box<dyn Read>>);

impl Events {
    fn open(http: &str, body: &Value, last_event_id: Option<&str>) -> Events {
        Events::open_at(http, "/v1/completions", body, last_event_id)
    }

    fn open_at(http: &str, page: &str, body: &Value, last_event_id: Option<&str>) -> Events {
        let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
        let request = ureq::Agent::from(agent).post(format!("{http}{page}"));
        let request = request.header("content-type", "application/json");
        let request = last_event_id.into_iter().fold(request, |request, id| request.header("last-event-id", id));
        let reply = request.send(body.to_string()).unwrap();
        Events(BufReader::new(Box::new(reply.into_body().into_reader())))
    }
}

impl Iterator for Events {
    type Item = (String, Option<String>);

    /// Returns None at the stream's end, or where it breaks: an event without its empty line is incomplete.
    fn next(&mut self) -> Option<Self::Item> {
        let (mut data, mut id) = (None, None);
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).ok()? == 0 {
                return None;
            }
            match line.trim_end().split_once(": ") {
                Some(("data", text)) => data = Some(text.to_owned()),
                Some(("id", text)) => id = Some(text.to_owned()),
                Some(("event", _)) => {}
                Some((_, text)) => panic!("{text}"),
                None => match data.take() {
                    Some(data) => return Some((data, id)),
                    None => continue,
                },
            }
        }
    }
}

/// Each choice's whole text, with the usage and the end of the stream.
fn joined(events: &[String]) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for event in events {
        let Ok(chunk) = serde_json::from_str::<Value>(event) else {
            all.insert(event.clone(), Value::Null);
            continue;
        };
        assert!(chunk["error"].is_null(), "{event}");
        if chunk["usage"].is_object() {
            let usage = &chunk["usage"];
            all.insert("usage".into(), json!([usage["prompt_tokens"], usage["completion_tokens"]]));
        }
        for choice_json in chunk["choices"].as_array().unwrap() {
            let choice =
                all.entry(choice_json["index"].to_string()).or_insert_with(|| json!({ "text": "", "end": null }));
            let text = format!("{}{}", choice["text"].as_str().unwrap(), choice_json["text"].as_str().unwrap());
            choice["text"] = text.into();
            append(&mut choice["token_ids"], &choice_json["token_ids"]);
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                append(&mut choice[list], &choice_json["logprobs"][list]);
            }
            if !choice_json["finish_reason"].is_null() {
                choice["end"] = choice_json["finish_reason"].clone();
            }
        }
    }
    assert!(all.contains_key("[DONE]"), "{events:?}");
    all
}

fn append(to: &mut Value, more: &Value) {
    let mut all = to.as_array().cloned().unwrap_or_default();
    all.extend(more.as_array().cloned().unwrap_or_default());
    *to = all.into();
}

fn bodies() -> Vec<Value> {
    let mut bodies = vec![
        json!({ "prompt": "hello", "temperature": 0 }),
        json!({ "prompt": "hello" }),
        json!({ "prompt": "a b c d", "seed": 7, "presence_penalty": 0.7, "repetition_penalty": 1.2 }),
        json!({ "prompt": ["two", "of them"], "n": 2, "seed": 3, "logprobs": 2 }),
        json!({ "prompt": "what stands here", "echo": true, "logprobs": 1 }),
        json!({ "prompt": "x", "seed": 1, "stop": ["e", "zzzz"] }),
        json!({ "prompt": "y", "n": 2, "seed": 2, "structured_outputs": { "regex": "([a-f]{1,3}[.] of them, ){30}" } }),
    ];
    for body in &mut bodies {
        let more = json!({ "stream": true, "max_tokens": 60, "ignore_eos": true, "return_token_ids": true,
            "stream_options": { "include_usage": true } });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    }
    bodies
}

/// The same request undisturbed, with its seed.
fn undisturbed(http: &str, body: &Value, first: &str) -> BTreeMap<String, Value> {
    let first: Value = serde_json::from_str(first).unwrap();
    let mut body = body.clone();
    body["seed"] = first["seed"].clone();
    joined(&Events::open(http, &body, None).map(|(data, _)| data).collect::<Vec<_>>())
}

#[test]
fn clients_of_a_router_that_is_killed_go_on_at_another_one() {
    let folder = Folder::new("resume");
    let token = folder.write("token", JoinToken::random().unwrap().expose());
    let replica = Replica::start(&token);
    let (mut first, first_http) = router(&token, &[&replica]);
    let (_second, second_http) = router(&token, &[&replica]);
    let mut streams: Vec<_> = bodies().into_iter().map(|body| (Events::open(&first_http, &body, None), body)).collect();
    let mut read: Vec<Vec<(String, Option<String>)>> = Vec::new();
    for (i, (events, _)) in streams.iter_mut().enumerate() {
        read.push(events.take(1 + 3 * i).collect());
    }
    first.kill();
    for ((_, body), read) in streams.into_iter().zip(read) {
        let (data, ids): (Vec<String>, Vec<Option<String>>) = read.into_iter().unzip();
        let last = ids.into_iter().flatten().last().unwrap();
        let rest = Events::open(&second_http, &body, Some(&last)).map(|(data, _)| data);
        let all: Vec<String> = data.iter().cloned().chain(rest).collect();
        assert_eq!(joined(&all), undisturbed(&second_http, &body, &data[0]), "{body}");
    }
}

/// Without a token no other process has to read its handles. Otherwise the program's source would be enough to make
/// them.
#[test]
fn handles_of_a_lone_server_are_its_own() {
    let serve = || {
        let mut node = Node::start(&[&["serve", MODEL, "--activations", "f32"], &DOORS[..]].concat());
        let http = node.http();
        node.until_ready(&http);
        (node, http)
    };
    let (servers, body) = ([serve(), serve()], &bodies()[2]);
    let [own, other] = servers.each_ref().map(|(_, http)| http.as_str());
    let read: Vec<(String, Option<String>)> = Events::open(own, body, None).take(5).collect();
    let handle = read[4].1.as_deref().unwrap();
    let rest = Events::open(own, body, Some(handle)).map(|(data, _)| data);
    let all: Vec<String> = read.iter().map(|(data, _)| data.clone()).chain(rest).collect();
    assert_eq!(joined(&all), undisturbed(own, body, &read[0].0));
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let request = ureq::Agent::from(agent).post(format!("{other}/v1/completions")).header("last-event-id", handle);
    let refused = request.header("content-type", "application/json").send(body.to_string()).unwrap();
    assert_eq!(refused.status(), 403);
}

/// Repeated until a killed one had open requests: their duration depends on the machine.
#[test]
fn clients_of_a_coordinator_that_is_killed_notice_nothing() {
    let folder = Folder::new("failover");
    let token = folder.write("token", JoinToken::random().unwrap().expose());
    for _ in 0..10 {
        let (mut one, two) = (Replica::start(&token), Replica::start(&token));
        let (mut router, http) = router(&token, &[&one, &two]);
        let mut streams: Vec<_> = bodies().into_iter().map(|body| (Events::open(&http, &body, None), body)).collect();
        let firsts: Vec<String> = streams.iter_mut().map(|(events, _)| events.next().unwrap().0).collect();
        one.coordinator.kill();
        let line = router.until(&["no coordinator", "requests="]);
        let rests: Vec<Vec<String>> =
            streams.iter_mut().map(|(events, _)| events.map(|(data, _)| data).collect()).collect();
        for ((body, first), rest) in streams.iter().map(|(_, body)| body).zip(&firsts).zip(rests) {
            let all: Vec<String> = std::iter::once(first.clone()).chain(rest).collect();
            assert_eq!(joined(&all), undisturbed(&http, body, first), "{body}");
        }
        if field(&line, "requests") != "0" {
            return;
        }
    }
    panic!("all requests had ended in each attempt");
}
