//! Keeps responses and conversations so that a later response can continue them: in memory, within a room of a fixed
//! size, for a time, and for the tenant that created them. Knows no JSON and no page. `room` counts bytes, `run` is a
//! response that is not over, and `conversation` is one.
//!
//! When the room is full, the tenant with the most bytes in it loses its oldest entry: a tenant cannot displace others
//! by sending more requests. Room is reserved for a request before its answer comes, so that the room limits requests
//! under way too. They count for their tenant like kept entries, and those of one tenant have half of the room at most.

mod conversation;
mod room;
mod run;

pub use conversation::{ConversationTurn, ReadConversation, StoredItem};
pub use room::RoomPermit;
pub use run::{BackgroundRun, RunLog};

use conversation::StoredConversation;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use types::TenantId;

/// The cost of a response or a conversation beside its texts, in bytes.
const ENTRY_BYTES: usize = 512;

/// How much is kept, and for how long. With a limit of no responses, nothing is kept.
#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    pub responses_max: usize,
    pub bytes_max: usize,
    pub age_max: Duration,
}

impl Default for StoreLimits {
    fn default() -> StoreLimits {
        StoreLimits { responses_max: 4096, bytes_max: 64 << 20, age_max: Duration::from_secs(3600) }
    }
}

/// A response as its client received it, and the items that it answered.
pub struct StoredResponse {
    /// The reply's JSON.
    pub reply: Arc<str>,
    /// The items that it answered, as a JSON list: those of the responses before it, then its own.
    pub items: Arc<str>,
    /// How many of them are its own.
    pub n_own: usize,
    /// Present for a response that runs, or ran, without its client.
    pub run: Option<Arc<BackgroundRun>>,
    /// None while it runs: the task that writes it has its room.
    room: Option<RoomPermit>,
}

impl StoredResponse {
    pub fn new(reply: Arc<str>, items: Arc<str>, n_own: usize, run: Option<Arc<BackgroundRun>>) -> StoredResponse {
        StoredResponse { reply, items, n_own, run, room: None }
    }
}

pub struct ResponseStore {
    limits: StoreLimits,
    n_bytes: Arc<AtomicUsize>,
    kept: Mutex<HashMap<TenantId, TenantStore>>,
}

/// What one tenant has.
#[derive(Default)]
struct TenantStore {
    responses: HashMap<String, Arc<StoredResponse>>,
    conversations: HashMap<String, StoredConversation>,
    /// Their ids, the least recently used first.
    order: VecDeque<(Instant, String)>,
    /// Responses that are not over. They are never removed to make room.
    running: HashMap<String, Arc<StoredResponse>>,
    n_bytes: usize,
    /// Bytes reserved for what is not kept yet.
    n_under_way: Arc<AtomicUsize>,
}

/// Why a conversation does not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeError {
    Unknown,
    NoRoom,
}

impl ResponseStore {
    pub fn new(limits: StoreLimits) -> ResponseStore {
        ResponseStore { limits, n_bytes: Arc::default(), kept: Mutex::default() }
    }

    fn lock_tenants(&self) -> MutexGuard<'_, HashMap<TenantId, TenantStore>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves room for a text of this tenant, by forgetting older responses if needed. Returns None if there is none.
    pub fn reserve(&self, tenant: TenantId, n_text: usize) -> Option<RoomPermit> {
        let n = n_text.saturating_add(ENTRY_BYTES);
        let mut kept = self.lock_tenants();
        let under_way = kept.get(&tenant).map_or(0, TenantStore::n_under_way);
        if self.limits.responses_max == 0 || under_way.saturating_add(n) > self.limits.bytes_max / 2 {
            return None;
        }
        while self.n_bytes.load(Relaxed) + n > self.limits.bytes_max {
            let own = n + kept.get(&tenant).map_or(0, TenantStore::weight);
            let has_some = kept.iter_mut().filter(|(_, store)| !store.order.is_empty());
            let weight = |of: TenantId, store: &TenantStore| if of == tenant { own } else { store.weight() };
            let (of, fattest) = has_some.max_by_key(|(of, store)| weight(**of, store))?;
            if weight(*of, fattest) < own {
                return None;
            }
            fattest.forget_first();
        }
        // Other tasks only give bytes back meanwhile: taking bytes requires the lock.
        let under_way = kept.entry(tenant).or_default().n_under_way.clone();
        Some(RoomPermit::take(n, self.n_bytes.clone(), under_way))
    }

    /// Adds room to what is under way. Returns false if there is none.
    pub fn widen(&self, tenant: TenantId, room: &mut RoomPermit, n_text: usize) -> bool {
        self.reserve(tenant, n_text).map(|more| room.join(more)).is_some()
    }

    /// Keeps a response with room for its items. It is not kept if there is no room for its reply.
    pub fn keep(&self, tenant: TenantId, id: String, response: StoredResponse, mut room: RoomPermit) {
        if self.widen(tenant, &mut room, response.reply.len() + id.len()) {
            self.put(&mut self.lock_tenants(), tenant, id, response, room);
        }
    }

    fn put(
        &self,
        kept: &mut HashMap<TenantId, TenantStore>,
        tenant: TenantId,
        id: String,
        response: StoredResponse,
        mut room: RoomPermit,
    ) {
        let store = kept.entry(tenant).or_default();
        store.forget(&id);
        room.arrive();
        store.keep(id.clone(), room.n());
        store.responses.insert(id, Arc::new(StoredResponse { room: Some(room), ..response }));
        self.tidy(kept, Instant::now());
    }

    /// Shows a response that is not over. Returns false if as many run as may be stored, or half of them for one
    /// tenant.
    pub fn begin(&self, tenant: TenantId, id: &str, response: StoredResponse) -> bool {
        let mut kept = self.lock_tenants();
        let n_all: usize = kept.values().map(|store| store.running.len()).sum();
        let n_own = kept.get(&tenant).map_or(0, |store| store.running.len());
        let is_room = n_all < self.limits.responses_max && n_own < self.limits.responses_max.div_ceil(2);
        if is_room {
            kept.entry(tenant).or_default().running.insert(id.to_owned(), Arc::new(response));
        }
        is_room
    }

    /// Shows another reply of a response that is not over, of about the same length.
    pub fn show(&self, tenant: TenantId, id: &str, reply: Arc<str>) {
        let mut kept = self.lock_tenants();
        let running = kept.get_mut(&tenant).and_then(|store| store.running.get_mut(id));
        if let Some(response) = running {
            let StoredResponse { items, n_own, run, .. } = &**response;
            *response = Arc::new(StoredResponse::new(reply, items.clone(), *n_own, run.clone()));
        }
    }

    /// Keeps the reply of a response that was shown and is over, unless it was forgotten meanwhile. The room must be
    /// enough for it.
    pub fn finish(&self, tenant: TenantId, id: &str, reply: Arc<str>, room: RoomPermit) {
        let mut kept = self.lock_tenants();
        let Some(shown) = kept.get_mut(&tenant).and_then(|store| store.running.remove(id)) else { return };
        let response = StoredResponse::new(reply, shown.items.clone(), shown.n_own, shown.run.clone());
        self.put(&mut kept, tenant, id.to_owned(), response, room);
    }

    pub fn get(&self, tenant: TenantId, id: &str) -> Option<Arc<StoredResponse>> {
        let mut kept = self.lock_tenants();
        self.tidy(&mut kept, Instant::now());
        let store = kept.get(&tenant)?;
        store.responses.get(id).or_else(|| store.running.get(id)).cloned()
    }

    /// Keeps a new conversation. Returns false if there is no room for it.
    pub fn create_conversation(&self, tenant: TenantId, id: String, read: ReadConversation) -> bool {
        let n_items: usize = read.items.iter().map(|item| item.n_bytes()).sum();
        let Some(mut room) = self.reserve(tenant, read.metadata.len() + id.len() + n_items) else { return false };
        room.arrive();
        let mut kept = self.lock_tenants();
        let store = kept.entry(tenant).or_default();
        store.keep(id.clone(), room.n());
        store.conversations.insert(id, StoredConversation::new(read, room));
        self.tidy(&mut kept, Instant::now());
        true
    }

    pub fn conversation(&self, tenant: TenantId, id: &str) -> Option<ReadConversation> {
        let mut kept = self.lock_tenants();
        self.tidy(&mut kept, Instant::now());
        kept.get(&tenant)?.conversations.get(id).map(|conversation| conversation.read.clone())
    }

    /// Returns the items of a tenant's conversations that have these ids.
    pub fn find_items(&self, tenant: TenantId, ids: &HashSet<String>) -> Vec<Arc<StoredItem>> {
        let mut kept = self.lock_tenants();
        self.tidy(&mut kept, Instant::now());
        let conversations = kept.get(&tenant).into_iter().flat_map(|store| store.conversations.values());
        let items = conversations.flat_map(|conversation| &conversation.read.items);
        items.filter(|item| ids.contains(&item.id)).cloned().collect()
    }

    /// Returns the turn to continue a conversation: `Some(None)` while another response has it.
    pub fn take_turn(&self, tenant: TenantId, id: &str) -> Option<Option<ConversationTurn>> {
        let mut kept = self.lock_tenants();
        kept.get_mut(&tenant)?.conversations.get_mut(id).map(StoredConversation::take_turn)
    }

    /// Adds items to the end of a conversation: all of them, or none.
    pub fn append(&self, tenant: TenantId, id: &str, items: Vec<StoredItem>) -> Result<(), ChangeError> {
        let n_bytes = items.iter().map(StoredItem::n_bytes).sum();
        self.grow(tenant, id, n_bytes, |read| read.items.extend(items.into_iter().map(Arc::new)))
    }

    pub fn set_metadata(&self, tenant: TenantId, id: &str, metadata: Arc<str>) -> Result<(), ChangeError> {
        let n_bytes = metadata.len();
        let mut n_before = 0;
        self.grow(tenant, id, n_bytes, |read| n_before = std::mem::replace(&mut read.metadata, metadata).len())?;
        self.shrink(tenant, id, |_| Some(n_before)).map(drop).ok_or(ChangeError::Unknown)
    }

    /// Returns whether an item was there to be forgotten, or None without such a conversation.
    pub fn forget_item(&self, tenant: TenantId, id: &str, item: &str) -> Option<bool> {
        self.shrink(tenant, id, |of| of.remove(item).map(|gone| gone.n_bytes()))
    }

    fn grow(
        &self,
        tenant: TenantId,
        id: &str,
        n_bytes: usize,
        change: impl FnOnce(&mut ReadConversation),
    ) -> Result<(), ChangeError> {
        // The conversation itself is the last to be forgotten for its own growth.
        if !self.lock_tenants().get_mut(&tenant).is_some_and(|store| store.touch(id)) {
            return Err(ChangeError::Unknown);
        }
        let mut more = self.reserve(tenant, n_bytes).ok_or(ChangeError::NoRoom)?;
        let mut kept = self.lock_tenants();
        let store = kept.get_mut(&tenant).ok_or(ChangeError::NoRoom)?;
        let conversation = store.conversations.get_mut(id).ok_or(ChangeError::NoRoom)?;
        more.arrive();
        more.give(ENTRY_BYTES);
        store.n_bytes += more.n();
        conversation.room.join(more);
        change(&mut conversation.read);
        Ok(())
    }

    /// `change` returns how many bytes become free, if it changes anything.
    fn shrink(
        &self,
        tenant: TenantId,
        id: &str,
        change: impl FnOnce(&mut StoredConversation) -> Option<usize>,
    ) -> Option<bool> {
        let mut kept = self.lock_tenants();
        let store = kept.get_mut(&tenant)?;
        let conversation = store.conversations.get_mut(id)?;
        let n_free = change(conversation);
        store.n_bytes -= conversation.room.give(n_free.unwrap_or(0));
        Some(n_free.is_some())
    }

    /// Forgets a response or a conversation. Returns whether there was one.
    pub fn forget(&self, tenant: TenantId, id: &str) -> bool {
        let mut kept = self.lock_tenants();
        self.tidy(&mut kept, Instant::now());
        let is_gone = kept.get_mut(&tenant).is_some_and(|store| store.forget(id));
        kept.retain(|_, store| !store.is_empty());
        is_gone
    }

    /// Forgets entries that are too old, and those beyond the limits.
    fn tidy(&self, kept: &mut HashMap<TenantId, TenantStore>, now: Instant) {
        for store in kept.values_mut() {
            while store.order.front().is_some_and(|(at, _)| now.duration_since(*at) >= self.limits.age_max) {
                store.forget_first();
            }
        }
        while kept.values().map(|store| store.order.len()).sum::<usize>() > self.limits.responses_max {
            let Some(largest) = kept.values_mut().max_by_key(|store| store.order.len()) else { break };
            largest.forget_first();
        }
        kept.retain(|_, store| !store.is_empty());
    }
}

impl TenantStore {
    /// Counts something of this many bytes as the newest.
    fn keep(&mut self, id: String, n_bytes: usize) {
        self.n_bytes += n_bytes;
        self.order.push_back((Instant::now(), id));
    }

    /// Makes a conversation the newest. Returns false if there is none.
    fn touch(&mut self, id: &str) -> bool {
        let is_here = self.conversations.contains_key(id);
        if is_here {
            self.order.retain(|(_, of)| of != id);
            self.order.push_back((Instant::now(), id.to_owned()));
        }
        is_here
    }

    /// Forgets an entry. A response that still runs ends.
    fn forget(&mut self, id: &str) -> bool {
        if let Some(run) = self.running.remove(id).and_then(|shown| shown.run.clone()) {
            run.cancel();
            return true;
        }
        let is_here = self.remove(id);
        if is_here {
            self.order.retain(|(_, of)| of != id);
        }
        is_here
    }

    /// Forgets the oldest.
    fn forget_first(&mut self) {
        if let Some((_, id)) = self.order.pop_front() {
            self.remove(&id);
        }
    }

    fn remove(&mut self, id: &str) -> bool {
        let response = self.responses.remove(id).map(|gone| gone.room.as_ref().map_or(0, RoomPermit::n));
        let gone = response.or_else(|| self.conversations.remove(id).map(|gone| gone.room.n()));
        self.n_bytes -= gone.unwrap_or(0);
        gone.is_some()
    }

    fn n_under_way(&self) -> usize {
        self.n_under_way.load(Relaxed)
    }

    /// Returns the bytes of the room that the tenant uses.
    fn weight(&self) -> usize {
        self.n_bytes + self.n_under_way()
    }

    fn is_empty(&self) -> bool {
        self.order.is_empty() && self.running.is_empty() && self.n_under_way() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: TenantId = TenantId(1);
    const BOB: TenantId = TenantId(2);

    fn store(responses_max: usize, bytes_max: usize) -> ResponseStore {
        ResponseStore::new(StoreLimits { responses_max, bytes_max, age_max: Duration::from_secs(60) })
    }

    fn keep(store: &ResponseStore, tenant: TenantId, id: &str, n: usize) -> bool {
        let Some(room) = store.reserve(tenant, n) else { return false };
        store.keep(tenant, id.into(), StoredResponse::new("".into(), "x".repeat(n).into(), 1, None), room);
        store.get(tenant, id).is_some()
    }

    fn has(store: &ResponseStore, tenant: TenantId, ids: &[&str]) -> Vec<bool> {
        ids.iter().map(|id| store.get(tenant, id).is_some()).collect()
    }

    #[test]
    fn tenant_with_most_bytes_loses_its_oldest() {
        let store = store(100, 10 * 2 * ENTRY_BYTES + 100);
        assert!(keep(&store, BOB, "b", 1));
        for i in 0..30 {
            assert!(keep(&store, ALICE, &format!("a{i}"), 1));
            assert!(store.n_bytes.load(Relaxed) <= store.limits.bytes_max);
        }
        assert_eq!(has(&store, BOB, &["b"]), [true]);
        assert_eq!(has(&store, ALICE, &["a0", "a20", "a22", "a29"]), [false, false, true, true]);
        // A tenant can neither read nor forget an entry of another.
        assert_eq!(has(&store, BOB, &["a29"]), [false]);
        assert!(!store.forget(BOB, "a29") && store.forget(ALICE, "a29") && !store.forget(ALICE, "a29"));
        // A response larger than all room is not kept, and displaces no other.
        assert!(!keep(&store, ALICE, "large", store.limits.bytes_max));
        assert_eq!(has(&store, ALICE, &["a28", "large"]), [true, false]);
    }

    #[test]
    fn reserved_room_counts_for_its_tenant() {
        let store = store(100, 20 * ENTRY_BYTES);
        assert!(keep(&store, BOB, "b1", 0) && keep(&store, BOB, "b2", 0));
        // Alice sends many requests at once, and none has ended: Bob's entries stay, and half of the room is left to
        // others.
        let reserved: Vec<_> = (0..100).filter_map(|_| store.reserve(ALICE, 0)).collect();
        assert_eq!((reserved.len(), has(&store, BOB, &["b1", "b2"])), (10, vec![true, true]));
        assert!(keep(&store, BOB, "b3", 0) && keep(&store, BOB, "b4", 0));
        assert_eq!(has(&store, BOB, &["b1", "b2", "b3", "b4"]), [true; 4]);
        drop(reserved);
        assert_eq!(
            (store.lock_tenants()[&BOB].n_under_way(), store.n_bytes.load(Relaxed)),
            (0, 4 * (2 * ENTRY_BYTES + 2))
        );
        assert!(keep(&store, ALICE, "a1", 0));
    }

    #[test]
    fn room_is_free_again() {
        let store = store(2, 1 << 20);
        for i in 0..5 {
            assert!(keep(&store, ALICE, &format!("a{i}"), 1000));
        }
        // The same id again, as of a stream that was resumed, is one response.
        assert!(keep(&store, ALICE, "a4", 1000));
        assert_eq!(has(&store, ALICE, &["a2", "a3", "a4"]), [false, true, true]);
        let read = store.get(ALICE, "a3").unwrap();
        assert!(store.forget(ALICE, "a3") && store.forget(ALICE, "a4"));
        assert!(store.n_bytes.load(Relaxed) > 1000 && store.lock_tenants().is_empty());
        drop(read);
        assert_eq!(store.n_bytes.load(Relaxed), 0);
        assert!(!keep(&self::store(0, 1 << 20), ALICE, "a", 1));
    }

    #[tokio::test(start_paused = true)]
    async fn responses_are_forgotten_in_time() {
        let store = store(10, 1 << 20);
        assert!(keep(&store, ALICE, "a", 1));
        tokio::time::advance(Duration::from_secs(40)).await;
        assert!(keep(&store, ALICE, "b", 1));
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(has(&store, ALICE, &["a", "b"]), [false, true]);
        tokio::time::advance(Duration::from_secs(40)).await;
        assert_eq!((has(&store, ALICE, &["b"]), store.n_bytes.load(Relaxed)), (vec![false], 0));
    }
}
