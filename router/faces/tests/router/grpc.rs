//! The gRPC face.

use crate::{House, config, eventually, run};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

pub fn client(house: &House) -> InferenceClient<Channel> {
    InferenceClient::new(wire::tcp(&house.grpc.to_string()).unwrap())
}

pub fn text_request(text: &str) -> v1::GenerateRequest {
    v1::GenerateRequest { input: Some(Input::Text(text.into())), ..Default::default() }
}

pub struct GrpcReply {
    pub started: v1::Started,
    pub text: String,
    pub token_ids: Vec<u32>,
    pub finished: v1::Finished,
}

/// Reads a whole stream. Its positions must have no gap.
pub async fn generate(house: &House, request: v1::GenerateRequest) -> Result<GrpcReply, tonic::Status> {
    let mut replies = client(house).generate(request).await?.into_inner();
    let Some(Event::Started(started)) = replies.message().await?.unwrap().event else { panic!("no Started") };
    let (mut text, mut token_ids, mut finished) = (String::new(), Vec::new(), None);
    while let Some(reply) = replies.message().await? {
        assert!(finished.is_none(), "nothing follows Finished");
        match reply.event.unwrap() {
            Event::Started(_) | Event::PromptLogprobs(_) | Event::PromptProgress(_) => {
                panic!("a second Started, or an unexpected event")
            }
            Event::Finished(last) => finished = Some(last),
            Event::Delta(delta) => {
                assert_eq!(delta.position as usize, token_ids.len());
                text.push_str(&delta.text);
                token_ids.extend(delta.token_ids);
            }
        }
    }
    Ok(GrpcReply { started, text, token_ids, finished: finished.expect("no Finished") })
}

#[test]
fn stream_has_tokens_text_and_resume_point() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.n_cached = 16);
        let reply = generate(&house, text_request("Hi")).await.unwrap();
        assert_eq!(reply.text, "Hello, world");
        assert_eq!(reply.token_ids.len(), 13);
        assert_eq!(reply.token_ids.last(), Some(&crate::model::END));
        assert_eq!(reply.finished.reason(), v1::finished::Reason::Stop);
        let usage = v1::Usage { prompt_tokens: 2, cached_tokens: 16, completion_tokens: 13, ..v1::Usage::default() };
        assert_eq!(reply.finished.usage, Some(usage));
        let resume = reply.started.resume.unwrap();
        assert_eq!((resume.replica.as_str(), resume.incarnation), ("replica-0", 3));
        assert_eq!(resume.policy_digest, [7; 32]);
        assert_eq!(reply.started.model, "toy");
        let sent = house.fake.submits().remove(0);
        assert_eq!(sent.prompt, [72, 105]);
        assert_eq!(resume.id, format!("{:016x}", sent.id));
        let sampling = sent.sampling.unwrap();
        // Absent values are the model's defaults, the returned seed, its end token, and the rest of the context.
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.25, 7, 1.0));
        assert_eq!((sampling.seed, resume.seed), (reply.started.seed, reply.started.seed));
        assert_eq!((sampling.stop, sampling.tokens_max), (vec![crate::model::END], crate::model::CONTEXT - 2));
        house.close().await;
    });
}

#[test]
fn chat_and_token_ids_are_prompts_too() {
    run(async {
        let house = House::open(config()).await;
        let message = v1::ChatMessage { role: "user".into(), content: "A".into(), ..Default::default() };
        let chat = v1::Chat { messages: vec![message], ..Default::default() };
        let request = v1::GenerateRequest { input: Some(Input::Chat(chat)), ..Default::default() };
        generate(&house, request).await.unwrap();
        let ids = v1::TokenIds { ids: vec![1, 2, 3] };
        let request = v1::GenerateRequest { input: Some(Input::TokenIds(ids)), ..Default::default() };
        generate(&house, request).await.unwrap();
        let prompts: Vec<Vec<u32>> = house.fake.submits().into_iter().map(|request| request.prompt).collect();
        let chat = [&[256][..], &b"user:A".map(u32::from), &[257, 256]].concat();
        assert_eq!(prompts, [chat, vec![1, 2, 3]]);
        house.close().await;
    });
}

#[test]
fn refusals_have_codes_and_name_the_field() {
    run(async {
        let house = House::open(config()).await;
        let sampling = |sampling| v1::GenerateRequest { sampling: Some(sampling), ..text_request("x") };
        let default = v1::Sampling::default;
        for (request, code, word) in [
            (v1::GenerateRequest::default(), Code::InvalidArgument, "input"),
            (text_request(""), Code::InvalidArgument, "empty"),
            (text_request(&"x".repeat(200)), Code::InvalidArgument, "200"),
            (v1::GenerateRequest { model: "other".into(), ..text_request("x") }, Code::NotFound, "other"),
            (v1::GenerateRequest { priority: 1000, ..text_request("x") }, Code::InvalidArgument, "priority"),
            (sampling(v1::Sampling { temperature: Some(2.5), ..default() }), Code::InvalidArgument, "temperature"),
            (sampling(v1::Sampling { temperature: Some(f32::NAN), ..default() }), Code::InvalidArgument, "temperature"),
            (sampling(v1::Sampling { top_p: Some(-0.5), ..default() }), Code::InvalidArgument, "top_p"),
            (sampling(v1::Sampling { min_p: Some(-0.1), ..default() }), Code::InvalidArgument, "min_p"),
            (sampling(v1::Sampling { max_tokens: Some(0), ..default() }), Code::InvalidArgument, "max_tokens"),
            (sampling(v1::Sampling { stop: vec!["".into()], ..default() }), Code::InvalidArgument, "stop"),
            (
                sampling(v1::Sampling { stop_token_ids: vec![258], ..default() }),
                Code::InvalidArgument,
                "stop_token_ids",
            ),
            (sampling(v1::Sampling { logprobs: Some(21), ..default() }), Code::InvalidArgument, "logprobs"),
        ] {
            let Err(status) = generate(&house, request.clone()).await else { panic!("{request:?} was served") };
            assert_eq!(status.code(), code, "{request:?}");
            assert!(status.message().contains(word), "{status:?} does not contain {word}");
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn a_replica_that_refuses_is_quoted() {
    use proto::cluster::refused::Reason;
    run(async {
        let house = House::open(config()).await;
        for (reason, code) in [
            (Reason::Full, Code::ResourceExhausted),
            (Reason::Draining, Code::Unavailable),
            (Reason::NotReady, Code::Unavailable),
            (Reason::TooLong, Code::InvalidArgument),
            (Reason::Unsupported, Code::InvalidArgument),
            (Reason::Deadline, Code::DeadlineExceeded),
        ] {
            house.fake.script(|script| script.refuse = Some((reason, 7000)));
            let Err(status) = generate(&house, text_request("x")).await else { panic!("{reason:?} was served") };
            assert_eq!(status.code(), code, "{reason:?}");
            let retry = status.metadata().get("retry-after").map(|wait| wait.to_str().unwrap().to_owned());
            let waits = matches!(reason, Reason::Full | Reason::Draining | Reason::NotReady);
            assert_eq!(retry, waits.then(|| "7".to_owned()), "{reason:?}");
        }
        house.close().await;
    });
}

#[test]
fn a_deadline_ends_the_stream_and_the_request() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let request = v1::GenerateRequest { deadline_ms: 50, ..text_request("x") };
        let Err(status) = generate(&house, request).await else { panic!("it was served") };
        assert_eq!(status.code(), Code::DeadlineExceeded);
        let mut call = Request::new(text_request("x"));
        call.metadata_mut().insert("grpc-timeout", "100m".parse().unwrap());
        // Either the library's timer or the router's ends it first; the outcome is the same.
        if let Ok(replies) = client(&house).generate(call).await {
            let mut replies = replies.into_inner();
            let end = loop {
                match replies.message().await {
                    Ok(Some(_)) => {}
                    other => break other,
                }
            };
            assert!(matches!(end, Err(status) if status.code() == Code::DeadlineExceeded));
        }
        eventually(|| async { house.fake.cancels().len() == 2 }).await;
        assert!(house.fake.submits().iter().all(|request| request.deadline_micros.is_some()));
        house.close().await;
    });
}

#[test]
fn a_client_that_leaves_is_cancelled() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let mut replies = client(&house).generate(text_request("x")).await.unwrap().into_inner();
        replies.message().await.unwrap();
        drop(replies);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        assert_eq!(house.fake.cancels(), [house.fake.submits()[0].id]);
        house.close().await;
    });
}

#[test]
fn a_stop_string_cancels_and_finishes_once() {
    run(async {
        let house = House::open(config()).await;
        house.fake.answer("one two three four");
        house.fake.script(|script| script.hold_at = 12);
        let sampling = v1::Sampling { stop: vec!["nine".into(), "o th".into()], ..Default::default() };
        let reply =
            generate(&house, v1::GenerateRequest { sampling: Some(sampling), ..text_request("x") }).await.unwrap();
        assert_eq!(reply.text, "one tw");
        assert_eq!(reply.finished.stop, "o th");
        assert_eq!(reply.finished.reason(), v1::finished::Reason::Stop);
        assert_eq!(reply.finished.usage.unwrap().completion_tokens, 10);
        assert_eq!(reply.token_ids.len(), 10);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.close().await;
    });
}

#[test]
fn tokenizes_lists_and_reflects() {
    run(async {
        let house = House::open(config()).await;
        let mut client = client(&house);
        let input = Some(v1::tokenize_request::Input::Text("né<|im_end|>".into()));
        let tokens = client.tokenize(v1::TokenizeRequest { model: "".into(), input }).await.unwrap().into_inner();
        assert_eq!(tokens.token_ids, [110, 195, 169, 257]);
        let back = v1::DetokenizeRequest { model: "toy".into(), token_ids: tokens.token_ids };
        assert_eq!(client.detokenize(back).await.unwrap().into_inner().text, "né<|im_end|>");
        let models = client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        let model = v1::Model { id: "toy".into(), context: crate::model::CONTEXT, policy_digest: vec![7; 32] };
        assert_eq!(models, [model]);
        let ours = ["grpc.health.v1.Health", "lockstep.v1.Inference"];
        let of_vllm = ["vllm.Control", "vllm.Inference", "vllm.grpc.engine.VllmEngine"];
        assert_eq!(services(&house).await[..3], [ours[0], "inference.GRPCInferenceService", ours[1]]);
        assert_eq!(services(&house).await[3..], of_vllm);
        house.close().await;
    });
}

async fn services(house: &House) -> Vec<String> {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let channel = wire::tcp(&house.grpc.to_string()).unwrap();
    let request =
        ServerReflectionRequest { host: "".into(), message_request: Some(MessageRequest::ListServices("".into())) };
    let replies = ServerReflectionClient::new(channel).server_reflection_info(tokio_stream::once(request)).await;
    let reply = replies.unwrap().into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = reply.message_response else { panic!("{reply:?}") };
    let mut names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
    names.sort();
    names
}

#[test]
fn reflection_continues_after_unknown_symbol() {
    use tonic_reflection::pb::v1alpha::ServerReflectionRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_response::MessageResponse;
    run(async {
        let house = House::open(config()).await;
        let channel = wire::tcp(&house.grpc.to_string()).unwrap();
        let symbol_request = |symbol: &str| ServerReflectionRequest {
            host: "here".into(),
            message_request: Some(MessageRequest::FileContainingSymbol(symbol.into())),
        };
        let questions = tokio_stream::iter([symbol_request("no.such.Symbol"), symbol_request("lockstep.v1.Inference")]);
        let answers = ServerReflectionClient::new(channel).server_reflection_info(questions).await;
        let mut answers = answers.unwrap().into_inner();
        let first = answers.message().await.unwrap().unwrap();
        let Some(MessageResponse::ErrorResponse(error)) = &first.message_response else { panic!("{first:?}") };
        assert_eq!(error.error_code, i32::from(Code::NotFound));
        assert_eq!(
            (first.valid_host.as_str(), first.original_request),
            ("here", Some(symbol_request("no.such.Symbol")))
        );
        let second = answers.message().await.unwrap().unwrap();
        assert!(matches!(second.message_response, Some(MessageResponse::FileDescriptorResponse(_))), "{second:?}");
        house.close().await;
    });
}

#[test]
fn a_role_that_no_template_can_have_is_refused() {
    run(async {
        let house = House::open(config()).await;
        let message = v1::ChatMessage { role: "a wizard".into(), content: "A".into(), ..v1::ChatMessage::default() };
        let chat = v1::Chat { messages: vec![message], ..v1::Chat::default() };
        let input = Some(v1::generate_request::Input::Chat(chat));
        let status = client(&house).generate(v1::GenerateRequest { input, ..text_request("x") }).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("messages[0].role"), "{status}");
        // Programs read the field from the details.
        let details_text = String::from_utf8_lossy(status.details()).into_owned();
        let is_named = details_text.contains("\u{10}messages[0].role");
        assert!(details_text.contains("google.rpc.BadRequest") && is_named, "{details_text}");
        house.close().await;
    });
}

#[test]
fn health_follows_replica_phase() {
    run(async {
        let house = House::open_unready(config()).await;
        let mut health = HealthClient::new(wire::tcp(&house.grpc.to_string()).unwrap());
        let mut updates =
            health.watch(HealthCheckRequest { service: "lockstep.v1.Inference".into() }).await.unwrap().into_inner();
        let mut next = async || updates.message().await.unwrap().unwrap().status;
        const SERVING: i32 = 1;
        const NOT_SERVING: i32 = 2;
        let mut status = next().await;
        if status == 0 {
            status = next().await;
        }
        assert_eq!(status, NOT_SERVING);
        // A router that is not ready still lives: a probe that restarts it would not help.
        let mut live = HealthClient::new(wire::tcp(&house.grpc.to_string()).unwrap());
        let is_live = live.check(HealthCheckRequest { service: faces::LIVE.into() }).await.unwrap();
        assert_eq!(is_live.into_inner().status, SERVING);
        assert_eq!(client(&house).generate(text_request("x")).await.unwrap_err().code(), Code::Unavailable);
        house.fake.welcome();
        assert_eq!(next().await, SERVING);
        house.fake.phase(proto::cluster::state::Phase::Recovering);
        assert_eq!(next().await, NOT_SERVING);
        house.fake.phase(proto::cluster::state::Phase::Ready);
        assert_eq!(next().await, SERVING);
        house.fake.die();
        assert_eq!(next().await, NOT_SERVING);
        // A service without an entry may still come: its watch stays open, and a check reports that it does not exist.
        let unknown = || HealthCheckRequest { service: "elsewhere.v1".into() };
        assert_eq!(live.check(unknown()).await.unwrap_err().code(), Code::NotFound);
        let mut strange = live.watch(unknown()).await.unwrap().into_inner();
        assert_eq!(strange.message().await.unwrap().unwrap().status, 3);
        let more = tokio::time::timeout(Duration::from_millis(50), strange.message()).await;
        assert!(more.is_err(), "{more:?}");
        // An open watch delays nothing.
        house.close().await;
    });
}

#[test]
fn streams_end_in_time_when_no_replica_comes_back() {
    run(async {
        let mut config = config();
        config.timeouts.replica_absence_max = Duration::from_millis(50);
        let house = House::open(config).await;
        house.fake.script(|script| script.hold_at = 3);
        let mut replies = client(&house).generate(text_request("x")).await.unwrap().into_inner();
        replies.message().await.unwrap();
        house.fake.die();
        let end = loop {
            match replies.message().await {
                Ok(Some(_)) => {}
                other => break other,
            }
        };
        assert_eq!(end.unwrap_err().code(), Code::Unavailable);
        house.close().await;
    });
}
