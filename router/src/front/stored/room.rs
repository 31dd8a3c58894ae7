//! Bytes of the room in which the store keeps things.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of the room. They are free again when it is dropped, which may be while a reader still uses the text.
pub struct RoomPermit {
    n: usize,
    of: Arc<AtomicUsize>,
    /// Counts them for their tenant until they are kept.
    under_way: Option<Arc<AtomicUsize>>,
}

impl RoomPermit {
    /// Takes `n` bytes. The caller has checked that they are free.
    pub(super) fn take(n: usize, of: Arc<AtomicUsize>, under_way: Arc<AtomicUsize>) -> RoomPermit {
        of.fetch_add(n, Relaxed);
        under_way.fetch_add(n, Relaxed);
        RoomPermit { n, of, under_way: Some(under_way) }
    }

    pub(super) fn n(&self) -> usize {
        self.n
    }

    /// Marks the bytes as kept: from now on the tenant's shelf counts them.
    pub(super) fn arrive(&mut self) {
        if let Some(under_way) = self.under_way.take() {
            under_way.fetch_sub(self.n, Relaxed);
        }
    }

    /// Joins two permits. Both are under way, or both have arrived.
    pub(super) fn join(&mut self, mut other: RoomPermit) {
        self.n += std::mem::take(&mut other.n);
        other.under_way = None;
    }

    /// Gives back some bytes of an entry that has arrived.
    pub(super) fn give(&mut self, n: usize) -> usize {
        let n = n.min(self.n);
        self.n -= n;
        self.of.fetch_sub(n, Relaxed);
        n
    }
}

impl Drop for RoomPermit {
    fn drop(&mut self) {
        self.arrive();
        self.of.fetch_sub(self.n, Relaxed);
    }
}
