//! `vllm.Inference` and `vllm.Control`, the protocol of vLLM's own gRPC server.

use crate::model::{CONTEXT, END};
use crate::{House, config, eventually, run};
use proto::vllm_server as wire;
use proto::vllm_server::candidate_tokens::Select;
use proto::vllm_server::control_client::ControlClient;
use proto::vllm_server::finish_info::{FinishReason, StopReason};
use proto::vllm_server::generate_request::Prompt;
use proto::vllm_server::inference_client::InferenceClient;
use router::ApiKeys;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

fn client(house: &House) -> InferenceClient<Channel> {
    InferenceClient::new(::wire::tcp(&house.grpc.to_string()).unwrap())
}

fn control(house: &House) -> ControlClient<Channel> {
    ControlClient::new(::wire::tcp(&house.grpc.to_string()).unwrap())
}

fn request() -> wire::GenerateRequest {
    wire::GenerateRequest {
        request_id: "one".into(),
        prompt: Some(Prompt::TokenIds(wire::TokenIds { ids: vec![72, 105] })),
        ..Default::default()
    }
}

fn top(n: u32) -> Option<wire::CandidateTokens> {
    Some(wire::CandidateTokens { select: Some(Select::TopN(n)) })
}

fn answer() -> Vec<u32> {
    b"Hello, world".iter().map(|byte| u32::from(*byte)).chain([END]).collect()
}

async fn collect(mut replies: Streaming<wire::GenerateResponse>) -> Vec<wire::GenerateResponse> {
    let mut all = Vec::new();
    while let Some(reply) = replies.message().await.unwrap() {
        all.push(reply);
    }
    all
}

#[test]
fn a_stream_is_the_prompt_and_then_parts() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.n_cached = 1);
        let replies = collect(client(&house).generate_stream(request()).await.unwrap().into_inner()).await;
        let prompt = wire::PromptInfo { num_prompt_tokens: 2, ..Default::default() };
        assert_eq!((replies[0].prompt_info.as_ref(), replies[0].outputs.as_ref()), (Some(&prompt), None));
        let parts: Vec<_> = replies[1..].iter().map(|reply| reply.outputs.as_ref().unwrap()).collect();
        let text: String = parts.iter().map(|part| part.text.as_str()).collect();
        let n_tokens: u32 = parts.iter().map(|part| part.num_tokens).sum();
        assert_eq!((text.as_str(), n_tokens), ("Hello, world", 13));
        assert!(parts.iter().all(|part| part.token_ids.is_empty() && part.logprobs.is_empty()), "not requested");
        let (last, before) = parts.split_last().unwrap();
        assert!(before.iter().all(|part| part.finish_info.is_none()));
        let expect = wire::FinishInfo {
            num_output_tokens: 13,
            finish_reason: FinishReason::Stop.into(),
            num_cached_tokens: Some(1),
            stop_reason: Some(StopReason::EosTokenId(END)),
        };
        assert_eq!(last.finish_info, Some(expect));
        // An absent temperature is greedy, and an absent length is the rest of the context.
        let sampling = house.fake.submits().remove(0).sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.tokens_max), (0.0, CONTEXT - 2));
        house.close().await;
    });
}

#[test]
fn a_whole_answer_has_what_was_requested() {
    run(async {
        let house = House::open(config()).await;
        let response = wire::ResponseOptions {
            prompt_token_ids: true,
            prompt_logprobs: true,
            output_text: Some(false),
            output_token_ids: true,
            output_logprobs: true,
            output_candidates: top(2),
            ..Default::default()
        };
        let stopping = wire::StoppingCriteria { max_new_tokens: 5, ..Default::default() };
        let sampling = wire::RandomSampling { seed: Some(-7), ..Default::default() };
        let request = wire::GenerateRequest {
            temperature: Some(0.5),
            response: Some(response),
            stopping: Some(stopping),
            sampling: Some(sampling),
            ..request()
        };
        let whole = client(&house).generate(request).await.unwrap().into_inner();
        let prompt = whole.prompt_info.unwrap();
        assert_eq!((prompt.token_ids, prompt.logprobs), (vec![72, 105], vec![0.0, -0.5]));
        let outputs = whole.outputs.unwrap();
        assert_eq!((outputs.text.as_str(), outputs.num_tokens, &outputs.token_ids[..]), ("", 5, &answer()[..5]));
        assert_eq!(outputs.logprobs, [-0.5; 5]);
        let ranks: Vec<_> = outputs.candidate_tokens[4].tokens.iter().map(|token| (token.id, token.rank)).collect();
        assert_eq!(ranks, [(97, 1), (98, 2)]);
        let end = outputs.finish_info.unwrap();
        assert_eq!((end.finish_reason(), end.num_output_tokens, end.stop_reason), (FinishReason::Length, 5, None));
        let sampling = house.fake.submits().remove(0).sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.seed), (0.5, -7i64 as u64));
        house.close().await;
    });
}

#[test]
fn sequences_stop_each_for_itself() {
    run(async {
        let house = House::open(config()).await;
        let sampling = Some(wire::RandomSampling { num_sequences: 2, ..Default::default() });
        let stopping = wire::StoppingCriteria { stop_strings: vec!["wor".into()], ..Default::default() };
        let several = wire::GenerateRequest { sampling, stopping: Some(stopping), ..request() };
        let replies = collect(client(&house).generate_stream(several.clone()).await.unwrap().into_inner()).await;
        for index in 0..2 {
            let parts = replies.iter().filter_map(|reply| reply.outputs.as_ref()).filter(|part| part.index == index);
            let ends: Vec<_> = parts.clone().filter_map(|part| part.finish_info.as_ref()).collect();
            assert_eq!(ends.len(), 1);
            assert_eq!(ends[0].stop_reason, Some(StopReason::StopString("wor".into())));
            assert_eq!(parts.map(|part| part.text.as_str()).collect::<String>(), "Hello, ");
        }
        let status = client(&house).generate(several).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("sampling.num_sequences: needs GenerateStream"), "{status}");
        house.close().await;
    });
}

#[test]
fn an_abort_ends_the_stream_and_the_request() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let mut replies = client(&house).generate_stream(request()).await.unwrap().into_inner();
        let mut n_tokens = 0;
        while n_tokens < 3 {
            let part = replies.message().await.unwrap().unwrap().outputs;
            n_tokens += part.map_or(0, |part| part.num_tokens);
        }
        let ids = wire::AbortRequest { request_ids: vec!["other".into(), "one".into()] };
        control(&house).abort(ids).await.unwrap();
        let rest = collect(replies).await;
        let end = rest.last().unwrap().outputs.as_ref().unwrap().finish_info.as_ref().unwrap();
        assert_eq!((end.finish_reason(), end.num_output_tokens), (FinishReason::Aborted, 3));
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.close().await;
    });
}

#[test]
fn refusals_name_the_field_in_this_protocol() {
    run(async {
        let house = House::open(config()).await;
        let options = |response| wire::GenerateRequest { response: Some(response), ..request() };
        let regex = wire::decoding_parameters::StructuredOutput::Regex("(".into());
        let decoding = wire::DecodingParameters { structured_output: Some(regex), ..Default::default() };
        let many = wire::ResponseOptions { output_logprobs: true, output_candidates: top(21), ..Default::default() };
        let kv = |cache_salt: String| Some(wire::KvCacheParameters { cache_salt, ..Default::default() });
        for (request, code, word) in [
            (wire::GenerateRequest { prompt: None, ..request() }, Code::InvalidArgument, "prompt: "),
            (wire::GenerateRequest { model: "other".into(), ..request() }, Code::NotFound, "other"),
            (wire::GenerateRequest { lora_name: "x".into(), ..request() }, Code::InvalidArgument, "lora_name: "),
            (wire::GenerateRequest { kv: kv("x".repeat(2000)), ..request() }, Code::InvalidArgument, "kv.cache_salt: "),
            (options(many), Code::InvalidArgument, "response.output_candidates: "),
            (
                wire::GenerateRequest { decoding: Some(decoding), ..request() },
                Code::InvalidArgument,
                "decoding.structured_output: ",
            ),
        ] {
            let status = client(&house).generate(request).await.unwrap_err();
            assert_eq!(status.code(), code, "{word}");
            assert!(status.message().contains(word), "{status} does not contain {word}");
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn the_server_describes_itself() {
    run(async {
        let house = House::open(config()).await;
        let mut control = control(&house);
        let model = control.get_model_info(wire::GetModelInfoRequest {}).await.unwrap().into_inner();
        assert_eq!((model.model_id.as_str(), model.served_model_name.as_str()), ("org/toy", "toy"));
        assert_eq!(model.served_model_aliases, ["alias"]);
        assert!(model.supports_text_input && model.supports_token_ids_input && !model.supports_lora);
        let server = control.get_server_info(wire::GetServerInfoRequest {}).await.unwrap().into_inner();
        assert_eq!((server.max_model_len, server.kv_block_size), (CONTEXT, types::BLOCK_TOKENS));
        assert_eq!(server.parallelism.unwrap().data_parallel_size, 1);
        assert!(!control.is_paused(wire::IsPausedRequest {}).await.unwrap().into_inner().paused);
        assert!(!control.is_sleeping(wire::IsSleepingRequest {}).await.unwrap().into_inner().sleeping);
        let sources = control.get_kv_event_sources(wire::GetKvEventSourcesRequest {}).await.unwrap().into_inner();
        assert!(sources.sources.is_empty());
        for status in [
            control.shutdown(wire::ShutdownRequest {}).await.unwrap_err(),
            control.list_loras(wire::ListLorasRequest {}).await.unwrap_err(),
        ] {
            assert_eq!(status.code(), Code::FailedPrecondition);
        }
        house.close().await;
        let keys = ApiKeys::parse("alice:k1").unwrap();
        let keyed = House::open(router::Config { keys, ..config() }).await;
        let status = client(&keyed).generate(request()).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated);
        let status = self::control(&keyed).get_server_info(wire::GetServerInfoRequest {}).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated);
        keyed.close().await;
    });
}
