//! The served models, the router's readiness, and the ranks that serve. Has no knowledge of requests.

use crate::http::error::HttpError;
use crate::http::messages::models as anthropic;
use axum::Json;
use axum::extract::{Path, RawQuery, State};
use http::HeaderMap;
use router::front::frontend::Frontend;
use router::front::frontend::unix_seconds;
use router::link::view::ReplicaInfo;
use router::refusal::Refusal;
use router::replicas::models::table::VersionSelector;
use router::replicas::topology;
use serde_json::{Value, json};
use std::sync::Arc;

/// Lists models in OpenAI's format, or in Anthropic's for its clients.
pub async fn list(State(front): State<Arc<Frontend>>, headers: HeaderMap) -> Json<Value> {
    let listed = front.models.listed(&front.replicas);
    if anthropic::is_anthropic(&headers) {
        return Json(anthropic::list(listed.iter().map(|(name, of)| (name.as_str(), of.replica.context))));
    }
    let models: Vec<Value> = listed.iter().map(|(name, of)| model(name, &of.replica)).collect();
    Json(json!({ "object": "list", "data": models }))
}

/// Lists models in llama.cpp's format: a model once, with all of its names and its operator's description.
pub async fn list_with_aliases(State(front): State<Arc<Frontend>>) -> Json<Value> {
    let mut models: Vec<Value> = Vec::new();
    for (name, of) in front.models.listed(&front.replicas) {
        let same = models.iter_mut().find(|listed| listed["id"] == of.name.as_str());
        match same.and_then(|listed| listed["aliases"].as_array_mut()) {
            Some(aliases) => aliases.push(name.into()),
            None => {
                let mut listed = model(&name, &of.replica);
                (listed["aliases"], listed["tags"]) = (json!([name]), front.config.tags.as_slice().into());
                models.push(listed);
            }
        }
    }
    Json(json!({ "object": "list", "data": models }))
}

pub async fn get_model(
    State(front): State<Arc<Frontend>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, HttpError> {
    let replica = front.model(&id, VersionSelector::Weight)?.replica;
    Ok(Json(match anthropic::is_anthropic(&headers) {
        true => anthropic::model(&id, replica.context),
        false => model(&id, &replica),
    }))
}

fn model(name: &str, replica: &ReplicaInfo) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": unix_seconds(),
        "owned_by": "lockstep",
        "root": replica.model,
        "max_model_len": replica.context,
    })
}

/// Healthy if a replica can serve. Unlike `ready` it stays so while this router drains.
pub async fn health(State(front): State<Arc<Frontend>>) -> Result<&'static str, HttpError> {
    if front.replicas.is_any_ready() { Ok("healthy\n") } else { Err(front.replicas.refusal().into()) }
}

/// Ready if a request that is sent now is served.
pub async fn ready(State(front): State<Arc<Frontend>>) -> Result<&'static str, HttpError> {
    let retry_after = front.config.timeouts.retry_after;
    if front.admission.is_draining() {
        return Err(Refusal::Draining { retry_after }.into());
    }
    if front.replicas.is_any_ready() { Ok("ready\n") } else { Err(front.replicas.refusal().into()) }
}

/// Returns the page of the cluster that `?from=` names, or the first.
pub async fn cluster(State(front): State<Arc<Frontend>>, RawQuery(query): RawQuery) -> Result<Json<Value>, HttpError> {
    let mut fields = query.iter().flat_map(|query| query.split('&'));
    let from = fields.find_map(|field| field.strip_prefix("from=")).unwrap_or("0");
    let from = from.parse().map_err(|_| Refusal::invalid("from", "must be the `next` of the previous page"))?;
    Ok(Json(topology::json(&front.topology(from))))
}
