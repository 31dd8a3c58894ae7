//! Pages for stored responses: read, delete, cancel and continue. Has no knowledge of generation.

use crate::http::error::HttpError;
use crate::http::page::{ApiRequest, reserve_body_bytes};
use crate::http::responses::follow;
use crate::http::responses::lists::{PageQuery, listed_item, query_param};
use crate::http::responses::reply::PREFIX;
use axum::extract::{Extension, Path, RawQuery, State};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use router::front::frontend::Frontend;
use router::front::parsed_request::BodyPermit;
use router::front::stored::StoredResponse;
use router::refusal::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use types::TenantId;

/// How long a cancelled response may take to end.
const CANCEL_MAX: Duration = Duration::from_secs(5);

/// Returns all items of a stored response: those that it answered, and its own. Without an id there are none. They take
/// room beside the bodies that are being read, as if the client had sent them.
pub async fn items_before(front: &Frontend, page: &mut ApiRequest, id: Option<&str>) -> Result<Vec<Value>, HttpError> {
    let Some(id) = id else { return Ok(Vec::new()) };
    let stored = find_response(front, page.tenant, id, "previous_response_id")?;
    let n_bytes = stored.items.len() + stored.reply.len();
    page.reserve_body_bytes(front, n_bytes)?;
    let read = move || -> Option<Result<Vec<Value>, Refusal>> {
        let mut reply: Value = serde_json::from_str(&stored.reply).ok()?;
        // A background run ends after its reply is stored, so the reply alone has the status that clients have read.
        let status = reply["status"].as_str()?;
        if !matches!(status, "completed" | "incomplete") {
            let why = format!("is of a response that is {status}: it cannot be continued");
            return Some(Err(Refusal::invalid("previous_response_id", why)));
        }
        let mut items: Vec<Value> = serde_json::from_str(&stored.items).ok()?;
        items.append(reply["output"].as_array_mut()?);
        Some(Ok(items))
    };
    let items = front.texts.off_runtime(n_bytes, read).await?;
    Ok(items.ok_or_else(|| Refusal::failed("a stored response cannot be read"))??)
}

fn find_response(front: &Frontend, tenant: TenantId, id: &str, param: &str) -> Result<Arc<StoredResponse>, HttpError> {
    front.responses.get(tenant, id).ok_or_else(|| HttpError::no_such_response(param, id))
}

pub async fn get_response(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, HttpError> {
    let stored = find_response(&front, tenant, &id, "response_id")?;
    let query = query.as_deref();
    if query_param(query, "stream").is_some_and(|value| value != "false") {
        let after = query_param(query, "starting_after").map(str::parse::<u32>).transpose();
        let after = after.map_err(|_| Refusal::invalid("starting_after", "must be the number of an event"))?;
        return match &stored.run {
            Some(run) if run.is_streamed() => {
                Ok(follow::stream_events(&front, run, after.map_or(0, |n| n as usize + 1)))
            }
            _ => Err(Refusal::invalid("stream", NOT_STREAMED).into()),
        };
    }
    // Sends the stored response's own memory, however slowly the client reads and even if the response is deleted
    // meanwhile.
    Ok(json_response(Bytes::from_owner(StoredReply(stored))))
}

/// A stored reply that is being sent. Its room is freed afterwards.
struct StoredReply(Arc<StoredResponse>);

impl AsRef<[u8]> for StoredReply {
    fn as_ref(&self) -> &[u8] {
        self.0.reply.as_bytes()
    }
}

/// A page for one client, and its room among the bodies that are being read.
pub struct TextWithPermit {
    text: String,
    _room: BodyPermit,
}

impl TextWithPermit {
    pub fn new(text: String, room: BodyPermit) -> TextWithPermit {
        TextWithPermit { text, _room: room }
    }
}

impl AsRef<[u8]> for TextWithPermit {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

pub fn json_response(body: Bytes) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

/// A kind of stored object, and its message for an object that is gone or never existed.
pub struct StoredKind {
    pub prefix: &'static str,
    pub deleted: &'static str,
    pub unknown: fn(&str) -> HttpError,
}

pub const RESPONSE: StoredKind =
    StoredKind { prefix: PREFIX, deleted: "response", unknown: |id| HttpError::no_such_response("response_id", id) };

pub async fn delete_stored(
    kind: &'static StoredKind,
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
) -> Result<Json<Value>, HttpError> {
    match id.starts_with(kind.prefix) && front.responses.forget(tenant, &id) {
        true => Ok(Json(json!({ "id": id, "object": kind.deleted, "deleted": true }))),
        false => Err((kind.unknown)(&id)),
    }
}

/// Ends a background response. A repeated cancel returns the same reply.
pub async fn cancel(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
) -> Result<Response, HttpError> {
    let stored = find_response(&front, tenant, &id, "response_id")?;
    let Some(run) = &stored.run else { return Err(Refusal::invalid("response_id", SYNCHRONOUS).into()) };
    if run.end().is_none() {
        run.cancel();
        // The response's task receives the cancellation at once. The reply has its state after that.
        let _ = tokio::time::timeout(CANCEL_MAX, run.wait_until_over()).await;
    }
    match run.end() {
        Some("cancelled") => {
            Ok(json_response(Bytes::from_owner(StoredReply(find_response(&front, tenant, &id, "response_id")?))))
        }
        end => {
            let why = format!("Cannot cancel a response that is {}", end.unwrap_or("ending"));
            Err(Refusal::invalid("response_id", why).into())
        }
    }
}

const SYNCHRONOUS: &str = "Cannot cancel a synchronous response: it was created without `background`, and \
    has ended. To cancel a running one, close its connection";
const NOT_STREAMED: &str = "This response cannot be streamed: it was not created with `background` and `stream`";

pub async fn refuse_compact() -> HttpError {
    HttpError::unserved_page("this server does not compact conversations: send only the part that fits the context")
}

/// Lists the items that a response answered, without those of the responses before it.
pub async fn input_items(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, HttpError> {
    let stored = find_response(&front, tenant, &id, "response_id")?;
    let page_query = PageQuery::read(query.as_deref())?;
    let n_bytes = stored.items.len();
    let mut room = BodyPermit::None;
    reserve_body_bytes(&front, &mut room, n_bytes)?;
    let list = move || Ok(page_query.select(own_items(&stored, &id))?.to_string());
    let text: Result<String, Refusal> = front.texts.off_runtime(n_bytes, list).await?;
    Ok(json_response(Bytes::from_owner(TextWithPermit::new(text?, room))))
}

/// Returns a response's own input items, in the format of a list.
pub fn own_items(stored: &StoredResponse, id: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_str(&stored.items).unwrap_or_default();
    let own = &all[all.len().saturating_sub(stored.n_own)..];
    let made_id = |i| format!("{}_in{i}", id.replacen("resp", "item", 1));
    own.iter().enumerate().map(|(i, item)| listed_item(item, made_id(i))).collect()
}
