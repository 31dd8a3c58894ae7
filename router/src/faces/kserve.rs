//! `inference.GRPCInferenceService`, the Open Inference Protocol, for text: `text_input` to `text_output`, with the
//! tensors that Triton's vLLM backend has.

use crate::faces::kserve::tensors::{Tensors, metadata, response};
use crate::generate::{Ask, Front, Purpose};
use crate::generation::{Event, Generation};
use crate::grpc::{call_deadline, status, tenant};
use crate::http::{Fields, finish_reason};
use crate::measure::{Caller, Clock, Face};
use crate::models::By;
use crate::refusal::Refusal;
use proto::kserve as wire;
use proto::kserve::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use proto::v1::generate_request::Input;
use std::sync::Arc;
use telemetry::spans::Traced;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use types::TenantId;

mod tensors;

/// Of a stream whose reader is slower than its request. What comes meanwhile waits where all that is unread does.
const REPLIES_UNSENT_MAX: usize = 16;

pub fn service(front: Arc<Front>) -> GrpcInferenceServiceServer<impl GrpcInferenceService> {
    let body_bytes_max = front.config.limits.body_bytes_max;
    GrpcInferenceServiceServer::new(Service { front }).max_decoding_message_size(body_bytes_max)
}

#[derive(Clone)]
struct Service {
    front: Arc<Front>,
}

type Replies = mpsc::Sender<Result<wire::ModelStreamInferResponse, Status>>;

#[tonic::async_trait]
impl GrpcInferenceService for Service {
    type ModelStreamInferStream = ReceiverStream<Result<wire::ModelStreamInferResponse, Status>>;

    async fn server_live(
        &self,
        _: Request<wire::ServerLiveRequest>,
    ) -> Result<Response<wire::ServerLiveResponse>, Status> {
        Ok(Response::new(wire::ServerLiveResponse { live: true }))
    }

    /// Needs no key, as `/ready` needs none.
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
        let is_ready = || self.front.model(&name, By::Weight).is_ok_and(|model| model.is_ready);
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
        let model = self.front.model(&request.name, By::Weight).and_then(|model| {
            check_version(&request.version)?;
            Ok(model.name)
        });
        Ok(Response::new(metadata(model.map_err(status)?)))
    }

    async fn model_infer(
        &self,
        request: Request<wire::ModelInferRequest>,
    ) -> Result<Response<wire::ModelInferResponse>, Status> {
        let mut clock = Clock::start(Face::Kserve, &Caller::of_grpc(request.metadata()));
        let read = self.caller(request.metadata()).and_then(|caller| Wanted::read(request.into_inner(), &caller));
        let wanted = read.inspect_err(|refusal| clock.refused(refusal)).map_err(status)?;
        if wanted.is_stream {
            let refusal = Refusal::invalid("stream", "is for ModelStreamInfer");
            clock.refused(&refusal);
            return Err(status(refusal));
        }
        let (mut generation, style) = self.begin(wanted, clock).await.map_err(status)?;
        let answer = whole(&mut generation).await.map_err(status)?;
        Ok(Response::new(style.response(&generation, &answer.text, &answer.reason)))
    }

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<wire::ModelInferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let caller = self.caller(request.metadata()).map_err(status)?;
        let (replies, out) = mpsc::channel(REPLIES_UNSENT_MAX);
        let (service, metadata, mut requests) = (self.clone(), request.metadata().clone(), request.into_inner());
        tokio::spawn(async move {
            let answered = async {
                while let Ok(Some(request)) = requests.message().await {
                    let clock = Clock::start(Face::Kserve, &Caller::of_grpc(&metadata));
                    service.answer(request, &caller, clock, &replies).await?;
                }
                Some(())
            };
            tokio::select! {
                _answered = answered => {}
                // The client has left: what runs for it is dropped, and so cancelled.
                () = replies.closed() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(out)))
    }
}

/// Who asks, and until when.
struct Asking {
    tenant: TenantId,
    deadline: Option<Instant>,
}

impl Service {
    fn is_ready(&self) -> bool {
        self.front.replicas.is_any_ready() && !self.front.admission.is_draining()
    }

    fn caller(&self, metadata: &MetadataMap) -> Result<Asking, Refusal> {
        Ok(Asking { tenant: tenant(&self.front, metadata)?, deadline: call_deadline(metadata)? })
    }

    async fn begin(&self, wanted: Wanted, clock: Clock) -> Result<(Generation, Style), Refusal> {
        let ask = Ask { trace: clock.trace(), clock: Some(clock), ..wanted.ask };
        let mut generation = self.front.generate(ask).await?;
        generation.answered(self.front.config.waits.first_answer_max).await?;
        Ok((generation, wanted.style))
    }

    /// One request of a stream. None when nobody listens any more.
    async fn answer(
        &self,
        request: wire::ModelInferRequest,
        caller: &Asking,
        mut clock: Clock,
        replies: &Replies,
    ) -> Option<()> {
        let said = match Wanted::read(request, caller) {
            Ok(wanted) => self.say(wanted, clock, replies).await,
            Err(refusal) => {
                clock.refused(&refusal);
                Err(refusal)
            }
        };
        match said {
            Ok(said) => said,
            // Of one request: the stream goes on with the next.
            Err(refusal) => {
                let reply = wire::ModelStreamInferResponse { error_message: refusal.to_string(), infer_response: None };
                self.reply(replies, Ok(reply)).await
            }
        }
    }

    /// None where the client has left, or takes nothing.
    async fn reply(&self, replies: &Replies, reply: Result<wire::ModelStreamInferResponse, Status>) -> Option<()> {
        replies.send_timeout(reply, self.front.config.waits.unread_max).await.ok()
    }

    async fn say(&self, wanted: Wanted, clock: Clock, replies: &Replies) -> Result<Option<()>, Refusal> {
        let is_stream = wanted.is_stream;
        let (mut generation, style) = self.begin(wanted, clock).await?;
        let reply = |response| {
            Ok(wire::ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) })
        };
        if !is_stream {
            let answer = whole(&mut generation).await?;
            let response = style.response(&generation, &answer.text, &answer.reason);
            return Ok(self.reply(replies, reply(response)).await);
        }
        while let Some(event) = generation.next().await {
            let response = match event?.1 {
                Event::Delta(delta) if !delta.text.is_empty() => style.response(&generation, &delta.text, ""),
                Event::Finished(finished) => style.response(&generation, "", finish_reason(&finished)),
                _ => continue,
            };
            if self.reply(replies, reply(response)).await.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(()))
    }
}

/// A request as this face has read it.
struct Wanted {
    ask: Ask,
    style: Style,
    is_stream: bool,
}

/// How its responses look.
struct Style {
    id: String,
    /// Stands before the answer, where that is wanted.
    prompt: String,
    has_reason: bool,
    is_raw: bool,
}

impl Wanted {
    fn read(request: wire::ModelInferRequest, caller: &Asking) -> Result<Wanted, Refusal> {
        check_version(&request.model_version)?;
        let is_raw = !request.raw_input_contents.is_empty();
        let tensors = Tensors::read(request.inputs, request.raw_input_contents)?;
        let has_reason = tensors::has_reason(&request.outputs)?;
        let mut fields = Fields::of(tensors::parameters(request.parameters, tensors.sampling)?);
        let text = tensors.text.ok_or_else(|| Refusal::invalid("text_input", "is missing"))?;
        // As Triton's backend has it: a stream is of the answer alone, and otherwise the prompt stands before it.
        let is_stream = tensors.is_stream;
        let repeats = !tensors.exclude_input.unwrap_or(is_stream);
        if is_stream && repeats {
            return Err(Refusal::invalid("exclude_input_in_output", "must be true for streams"));
        }
        let prompt = if repeats { text.clone() } else { String::new() };
        let sampling = fields.sampling()?;
        let deadline = [caller.deadline, fields.deadline()?].into_iter().flatten().min();
        let priority = fields.priority()?;
        fields.finish()?;
        let ask = Ask {
            model: request.model_name,
            prompts: vec![Input::Text(text)],
            n_choices: 1,
            first_choice: 0,
            purpose: Purpose::Generate(Box::new(sampling)),
            echo: false,
            priority,
            deadline,
            tenant: caller.tenant,
            session: None,
            resume: None,
            trace: Traced::default(),
            room: Vec::new(),
            clock: None,
        };
        Ok(Wanted { ask, style: Style { id: request.id, prompt, has_reason, is_raw }, is_stream })
    }
}

impl Style {
    fn response(&self, generation: &Generation, text: &str, reason: &str) -> wire::ModelInferResponse {
        let text = [self.prompt.as_str(), text].concat();
        let reason = self.has_reason.then_some(reason);
        response(&self.id, &generation.started.model, text, reason, self.is_raw)
    }
}

struct Answer {
    text: String,
    reason: String,
}

async fn whole(generation: &mut Generation) -> Result<Answer, Refusal> {
    let mut answer = Answer { text: String::new(), reason: String::new() };
    while let Some(event) = generation.next().await {
        match event?.1 {
            Event::Delta(delta) => answer.text.push_str(&delta.text),
            Event::Finished(finished) => answer.reason = finish_reason(&finished).into(),
            Event::Prompt(_) | Event::Told(_) | Event::Pooled(_) => {}
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
