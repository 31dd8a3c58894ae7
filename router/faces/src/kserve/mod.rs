//! `inference.GRPCInferenceService`, the Open Inference Protocol, for text: `text_input` to `text_output`, with the
//! tensors of Triton's vLLM backend. Has no knowledge of replicas.

use crate::doors::call::{call_deadline, status, tenant};
use crate::http::fields::Fields;
use crate::http::format::finish_reason;
use crate::http::known::Endpoint;
use crate::http::structure::{rename_field, structure};
use crate::kserve::tensors::{InputTensors, metadata, response};
use proto::kserve as wire;
use proto::kserve::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use proto::v1::generate_request::Input;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent};
use router::front::parsed_request::ParsedRequest;
use router::front::parsed_request::Purpose;
use router::front::recorder::{Caller, Face, Recorder};
use router::refusal::Refusal;
use router::replicas::models::table::VersionSelector;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use types::TenantId;

mod tensors;

/// Unsent replies of one stream whose reader is slower than the request. Further outputs stay unread at the link.
const REPLIES_UNSENT_MAX: usize = 16;
/// The default length of an answer, as in Triton's backend for vLLM.
const TOKENS_MAX: u32 = 16;

pub fn service(front: Arc<Frontend>) -> GrpcInferenceServiceServer<impl GrpcInferenceService> {
    let body_bytes_max = front.config.limits.body_bytes_max;
    GrpcInferenceServiceServer::new(KserveService { front }).max_decoding_message_size(body_bytes_max)
}

#[derive(Clone)]
struct KserveService {
    front: Arc<Frontend>,
}

type Replies = mpsc::Sender<Result<wire::ModelStreamInferResponse, Status>>;

#[tonic::async_trait]
impl GrpcInferenceService for KserveService {
    type ModelStreamInferStream = ReceiverStream<Result<wire::ModelStreamInferResponse, Status>>;

    async fn server_live(
        &self,
        _: Request<wire::ServerLiveRequest>,
    ) -> Result<Response<wire::ServerLiveResponse>, Status> {
        Ok(Response::new(wire::ServerLiveResponse { live: true }))
    }

    /// Like `/ready`, this needs no key.
    async fn server_ready(
        &self,
        _: Request<wire::ServerReadyRequest>,
    ) -> Result<Response<wire::ServerReadyResponse>, Status> {
        Ok(Response::new(wire::ServerReadyResponse { ready: self.is_ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<wire::ModelReadyRequest>,
    ) -> Result<Response<wire::ModelReadyResponse>, Status> {
        let wire::ModelReadyRequest { name, version } = request.into_inner();
        let is_ready = || self.front.model(&name, VersionSelector::Weight).is_ok_and(|model| model.is_ready);
        let ready = check_version(&version).is_ok() && !self.front.admission.is_draining() && is_ready();
        Ok(Response::new(wire::ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        request: Request<wire::ServerMetadataRequest>,
    ) -> Result<Response<wire::ServerMetadataResponse>, Status> {
        tenant(&self.front, request.metadata()).map_err(status)?;
        Ok(Response::new(wire::ServerMetadataResponse {
            name: "lockstep".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            extensions: vec!["parameters".into()],
        }))
    }

    async fn model_metadata(
        &self,
        request: Request<wire::ModelMetadataRequest>,
    ) -> Result<Response<wire::ModelMetadataResponse>, Status> {
        tenant(&self.front, request.metadata()).map_err(status)?;
        let request = request.into_inner();
        let model = self.front.model(&request.name, VersionSelector::Weight).and_then(|model| {
            check_version(&request.version)?;
            Ok(model.name)
        });
        Ok(Response::new(metadata(model.map_err(status)?)))
    }

    async fn model_infer(
        &self,
        request: Request<wire::ModelInferRequest>,
    ) -> Result<Response<wire::ModelInferResponse>, Status> {
        let mut recorder = Recorder::start(Face::Kserve, &Caller::of_grpc(request.metadata()));
        let result = self.call_context(request.metadata()).and_then(|caller| read(request.into_inner(), &caller));
        let (parsed, style) = result.inspect_err(|refusal| recorder.record_refusal(refusal)).map_err(status)?;
        if style.is_stream {
            let refusal = Refusal::invalid("stream", "needs ModelStreamInfer");
            recorder.record_refusal(&refusal);
            return Err(status(refusal));
        }
        let generation = self.front.generate(parsed, recorder).await;
        let mut generation = generation.map_err(|refusal| status(rename_field(refusal, style.structure_field)))?;
        let answer = collect_answer(&mut generation).await.map_err(status)?;
        Ok(Response::new(style.response(&generation, &answer.text, &answer.reason)))
    }

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<wire::ModelInferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let CallContext { deadline, .. } = self.call_context(request.metadata()).map_err(status)?;
        let (replies, out) = mpsc::channel(REPLIES_UNSENT_MAX);
        let (service, metadata, mut requests) = (self.clone(), request.metadata().clone(), request.into_inner());
        tokio::spawn(async move {
            let answered = async {
                while let Ok(Some(request)) = requests.message().await {
                    let mut recorder = Recorder::start(Face::Kserve, &Caller::of_grpc(&metadata));
                    // A stream may stay open for days: its key may be revoked since, or belong to another tenant.
                    let tenant = match tenant(&service.front, &metadata) {
                        Ok(tenant) => tenant,
                        Err(refusal) => {
                            recorder.record_refusal(&refusal);
                            service.send_reply(&replies, Err(status(refusal))).await?;
                            break;
                        }
                    };
                    service.answer(request, &CallContext { tenant, deadline }, recorder, &replies).await?;
                }
                Some(())
            };
            tokio::select! {
                _answered = answered => {}
                // The client has left: dropping its requests cancels them.
                () = replies.closed() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(out)))
    }
}

/// The tenant and deadline of a call.
struct CallContext {
    tenant: TenantId,
    deadline: Option<Instant>,
}

impl KserveService {
    fn is_ready(&self) -> bool {
        self.front.replicas.is_any_ready() && !self.front.admission.is_draining()
    }

    fn call_context(&self, metadata: &MetadataMap) -> Result<CallContext, Refusal> {
        Ok(CallContext { tenant: tenant(&self.front, metadata)?, deadline: call_deadline(metadata)? })
    }

    /// Answers one request of a stream. None if the client has left.
    async fn answer(
        &self,
        request: wire::ModelInferRequest,
        caller: &CallContext,
        mut recorder: Recorder,
        replies: &Replies,
    ) -> Option<()> {
        let result = match read(request, caller) {
            Ok((parsed, style)) => self.send_replies(parsed, style, recorder, replies).await,
            Err(refusal) => {
                recorder.record_refusal(&refusal);
                Err(refusal)
            }
        };
        match result {
            Ok(sent) => sent,
            // A refusal ends one request. The stream continues with the next.
            Err(refusal) => {
                let reply = wire::ModelStreamInferResponse { error_message: refusal.to_string(), infer_response: None };
                self.send_reply(replies, Ok(reply)).await
            }
        }
    }

    /// Sends a reply. None if the client has left, or does not read.
    async fn send_reply(&self, replies: &Replies, reply: Result<wire::ModelStreamInferResponse, Status>) -> Option<()> {
        replies.send_timeout(reply, self.front.config.timeouts.unread_max).await.ok()
    }

    async fn send_replies(
        &self,
        parsed: ParsedRequest,
        style: KserveReplyFormat,
        recorder: Recorder,
        replies: &Replies,
    ) -> Result<Option<()>, Refusal> {
        let generation = self.front.generate(parsed, recorder).await;
        let mut generation = generation.map_err(|refusal| rename_field(refusal, style.structure_field))?;
        let reply = |response| {
            Ok(wire::ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) })
        };
        if !style.is_stream {
            let answer = collect_answer(&mut generation).await?;
            let response = style.response(&generation, &answer.text, &answer.reason);
            return Ok(self.send_reply(replies, reply(response)).await);
        }
        while let Some(event) = generation.next().await {
            let response = match event?.1 {
                GenerationEvent::Delta(delta) if !delta.text.is_empty() => style.response(&generation, &delta.text, ""),
                GenerationEvent::Finished(finished) => style.response(&generation, "", finish_reason(&finished)),
                _ => continue,
            };
            if self.send_reply(replies, reply(response)).await.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(()))
    }
}

/// The format of a request's responses.
struct KserveReplyFormat {
    id: String,
    /// The prompt to repeat before the answer, if requested.
    prompt: String,
    is_stream: bool,
    has_reason: bool,
    is_raw: bool,
    /// The field that constrains the answer, for refusals.
    structure_field: Option<&'static str>,
}

/// Reads a request, and the format of its responses.
fn read(request: wire::ModelInferRequest, caller: &CallContext) -> Result<(ParsedRequest, KserveReplyFormat), Refusal> {
    check_version(&request.model_version)?;
    let is_raw = !request.raw_input_contents.is_empty();
    let tensors = InputTensors::read(request.inputs, request.raw_input_contents)?;
    let has_reason = tensors::has_reason(&request.outputs)?;
    let mut fields = Fields::of(tensors::parameters(request.parameters, tensors.sampling)?);
    fields.check(Endpoint::Infer)?;
    let text = tensors.text.ok_or_else(|| Refusal::invalid("text_input", "is missing"))?;
    // As in Triton's backend, the prompt precedes an answer, but not a streamed one.
    let is_stream = tensors.is_stream;
    let repeats = !tensors.exclude_input.unwrap_or(is_stream);
    if is_stream && repeats {
        return Err(Refusal::invalid("exclude_input_in_output", "must be true for streams"));
    }
    let prompt = if repeats { text.clone() } else { String::new() };
    let mut sampling = fields.sampling()?;
    sampling.max_tokens.get_or_insert(TOKENS_MAX);
    let structure = structure(&mut fields)?;
    let structure_field = structure.as_ref().map(|requested| requested.field);
    sampling.structure = structure.map(|requested| requested.structure);
    let deadline = [caller.deadline, fields.deadline()?].into_iter().flatten().min();
    let (priority, cache_salt, cache_hint) = (fields.priority()?, fields.cache_salt()?, fields.cache_hint()?);
    let parsed = ParsedRequest {
        model: request.model_name,
        prompts: vec![Input::Text(text)],
        purpose: Purpose::Generate(Box::new(sampling)),
        priority,
        cache_salt,
        cache_hint,
        deadline,
        tenant: caller.tenant,
        ..ParsedRequest::default()
    };
    Ok((parsed, KserveReplyFormat { id: request.id, prompt, is_stream, has_reason, is_raw, structure_field }))
}

impl KserveReplyFormat {
    fn response(&self, generation: &Generation, text: &str, reason: &str) -> wire::ModelInferResponse {
        let text = [self.prompt.as_str(), text].concat();
        let reason = self.has_reason.then_some(reason);
        response(&self.id, &generation.started.model, text, reason, self.is_raw)
    }
}

struct CollectedAnswer {
    text: String,
    reason: String,
}

async fn collect_answer(generation: &mut Generation) -> Result<CollectedAnswer, Refusal> {
    let mut answer = CollectedAnswer { text: String::new(), reason: String::new() };
    while let Some(event) = generation.next().await {
        match event?.1 {
            GenerationEvent::Delta(delta) => answer.text.push_str(&delta.text),
            GenerationEvent::Finished(finished) => answer.reason = finish_reason(&finished).into(),
            GenerationEvent::Aside(_) => {}
        }
    }
    Ok(answer)
}

fn check_version(version: &str) -> Result<(), Refusal> {
    match version {
        "" | tensors::VERSION => Ok(()),
        _ => Err(Refusal::invalid("model_version", format!("must be {}, or empty", tensors::VERSION))),
    }
}
