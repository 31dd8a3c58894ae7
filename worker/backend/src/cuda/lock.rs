//! A lock that an aborted operation may have left.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What an aborted operation left in it, the next overwrites.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
