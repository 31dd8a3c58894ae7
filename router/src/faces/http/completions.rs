//! `/v1/completions`. Has no knowledge of replicas.

use crate::config::RouterLimits;
use crate::faces::http::answer::answer;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::{Fields, Wishes, token_ids, wrong};
use crate::faces::http::format::{AnswerFormat, Echo, TokenNames};
use crate::faces::http::infill::{self, Infill};
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, counted, read};
use crate::faces::http::prediction::prediction;
use crate::faces::http::said::SaidAnswer;
use crate::faces::http::structure::structure;
use crate::front::ask::{Ask, CutSide, Purpose};
use crate::front::frontend::Frontend;
use crate::front::generation::Prompt;
use crate::front::recorder::{Caller, Face, Recorder};
use crate::refusal::Refusal;
use axum::extract::{Request, State};
use axum::response::Response;
use proto::v1;
use proto::v1::Sampling;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// OpenAI's default for a request without `max_tokens`.
pub const TOKENS_MAX: u32 = 16;

pub async fn completions(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let read = read(&front, request).await;
    let page = counted(&mut recorder, read)?;
    answer_page(front, page, recorder).await
}

pub async fn answer_page(front: Arc<Frontend>, page: Page, mut recorder: Recorder) -> Result<Response, HttpError> {
    let limits = &front.config.limits;
    let asked = asked(&front, page).await.map_err(HttpError::from);
    let (ask, wishes) = counted(&mut recorder, asked)?;
    let n_choices = ask.n_choices.min(limits.choices_max) as usize;
    let offsets = vec![0; ask.prompts.len().min(limits.prompts_max) * n_choices];
    answer(front, ask, wishes, recorder, Completion { offsets }).await
}

async fn asked(front: &Frontend, mut page: Page) -> Result<(Ask, Wishes), Refusal> {
    page.fields.check(Endpoint::Completions)?;
    let model = page.fields.string("model")?.unwrap_or_default();
    let prompts = prompts(front, &model, &mut page.fields).await?;
    ask(page, model, prompts, &front.config.limits)
}

/// Reads the prompts. With a `suffix` there is one, which requests the text between.
async fn prompts(front: &Frontend, model: &str, fields: &mut Fields) -> Result<Vec<Input>, Refusal> {
    let prompt = fields.take("prompt").ok_or_else(|| Refusal::invalid("prompt", "is missing"))?;
    let after = fields.string("suffix")?.unwrap_or_default();
    if after.is_empty() {
        return inputs("prompt", prompt);
    }
    let Value::String(before) = prompt else { return Err(wrong("prompt", "one text beside a `suffix`", &prompt)) };
    let asked = Infill { before, after, ..Infill::default() };
    Ok(vec![infill::prompt(front, &front.text(model)?, asked, "suffix").await?])
}

fn ask(mut page: Page, model: String, prompts: Vec<Input>, limits: &RouterLimits) -> Result<(Ask, Wishes), Refusal> {
    let fields = &mut page.fields;
    let mut sampling = fields.sampling()?;
    sampling.logprobs = fields.unsigned("logprobs")?;
    sampling.prediction = prediction(fields)?;
    sampling.max_tokens.get_or_insert(TOKENS_MAX);
    let structure = structure(fields)?;
    let mut wishes = fields.wishes(&sampling)?;
    wishes.structure_field = structure.as_ref().map(|said| said.field);
    sampling.structure = structure.map(|said| said.structure);
    wishes.echo = fields.boolean("echo")?.unwrap_or(false);
    if wishes.echo {
        only_prompt(&mut sampling, &mut wishes);
    }
    let ask = Ask {
        model,
        prompts,
        n_choices: fields.n_choices()?,
        truncation: fields.truncation(CutSide::Left)?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        echo: wishes.echo,
        ..Ask::default()
    };
    wishes.streaming = fields.stream(&sampling)?;
    sampling.prompt_logprobs = sampling.prompt_logprobs.max(echoed(&sampling, &wishes));
    let tells_progress = fields.tells_progress(wishes.streaming.is_some())?;
    let ask = Ask { purpose: Purpose::Generate(Box::new(sampling)), tells_progress, ..ask };
    let ask = page.finished(ask, wishes.streaming, limits)?;
    match wishes.nothing_new && ask.certificate {
        true => Err(Refusal::invalid("certificate", "is of an answer, and `max_tokens` is 0")),
        false => Ok((ask, wishes)),
    }
}

/// With an echo, a client may request zero new tokens.
fn only_prompt(sampling: &mut Sampling, wishes: &mut Wishes) {
    if sampling.max_tokens == Some(0) {
        wishes.nothing_new = true;
        sampling.max_tokens = Some(1);
    }
}

/// Returns how many logprobs the prompt needs: those of an echo are the prompt's.
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
    /// Where the text of each choice's next token begins, in characters.
    offsets: Vec<usize>,
}

impl AnswerFormat for Completion {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const SERVICE_TIER: Option<&'static str> = None;
    const PROMPT_IN_CHOICE: bool = true;

    fn opening(&self, _: u32, _: &Wishes) -> Option<(&'static str, Value)> {
        None
    }

    fn piece(&self, delta: Option<&v1::Delta>) -> (&'static str, Value) {
        ("text", delta.map_or("", |delta| &delta.text).into())
    }

    fn whole(&self, answer: &SaidAnswer) -> (&'static str, Value) {
        ("text", answer.text.as_str().into())
    }

    /// Plain text has no calls.
    fn called(&self) -> &'static str {
        "stop"
    }

    fn logprobs(&mut self, names: TokenNames<'_>, choice: u32, logprobs: &[v1::Logprob]) -> Value {
        let mut table = LogprobLists::default();
        let offset = &mut self.offsets[choice as usize];
        logprobs.iter().for_each(|logprob| table.add(names, offset, logprob.token_id, Some(logprob)));
        table.value()
    }

    fn echo(&mut self, names: TokenNames<'_>, choice: u32, prompt: &Prompt, scored: &[v1::Logprob]) -> Option<Echo> {
        let mut table = LogprobLists::default();
        let offset = &mut self.offsets[choice as usize];
        // The first token has no prediction, and so no logprob.
        let scored = [None].into_iter().chain(scored.iter().map(Some));
        prompt.ids.iter().zip(scored).for_each(|(token, scored)| table.add(names, offset, *token, scored));
        let text = prompt.text.clone().unwrap_or_default();
        *offset = text.chars().count();
        Some(Echo { text, logprobs: table.value() })
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
        let text = names.of(token);
        self.offsets.push(*offset);
        *offset += text.chars().count();
        self.tokens.push(text);
        self.logprobs.push(logprob.map(|logprob| logprob.logprob));
        // The sampled token is always listed, even if it is not among the most likely, and first: a later token with
        // the same text does not replace it.
        let both = |logprob: &v1::Logprob| {
            let mut named = Map::new();
            for top in [logprob].into_iter().chain(&logprob.top) {
                named.entry(names.of(top.token_id)).or_insert_with(|| top.logprob.into());
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
