//! `/v1/completions`. Has no knowledge of replicas.

use crate::http::answer::answer;
use crate::http::answer_content::AnswerContent;
use crate::http::error::HttpError;
use crate::http::fields::{Fields, RequestOptions, token_ids, wrong_type};
use crate::http::format::{AnswerFormat, PromptEcho, TokenNames};
use crate::http::infill::{self, Infill};
use crate::http::known::Endpoint;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::prediction::prediction;
use crate::http::structure::structure;
use axum::extract::State;
use axum::response::Response;
use proto::v1;
use proto::v1::Sampling;
use proto::v1::generate_request::Input;
use router::config::RouterLimits;
use router::front::frontend::Frontend;
use router::front::generation::Prompt;
use router::front::parsed_request::{ParsedRequest, Purpose};
use router::front::recorder::Recorder;
use router::refusal::Refusal;
use router::replicas::models::truncation::CutSide;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// OpenAI's default for a request without `max_tokens`.
pub const TOKENS_MAX: u32 = 16;

pub async fn completions(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    answer_page(front, request.page, request.recorder).await
}

pub async fn answer_page(
    front: Arc<Frontend>,
    page: ApiRequest,
    mut recorder: Recorder,
) -> Result<Response, HttpError> {
    let limits = &front.config.limits;
    let result = parse_request(&front, page).await.map_err(HttpError::from);
    let (parsed, options) = record_refusal(&mut recorder, result)?;
    let n_choices = parsed.n_choices.min(limits.choices_max) as usize;
    let offsets = vec![0; parsed.prompts.len().min(limits.prompts_max) * n_choices];
    answer(front, parsed, options, recorder, CompletionFormat { offsets }).await
}

async fn parse_request(front: &Frontend, mut page: ApiRequest) -> Result<(ParsedRequest, RequestOptions), Refusal> {
    page.fields.check(Endpoint::Completions)?;
    let model = page.fields.string("model")?.unwrap_or_default();
    let prompts = prompts(front, &model, &mut page.fields).await?;
    build_request(page, model, prompts, &front.config.limits)
}

/// Reads the prompts. With a `suffix` there is one, which requests the text between.
async fn prompts(front: &Frontend, model: &str, fields: &mut Fields) -> Result<Vec<Input>, Refusal> {
    let prompt = fields.take("prompt").ok_or_else(|| Refusal::invalid("prompt", "is missing"))?;
    let after = fields.string("suffix")?.unwrap_or_default();
    if after.is_empty() {
        return inputs("prompt", prompt);
    }
    let Value::String(before) = prompt else { return Err(wrong_type("prompt", "one text with `suffix`", &prompt)) };
    let parts = Infill { before, after, ..Infill::default() };
    Ok(vec![infill::prompt(front, &front.text(model)?, parts, "suffix").await?])
}

fn build_request(
    mut page: ApiRequest,
    model: String,
    prompts: Vec<Input>,
    limits: &RouterLimits,
) -> Result<(ParsedRequest, RequestOptions), Refusal> {
    let fields = &mut page.fields;
    let mut sampling = fields.sampling()?;
    sampling.logprobs = fields.unsigned("logprobs")?;
    sampling.prediction = prediction(fields)?;
    sampling.max_tokens.get_or_insert(TOKENS_MAX);
    let structure = structure(fields)?;
    let mut options = fields.request_options(&sampling)?;
    options.structure_field = structure.as_ref().map(|requested| requested.field);
    sampling.structure = structure.map(|requested| requested.structure);
    options.echo = fields.boolean("echo")?.unwrap_or(false);
    if options.echo {
        set_prompt_only(&mut sampling, &mut options);
    }
    let parsed = ParsedRequest {
        model,
        prompts,
        n_choices: fields.n_choices()?,
        truncation: fields.truncation(CutSide::Left)?,
        adds_special: fields.boolean("add_special_tokens")?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        echo: options.echo,
        ..ParsedRequest::default()
    };
    options.streaming = fields.stream_options(&sampling)?;
    sampling.prompt_logprobs = sampling.prompt_logprobs.max(n_echo_logprobs(&sampling, &options));
    let needs_progress = fields.needs_progress(options.streaming.is_some())?;
    let parsed = ParsedRequest { purpose: Purpose::Generate(Box::new(sampling)), needs_progress, ..parsed };
    let parsed = page.complete_request(parsed, options.streaming, limits)?;
    match options.is_prompt_only && parsed.certificate {
        true => Err(Refusal::invalid("certificate", "needs an answer, but `max_tokens` is 0")),
        false => Ok((parsed, options)),
    }
}

/// With an echo, a client may request zero new tokens.
fn set_prompt_only(sampling: &mut Sampling, options: &mut RequestOptions) {
    if sampling.max_tokens == Some(0) {
        options.is_prompt_only = true;
        sampling.max_tokens = Some(1);
    }
}

/// Returns how many logprobs the prompt needs: those of an echo are the prompt's.
fn n_echo_logprobs(sampling: &Sampling, options: &RequestOptions) -> Option<u32> {
    sampling.logprobs.filter(|_| options.echo)
}

/// Reads text, token ids, or a list of these.
pub fn inputs(field: &'static str, prompt: Value) -> Result<Vec<Input>, Refusal> {
    match prompt {
        Value::Array(all) if matches!(all.first(), Some(Value::String(_) | Value::Array(_))) => {
            all.into_iter().map(|one| input(field, one)).collect()
        }
        one => Ok(vec![input(field, one)?]),
    }
}

fn input(field: &'static str, prompt: Value) -> Result<Input, Refusal> {
    match prompt {
        Value::String(text) => Ok(Input::Text(text)),
        ids @ Value::Array(_) => Ok(Input::TokenIds(v1::TokenIds { ids: token_ids(field, ids)? })),
        other => Err(wrong_type(field, "text, token ids, or a list of one of these", &other)),
    }
}

struct CompletionFormat {
    /// Where the text of each choice's next token begins, in characters.
    offsets: Vec<usize>,
}

impl AnswerFormat for CompletionFormat {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const SERVICE_TIER: Option<&'static str> = None;
    const PROMPT_IN_CHOICE: bool = true;
    const TEXT_IN_CLOSING_CHUNK: bool = true;

    fn opening_member(&self, _: u32, _: &RequestOptions) -> Option<(&'static str, Value)> {
        None
    }

    fn delta_member(&mut self, _: u32, delta: Option<&v1::Delta>) -> (&'static str, Value) {
        ("text", delta.map_or("", |delta| &delta.text).into())
    }

    fn whole_member(&self, answer: &AnswerContent) -> (&'static str, Value) {
        ("text", answer.text.as_str().into())
    }

    /// Plain text has no calls.
    fn tool_calls_reason(&self) -> &'static str {
        "stop"
    }

    fn logprobs(&mut self, names: TokenNames<'_>, choice: u32, logprobs: &[v1::Logprob]) -> Value {
        let mut table = LogprobLists::default();
        let offset = &mut self.offsets[choice as usize];
        logprobs.iter().for_each(|logprob| table.add(names, offset, logprob.token_id, Some(logprob)));
        table.value()
    }

    fn echo(
        &mut self,
        names: TokenNames<'_>,
        choice: u32,
        prompt: &Prompt,
        scored: &[v1::Logprob],
    ) -> Option<PromptEcho> {
        let mut table = LogprobLists::default();
        let offset = &mut self.offsets[choice as usize];
        // The first token has no prediction, and so no logprob.
        let scored = [None].into_iter().chain(scored.iter().map(Some));
        prompt.ids.iter().zip(scored).for_each(|(token, scored)| table.add(names, offset, *token, scored));
        let text = prompt.text.clone().unwrap_or_default();
        *offset = text.chars().count();
        Some(PromptEcho { text, logprobs: table.value() })
    }
}

/// Four parallel lists, as in OpenAI's API.
#[derive(Default)]
pub struct LogprobLists {
    tokens: Vec<String>,
    offsets: Vec<usize>,
    logprobs: Vec<Option<f32>>,
    top: Vec<Value>,
}

impl LogprobLists {
    /// Lists the logprobs of a text from its beginning.
    pub fn of(names: TokenNames<'_>, logprobs: &[v1::Logprob]) -> LogprobLists {
        let (mut lists, mut offset) = (LogprobLists::default(), 0);
        logprobs.iter().for_each(|logprob| lists.add(names, &mut offset, logprob.token_id, Some(logprob)));
        lists
    }

    fn add(&mut self, names: TokenNames<'_>, offset: &mut usize, token: u32, logprob: Option<&v1::Logprob>) {
        let text = names.name_of(token);
        self.offsets.push(*offset);
        *offset += text.chars().count();
        self.tokens.push(text);
        self.logprobs.push(logprob.map(|logprob| logprob.logprob));
        // The sampled token is always listed, even if it is not among the most likely, and first: a later token with
        // the same text does not replace it.
        let both = |logprob: &v1::Logprob| {
            let mut named = Map::new();
            for top in [logprob].into_iter().chain(&logprob.top) {
                named.entry(names.name_of(top.token_id)).or_insert_with(|| top.logprob.into());
            }
            Value::Object(named)
        };
        self.top.push(logprob.map_or(Value::Null, both));
    }

    pub fn value(self) -> Value {
        let LogprobLists { tokens, offsets, logprobs, top } = self;
        json!({ "text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": top })
    }
}
