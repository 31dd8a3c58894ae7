//! The requests of `/completion` and `/infill`. Has no knowledge of replicas.

use crate::http::biases;
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::infill::{self, Infill};
use crate::http::known::Endpoint;
use crate::http::llama_cpp::answer::{CompletionOptions, answer};
use crate::http::llama_cpp::{prompts, settings};
use crate::http::llama_words::{self, n_predict};
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::structure::structure;
use axum::extract::State;
use axum::response::Response;
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::frontend::Frontend;
use router::front::parameters::SAMPLERS;
use router::front::parsed_request::{ParsedRequest, Purpose};
use router::refusal::Refusal;
use router::replicas::models::truncation::CutSide;
use serde_json::Value;
use std::sync::Arc;

pub async fn completion(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { mut page, mut recorder, watch } = request;
    let prompts = read_prompts(&front, &mut page.fields).await;
    let result =
        prompts.and_then(|(prompts, model)| parse_request(page, model, prompts, &front)).map_err(to_http_error);
    let (parsed, options) = record_refusal(&mut recorder, result)?;
    answer(&front, parsed, options, recorder, watch).await
}

pub async fn infill(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { mut page, mut recorder, watch } = request;
    let prompt = read_infill_prompt(&front, &mut page.fields).await;
    let result = prompt.and_then(|(prompt, model)| parse_request(page, model, vec![prompt], &front));
    let (parsed, options) = record_refusal(&mut recorder, result.map_err(to_http_error))?;
    answer(&front, parsed, options, recorder, watch).await
}

/// Returns the prompts, and the model that reads them.
async fn read_prompts(front: &Frontend, fields: &mut Fields) -> Result<(Vec<Input>, String), Refusal> {
    let prompts = fields.take("prompt").ok_or_else(|| Refusal::invalid("prompt", "is missing"))?;
    let model = fields.string("model")?.unwrap_or_default();
    if fields.has(biases::FIELD) {
        biases::texts_to_tokens(front, &front.text(&model)?, fields).await?;
    }
    Ok((prompts::prompts(front, &model, prompts).await?, model))
}

/// Returns the prompt for the text between two texts, and the model that reads it.
async fn read_infill_prompt(front: &Frontend, fields: &mut Fields) -> Result<(Input, String), Refusal> {
    let parts = Infill {
        files: files(fields.take("input_extra"))?,
        before: fields.string("input_prefix")?.unwrap_or_default(),
        after: fields.string("input_suffix")?.unwrap_or_default(),
        begun: fields.string("prompt")?.unwrap_or_default(),
    };
    let model = fields.string("model")?.unwrap_or_default();
    let text = front.text(&model)?;
    Ok((infill::prompt(front, &text, parts, "input_suffix").await?, model))
}

fn files(extra: Option<Value>) -> Result<Vec<(String, String)>, Refusal> {
    const FORM: &str = "must be a list of objects with a `text` and perhaps a `filename`";
    let wrong = || Refusal::invalid("input_extra", FORM);
    let file = |file: Value| {
        let name = file["filename"].as_str().unwrap_or("tmp").to_owned();
        Ok((name, file["text"].as_str().ok_or_else(wrong)?.to_owned()))
    };
    match extra {
        None => Ok(Vec::new()),
        Some(Value::Array(all)) => all.into_iter().map(file).collect(),
        Some(_) => Err(wrong()),
    }
}

/// Renames refused fields to the names of these pages.
pub fn to_http_error(refusal: Refusal) -> HttpError {
    let names = [("text", "prompt"), ("token_ids", "prompt"), ("max_tokens", "n_predict"), ("logprobs", "n_probs")];
    HttpError::of(refusal.renamed(&names).renamed(&[("repetition_penalty", "repeat_penalty")]))
}

fn parse_request(
    mut page: ApiRequest,
    model: String,
    prompts: Vec<Input>,
    front: &Frontend,
) -> Result<(ParsedRequest, CompletionOptions), Refusal> {
    let (fields, limits) = (&mut page.fields, &front.config.limits);
    let mut options = CompletionOptions {
        is_stream: fields.boolean("stream")?.unwrap_or(false),
        tokens: fields.boolean("return_tokens")?.unwrap_or(false),
        timings_in_each: fields.boolean("timings_per_token")?.unwrap_or(false),
        members: fields.strings("response_fields")?,
        ..CompletionOptions::default()
    };
    let mut sampling = sampling(fields, &mut options)?;
    let structure = structure(fields)?;
    options.structure_field = structure.as_ref().map(|requested| requested.field);
    sampling.structure = structure.map(|requested| requested.structure);
    options.settings = settings::requested_settings(&sampling);
    let needs_progress = fields.needs_progress(options.is_stream)?;
    let parsed = ParsedRequest {
        model,
        needs_progress,
        prompts,
        n_choices: fields.n_choices()?,
        purpose: Purpose::Generate(Box::new(sampling)),
        truncation: fields.truncation(CutSide::Left)?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        // The answer includes its prompt.
        echo: true,
        ..ParsedRequest::default()
    };
    // The remaining fields are checked like those of OpenAI's page, which has the same fields in llama.cpp.
    fields.check(Endpoint::Completions)?;
    fields.refuse(&["suffix"])?;
    Ok((page.complete_unresumable_request(parsed, limits)?, options))
}

fn sampling(fields: &mut Fields, options: &mut CompletionOptions) -> Result<v1::Sampling, Refusal> {
    let (n, n_probs, samplers) = (fields.integer("n_predict")?, fields.unsigned("n_probs")?, fields.take("samplers"));
    let mut sampling = llama_words::sampling(fields)?;
    options.is_prompt_only = n == Some(0);
    if options.is_prompt_only {
        // One token is sampled and not sent. After that the prompt is in the cache.
        sampling.max_tokens = Some(1);
    } else if n.is_some() {
        sampling.max_tokens = n_predict(n, "n_predict")?;
    }
    sampling.logprobs = n_probs.filter(|n| *n > 0);
    sampling.prompt_logprobs = None;
    sampling.defaults = v1::sampling::Defaults::LlamaCpp.into();
    check_sampler_order(samplers, sampling.temperature == Some(0.0))?;
    Ok(sampling)
}

/// Refuses another order of filters. The order is irrelevant if the most likely token is always taken.
fn check_sampler_order(samplers: Option<Value>, is_greedy: bool) -> Result<(), Refusal> {
    let message = || format!("must have the order {}, unless the temperature is 0", SAMPLERS.join(", "));
    match samplers {
        None => Ok(()),
        Some(Value::Array(names)) if names.is_empty() || is_greedy || names.iter().eq(&SAMPLERS) => Ok(()),
        Some(Value::String(letters)) if letters.is_empty() || is_greedy => Ok(()),
        Some(_) => Err(Refusal::invalid("samplers", message())),
    }
}
