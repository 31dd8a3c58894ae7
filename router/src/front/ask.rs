//! A request as a face has parsed it, in the terms of `lockstep.v1`. Knows no face and no replica.

use crate::config::RouterLimits;
use crate::front::resume::Resume;
use crate::front::sampling::{Wording, random_seed, work};
use crate::front::stop::Stops;
use crate::refusal::Refusal;
use crate::replicas::models::text::ModelText;
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use types::{CacheSalt, Goal, Request, Sampling, TenantId};

/// A request as a face has parsed it.
pub struct Ask {
    /// The model's name; empty for the first that is served.
    pub model: String,
    /// Each prompt gets `n_choices` answers.
    pub prompts: Vec<Input>,
    pub n_choices: u32,
    pub first_choice: u32,
    pub purpose: Purpose,
    /// The client wants the prompts' texts back.
    pub echo: bool,
    /// The client wants a certificate of each answer.
    pub certificate: bool,
    pub priority: i32,
    pub cache_salt: CacheSalt,
    pub deadline: Option<Instant>,
    pub tenant: TenantId,
    /// Requests with the same session belong together.
    pub session: Option<u64>,
    /// The stream to resume, and how much of it the client has.
    pub resume: Option<Resume>,
    pub body: BodyPermit,
}

/// The memory that a request's text holds until it has become tokens. One permit for all of its bytes, in however many
/// pieces they came.
pub type BodyPermit = Option<OwnedSemaphorePermit>;

impl Default for Ask {
    /// Asks for one answer to no prompt, with the model's defaults.
    fn default() -> Ask {
        Ask {
            model: String::new(),
            prompts: Vec::new(),
            n_choices: 1,
            first_choice: 0,
            purpose: Purpose::Generate(Box::default()),
            echo: false,
            certificate: false,
            priority: 0,
            cache_salt: CacheSalt::default(),
            deadline: None,
            tenant: TenantId::default(),
            session: None,
            resume: None,
            body: None,
        }
    }
}

pub enum Purpose {
    Generate(Box<v1::Sampling>),
    Pool,
}

impl Purpose {
    /// The key that decides which of several versions answers: the same for all requests of a session, or else for all
    /// with the same seed. A request without a seed gets one here. Embeddings of two versions cannot be compared, so
    /// all of a tenant's have one key.
    pub(super) fn key(&mut self, session: Option<u64>, tenant: TenantId) -> u64 {
        match self {
            Purpose::Generate(sampling) => {
                let seed = *sampling.seed.get_or_insert_with(random_seed);
                session.unwrap_or(seed)
            }
            Purpose::Pool => tenant.0,
        }
    }

    /// Takes out what the answer must be.
    pub(super) fn take_structure(&mut self) -> Option<v1::Structure> {
        match self {
            Purpose::Generate(sampling) => sampling.structure.take(),
            Purpose::Pool => None,
        }
    }

    /// The cost of reading it, in bytes of text.
    pub(super) fn work(&self) -> usize {
        match self {
            Purpose::Generate(sampling) => work(sampling),
            Purpose::Pool => 0,
        }
    }

    /// Checks the sampling and fills in the model's defaults: a request without its prompt, and how it becomes text.
    /// `seed` is that of a resumed stream.
    pub(super) fn read(
        self,
        of: &ModelText,
        seed: Option<u64>,
        limits: &RouterLimits,
    ) -> Result<(Request, Wording), Refusal> {
        match self {
            Purpose::Generate(mut sampling) => {
                sampling.seed = sampling.seed.or(seed);
                of.sampling(*sampling, limits)
            }
            Purpose::Pool => {
                let sampling = Sampling { tokens_max: 1, ..Sampling::default() };
                let request = Request { sampling, goal: Goal::Pool, cache_bypass: true, ..Request::default() };
                Ok((request, Wording { stops: Arc::new(Stops::new(Vec::new())), show_special: false }))
            }
        }
    }
}

/// The cost of a message in a template besides its text, in bytes.
const MESSAGE_BYTES: usize = 64;

/// The cost of reading an input, in bytes of text.
pub(super) fn length(input: &Input) -> usize {
    match input {
        Input::TokenIds(_) => 0,
        Input::Text(text) => text.len(),
        Input::Chat(chat) => chat_length(chat),
    }
}

pub(super) fn chat_length(chat: &v1::Chat) -> usize {
    let tools: usize = chat.tools.iter().map(String::len).sum();
    let rest = chat.documents.len() + chat.template_variables.len() + chat.template.len();
    tools + rest + chat.messages.iter().map(message_length).sum::<usize>()
}

fn message_length(message: &v1::ChatMessage) -> usize {
    let calls = message.tool_calls.iter().map(|call| MESSAGE_BYTES + call.name.len() + call.arguments.len());
    MESSAGE_BYTES + message.role.len() + message.content.len() + message.reasoning.len() + calls.sum::<usize>()
}

/// A deadline this many milliseconds from now; zero means none.
pub fn after(millis: u32) -> Option<Instant> {
    (millis > 0).then(|| Instant::now() + Duration::from_millis(millis.into()))
}
