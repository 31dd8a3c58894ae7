//! The derender pages. With `stream: true` they return a piece of an answer as a chunk. The server keeps nothing
//! between pieces: the client sends back the state of each reply, the tokens so far, which are read again.

use crate::http::chat::ChatAnswerFormat;
use crate::http::completions::LogprobLists;
use crate::http::error::HttpError;
use crate::http::fields::{Fields, token_ids, wrong_type};
use crate::http::format::{AnswerFormat, TokenNames, choice_value, token_logprob_values};
use crate::http::known::Endpoint;
use crate::http::page::ApiRequest;
use crate::http::vllm::derender::{
    self, ANSWERS_MAX, CHAT_REQUEST, COMPLETION_REQUEST, DerenderContext, GeneratedAnswer, metrics,
};
use axum::Json;
use axum::extract::State;
use proto::v1;
use router::front::derender::{DerenderedAnswer, DrawnPiece, derender as read_pieces};
use router::front::frontend::{Frontend, unix_seconds};
use router::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use types::Tokens;

const STATE: &str = "stream_state";
const STATE_IDS: &str = "stream_state.token_ids";

pub async fn chat(State(front): State<Arc<Frontend>>, mut page: ApiRequest) -> Result<Json<Value>, HttpError> {
    if !page.fields.boolean("stream")?.unwrap_or(false) {
        return derender::chat(State(front), page).await;
    }
    let _visit = front.visit(page.tenant)?;
    let (mut context, mut fields) = DerenderContext::of(&front, page)?;
    let request = refuse_stops(fields.object(CHAT_REQUEST)?)?;
    let generated = GeneratedPieces::take(&context, &mut fields)?;
    let (chat, tokens_as_ids) = context.chat(request)?;
    let (read, state) = generated.read(&front, &context, chat).await?;
    let names = TokenNames::new(&context.text.tokenizer, tokens_as_ids);
    let mut format = ChatAnswerFormat::tools_format();
    let choice = |(answer, read): (&GeneratedAnswer, &DerenderedAnswer)| {
        let (name, mut delta) = format.delta_member(answer.index, Some(&read.delta));
        if !generated.state.ids.contains_key(&answer.index) {
            delta["role"] = "assistant".into();
        }
        let content = |likely: &Vec<v1::Logprob>| json!({ "content": token_logprob_values(names, likely) });
        let logprobs = answer.logprobs.as_ref().map(content).unwrap_or_default();
        let has_called = read.n_calls > 0 && answer.reason.as_deref() == Some("stop");
        let reason = if has_called { Some(format.tool_calls_reason()) } else { answer.reason.as_deref() };
        context.finished_choice(answer, choice_value(answer.index, (name, delta), logprobs, reason))
    };
    let choices = generated.answers.iter().zip(&read).map(choice).collect();
    Ok(Json(generated.reply(&context, ChatAnswerFormat::CHUNK_OBJECT, choices, &state)))
}

pub async fn completions(State(front): State<Arc<Frontend>>, mut page: ApiRequest) -> Result<Json<Value>, HttpError> {
    if !page.fields.boolean("stream")?.unwrap_or(false) {
        return derender::completions(State(front), page).await;
    }
    let _visit = front.visit(page.tenant)?;
    let (mut context, mut fields) = DerenderContext::of(&front, page)?;
    let tokens_as_ids = match refuse_stops(fields.object(COMPLETION_REQUEST)?)? {
        Some(mut request) => context.read_options(&mut request, Endpoint::Completions)?,
        None => false,
    };
    let generated = GeneratedPieces::take(&context, &mut fields)?;
    let (read, state) = generated.read(&front, &context, None).await?;
    let names = TokenNames::new(&context.text.tokenizer, tokens_as_ids);
    let choice = |(answer, read): (&GeneratedAnswer, &DerenderedAnswer)| {
        let lists = |likely: &Vec<v1::Logprob>| LogprobLists::of(names, likely).value();
        let logprobs = answer.logprobs.as_ref().map(lists).unwrap_or_default();
        let text = ("text", read.delta.text.as_str().into());
        context.finished_choice(answer, choice_value(answer.index, text, logprobs, answer.reason.as_deref()))
    };
    let choices = generated.answers.iter().zip(&read).map(choice).collect();
    Ok(Json(generated.reply(&context, "text_completion", choices, &state)))
}

/// A text that ends within a piece cannot be cut: the pieces before it have been returned.
fn refuse_stops(request: Option<Fields>) -> Result<Option<Fields>, Refusal> {
    let Some(mut request) = request else { return Ok(None) };
    match request.strings("stop")?.is_empty() {
        true => Ok(Some(request)),
        false => Err(Refusal::invalid("stop", "is not supported for pieces of an answer")),
    }
}

/// One event of `/inference/v1/generate`, and what came before it.
struct GeneratedPieces {
    id: String,
    answers: Vec<GeneratedAnswer>,
    rest: Map<String, Value>,
    state: PieceState,
}

/// The tokens of each choice, and when the first piece was read: a template may contain the time.
#[derive(Clone)]
struct PieceState {
    created: u64,
    ids: BTreeMap<u32, Tokens>,
}

impl GeneratedPieces {
    fn take(context: &DerenderContext, fields: &mut Fields) -> Result<GeneratedPieces, Refusal> {
        const FIELD: &str = "generate_chunk";
        let mut chunk = fields.object(FIELD)?.ok_or_else(|| Refusal::invalid(FIELD, "is missing"))?;
        let state = PieceState::of(context, fields.object(STATE)?)?;
        let answers = match chunk.take("choices") {
            None => Vec::new(),
            Some(Value::Array(all)) if all.len() > ANSWERS_MAX => {
                let why = format!("the choices count must be at most {ANSWERS_MAX}, got {}", all.len());
                return Err(Refusal::invalid("choices", why));
            }
            Some(Value::Array(all)) => {
                let choice = |value| match value {
                    Value::Object(choice) => context.answer(Fields::of(choice)),
                    other => Err(wrong_type("choices", "a list of objects", &other)),
                };
                all.into_iter().map(choice).collect::<Result<_, _>>()?
            }
            Some(other) => return Err(wrong_type("choices", "a list of objects", &other)),
        };
        let id = chunk.string("request_id")?.unwrap_or_default();
        Ok(GeneratedPieces { id, answers, rest: chunk.rest(), state })
    }

    /// Returns the text of each piece, and the state after them.
    async fn read(
        &self,
        front: &Frontend,
        context: &DerenderContext,
        chat: Option<v1::Chat>,
    ) -> Result<(Vec<DerenderedAnswer>, PieceState), Refusal> {
        let mut after = self.state.clone();
        let mut pieces = Vec::new();
        for answer in &self.answers {
            let so_far = after.ids.entry(answer.index).or_default();
            let (before, ids) = (so_far.clone(), answer.ids.clone());
            so_far.extend_from_slice(&ids);
            context.check_ids(STATE_IDS, so_far)?;
            pieces.push(DrawnPiece { choice: answer.index, before, ids, is_last: answer.reason.is_some() });
        }
        if after.ids.len() > ANSWERS_MAX {
            return Err(Refusal::invalid(STATE, format!("has more than {ANSWERS_MAX} choices")));
        }
        let read = read_pieces(&front.texts, &context.text, chat, pieces, self.state.created).await?;
        Ok((read, after))
    }

    fn reply(&self, context: &DerenderContext, object: &str, choices: Vec<Value>, state: &PieceState) -> Value {
        let member = |name: &str| self.rest.get(name).cloned().unwrap_or_default();
        let mut chunk = context.envelope(self.id.clone(), object, choices, member("usage"));
        chunk["created"] = state.created.into();
        if context.token_ids {
            chunk["prompt_token_ids"] = member("prompt_token_ids");
        }
        if let Some(values) = self.rest.get("metrics").filter(|values| !values.is_null()) {
            chunk["metrics"] = metrics(values.clone());
        }
        json!({ "chunk": chunk, "stream_state": state.value() })
    }
}

impl PieceState {
    fn of(context: &DerenderContext, sent: Option<Fields>) -> Result<PieceState, Refusal> {
        let Some(mut sent) = sent else {
            return Ok(PieceState { created: unix_seconds(), ids: BTreeMap::new() });
        };
        let created = sent.take("created").and_then(|value| value.as_u64());
        let created = created.ok_or_else(|| Refusal::invalid(STATE, "must be the state of an earlier reply"))?;
        let mut ids = BTreeMap::new();
        for (choice, value) in sent.object("token_ids")?.map(Fields::rest).unwrap_or_default() {
            let choice = choice.parse().map_err(|_| Refusal::invalid(STATE_IDS, "must have choices as names"))?;
            let of_choice = token_ids(STATE_IDS, value)?;
            context.check_ids(STATE_IDS, &of_choice)?;
            ids.insert(choice, of_choice);
        }
        Ok(PieceState { created, ids })
    }

    fn value(&self) -> Value {
        let ids: Map<String, Value> =
            self.ids.iter().map(|(choice, ids)| (choice.to_string(), ids.as_slice().into())).collect();
        json!({ "created": self.created, "token_ids": ids })
    }
}
