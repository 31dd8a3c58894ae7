//! `vllm.Inference`: the protocol of vLLM's own gRPC server. Has no knowledge of replicas.

use crate::doors::call::{call_deadline, status, tenant};
use crate::vllm::requests::{candidate_tokens, finish_info, refuse_unserved, sampling};
use crate::vllm::running::{AbortableGeneration, RunningGuard, RunningRequests, check_id};
use proto::v1;
use proto::v1::generate_request::Input;
use proto::vllm_server as wire;
use proto::vllm_server::candidate_tokens::Select;
use proto::vllm_server::finish_info::FinishReason;
use proto::vllm_server::generate_request::Prompt;
use proto::vllm_server::inference_server::{Inference, InferenceServer};
use router::board::pick::hashed;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent, SideOutput};
use router::front::parsed_request::{ParsedRequest, Purpose, ReplicaPreference, cache_salt};
use router::front::reader_watch::WatchedStream;
use router::front::recorder::{Caller, Face, Recorder};
use router::front::structure;
use router::refusal::Refusal;
use router::replicas::models::truncation::{CutSide, Truncation};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use types::{CacheSalt, Token};

pub fn service(front: Arc<Frontend>, running: RunningRequests) -> InferenceServer<impl Inference> {
    let body_bytes_max = front.config.limits.body_bytes_max;
    InferenceServer::new(TextService { front, running }).max_decoding_message_size(body_bytes_max)
}

struct TextService {
    front: Arc<Frontend>,
    running: RunningRequests,
}

#[tonic::async_trait]
impl Inference for TextService {
    type GenerateStreamStream = WatchedStream<TextReplies>;

    async fn generate(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<wire::GenerateResponse>, Status> {
        if request.get_ref().sampling.as_ref().is_some_and(|sampling| sampling.num_sequences > 1) {
            return Err(status(Refusal::invalid("sampling.num_sequences", "needs GenerateStream if it is above 1")));
        }
        let mut replies = self.replies(request).await?;
        let mut whole = wire::GenerateResponse::default();
        while let Some(reply) = replies.next().await {
            join(&mut whole, reply?);
        }
        Ok(Response::new(whole))
    }

    async fn generate_stream(
        &self,
        request: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStreamStream>, Status> {
        let replies = self.replies(request).await?;
        Ok(Response::new(self.front.reader_watch.watched(replies)))
    }
}

impl TextService {
    async fn replies(&self, request: Request<wire::GenerateRequest>) -> Result<TextReplies, Status> {
        let mut recorder = Recorder::start(Face::Vllm, &Caller::of_grpc(request.metadata()));
        let request_id = request.get_ref().request_id.clone();
        let (parsed, format) =
            self.parse(request).inspect_err(|refusal| recorder.record_refusal(refusal)).map_err(to_status)?;
        let guard = self.running.add(parsed.tenant, &request_id);
        let n_choices = parsed.n_choices;
        let generation = self.front.generate(parsed, recorder).await.map_err(to_status)?;
        Ok(TextReplies::new(generation, format, n_choices, guard))
    }

    fn parse(&self, request: Request<wire::GenerateRequest>) -> Result<(ParsedRequest, TextReplyFormat), Refusal> {
        let tenant = tenant(&self.front, request.metadata())?;
        let deadline = call_deadline(request.metadata())?;
        let mut request = request.into_inner();
        refuse_unserved(&request)?;
        check_id(&request.request_id)?;
        let input = match request.prompt.take() {
            Some(Prompt::TokenIds(ids)) => Input::TokenIds(v1::TokenIds { ids: ids.ids }),
            Some(Prompt::Text(text)) => Input::Text(text),
            None => return Err(Refusal::invalid("prompt", "must be text or token_ids")),
        };
        let n_max = Some(request.truncate_prompt_tokens).filter(|n| *n > 0);
        let salt = request.kv.take().map(|kv| kv.cache_salt).filter(|salt| !salt.is_empty());
        let session = request.session_id.as_deref().filter(|session| !session.is_empty()).map(hashed);
        let n_choices = request.sampling.as_ref().map_or(1, |sampling| sampling.num_sequences.max(1));
        let sampling = sampling(&mut request)?;
        let parsed = ParsedRequest {
            model: request.model,
            prompts: vec![input],
            n_choices,
            purpose: Purpose::Generate(Box::new(sampling)),
            truncation: n_max.map(|n| Truncation { n_max: Some(n), side: CutSide::Left }),
            priority: request.priority,
            cache_salt: salt.map_or(Ok(CacheSalt::default()), |salt| cache_salt(&salt))?,
            placement: ReplicaPreference { session, apart_from: None },
            deadline,
            tenant,
            ..ParsedRequest::default()
        };
        Ok((parsed, TextReplyFormat::of(request.response.unwrap_or_default())))
    }
}

/// Returns a refusal as a status, with the field's name in this protocol.
fn to_status(refusal: Refusal) -> Status {
    status(refusal.renamed(&[
        (structure::FIELD, "decoding.structured_output"),
        ("stop", "stopping.stop_strings"),
        ("stop_token_ids", "stopping.stop_token_ids"),
        ("max_tokens", "stopping.max_new_tokens"),
        ("min_tokens", "stopping.min_new_tokens"),
        ("n", "sampling.num_sequences"),
        ("top_p", "sampling.top_p"),
        ("top_k", "sampling.top_k"),
        ("min_p", "sampling.min_p"),
        ("cache_salt", "kv.cache_salt"),
        ("logprobs", "response.output_candidates"),
        ("logprob_token_ids", "response.output_candidates"),
        ("prompt_logprobs", "response.prompt_candidates"),
    ]))
}

/// What the client's replies have.
struct TextReplyFormat {
    prompt_token_ids: bool,
    prompt_logprobs: bool,
    text: bool,
    token_ids: bool,
    logprobs: bool,
    /// Whether the tokens beside a drawn one are the most likely ones.
    has_ranks: bool,
}

impl TextReplyFormat {
    fn of(options: wire::ResponseOptions) -> TextReplyFormat {
        let select = options.output_candidates.and_then(|candidates| candidates.select);
        TextReplyFormat {
            prompt_token_ids: options.prompt_token_ids,
            prompt_logprobs: options.prompt_logprobs,
            text: options.output_text.unwrap_or(true),
            token_ids: options.output_token_ids,
            logprobs: options.output_logprobs,
            has_ranks: matches!(select, Some(Select::TopN(_))),
        }
    }

    fn part(&self, index: u32, delta: v1::Delta) -> wire::SequenceOutput {
        wire::SequenceOutput {
            index,
            num_tokens: delta.token_ids.len() as u32,
            text: if self.text { delta.text } else { String::new() },
            token_ids: if self.token_ids { delta.token_ids } else { Vec::new() },
            candidate_tokens: if self.logprobs {
                candidate_tokens(&delta.logprobs, self.has_ranks)
            } else {
                Vec::new()
            },
            logprobs: delta.logprobs.iter().filter(|_| self.logprobs).map(|one| one.logprob).collect(),
            ..wire::SequenceOutput::default()
        }
    }
}

/// One sequence, until it has ended.
#[derive(Clone, Copy, Default)]
struct OutputState {
    n_tokens: u32,
    last: Option<Token>,
    has_ended: bool,
}

/// A generation as replies. Dropping it cancels the request.
pub struct TextReplies {
    events: AbortableGeneration,
    format: TextReplyFormat,
    sequences: Vec<OutputState>,
    /// Whether the first reply is still to come. It waits for the prompt's logprobs, if they are requested.
    needs_prompt: bool,
    ready: VecDeque<wire::GenerateResponse>,
}

impl TextReplies {
    fn new(
        generation: Generation,
        format: TextReplyFormat,
        n_choices: u32,
        guard: Option<RunningGuard>,
    ) -> TextReplies {
        let events = AbortableGeneration::new(generation, guard);
        let sequences = vec![OutputState::default(); n_choices as usize];
        let mut replies = TextReplies { events, format, sequences, needs_prompt: true, ready: VecDeque::new() };
        if !replies.format.prompt_logprobs {
            replies.add_prompt(&[]);
        }
        replies
    }

    /// Adds the first reply, unless it was added already.
    fn add_prompt(&mut self, scored: &[v1::Logprob]) {
        if !std::mem::take(&mut self.needs_prompt) {
            return;
        }
        let ids = self.events.prompt_ids().unwrap_or_default();
        let mut info = wire::PromptInfo { num_prompt_tokens: self.events.n_prompt(), ..wire::PromptInfo::default() };
        if self.format.prompt_token_ids {
            info.token_ids = ids.to_vec();
        }
        if self.format.prompt_logprobs {
            let first = wire::CandidateTokenInfo::default();
            info.logprobs = [0.0].into_iter().chain(scored.iter().map(|one| one.logprob)).collect();
            info.candidate_tokens = [first].into_iter().chain(candidate_tokens(scored, true)).collect();
        }
        self.ready.push_back(wire::GenerateResponse { prompt_info: Some(info), outputs: None });
    }

    fn add_event(&mut self, index: u32, event: GenerationEvent) {
        let Some(sequence) = self.sequences.get_mut(index as usize) else { return };
        match event {
            GenerationEvent::Aside(SideOutput::Prompt(prompt)) => self.add_prompt(&prompt.logprobs),
            GenerationEvent::Aside(_) => {}
            GenerationEvent::Delta(delta) => {
                sequence.n_tokens += delta.token_ids.len() as u32;
                sequence.last = delta.token_ids.last().copied().or(sequence.last);
                let outputs = Some(self.format.part(index, delta));
                self.ready.push_back(wire::GenerateResponse { outputs, ..wire::GenerateResponse::default() });
            }
            GenerationEvent::Finished(finished) => {
                sequence.has_ended = true;
                let info = finish_info(&finished, sequence.last);
                self.ready.push_back(end(index, info));
            }
        }
    }

    /// Ends the unfinished sequences, and reports this to the reader, which may be another client than the aborting
    /// one.
    fn abort(&mut self) {
        self.add_prompt(&[]);
        for (index, sequence) in self.sequences.iter_mut().enumerate().filter(|(_, one)| !one.has_ended) {
            sequence.has_ended = true;
            let info = wire::FinishInfo {
                num_output_tokens: sequence.n_tokens,
                finish_reason: FinishReason::Aborted.into(),
                ..wire::FinishInfo::default()
            };
            self.ready.push_back(end(index as u32, info));
        }
    }
}

fn end(index: u32, info: wire::FinishInfo) -> wire::GenerateResponse {
    let outputs = wire::SequenceOutput { index, finish_info: Some(info), ..wire::SequenceOutput::default() };
    wire::GenerateResponse { prompt_info: None, outputs: Some(outputs) }
}

/// Adds the next reply of a stream to the whole answer.
fn join(whole: &mut wire::GenerateResponse, reply: wire::GenerateResponse) {
    whole.prompt_info = whole.prompt_info.take().or(reply.prompt_info);
    let Some(part) = reply.outputs else { return };
    let outputs = whole.outputs.get_or_insert_default();
    outputs.text.push_str(&part.text);
    outputs.num_tokens += part.num_tokens;
    outputs.token_ids.extend(part.token_ids);
    outputs.logprobs.extend(part.logprobs);
    outputs.candidate_tokens.extend(part.candidate_tokens);
    outputs.finish_info = part.finish_info.or(outputs.finish_info.take());
}

impl Stream for TextReplies {
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
