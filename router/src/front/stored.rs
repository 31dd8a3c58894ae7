//! Responses that were kept so that a later one can go on with them: in memory, within a room of a fixed size, for a
//! time, and for the tenant that asked for them. Knows no JSON and no page.
//!
//! Where the room is full, the tenant that has the most in it loses its oldest response: nobody can take another's
//! place by asking more. Room is reserved for what was asked before the answer comes, so that requests under way are
//! bounded by it too: they count for their tenant like what is kept, and one tenant's have half of the room at most.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use types::TenantId;

/// What a response costs beside its texts, in bytes.
const ENTRY_BYTES: usize = 512;

/// How much is kept, and for how long. With no responses nothing is.
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

/// A response as it was told, and what it answered.
pub struct StoredResponse {
    /// The reply's JSON.
    pub reply: String,
    /// The items that it answered, as a JSON list: those of the responses before it, then its own.
    pub items: String,
    /// How many of them are its own.
    pub n_own: usize,
    room: RoomPermit,
}

pub struct ResponseStore {
    limits: StoreLimits,
    n_bytes: Arc<AtomicUsize>,
    kept: Mutex<HashMap<TenantId, Shelf>>,
}

/// The responses of one tenant.
#[derive(Default)]
struct Shelf {
    responses: HashMap<String, Arc<StoredResponse>>,
    /// Their ids, those that came first at the front.
    order: VecDeque<(Instant, String)>,
    n_bytes: usize,
    /// Bytes reserved for responses that are not kept yet.
    n_under_way: Arc<AtomicUsize>,
}

/// Bytes of the room. They are free again when it is dropped, which may be while somebody still reads.
pub struct RoomPermit {
    n: usize,
    of: Arc<AtomicUsize>,
    /// Counts them for their tenant until they are kept.
    under_way: Option<Arc<AtomicUsize>>,
}

impl RoomPermit {
    /// The response is kept: from now on its shelf counts these bytes.
    fn arrive(&mut self) {
        if let Some(under_way) = self.under_way.take() {
            under_way.fetch_sub(self.n, Relaxed);
        }
    }

    fn join(&mut self, mut other: RoomPermit) {
        self.n += std::mem::take(&mut other.n);
        other.under_way = None;
    }
}

impl Drop for RoomPermit {
    fn drop(&mut self) {
        self.arrive();
        self.of.fetch_sub(self.n, Relaxed);
    }
}

impl ResponseStore {
    pub fn new(limits: StoreLimits) -> ResponseStore {
        ResponseStore { limits, n_bytes: Arc::default(), kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<TenantId, Shelf>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for a text of this tenant, made by forgetting older responses. None if there is none.
    pub fn reserve(&self, tenant: TenantId, n_text: usize) -> Option<RoomPermit> {
        let n = n_text.saturating_add(ENTRY_BYTES);
        let mut kept = self.kept();
        let under_way = kept.get(&tenant).map_or(0, Shelf::n_under_way);
        if self.limits.responses_max == 0 || under_way.saturating_add(n) > self.limits.bytes_max / 2 {
            return None;
        }
        while self.n_bytes.load(Relaxed) + n > self.limits.bytes_max {
            let own = n + kept.get(&tenant).map_or(0, Shelf::weight);
            let has_some = kept.iter_mut().filter(|(_, shelf)| !shelf.order.is_empty());
            let weight = |of: TenantId, shelf: &Shelf| if of == tenant { own } else { shelf.weight() };
            let (of, fattest) = has_some.max_by_key(|(of, shelf)| weight(**of, shelf))?;
            if weight(*of, fattest) < own {
                return None;
            }
            fattest.forget_first();
        }
        // Others only give bytes back meanwhile: whoever takes some holds the lock.
        self.n_bytes.fetch_add(n, Relaxed);
        let under_way = kept.entry(tenant).or_default().n_under_way.clone();
        under_way.fetch_add(n, Relaxed);
        Some(RoomPermit { n, of: self.n_bytes.clone(), under_way: Some(under_way) })
    }

    /// Keeps a response whose items have their room. It is not kept if there is none for its reply.
    pub fn keep(&self, tenant: TenantId, id: String, told: (String, String, usize), mut room: RoomPermit) {
        let (reply, items, n_own) = told;
        let Some(more) = self.reserve(tenant, reply.len() + id.len()) else { return };
        room.join(more);
        let now = Instant::now();
        let mut kept = self.kept();
        let shelf = kept.entry(tenant).or_default();
        shelf.forget(&id);
        room.arrive();
        shelf.n_bytes += room.n;
        shelf.order.push_back((now, id.clone()));
        shelf.responses.insert(id, Arc::new(StoredResponse { reply, items, n_own, room }));
        self.tidy(&mut kept, now);
    }

    pub fn get(&self, tenant: TenantId, id: &str) -> Option<Arc<StoredResponse>> {
        let mut kept = self.kept();
        self.tidy(&mut kept, Instant::now());
        kept.get(&tenant)?.responses.get(id).cloned()
    }

    /// Whether there was one to forget.
    pub fn forget(&self, tenant: TenantId, id: &str) -> bool {
        let mut kept = self.kept();
        self.tidy(&mut kept, Instant::now());
        let is_gone = kept.get_mut(&tenant).is_some_and(|shelf| shelf.forget(id));
        kept.retain(|_, shelf| !shelf.is_empty());
        is_gone
    }

    /// Forgets what is too old, and what is too much.
    fn tidy(&self, kept: &mut HashMap<TenantId, Shelf>, now: Instant) {
        for shelf in kept.values_mut() {
            while shelf.order.front().is_some_and(|(at, _)| now.duration_since(*at) >= self.limits.age_max) {
                shelf.forget_first();
            }
        }
        while kept.values().map(|shelf| shelf.responses.len()).sum::<usize>() > self.limits.responses_max {
            let Some(largest) = kept.values_mut().max_by_key(|shelf| shelf.responses.len()) else { break };
            largest.forget_first();
        }
        kept.retain(|_, shelf| !shelf.is_empty());
    }
}

impl Shelf {
    fn forget(&mut self, id: &str) -> bool {
        let is_here = self.remove(id);
        if is_here {
            self.order.retain(|(_, of)| of != id);
        }
        is_here
    }

    /// Forgets the oldest response.
    fn forget_first(&mut self) {
        if let Some((_, id)) = self.order.pop_front() {
            self.remove(&id);
        }
    }

    fn remove(&mut self, id: &str) -> bool {
        let gone = self.responses.remove(id);
        self.n_bytes -= gone.as_ref().map_or(0, |gone| gone.room.n);
        gone.is_some()
    }

    fn n_under_way(&self) -> usize {
        self.n_under_way.load(Relaxed)
    }

    /// All that the tenant has of the room.
    fn weight(&self) -> usize {
        self.n_bytes + self.n_under_way()
    }

    fn is_empty(&self) -> bool {
        self.responses.is_empty() && self.n_under_way() == 0
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
        store.keep(tenant, id.into(), (String::new(), "x".repeat(n), 1), room);
        store.get(tenant, id).is_some()
    }

    fn has(store: &ResponseStore, tenant: TenantId, ids: &[&str]) -> Vec<bool> {
        ids.iter().map(|id| store.get(tenant, id).is_some()).collect()
    }

    #[test]
    fn who_has_the_most_loses_its_oldest() {
        let store = store(100, 10 * 2 * ENTRY_BYTES + 100);
        assert!(keep(&store, BOB, "b", 1));
        for i in 0..30 {
            assert!(keep(&store, ALICE, &format!("a{i}"), 1));
            assert!(store.n_bytes.load(Relaxed) <= store.limits.bytes_max);
        }
        assert_eq!(has(&store, BOB, &["b"]), [true]);
        assert_eq!(has(&store, ALICE, &["a0", "a20", "a22", "a29"]), [false, false, true, true]);
        // Nobody reads another's, and nobody forgets it.
        assert_eq!(has(&store, BOB, &["a29"]), [false]);
        assert!(!store.forget(BOB, "a29") && store.forget(ALICE, "a29") && !store.forget(ALICE, "a29"));
        // What is larger than all room is not kept, and costs nobody anything.
        assert!(!keep(&store, ALICE, "large", store.limits.bytes_max));
        assert_eq!(has(&store, ALICE, &["a28", "large"]), [true, false]);
    }

    #[test]
    fn what_is_under_way_counts_for_who_asked_it() {
        let store = store(100, 20 * ENTRY_BYTES);
        assert!(keep(&store, BOB, "b1", 0) && keep(&store, BOB, "b2", 0));
        // Alice asks much at once, and none of it has ended: what Bob has stays, and half of the room is others'.
        let asked: Vec<_> = (0..100).filter_map(|_| store.reserve(ALICE, 0)).collect();
        assert_eq!((asked.len(), has(&store, BOB, &["b1", "b2"])), (10, vec![true, true]));
        assert!(keep(&store, BOB, "b3", 0) && keep(&store, BOB, "b4", 0));
        assert_eq!(has(&store, BOB, &["b1", "b2", "b3", "b4"]), [true; 4]);
        drop(asked);
        assert_eq!((store.kept()[&BOB].n_under_way(), store.n_bytes.load(Relaxed)), (0, 4 * (2 * ENTRY_BYTES + 2)));
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
        assert!(store.n_bytes.load(Relaxed) > 1000 && store.kept().is_empty());
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
