//! `/classify`, `/pooling` and Cohere's `/v2/embed`: pooled vectors and scores in the forms of vLLM and Cohere.

use crate::http::embeddings::head;
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::pooled::{is_raw, pooled_request, with_prompts};
use crate::http::ranking::reply_id;
use crate::http::vectors::VectorForm;
use axum::Json;
use axum::extract::State;
use axum::response::Response;
use checkpoint::PoolingSpec;
use proto::v1::generate_request::Input;
use router::front::embed::{Readout, ReadoutKind};
use router::front::frontend::Frontend;
use router::front::parsed_request::ParsedRequest;
use router::refusal::Refusal;
use router::replicas::models::truncation::{CutSide, Truncation};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The most likely label of each text, and the scores of all.
pub async fn classify(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let read = record_refusal(&mut recorder, classify_request(&front, page).map_err(HttpError::from))?;
    let (parsed, readout, pooling) = read;
    let reply = front.pool(parsed, readout, &mut recorder).await.map_err(named)?;
    let mut body = head("classify", &reply);
    body["data"] = reply.embeddings.iter().enumerate().map(|(i, of)| label(&pooling, i, &of.values)).collect();
    Ok(Json(body))
}

/// A vector or the scores of each text, as the model has them.
pub async fn pooling(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Response, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let read = record_refusal(&mut recorder, pooling_request(&front, page).map_err(HttpError::from))?;
    let (parsed, readout, form) = read;
    let reply = front.pool(parsed, readout, &mut recorder).await.map_err(named)?;
    Ok(form.reply(head("pooling", &reply), "data", "pooling", &reply))
}

/// Embeddings in Cohere's form.
pub async fn cohere_embed(
    State(front): State<Arc<Frontend>>,
    request: AnswerRequest,
) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let read = record_refusal(&mut recorder, cohere_request(&front, page).map_err(HttpError::from))?;
    let CohereRequest { parsed, dimensions, texts, forms } = read;
    let readout = Readout { dimensions, ..Readout::of(ReadoutKind::Embedding) };
    let cohere_name = |refusal: Refusal| named(refusal.renamed(&[("dimensions", "output_dimension")]));
    let reply = front.pool(parsed, readout, &mut recorder).await.map_err(cohere_name)?;
    let n_tokens = reply.usage.unwrap_or_default().prompt_tokens;
    let by_form = |form: &CohereForm| {
        let all = reply.embeddings.iter().map(|of| form.value(&of.values)).collect::<Result<Vec<_>, _>>()?;
        Ok((form.name().to_owned(), Value::from(all)))
    };
    let embeddings = forms.iter().map(by_form).collect::<Result<Map<_, _>, Refusal>>()?;
    Ok(Json(json!({
        "id": reply_id("embd"),
        "embeddings": embeddings,
        "texts": texts,
        "meta": { "api_version": { "version": "2" }, "billed_units": { "input_tokens": n_tokens, "image_tokens": 0 } },
        "response_type": "embeddings_by_type",
    })))
}

fn named(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[("text", "input"), ("token_ids", "input"), ("chat", "messages")]))
}

fn label(pooling: &PoolingSpec, index: usize, scores: &[f32]) -> Value {
    let best = |best: usize, i: usize| if scores[i] > scores[best] { i } else { best };
    let label = pooling.labels.get((0..scores.len()).fold(0, best));
    json!({ "index": index, "label": label, "probs": scores, "num_classes": scores.len() })
}

fn classify_request(front: &Frontend, page: ApiRequest) -> Result<(ParsedRequest, Readout, PoolingSpec), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    let is_raw = is_raw(&mut fields)?;
    let parsed = ParsedRequest { tenant, body, ..pooled_request(&mut fields)? };
    let pooling = front.text(&parsed.model)?.spec.pooling.clone();
    Ok((parsed, Readout { is_raw, ..Readout::of(ReadoutKind::Scores) }, pooling))
}

fn pooling_request(front: &Frontend, page: ApiRequest) -> Result<(ParsedRequest, Readout, VectorForm), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    let (form, is_raw) = (VectorForm::parse(&mut fields)?, is_raw(&mut fields)?);
    let (task, dimensions) = (fields.string("task")?, fields.unsigned("dimensions")?);
    let parsed = ParsedRequest { tenant, body, ..pooled_request(&mut fields)? };
    let kind = task_kind(task.as_deref(), front.text(&parsed.model)?.spec.pooling.is_classifier())?;
    Ok((parsed, Readout { kind, is_raw, dimensions }, form))
}

/// Returns what a task reads. Its names are vLLM's, and so are the refusals: its clients compare them.
fn task_kind(task: Option<&str>, is_classifier: bool) -> Result<ReadoutKind, Refusal> {
    let (own, by_token) = if is_classifier { ("classify", "token_classify") } else { ("embed", "token_embed") };
    let why = match task {
        None if is_classifier => return Ok(ReadoutKind::Scores),
        None => return Ok(ReadoutKind::Embedding),
        Some("classify") if is_classifier => return Ok(ReadoutKind::Scores),
        Some("embed") if !is_classifier => return Ok(ReadoutKind::Embedding),
        Some("plugin") => "No IOProcessor plugin installed.".to_owned(),
        Some(other) if other == by_token => {
            format!("Try switching the model's pooling_task via another server: this one has only {own:?}.")
        }
        Some(other) => format!("Unsupported task: '{other}' Supported tasks: ('{own}',)"),
    };
    Err(Refusal::invalid("task", why))
}

/// The forms in which Cohere writes an embedding.
#[derive(Clone, Copy)]
enum CohereForm {
    Float,
    Base64,
    /// A bit for each number, 1 where it is not negative, the first the highest of a byte; less 128 in the first form.
    Binary,
    UnsignedBinary,
}

impl CohereForm {
    fn of(name: &str) -> Result<CohereForm, Refusal> {
        match name {
            "float" => Ok(CohereForm::Float),
            "base64" => Ok(CohereForm::Base64),
            "binary" => Ok(CohereForm::Binary),
            "ubinary" => Ok(CohereForm::UnsignedBinary),
            _ => Err(Refusal::invalid("embedding_types", "must be float, base64, binary or ubinary")),
        }
    }

    fn name(self) -> &'static str {
        match self {
            CohereForm::Float => "float",
            CohereForm::Base64 => "base64",
            CohereForm::Binary => "binary",
            CohereForm::UnsignedBinary => "ubinary",
        }
    }

    fn value(self, values: &[f32]) -> Result<Value, Refusal> {
        let offset = match self {
            CohereForm::Float => return Ok(values.into()),
            CohereForm::Base64 => return Ok(VectorForm::BASE64.value(values)),
            CohereForm::Binary => -128,
            CohereForm::UnsignedBinary => 0,
        };
        if !values.len().is_multiple_of(8) {
            let why = format!("needs an embedding of a multiple of 8 numbers, not of {}", values.len());
            return Err(Refusal::invalid("embedding_types", why));
        }
        let byte = |eight: &[f32]| eight.iter().fold(0, |byte, x| byte << 1 | i32::from(*x >= 0.0)) + offset;
        Ok(values.chunks_exact(8).map(byte).collect())
    }
}

struct CohereRequest {
    parsed: ParsedRequest,
    dimensions: Option<u32>,
    texts: Vec<String>,
    forms: Vec<CohereForm>,
}

fn cohere_request(front: &Frontend, page: ApiRequest) -> Result<CohereRequest, Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    fields.refuse(&["images"])?;
    let model = fields.string("model")?.unwrap_or_default();
    let texts = if fields.has("texts") { fields.strings("texts")? } else { cohere_inputs(&mut fields)? };
    if texts.is_empty() {
        return Err(Refusal::invalid("texts", "must have at least one text"));
    }
    let dimensions = fields.unsigned("output_dimension")?;
    let forms = fields.strings("embedding_types")?;
    let forms = match forms.is_empty() {
        true => vec![CohereForm::Float],
        false => forms.iter().map(|name| CohereForm::of(name)).collect::<Result<_, _>>()?,
    };
    let n_max = fields.unsigned("max_tokens")?;
    let cut = |side| Some(Truncation { n_max, side });
    let truncation = match fields.string("truncate")?.as_deref() {
        None | Some("END") => cut(CutSide::Right),
        Some("START") => cut(CutSide::Left),
        Some("NONE") => None,
        Some(_) => return Err(Refusal::invalid("truncate", "must be NONE, START or END")),
    };
    let (mut prompts, priority) = (texts.iter().cloned().map(Input::Text).collect::<Vec<_>>(), fields.priority()?);
    if let Some(input_type) = fields.string("input_type")? {
        let text = front.text(&model)?;
        with_prompts(&text, Some(&input_type), &mut prompts)?;
    }
    let parsed = ParsedRequest { model, prompts, truncation, priority, tenant, body, ..ParsedRequest::default() };
    Ok(CohereRequest { parsed, dimensions, texts, forms })
}

/// Reads `inputs`, each with content of texts.
fn cohere_inputs(fields: &mut Fields) -> Result<Vec<String>, Refusal> {
    let missing = || Refusal::invalid("texts", "is missing");
    let Some(Value::Array(inputs)) = fields.take("inputs") else { return Err(missing()) };
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        _ => Err(Refusal::invalid("inputs", "must have content of the type text")),
    };
    let of_input = |input: &Value| {
        let parts = input["content"].as_array().ok_or_else(|| Refusal::invalid("inputs", "must have `content`"))?;
        Ok(parts.iter().map(text).collect::<Result<Vec<_>, Refusal>>()?.concat())
    };
    inputs.iter().map(of_input).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_numbers_fill_bytes_from_the_highest_on() {
        let values = [1.0, -1.0, 0.0, -0.5, -1.0, -1.0, -1.0, 2.0];
        let value = |form: CohereForm| form.value(&values).unwrap();
        assert_eq!((value(CohereForm::UnsignedBinary), value(CohereForm::Binary)), (json!([161]), json!([33])));
        assert!(CohereForm::Binary.value(&values[..7]).is_err());
    }
}
