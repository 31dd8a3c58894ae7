//! `/v1/completions`.

use crate::config::RouterLimits;
use crate::faces::http::answer::answer;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::{Wishes, token_ids, wrong};
use crate::faces::http::format::{AnswerFormat, Echo, token_text};
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, counted, read};
use crate::faces::http::said::SaidAnswer;
use crate::faces::http::structure::structure;
use crate::front::ask::{Ask, Purpose};
use crate::front::frontend::Frontend;
use crate::front::generation::Prompt;
use crate::front::recorder::{Caller, Face, Recorder};
use crate::refusal::Refusal;
use axum::extract::{Request, State};
use axum::response::Response;
use checkpoint::Tokenizer;
use proto::v1;
use proto::v1::Sampling;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// How many tokens an answer has at most that says no `max_tokens`, as OpenAI has it.
pub const TOKENS_MAX: u32 = 16;

pub async fn completions(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let read = read(&front, request).await;
    let page = counted(&mut recorder, read)?;
    let limits = &front.config.limits;
    let (ask, wishes) = counted(&mut recorder, ask(page, limits).map_err(HttpError::from))?;
    let n_choices = ask.n_choices.min(limits.choices_max) as usize;
    let offsets = vec![0; ask.prompts.len().min(limits.prompts_max) * n_choices];
    answer(front, ask, wishes, recorder, Completion { offsets }).await
}

fn ask(mut page: Page, limits: &RouterLimits) -> Result<(Ask, Wishes), Refusal> {
    let fields = &mut page.fields;
    fields.check(Endpoint::Completions)?;
    let mut sampling = fields.sampling()?;
    sampling.logprobs = fields.unsigned("logprobs")?;
    sampling.max_tokens.get_or_insert(TOKENS_MAX);
    let structure = structure(fields)?;
    let mut wishes = fields.wishes(&sampling)?;
    wishes.structure_field = structure.as_ref().map(|said| said.field);
    sampling.structure = structure.map(|said| said.structure);
    wishes.echo = fields.boolean("echo")?.unwrap_or(false);
    if wishes.echo {
        only_prompt(&mut sampling, &mut wishes);
    }
    let prompt = fields.take("prompt").ok_or_else(|| Refusal::invalid("prompt", "is missing"))?;
    let ask = Ask {
        model: fields.string("model")?.unwrap_or_default(),
        prompts: inputs("prompt", prompt)?,
        n_choices: fields.n_choices()?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        echo: wishes.echo,
        ..Ask::default()
    };
    wishes.streaming = fields.stream(&sampling)?;
    sampling.prompt_logprobs = sampling.prompt_logprobs.max(echoed(&sampling, &wishes));
    let ask = Ask { purpose: Purpose::Generate(Box::new(sampling)), ..ask };
    let ask = page.finished(ask, wishes.streaming, limits)?;
    match wishes.nothing_new && ask.certificate {
        true => Err(Refusal::invalid("certificate", "is of an answer, and `max_tokens` is 0")),
        false => Ok((ask, wishes)),
    }
}

/// With an echo, a client may ask for no new token at all.
fn only_prompt(sampling: &mut Sampling, wishes: &mut Wishes) {
    if sampling.max_tokens == Some(0) {
        wishes.nothing_new = true;
        sampling.max_tokens = Some(1);
    }
}

/// The logprobs of an echo are the prompt's.
fn echoed(sampling: &Sampling, wishes: &Wishes) -> Option<u32> {
    sampling.logprobs.filter(|_| wishes.echo)
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
        other => Err(wrong(field, "text, token ids, or a list of one of these", &other)),
    }
}

struct Completion {
    /// For each choice, where the text of its next token begins, in characters.
    offsets: Vec<usize>,
}

impl AnswerFormat for Completion {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const SERVICE_TIER: Option<&'static str> = None;
    const PROMPT_IN_CHOICE: bool = true;

    fn opening(&self) -> Option<(&'static str, Value)> {
        None
    }

    fn piece(&self, delta: Option<&v1::Delta>) -> (&'static str, Value) {
        ("text", delta.map_or("", |delta| &delta.text).into())
    }

    fn whole(&self, answer: &SaidAnswer) -> (&'static str, Value) {
        ("text", answer.text.as_str().into())
    }

    /// A text has no calls.
    fn called(&self) -> &'static str {
        "stop"
    }

    fn logprobs(&mut self, tokenizer: &Tokenizer, choice: u32, logprobs: &[v1::Logprob]) -> Value {
        let mut table = LogprobLists::default();
        let offset = &mut self.offsets[choice as usize];
        logprobs.iter().for_each(|logprob| table.add(tokenizer, offset, logprob.token_id, Some(logprob)));
        table.value()
    }

    fn echo(&mut self, tokenizer: &Tokenizer, choice: u32, prompt: &Prompt, scored: &[v1::Logprob]) -> Option<Echo> {
        let mut table = LogprobLists::default();
        let offset = &mut self.offsets[choice as usize];
        // Nothing predicts the first token.
        let scored = [None].into_iter().chain(scored.iter().map(Some));
        prompt.ids.iter().zip(scored).for_each(|(token, scored)| table.add(tokenizer, offset, *token, scored));
        let text = prompt.text.clone().unwrap_or_default();
        *offset = text.chars().count();
        Some(Echo { text, logprobs: table.value() })
    }
}

/// Four parallel lists, as in OpenAI's API.
#[derive(Default)]
struct LogprobLists {
    tokens: Vec<String>,
    offsets: Vec<usize>,
    logprobs: Vec<Option<f32>>,
    top: Vec<Value>,
}

impl LogprobLists {
    fn add(&mut self, tokenizer: &Tokenizer, offset: &mut usize, token: u32, logprob: Option<&v1::Logprob>) {
        let text = token_text(tokenizer, token);
        self.offsets.push(*offset);
        *offset += text.chars().count();
        self.tokens.push(text);
        self.logprobs.push(logprob.map(|logprob| logprob.logprob));
        // The token itself is listed too, likely or not.
        let both = |logprob: &v1::Logprob| {
            let both = logprob.top.iter().chain([logprob]);
            let named = both.map(|top| (token_text(tokenizer, top.token_id), top.logprob.into()));
            Value::Object(named.collect::<Map<String, Value>>())
        };
        self.top.push(logprob.map_or(Value::Null, both));
    }

    fn value(self) -> Value {
        let LogprobLists { tokens, offsets, logprobs, top } = self;
        json!({ "text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": top })
    }
}
