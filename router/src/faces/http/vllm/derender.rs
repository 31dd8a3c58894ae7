//! `/v1/chat/completions/derender` and `/v1/completions/derender`: the output of `/inference/v1/generate` in the format
//! of OpenAI's pages. Sends nothing to a replica. Supports whole answers only: the server keeps no state of a stream
//! that a client has read.

use crate::faces::http::chat::ChatFormat;
use crate::faces::http::completions::LogprobLists;
use crate::faces::http::conversation::conversation;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::{Fields, token_ids, wrong};
use crate::faces::http::format::{AnswerFormat, TokenNames, choice_value, with_likely};
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, read};
use crate::faces::http::said::SaidAnswer;
use crate::faces::http::single::objects;
use crate::front::derender::Derendered;
use crate::front::frontend::{Frontend, unix_seconds};
use crate::refusal::Refusal;
use crate::replicas::models::table::VersionBy;
use crate::replicas::models::text::ModelText;
use axum::Json;
use axum::extract::{Request, State};
use proto::v1;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use types::Tokens;

/// The most answers of one request.
const ANSWERS_MAX: usize = 1024;
/// The member with the measurements of drafts.
const DRAFTS: &str = "speculative_decoding";
/// The field with the original request, for each page.
const CHAT_REQUEST: &str = "chat_request";
const COMPLETION_REQUEST: &str = "completion_request";

pub async fn chat(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let page = read(&front, request).await?;
    let _visit = front.visit(page.tenant)?;
    let (mut served, mut fields) = Served::of(&front, page)?;
    let asked = fields.object(CHAT_REQUEST)?;
    let generated = fields.object("generate_response")?;
    let generated = generated.ok_or_else(|| Refusal::invalid("generate_response", "is missing"))?;
    let prompt_ids = served.prompt_ids(fields.take("prompt_token_ids"))?;
    let n_prompt = fields.unsigned("prompt_tokens")?.unwrap_or(prompt_ids.map_or(0, |ids| ids.len() as u32));
    let Drawn { id, answers, mut rest } = served.drawn(generated)?;
    let (chat, tokens_as_ids) = served.chat(asked)?;
    let format = ChatFormat::newer();
    let ids = answers.iter().map(|answer| answer.ids.clone()).collect();
    let read = front.derendered(&served.text, chat, ids, unix_seconds()).await?;
    let usage = usage(n_prompt, &answers);
    let names = TokenNames::new(&served.text.tokenizer, tokens_as_ids);
    let choice = |(answer, Derendered { said, n_calls }): (Answer, Derendered)| {
        let mut whole = SaidAnswer::default();
        whole.add(&said);
        whole.calls.truncate(n_calls as usize);
        let told = |likely: &Vec<v1::Logprob>| json!({ "content": with_likely(names, likely) });
        let logprobs = answer.logprobs.as_ref().map(told).unwrap_or_default();
        let has_called = n_calls > 0 && answer.reason.as_deref() == Some("stop");
        let reason = if has_called { Some(format.called()) } else { answer.reason.as_deref() };
        served.finished(&answer, choice_value(answer.index, format.whole(&whole), logprobs, reason))
    };
    let choices: Vec<Value> = answers.into_iter().zip(read).map(choice).collect();
    let mut told = served.envelope(id, "chat.completion", choices, usage);
    if let (true, Some(prompt)) = (served.token_ids, rest.remove("prompt_token_ids")) {
        told["prompt_token_ids"] = prompt;
    }
    for name in ["prompt_logprobs", "kv_transfer_params"] {
        told[name] = rest.remove(name).unwrap_or_default();
    }
    told["metrics"] = rest.remove("metrics").map_or(Value::Null, metrics);
    Ok(Json(told))
}

pub async fn completions(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let page = read(&front, request).await?;
    let _visit = front.visit(page.tenant)?;
    let (mut served, mut fields) = Served::of(&front, page)?;
    let tokens_as_ids = match fields.object(COMPLETION_REQUEST)? {
        Some(mut asked) => served.wishes(&mut asked, Endpoint::Completions)?,
        None => false,
    };
    let all = objects("generate_responses", fields.take("generate_responses"))?;
    if all.len() > ANSWERS_MAX {
        let why = format!("the generate_responses count must be at most {ANSWERS_MAX}, and is {}", all.len());
        return Err(Refusal::invalid("generate_responses", why).into());
    }
    let n_prompts = served.n_prompts(&mut fields, all.len())?;
    let (mut id, mut answers, mut params) = (String::new(), Vec::new(), Value::Null);
    for generated in all {
        let mut drawn = served.drawn(generated)?;
        if id.is_empty() {
            id = drawn.id;
        }
        params = drawn.rest.remove("kv_transfer_params").filter(|value| !value.is_null()).unwrap_or(params);
        answers.extend(drawn.answers);
    }
    let ids = answers.iter().map(|answer| answer.ids.clone()).collect();
    let read = front.derendered(&served.text, None, ids, unix_seconds()).await?;
    let usage = usage(n_prompts, &answers);
    let names = TokenNames::new(&served.text.tokenizer, tokens_as_ids);
    let choice = |(i, (answer, read)): (u32, (Answer, Derendered))| {
        let lists = |likely: &Vec<v1::Logprob>| LogprobLists::of(names, likely).value();
        let logprobs = answer.logprobs.as_ref().map(lists).unwrap_or_default();
        let text = ("text", read.said.text.into());
        served.finished(&answer, choice_value(i, text, logprobs, answer.reason.as_deref()))
    };
    let choices: Vec<Value> = (0..).zip(answers.into_iter().zip(read)).map(choice).collect();
    let mut told = served.envelope(id, "text_completion", choices, usage);
    told["kv_transfer_params"] = params;
    Ok(Json(told))
}

/// Returns the metrics of an answer, with null for missing values.
fn metrics(mut told: Value) -> Value {
    const TIMES: [&str; 5] =
        ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"];
    const OF_DRAFTS: [&str; 2] = ["per_step_accepted", "per_step_drafted"];
    if let Some(all) = told.as_object_mut() {
        for name in TIMES.into_iter().chain([DRAFTS]) {
            all.entry(name).or_insert(Value::Null);
        }
        if let Some(Value::Object(drafts)) = all.get_mut(DRAFTS) {
            for name in OF_DRAFTS {
                drafts.entry(name).or_insert(Value::Null);
            }
        }
    }
    told
}

fn usage(n_prompt: u32, answers: &[Answer]) -> Value {
    let n_said: usize = answers.iter().map(|answer| answer.ids.len()).sum();
    let n_all = n_prompt as usize + n_said;
    json!({ "prompt_tokens": n_prompt, "completion_tokens": n_said, "total_tokens": n_all })
}

/// The model that reads the tokens, and the parts that the client requests in addition.
struct Served {
    name: String,
    text: Arc<ModelText>,
    context: u32,
    logprobs_max: u32,
    token_ids: bool,
}

/// A replica's answer.
struct Drawn {
    id: String,
    answers: Vec<Answer>,
    /// Members that are passed on unchanged.
    rest: Map<String, Value>,
}

struct Answer {
    index: u32,
    ids: Tokens,
    reason: Option<String>,
    stop_reason: Value,
    logprobs: Option<Vec<v1::Logprob>>,
}

impl Served {
    fn of(front: &Frontend, page: Page) -> Result<(Served, Fields), Refusal> {
        let mut fields = page.fields;
        if fields.boolean("stream")?.unwrap_or(false) {
            return Err(Refusal::invalid("stream", "is not supported here: pieces of an answer are not read alone"));
        }
        let model = front.model(&fields.string("model")?.unwrap_or_default(), VersionBy::Weight)?;
        let (context, logprobs_max) = (model.replica.context, front.config.limits.logprobs_max);
        Ok((Served { name: model.name, text: model.text, context, logprobs_max, token_ids: false }, fields))
    }

    /// Returns the chat of the original request. A model that writes thoughts and calls needs it to separate them.
    fn chat(&mut self, asked: Option<Fields>) -> Result<(Option<v1::Chat>, bool), Refusal> {
        let tells_more = self.text.dialect.has_thoughts()
            || self.text.template.as_ref().is_some_and(|template| template.uses_tools());
        match asked {
            None if tells_more => Err(Refusal::invalid(CHAT_REQUEST, "is missing: this model's answers have parts")),
            None => Ok((None, false)),
            Some(mut asked) => {
                let tokens_as_ids = self.wishes(&mut asked, Endpoint::Chat)?;
                Ok((Some(conversation(&mut asked)?), tokens_as_ids))
            }
        }
    }

    /// Reads the parts that a client requests in addition to the text. Returns whether tokens are written as ids.
    fn wishes(&mut self, asked: &mut Fields, page: Endpoint) -> Result<bool, Refusal> {
        asked.check(page)?;
        self.token_ids = asked.boolean("return_token_ids")?.unwrap_or(false);
        Ok(asked.boolean("return_tokens_as_token_ids")?.unwrap_or(false))
    }

    fn prompt_ids(&self, said: Option<Value>) -> Result<Option<Tokens>, Refusal> {
        const FIELD: &str = "prompt_token_ids";
        let Some(value) = said else { return Ok(None) };
        let ids = token_ids(FIELD, value)?;
        self.check_length(FIELD, ids.len())?;
        self.text.check_ids(FIELD, &ids)?;
        Ok(Some(ids))
    }

    /// Returns the number of tokens of all prompts, which the client counts or sends: one entry for each answer.
    fn n_prompts(&self, fields: &mut Fields, n: usize) -> Result<u32, Refusal> {
        let counts = fields.token_ids("prompt_tokens")?;
        let prompts = match fields.take("prompt_token_ids") {
            None => None,
            Some(Value::Array(all)) => {
                let ids = all.into_iter().map(|one| self.prompt_ids(Some(one)).map(Option::unwrap_or_default));
                Some(ids.collect::<Result<Vec<Tokens>, Refusal>>()?)
            }
            Some(other) => return Err(wrong("prompt_token_ids", "a list of lists of token ids", &other)),
        };
        let lengths =
            [("prompt_tokens", counts.as_ref().map(Vec::len)), ("prompt_token_ids", prompts.as_ref().map(Vec::len))];
        if let Some((name, Some(got))) = lengths.into_iter().find(|(_, got)| got.is_some_and(|got| got != n)) {
            return Err(Refusal::invalid(name, format!("has {got} entries for {n} answers")));
        }
        let counted = counts.map(|counts| counts.iter().fold(0, |sum: u32, count| sum.saturating_add(*count)));
        let sent = prompts.map(|prompts| prompts.iter().map(|ids| ids.len() as u32).sum());
        Ok(counted.or(sent).unwrap_or(0))
    }

    fn check_length(&self, field: &'static str, n: usize) -> Result<(), Refusal> {
        match n > self.context as usize {
            true => Err(Refusal::invalid(field, format!("its length {n} exceeds max_model_len {}", self.context))),
            false => Ok(()),
        }
    }

    fn drawn(&self, mut generated: Fields) -> Result<Drawn, Refusal> {
        let id = generated.string("request_id")?.unwrap_or_default();
        let choices = objects("choices", generated.take("choices"))?;
        if choices.len() > ANSWERS_MAX {
            let why = format!("the choices count must be at most {ANSWERS_MAX}, and is {}", choices.len());
            return Err(Refusal::invalid("choices", why));
        }
        let answers = choices.into_iter().map(|choice| self.answer(choice)).collect::<Result<_, _>>()?;
        Ok(Drawn { id, answers, rest: generated.rest() })
    }

    fn answer(&self, mut choice: Fields) -> Result<Answer, Refusal> {
        // `token_ids` alone would be the prompt on OpenAI's pages.
        const FIELD: &str = "choices.token_ids";
        let ids = choice.take("token_ids").map(|said| token_ids(FIELD, said)).transpose()?;
        let ids = ids.filter(|ids| !ids.is_empty()).ok_or_else(|| Refusal::invalid(FIELD, "there are none"))?;
        self.check_length(FIELD, ids.len())?;
        self.text.check_ids(FIELD, &ids)?;
        Ok(Answer {
            index: choice.unsigned("index")?.unwrap_or(0),
            ids,
            reason: choice.string("finish_reason")?,
            stop_reason: choice.take("stop_reason").unwrap_or_default(),
            logprobs: choice.object("logprobs")?.map(|said| self.logprobs(said)).transpose()?,
        })
    }

    fn logprobs(&self, mut said: Fields) -> Result<Vec<v1::Logprob>, Refusal> {
        const FIELD: &str = "logprobs";
        let list = match said.take("content") {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(wrong(FIELD, "a list as `content`", &other)),
        };
        if list.len() > self.context as usize {
            let why = format!("the logprobs.content length {} exceeds max_model_len {}", list.len(), self.context);
            return Err(Refusal::invalid(FIELD, why));
        }
        list.iter().map(|one| self.logprob(one)).collect()
    }

    fn logprob(&self, said: &Value) -> Result<v1::Logprob, Refusal> {
        let likely = said["top_logprobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        if likely.len() > self.logprobs_max as usize {
            let why = format!("a top_logprobs count of {} exceeds max_logprobs {}", likely.len(), self.logprobs_max);
            return Err(Refusal::invalid("logprobs", why));
        }
        let wrong = || Refusal::invalid("logprobs", "each must have a token_id and a logprob");
        let one = |value: &Value| -> Result<v1::Logprob, Refusal> {
            let id = value["token_id"].as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)?;
            let logprob = value["logprob"].as_f64().ok_or_else(wrong)? as f32;
            self.text.check_ids("logprobs", &[id])?;
            Ok(v1::Logprob { token_id: id, logprob, top: Vec::new() })
        };
        Ok(v1::Logprob { top: likely.iter().map(one).collect::<Result<_, _>>()?, ..one(said)? })
    }

    fn finished(&self, answer: &Answer, mut choice: Value) -> Value {
        choice["stop_reason"] = answer.stop_reason.clone();
        if self.token_ids {
            choice["token_ids"] = answer.ids.as_slice().into();
        }
        choice
    }

    fn envelope(&self, id: String, object: &str, choices: Vec<Value>, usage: Value) -> Value {
        json!({
            "id": id,
            "object": object,
            "created": unix_seconds(),
            "model": self.name,
            "choices": choices,
            "usage": usage,
        })
    }
}
