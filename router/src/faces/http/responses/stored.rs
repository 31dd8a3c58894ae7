//! Responses that were stored: kept when they end, read, forgotten, and gone on with. Knows no generation.

use crate::faces::http::error::HttpError;
use crate::faces::http::page::{Page, take_room};
use crate::front::ask::BodyPermit;
use crate::front::frontend::Frontend;
use crate::front::stored::{RoomPermit, StoredResponse};
use crate::refusal::Refusal;
use axum::extract::{Extension, Path, RawQuery, State};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use types::TenantId;

/// How many items a list shows, unless it is asked for others.
const LISTED: usize = 20;
const LISTED_MAX: usize = 100;

/// What is kept of a request until its response has ended.
pub struct ToStore {
    front: Arc<Frontend>,
    tenant: TenantId,
    items: String,
    n_own: usize,
    room: RoomPermit,
}

impl ToStore {
    /// None if there is no room: then the response is not stored, and says so. Nor is a conversation that could not be
    /// sent in one body: whoever goes on with it would have the router read more than anybody may send.
    pub fn of(front: &Arc<Frontend>, tenant: TenantId, items: &[Value], n_own: usize) -> Option<ToStore> {
        let items = serde_json::to_string(items).ok()?;
        if items.len() > front.config.limits.body_bytes_max {
            return None;
        }
        let room = front.responses.reserve(tenant, items.len())?;
        Some(ToStore { front: front.clone(), tenant, items, n_own, room })
    }

    /// Keeps the response under its id.
    pub fn keep(self, reply: &Value) {
        let ToStore { front, tenant, items, n_own, room } = self;
        let id = reply["id"].as_str().unwrap_or_default().to_owned();
        front.responses.keep(tenant, id, (reply.to_string(), items, n_own), room);
    }
}

/// All items of a response that was stored, those that it answered and its own. None of no response. They take room
/// beside the bodies that are being read, as if the client had sent them.
pub async fn items_before(front: &Frontend, page: &mut Page, id: Option<&str>) -> Result<Vec<Value>, HttpError> {
    let Some(id) = id else { return Ok(Vec::new()) };
    let stored = found(front, page.tenant, id, "previous_response_id")?;
    let n_bytes = stored.items.len() + stored.reply.len();
    page.take_room(front, n_bytes)?;
    let read = move || -> Option<Vec<Value>> {
        let mut items: Vec<Value> = serde_json::from_str(&stored.items).ok()?;
        let mut reply: Value = serde_json::from_str(&stored.reply).ok()?;
        items.append(reply["output"].as_array_mut()?);
        Some(items)
    };
    let items = front.off_runtime(n_bytes, read).await?;
    items.ok_or_else(|| Refusal::failed("a stored response cannot be read").into())
}

fn found(front: &Frontend, tenant: TenantId, id: &str, param: &str) -> Result<Arc<StoredResponse>, HttpError> {
    front.responses.get(tenant, id).ok_or_else(|| HttpError::no_such_response(param, id))
}

pub async fn one(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, HttpError> {
    let stored = found(&front, tenant, &id, "response_id")?;
    if asked(query.as_deref(), "stream").is_some_and(|value| value != "false") {
        return Err(Refusal::invalid("stream", "a response that has ended is not told again in events").into());
    }
    // The response's own memory, however slowly it is read and whether or not it is forgotten meanwhile.
    Ok(sent(Bytes::from_owner(StoredReply(stored))))
}

/// A stored reply that is being sent: its room is free when it has been.
struct StoredReply(Arc<StoredResponse>);

impl AsRef<[u8]> for StoredReply {
    fn as_ref(&self) -> &[u8] {
        self.0.reply.as_bytes()
    }
}

/// A page that was made for one client, and its room among the bodies that are being read.
struct HeldPage {
    text: String,
    _room: BodyPermit,
}

impl AsRef<[u8]> for HeldPage {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

fn sent(body: Bytes) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

pub async fn forget(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
) -> Result<Json<Value>, HttpError> {
    match front.responses.forget(tenant, &id) {
        true => Ok(Json(json!({ "id": id, "object": "response", "deleted": true }))),
        false => Err(HttpError::no_such_response("response_id", &id)),
    }
}

/// Nothing runs in the background, so there is nothing to cancel.
pub async fn cancel(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
) -> Result<Json<Value>, HttpError> {
    found(&front, tenant, &id, "response_id")?;
    let why = "Cannot cancel a synchronous response: it has ended, and nothing runs in the background. To end one that \
               runs, close its connection";
    Err(Refusal::invalid("response_id", why).into())
}

pub async fn compact() -> HttpError {
    HttpError::unserved_page("a conversation is not compacted here: send as much of it as there is room for")
}

/// The items that a response answered, without those of the responses before it.
pub async fn input_items(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, HttpError> {
    let stored = found(&front, tenant, &id, "response_id")?;
    let query = query.as_deref();
    let limit = match asked(query, "limit").map(str::parse) {
        None => LISTED,
        Some(Ok(n @ 1..=LISTED_MAX)) => n,
        Some(_) => return Err(Refusal::invalid("limit", format!("must be 1 to {LISTED_MAX}")).into()),
    };
    let is_ascending = match asked(query, "order") {
        None | Some("desc") => false,
        Some("asc") => true,
        Some(_) => return Err(Refusal::invalid("order", "must be asc or desc").into()),
    };
    let after = asked(query, "after").map(str::to_owned);
    let n_bytes = stored.items.len();
    let mut room = BodyPermit::None;
    take_room(&front, &mut room, n_bytes)?;
    let list = move || Ok(listed(&stored, &id, is_ascending, after.as_deref(), limit)?.to_string());
    let text: Result<String, Refusal> = front.off_runtime(n_bytes, list).await?;
    Ok(sent(Bytes::from_owner(HeldPage { text: text?, _room: room })))
}

fn listed(
    stored: &StoredResponse,
    id: &str,
    is_ascending: bool,
    after: Option<&str>,
    limit: usize,
) -> Result<Value, Refusal> {
    let all: Vec<Value> = serde_json::from_str(&stored.items).unwrap_or_default();
    let own = &all[all.len().saturating_sub(stored.n_own)..];
    let mut items: Vec<Value> = own.iter().enumerate().map(|(i, item)| shown(i, item, id)).collect();
    if !is_ascending {
        items.reverse();
    }
    let begin = match after {
        None => 0,
        Some(after) => match items.iter().position(|item| item["id"] == after) {
            Some(at) => at + 1,
            None => return Err(Refusal::invalid("after", "is the id of none of the items")),
        },
    };
    let page = &items[begin..items.len().min(begin + limit)];
    Ok(json!({
        "object": "list",
        "data": page,
        "first_id": page.first().map(|item| &item["id"]),
        "last_id": page.last().map(|item| &item["id"]),
        "has_more": begin + page.len() < items.len(),
    }))
}

/// An item with an id: made of its response's, where the client gave none. Text is in parts, as clients expect it.
fn shown(i: usize, item: &Value, response: &str) -> Value {
    let kind = item["type"].as_str().unwrap_or("message");
    let id = format!("{}_in{i}", response.replacen("resp", "item", 1));
    let mut shown = Map::from_iter([("id".to_owned(), id.into()), ("type".to_owned(), kind.into())]);
    let given = item.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    shown.extend(given.map(|(name, value)| (name.clone(), value.clone())));
    if let Some(Value::String(text)) = shown.get("content") {
        let kind = if item["role"] == "assistant" { "output_text" } else { "input_text" };
        let mut part = json!({ "type": kind, "text": text });
        if kind == "output_text" {
            part["annotations"] = json!([]);
        }
        shown.insert("content".to_owned(), json!([part]));
    }
    shown.entry("status").or_insert_with(|| "completed".into());
    Value::Object(shown)
}

/// A parameter of the address.
fn asked<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    let mut all = query?.split('&').filter_map(|one| one.split_once('='));
    all.find(|(of, _)| *of == name).map(|(_, value)| value)
}
