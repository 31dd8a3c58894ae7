//! `/requests` and `/requests/{id}`: a tenant's own requests, or all of them for operators. They contain no text, no
//! token and no key.

use crate::http::door::Viewer;
use crate::http::error::HttpError;
use axum::Json;
use axum::extract::{Extension, Path, State};
use http::StatusCode;
use router::front::frontend::Frontend;
use router::history::{Timeline, TimelineEvent, TimelineEventKind};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Limits of the whole list, and of the list that a stream repeats.
const LISTED_MAX: usize = 10_000;
pub const WATCHED_MAX: usize = 500;

pub async fn list(State(front): State<Arc<Frontend>>, Extension(viewer): Extension<Viewer>) -> Json<Value> {
    Json(list_json(&front, viewer, LISTED_MAX))
}

pub async fn get_request(
    State(front): State<Arc<Frontend>>,
    Path(id): Path<String>,
    Extension(viewer): Extension<Viewer>,
) -> Result<Json<Value>, HttpError> {
    let none = || HttpError::bad_request(StatusCode::NOT_FOUND, "this router remembers no request with this id");
    front
        .history
        .requests
        .find(viewer.tenant_filter(), &id)
        .map(|timeline| Json(timeline_json(&timeline)))
        .ok_or_else(none)
}

pub fn list_json(front: &Frontend, viewer: Viewer, n_max: usize) -> Value {
    let mut requests = Vec::new();
    front.history.requests.for_each(viewer.tenant_filter(), n_max, |timeline| requests.push(summary_json(timeline)));
    // Tenants do not see how many requests of others wait.
    let counts = viewer.tenant_filter().is_none().then(|| front.history.requests.waiting_and_running());
    json!({
        "waiting": counts.map(|(waiting, _)| waiting),
        "running": counts.map(|(_, running)| running),
        "requests": requests,
    })
}

fn millis(time: Duration) -> f64 {
    (time.as_micros() as f64 / 100.0).round() / 10.0
}

fn summary_json(timeline: &Timeline) -> Value {
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
        "pauses": timeline.events.iter().filter(|event| is_pause(&event.kind)).count(),
        "first_token_ms": timeline.first_token.map(millis),
        "took_ms": millis(timeline.ended.map_or_else(|| timeline.arrived.elapsed(), |(_, took)| took)),
    })
}

/// Whether a request stops at this event, until it begins again.
fn is_pause(kind: &TimelineEventKind) -> bool {
    matches!(kind, TimelineEventKind::Preempted | TimelineEventKind::Lost | TimelineEventKind::Moved)
}

fn timeline_json(timeline: &Timeline) -> Value {
    let mut whole = summary_json(timeline);
    whole["choices"] = timeline.n_choices.into();
    whole["events"] = timeline.events.iter().map(event).collect();
    whole["events_unkept"] = timeline.n_unkept.into();
    whole["tokens"] = json!({ "width_ms": millis(timeline.tokens.width), "counts": timeline.tokens.counts });
    whole
}

fn event(event: &TimelineEvent) -> Value {
    let mut value = json!({ "at_ms": millis(event.at), "choice": event.choice, "what": kind_name(&event.kind) });
    match &event.kind {
        TimelineEventKind::Placed { replica } => value["replica"] = (&**replica).into(),
        TimelineEventKind::Started { n_cached } => value["cached"] = (*n_cached).into(),
        TimelineEventKind::Chunk { start, end } => (value["start"], value["end"]) = ((*start).into(), (*end).into()),
        TimelineEventKind::FirstToken
        | TimelineEventKind::Preempted
        | TimelineEventKind::Lost
        | TimelineEventKind::Moved => {}
    }
    value
}

fn kind_name(what: &TimelineEventKind) -> &'static str {
    match what {
        TimelineEventKind::Placed { .. } => "placed",
        TimelineEventKind::Started { .. } => "started",
        TimelineEventKind::Chunk { .. } => "chunk",
        TimelineEventKind::FirstToken => "first token",
        TimelineEventKind::Preempted => "preempted",
        TimelineEventKind::Lost => "lost",
        TimelineEventKind::Moved => "moved",
    }
}
