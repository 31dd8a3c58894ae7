//! The parts that whole and chunked answers in OpenAI's format share. The difference between chat and completions is in
//! an `AnswerFormat`.

use crate::http::answer_content::AnswerContent;
use crate::http::fields::RequestOptions;
use crate::http::stopwatch::Stopwatch;
use crate::http::timings::{add_progress, metrics, timings};
use checkpoint::Tokenizer;
use proto::v1;
use router::front::frontend::Frontend;
use router::front::generation::{Generation, GenerationEvent, Prompt, has_content};
use router::front::progress::PromptProgress;
use router::replicas::models::text::ModelText;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use types::PrefixReuse;

/// How one endpoint writes an answer. All values are members of a choice.
pub trait AnswerFormat: Send + Unpin + 'static {
    const ID_PREFIX: &'static str;
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;
    /// The service tier, for endpoints whose answers have one. There is only one tier.
    const SERVICE_TIER: Option<&'static str>;
    /// Whether each choice carries `prompt_token_ids`, because it may have its own prompt, or the answer carries them
    /// once.
    const PROMPT_IN_CHOICE: bool;
    /// Whether the last piece of a choice comes in the chunk with its finish reason.
    const TEXT_IN_CLOSING_CHUNK: bool;

    /// Returns the member that begins a choice's stream, if there is one.
    fn opening_member(&self, choice: u32, options: &RequestOptions) -> Option<(&'static str, Value)>;
    /// Returns the member that carries a piece of a choice; None at the end. Pieces come in order, also those that the
    /// client had before it resumed.
    fn delta_member(&mut self, choice: u32, delta: Option<&v1::Delta>) -> (&'static str, Value);
    /// Returns the member that carries the whole answer.
    fn whole_member(&self, answer: &AnswerContent) -> (&'static str, Value);
    /// Returns the finish reason of an answer with calls.
    fn tool_calls_reason(&self) -> &'static str;

    fn finish_reason(&self, finished: &v1::Finished) -> &'static str {
        let has_called = finished.tool_calls > 0 && finished.reason() == v1::finished::Reason::Stop;
        if has_called { self.tool_calls_reason() } else { finish_reason(finished) }
    }

    fn logprobs(&mut self, names: TokenNames<'_>, choice: u32, logprobs: &[v1::Logprob]) -> Value;
    /// Returns the prompt before an answer, as a member and its logprobs, if the endpoint repeats it.
    fn echo(
        &mut self,
        names: TokenNames<'_>,
        choice: u32,
        prompt: &Prompt,
        scored: &[v1::Logprob],
    ) -> Option<PromptEcho>;
}

/// A prompt that the answer repeats.
pub struct PromptEcho {
    pub text: String,
    /// Null unless the client requested them.
    pub logprobs: Value,
}

/// Returns a seed as clients send it: a seed with the highest bit set was negative.
pub fn signed_seed(seed: u64) -> i64 {
    seed.cast_signed()
}

/// The members that every chunk of an answer repeats.
pub struct Envelope {
    front: Arc<Frontend>,
    text: Arc<ModelText>,
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    seed: u64,
    service_tier: Option<&'static str>,
    options: RequestOptions,
    watch: Stopwatch,
    /// Present if the client requested it.
    prompt_text: Option<String>,
    /// When the ranks began to compute the prompt.
    scheduled: Option<Instant>,
}

impl Envelope {
    /// `watch` runs since the request arrived.
    pub fn new<F: AnswerFormat>(
        front: Arc<Frontend>,
        generation: &Generation,
        options: RequestOptions,
        watch: Stopwatch,
    ) -> Envelope {
        let started = &generation.started;
        Envelope {
            front,
            text: generation.text.clone(),
            id: format!("{}{}", F::ID_PREFIX, started.id),
            created: generation.created,
            model: started.model.clone(),
            // Some clients of llama.cpp expect its first letter; OpenAI's clients expect none.
            fingerprint: format!("b_{}", generation.replica.digest),
            seed: started.seed,
            service_tier: F::SERVICE_TIER,
            options,
            watch,
            scheduled: None,
            prompt_text: generation.prompts.first().and_then(|prompt| prompt.text.clone()).filter(|_| options.verbose),
        }
    }

    pub fn front(&self) -> &Arc<Frontend> {
        &self.front
    }

    pub fn value(&self, object: &str, choices: Vec<Value>) -> Value {
        let mut value = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "seed": signed_seed(self.seed),
            "choices": choices,
        });
        if let Some(tier) = self.service_tier {
            value["service_tier"] = tier.into();
        }
        value
    }

    pub fn options(&self) -> &RequestOptions {
        &self.options
    }

    fn token_names(&self) -> TokenNames<'_> {
        TokenNames { tokenizer: &self.text.tokenizer, as_ids: self.options.tokens_as_ids }
    }

    /// Null unless the client requested them.
    pub fn logprobs_of<S: AnswerFormat>(&self, shape: &mut S, choice: u32, logprobs: &[v1::Logprob]) -> Value {
        if self.options.logprobs { shape.logprobs(self.token_names(), choice, logprobs) } else { Value::Null }
    }

    pub fn echo<S: AnswerFormat>(
        &self,
        shape: &mut S,
        choice: u32,
        prompt: &Prompt,
        scored: &[v1::Logprob],
    ) -> Option<PromptEcho> {
        let echo =
            if self.options.echo { shape.echo(self.token_names(), choice, prompt, scored)? } else { return None };
        // Logprobs that the client did not request were not computed.
        let logprobs = if self.options.logprobs { echo.logprobs } else { Value::Null };
        Some(PromptEcho { logprobs, ..echo })
    }

    /// Adds vLLM's `prompt_token_ids` and `prompt_logprobs`, null unless the client requested them.
    pub fn add_full_prompt(&self, to: &mut Value, prompt: &Prompt, scored: &[v1::Logprob]) {
        (to["prompt_token_ids"], to["prompt_logprobs"]) = (Value::Null, Value::Null);
        self.add_prompt(to, prompt, scored);
    }

    pub fn add_prompt(&self, to: &mut Value, prompt: &Prompt, scored: &[v1::Logprob]) {
        if self.options.token_ids {
            to["prompt_token_ids"] = prompt.ids.as_slice().into();
        }
        if self.options.prompt_logprobs {
            to["prompt_logprobs"] = prompt_logprobs(&self.text.tokenizer, scored);
        }
    }

    pub fn record_event(&mut self, event: &GenerationEvent, generation: &Generation) {
        self.scheduled = generation.scheduled;
        if matches!(event, GenerationEvent::Delta(_)) {
            self.watch.mark_first_token();
        }
    }

    /// Adds the parts that belong to the end of an answer and not to its text: the times, and the prompt's text.
    pub fn add_extras(&self, to: &mut Value, usage: &UsageSum) {
        if self.options.timings {
            to["timings"] = timings(&self.watch, Some(&usage.counts()), usage.completion);
        }
        if let Some(prompt) = &self.prompt_text {
            to["__verbose"] = json!({ "prompt": prompt });
        }
    }

    /// Adds the progress of a prompt.
    pub fn add_progress(&mut self, to: &mut Value, progress: PromptProgress) {
        add_progress(to, &mut self.watch, progress, self.options.timings_in_each);
    }

    /// Adds the metrics of one answer, if the operator enabled them. Metrics of several answers would belong to none of
    /// them.
    pub fn add_metrics(&self, to: &mut Value, n_answers: usize, usage: &UsageSum) {
        if self.front.config.request_metrics && n_answers == 1 {
            let waited = self.scheduled.map_or(Duration::ZERO, |began| began - self.watch.arrived());
            to["metrics"] = metrics(&self.watch, waited, usage.completion);
        }
    }

    /// Adds the times so far, if each chunk includes them.
    pub fn add_timings(&self, to: &mut Value, n_sent: u32) {
        if self.options.timings_in_each {
            to["timings"] = timings(&self.watch, None, n_sent);
        }
    }

    /// Whether this client needs a chunk for the delta.
    pub fn needs_chunk(&self, delta: &v1::Delta) -> bool {
        let RequestOptions { logprobs, token_ids, is_prompt_only, .. } = self.options;
        let is_visible = has_content(delta)
            || (logprobs && !delta.logprobs.is_empty())
            || (token_ids && !delta.token_ids.is_empty());
        is_visible && !is_prompt_only
    }
}

/// Returns the prompt's logprobs by token, with null for the first, which has no prediction. Only tokens among the most
/// likely have a rank: the rank of others is not computed.
fn prompt_logprobs(tokenizer: &Tokenizer, scored: &[v1::Logprob]) -> Value {
    let one = |logprob: &v1::Logprob, rank: Option<usize>| {
        let text = token_text(tokenizer, logprob.token_id);
        match rank {
            Some(rank) => json!({ "logprob": logprob.logprob, "rank": rank, "decoded_token": text }),
            None => json!({ "logprob": logprob.logprob, "decoded_token": text }),
        }
    };
    let position = |scored: &v1::Logprob| {
        let mut tokens = Map::new();
        tokens.insert(scored.token_id.to_string(), one(scored, None));
        for (i, top) in scored.top.iter().enumerate() {
            tokens.insert(top.token_id.to_string(), one(top, Some(i + 1)));
        }
        Value::Object(tokens)
    };
    [Value::Null].into_iter().chain(scored.iter().map(position)).collect()
}

/// Returns what ended an answer, in vLLM's format: the stop string, or the token of `stop_token_ids`.
pub fn stop_reason(finished: &v1::Finished) -> Value {
    match finished.stop_token {
        Some(token) => token.into(),
        None if finished.stop.is_empty() => Value::Null,
        None => finished.stop.as_str().into(),
    }
}

pub fn choice_value(index: u32, member: (&'static str, Value), logprobs: Value, reason: Option<&str>) -> Value {
    let (name, value) = member;
    json!({ "index": index, name: value, "logprobs": logprobs, "finish_reason": reason })
}

/// Returns the finish reason without regard to the text, as in a certificate.
pub fn finish_reason(finished: &v1::Finished) -> &'static str {
    match finished.reason() {
        v1::finished::Reason::Length => "length",
        v1::finished::Reason::Stop | v1::finished::Reason::Unspecified => "stop",
    }
}

/// Returns how many tokens of the prompt came from the prefix cache, and why no more.
fn prompt_details(n_cached: u32, reuse: PrefixReuse) -> Value {
    let mut details = json!({ "cached_tokens": n_cached, "audio_tokens": 0 });
    add_reuse(&mut details, reuse);
    details
}

/// Adds why no more of a prompt was reused, if that is known, and how much of it came from disk, if anything did.
pub fn add_reuse(to: &mut Value, reuse: PrefixReuse) {
    if let Some(ended) = reuse.ended {
        to["reuse_ended"] = json!({ "reason": ended.name(), "position": reuse.position });
    }
    if reuse.fetched > 0 {
        to["cached_tokens_fetched"] = reuse.fetched.into();
    }
}

/// The usage of all choices together. The choices of one prompt share its tokens.
#[derive(Default)]
pub struct UsageSum {
    n_choices: u32,
    is_prompt_only: bool,
    prompt: u32,
    cached: u32,
    /// The reuse of the first prompt.
    reuse: Option<PrefixReuse>,
    completion: u32,
    reasoning: u32,
    accepted: u32,
    rejected: u32,
}

impl UsageSum {
    pub fn new(n_choices: u32, options: &RequestOptions) -> UsageSum {
        let is_prompt_only = options.is_prompt_only;
        UsageSum { n_choices, is_prompt_only, ..UsageSum::default() }
    }

    pub fn add(&mut self, slot: u32, finished: &v1::Finished) {
        let usage = finished.usage.unwrap_or_default();
        if slot.is_multiple_of(self.n_choices) {
            self.prompt += usage.prompt_tokens;
            self.cached += usage.cached_tokens;
            self.reuse.get_or_insert(usage.reuse());
        }
        if !self.is_prompt_only {
            self.completion += usage.completion_tokens;
            self.reasoning += usage.reasoning_tokens;
            self.accepted += usage.accepted_prediction_tokens;
            self.rejected += usage.rejected_prediction_tokens;
        }
    }

    fn counts(&self) -> v1::Usage {
        v1::Usage { prompt_tokens: self.prompt, cached_tokens: self.cached, ..v1::Usage::default() }
    }

    pub fn value(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": prompt_details(self.cached, self.reuse.unwrap_or_default()),
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "audio_tokens": 0,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            },
        })
    }
}

/// How tokens are written beside their logprobs.
#[derive(Clone, Copy)]
pub struct TokenNames<'a> {
    tokenizer: &'a Tokenizer,
    /// As `token_id:5`: this distinguishes tokens that are no text, too.
    as_ids: bool,
}

impl<'a> TokenNames<'a> {
    pub fn new(tokenizer: &'a Tokenizer, as_ids: bool) -> TokenNames<'a> {
        TokenNames { tokenizer, as_ids }
    }

    pub fn texts(tokenizer: &'a Tokenizer) -> TokenNames<'a> {
        TokenNames { tokenizer, as_ids: false }
    }

    pub fn name_of(self, token: u32) -> String {
        if self.as_ids { format!("token_id:{token}") } else { token_text(self.tokenizer, token) }
    }
}

/// Returns tokens with their logprobs, each with its most likely alternatives.
pub fn token_logprob_values(names: TokenNames<'_>, logprobs: &[v1::Logprob]) -> Vec<Value> {
    let one = |logprob: &v1::Logprob| {
        let bytes = names.tokenizer.token_bytes(logprob.token_id);
        json!({ "token": names.name_of(logprob.token_id), "logprob": logprob.logprob, "bytes": bytes })
    };
    let both = |logprob: &v1::Logprob| {
        let mut content = one(logprob);
        content["top_logprobs"] = logprob.top.iter().map(one).collect();
        content
    };
    logprobs.iter().map(both).collect()
}

/// Returns a token's own text: partial characters become replacement characters. The token's bytes give the exact part.
pub fn token_text(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned()
}
