//! `/requests` and `/requests/{id}`: a tenant's own requests, or all of them for operators. They contain no text, no
//! token and no key.

use crate::faces::http::door::Viewer;
use crate::faces::http::error::HttpError;
use crate::front::frontend::Frontend;
use crate::history::{Timeline, TimelineEvent, What};
use axum::Json;
use axum::extract::{Extension, Path, State};
use http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Limits of the whole list, and of the list that a stream repeats.
const LISTED_MAX: usize = 10_000;
pub const WATCHED_MAX: usize = 500;

pub async fn list(State(front): State<Arc<Frontend>>, Extension(viewer): Extension<Viewer>) -> Json<Value> {
    Json(listed(&front, viewer, LISTED_MAX))
}

pub async fn one(
    State(front): State<Arc<Frontend>>,
    Path(id): Path<String>,
    Extension(viewer): Extension<Viewer>,
) -> Result<Json<Value>, HttpError> {
    let none = || HttpError::bad_request(StatusCode::NOT_FOUND, "no request of this name is remembered here");
    front.history.requests.one(viewer.sees_of(), &id).map(|timeline| Json(whole(&timeline))).ok_or_else(none)
}

pub fn listed(front: &Frontend, viewer: Viewer, n_max: usize) -> Value {
    let mut requests = Vec::new();
    front.history.requests.each(viewer.sees_of(), n_max, |timeline| requests.push(row(timeline)));
    // Tenants do not see how many requests of others wait.
    let counts = viewer.sees_of().is_none().then(|| front.history.requests.counts());
    json!({
        "waiting": counts.map(|(waiting, _)| waiting),
        "running": counts.map(|(_, running)| running),
        "requests": requests,
    })
}

fn millis(time: Duration) -> f64 {
    (time.as_micros() as f64 / 100.0).round() / 10.0
}

fn row(timeline: &Timeline) -> Value {
    json!({
        "number": timeline.number,
        "id": Some(&timeline.id).filter(|id| !id.is_empty()),
        "state": timeline.state(),
        "over": timeline.ended.is_some(),
        "arrived_ms": timeline.arrival.unix_millis,
        "api": timeline.arrival.face,
        "tenant": &*timeline.arrival.label,
        "model": timeline.model,
        "replica": timeline.replica,
        "prompt": timeline.n_prompt,
        "computed": (timeline.first_token.is_none() && timeline.n_computed > 0).then_some(timeline.n_computed),
        "cached": timeline.n_cached,
        "output": timeline.n_output,
        "first_token_ms": timeline.first_token.map(millis),
        "took_ms": millis(timeline.ended.map_or_else(|| timeline.arrived.elapsed(), |(_, took)| took)),
    })
}

fn whole(timeline: &Timeline) -> Value {
    let mut whole = row(timeline);
    whole["choices"] = timeline.n_choices.into();
    whole["events"] = timeline.events.iter().map(event).collect();
    whole["events_unkept"] = timeline.n_unkept.into();
    whole["tokens"] = json!({ "width_ms": millis(timeline.tokens.width), "counts": timeline.tokens.counts });
    whole
}

fn event(event: &TimelineEvent) -> Value {
    let mut told = json!({ "at_ms": millis(event.at), "choice": event.choice, "what": name(&event.what) });
    match &event.what {
        What::Placed { replica } => told["replica"] = (&**replica).into(),
        What::Started { n_cached } => told["cached"] = (*n_cached).into(),
        What::Chunk { start, end } => (told["start"], told["end"]) = ((*start).into(), (*end).into()),
        What::FirstToken | What::Preempted | What::Lost | What::Moved => {}
    }
    told
}

fn name(what: &What) -> &'static str {
    match what {
        What::Placed { .. } => "placed",
        What::Started { .. } => "started",
        What::Chunk { .. } => "chunk",
        What::FirstToken => "first token",
        What::Preempted => "preempted",
        What::Lost => "lost",
        What::Moved => "moved",
    }
}
