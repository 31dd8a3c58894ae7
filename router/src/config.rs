//! The router's settings. Every limit of the router has its name here.

use crate::board::pick::PickPolicy;
use crate::front::resume::ResumeKey;
use crate::front::stored::StoreLimits;
use crate::limits::keys::ApiKeys;
use crate::record::RecordConfig;
use crate::replicas::models::routes::ModelRoutes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

#[derive(Clone)]
pub struct Config {
    /// Names that clients may call the model by; the first is the one that replies carry. If empty, the replica's own
    /// name.
    pub names: Vec<String>,
    /// Names that each stand for several versions, with their weights. The caller may reload them while requests run.
    pub routes: ModelRoutes,
    /// The rule by which one of several replicas gets a request.
    pub policy: PickPolicy,
    /// The seed of requests that give none. None: another for each.
    pub seed: Option<u64>,
    pub limits: RouterLimits,
    pub timeouts: Timeouts,
    /// The API keys. Without any, requests need no key.
    pub keys: ApiKeys,
    /// The operators' keys, if operators have a port of their own. Without any keys, requests to that port need none.
    pub operators: Option<ApiKeys>,
    /// TLS towards clients, over HTTP and gRPC. The caller may replace its certificate while connections are served.
    pub tls: Option<wire::OfferedTls>,
    /// Host names by which clients may address the HTTP server, besides this machine's own. They count where the server
    /// listens on loopback and requires no key.
    pub hosts_allowed: Vec<String>,
    /// Origins of pages that may send requests, besides this machine's own. They count where the server requires no
    /// key.
    pub origins_allowed: Vec<String>,
    /// The path under which a proxy serves the HTTP API, such as `/llm`: pages answer with it and without. Empty: none.
    pub root_path: String,
    /// Where finished answers are kept. None: they are not kept.
    pub record: Option<RecordConfig>,
    /// The share of finished answers that is run again, from 0 to 1, where there is idle capacity for it.
    pub audit: f64,
    /// The key that all routers of the cluster share, so that they can resume each other's streams.
    pub resume_key: ResumeKey,
    /// Pages that are switched off.
    pub pages_off: DisabledPages,
    /// Words that lists of models show beside the first model. They have no meaning for this server.
    pub tags: Vec<String>,
    /// Whether an answer reports how long it took, in the form of vLLM's servers.
    pub request_metrics: bool,
    /// What `/metrics` answers.
    pub metrics: Render,
    /// The tokenizer files for gateways that tokenize themselves. None if there are none.
    pub text_files: Option<ReadTextFiles>,
    /// Lists the models on this machine and those that it could fetch, for operators. None if this machine's disk and
    /// memory say nothing about the replicas.
    pub machine_models: Option<ListMachineModels>,
    /// The protocol versions that are sent to coordinators and compared with theirs: this build's own.
    pub speaks: proto::ProtocolRange,
    /// Whether a request that came now would be served. The caller may watch it.
    pub readiness: watch::Sender<bool>,
}

/// Optional pages for operators and other people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DisabledPages {
    pub metrics: bool,
    pub slots: bool,
    pub ui: bool,
}

/// Reads the model's tokenizer files when a gateway first requests them.
pub type ReadTextFiles = Arc<dyn Fn() -> checkpoint::Result<checkpoint::TextBundle> + Send + Sync>;

/// Lists models when a page requests them, which reads their files. Returns JSON, or why it is not possible.
pub type ListMachineModels = Arc<dyn Fn() -> Result<serde_json::Value, String> + Send + Sync>;

/// Renders a page when it is requested.
pub type Render = Arc<dyn Fn() -> String + Send + Sync>;

#[derive(Clone, Debug)]
pub struct RouterLimits {
    /// Requests that were let in and have no token yet. Further requests are refused with a 429.
    pub requests_waiting_max: usize,
    /// The tokens of their prompts together. A single request may have more.
    pub waiting_tokens_max: usize,
    /// Requests under way, waiting or not.
    pub requests_max: usize,
    /// Of these, how many run at once, over all replicas: what llama.cpp calls slots.
    pub slots: usize,
    /// A stream with this many unread steps, over all its choices, is cut and its request cancelled: tokens keep
    /// coming and have to be kept somewhere.
    pub outputs_unread_max: usize,
    /// A request that has lost its replica more often than this since its last token is not given to another: it may
    /// be the cause.
    pub losses_max: u32,
    /// The same for losses of whole coordinators: such a loss interrupts every request there, and not only one epoch.
    pub coordinator_losses_max: u32,
    /// At most `body_discarded_max`.
    pub body_bytes_max: usize,
    /// Bytes of all bodies that are read at the same time.
    pub bodies_bytes_max: usize,
    /// A body beyond the limit is read up to here before it is refused, because a client that still sends reads no
    /// answer.
    pub body_discarded_max: usize,
    /// How many long texts are read, rendered or tokenized at the same time, each on a thread of its own.
    pub long_texts_max: usize,
    /// The most choices of one prompt, `n`.
    pub choices_max: u32,
    /// A stream can be resumed only with at most this many choices over all its prompts: each event carries the
    /// position of every choice.
    pub choices_resumed_max: usize,
    /// The most prompts of one request.
    pub prompts_max: usize,
    /// The most inputs of one request for embeddings, and how many of them run at the same time.
    pub embeddings_max: usize,
    pub embeddings_at_once_max: usize,
    /// Connections of the HTTP API, and as many of gRPC. Further ones are closed; over HTTP with a reason.
    pub connections_max: usize,
    pub stop_strings_max: usize,
    /// The bytes of all stop strings of one request together.
    pub stop_bytes_max: usize,
    /// The most tokens for which one request may change the logits.
    pub logit_bias_max: usize,
    /// The bytes of a request's prompts and sampling lists, times the answers that each prompt gets.
    pub copies_bytes_max: usize,
    /// How large a grammar may be, and how much work it may cause.
    pub grammar: grammar::GrammarLimits,
    /// The bytes of compiled grammars that are kept for requests with the same grammar.
    pub grammars_kept_bytes_max: usize,
    /// How many responses are stored, in how many bytes, and for how long.
    pub stored: StoreLimits,
    /// Finished answers that wait to be recorded, and their bytes. More are not recorded, and counted.
    pub answers_unrecorded_max: usize,
    pub answers_unrecorded_bytes_max: usize,
    /// The most likely tokens that may be reported beside each token.
    pub logprobs_max: u32,
}

impl Default for RouterLimits {
    fn default() -> Self {
        RouterLimits {
            requests_waiting_max: 1024,
            waiting_tokens_max: 4 << 20,
            requests_max: 4096,
            slots: 64,
            outputs_unread_max: 4096,
            losses_max: 8,
            coordinator_losses_max: 2,
            body_bytes_max: 4 << 20,
            bodies_bytes_max: 256 << 20,
            body_discarded_max: 64 << 20,
            long_texts_max: 4,
            choices_max: 128,
            choices_resumed_max: 64,
            prompts_max: 256,
            embeddings_max: 2048,
            embeddings_at_once_max: 32,
            connections_max: 4096,
            stop_strings_max: 4096,
            stop_bytes_max: 256 << 10,
            logit_bias_max: 1024,
            copies_bytes_max: 64 << 20,
            grammar: grammar::GrammarLimits::default(),
            grammars_kept_bytes_max: 16 << 20,
            stored: StoreLimits::default(),
            answers_unrecorded_max: 1024,
            answers_unrecorded_bytes_max: 64 << 20,
            logprobs_max: 20,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Timeouts {
    /// A connection that has not sent a request's headers by then is closed.
    pub headers_max: Duration,
    /// A body that has not arrived by then is refused.
    pub body_max: Duration,
    /// The longest time for which a client may take nothing while data waits for it. Then its connection is cut if not
    /// a byte can be written, and its stream is cut if it does not request the next reply.
    pub unread_max: Duration,
    /// How long a request may take from its arrival, whatever its own deadline. None: no limit.
    pub request_max: Option<Duration>,
    /// How long a replica's first answer is awaited before a stream is opened. Until then a refusal can still be an
    /// HTTP status.
    pub first_answer_max: Duration,
    /// A comment is sent on an SSE stream that was silent for this long, so that proxies keep it open.
    pub sse_silence_max: Duration,
    /// The pause between attempts to attach to a coordinator: doubles from the first to the second.
    pub reattach_min: Duration,
    pub reattach_max: Duration,
    pub attach_max: Duration,
    /// A coordinator that is silent for this many of its beats is suspected: its streams move to other replicas that
    /// can continue them at once.
    pub beats_missed_max: u32,
    /// A coordinator that is silent for this long counts as lost.
    pub replica_silence_max: Duration,
    /// The interval between looks for replicas that are slow or break often.
    pub judge_every: Duration,
    /// How long streams of a lost coordinator wait for a replica that can continue them: the same one, back again, or
    /// another.
    pub replica_absence_max: Duration,
    /// When a replica has been without its ranks for this long, its streams move to another one that is ready.
    pub recovery_max: Duration,
    /// How long a new router's first connections wait until it knows its replicas.
    pub introduction_max: Duration,
    /// How long streams may still run after the stop signal.
    pub drain_max: Duration,
    /// How long a client has to wait before it retries when the router is full or no replica is ready.
    pub retry_after: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
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
            introduction_max: Duration::from_secs(1),
            drain_max: Duration::from_secs(30),
            retry_after: Duration::from_secs(1),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            names: Vec::new(),
            routes: ModelRoutes::default(),
            policy: PickPolicy::default(),
            seed: None,
            request_metrics: false,
            limits: RouterLimits::default(),
            timeouts: Timeouts::default(),
            keys: ApiKeys::default(),
            operators: None,
            tls: None,
            hosts_allowed: Vec::new(),
            origins_allowed: Vec::new(),
            root_path: String::new(),
            record: None,
            audit: 0.0,
            resume_key: ResumeKey::of(&[]),
            pages_off: DisabledPages::default(),
            tags: Vec::new(),
            metrics: Arc::new(String::new),
            text_files: None,
            machine_models: None,
            speaks: proto::ProtocolRange::default(),
            readiness: watch::Sender::default(),
        }
    }
}
