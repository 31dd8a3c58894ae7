//! Requests that clients can abort by an id, and the events of one of them. Has no knowledge of messages.

use router::front::generation::{Generation, GenerationEvent};
use router::refusal::Refusal;
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use types::{TenantId, Token};

/// The most bytes of a gateway's id for a request. Usual ones have forty.
const REQUEST_ID_BYTES_MAX: usize = 256;

pub fn check_id(id: &str) -> Result<(), Refusal> {
    match id.len() {
        0..=REQUEST_ID_BYTES_MAX => Ok(()),
        n => Err(Refusal::invalid("request_id", format!("must have at most {REQUEST_ID_BYTES_MAX} bytes, not {n}"))),
    }
}

/// Requests that a client can abort by id. A request is removed when its stream is dropped, so there are never more of
/// them than streams.
#[derive(Clone, Default)]
pub struct RunningRequests(Arc<Mutex<HashMap<Name, NamedStreams>>>);

type Name = (TenantId, String);

/// The streams of one id, which end together.
struct NamedStreams {
    abort: CancellationToken,
    n_streams: usize,
}

impl RunningRequests {
    /// Adds a request. None if it has no id.
    pub fn add(&self, tenant: TenantId, id: &str) -> Option<RunningGuard> {
        if id.is_empty() {
            return None;
        }
        let name = (tenant, id.to_owned());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = || NamedStreams { abort: CancellationToken::new(), n_streams: 0 };
        let held = all.entry(name.clone()).or_insert_with(fresh);
        held.n_streams += 1;
        Some(RunningGuard { running: self.clone(), name, abort: held.abort.clone() })
    }

    pub fn abort(&self, tenant: TenantId, id: String) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = all.get(&(tenant, id)) {
            held.abort.cancel();
        }
    }

    fn remove_stream(&self, name: &Name) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = all.get_mut(name) {
            held.n_streams -= 1;
            if held.n_streams == 0 {
                all.remove(name);
            }
        }
    }
}

pub struct RunningGuard {
    running: RunningRequests,
    name: Name,
    abort: CancellationToken,
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.running.remove_stream(&self.name);
    }
}

/// A generation that ends early when its id is aborted. Dropping it cancels the request, as an abort does.
pub struct AbortableGeneration {
    /// None after an abort.
    generation: Option<Generation>,
    n_prompt: u32,
    aborted: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    _guard: Option<RunningGuard>,
}

/// An event of a choice. None for an abort, which nothing follows.
type AbortableEvent = Option<(u32, GenerationEvent)>;

impl AbortableGeneration {
    pub fn new(generation: Generation, guard: Option<RunningGuard>) -> AbortableGeneration {
        let aborted = guard.as_ref().map(|guard| Box::pin(guard.abort.clone().cancelled_owned()));
        let n_prompt = generation.started.prompt_tokens;
        AbortableGeneration { generation: Some(generation), n_prompt, aborted, _guard: guard }
    }

    /// Returns the number of the prompt's tokens.
    pub fn n_prompt(&self) -> u32 {
        self.n_prompt
    }

    /// Returns the prompt's tokens. None after an abort.
    pub fn prompt_ids(&self) -> Option<&[Token]> {
        self.generation.as_ref()?.prompts.first().map(|prompt| &prompt.ids[..])
    }

    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AbortableEvent, Refusal>>> {
        let Some(generation) = &mut self.generation else { return Poll::Ready(None) };
        if self.aborted.as_mut().is_some_and(|aborted| aborted.as_mut().poll(context).is_ready()) {
            self.generation = None;
            return Poll::Ready(Some(Ok(None)));
        }
        let event = ready!(Pin::new(generation).poll_next(context));
        Poll::Ready(event.map(|event| event.map(Some)))
    }
}
