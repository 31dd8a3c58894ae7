//! `/openapi.json`: every page with its method, its key and its purpose, from the rows that the routes are made of. Has
//! no knowledge of any page's fields: bodies are objects, and `docs/apis.md` describes their fields.

use crate::http::api_table;
use crate::http::table::{KeyRequirement, Route};
use axum::Json;
use axum::extract::State;
use http::Method;
use router::front::frontend::Frontend;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub async fn document(State(front): State<Arc<Frontend>>) -> Json<Value> {
    let mut paths = Map::new();
    for api in api_table(&front.config) {
        for route in &api.routes {
            let page = paths.entry(openapi_path(route.path)).or_insert_with(|| json!({}));
            page[route.method.as_str().to_lowercase()] = operation(api.name, api.keys, route);
        }
    }
    Json(json!({
        "openapi": "3.1.0",
        "info": { "title": "Lockstep", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": { "securitySchemes": {
            "bearer": { "type": "http", "scheme": "bearer" },
            "bare": { "type": "apiKey", "in": "header", "name": "x-api-key" },
        } },
    }))
}

fn operation(api: &str, keys: KeyRequirement, route: &Route) -> Value {
    let is_post = route.method == Method::POST;
    let mut responses = json!({ "200": { "description": "The answer" } });
    if keys != KeyRequirement::NotRequired {
        responses["401"] = json!({ "description": "The API key is missing or unknown" });
    }
    if is_post {
        responses["400"] = json!({ "description": "The request is not valid; the message names the field" });
    }
    let mut operation = json!({ "tags": [api], "summary": route.about, "responses": responses });
    if is_post {
        let object = json!({ "schema": { "type": "object" } });
        operation["requestBody"] = json!({ "content": { "application/json": object } });
    }
    let parameter = |name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } });
    let parameters: Vec<Value> = parameters(route.path).map(parameter).collect();
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    // An empty requirement beside others means that a server may require no key at all.
    operation["security"] = match keys {
        KeyRequirement::NotRequired => json!([]),
        KeyRequirement::Bearer | KeyRequirement::Operator => json!([{ "bearer": [] }, {}]),
        KeyRequirement::BearerOrBare => json!([{ "bearer": [] }, { "bare": [] }, {}]),
    };
    operation
}

/// Writes a path for OpenAPI, which has no syntax for the rest of a path.
fn openapi_path(path: &str) -> String {
    path.replace("{*", "{")
}

fn parameters(path: &str) -> impl Iterator<Item = &str> {
    path.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0.trim_start_matches('*')))
}
