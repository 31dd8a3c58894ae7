//! `vllm.grpc.engine.VllmEngine`: tokens in, tokens out.

use crate::model::{CONTEXT, END, VOCAB};
use crate::{House, config, eventually, run};
use checkpoint::TextBundle;
use proto::vllm as wire;
use proto::vllm::generate_complete::MatchedStop;
use proto::vllm::generate_request::Input;
use proto::vllm::generate_response::Response::{Chunk, Complete};
use proto::vllm::sampling_params::Constraint;
use proto::vllm::vllm_engine_client::VllmEngineClient;
use router::ApiKeys;
use std::collections::HashMap;
use std::sync::Arc;
use tonic::transport::Channel;
use tonic::{Code, Request, Streaming};

fn client(house: &House) -> VllmEngineClient<Channel> {
    VllmEngineClient::new(::wire::tcp(&house.grpc.to_string()).unwrap())
}

fn generate_request(params: wire::SamplingParams) -> wire::GenerateRequest {
    let tokenized = wire::TokenizedInput { original_text: "Hi".into(), input_ids: vec![72, 105] };
    let sampling_params = Some(wire::SamplingParams { skip_special_tokens: true, ..params });
    wire::GenerateRequest {
        request_id: "one".into(),
        input: Some(Input::Tokenized(tokenized)),
        sampling_params,
        stream: true,
        ..Default::default()
    }
}

async fn collect_replies(
    mut replies: Streaming<wire::GenerateResponse>,
) -> (Vec<wire::GenerateStreamChunk>, Vec<wire::GenerateComplete>) {
    let (mut chunks, mut completes) = (Vec::new(), Vec::new());
    while let Some(reply) = replies.message().await.unwrap() {
        match reply.response.unwrap() {
            Chunk(chunk) => chunks.push(chunk),
            Complete(complete) => completes.push(complete),
        }
    }
    (chunks, completes)
}

async fn generate(
    house: &House,
    request: wire::GenerateRequest,
) -> (Vec<wire::GenerateStreamChunk>, Vec<wire::GenerateComplete>) {
    collect_replies(client(house).generate(request).await.unwrap().into_inner()).await
}

fn answer() -> Vec<u32> {
    b"Hello, world".iter().map(|byte| u32::from(*byte)).chain([END]).collect()
}

#[test]
fn a_stream_is_chunks_and_a_complete() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.n_cached = 1);
        let (chunks, completes) = generate(&house, generate_request(wire::SamplingParams::default())).await;
        let ids: Vec<u32> = chunks.iter().flat_map(|chunk| chunk.token_ids.clone()).collect();
        assert_eq!(ids, answer());
        assert!(chunks.iter().all(|chunk| (chunk.completion_tokens, chunk.prompt_tokens, chunk.index) == (1, 2, 0)));
        assert!(chunks.iter().all(|chunk| chunk.output_logprobs.is_none()));
        let [complete] = &completes[..] else { panic!("{completes:?}") };
        assert_eq!((complete.finish_reason.as_str(), complete.completion_tokens), ("stop", 13));
        assert_eq!((complete.prompt_tokens, complete.cached_tokens), (2, 1));
        assert_eq!((&complete.output_ids, &complete.matched_stop), (&vec![END], &None));
        // An absent value is the engine's default, and not the model's.
        let sampling = house.fake.submits().remove(0).sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (1.0, 0, 1.0));
        assert_eq!((sampling.stop, sampling.tokens_max), (vec![END], CONTEXT - 2));
        house.close().await;
    });
}

#[test]
fn a_whole_answer_is_a_complete_for_each_choice() {
    run(async {
        let house = House::open(config()).await;
        let params = wire::SamplingParams {
            n: 2,
            max_tokens: Some(5),
            temperature: Some(0.5),
            seed: Some(-7),
            logprobs: Some(2),
            prompt_logprobs: Some(1),
            logit_bias: HashMap::from([(65, 1.5)]),
            ..Default::default()
        };
        let (chunks, mut completes) =
            generate(&house, wire::GenerateRequest { stream: false, ..generate_request(params) }).await;
        assert_eq!(chunks, []);
        completes.sort_by_key(|complete| complete.index);
        assert_eq!(completes.len(), 2);
        for (index, complete) in completes.iter().enumerate() {
            assert_eq!((complete.index as usize, complete.finish_reason.as_str()), (index, "length"));
            assert_eq!((&complete.output_ids[..], complete.completion_tokens), (&answer()[..5], 5));
            let logprobs = complete.output_logprobs.as_ref().unwrap();
            assert_eq!((&logprobs.token_ids[..], &logprobs.token_logprobs[..]), (&answer()[..5], &[-0.5; 5][..]));
            assert_eq!(
                (&logprobs.top_logprobs[4].token_ids[..], logprobs.top_logprobs[4].values[1]),
                (&[97, 98][..], -2.0)
            );
            let prompt = complete.input_logprobs.as_ref().unwrap();
            let values: Vec<_> = prompt.token_logprobs.iter().map(|one| one.value).collect();
            assert_eq!((&prompt.token_ids[..], &values[..]), (&[72, 105][..], &[None, Some(-0.5)][..]));
        }
        let sampling = house.fake.submits().remove(0).sampling.unwrap();
        assert_eq!((sampling.temperature, sampling.seed), (0.5, -7i64 as u64));
        house.close().await;
    });
}

#[test]
fn matched_stop_is_reported() {
    run(async {
        let house = House::open(config()).await;
        let stop = |stop: &[&str], ids: &[u32]| wire::SamplingParams {
            stop: stop.iter().map(|text| (*text).to_owned()).collect(),
            stop_token_ids: ids.to_vec(),
            ..Default::default()
        };
        let (_, completes) = generate(&house, generate_request(stop(&["wor"], &[]))).await;
        assert_eq!(completes[0].matched_stop, Some(MatchedStop::MatchedStopStr("wor".into())));
        // All tokens up to the one that completed it are sent: the gateway decides which of them are text.
        assert_eq!((completes[0].finish_reason.as_str(), completes[0].completion_tokens), ("stop", 10));
        let (chunks, completes) = generate(&house, generate_request(stop(&[], &[u32::from(b'w')]))).await;
        assert_eq!(completes[0].matched_stop, Some(MatchedStop::MatchedTokenId(u32::from(b'w'))));
        assert_eq!(chunks.last().unwrap().token_ids, [u32::from(b'w')]);
        house.close().await;
    });
}

#[test]
fn an_abort_by_its_owner_ends_it() {
    run(async {
        let mut config = config();
        config.keys = ApiKeys::parse("alice:k1\nbob:k2").unwrap();
        let house = House::open(config).await;
        house.fake.script(|script| script.hold_at = 3);
        fn keyed<T>(message: T, key: &str) -> Request<T> {
            let mut request = Request::new(message);
            request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            request
        }
        let refused = client(&house).generate(generate_request(wire::SamplingParams::default())).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let request = keyed(generate_request(wire::SamplingParams::default()), "k1");
        let mut replies = client(&house).generate(request).await.unwrap().into_inner();
        for _ in 0..3 {
            assert!(matches!(replies.message().await.unwrap().unwrap().response, Some(Chunk(_))));
        }
        let abort = |ids: &[&str]| wire::AbortRequest { request_ids: ids.iter().map(|id| (*id).to_owned()).collect() };
        client(&house).abort(keyed(abort(&["one"]), "k2")).await.unwrap();
        client(&house).abort(keyed(abort(&["another"]), "k1")).await.unwrap();
        assert!(house.fake.cancels().is_empty());
        client(&house).abort(keyed(abort(&["one"]), "k1")).await.unwrap();
        let (chunks, completes) = collect_replies(replies).await;
        assert_eq!((chunks.len(), completes[0].finish_reason.as_str()), (0, "abort"));
        assert_eq!(completes[0].completion_tokens, 3);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.close().await;
    });
}

#[test]
fn a_client_that_leaves_has_cancelled() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let mut replies =
            client(&house).generate(generate_request(wire::SamplingParams::default())).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap();
        drop(replies);
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.close().await;
    });
}

#[test]
fn refusals_name_what_they_refuse() {
    run(async {
        let house = House::open(config()).await;
        let plain = || generate_request(wire::SamplingParams::default());
        let with = |params: wire::SamplingParams| generate_request(params);
        let ids = |input_ids: Vec<u32>| {
            Some(Input::Tokenized(wire::TokenizedInput { original_text: String::new(), input_ids }))
        };
        let json_schema = Some(Constraint::JsonSchema("{".into()));
        for (request, name) in [
            (wire::GenerateRequest { input: None, ..plain() }, "input"),
            (wire::GenerateRequest { input: ids(vec![]), ..plain() }, "tokenized.input_ids"),
            (wire::GenerateRequest { input: ids(vec![VOCAB]), ..plain() }, "tokenized.input_ids"),
            (wire::GenerateRequest { input: ids(vec![1; 500]), ..plain() }, "500 tokens"),
            (wire::GenerateRequest { mm_inputs: Some(wire::Unserved {}), ..plain() }, "mm_inputs"),
            (wire::GenerateRequest { request_id: "x".repeat(300), ..plain() }, "request_id"),
            (with(wire::SamplingParams { constraint: json_schema, ..Default::default() }), "json_schema"),
            (with(wire::SamplingParams { top_p: 2.0, ..Default::default() }), "top_p"),
            (with(wire::SamplingParams { n: 1000, ..Default::default() }), "n: "),
            (with(wire::SamplingParams { max_tokens: Some(0), ..Default::default() }), "sampling_params.max_tokens"),
            (with(wire::SamplingParams { logprobs: Some(-1), ..Default::default() }), "logprobs"),
        ] {
            let refused = client(&house).generate(request).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument, "{name}");
            assert!(refused.message().contains(name), "{name}: {}", refused.message());
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn a_gateway_learns_what_it_needs_at_its_start() {
    run(async {
        let zip: Vec<u8> = (0..150_000u32).map(|i| i as u8).collect();
        let mut config = config();
        let bundle = TextBundle { zip: zip.clone(), sha256: "5a".into() };
        config.text_files = Some(Arc::new(move || Ok(bundle.clone())));
        let house = House::open_unready(config).await;
        let health = || async { client(&house).health_check(wire::HealthCheckRequest {}).await.unwrap().into_inner() };
        assert!(!health().await.healthy);
        house.fake.welcome();
        house.wait_until_ready().await;
        assert!(health().await.healthy);
        let model = client(&house).get_model_info(wire::GetModelInfoRequest {}).await.unwrap().into_inner();
        assert_eq!((model.served_model_name.as_str(), model.model_path.as_str()), ("toy", "org/toy"));
        assert_eq!(
            (model.max_context_length, model.vocab_size, &model.eos_token_ids[..]),
            (CONTEXT, VOCAB, &[257][..])
        );
        assert_eq!(model.default_sampling_params_json, r#"{"temperature":0.25,"top_k":7}"#);
        let server = client(&house).get_server_info(wire::GetServerInfoRequest {}).await.unwrap().into_inner();
        assert_eq!((server.active_requests, server.is_paused, server.block_size), (0, false, 16));
        let loads = client(&house).get_loads(wire::GetLoadsRequest::default()).await.unwrap().into_inner();
        assert_eq!((loads.dp_rank_count, loads.loads.len(), loads.loads[0].num_total_reqs), (1, 1, 0));
        let mut chunks = client(&house).get_tokenizer(wire::GetTokenizerRequest {}).await.unwrap().into_inner();
        let (mut bytes, mut sums) = (Vec::new(), Vec::new());
        while let Some(chunk) = chunks.message().await.unwrap() {
            bytes.extend(chunk.data);
            sums.push(chunk.sha256);
        }
        assert!(bytes == zip);
        assert_eq!(sums, ["", "", "5a"]);
        house.close().await;
        let house = House::open(crate::config()).await;
        let refused = client(&house).get_tokenizer(wire::GetTokenizerRequest {}).await.err().unwrap();
        assert_eq!(refused.code(), Code::Unimplemented);
        house.close().await;
    });
}

#[test]
fn an_embedding_has_length_one() {
    run(async {
        let house = House::open(config()).await;
        let tokenized = Some(wire::TokenizedInput { original_text: String::new(), input_ids: vec![4, 1, 1] });
        let request = wire::EmbedRequest { request_id: String::new(), tokenized };
        let reply = client(&house).embed(request).await.unwrap().into_inner();
        assert_eq!((reply.embedding, reply.embedding_dim, reply.prompt_tokens), (vec![0.6, 0.8], 2, 3));
        house.close().await;
    });
}
