//! `vllm.grpc.engine.VllmEngine`: the protocol of gateways. They send and receive tokens. Stop strings are still
//! searched in the text. Has no knowledge of replicas.

use crate::doors::call::{call_deadline, status, tenant};
use crate::vllm::running::{AbortableGeneration, RunningGuard, check_id};
use crate::vllm::words::{TokenCounts, input_logprobs, output_logprobs, sampling};
use bytes::Bytes;
use proto::v1;
use proto::v1::generate_request::Input;
use proto::vllm as wire;
use proto::vllm::generate_complete::MatchedStop;
use proto::vllm::generate_request as generate_input;
use proto::vllm::generate_response::Response as EngineResponse;
use proto::vllm::vllm_engine_server::{VllmEngine, VllmEngineServer};
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent, SideOutput};
use router::front::parsed_request::ParsedRequest;
use router::front::parsed_request::Purpose;
use router::front::reader_watch::WatchedStream;
use router::front::recorder::{Caller, Face, Recorder};
use router::front::structure;
use router::refusal::Refusal;
use router::replicas::models::table::{ResolvedModel, VersionSelector};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::OnceCell;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};
use types::Token;

pub mod control;
pub mod inference;
mod requests;
mod running;
mod words;

/// The bytes of the tokenizer's archive in each message.
const CHUNK_BYTES: usize = 64 << 10;

pub use running::RunningRequests;

pub fn service(front: Arc<Frontend>) -> VllmEngineServer<impl VllmEngine> {
    let body_bytes_max = front.config.limits.body_bytes_max;
    let (running, started, bundle) = (RunningRequests::default(), Instant::now(), OnceCell::new());
    VllmEngineServer::new(EngineService { front, running, started, bundle }).max_decoding_message_size(body_bytes_max)
}

struct EngineService {
    front: Arc<Frontend>,
    running: RunningRequests,
    started: Instant,
    /// Built at the first request for it.
    bundle: OnceCell<(Bytes, String)>,
}

#[tonic::async_trait]
impl VllmEngine for EngineService {
    type GenerateStream = WatchedStream<EngineReplies>;
    type GetTokenizerStream = Pin<Box<dyn Stream<Item = Result<wire::GetTokenizerChunk, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let mut recorder = Recorder::start(Face::Vllm, &Caller::of_grpc(request.metadata()));
        let constraint = words::constraint_name(request.get_ref());
        let (parsed, style) = self
            .parse_generate_request(request)
            .inspect_err(|refusal| recorder.record_refusal(refusal))
            .map_err(to_status)?;
        let guard = self.running.add(parsed.tenant, &style.request_id);
        let generation = self.front.generate(parsed, recorder).await;
        let generation = generation.map_err(|refusal| to_status(refusal.renamed(&[(structure::FIELD, constraint)])))?;
        let replies = EngineReplies::new(generation, style, guard);
        Ok(Response::new(self.front.reader_watch.watched(replies)))
    }

    async fn embed(&self, request: Request<wire::EmbedRequest>) -> Result<Response<wire::EmbedResponse>, Status> {
        let mut recorder = Recorder::start(Face::Vllm, &Caller::of_grpc(request.metadata()));
        let parsed = self
            .parse_embed_request(request)
            .inspect_err(|refusal| recorder.record_refusal(refusal))
            .map_err(to_status)?;
        let reply = self.front.embed(parsed, &mut recorder).await.map_err(to_status)?;
        let embedding = reply.embeddings.into_iter().next().unwrap_or_default().values;
        let (prompt_tokens, embedding_dim) = (reply.usage.unwrap_or_default().prompt_tokens, embedding.len() as u32);
        Ok(Response::new(wire::EmbedResponse { embedding, prompt_tokens, embedding_dim }))
    }

    /// Like `/health`, this needs no key.
    async fn health_check(
        &self,
        _: Request<wire::HealthCheckRequest>,
    ) -> Result<Response<wire::HealthCheckResponse>, Status> {
        let refusal = match (self.front.admission.is_draining(), self.front.replicas.is_any_ready()) {
            (true, _) => Some(Refusal::Draining { retry_after: self.front.config.timeouts.retry_after }),
            (false, false) => Some(self.front.replicas.refusal()),
            (false, true) => None,
        };
        let message = refusal.as_ref().map_or_else(|| "ready".to_owned(), Refusal::to_string);
        Ok(Response::new(wire::HealthCheckResponse { healthy: refusal.is_none(), message }))
    }

    async fn abort(&self, request: Request<wire::AbortRequest>) -> Result<Response<wire::AbortResponse>, Status> {
        let tenant = tenant(&self.front, request.metadata()).map_err(to_status)?;
        request.into_inner().request_ids.into_iter().for_each(|id| self.running.abort(tenant, id));
        Ok(Response::new(wire::AbortResponse {}))
    }

    async fn get_model_info(
        &self,
        request: Request<wire::GetModelInfoRequest>,
    ) -> Result<Response<wire::GetModelInfoResponse>, Status> {
        tenant(&self.front, request.metadata()).map_err(to_status)?;
        self.model_info().map(Response::new).map_err(to_status)
    }

    async fn get_server_info(
        &self,
        request: Request<wire::GetServerInfoRequest>,
    ) -> Result<Response<wire::GetServerInfoResponse>, Status> {
        tenant(&self.front, request.metadata()).map_err(to_status)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Response::new(wire::GetServerInfoResponse {
            active_requests: u32::try_from(self.front.streams.len()).unwrap_or(u32::MAX),
            is_paused: self.front.admission.is_draining(),
            last_receive_timestamp: now.as_secs_f64(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            server_type: "lockstep".into(),
            data_parallel_size: 1,
            block_size: types::BLOCK_TOKENS as i32,
        }))
    }

    async fn get_loads(
        &self,
        request: Request<wire::GetLoadsRequest>,
    ) -> Result<Response<wire::GetLoadsResponse>, Status> {
        tenant(&self.front, request.metadata()).map_err(to_status)?;
        Ok(Response::new(wire::GetLoadsResponse {
            timestamp: words::timestamp(router::front::frontend::unix_seconds()),
            version: env!("CARGO_PKG_VERSION").into(),
            dp_rank_count: 1,
            loads: vec![words::total_load(self.front.topologies())],
        }))
    }

    async fn get_tokenizer(
        &self,
        request: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        tenant(&self.front, request.metadata()).map_err(to_status)?;
        let (zip, sha256) = self.bundle.get_or_try_init(|| self.tokenizer_bundle()).await?.clone();
        let n_chunks = zip.len().div_ceil(CHUNK_BYTES);
        let chunk = move |i: usize| wire::GetTokenizerChunk {
            data: zip[i * CHUNK_BYTES..zip.len().min((i + 1) * CHUNK_BYTES)].to_vec(),
            sha256: if i + 1 == n_chunks { sha256.clone() } else { String::new() },
        };
        Ok(Response::new(Box::pin(tokio_stream::iter((0..n_chunks).map(move |i| Ok(chunk(i)))))))
    }
}

impl EngineService {
    fn parse_generate_request(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<(ParsedRequest, EngineReplyFormat), Refusal> {
        let tenant = tenant(&self.front, request.metadata())?;
        let deadline = call_deadline(request.metadata())?;
        let request = request.into_inner();
        words::refuse_unserved(&request)?;
        check_id(&request.request_id)?;
        let input = match request.input {
            Some(generate_input::Input::Tokenized(tokenized)) => {
                Input::TokenIds(v1::TokenIds { ids: tokenized.input_ids })
            }
            Some(generate_input::Input::Text(text)) => Input::Text(text),
            None => return Err(Refusal::invalid("input", "must be tokenized or text")),
        };
        let params = request.sampling_params.unwrap_or_default();
        let n_choices = params.n.max(1);
        let style = EngineReplyFormat {
            request_id: request.request_id,
            is_stream: request.stream,
            n_choices,
            stop_token_ids: params.stop_token_ids.clone(),
            has_logprobs: params.logprobs.is_some(),
        };
        let parsed = ParsedRequest {
            prompts: vec![input],
            n_choices,
            purpose: Purpose::Generate(Box::new(sampling(params)?)),
            deadline,
            tenant,
            ..ParsedRequest::default()
        };
        Ok((parsed, style))
    }

    fn parse_embed_request(&self, request: Request<wire::EmbedRequest>) -> Result<ParsedRequest, Refusal> {
        let tenant = tenant(&self.front, request.metadata())?;
        let deadline = call_deadline(request.metadata())?;
        let ids = request.into_inner().tokenized.unwrap_or_default().input_ids;
        let prompts = vec![Input::TokenIds(v1::TokenIds { ids })];
        Ok(ParsedRequest { prompts, deadline, tenant, ..ParsedRequest::default() })
    }

    fn model_info(&self) -> Result<wire::GetModelInfoResponse, Refusal> {
        let ResolvedModel { name, text, replica, .. } = self.front.model("", VersionSelector::Weight)?;
        let spec = &text.spec;
        let id = |token: &Token| i32::try_from(*token).unwrap_or_default();
        Ok(wire::GetModelInfoResponse {
            model_path: replica.model.clone(),
            is_generation: true,
            max_context_length: replica.context,
            vocab_size: spec.vocab,
            supports_vision: false,
            served_model_name: name,
            tokenizer_path: "/".into(),
            model_type: format!("{:?}", spec.family).to_lowercase(),
            architectures: Vec::new(),
            eos_token_ids: spec.eos.iter().map(id).collect(),
            pad_token_id: 0,
            bos_token_id: spec.bos.as_ref().map_or(0, id),
            max_req_input_len: i32::try_from(replica.context.saturating_sub(1)).unwrap_or(i32::MAX),
            default_sampling_params_json: words::defaults_json(&text.defaults),
        })
    }

    async fn tokenizer_bundle(&self) -> Result<(Bytes, String), Status> {
        let none = || Status::unimplemented("this router does not provide its tokenizer");
        let read = self.front.config.text_files.clone().ok_or_else(none)?;
        // This takes as long as a long text.
        let bundle = self.front.texts.off_runtime(usize::MAX, move || read()).await.map_err(to_status)?;
        let bundle = bundle.map_err(|error| Status::internal(format!("the tokenizer cannot be provided: {error}")))?;
        Ok((bundle.zip.into(), bundle.sha256))
    }
}

/// Returns a refusal as a status, with the field's name in this protocol.
fn to_status(refusal: Refusal) -> Status {
    status(refusal.renamed(&[
        ("token_ids", "tokenized.input_ids"),
        ("stop_token_ids", "sampling_params.stop_token_ids"),
        ("max_tokens", "sampling_params.max_tokens"),
    ]))
}

/// The format of a request's replies.
struct EngineReplyFormat {
    request_id: String,
    is_stream: bool,
    n_choices: u32,
    stop_token_ids: Vec<Token>,
    has_logprobs: bool,
}

/// A generation as `chunk` and `complete` replies. Dropping it cancels the request, as an abort does.
pub struct EngineReplies {
    events: AbortableGeneration,
    style: EngineReplyFormat,
    choices: Vec<ChoiceState>,
    ready: VecDeque<wire::GenerateResponse>,
}

/// The state of one choice.
#[derive(Default)]
struct ChoiceState {
    /// All tokens, or in a stream those of the last chunk.
    token_ids: Vec<Token>,
    logprobs: Vec<v1::Logprob>,
    n_tokens: u32,
    prompt: Option<wire::InputLogProbs>,
    has_ended: bool,
}

impl EngineReplies {
    fn new(generation: Generation, style: EngineReplyFormat, guard: Option<RunningGuard>) -> EngineReplies {
        let choices = (0..style.n_choices).map(|_| ChoiceState::default()).collect();
        let events = AbortableGeneration::new(generation, guard);
        EngineReplies { events, style, choices, ready: VecDeque::new() }
    }

    fn add_event(&mut self, index: u32, event: GenerationEvent) {
        let n_prompt = self.events.n_prompt();
        let Some(choice) = self.choices.get_mut(index as usize) else { return };
        match event {
            GenerationEvent::Aside(SideOutput::Prompt(prompt)) => {
                let ids = self.events.prompt_ids();
                choice.prompt = ids.map(|prompt_ids| input_logprobs(prompt_ids, &prompt.logprobs));
            }
            GenerationEvent::Delta(delta) if !delta.token_ids.is_empty() => {
                choice.n_tokens += delta.token_ids.len() as u32;
                if self.style.is_stream {
                    choice.token_ids.clear();
                    choice.logprobs.clear();
                }
                choice.token_ids.extend(delta.token_ids);
                choice.logprobs.extend(delta.logprobs);
                if self.style.is_stream {
                    let response = EngineResponse::Chunk(choice.chunk(index, n_prompt, &self.style));
                    self.ready.push_back(wire::GenerateResponse { response: Some(response) });
                }
            }
            GenerationEvent::Finished(finished) => self.finish(index, &finished),
            // This protocol resumes no stream, and its gateways detokenize themselves.
            GenerationEvent::Delta(_) | GenerationEvent::Aside(_) => {}
        }
    }

    fn finish(&mut self, index: u32, finished: &v1::Finished) {
        let usage = finished.usage.unwrap_or_default();
        let counts = TokenCounts { prompt: usage.prompt_tokens, cached: usage.cached_tokens };
        let choice = &mut self.choices[index as usize];
        let is_stop = finished.reason() != v1::finished::Reason::Length;
        let last = choice.token_ids.last().filter(|last| is_stop && self.style.stop_token_ids.contains(last)).copied();
        let matched = match finished.stop.as_str() {
            "" => last.map(MatchedStop::MatchedTokenId),
            stop => Some(MatchedStop::MatchedStopStr(stop.to_owned())),
        };
        let reason = if is_stop { "stop" } else { "length" };
        let complete = choice.complete(index, counts, reason, matched, &self.style);
        self.ready.push_back(wire::GenerateResponse { response: Some(EngineResponse::Complete(complete)) });
    }

    /// Ends the unfinished choices, and reports this to the reader, which may be another client than the aborting one.
    fn abort(&mut self) {
        let counts = TokenCounts { prompt: self.events.n_prompt(), cached: 0 };
        for (index, choice) in self.choices.iter_mut().enumerate().filter(|(_, choice)| !choice.has_ended) {
            let complete = choice.complete(index as u32, counts, "abort", None, &self.style);
            self.ready.push_back(wire::GenerateResponse { response: Some(EngineResponse::Complete(complete)) });
        }
    }
}

impl ChoiceState {
    fn chunk(&mut self, index: u32, n_prompt: u32, style: &EngineReplyFormat) -> wire::GenerateStreamChunk {
        wire::GenerateStreamChunk {
            token_ids: self.token_ids.clone(),
            prompt_tokens: n_prompt,
            completion_tokens: self.token_ids.len() as u32,
            // This is known only at the end.
            cached_tokens: 0,
            output_logprobs: style.has_logprobs.then(|| output_logprobs(&self.logprobs)),
            input_logprobs: self.prompt.take(),
            index,
        }
    }

    fn complete(
        &mut self,
        index: u32,
        counts: TokenCounts,
        reason: &str,
        matched_stop: Option<MatchedStop>,
        style: &EngineReplyFormat,
    ) -> wire::GenerateComplete {
        self.has_ended = true;
        wire::GenerateComplete {
            output_ids: std::mem::take(&mut self.token_ids),
            finish_reason: reason.into(),
            prompt_tokens: counts.prompt,
            completion_tokens: self.n_tokens,
            cached_tokens: counts.cached,
            output_logprobs: style.has_logprobs.then(|| output_logprobs(&self.logprobs)),
            input_logprobs: self.prompt.take(),
            index,
            matched_stop,
        }
    }
}

impl Stream for EngineReplies {
    type Item = Result<wire::GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(reply) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(reply)));
            }
            match ready!(self.events.poll_event(context)) {
                Some(Ok(Some((index, event)))) => self.add_event(index, event),
                Some(Ok(None)) => self.abort(),
                Some(Err(refusal)) => return Poll::Ready(Some(Err(to_status(refusal)))),
                None => return Poll::Ready(None),
            }
        }
    }
}
