//! `/api/tags`, `/api/ps`, `/api/show` and `/api/pull`: the served models. Sizes of files are 0, because the router
//! does not have them.

use crate::http::error::HttpError;
use crate::http::infill;
use crate::http::ollama::words::{LATEST, served_name, to_http_error};
use crate::http::page::ApiRequest;
use crate::http::stopwatch::rfc3339;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use checkpoint::ModelSpec;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parameters::{NumberDefaults, NumberParameter};
use router::refusal::Refusal;
use router::replicas::models::table::{ResolvedModel, VersionSelector};
use router::replicas::models::text::ModelText;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use types::Hex;

/// Models stay loaded while the server runs.
const NEVER: &str = "9999-12-31T23:59:59Z";

pub async fn tags(State(front): State<Arc<Frontend>>) -> Json<Value> {
    let listed = front.models.listed(&front.replicas);
    let model = |(name, model): &(String, ResolvedModel)| {
        let mut value = list_entry(name, model);
        value["modified_at"] = rfc3339(unix_seconds()).into();
        value
    };
    Json(json!({ "models": listed.iter().map(model).collect::<Vec<_>>() }))
}

pub async fn ps(State(front): State<Arc<Frontend>>) -> Json<Value> {
    let listed = front.models.listed(&front.replicas);
    let model = |(name, model): &(String, ResolvedModel)| {
        let mut value = list_entry(name, model);
        (value["expires_at"], value["size_vram"]) = (NEVER.into(), 0.into());
        value["context_length"] = model.replica.context.into();
        value
    };
    let ready = listed.iter().filter(|(_, model)| model.is_ready);
    Json(json!({ "models": ready.map(model).collect::<Vec<_>>() }))
}

/// Returns a model as an entry of a list. Its digest is the policy digest.
fn list_entry(name: &str, model: &ResolvedModel) -> Value {
    let name = if name.contains(':') { name.to_owned() } else { format!("{name}{LATEST}") };
    let digest = Hex(&model.replica.digest.0).to_string();
    json!({ "name": name, "model": name, "size": 0, "digest": digest, "details": details(&model.text.spec) })
}

fn details(spec: &ModelSpec) -> Value {
    let family = spec.family.architecture();
    json!({
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": format_count(spec.n_parameters()),
        "quantization_level": "unknown",
    })
}

/// Formats a number as `134.5M`.
fn format_count(n: u64) -> String {
    let units = [("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)];
    let unit = units.into_iter().find(|(_, size)| n as f64 >= *size);
    unit.map_or_else(|| n.to_string(), |(letter, size)| format!("{:.1}{letter}", n as f64 / size))
}

pub async fn show(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let _visit = front.visit(page.tenant).map_err(to_http_error)?;
    let mut fields = page.fields;
    let read = fields.string("model").and_then(|model| Ok(model.or(fields.string("name")?)));
    let name = served_name(&front, read.map_err(to_http_error)?);
    let model = front.model(&name, VersionSelector::Weight).map_err(to_http_error)?;
    let text = &model.text;
    Ok(Json(json!({
        "modelfile": format!("FROM {}\n", model.replica.model),
        "parameters": parameters(text),
        "template": text.template.as_ref().map(|template| template.source()).unwrap_or_default(),
        "details": details(&text.spec),
        "model_info": info(&text.spec, model.replica.context),
        "capabilities": capabilities(text),
        "modified_at": rfc3339(unix_seconds()),
    })))
}

/// Lists the model's own defaults, one on each line.
fn parameters(text: &ModelText) -> String {
    let line = |(parameter, defaults): (&NumberParameter, &NumberDefaults)| {
        let number = (defaults.recommended)(&text.defaults)?;
        Some(format!("{} {number}", parameter.name_in_llama_cpp()))
    };
    NumberParameter::with_recommendations().filter_map(line).collect::<Vec<_>>().join("\n")
}

/// Returns the known parts of a model's shape, under the names of a GGUF.
fn info(spec: &ModelSpec, context: u32) -> Value {
    let family = spec.family.architecture();
    let own = [
        ("context_length", context),
        ("embedding_length", spec.hidden),
        ("block_count", spec.n_layers),
        ("feed_forward_length", spec.inner),
        ("attention.head_count", spec.n_heads),
        ("attention.head_count_kv", spec.n_kv_heads),
        ("vocab_size", spec.vocab),
    ];
    let mut info: Map<String, Value> =
        own.into_iter().map(|(name, n)| (format!("{family}.{name}"), n.into())).collect();
    info.insert("general.architecture".into(), family.into());
    info.insert("general.basename".into(), spec.name.as_str().into());
    info.insert("general.parameter_count".into(), spec.n_parameters().into());
    Value::Object(info)
}

fn capabilities(text: &ModelText) -> Vec<&'static str> {
    let has_tools = text.template.as_ref().is_some_and(|template| template.uses_tools()) && text.dialect.has_calls();
    let is_classifier = text.spec.pooling.is_classifier();
    let generates = text.spec.encoder.is_none() && !is_classifier;
    let own = [
        (generates, "completion"),
        (!generates && !is_classifier, "embedding"),
        (has_tools, "tools"),
        (infill::supports_infill(text), "insert"),
        (text.dialect.has_thoughts(), "thinking"),
    ];
    own.into_iter().filter_map(|(is_own, name)| is_own.then_some(name)).collect()
}

/// Reports that a model is present, or how an operator adds it. No client can make this server download a model.
pub async fn pull(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Response, HttpError> {
    let _visit = front.visit(page.tenant).map_err(to_http_error)?;
    let mut fields = page.fields;
    let read =
        fields.string("model").and_then(|model| Ok((model.or(fields.string("name")?), fields.boolean("stream")?)));
    let (requested, stream) = read.map_err(to_http_error)?;
    if requested.as_ref().is_none_or(String::is_empty) {
        return Err(to_http_error(Refusal::invalid("model", "is missing")));
    }
    let name = served_name(&front, requested);
    front.text(&name).map_err(|refusal| missing(to_http_error(refusal)))?;
    let status = json!({ "status": "success" });
    match stream.unwrap_or(true) {
        true => Ok(([("content-type", "application/x-ndjson")], format!("{status}\n")).into_response()),
        false => Ok(Json(status).into_response()),
    }
}

fn missing(error: HttpError) -> HttpError {
    let hint = "clients cannot download models: run `lockstep pull` and `lockstep serve` on the server";
    HttpError::bad_request(error.status(), format!("{}; {hint}", error.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_parameters_are_rounded() {
        let check = |n, text: &str| assert_eq!(format_count(n), text);
        check(12, "12");
        check(12_345, "12.3K");
        check(134_515_008, "134.5M");
        check(7_250_000_000, "7.2B");
        check(1_000_000_000_000, "1.0T");
    }
}
