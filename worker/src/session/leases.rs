//! Leases of assignments on the rank's thread. A new lease ends the one before it, with the wait that it is in. Has no
//! knowledge of the thread's work.

use collective::{AbortHandle, CancelFlag};
use std::sync::{Mutex, MutexGuard, PoisonError};
use types::Rank;

/// One assignment's lease on the thread, and the flag that ends it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ThreadLease(CancelFlag);

/// Lets a session free the thread from a finished assignment, by ending its work and its waits.
#[derive(Default)]
pub(crate) struct ThreadLeases(Mutex<LatestLease>);

#[derive(Default)]
struct LatestLease {
    lease: ThreadLease,
    running: Option<AbortHandle>,
}

impl ThreadLeases {
    /// Ends every lease before this one.
    pub fn next(&self) -> ThreadLease {
        let mut latest = self.latest();
        latest.lease.0.cancel();
        latest.lease = ThreadLease::default();
        if let Some(handle) = latest.running.take() {
            handle.abort();
        }
        latest.lease.clone()
    }

    /// Returns the rank for which the thread waits at this moment, within a step.
    pub fn waits_for(&self) -> Option<Rank> {
        self.latest().running.as_ref()?.waits_for()
    }

    /// Returns false if the lease has ended: then no wait begins.
    pub fn register_abort(&self, lease: &ThreadLease, handle: Option<AbortHandle>) -> bool {
        let mut latest = self.latest();
        let is_on = !lease.is_over();
        if is_on {
            latest.running = handle;
        }
        is_on
    }

    fn latest(&self) -> MutexGuard<'_, LatestLease> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ThreadLease {
    pub fn is_over(&self) -> bool {
        self.0.is_cancelled()
    }

    pub fn cancel_flag(&self) -> &CancelFlag {
        &self.0
    }
}
