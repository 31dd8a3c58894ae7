//! `/v1/conversations`: items that a client stores here, and that responses continue and extend. Has no knowledge of
//! generation.

use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::page::{ApiRequest, reserve_body_bytes};
use crate::http::responses::items;
use crate::http::responses::lists::{PageQuery, list};
use crate::http::responses::stored::{StoredKind, TextWithPermit, json_response};
use axum::Json;
use axum::extract::{Extension, Path, RawQuery, State};
use axum::response::Response;
use bytes::Bytes;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::BodyPermit;
use router::front::stored::{ChangeError, ConversationTurn, ReadConversation, StoredItem};
use router::refusal::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;
use types::TenantId;

const PREFIX: &str = "conv_";
/// The parameter in these pages' paths.
const OF_PAGE: &str = "conversation_id";
/// The field of a response.
const FIELD: &str = "conversation";
pub const CONVERSATION: StoredKind = StoredKind {
    prefix: PREFIX,
    deleted: "conversation.deleted",
    unknown: |id| HttpError::no_such_conversation(OF_PAGE, id),
};

fn find_conversation(front: &Frontend, tenant: TenantId, id: &str, param: &str) -> Result<ReadConversation, HttpError> {
    front.responses.conversation(tenant, id).ok_or_else(|| HttpError::no_such_conversation(param, id))
}

fn conversation_json(id: &str, read: &ReadConversation) -> Json<Value> {
    let metadata: Value = serde_json::from_str(&read.metadata).unwrap_or_default();
    Json(json!({ "id": id, "object": "conversation", "created_at": read.created, "metadata": metadata }))
}

fn to_change_error(front: &Frontend, id: &str, why: ChangeError) -> HttpError {
    match why {
        ChangeError::Unknown => HttpError::no_such_conversation(OF_PAGE, id),
        ChangeError::NoRoom => no_room(front),
    }
}

/// Stored items may be removed soon, so a retry may succeed. If nothing may be stored, a retry cannot succeed.
fn no_room(front: &Frontend) -> HttpError {
    match front.config.limits.stored.responses_max {
        0 => HttpError::not_supported("this server stores no conversations (`--stored-responses 0`)"),
        _ => Refusal::Full { retry_after: front.config.timeouts.retry_after }.into(),
    }
}

pub async fn create(State(front): State<Arc<Frontend>>, request: ApiRequest) -> Result<Json<Value>, HttpError> {
    let ApiRequest { mut fields, tenant, body: _room, .. } = request;
    let metadata = items::metadata(&mut fields)?.unwrap_or_else(|| "{}".into());
    let items = items::read(&mut fields)?.unwrap_or_default();
    let items = items::stored_items(&front, items.iter()).into_iter().map(Arc::new).collect();
    let read = ReadConversation { created: unix_seconds(), metadata: metadata.into(), items };
    let id = format!("{PREFIX}{}", front.ids.next_kept());
    match front.responses.create_conversation(tenant, id.clone(), read.clone()) {
        true => Ok(conversation_json(&id, &read)),
        false => Err(no_room(&front)),
    }
}

pub async fn get_conversation(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
) -> Result<Json<Value>, HttpError> {
    Ok(conversation_json(&id, &find_conversation(&front, tenant, &id, OF_PAGE)?))
}

pub async fn update(
    State(front): State<Arc<Frontend>>,
    Path(id): Path<String>,
    request: ApiRequest,
) -> Result<Json<Value>, HttpError> {
    let ApiRequest { mut fields, tenant, .. } = request;
    find_conversation(&front, tenant, &id, OF_PAGE)?;
    let metadata = items::metadata(&mut fields)?.ok_or_else(|| Refusal::invalid("metadata", "is missing"))?;
    let changed = front.responses.set_metadata(tenant, &id, metadata.into());
    changed.map_err(|why| to_change_error(&front, &id, why))?;
    Ok(conversation_json(&id, &find_conversation(&front, tenant, &id, OF_PAGE)?))
}

pub async fn add_items(
    State(front): State<Arc<Frontend>>,
    Path(id): Path<String>,
    request: ApiRequest,
) -> Result<Json<Value>, HttpError> {
    let ApiRequest { mut fields, tenant, body: _room, .. } = request;
    let before = find_conversation(&front, tenant, &id, OF_PAGE)?;
    let items = items::read(&mut fields)?.ok_or_else(|| Refusal::invalid("items", "is missing"))?;
    let items = items::stored_items(&front, items.iter());
    let n_bytes: usize = items.iter().map(|item| item.text.len()).sum();
    check_size(&front, before.n_bytes() + n_bytes, "items")?;
    let shown: Vec<Value> = items.iter().map(value).collect();
    front.responses.append(tenant, &id, items).map_err(|why| to_change_error(&front, &id, why))?;
    Ok(Json(list(&shown, false)))
}

/// A request that continues a conversation must not exceed the limit of bodies.
fn check_size(front: &Frontend, n_bytes: usize, field: &'static str) -> Result<(), Refusal> {
    match front.config.limits.body_bytes_max {
        max if n_bytes > max => {
            let why = format!("the conversation would exceed the limit of {max} bytes");
            Err(Refusal::invalid(field, why))
        }
        _ => Ok(()),
    }
}

fn value(item: &StoredItem) -> Value {
    serde_json::from_str(&item.text).unwrap_or_default()
}

pub async fn items(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, HttpError> {
    let read = find_conversation(&front, tenant, &id, OF_PAGE)?;
    let page_query = PageQuery::read(query.as_deref())?;
    let n_bytes = read.n_bytes();
    let mut room = BodyPermit::None;
    reserve_body_bytes(&front, &mut room, n_bytes)?;
    let page =
        move || page_query.select(read.items.iter().map(|item| value(item)).collect()).map(|page| page.to_string());
    let text: Result<String, Refusal> = front.texts.off_runtime(n_bytes, page).await?;
    Ok(json_response(Bytes::from_owner(TextWithPermit::new(text?, room))))
}

pub async fn item(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path((id, item_id)): Path<(String, String)>,
) -> Result<Json<Value>, HttpError> {
    let read = find_conversation(&front, tenant, &id, OF_PAGE)?;
    let item = read.items.iter().find(|item| item.id == item_id);
    item.map(|item| Json(value(item))).ok_or_else(|| HttpError::no_such_item(&item_id, &id))
}

pub async fn forget_item(
    State(front): State<Arc<Frontend>>,
    Extension(tenant): Extension<TenantId>,
    Path((id, item_id)): Path<(String, String)>,
) -> Result<Json<Value>, HttpError> {
    match front.responses.forget_item(tenant, &id, &item_id) {
        Some(true) => Ok(conversation_json(&id, &find_conversation(&front, tenant, &id, OF_PAGE)?)),
        Some(false) => Err(HttpError::no_such_item(&item_id, &id)),
        None => Err(HttpError::no_such_conversation(OF_PAGE, &id)),
    }
}

/// Returns the conversation that a request names.
pub fn take_conversation_id(fields: &mut Fields) -> Result<Option<String>, Refusal> {
    let id = match fields.take(FIELD) {
        None => None,
        Some(Value::String(id)) => Some(id),
        Some(Value::Object(of)) if of.is_empty() => None,
        Some(Value::Object(of)) => match of.get("id").and_then(Value::as_str) {
            Some(id) => Some(id.to_owned()),
            None => return Err(Refusal::invalid(FIELD, "must have an `id`, which is a string")),
        },
        Some(_) => return Err(Refusal::invalid(FIELD, "must be an id, or an object that has one")),
    };
    Ok(id.filter(|id| !id.is_empty()))
}

/// Returns the items of a conversation. They take room beside the bodies that are being read, as if the client had sent
/// them.
pub async fn items_of(front: &Frontend, page: &mut ApiRequest, id: &str) -> Result<Vec<Value>, HttpError> {
    let read = find_conversation(front, page.tenant, id, FIELD)?;
    let n_bytes = read.n_bytes();
    check_size(front, n_bytes, FIELD)?;
    page.reserve_body_bytes(front, n_bytes)?;
    Ok(front.texts.off_runtime(n_bytes, move || read.items.iter().map(|item| value(item)).collect()).await?)
}

/// Takes the turn in the conversation: only one response at a time may continue it.
pub fn take_turn(front: &Frontend, tenant: TenantId, id: &str) -> Result<ConversationTurn, HttpError> {
    let turn = front.responses.take_turn(tenant, id).ok_or_else(|| HttpError::no_such_conversation(FIELD, id))?;
    turn.ok_or_else(HttpError::conversation_locked)
}
