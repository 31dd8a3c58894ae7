//! `lockstep.v1`: several choices in one stream, content in parts, and the salt of the prefix cache. The replica gets
//! the same requests as from the HTTP API.

use crate::client::post;
use crate::grpc::{client, generate, text_request};
use crate::{House, config, run};
use proto::cluster as wire;
use proto::v1;
use proto::v1::content_part::{Media, Part};
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use serde_json::json;
use tonic::Code;

/// A stream of several choices: what comes for all of them, and what comes for each.
struct ChoicesReply {
    started: v1::Started,
    n_scored: usize,
    progress: Vec<u32>,
    deltas: Vec<Vec<v1::Delta>>,
    finished: Vec<v1::Finished>,
}

async fn collect_choices(house: &House, request: v1::GenerateRequest) -> ChoicesReply {
    let n_choices = request.n as usize;
    let mut replies = client(house).generate(request).await.unwrap().into_inner();
    let Some(Event::Started(started)) = replies.message().await.unwrap().unwrap().event else { panic!("no Started") };
    let mut reply = ChoicesReply {
        started,
        n_scored: 0,
        progress: Vec::new(),
        deltas: vec![Vec::new(); n_choices],
        finished: Vec::new(),
    };
    while let Some(message) = replies.message().await.unwrap() {
        match message.event.unwrap() {
            Event::Started(_) => panic!("a second Started"),
            Event::PromptProgress(progress) => reply.progress.push(progress.processed),
            Event::PromptLogprobs(scored) => {
                assert!(reply.deltas.iter().all(Vec::is_empty), "the prompt's logprobs come first");
                reply.n_scored += scored.logprobs.len();
            }
            Event::Delta(delta) => {
                assert!(reply.finished.iter().all(|finished| finished.choice != delta.choice));
                reply.deltas[delta.choice as usize].push(delta);
            }
            Event::Finished(finished) => reply.finished.push(finished),
        }
    }
    reply.finished.sort_by_key(|finished| finished.choice);
    reply
}

/// The requests that the replica got, without what differs between any two.
fn submits(house: &House) -> Vec<wire::Request> {
    let mut submits = house.fake.submits();
    submits.iter_mut().for_each(|request| request.id = 0);
    submits.sort_by_key(|request| request.sampling.as_ref().unwrap().choice);
    submits
}

#[test]
fn several_choices_come_in_one_stream() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.computed = vec![1]);
        let sampling = v1::Sampling { seed: Some(7), prompt_logprobs: Some(0), ..Default::default() };
        let request = v1::GenerateRequest {
            n: 3,
            sampling: Some(sampling),
            certificate: true,
            progress: true,
            ..text_request("Hi")
        };
        let reply = collect_choices(&house, request).await;
        assert_eq!((reply.started.resume, reply.started.prompt_tokens, reply.started.seed), (None, 2, 7));
        assert_eq!(reply.n_scored, 1, "one token of the prompt, once");
        assert_eq!(reply.progress.len(), reply.progress.iter().filter(|n| **n <= 2).count());
        assert!(reply.progress.is_sorted(), "{:?}", reply.progress);
        for (choice, deltas) in reply.deltas.iter().enumerate() {
            let text: String = deltas.iter().map(|delta| delta.text.as_str()).collect();
            assert_eq!((text.as_str(), deltas[0].position), ("Hello, world", 0), "choice {choice}");
            let finished = &reply.finished[choice];
            assert_eq!((finished.choice as usize, finished.usage.unwrap().completion_tokens), (choice, 13));
            assert_eq!(finished.certificate.as_ref().unwrap().choice as usize, choice);
        }
        assert_eq!(reply.finished.len(), 3);
        house.close().await;
    });
}

#[test]
fn choices_are_those_of_http_and_of_single_requests() {
    run(async {
        let grpc = House::open(config()).await;
        let sampling = v1::Sampling { seed: Some(7), max_tokens: Some(5), ..Default::default() };
        let request = v1::GenerateRequest { sampling: Some(sampling), ..text_request("Hi") };
        collect_choices(&grpc, v1::GenerateRequest { n: 3, ..request.clone() }).await;
        let together = submits(&grpc);
        grpc.close().await;
        let single = House::open(config()).await;
        for choice in 0..3 {
            let reply = generate(&single, v1::GenerateRequest { choice, ..request.clone() }).await.unwrap();
            assert!(reply.started.resume.is_some());
            assert_eq!(reply.finished.choice, 0, "a stream of one choice");
        }
        assert_eq!(submits(&single), together);
        single.close().await;
        let http = House::open(config()).await;
        let body = json!({ "prompt": "Hi", "n": 3, "seed": 7, "max_tokens": 5 });
        assert_eq!(post(http.http, "/v1/completions", &body).await.status, 200);
        assert_eq!(submits(&http), together);
        http.close().await;
    });
}

#[test]
fn a_choice_or_a_resumption_beside_several_choices_is_refused() {
    run(async {
        let house = House::open(config()).await;
        let whole = generate(&house, text_request("x")).await.unwrap();
        let handle = whole.started.resume.unwrap().handle;
        let resume = Some(v1::Resume { handle, position: 1 });
        let several = || v1::GenerateRequest { n: 2, ..text_request("x") };
        for (request, field) in [
            (v1::GenerateRequest { choice: 1, ..several() }, "choice: must be zero with `n`"),
            (v1::GenerateRequest { resume, ..several() }, "resume: is not supported with `n`"),
            (v1::GenerateRequest { n: 1000, ..several() }, "n: must be 1 to 128, got 1000"),
            (v1::GenerateRequest { cache_salt: "x".repeat(1025), ..text_request("x") }, "cache_salt: must have"),
        ] {
            let status = client(&house).generate(request).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains(field), "{status}");
        }
        assert_eq!(house.fake.submits().len(), 1);
        house.close().await;
    });
}

#[test]
fn parts_and_salt_mean_what_they_mean_over_http() {
    run(async {
        let chat = |parts: Vec<Part>| {
            let parts = parts.into_iter().map(|part| v1::ContentPart { part: Some(part) }).collect();
            let message = v1::ChatMessage { role: "user".into(), parts, ..Default::default() };
            Input::Chat(v1::Chat { messages: vec![message], ..Default::default() })
        };
        let grpc = House::open(config()).await;
        let request = v1::GenerateRequest {
            input: Some(chat(vec![Part::Text("A".into()), Part::Text("B".into())])),
            sampling: Some(v1::Sampling { seed: Some(7), ..Default::default() }),
            cache_salt: "alice".into(),
            ..Default::default()
        };
        generate(&grpc, request.clone()).await.unwrap();
        let http = House::open(config()).await;
        let content = json!([{ "type": "text", "text": "A" }, { "type": "text", "text": "B" }]);
        let messages = json!([{ "role": "user", "content": content }]);
        let body = json!({ "messages": messages, "seed": 7, "cache_salt": "alice" });
        assert_eq!(post(http.http, "/v1/chat/completions", &body).await.status, 200);
        assert_eq!(submits(&http), submits(&grpc));
        assert!(!submits(&grpc)[0].cache_salt.is_empty());
        let other = v1::GenerateRequest { cache_salt: "bob".into(), ..request.clone() };
        generate(&grpc, other).await.unwrap();
        let salts: Vec<_> = grpc.fake.submits().into_iter().map(|request| request.cache_salt).collect();
        assert_ne!(salts[0], salts[1]);
        let image = chat(vec![Part::Text("A".into()), Part::Image(Media::default())]);
        let status = client(&grpc).generate(v1::GenerateRequest { input: Some(image), ..request }).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("messages[0].parts[1].image: is not supported yet"), "{status}");
        grpc.close().await;
        http.close().await;
    });
}
