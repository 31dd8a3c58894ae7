//! What a router is told at its start. Every limit of the router has its name here.

use crate::keys::ApiKeys;
use crate::models::Routes;
use crate::pick::Policy;
use crate::resume::ResumeKey;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone)]
pub struct Config {
    /// Names that clients may call the model by; the first is the one that replies carry. Where there is none, the
    /// replica's own.
    pub names: Vec<String>,
    /// Names behind which several versions stand, with their weights. May be read again while requests run.
    pub routes: Routes,
    /// Who of several replicas gets a request.
    pub policy: Policy,
    pub limits: Limits,
    pub waits: Waits,
    /// Who may ask. Without keys, everybody.
    pub keys: ApiKeys,
    /// Of all routers of the cluster, which go on with each other's streams.
    pub resume_key: ResumeKey,
    /// What `/metrics` answers.
    pub metrics: Render,
    /// What gateways that make tokens themselves are given for it. None where there is nothing to give.
    pub text_files: Option<ReadTextFiles>,
}

/// Reads the model's tokenizer and what stands beside it, when somebody first asks.
pub type ReadTextFiles = Arc<dyn Fn() -> checkpoint::Result<checkpoint::TextBundle> + Send + Sync>;

/// Renders a page when it is asked for.
pub type Render = Arc<dyn Fn() -> String + Send + Sync>;

#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests that were let in and have no token yet. One more is refused with a 429.
    pub requests_waiting_max: usize,
    /// Tokens of their prompts together. One request alone may have more.
    pub waiting_tokens_max: usize,
    /// Requests under way, waiting or not.
    pub requests_max: usize,
    /// A stream whose reader has left so many steps unread, of all its choices, is cut, and its request cancelled:
    /// tokens keep coming and have to be kept somewhere.
    pub outputs_unread_max: usize,
    /// A request whose replica was lost so often before it said a token is not given to another: it may be the cause.
    pub losses_max: u32,
    pub body_bytes_max: usize,
    /// Of all bodies that are read at the same time.
    pub bodies_bytes_max: usize,
    /// A body beyond the limit is read so far before it is refused: who still sends reads nothing.
    pub body_discarded_max: usize,
    /// Long texts that are read, rendered or tokenized at the same time, on threads of their own.
    pub long_texts_max: usize,
    /// Choices of one prompt, `n`.
    pub choices_max: u32,
    /// Choices of one stream, of all its prompts, that can be gone on with elsewhere: each event says where each is.
    pub choices_resumed_max: usize,
    /// Prompts of one request.
    pub prompts_max: usize,
    /// Inputs of one request for embeddings, and how many of them are under way at the same time.
    pub embeddings_max: usize,
    pub embeddings_at_once_max: usize,
    /// Connections of the HTTP API, and of gRPC's; one more is closed, over HTTP with a word.
    pub connections_max: usize,
    pub stop_strings_max: usize,
    /// Of all stop strings of one request together.
    pub stop_bytes_max: usize,
    /// Tokens whose logits one request may change.
    pub logit_bias_max: usize,
    /// Of one request: what its prompts and its sampling's lists take, times the answers that each prompt gets.
    pub copies_bytes_max: usize,
    /// Likely tokens told beside each token.
    pub logprobs_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            requests_waiting_max: 1024,
            waiting_tokens_max: 4 << 20,
            requests_max: 4096,
            outputs_unread_max: 4096,
            losses_max: 8,
            body_bytes_max: 4 << 20,
            bodies_bytes_max: 256 << 20,
            body_discarded_max: 64 << 20,
            long_texts_max: 4,
            choices_max: 16,
            choices_resumed_max: 64,
            prompts_max: 256,
            embeddings_max: 2048,
            embeddings_at_once_max: 32,
            connections_max: 4096,
            stop_strings_max: 4096,
            stop_bytes_max: 256 << 10,
            logit_bias_max: 1024,
            copies_bytes_max: 64 << 20,
            logprobs_max: 20,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Waits {
    /// A connection that has not sent a request's headers by then is closed.
    pub headers_max: Duration,
    /// A body that has not arrived by then is refused.
    pub body_max: Duration,
    /// A client that takes nothing for so long, while something is there for it, is cut: its connection where not a
    /// byte can be written, and its stream where nobody asks for the next reply.
    pub unread_max: Duration,
    /// From a request's arrival to its end, whatever its own deadline. None: as long as it takes.
    pub request_max: Option<Duration>,
    /// How long the first answer of a replica is awaited before a stream is opened: until then a refusal can still be
    /// an HTTP status.
    pub first_answer_max: Duration,
    /// A comment is sent on an SSE stream that was silent for so long, so that proxies keep it open.
    pub sse_silence_max: Duration,
    /// Between attempts to attach to a coordinator: doubles from the first to the second.
    pub reattach_min: Duration,
    pub reattach_max: Duration,
    pub attach_max: Duration,
    /// A coordinator that has said nothing in the time of so many of its beats is suspected: others get its streams, if
    /// they can go on with them at once.
    pub beats_missed_max: u32,
    /// One that is silent for so long is taken for lost.
    pub replica_silence_max: Duration,
    /// Between looks at who is slow or breaks often.
    pub judge_every: Duration,
    /// Streams of a lost coordinator wait so long for one that can go on with them: it come again, or another.
    pub replica_absence_max: Duration,
    /// Streams of a replica that has been without its ranks for so long go to another one that is ready.
    pub recovery_max: Duration,
    /// From the stop signal until streams that still run are ended.
    pub drain_max: Duration,
    /// What a client is told to wait when all is full or not ready.
    pub retry_after: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Waits {
            headers_max: Duration::from_secs(30),
            body_max: Duration::from_secs(30),
            unread_max: Duration::from_secs(30),
            request_max: None,
            first_answer_max: Duration::from_secs(2),
            sse_silence_max: Duration::from_secs(15),
            reattach_min: Duration::from_millis(50),
            reattach_max: Duration::from_secs(1),
            attach_max: Duration::from_secs(3),
            beats_missed_max: 8,
            replica_silence_max: Duration::from_secs(3),
            judge_every: Duration::from_secs(1),
            replica_absence_max: Duration::from_secs(60),
            recovery_max: Duration::from_secs(10),
            drain_max: Duration::from_secs(30),
            retry_after: Duration::from_secs(1),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            names: Vec::new(),
            routes: Routes::default(),
            policy: Policy::default(),
            limits: Limits::default(),
            waits: Waits::default(),
            keys: ApiKeys::default(),
            resume_key: ResumeKey::of(&[]),
            metrics: Arc::new(String::new),
            text_files: None,
        }
    }
}
