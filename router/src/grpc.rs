//! `lockstep.v1.Inference`, health and reflection. Says in gRPC's words what `generate` does.

use crate::Error;
use crate::attended::Attended;
use crate::config::Waits;
use crate::embed::EmbedAsk;
use crate::faces;
use crate::gate::Gate;
use crate::gathered::Gathered;
use crate::generate::{Ask, Front, Purpose, after};
use crate::generation::{Event, Generation};
use crate::http::SESSION;
use crate::measure::{Caller, Clock, Face};
use crate::refusal::{Refusal, whole_millis, whole_seconds};
use crate::replicas::hashed;
use crate::resume::{Mark, Marks, NoResume, Opened, Resume};
use crate::socket::Socket;
use crate::tenants::Visit;
use proto::v1;
use proto::v1::generate_reply;
use proto::v1::generate_request::Input;
use proto::v1::inference_server::{Inference, InferenceServer};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use telemetry::spans::Traced;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::transport::server::Connected;
use tonic::{Code, Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use types::TenantId;

const SERVICE: &str = "lockstep.v1.Inference";
/// What the health service calls the process itself: served for as long as it lives, a drain and a loss included.
pub const LIVE: &str = "live";

pub async fn serve<IO, E>(
    front: Arc<Front>,
    incoming: impl Stream<Item = Result<IO, E>>,
    draining: CancellationToken,
    end: CancellationToken,
) -> Result<(), Error>
where
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (reporter, health) = tonic_health::server::health_reporter();
    let body_bytes_max = front.config.limits.body_bytes_max;
    let inference = InferenceServer::new(Service { front: front.clone() }).max_decoding_message_size(body_bytes_max);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE)
            .with_service_name(faces::SERVICES[0])
            .with_service_name(faces::SERVICES[1])
            .with_service_name("grpc.health.v1.Health")
    };
    let incoming = placed(&front, incoming.map(|accepted| accepted.map(Gathered::over)));
    let served = proto::transport::server()
        .layer(Gate(front.clone()))
        .add_service(inference)
        .add_service(faces::vllm::service(front.clone()))
        .add_service(faces::kserve::service(front.clone()))
        .add_service(health)
        .add_service(reflection().build_v1().map_err(Error::Reflection)?)
        .add_service(reflection().build_v1alpha().map_err(Error::Reflection)?)
        .serve_with_incoming_shutdown(incoming, end.cancelled_owned());
    tokio::select! {
        biased;
        served = served => served.map_err(Error::Grpc),
        () = report_health(&front, reporter, draining) => Ok(()),
    }
}

/// Connections that have a place among the others. One too many is closed before anything of it is read.
fn placed<IO, E>(
    front: &Front,
    incoming: impl Stream<Item = Result<IO, E>>,
) -> impl Stream<Item = Result<Socket<IO>, E>> {
    let Waits { unread_max, headers_max, .. } = front.config.waits;
    let connections_max = front.config.limits.connections_max.clamp(1, Semaphore::MAX_PERMITS);
    let places = Arc::new(Semaphore::new(connections_max));
    incoming.filter_map(move |accepted| match accepted {
        Ok(io) => {
            let place = places.clone().try_acquire_owned().ok()?;
            Some(Ok(Socket::new(io, place, unread_max).begins_within(headers_max)))
        }
        Err(error) => Some(Err(error)),
    })
}

/// Keeps what the health service says true. Never ends.
async fn report_health(front: &Front, reporter: HealthReporter, draining: CancellationToken) {
    reporter.set_service_status(LIVE, ServingStatus::Serving).await;
    let mut views = front.replicas.views();
    loop {
        views.mark_unchanged();
        let ready = front.replicas.is_any_ready() && !front.admission.is_draining();
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in ["", SERVICE].into_iter().chain(faces::SERVICES) {
            reporter.set_service_status(service, status).await;
        }
        tokio::select! {
            biased;
            Ok(()) = views.changed() => {}
            () = draining.cancelled(), if !draining.is_cancelled() => {}
            else => std::future::pending().await,
        }
    }
}

struct Service {
    front: Arc<Front>,
}

#[tonic::async_trait]
impl Inference for Service {
    type GenerateStream = Attended<Replies>;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let mut clock = Clock::start(Face::Grpc, &Caller::of_grpc(request.metadata()));
        let ask = self.ask(request).inspect_err(|refusal| clock.refused(refusal)).map_err(status)?;
        let ask = Ask { trace: clock.trace(), clock: Some(clock), ..ask };
        let mut generation = self.front.generate(ask).await.map_err(status)?;
        generation.answered(self.front.config.waits.first_answer_max).await.map_err(status)?;
        let started = Some(generation.started.clone());
        let has_tokens = generation.marks.choices.iter().any(|mark| mark.n_tokens() > 0);
        let replies = Replies { started, has_tokens, generation };
        Ok(Response::new(self.front.attendance.attended(replies)))
    }

    async fn embed(&self, request: Request<v1::EmbedRequest>) -> Result<Response<v1::EmbedReply>, Status> {
        let mut clock = Clock::start(Face::Grpc, &Caller::of_grpc(request.metadata()));
        let ask = self.embed_ask(request).inspect_err(|refusal| clock.refused(refusal)).map_err(status)?;
        let reply = self.front.embed(ask, &mut clock).await.map_err(status)?;
        Ok(Response::new(reply))
    }

    async fn tokenize(&self, request: Request<v1::TokenizeRequest>) -> Result<Response<v1::TokenizeReply>, Status> {
        let _visit = self.visit(request.metadata()).map_err(status)?;
        let request = request.into_inner();
        let text = self.front.text(&request.model).map_err(status)?;
        let input = match request.input {
            Some(v1::tokenize_request::Input::Text(text)) => Input::Text(text),
            Some(v1::tokenize_request::Input::Chat(chat)) => Input::Chat(chat),
            None => return Err(status(Refusal::invalid("input", "one of text and chat"))),
        };
        let token_ids = self.front.tokens(&text, input, true).await.map_err(status)?;
        Ok(Response::new(v1::TokenizeReply { token_ids }))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeReply>, Status> {
        let _visit = self.visit(request.metadata()).map_err(status)?;
        let request = request.into_inner();
        let text = self.front.text(&request.model).map_err(status)?;
        text.check_ids("token_ids", &request.token_ids).map_err(status)?;
        let text = self.front.detokenized(&text, request.token_ids).await.map_err(status)?;
        Ok(Response::new(v1::DetokenizeReply { text }))
    }

    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsReply>, Status> {
        self.tenant(request.metadata()).map_err(status)?;
        let mut listed = self.front.models.listed(&self.front.replicas);
        // Each by the name that replies carry.
        listed.retain(|(name, model)| *name == model.name);
        let models = listed.into_iter().map(|(id, model)| v1::Model {
            id,
            context: model.replica.context,
            policy_digest: model.replica.digest.0.to_vec(),
        });
        let models = models.collect();
        Ok(Response::new(v1::ListModelsReply { models }))
    }

    async fn get_topology(&self, request: Request<v1::GetTopologyRequest>) -> Result<Response<v1::Topology>, Status> {
        self.tenant(request.metadata()).map_err(status)?;
        Ok(Response::new(self.front.topology(request.get_ref().from)))
    }
}

impl Service {
    fn tenant(&self, metadata: &MetadataMap) -> Result<TenantId, Refusal> {
        tenant(&self.front, metadata)
    }

    /// What reads and writes text is a request of its tenant too.
    fn visit(&self, metadata: &MetadataMap) -> Result<Visit, Refusal> {
        self.front.visit(self.tenant(metadata)?)
    }

    fn ask(&self, request: Request<v1::GenerateRequest>) -> Result<Ask, Refusal> {
        let tenant = self.tenant(request.metadata())?;
        let call = call_deadline(request.metadata())?;
        let session = request.metadata().get(SESSION).and_then(|value| value.to_str().ok()).map(hashed);
        let request = request.into_inner();
        let input = request.input.ok_or_else(|| Refusal::invalid("input", "one of text, chat and token_ids"))?;
        if request.choice == u32::MAX {
            return Err(Refusal::invalid("choice", "is out of range"));
        }
        Ok(Ask {
            model: request.model,
            prompts: vec![input],
            n_choices: 1,
            first_choice: request.choice,
            purpose: Purpose::Generate(Box::new(request.sampling.unwrap_or_default())),
            echo: false,
            priority: request.priority,
            deadline: [call, after(request.deadline_ms)].into_iter().flatten().min(),
            tenant,
            session,
            resume: request.resume.map(resume).transpose()?,
            trace: Traced::default(),
            room: Vec::new(),
            clock: None,
        })
    }

    fn embed_ask(&self, request: Request<v1::EmbedRequest>) -> Result<EmbedAsk, Refusal> {
        let tenant = self.tenant(request.metadata())?;
        let call = call_deadline(request.metadata())?;
        let request = request.into_inner();
        let input = |input: v1::EmbedInput| match input.input {
            Some(v1::embed_input::Input::Text(text)) => Ok(Input::Text(text)),
            Some(v1::embed_input::Input::TokenIds(ids)) => Ok(Input::TokenIds(ids)),
            None => Err(Refusal::invalid("inputs", "one of text and token_ids")),
        };
        Ok(EmbedAsk {
            model: request.model,
            inputs: request.inputs.into_iter().map(input).collect::<Result<_, _>>()?,
            deadline: [call, after(request.deadline_ms)].into_iter().flatten().min(),
            tenant,
        })
    }
}

/// A generation as replies. Dropping it cancels the request: so does a client that leaves.
pub struct Replies {
    started: Option<v1::Started>,
    /// The client has read beyond the prompt before.
    has_tokens: bool,
    generation: Generation,
}

impl Stream for Replies {
    type Item = Result<v1::GenerateReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(started) = self.started.take() {
            return reply(generate_reply::Event::Started(started));
        }
        loop {
            match ready!(Pin::new(&mut self.generation).poll_next(context)) {
                Some(Ok((_, event))) => {
                    if let Some(event) = self.said(event) {
                        return reply(event);
                    }
                }
                Some(Err(refusal)) => return Poll::Ready(Some(Err(status(refusal)))),
                None => return Poll::Ready(None),
            }
        }
    }
}

fn reply(event: generate_reply::Event) -> Poll<Option<Result<v1::GenerateReply, Status>>> {
    Poll::Ready(Some(Ok(v1::GenerateReply { event: Some(event) })))
}

impl Replies {
    /// Nothing where the client has it already.
    fn said(&self, event: Event) -> Option<generate_reply::Event> {
        match event {
            Event::Prompt(logprobs) if !self.has_tokens => Some(generate_reply::Event::PromptLogprobs(logprobs)),
            Event::Delta(delta) => Some(generate_reply::Event::Delta(delta)),
            Event::Finished(finished) => Some(generate_reply::Event::Finished(finished)),
            // Who generates does not pool.
            Event::Prompt(_) | Event::Told(_) | Event::Pooled(_) => None,
        }
    }
}

fn resume(asked: v1::Resume) -> Result<Resume, Refusal> {
    let choices = vec![Mark::at(asked.position)];
    Ok(Resume { opened: Opened::read(&asked.handle)?, marks: Marks { choices, usage: false } })
}

/// Whose a call is, by its key.
pub fn tenant(front: &Front, metadata: &MetadataMap) -> Result<TenantId, Refusal> {
    let authorization = metadata.get("authorization").and_then(|value| value.to_str().ok());
    front.config.keys.authorized(authorization).ok_or(Refusal::NoKey)
}

pub fn status(refusal: Refusal) -> Status {
    let code = match &refusal {
        Refusal::Invalid { .. } | Refusal::TooLong { .. } | Refusal::TooLarge { .. } => Code::InvalidArgument,
        Refusal::NoResume(NoResume::OtherPolicy) => Code::FailedPrecondition,
        Refusal::NoResume(NoResume::Forged) => Code::PermissionDenied,
        Refusal::NoResume(_) => Code::InvalidArgument,
        Refusal::NoKey => Code::Unauthenticated,
        Refusal::NoModel { .. } => Code::NotFound,
        Refusal::Full { .. } | Refusal::Limited { .. } | Refusal::TooLate { .. } => Code::ResourceExhausted,
        Refusal::NotReady { .. } | Refusal::Draining { .. } | Refusal::Lost => Code::Unavailable,
        Refusal::Deadline => Code::DeadlineExceeded,
        Refusal::SlowReader { .. } => Code::Aborted,
        Refusal::Failed { .. } | Refusal::LostTooOften { .. } => Code::Internal,
    };
    let mut metadata = MetadataMap::new();
    if let Some(wait) = refusal.retry_after() {
        metadata.insert("retry-after", MetadataValue::from(whole_seconds(wait)));
        metadata.insert("retry-after-ms", MetadataValue::from(whole_millis(wait)));
    }
    Status::with_metadata(code, refusal.to_string(), metadata)
}

/// The deadline that the client's library put on the call.
pub fn call_deadline(metadata: &MetadataMap) -> Result<Option<Instant>, Refusal> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(timeout);
    let timeout = timeout.ok_or_else(|| Refusal::invalid("grpc-timeout", "is no timeout"))?;
    Ok(Instant::now().checked_add(timeout))
}

/// At most eight digits and a unit.
fn timeout(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let n = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n * 3600)),
        "M" => Some(Duration::from_secs(n * 60)),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts() {
        let check = |text: &str, expected: Option<Duration>| assert_eq!(timeout(text), expected, "{text:?}");
        check("1S", Some(Duration::from_secs(1)));
        check("250m", Some(Duration::from_millis(250)));
        check("99999999H", Some(Duration::from_secs(99_999_999 * 3600)));
        check("5u", Some(Duration::from_micros(5)));
        for bad in ["", "S", "1", "1s", "-1S", "123456789S", "1é"] {
            check(bad, None);
        }
    }
}
