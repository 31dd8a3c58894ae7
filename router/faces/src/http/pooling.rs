//! `/classify`, `/pooling` and Cohere's `/v2/embed`: pooled vectors and scores in the forms of vLLM and Cohere.

use crate::http::completions::inputs;
use crate::http::embeddings::{EmbeddingEncoding, check_dimensions, encoding};
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::known::Endpoint;
use crate::http::page::{AnswerRequest, ApiRequest, record_refusal};
use crate::http::ranking::{reply_id, usage};
use axum::Json;
use axum::extract::State;
use checkpoint::PoolingSpec;
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::embed::Readout;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::{CutSide, ParsedRequest, Truncation};
use router::refusal::Refusal;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The most likely label of each text, and the scores of all.
pub async fn classify(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let read = record_refusal(&mut recorder, classify_request(&front, page).map_err(HttpError::from))?;
    let (parsed, readout, pooling) = read;
    let reply = front.pool(parsed, readout, &mut recorder).await.map_err(named)?;
    let data: Vec<Value> = reply.embeddings.iter().enumerate().map(|(i, of)| label(&pooling, i, &of.values)).collect();
    Ok(Json(listed("classify", data, &reply)))
}

/// A vector or the scores of each text, as the model has them.
pub async fn pooling(State(front): State<Arc<Frontend>>, request: AnswerRequest) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let read = record_refusal(&mut recorder, pooling_request(&front, page).map_err(HttpError::from))?;
    let (parsed, readout, encoding) = read;
    let reply = front.pool(parsed, readout, &mut recorder).await.map_err(named)?;
    let values = reply.embeddings.iter().map(|of| encoding.value(&of.values)).enumerate();
    let data = values.map(|(i, data)| json!({ "index": i, "object": "pooling", "data": data })).collect();
    Ok(Json(listed("pool", data, &reply)))
}

/// Embeddings in Cohere's form.
pub async fn cohere_embed(
    State(front): State<Arc<Frontend>>,
    request: AnswerRequest,
) -> Result<Json<Value>, HttpError> {
    let AnswerRequest { page, mut recorder, .. } = request;
    let read = record_refusal(&mut recorder, cohere_request(&front, page).map_err(HttpError::from))?;
    let (parsed, texts, forms) = read;
    let reply = front.embed(parsed, &mut recorder).await.map_err(named)?;
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
        "meta": { "api_version": { "version": "2" }, "billed_units": { "input_tokens": n_tokens } },
        "response_type": "embeddings_by_type",
    })))
}

fn named(refusal: Refusal) -> HttpError {
    HttpError::of(refusal.renamed(&[("text", "input"), ("token_ids", "input")]))
}

fn listed(kind: &str, data: Vec<Value>, reply: &v1::EmbedReply) -> Value {
    json!({
        "id": reply_id(kind),
        "object": "list",
        "created": unix_seconds(),
        "model": reply.model,
        "data": data,
        "usage": usage(reply.usage.unwrap_or_default().prompt_tokens),
    })
}

fn label(pooling: &PoolingSpec, index: usize, scores: &[f32]) -> Value {
    let best = |best: usize, i: usize| if scores[i] > scores[best] { i } else { best };
    let label = pooling.labels.get((0..scores.len()).fold(0, best));
    json!({ "index": index, "label": label, "probs": scores, "num_classes": scores.len() })
}

fn classify_request(front: &Frontend, page: ApiRequest) -> Result<(ParsedRequest, Readout, PoolingSpec), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    let is_raw = fields.boolean("use_activation")? == Some(false);
    let parsed = ParsedRequest { tenant, body, ..common(&mut fields)? };
    let pooling = front.text(&parsed.model)?.spec.pooling.clone();
    // What has no classifier is refused with the readout of scores.
    let readout = if is_raw && pooling.is_classifier() { Readout::Raw } else { Readout::Scores };
    Ok((parsed, readout, pooling))
}

fn pooling_request(front: &Frontend, page: ApiRequest) -> Result<(ParsedRequest, Readout, EmbeddingEncoding), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    let is_raw = fields.boolean("use_activation")? == Some(false);
    let (encoding, task, dimensions) = (encoding(&mut fields)?, fields.string("task")?, fields.unsigned("dimensions")?);
    let parsed = ParsedRequest { tenant, body, ..common(&mut fields)? };
    let text = front.text(&parsed.model)?;
    if let Some(dimensions) = dimensions {
        check_dimensions(dimensions, text.embedding_length())?;
    }
    let readout = match (task.as_deref(), text.spec.pooling.is_classifier()) {
        (Some("embed"), _) | (None, false) => Readout::Embedding,
        (Some("classify"), _) | (None, true) => Readout::Scores,
        (Some(_), _) => return Err(Refusal::invalid("task", "must be embed or classify")),
    };
    Ok((parsed, if is_raw { Readout::Raw } else { readout }, encoding))
}

/// The fields that `/classify` and `/pooling` share.
fn common(fields: &mut Fields) -> Result<ParsedRequest, Refusal> {
    fields.check(Endpoint::Embeddings)?;
    let input = fields.take("input").ok_or_else(|| Refusal::invalid("input", "is missing"))?;
    Ok(ParsedRequest {
        model: fields.string("model")?.unwrap_or_default(),
        prompts: inputs("input", input)?,
        truncation: fields.truncation(CutSide::Right)?,
        priority: fields.priority()?,
        deadline: fields.deadline()?,
        cache_salt: fields.cache_salt()?,
        ..ParsedRequest::default()
    })
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
            CohereForm::Base64 => return Ok(EmbeddingEncoding::Base64.value(values)),
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

fn cohere_request(
    front: &Frontend,
    page: ApiRequest,
) -> Result<(ParsedRequest, Vec<String>, Vec<CohereForm>), Refusal> {
    let ApiRequest { mut fields, tenant, body, .. } = page;
    fields.refuse(&["images"])?;
    let model = fields.string("model")?.unwrap_or_default();
    let texts = if fields.has("texts") { fields.strings("texts")? } else { cohere_inputs(&mut fields)? };
    if texts.is_empty() {
        return Err(Refusal::invalid("texts", "must have at least one text"));
    }
    if let Some(dimensions) = fields.unsigned("output_dimension")? {
        check_dimensions(dimensions, front.text(&model)?.embedding_length())?;
    }
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
    let (prompts, priority) = (texts.iter().cloned().map(Input::Text).collect(), fields.priority()?);
    Ok((ParsedRequest { model, prompts, truncation, priority, tenant, body, ..ParsedRequest::default() }, texts, forms))
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
