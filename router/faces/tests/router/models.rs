//! Several models, and several versions of one, behind one router: which of them answers to which name, and with which
//! template.

use crate::client::{get, post, post_after, send};
use crate::fake::Fake;
use crate::grpc::{client, generate, text_request};
use crate::{House, config, eventually, kserve, model, run};
use checkpoint::ChatTemplate;
use proto::cluster::state::Phase;
use proto::kserve as inference;
use proto::v1;
use router::{Config, ModelRoutes, ModelTexts};
use serde_json::{Value, json};
use tonic::{Code, Request};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn routed(routes: &str) -> Config {
    Config { names: vec!["v1".into()], routes: ModelRoutes::parse(routes).unwrap(), ..config() }
}

fn fake(name: &'static str, model: &'static str, digest: u8) -> Fake {
    let fake = Fake::start();
    fake.script(|script| (script.name, script.model, script.digest) = (name, model, [digest; 32]));
    fake.welcome();
    fake
}

/// Opens a router with v1 and v2 of one model, another model, and one without a tokenizer at this router, and waits
/// until all are ready.
async fn open(routes: &str) -> House {
    let fakes =
        vec![fake("one", "v1", 1), fake("two", "v2", 2), fake("three", "other", 3), fake("four", "stranger", 4)];
    open_with(routes, fakes).await
}

async fn open_with(routes: &str, fakes: Vec<Fake>) -> House {
    // Its chat template differs.
    let template = "{% for message in messages %}<{{ message.content }}>{% endfor %}";
    let other = model::text().with_template(ChatTemplate::new(template, None, None).unwrap());
    let (n_fakes, texts) = (fakes.len(), ModelTexts::from(model::text()).and("other".into(), other));
    let members: Vec<_> = fakes.iter().map(Fake::coordinator).collect();
    let house = House::with_texts(routed(routes), fakes, members.into(), texts).await;
    until_ready(&house, n_fakes).await;
    house
}

async fn until_ready(house: &House, n_ready: usize) {
    eventually(|| async {
        let page = get(house.http, "/cluster").await.json();
        page["replicas"].as_array().unwrap().iter().filter(|replica| replica["phase"] == "ready").count() == n_ready
    })
    .await;
}

fn n_submits(house: &House) -> Vec<usize> {
    std::iter::once(&house.fake).chain(&house.more).map(|fake| fake.submits().len()).collect()
}

fn seeded_request(model: &str, seed: u64) -> v1::GenerateRequest {
    let sampling = v1::Sampling { seed: Some(seed), max_tokens: Some(1), ..Default::default() };
    v1::GenerateRequest { model: model.into(), sampling: Some(sampling), ..text_request("x") }
}

/// Returns the first byte of the digest under which it was answered.
async fn version(house: &House, request: impl tonic::IntoRequest<v1::GenerateRequest>) -> u8 {
    let mut replies = client(house).generate(request).await.unwrap().into_inner();
    let started = replies.message().await.unwrap().unwrap();
    let Some(v1::generate_reply::Event::Started(started)) = started.event else { panic!("no Started") };
    while replies.message().await.unwrap().is_some() {}
    started.resume.unwrap().policy_digest[0]
}

#[test]
fn anthropics_clients_list_models_in_their_form() {
    run(async {
        let house = open("").await;
        let get_as_anthropic = async |path: &str| {
            let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
            send(house.http, &format!("{head}anthropic-version: 2023-06-01\r\n\r\n")).await
        };
        let listed = get_as_anthropic("/v1/models?limit=20").await.json();
        let models = listed["data"].as_array().unwrap();
        assert_eq!((&listed["has_more"], &listed["first_id"]), (&json!(false), &models[0]["id"]));
        assert_eq!(listed["last_id"], models[models.len() - 1]["id"]);
        assert!(models.iter().all(|model| model["type"] == "model" && model["created_at"].is_string()), "{listed}");
        let one = get_as_anthropic("/v1/models/other").await.json();
        assert_eq!(
            (&one["type"], &one["id"], &one["display_name"]),
            (&json!("model"), &json!("other"), &json!("other"))
        );
        let missing = get_as_anthropic("/v1/models/none").await;
        let error = missing.json();
        assert_eq!(
            (missing.status, &error["type"], &error["error"]["type"]),
            (404, &json!("error"), &json!("not_found_error"))
        );
        house.close().await;
    });
}

#[test]
fn a_name_is_split_by_weight_and_the_same_request_gets_the_same_version() {
    run(async {
        let house = open("chat=v1:90,v2:10").await;
        let mut before = Vec::new();
        for seed in 0..100 {
            before.push(version(&house, seeded_request("chat", seed)).await);
        }
        assert_eq!(n_submits(&house), [90, 10, 0, 0]);
        // A repeated request gets the same version, also at another router of the same replicas.
        let fakes = std::iter::once(&house.fake).chain(&house.more).cloned().collect();
        let second = open_with("chat=v1:90,v2:10", fakes).await;
        for (seed, before) in (0..100).zip(before).filter(|(seed, version)| *version == 2 || seed % 10 == 0) {
            assert_eq!(version(&house, seeded_request("chat", seed)).await, before);
            assert_eq!(version(&second, seeded_request("chat", seed)).await, before);
        }
        // A request without a seed gets one, and the version for that seed.
        let reply = generate(&house, v1::GenerateRequest { model: "chat".into(), ..text_request("x") }).await.unwrap();
        assert_eq!(reply.started.model, "chat");
        let of_it = reply.started.resume.unwrap().policy_digest[0];
        assert_eq!(version(&second, seeded_request("chat", reply.started.seed)).await, of_it);
        second.close().await;
        house.close().await;
    });
}

#[test]
fn a_session_stays_at_its_version_and_so_does_all_that_a_tenant_embeds() {
    run(async {
        let house = open("chat=v1:1,v2:1").await;
        let mut versions = std::collections::BTreeSet::new();
        for session in 0..12 {
            let version_of = async |seed| {
                let mut request = Request::new(seeded_request("chat", seed));
                request.metadata_mut().insert("x-session-id", format!("s{session}").parse().unwrap());
                version(&house, request).await
            };
            let first = version_of(0).await;
            for seed in [1, 2, 1 << 63] {
                assert_eq!(version_of(seed).await, first, "session {session}");
            }
            versions.insert(first);
        }
        assert_eq!(versions.len(), 2, "sessions are spread");
        let before = n_submits(&house);
        for input in ["a", "b", "c"] {
            let embedded = post(house.http, "/v1/embeddings", &json!({ "model": "chat", "input": [input, "x"] })).await;
            assert_eq!(embedded.status, 200, "{}", embedded.body);
        }
        let by_version: Vec<usize> = n_submits(&house).iter().zip(before).map(|(now, before)| now - before).collect();
        assert!(by_version == [6, 0, 0, 0] || by_version == [0, 6, 0, 0], "{by_version:?}");
        house.close().await;
    });
}

#[test]
fn a_version_without_a_ready_replica_leaves_its_share_to_the_others_and_takes_it_back() {
    run(async {
        let house = open("chat=v1:90,v2:10\nalone=v2").await;
        let mut of_two = Vec::new();
        for seed in 0..40 {
            if version(&house, seeded_request("chat", seed)).await == 2 {
                of_two.push(seed);
            }
        }
        assert!(!of_two.is_empty());
        house.more[0].phase(Phase::Recovering);
        until_ready(&house, 3).await;
        for seed in &of_two {
            assert_eq!(version(&house, seeded_request("chat", *seed)).await, 1);
        }
        house.more[0].phase(Phase::Ready);
        until_ready(&house, 4).await;
        for seed in &of_two {
            assert_eq!(version(&house, seeded_request("chat", *seed)).await, 2);
        }
        // Under a name with this version alone, no other answers.
        house.more[0].phase(Phase::Draining);
        until_ready(&house, 3).await;
        let refused = client(&house).generate(seeded_request("alone", 0)).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        house.close().await;
    });
}

#[test]
fn each_model_is_read_in_its_own_words_over_every_face() {
    run(async {
        let house = open("chat=v1\nalso=other").await;
        let messages = json!([{ "role": "user", "content": "A" }]);
        let first: Vec<u32> = [&[256][..], b"user:A".map(u32::from).as_slice(), &[257, 256]].concat();
        let second: Vec<u32> = b"<A>".map(u32::from).to_vec();
        for (name, at, prompt) in [("chat", 0, &first), ("v1", 0, &first), ("other", 2, &second), ("also", 2, &second)]
        {
            let body = json!({ "model": name, "messages": messages, "max_tokens": 3, "temperature": 0 });
            let fake = || if at == 0 { &house.fake } else { &house.more[1] };
            for path in [CHAT, "/v1/messages"] {
                let reply = post(house.http, path, &body).await;
                assert_eq!((reply.status, &reply.json()["model"]), (200, &json!(name)), "{}", reply.body);
                assert_eq!(fake().submits().last().unwrap().prompt, *prompt, "{name} {path}");
            }
            let body = json!({ "model": name, "input": "A", "max_output_tokens": 3 });
            let reply = post(house.http, "/v1/responses", &body).await.json();
            assert_eq!((&reply["model"], &reply["temperature"]), (&json!(name), &json!(0.25)), "{reply}");
            assert_eq!(fake().submits().last().unwrap().prompt, *prompt, "{name}");
            let counted = post(house.http, "/tokenize", &json!({ "model": name, "messages": messages })).await.json();
            assert_eq!(counted["count"], prompt.len(), "{counted}");
            let input = Some(v1::tokenize_request::Input::Chat(v1::Chat {
                messages: vec![v1::ChatMessage { role: "user".into(), content: "A".into(), ..Default::default() }],
                ..Default::default()
            }));
            let tokenize_request = v1::TokenizeRequest { model: name.into(), input };
            assert_eq!(client(&house).tokenize(tokenize_request).await.unwrap().into_inner().token_ids, *prompt);
            let infer_request = inference::ModelInferRequest {
                model_name: name.into(),
                ..kserve::infer_request(vec![kserve::text("text_input", "A")])
            };
            let reply = kserve::client(&house).model_infer(infer_request).await.unwrap().into_inner();
            assert_eq!(reply.model_name, name);
            let ready_request = inference::ModelReadyRequest { name: name.into(), version: String::new() };
            assert!(kserve::client(&house).model_ready(ready_request).await.unwrap().into_inner().ready);
        }
        let n = n_submits(&house);
        assert!(n[0] == 8 && n[1] == 0 && n[2] == 8 && n[3] == 0, "{n:?}");
        // A request without a name means the first.
        generate(&house, text_request("x")).await.unwrap();
        assert_eq!(n_submits(&house)[0], 9);
        house.close().await;
    });
}

#[test]
fn served_models_are_listed_and_others_are_refused_by_name() {
    run(async {
        let house = open("chat=v1:90,v2:10\nsoon=v3\nslip=v1:9,othr:1").await;
        let listed = get(house.http, "/v1/models").await.json();
        let ids = |list: &Value| list.as_array().unwrap().iter().map(|of| of["id"].clone()).collect::<Vec<_>>();
        assert_eq!(ids(&listed["data"]), ["chat", "slip", "v1", "other"]);
        assert_eq!(listed["data"][0]["root"], "v1");
        assert_eq!(get(house.http, "/v1/models/other").await.json()["root"], "other");
        let listed = client(&house).list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        let listed: Vec<_> = listed.iter().map(|of| (of.id.as_str(), of.policy_digest[0])).collect();
        assert_eq!(listed, [("chat", 1), ("slip", 1), ("v1", 1), ("other", 3)]);
        for name in ["stranger", "nobody", &"n".repeat(1000)] {
            let body = json!({ "model": name, "prompt": "x" });
            let refused = post(house.http, COMPLETIONS, &body).await;
            assert_eq!((refused.status, &refused.json()["error"]["code"]), (404, &json!("model_not_found")));
            assert!(refused.body.contains("it serves `chat`, `slip`, `soon`, `v1` and `other`"), "{}", refused.body);
            assert!(refused.body.len() < 400);
            assert_eq!(get(house.http, &format!("/v1/models/{name}")).await.status, 404);
            let refused = client(&house).generate(seeded_request(name, 0)).await.unwrap_err();
            assert_eq!(refused.code(), Code::NotFound, "{refused}");
            let ready_request = inference::ModelReadyRequest { name: name.into(), version: String::new() };
            assert!(!kserve::client(&house).model_ready(ready_request).await.unwrap().into_inner().ready);
        }
        // A name of a version that has not come yet is refused with another error.
        let refused = post(house.http, COMPLETIONS, &json!({ "model": "soon", "prompt": "x" })).await;
        assert_eq!((refused.status, refused.headers.contains_key("retry-after")), (503, true), "{}", refused.body);
        let page = get(house.http, "/cluster").await.json();
        let versions = json!([
            { "model": "v1", "policy_digest": "01".repeat(8), "weight": 90, "ready": 1, "replicas": 1, "like": null },
            { "model": "v2", "policy_digest": "02".repeat(8), "weight": 10, "ready": 1, "replicas": 1, "like": null },
        ]);
        assert_eq!(page["models"][0], json!({ "name": "chat", "versions": versions }));
        let slip = &page["models"][1]["versions"][1];
        assert_eq!(
            *slip,
            json!({
                "model": "othr", "policy_digest": null, "weight": 1, "ready": 0, "replicas": 0, "like": "other",
            })
        );
        let soon = &page["models"][2]["versions"][0];
        assert_eq!((&soon["policy_digest"], &soon["like"]), (&Value::Null, &Value::Null));
        house.close().await;
    });
}

/// Returns a seed that the second version gets.
async fn seed_of_two(house: &House) -> u64 {
    for seed in 0.. {
        if version(house, seeded_request("chat", seed)).await == 2 {
            return seed;
        }
    }
    unreachable!("there are many seeds");
}

#[test]
fn a_stream_goes_on_at_its_own_version_whatever_the_weights_are_by_then() {
    run(async {
        let house = open("chat=v1:1,v2:1").await;
        let seed = seed_of_two(&house).await;
        let body = json!({ "model": "chat", "prompt": "x", "stream": true, "seed": seed });
        let whole = post(house.http, COMPLETIONS, &body).await;
        let identified = whole.identified();
        let fakes = || std::iter::once(&house.fake).chain(&house.more).cloned().collect();
        // The canary is over, and its replicas still run.
        let second = open_with("chat=v1\nold=v2", fakes()).await;
        let before = n_submits(&house);
        let rest = post_after(second.http, COMPLETIONS, &identified[4].0, &body).await;
        assert_eq!(rest.events(), whole.events()[5..], "{}", rest.body);
        let after = n_submits(&house);
        assert_eq!((after[0] - before[0], after[1] - before[1]), (0, 1));
        // While they are away, a replica may come that gives the same tokens. No other replica gets the request.
        house.more[0].die();
        until_ready(&second, 3).await;
        let refused = post_after(second.http, COMPLETIONS, &identified[4].0, &body).await;
        assert_eq!((refused.status, refused.headers.contains_key("retry-after")), (503, true), "{}", refused.body);
        second.close().await;
        // If all replicas are there and none gives the same tokens, waiting is of no use.
        let third = open_with("chat=v1", vec![house.fake.clone(), house.more[1].clone()]).await;
        let refused = post_after(third.http, COMPLETIONS, &identified[4].0, &body).await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("resume_other_policy")));
        assert_eq!(n_submits(&house)[..2], after[..2]);
        third.close().await;
        house.close().await;
    });
}

#[test]
fn requests_of_a_lost_replica_move_within_their_version_only() {
    run(async {
        let twin = fake("twin", "v2", 2);
        let fakes = vec![fake("one", "v1", 1), fake("two", "v2", 2), twin];
        let house = open_with("chat=v1:1,v2:1", fakes).await;
        let seed = seed_of_two(&house).await;
        house.more.iter().for_each(|fake| fake.script(|script| script.hold_at = 3));
        let before = n_submits(&house);
        let request = v1::GenerateRequest { sampling: None, ..seeded_request("chat", seed) };
        let sampling = v1::Sampling { seed: Some(seed), ..Default::default() };
        let request = v1::GenerateRequest { sampling: Some(sampling), ..request };
        let mut replies = client(&house).generate(request).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap();
        replies.message().await.unwrap().unwrap();
        house.more.iter().for_each(|fake| fake.script(|script| script.hold_at = usize::MAX));
        let had_it = (0..2).find(|i| house.more[*i].submits().len() > before[i + 1]).unwrap();
        house.more[had_it].die();
        let rest = crate::replicas::read_rest(replies).await;
        assert!("Hello, world".ends_with(&rest) && rest.len() > 5, "{rest:?}");
        assert_eq!(n_submits(&house)[0], before[0]);
        assert_eq!(house.more[1 - had_it].submits().len(), before[2 - had_it] + 1);
        house.close().await;
    });
}

#[test]
fn routes_change_while_requests_run() {
    run(async {
        let config = routed("chat=v1");
        let routes = config.routes.clone();
        let fakes = vec![fake("one", "v1", 1), fake("two", "v2", 2)];
        let members: Vec<_> = fakes.iter().map(Fake::coordinator).collect();
        let house = House::with(config, fakes, members.into()).await;
        until_ready(&house, 2).await;
        assert_eq!(version(&house, seeded_request("chat", 7)).await, 1);
        assert_eq!(client(&house).generate(seeded_request("new", 7)).await.unwrap_err().code(), Code::NotFound);
        routes.replace("new=v2\nchat=v1:0,v2:1").unwrap();
        assert_eq!(version(&house, seeded_request("chat", 7)).await, 2);
        assert_eq!(version(&house, seeded_request("new", 7)).await, 2);
        assert!(routes.replace("chat=").is_err());
        assert_eq!(version(&house, seeded_request("chat", 7)).await, 2);
        // Without a route the router serves one model again, whatever name its replicas have for it.
        routes.replace("").unwrap();
        assert_eq!(version(&house, seeded_request("", 7)).await, 1);
        let head = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        assert_eq!(send(house.http, head).await.json()["data"][0]["id"], "v1");
        house.close().await;
    });
}
