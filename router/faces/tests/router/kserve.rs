//! `inference.GRPCInferenceService`, the Open Inference Protocol.

use crate::{House, config, eventually, run};
use proto::kserve as wire;
use proto::kserve::grpc_inference_service_client::GrpcInferenceServiceClient;
use proto::kserve::infer_parameter::ParameterChoice;
use proto::kserve::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use router::{ApiKeys, Config};
use tonic::transport::Channel;
use tonic::{Code, Request};

pub fn client(house: &House) -> GrpcInferenceServiceClient<Channel> {
    GrpcInferenceServiceClient::new(::wire::tcp(&house.grpc.to_string()).unwrap())
}

fn input(name: &str, datatype: &str, contents: wire::InferTensorContents) -> InferInputTensor {
    let contents = Some(contents);
    InferInputTensor { name: name.into(), datatype: datatype.into(), shape: vec![1], contents, ..Default::default() }
}

pub fn text(name: &str, text: &str) -> InferInputTensor {
    input(name, "BYTES", wire::InferTensorContents { bytes_contents: vec![text.into()], ..Default::default() })
}

fn truth(name: &str, truth: bool) -> InferInputTensor {
    input(name, "BOOL", wire::InferTensorContents { bool_contents: vec![truth], ..Default::default() })
}

pub fn infer_request(inputs: Vec<InferInputTensor>) -> wire::ModelInferRequest {
    wire::ModelInferRequest { model_name: "toy".into(), id: "7".into(), inputs, ..Default::default() }
}

fn output_texts(response: &wire::ModelInferResponse) -> Vec<String> {
    let bytes = |output: &wire::model_infer_response::InferOutputTensor| {
        output.contents.clone().unwrap().bytes_contents.remove(0)
    };
    response.outputs.iter().map(|output| String::from_utf8(bytes(output)).unwrap()).collect()
}

#[test]
fn a_text_is_answered() {
    run(async {
        let house = House::open(config()).await;
        let infer = async |request| client(&house).model_infer(request).await.map(tonic::Response::into_inner);
        let reply = infer(infer_request(vec![text("text_input", "Hi ")])).await.unwrap();
        assert_eq!(output_texts(&reply), ["Hi Hello, world"]);
        // Without parameters an answer ends as that of Triton's backend does.
        assert_eq!(house.fake.submits()[0].sampling.as_ref().unwrap().tokens_max, 16);
        assert_eq!((reply.model_name.as_str(), reply.model_version.as_str(), reply.id.as_str()), ("toy", "1", "7"));
        let sampling = r#"{"max_tokens": "5", "temperature": 0, "seed": 3}"#;
        let mut request = infer_request(vec![
            text("text_input", "Hi "),
            text("sampling_parameters", sampling),
            truth("exclude_input_in_output", true),
        ]);
        let output = |name: &str| InferRequestedOutputTensor { name: name.into(), ..Default::default() };
        request.outputs = vec![output("text_output"), output("finish_reason")];
        let parameter = wire::InferParameter { parameter_choice: Some(ParameterChoice::DoubleParam(0.5)) };
        request.parameters.insert("top_p".into(), parameter);
        assert_eq!(output_texts(&infer(request).await.unwrap()), ["Hello", "length"]);
        let sent = house.fake.submits().remove(1).sampling.unwrap();
        assert_eq!((sent.temperature, sent.seed, sent.top_p, sent.tokens_max), (0.0, 3, 0.5, 5));

        let mut raw = infer_request(vec![InferInputTensor { contents: None, ..text("text_input", "") }]);
        raw.raw_input_contents = vec![b"\x02\0\0\0Hi".to_vec()];
        let reply = infer(raw).await.unwrap();
        assert_eq!((&reply.raw_output_contents[0][..6], &reply.outputs[0].contents), (&b"\x0e\0\0\0Hi"[..], &None));
        house.close().await;
    });
}

#[test]
fn a_stream_of_requests_is_answered_one_by_one() {
    run(async {
        let house = House::open(config()).await;
        let requests = vec![
            infer_request(vec![text("text_input", "Hi"), truth("stream", true)]),
            infer_request(vec![text("image", "Hi")]),
            infer_request(vec![text("text_input", "Hi")]),
        ];
        let replies = client(&house).model_stream_infer(tokio_stream::iter(requests)).await.unwrap();
        let (mut replies, mut texts) = (replies.into_inner(), Vec::new());
        while let Some(reply) = replies.message().await.unwrap() {
            texts.push(match reply.infer_response {
                Some(response) => output_texts(&response).remove(0),
                None => reply.error_message,
            });
        }
        let pieces: String = texts[..12].concat();
        assert_eq!((pieces.as_str(), texts[12].as_str()), ("Hello, world", ""));
        assert!(texts[13].contains("image"), "{texts:?}");
        assert_eq!(texts[14..], ["HiHello, world"]);
        house.close().await;
    });
}

#[test]
fn a_client_that_leaves_has_cancelled() {
    run(async {
        let house = House::open(config()).await;
        house.fake.script(|script| script.hold_at = 3);
        let (requests, waiting) = tokio::sync::mpsc::channel(1);
        requests.send(infer_request(vec![text("text_input", "Hi"), truth("stream", true)])).await.unwrap();
        let stream = tokio_stream::wrappers::ReceiverStream::new(waiting);
        let mut replies = client(&house).model_stream_infer(stream).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap();
        drop((replies, requests));
        eventually(|| async { house.fake.cancels().len() == 1 }).await;
        house.close().await;
    });
}

/// An open stream has no more rights than one that begins now.
#[test]
fn each_request_of_a_stream_needs_a_key_that_is_valid_then() {
    run(async {
        let keys = ApiKeys::parse("alice:k1\nbob:k2").unwrap();
        let house = House::open(Config { keys: keys.clone(), ..config() }).await;
        let (requests, waiting) = tokio::sync::mpsc::channel(1);
        let mut call = Request::new(tokio_stream::wrappers::ReceiverStream::new(waiting));
        call.metadata_mut().insert("authorization", "Bearer k1".parse().unwrap());
        let mut replies = client(&house).model_stream_infer(call).await.unwrap().into_inner();
        requests.send(infer_request(vec![text("text_input", "Hi")])).await.unwrap();
        let response = replies.message().await.unwrap().unwrap().infer_response.unwrap();
        assert_eq!(output_texts(&response), ["HiHello, world"]);
        // New limits also apply to the open stream.
        keys.replace("alice:k1 requests_per_minute=1\nbob:k2").unwrap();
        for expect in ["", "1 requests a minute"] {
            requests.send(infer_request(vec![text("text_input", "Hi")])).await.unwrap();
            let reply = replies.message().await.unwrap().unwrap();
            assert!(reply.error_message.contains(expect) && reply.error_message.is_empty() == expect.is_empty());
        }
        // The stream ends with its key, with or without another request.
        keys.replace("bob:k2").unwrap();
        let refused = replies.message().await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
        assert_eq!(house.fake.submits().len(), 2);
        house.close().await;
    });
}

#[test]
fn refusals_name_what_they_refuse() {
    run(async {
        let house = House::open(config()).await;
        let sampling = |json: &str| infer_request(vec![text("text_input", "Hi"), text("sampling_parameters", json)]);
        for (request, code, name) in [
            (infer_request(vec![]), Code::InvalidArgument, "text_input"),
            (infer_request(vec![truth("text_input", true)]), Code::InvalidArgument, "text_input"),
            (infer_request(vec![text("text_input", "Hi"), truth("stream", true)]), Code::InvalidArgument, "stream"),
            (infer_request(vec![text("text_input", "Hi"), text("lora_name", "a")]), Code::InvalidArgument, "lora_name"),
            (sampling(r#"{"guided_regex": "("}"#), Code::InvalidArgument, "guided_regex"),
            (sampling(r#"{"top_p": 2}"#), Code::InvalidArgument, "top_p"),
            (sampling("[]"), Code::InvalidArgument, "sampling_parameters"),
            (wire::ModelInferRequest { model_name: "x".into(), ..sampling("{}") }, Code::NotFound, "x"),
            (wire::ModelInferRequest { model_version: "2".into(), ..sampling("{}") }, Code::InvalidArgument, "version"),
        ] {
            let refused = client(&house).model_infer(request).await.unwrap_err();
            assert_eq!(refused.code(), code, "{name}: {}", refused.message());
            assert!(refused.message().contains(name), "{name}: {}", refused.message());
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn server_and_model_report_metadata_and_readiness() {
    run(async {
        let house = House::open_unready(config()).await;
        let ready = || async {
            let server = client(&house).server_ready(wire::ServerReadyRequest {}).await.unwrap().into_inner().ready;
            let model = wire::ModelReadyRequest { name: "toy".into(), version: String::new() };
            (server, client(&house).model_ready(model).await.unwrap().into_inner().ready)
        };
        assert!(client(&house).server_live(wire::ServerLiveRequest {}).await.unwrap().into_inner().live);
        assert_eq!(ready().await, (false, false));
        house.fake.welcome();
        house.wait_until_ready().await;
        assert_eq!(ready().await, (true, true));
        let other = wire::ModelReadyRequest { name: "other".into(), version: String::new() };
        assert!(!client(&house).model_ready(other).await.unwrap().into_inner().ready);
        let server = client(&house).server_metadata(wire::ServerMetadataRequest {}).await.unwrap().into_inner();
        assert_eq!(server.name, "lockstep");
        let model = wire::ModelMetadataRequest { name: "toy".into(), version: "1".into() };
        let model = client(&house).model_metadata(model).await.unwrap().into_inner();
        let names = |tensors: &[wire::model_metadata_response::TensorMetadata]| {
            tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&model.outputs), ["text_output", "finish_reason"]);
        assert!(names(&model.inputs).contains(&"text_input".to_owned()));
        house.close().await;
    });
}

#[test]
fn an_answer_may_have_a_structure() {
    run(async {
        let house = House::open(config()).await;
        let infer = async |sampling: &str| {
            let inputs = vec![text("text_input", "Hi"), text("sampling_parameters", sampling)];
            client(&house).model_infer(infer_request(inputs)).await
        };
        infer(r#"{"structured_outputs": {"regex": "[0-9]+"}}"#).await.unwrap();
        infer(r#"{"guided_regex": "1"}"#).await.unwrap();
        infer(r#"{"max_tokens": 3}"#).await.unwrap();
        let has_grammar: Vec<_> = house.fake.submits().iter().map(|request| request.constraint.is_some()).collect();
        assert_eq!(has_grammar, [true, true, false]);
        house.close().await;
    });
}
