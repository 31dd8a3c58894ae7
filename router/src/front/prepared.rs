//! A request that has been read, and the requests to a replica that it becomes. Knows no replica.

use crate::board::pick::PickInfo;
use crate::front::certificate::GrammarHash;
use crate::front::finished_answer::AnswerSubscription;
use crate::front::generation::Prompt;
use crate::front::parsed_request::ReplicaPreference;
use crate::front::resume::Fingerprint;
use crate::front::sampling::AnswerTextSettings;
use crate::refusal::Refusal;
use crate::replicas::models::table::ResolvedModel;
use std::ops::Range;
use tokio::time::Instant;
use types::{Goal, Grammar, Hex, Request, Token, Tokens};

/// A request that has been read: prompts are tokens, and its sampling is checked.
pub struct PreparedRequest {
    pub prompts: Vec<Prompt>,
    /// The part that the requests of all its answers share: all but the prompt, the choice, and the room for the
    /// answer.
    pub base_request: Request,
    pub wording: AnswerTextSettings,
    pub numbers: Range<u32>,
    /// Whether the client watches how far its prompts are.
    pub needs_progress: bool,
    /// Whether each answer gets a certificate.
    pub certified: bool,
    pub subscription: Option<AnswerSubscription>,
    pub grammar_hash: Option<GrammarHash>,
    pub model: ResolvedModel,
    pub placement: ReplicaPreference,
    pub deadline: Option<Instant>,
    /// Unix seconds: when the stream began, wherever that was.
    pub created: u64,
}

/// Bytes of a request's lists up to which they do not count as waiting tokens.
const LISTS_BYTES_FREE: usize = 4 << 10;

impl PreparedRequest {
    pub fn check_copies(&self, bytes_max: usize) -> Result<(), Refusal> {
        let (n_choices, lists) = (self.numbers.len() as u64, self.lists_bytes() as u64);
        let each = |prompt: &Prompt| (prompt.ids.len() * size_of::<Token>()) as u64 + lists;
        let n_bytes = n_choices * self.prompts.iter().map(each).sum::<u64>();
        if n_bytes <= bytes_max as u64 {
            return Ok(());
        }
        let cost = format!("its {n_choices} answers to {} prompts take {n_bytes} bytes", self.prompts.len());
        let message = format!(
            "{cost} with their lists (logit_bias, allowed_token_ids, words) and grammar; the limit is {bytes_max}"
        );
        Err(Refusal::invalid("n", message))
    }

    /// Returns a part of the request: as many answers to each of these prompts as there are numbers, drawn like
    /// `base_request`, and sent as plain text.
    pub fn part(
        &self,
        prompts: Vec<Tokens>,
        base_request: Request,
        wording: AnswerTextSettings,
        numbers: Range<u32>,
    ) -> PreparedRequest {
        PreparedRequest {
            prompts: prompts.into_iter().map(|ids| Prompt { ids, second_text: 0, text: None, talk: None }).collect(),
            base_request,
            wording,
            numbers,
            needs_progress: false,
            certified: false,
            subscription: None,
            grammar_hash: self.grammar_hash,
            model: self.model.clone(),
            placement: self.placement,
            deadline: self.deadline,
            created: self.created,
        }
    }

    /// Returns the tokens of all its requests; the bytes of their lists count as if they were tokens.
    pub fn n_waiting(&self) -> usize {
        let n_listed = self.lists_bytes().saturating_sub(LISTS_BYTES_FREE) / size_of::<Token>();
        let of_prompts = self.prompts.iter().map(|prompt| prompt.ids.len() + n_listed);
        self.numbers.len() * of_prompts.sum::<usize>()
    }

    /// Returns the bytes that each request has besides its prompt.
    fn lists_bytes(&self) -> usize {
        let predicted = self.base_request.predicted.len() * size_of::<Token>();
        self.base_request.sampling.lists_bytes()
            + predicted
            + self.base_request.grammar.as_ref().map_or(0, Grammar::n_bytes)
    }

    /// Returns the requests, one per choice of each prompt, for a replica with this context.
    pub fn requests(&self, context: u32) -> Result<Vec<Request>, Refusal> {
        let n_prompt = longest(&self.prompts);
        if n_prompt > room(context, &self.base_request.goal) as usize {
            return Err(Refusal::TooLong { n_prompt, context });
        }
        let (tokens_min, n_left) = (self.base_request.sampling.tokens_min, context.saturating_sub(n_prompt as u32));
        if self.base_request.goal == Goal::Generate && tokens_min > n_left {
            let why = format!("must be at most {n_left}, the room after the prompt, got {tokens_min}");
            return Err(Refusal::invalid("min_tokens", why));
        }
        let each = self.prompts.iter().flat_map(|prompt| self.numbers.clone().map(move |number| (prompt, number)));
        Ok(each.map(|(prompt, number)| self.request(prompt, number, context)).collect())
    }

    pub fn request(&self, prompt: &Prompt, choice: u32, context: u32) -> Request {
        let room = context - prompt.ids.len() as u32;
        let (ids, second_text) = (prompt.ids.clone(), prompt.second_text);
        let mut request = Request { prompt: ids, second_text, ..self.base_request.clone() };
        request.sampling.choice = choice;
        // A pooled prompt may leave no room, and draws nothing.
        request.sampling.tokens_max = request.sampling.tokens_max.min(room.max(1));
        request.predicted.truncate(request.sampling.tokens_max as usize);
        request
    }

    /// Returns what the choice of a replica depends on.
    pub fn pick_info(&self) -> PickInfo {
        let n_prompt = u32::try_from(longest(&self.prompts)).unwrap_or(u32::MAX);
        // A pooled prompt also fits if it leaves no room.
        let n_prompt = n_prompt.saturating_sub(u32::from(self.base_request.goal == Goal::Pool));
        let (version, protocol) = (self.model.version, proto::needed(&self.base_request));
        let ReplicaPreference { session, apart_from } = self.placement;
        PickInfo { n_prompt, session, apart_from, n_before: 0, version, protocol }
    }

    /// Returns the prompt to look up in caches, if the request may read them.
    pub fn cached_prompt(&self) -> Option<&[Token]> {
        let reads_cache = self.base_request.goal == Goal::Generate;
        reads_cache.then(|| self.prompts.first().map_or(&[][..], |prompt| &prompt.ids))
    }

    pub fn fingerprint(&self, requests: &[Request]) -> Fingerprint {
        let stops = &self.wording.stops;
        let flags = [stops.are_included(), self.wording.show_special];
        let flags = flags.map(|flag| if flag { "yes" } else { "no" });
        let talks: Vec<String> =
            self.prompts.iter().filter_map(|prompt| Some(prompt.talk.as_ref()?.fingerprint_text())).collect();
        // Another grammar engine may continue differently.
        let engine = self.grammar_hash.map(|hash| Hex(&hash).to_string());
        let texts = flags.into_iter().chain(stops.strings()).chain(talks.iter().chain(&engine).map(String::as_str));
        Fingerprint::of(requests.iter(), texts)
    }
}

/// Returns the most tokens that a prompt may have: an answer needs room for one.
pub fn room(context: u32, goal: &Goal) -> u32 {
    if *goal == Goal::Pool { context } else { context.saturating_sub(1) }
}

pub fn longest(prompts: &[Prompt]) -> usize {
    prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0)
}
