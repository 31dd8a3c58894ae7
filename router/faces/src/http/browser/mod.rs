//! For browsers: the page's files, one resource for each noun that the page shows, and one stream of changes. Nothing
//! is sampled while no viewer is connected. Has no knowledge of any request's text.

mod events;
mod files;
mod load;
mod requests;

pub use files::page_routes;

use crate::http::door::Viewer;
use crate::http::error::HttpError;
use crate::http::table::{Route, get};
use axum::Json;
use axum::extract::{Extension, State};
use http::StatusCode;
use router::front::frontend::Frontend;
use router::limits::keys::Role;
use serde_json::{Value, json};
use std::sync::Arc;

/// Pages that show each key its own requests.
pub fn tenant_routes() -> Vec<Route> {
    vec![
        get("/viewer", "what the page may show with this key", viewer),
        get("/requests", "running requests and the last finished ones", requests::list),
        get("/requests/{id}", "the timeline of a request, by its number or its answer's id", requests::get_request),
        get("/events", "a stream of changes to the topics in `?of=`", events::watch),
    ]
}

/// Pages for operators.
pub fn operator_routes() -> Vec<Route> {
    vec![
        get("/load/hour", "the last hour's load in bins", load::hour),
        get("/models/machine", "the models on this machine, and those that it could fetch", machine_models),
    ]
}

/// Reads files, so it does not run on the runtime's own threads.
async fn machine_models(State(front): State<Arc<Frontend>>) -> Result<Json<Value>, HttpError> {
    let none = || HttpError::bad_request(StatusCode::NOT_FOUND, "this server's replicas are on other machines");
    let list = front.config.machine_models.clone().ok_or_else(none)?;
    let listed = front.texts.on_thread(move || list()).await?;
    listed.map(Json).map_err(|why| HttpError::bad_request(StatusCode::NOT_FOUND, &why))
}

async fn viewer(State(front): State<Arc<Frontend>>, Extension(viewer): Extension<Viewer>) -> Json<Value> {
    let sees_all = viewer.role == Role::Operator;
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "sees": {
            "cluster": viewer.sees_cluster,
            "requests": if sees_all { "all" } else { "own" },
        },
        "asks_for_keys": !front.config.keys.is_open(),
        // If operators have a port of their own, no page for model requests is on it.
        "operators_apart": front.config.operators.is_some(),
    }))
}
