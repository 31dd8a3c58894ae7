//! `/api/chat`. Has no knowledge of replicas.

use crate::config::RouterLimits;
use crate::faces::http::conversation;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::Fields;
use crate::faces::http::known::{Endpoint, NeutralValues};
use crate::faces::http::ollama::reply::{self, ReplyShape, Telling, answer, loaded};
use crate::faces::http::ollama::words::{said, served};
use crate::faces::http::ollama::{options, shape};
use crate::faces::http::page::{Page, counted, read};
use crate::faces::http::single::{self, invalid};
use crate::faces::http::stopwatch::Stopwatch;
use crate::front::ask::Ask;
use crate::front::frontend::Frontend;
use crate::front::recorder::{Caller, Face, Recorder};
use crate::refusal::Refusal;
use axum::extract::{Request, State};
use axum::response::Response;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value};
use std::sync::Arc;

pub async fn chat(State(front): State<Arc<Frontend>>, request: Request) -> Result<Response, HttpError> {
    let watch = Stopwatch::start();
    let mut recorder = Recorder::start(Face::Http, &Caller::of_http(request.headers()));
    let read = read(&front, request).await;
    let mut page = counted(&mut recorder, read)?;
    let asked = counted(&mut recorder, page.fields.string("model").map_err(said))?;
    let model = served(&front, asked);
    let Some(messages) = page.fields.take("messages").filter(|messages| !NeutralValues::Empty.contain(messages)) else {
        return loaded(&front, page.tenant, ReplyShape::Chat, &model, recorder);
    };
    let asked = ask(page, model, messages, &front.config.limits).map_err(said);
    let (ask, telling) = counted(&mut recorder, asked)?;
    answer(&front, ask, telling, recorder, watch).await
}

fn ask(mut page: Page, model: String, messages: Value, limits: &RouterLimits) -> Result<(Ask, Telling), Refusal> {
    let fields = &mut page.fields;
    let chat = conversation(fields, messages)?;
    let mut sampling = options::sampling(fields)?;
    sampling.structure = shape::structure(fields)?;
    sampling.logprobs = reply::logprobs(fields, limits.logprobs_max)?;
    let (is_stream, logprobs) = (reply::is_stream(fields)?, sampling.logprobs.is_some());
    let telling = Telling { shape: ReplyShape::Chat, is_stream, logprobs, context: false };
    let ask = single::ask(fields, model, Input::Chat(chat), sampling)?;
    // The remaining fields are checked like those of OpenAI's page.
    fields.check(Endpoint::Chat)?;
    fields.refuse(&["truncate_prompt_tokens"])?;
    Ok((page.finished_anew(ask, limits)?, telling))
}

/// Reads messages, tools and `think` into the format of OpenAI's page.
fn conversation(fields: &mut Fields, mut messages: Value) -> Result<v1::Chat, Refusal> {
    for (i, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        if message.get("images").is_some_and(|images| !NeutralValues::Empty.contain(images)) {
            return Err(invalid(format!("messages[{i}].images"), "is not supported; only text is"));
        }
        *message = shape::message(i, message.take());
    }
    let mut named = Map::from_iter([("messages".to_owned(), messages)]);
    if let Some(tools) = fields.take("tools") {
        named.insert("tools".to_owned(), tools);
    }
    named.extend(shape::think(fields)?);
    conversation::conversation(&mut Fields::of(named))
}
