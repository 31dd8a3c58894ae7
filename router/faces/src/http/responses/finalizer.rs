//! Actions after a response: its items are added to its conversation, and it is stored. Has no knowledge of generation.

use crate::http::responses::items::stored_items;
use router::front::frontend::Frontend;
use router::front::stored::{BackgroundRun, ConversationTurn, RoomPermit, StoredItem, StoredResponse};
use serde_json::{Value, json};
use std::sync::Arc;
use types::TenantId;

/// Both actions, each if requested.
#[derive(Default)]
pub struct ResponseFinalizer {
    /// None if it is not to be stored, or there is no room.
    pub to_store: Option<PendingStorage>,
    pub to_conversation: Option<ContinuedConversation>,
}

impl ResponseFinalizer {
    /// Runs the actions for a finished response, whose reply this is.
    pub fn finish(self, reply: &mut Value) {
        self.to_conversation.into_iter().for_each(|to| to.append(reply));
        self.to_store.into_iter().for_each(|to| to.store(reply));
    }
}

/// The parts of a request that are held until its response has ended.
pub struct PendingStorage {
    front: Arc<Frontend>,
    tenant: TenantId,
    items: Arc<str>,
    n_own: usize,
    room: RoomPermit,
}

impl PendingStorage {
    /// None if there is no room: then the response is not stored, and its reply reports that. A conversation that does
    /// not fit one body is not stored either: a request that continues it would exceed the limit of bodies.
    pub fn of(front: &Arc<Frontend>, tenant: TenantId, items: &[Value], n_own: usize) -> Option<PendingStorage> {
        let items = serde_json::to_string(items).ok()?;
        if items.len() > front.config.limits.body_bytes_max {
            return None;
        }
        let room = front.responses.reserve(tenant, items.len())?;
        Some(PendingStorage { front: front.clone(), tenant, items: items.into(), n_own, room })
    }

    /// Stores the response under its id.
    fn store(self, reply: &Value) {
        let PendingStorage { front, tenant, items, n_own, room } = self;
        let id = reply["id"].as_str().unwrap_or_default().to_owned();
        let stored = StoredResponse::new(reply.to_string().into(), items, n_own, None);
        front.responses.keep(tenant, id, stored, room);
    }

    /// Makes the reply of a response visible that has begun and runs without its client. None without room for it.
    pub fn show_running(mut self, reply: &Value, run: Arc<BackgroundRun>) -> Option<RunningResponse> {
        let id = reply["id"].as_str().unwrap_or_default().to_owned();
        let text = reply.to_string();
        let PendingStorage { front, tenant, items, n_own, room } = &mut self;
        let is_room = front.responses.widen(*tenant, room, text.len() + id.len() + END_BYTES);
        let stored = StoredResponse::new(text.into(), items.clone(), *n_own, Some(run));
        let is_begun = is_room && front.responses.begin(*tenant, &id, stored);
        is_begun.then(|| RunningResponse { id, events_left: 0, of: self })
    }
}

/// The bytes by which a reply may grow when it fails.
const END_BYTES: usize = 1024;
/// Room for events is reserved in steps of this size.
const EVENTS_BYTES: usize = 16 << 10;

/// A visible response that is not finished.
pub struct RunningResponse {
    id: String,
    /// Reserved bytes that no event uses yet.
    events_left: usize,
    of: PendingStorage,
}

impl RunningResponse {
    /// Reserves room for events. False if there is none.
    pub fn try_reserve(&mut self, n_bytes: usize) -> bool {
        let PendingStorage { front, tenant, room, .. } = &mut self.of;
        if self.events_left < n_bytes {
            let n_more = n_bytes.max(EVENTS_BYTES);
            if !front.responses.widen(*tenant, room, n_more) {
                return false;
            }
            self.events_left += n_more;
        }
        self.events_left -= n_bytes;
        true
    }

    pub fn update_reply(&self, reply: &Value) {
        self.of.front.responses.show(self.of.tenant, &self.id, reply.to_string().into());
    }

    /// Stores the reply, or `shorter` if there is no room for it; returns false then.
    pub fn finish(self, reply: &Value, shorter: &Value) -> bool {
        let PendingStorage { front, tenant, mut room, .. } = self.of;
        let text = reply.to_string();
        let is_room = front.responses.widen(tenant, &mut room, text.len());
        let text = if is_room { text } else { shorter.to_string() };
        front.responses.finish(tenant, &self.id, text.into(), room);
        is_room
    }
}

/// A conversation that the response continues.
pub struct ContinuedConversation {
    pub front: Arc<Frontend>,
    pub tenant: TenantId,
    pub id: String,
    /// The items of the request.
    pub own: Vec<Value>,
    pub turn: Option<ConversationTurn>,
}

impl ContinuedConversation {
    /// Adds the items of the request and of the answer. If that fails, the reply names no conversation.
    fn append(self, reply: &mut Value) {
        let ContinuedConversation { front, tenant, id, own, turn } = self;
        let is_answer = matches!(reply["status"].as_str(), Some("completed" | "incomplete"));
        let output = reply["output"].as_array().filter(|_| is_answer).cloned();
        let added = output.is_some_and(|values| {
            let items: Vec<StoredItem> = stored_items(&front, own.iter().chain(&values));
            front.responses.append(tenant, &id, items).is_ok()
        });
        if !added {
            reply["conversation"] = json!(null);
        }
        drop(turn);
    }
}
