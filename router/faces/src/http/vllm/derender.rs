//! `/v1/chat/completions/derender` and `/v1/completions/derender`: the output of `/inference/v1/generate` in the format
//! of OpenAI's pages. Sends nothing to a replica. Reads whole answers.

use crate::http::answer_content::AnswerContent;
use crate::http::chat::ChatAnswerFormat;
use crate::http::completions::LogprobLists;
use crate::http::conversation::conversation;
use crate::http::error::HttpError;
use crate::http::fields::{Fields, token_ids, wrong_type};
use crate::http::format::{AnswerFormat, TokenNames, choice_value, token_logprob_values};
use crate::http::known::Endpoint;
use crate::http::page::ApiRequest;
use crate::http::single::objects;
use crate::http::tools;
use axum::Json;
use axum::extract::State;
use proto::v1;
use router::front::derender::{DerenderedAnswer, DrawnPiece, derender};
use router::front::frontend::{Frontend, unix_seconds};
use router::refusal::Refusal;
use router::replicas::models::table::VersionSelector;
use router::replicas::models::text::ModelText;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use types::Tokens;

/// The most answers of one request.
pub(super) const ANSWERS_MAX: usize = 1024;
/// The member with the measurements of drafts.
const DRAFTS: &str = "speculative_decoding";
/// The field with the original request, for each page.
pub(super) const CHAT_REQUEST: &str = "chat_request";
pub(super) const COMPLETION_REQUEST: &str = "completion_request";
/// The tokens of a choice. `token_ids` alone would be the prompt on OpenAI's pages.
const CHOICE_IDS: &str = "choices.token_ids";

pub async fn chat(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let _visit = front.visit(page.tenant)?;
    let (mut context, mut fields) = DerenderContext::of(&front, page)?;
    let chat_request = fields.object(CHAT_REQUEST)?;
    let generated = fields.object("generate_response")?;
    let generated = generated.ok_or_else(|| Refusal::invalid("generate_response", "is missing"))?;
    let prompt_ids = context.prompt_ids(fields.take("prompt_token_ids"))?;
    let n_prompt = fields.unsigned("prompt_tokens")?.unwrap_or(prompt_ids.map_or(0, |ids| ids.len() as u32));
    let GeneratedAnswers { id, answers, mut rest } = context.read_answers(generated)?;
    let (chat, tokens_as_ids) = context.chat(chat_request)?;
    let format = ChatAnswerFormat::tools_format();
    let read = derender(&front.texts, &context.text, chat, whole_answers(&answers), unix_seconds()).await?;
    let usage = usage(n_prompt, &answers);
    let names = TokenNames::new(&context.text.tokenizer, tokens_as_ids);
    let choice = |(answer, DerenderedAnswer { delta, n_calls }): (GeneratedAnswer, DerenderedAnswer)| {
        let mut whole = AnswerContent::default();
        whole.add(&delta);
        whole.calls.truncate(n_calls as usize);
        let content = |likely: &Vec<v1::Logprob>| json!({ "content": token_logprob_values(names, likely) });
        let logprobs = answer.logprobs.as_ref().map(content).unwrap_or_default();
        let has_called = n_calls > 0 && answer.reason.as_deref() == Some("stop");
        let reason = if has_called { Some(format.tool_calls_reason()) } else { answer.reason.as_deref() };
        let (name, mut message) = format.whole_member(&whole);
        if whole.reasoning.is_empty() {
            // Clients of vLLM read this member without a check.
            message["reasoning"] = Value::Null;
        }
        context.finished_choice(&answer, choice_value(answer.index, (name, message), logprobs, reason))
    };
    let choices: Vec<Value> = answers.into_iter().zip(read).map(choice).collect();
    let mut reply = context.envelope(id, "chat.completion", choices, usage);
    if let (true, Some(prompt)) = (context.token_ids, rest.remove("prompt_token_ids")) {
        reply["prompt_token_ids"] = prompt;
    }
    for name in ["prompt_logprobs", "kv_transfer_params"] {
        reply[name] = rest.remove(name).unwrap_or_default();
    }
    reply["metrics"] = rest.remove("metrics").map_or(Value::Null, metrics);
    Ok(Json(reply))
}

pub async fn completions(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let _visit = front.visit(page.tenant)?;
    let (mut context, mut fields) = DerenderContext::of(&front, page)?;
    let tokens_as_ids = match fields.object(COMPLETION_REQUEST)? {
        Some(mut completion_request) => context.read_options(&mut completion_request, Endpoint::Completions)?,
        None => false,
    };
    let all = objects("generate_responses", fields.take("generate_responses"))?;
    if all.len() > ANSWERS_MAX {
        let why = format!("the generate_responses count must be at most {ANSWERS_MAX}, got {}", all.len());
        return Err(Refusal::invalid("generate_responses", why).into());
    }
    let n_prompts = context.n_prompts(&mut fields, all.len())?;
    let (mut id, mut answers, mut params) = (String::new(), Vec::new(), Value::Null);
    for generated in all {
        let mut response = context.read_answers(generated)?;
        if id.is_empty() {
            id = response.id;
        }
        params = response.rest.remove("kv_transfer_params").filter(|value| !value.is_null()).unwrap_or(params);
        answers.extend(response.answers);
    }
    let read = derender(&front.texts, &context.text, None, whole_answers(&answers), unix_seconds()).await?;
    let usage = usage(n_prompts, &answers);
    let names = TokenNames::new(&context.text.tokenizer, tokens_as_ids);
    let choice = |(i, (answer, read)): (u32, (GeneratedAnswer, DerenderedAnswer))| {
        let lists = |likely: &Vec<v1::Logprob>| LogprobLists::of(names, likely).value();
        let logprobs = answer.logprobs.as_ref().map(lists).unwrap_or_default();
        let text = ("text", read.delta.text.into());
        context.finished_choice(&answer, choice_value(i, text, logprobs, answer.reason.as_deref()))
    };
    let choices: Vec<Value> = (0..).zip(answers.into_iter().zip(read)).map(choice).collect();
    let mut reply = context.envelope(id, "text_completion", choices, usage);
    reply["kv_transfer_params"] = params;
    Ok(Json(reply))
}

fn whole_answers(answers: &[GeneratedAnswer]) -> Vec<DrawnPiece> {
    let whole = |(choice, answer): (u32, &GeneratedAnswer)| DrawnPiece {
        choice,
        before: Tokens::new(),
        ids: answer.ids.clone(),
        is_last: true,
    };
    (0..).zip(answers).map(whole).collect()
}

/// Returns the metrics of an answer, with null for missing values.
pub(super) fn metrics(mut values: Value) -> Value {
    const TIMES: [&str; 5] =
        ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"];
    const OF_DRAFTS: [&str; 2] = ["per_step_accepted", "per_step_drafted"];
    if let Some(all) = values.as_object_mut() {
        for name in TIMES.into_iter().chain([DRAFTS]) {
            all.entry(name).or_insert(Value::Null);
        }
        if let Some(Value::Object(drafts)) = all.get_mut(DRAFTS) {
            for name in OF_DRAFTS {
                drafts.entry(name).or_insert(Value::Null);
            }
        }
    }
    values
}

fn usage(n_prompt: u32, answers: &[GeneratedAnswer]) -> Value {
    let n_completion: usize = answers.iter().map(|answer| answer.ids.len()).sum();
    let n_all = n_prompt as usize + n_completion;
    json!({ "prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_all })
}

/// The model that reads the tokens, and the parts that the client requests in addition.
pub(super) struct DerenderContext {
    name: String,
    pub(super) text: Arc<ModelText>,
    pub(super) context: u32,
    logprobs_max: u32,
    pub(super) token_ids: bool,
}

/// A replica's answer.
struct GeneratedAnswers {
    id: String,
    answers: Vec<GeneratedAnswer>,
    /// Members that are passed on unchanged.
    rest: Map<String, Value>,
}

pub(super) struct GeneratedAnswer {
    pub(super) index: u32,
    pub(super) ids: Tokens,
    pub(super) reason: Option<String>,
    stop_reason: Value,
    pub(super) logprobs: Option<Vec<v1::Logprob>>,
}

impl DerenderContext {
    pub(super) fn of(front: &Frontend, page: ApiRequest) -> Result<(DerenderContext, Fields), Refusal> {
        let mut fields = page.fields;
        let model = front.model(&fields.string("model")?.unwrap_or_default(), VersionSelector::Weight)?;
        let (context, logprobs_max) = (model.replica.context, front.config.limits.logprobs_max);
        Ok((DerenderContext { name: model.name, text: model.text, context, logprobs_max, token_ids: false }, fields))
    }

    /// Returns the chat of the original request. A model that writes thoughts and calls needs it to separate them.
    pub(super) fn chat(&mut self, chat_request: Option<Fields>) -> Result<(Option<v1::Chat>, bool), Refusal> {
        let needs_chat = self.text.dialect.has_thoughts()
            || self.text.template.as_ref().is_some_and(|template| template.uses_tools());
        match chat_request {
            None if needs_chat => {
                Err(Refusal::invalid(CHAT_REQUEST, "is missing: this model has reasoning or tool calls"))
            }
            None => Ok((None, false)),
            Some(mut fields) => {
                let tokens_as_ids = self.read_options(&mut fields, Endpoint::Chat)?;
                if !tools::custom_names(&fields).is_empty() {
                    return Err(Refusal::invalid("chat_request.tools", "custom tools are not supported here"));
                }
                Ok((Some(conversation(&mut fields)?), tokens_as_ids))
            }
        }
    }

    /// Reads the parts that a client requests in addition to the text. Returns whether tokens are written as ids.
    pub(super) fn read_options(&mut self, fields: &mut Fields, page: Endpoint) -> Result<bool, Refusal> {
        fields.check(page)?;
        self.token_ids = fields.boolean("return_token_ids")?.unwrap_or(false);
        Ok(fields.boolean("return_tokens_as_token_ids")?.unwrap_or(false))
    }

    fn prompt_ids(&self, field_value: Option<Value>) -> Result<Option<Tokens>, Refusal> {
        const FIELD: &str = "prompt_token_ids";
        let Some(value) = field_value else { return Ok(None) };
        let ids = token_ids(FIELD, value)?;
        self.check_ids(FIELD, &ids)?;
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
            Some(other) => return Err(wrong_type("prompt_token_ids", "a list of lists of token ids", &other)),
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

    pub(super) fn check_ids(&self, field: &'static str, ids: &[u32]) -> Result<(), Refusal> {
        self.check_length(field, ids.len())?;
        self.text.check_ids(field, ids)
    }

    fn check_length(&self, field: &'static str, n: usize) -> Result<(), Refusal> {
        match n > self.context as usize {
            true => Err(Refusal::invalid(field, format!("its length {n} exceeds max_model_len {}", self.context))),
            false => Ok(()),
        }
    }

    fn read_answers(&self, mut generated: Fields) -> Result<GeneratedAnswers, Refusal> {
        let id = generated.string("request_id")?.unwrap_or_default();
        let choices = objects("choices", generated.take("choices"))?;
        if choices.len() > ANSWERS_MAX {
            let why = format!("the choices count must be at most {ANSWERS_MAX}, got {}", choices.len());
            return Err(Refusal::invalid("choices", why));
        }
        let answers: Vec<GeneratedAnswer> =
            choices.into_iter().map(|choice| self.answer(choice)).collect::<Result<_, _>>()?;
        if answers.iter().any(|answer| answer.ids.is_empty()) {
            return Err(Refusal::invalid(CHOICE_IDS, "must not be empty"));
        }
        Ok(GeneratedAnswers { id, answers, rest: generated.rest() })
    }

    pub(super) fn answer(&self, mut choice: Fields) -> Result<GeneratedAnswer, Refusal> {
        let ids = choice.take("token_ids").map(|value| token_ids(CHOICE_IDS, value)).transpose()?.unwrap_or_default();
        self.check_ids(CHOICE_IDS, &ids)?;
        Ok(GeneratedAnswer {
            index: choice.unsigned("index")?.unwrap_or(0),
            ids,
            reason: choice.string("finish_reason")?,
            stop_reason: choice.take("stop_reason").unwrap_or_default(),
            logprobs: choice.object("logprobs")?.map(|object| self.logprobs(object)).transpose()?,
        })
    }

    fn logprobs(&self, mut fields: Fields) -> Result<Vec<v1::Logprob>, Refusal> {
        const FIELD: &str = "logprobs";
        let list = match fields.take("content") {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(wrong_type(FIELD, "a list as `content`", &other)),
        };
        if list.len() > self.context as usize {
            let why = format!("the logprobs.content length {} exceeds max_model_len {}", list.len(), self.context);
            return Err(Refusal::invalid(FIELD, why));
        }
        list.iter().map(|one| self.logprob(one)).collect()
    }

    fn logprob(&self, entry: &Value) -> Result<v1::Logprob, Refusal> {
        let likely = entry["top_logprobs"].as_array().map(Vec::as_slice).unwrap_or_default();
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
        Ok(v1::Logprob { top: likely.iter().map(one).collect::<Result<_, _>>()?, ..one(entry)? })
    }

    pub(super) fn finished_choice(&self, answer: &GeneratedAnswer, mut choice: Value) -> Value {
        choice["stop_reason"] = answer.stop_reason.clone();
        if self.token_ids {
            choice["token_ids"] = answer.ids.as_slice().into();
        }
        choice
    }

    pub(super) fn envelope(&self, id: String, object: &str, choices: Vec<Value>, usage: Value) -> Value {
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
