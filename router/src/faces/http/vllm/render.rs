//! `/v1/chat/completions/render` and `/v1/completions/render`: what OpenAI's pages ask of a replica, without asking it.
//! The answer is a body for `/inference/v1/generate`, or a list of them.

use crate::faces::http::completions::{TOKENS_MAX, inputs};
use crate::faces::http::conversation::conversation;
use crate::faces::http::error::HttpError;
use crate::faces::http::fields::Fields;
use crate::faces::http::known::Endpoint;
use crate::faces::http::page::{Page, read};
use crate::faces::http::structure::structure;
use crate::faces::http::vllm::params;
use crate::front::frontend::{Frontend, unix_seconds};
use crate::refusal::Refusal;
use axum::Json;
use axum::extract::{Request, State};
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn chat(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let page = read(&front, request).await?;
    let rendered = rendered(&front, page, |fields| {
        fields.check(Endpoint::Chat)?;
        fields.refuse(&["truncate_prompt_tokens"])?;
        let mut sampling = fields.sampling()?;
        let wanted = fields.boolean("logprobs")?.unwrap_or(false);
        sampling.logprobs = fields.unsigned("top_logprobs")?.or(Some(0)).filter(|_| wanted);
        sampling.structure = structure(fields)?.map(|said| said.structure);
        Ok((vec![Input::Chat(conversation(fields)?)], sampling))
    });
    let mut bodies = rendered.await?;
    Ok(Json(bodies.remove(0)))
}

pub async fn completions(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let page = read(&front, request).await?;
    let rendered = rendered(&front, page, |fields| {
        fields.check(Endpoint::Completions)?;
        fields.refuse(&["suffix", "truncate_prompt_tokens"])?;
        let mut sampling = fields.sampling()?;
        sampling.logprobs = fields.unsigned("logprobs")?;
        sampling.structure = structure(fields)?.map(|said| said.structure);
        sampling.max_tokens.get_or_insert(TOKENS_MAX);
        let prompt = fields.take("prompt").ok_or_else(|| Refusal::invalid("prompt", "is missing"))?;
        Ok((inputs("prompt", prompt)?, sampling))
    });
    Ok(Json(rendered.await?.into()))
}

/// One body for each prompt.
async fn rendered(
    front: &Frontend,
    page: Page,
    asked: impl FnOnce(&mut Fields) -> Result<(Vec<Input>, v1::Sampling), Refusal>,
) -> Result<Vec<Value>, HttpError> {
    let _visit = front.visit(page.tenant)?;
    let mut fields = page.fields;
    let (inputs, sampling) = asked(&mut fields)?;
    let (n_choices, n_prompts_max) = (fields.n_choices()?, front.config.limits.prompts_max);
    if inputs.len() > n_prompts_max {
        return Err(Refusal::invalid("prompt", format!("there are more than {n_prompts_max}")).into());
    }
    let (model, priority) = (fields.string("model")?.unwrap_or_default(), fields.priority()?);
    let is_stream = fields.boolean("stream")?.unwrap_or(false);
    let text = front.text(&model)?;
    let now = unix_seconds();
    let mut bodies = Vec::with_capacity(inputs.len());
    for input in inputs {
        let (ids, structure) = front.rendered_request(&text, input, sampling.structure.clone(), now).await?;
        let params = params::value(&v1::Sampling { structure, ..sampling.clone() }, n_choices);
        bodies.push(json!({
            "model": model,
            "request_id": format!("render-{:08x}{:016x}", front.nonce, front.next_request()),
            "token_ids": ids,
            "sampling_params": params,
            "stream": is_stream,
            "priority": priority,
        }));
    }
    Ok(bodies)
}
