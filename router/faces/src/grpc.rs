//! `lockstep.v1.Inference`: translates calls for `front`. Has no knowledge of replicas.

use crate::doors::call::{call_deadline, status, tenant};
use crate::doors::{CACHE_HINT, SESSION};
use proto::v1;
use proto::v1::generate_reply;
use proto::v1::generate_request::Input;
use proto::v1::inference_server::{Inference, InferenceServer};
use router::board::pick::hashed;
use router::front::embed::{Readout, ReadoutKind};
use router::front::frontend::{Frontend, unix_seconds};
use router::front::generation::{Generation, GenerationEvent, SideOutput};
use router::front::parsed_request::{
    ParsedRequest, Purpose, ReplicaPreference, cache_hint, cache_salt, deadline_after,
};
use router::front::progress::PromptProgress;
use router::front::reader_watch::WatchedStream;
use router::front::recorder::{Caller, Face, Recorder};
use router::front::resume::{ReadMark, ReadMarks, Resume, UncheckedHandle};
use router::limits::tenants::Visit;
use router::refusal::Refusal;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio_stream::Stream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};
use types::{CacheSalt, TenantId};

pub fn service(front: Arc<Frontend>) -> InferenceServer<impl Inference> {
    let body_bytes_max = front.config.limits.body_bytes_max;
    InferenceServer::new(InferenceService { front }).max_decoding_message_size(body_bytes_max)
}

struct InferenceService {
    front: Arc<Frontend>,
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = WatchedStream<GenerateReplies>;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let mut recorder = Recorder::start(Face::Grpc, &Caller::of_grpc(request.metadata()));
        let parsed = self
            .parse_generate_request(request)
            .inspect_err(|refusal| recorder.record_refusal(refusal))
            .map_err(status)?;
        let generation = self.front.generate(parsed, recorder).await.map_err(status)?;
        Ok(Response::new(self.front.reader_watch.watched(GenerateReplies::new(generation))))
    }

    async fn embed(&self, request: Request<v1::EmbedRequest>) -> Result<Response<v1::EmbedReply>, Status> {
        let mut recorder = Recorder::start(Face::Grpc, &Caller::of_grpc(request.metadata()));
        let parsed = self
            .parse_embed_request(request)
            .inspect_err(|refusal| recorder.record_refusal(refusal))
            .map_err(status)?;
        let reply = self.front.embed(parsed, &mut recorder).await.map_err(status)?;
        Ok(Response::new(reply))
    }

    async fn classify(&self, request: Request<v1::ClassifyRequest>) -> Result<Response<v1::ClassifyReply>, Status> {
        let mut recorder = Recorder::start(Face::Grpc, &Caller::of_grpc(request.metadata()));
        let parsed = self
            .parse_embed_request(request.map(as_embed_request))
            .inspect_err(|refusal| recorder.record_refusal(refusal))
            .map_err(status)?;
        let text = self.front.text(&parsed.model).map_err(status)?;
        let v1::EmbedReply { model, embeddings: scores, usage } =
            self.front.pool(parsed, Readout::of(ReadoutKind::Scores), &mut recorder).await.map_err(status)?;
        let labels = text.spec.pooling.labels.clone();
        Ok(Response::new(v1::ClassifyReply { model, labels, scores, usage }))
    }

    async fn tokenize(&self, request: Request<v1::TokenizeRequest>) -> Result<Response<v1::TokenizeReply>, Status> {
        let _visit = self.count_call(request.metadata()).map_err(status)?;
        let request = request.into_inner();
        let text = self.front.text(&request.model).map_err(status)?;
        let input = match request.input {
            Some(v1::tokenize_request::Input::Text(text)) => Input::Text(text),
            Some(v1::tokenize_request::Input::Chat(chat)) => Input::Chat(chat),
            None => return Err(status(Refusal::invalid("input", "must be text or chat"))),
        };
        let token_ids = self.front.texts.tokens(&text, input, true, unix_seconds()).await.map_err(status)?;
        Ok(Response::new(v1::TokenizeReply { token_ids }))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeReply>, Status> {
        let _visit = self.count_call(request.metadata()).map_err(status)?;
        let request = request.into_inner();
        let text = self.front.text(&request.model).map_err(status)?;
        text.check_ids("token_ids", &request.token_ids).map_err(status)?;
        let text = self.front.texts.detokenize(&text, request.token_ids).await.map_err(status)?;
        Ok(Response::new(v1::DetokenizeReply { text }))
    }

    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsReply>, Status> {
        self.tenant(request.metadata()).map_err(status)?;
        let mut listed = self.front.models.listed(&self.front.replicas);
        // Each model is listed once, under the name that replies carry.
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
        let authorization = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        let admitted = self.front.config.keys.authorized_client(authorization).ok_or(Refusal::NoKey).map_err(status)?;
        if !self.front.shows_cluster_to(admitted.role) {
            return Err(Status::permission_denied("only a key with `role=operator` may see the cluster"));
        }
        Ok(Response::new(self.front.topology(request.get_ref().from)))
    }
}

/// The two differ in what becomes of their inputs.
fn as_embed_request(request: v1::ClassifyRequest) -> v1::EmbedRequest {
    let v1::ClassifyRequest { model, inputs, deadline_ms } = request;
    v1::EmbedRequest { model, inputs, deadline_ms }
}

impl InferenceService {
    fn tenant(&self, metadata: &MetadataMap) -> Result<TenantId, Refusal> {
        tenant(&self.front, metadata)
    }

    /// Counts a call that only tokenizes or detokenizes: it is a request of its tenant too.
    fn count_call(&self, metadata: &MetadataMap) -> Result<Visit, Refusal> {
        self.front.visit(self.tenant(metadata)?)
    }

    fn parse_generate_request(&self, request: Request<v1::GenerateRequest>) -> Result<ParsedRequest, Refusal> {
        let tenant = self.tenant(request.metadata())?;
        let call = call_deadline(request.metadata())?;
        let plain = |name: &str| request.metadata().get(name).and_then(|value| value.to_str().ok());
        let placement = ReplicaPreference { session: plain(SESSION).map(hashed), apart_from: None };
        let cache_hint = plain(CACHE_HINT).map(cache_hint).transpose()?.unwrap_or_default();
        let request = request.into_inner();
        let input = request.input.ok_or_else(|| Refusal::invalid("input", "must be text, chat or token_ids"))?;
        if matches!(input, Input::Pair(_)) {
            return Err(Refusal::invalid("pair", "is for Classify: a pair of texts generates nothing"));
        }
        if request.choice == u32::MAX {
            return Err(Refusal::invalid("choice", "is out of range"));
        }
        let n_choices = request.n.max(1);
        if n_choices > 1 && request.choice > 0 {
            return Err(Refusal::invalid("choice", "must be zero with `n`, which returns choices 0 to n - 1"));
        }
        if n_choices > 1 && request.resume.is_some() {
            return Err(Refusal::invalid("resume", "is not supported with `n`: resume one choice in each stream"));
        }
        let has_salt = !request.cache_salt.is_empty();
        Ok(ParsedRequest {
            model: request.model,
            prompts: vec![input],
            n_choices,
            first_choice: request.choice,
            purpose: Purpose::Generate(Box::new(request.sampling.unwrap_or_default())),
            priority: request.priority,
            deadline: [call, deadline_after(request.deadline_ms)].into_iter().flatten().min(),
            tenant,
            placement,
            cache_salt: if has_salt { cache_salt(&request.cache_salt)? } else { CacheSalt::default() },
            cache_hint,
            resume: request.resume.map(resume).transpose()?,
            certificate: request.certificate,
            needs_progress: request.progress,
            ..ParsedRequest::default()
        })
    }

    fn parse_embed_request(&self, request: Request<v1::EmbedRequest>) -> Result<ParsedRequest, Refusal> {
        let tenant = self.tenant(request.metadata())?;
        let call = call_deadline(request.metadata())?;
        let request = request.into_inner();
        let input = |input: v1::EmbedInput| match input.input {
            Some(v1::embed_input::Input::Text(text)) => Ok(Input::Text(text)),
            Some(v1::embed_input::Input::TokenIds(ids)) => Ok(Input::TokenIds(ids)),
            Some(v1::embed_input::Input::Pair(pair)) => Ok(Input::Pair(pair)),
            None => Err(Refusal::invalid("inputs", "must be text, token_ids or pair")),
        };
        Ok(ParsedRequest {
            model: request.model,
            prompts: request.inputs.into_iter().map(input).collect::<Result<_, _>>()?,
            deadline: [call, deadline_after(request.deadline_ms)].into_iter().flatten().min(),
            tenant,
            ..ParsedRequest::default()
        })
    }
}

/// A generation as replies. Dropping it, for example when a client leaves, cancels the request.
pub struct GenerateReplies {
    started: Option<v1::Started>,
    /// Whether the prompt's logprobs are still to be sent. A client that already has tokens has them too.
    needs_prompt_logprobs: bool,
    generation: Generation,
}

impl Stream for GenerateReplies {
    type Item = Result<v1::GenerateReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(started) = self.started.take() {
            return ready_reply(generate_reply::Event::Started(started));
        }
        loop {
            match ready!(Pin::new(&mut self.generation).poll_next(context)) {
                Some(Ok((choice, event))) => {
                    if let Some(event) = self.reply_event(choice, event) {
                        return ready_reply(event);
                    }
                }
                Some(Err(refusal)) => return Poll::Ready(Some(Err(status(refusal)))),
                None => return Poll::Ready(None),
            }
        }
    }
}

fn ready_reply(event: generate_reply::Event) -> Poll<Option<Result<v1::GenerateReply, Status>>> {
    Poll::Ready(Some(Ok(v1::GenerateReply { event: Some(event) })))
}

impl GenerateReplies {
    fn new(generation: Generation) -> GenerateReplies {
        let mut started = generation.started.clone();
        if generation.marks.choices.len() > 1 {
            started.resume = None;
        }
        let needs_prompt_logprobs = generation.marks.choices.iter().all(|mark| mark.n_tokens() == 0);
        GenerateReplies { started: Some(started), needs_prompt_logprobs, generation }
    }

    /// Returns the event as a reply. None if the client has it already.
    fn reply_event(&mut self, choice: u32, event: GenerationEvent) -> Option<generate_reply::Event> {
        match event {
            // All choices have the same prompt.
            GenerationEvent::Aside(SideOutput::Prompt(logprobs)) => {
                let needs_it = std::mem::take(&mut self.needs_prompt_logprobs);
                needs_it.then_some(generate_reply::Event::PromptLogprobs(logprobs))
            }
            GenerationEvent::Aside(SideOutput::Progress(progress)) if choice == 0 => {
                let PromptProgress { total, cached, processed } = progress;
                Some(generate_reply::Event::PromptProgress(v1::PromptProgress { total, cached, processed }))
            }
            GenerationEvent::Delta(delta) => Some(generate_reply::Event::Delta(v1::Delta { choice, ..delta })),
            GenerationEvent::Finished(finished) => {
                Some(generate_reply::Event::Finished(v1::Finished { choice, ..finished }))
            }
            // A generation has no embeddings.
            GenerationEvent::Aside(_) => None,
        }
    }
}

fn resume(request: v1::Resume) -> Result<Resume, Refusal> {
    let choices = vec![ReadMark::at(request.position)];
    Ok(Resume { handle: UncheckedHandle::read(&request.handle)?, marks: ReadMarks { choices, ..ReadMarks::default() } })
}
